"""Faults in the code of the runtime, each at one module: a sum that is skipped, a slice of the next rank.

The runtime's code makes objects for the modules of a plan: steps, layers, gates, overrides. ``watching``
calls a function with each of them as it is made, with the FQN of its module. A fault changes the objects of
one kind at one module, and nothing else.

The name of this file begins like those of the packages, so that operators of a fault count as the runtime's
own when a rank is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor, concatenate, take
from shardconv_runtime.comm import steps
from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import local_shape
from shardconv_runtime.parallel import build, local_modules, row_ids
from shardconv_runtime.parallel.fused_products import fused_products
from shardconv_runtime.parallel.layers import finish
from shardconv_runtime.parallel.sharded_norms import ShardedNorm
from shardconv_runtime.training import prepare
from torch import Tensor

from shardconv.converted import numerics
from shardconv.simulation import random_weights
from shardconv.writing import writer

OUTPUTS, GRADIENTS, SEQUENCE, PACKED = "outputs", "gradients", "sequence", "packed"
"""What shows a fault: any call, a backward pass, the sequence-parallel form, packed weights."""

Seen = Callable[[str, str, Any], None]
"""Is called with the kind of an object, the FQN of its module and the object."""


@dataclass(frozen=True)
class Fault:
    """A change of the code that makes one kind of object."""

    name: str
    room: str
    """The part of the runtime that it is in, for the table."""
    kind: str
    """The kind of object: the name of its class, or of what is watched."""
    change: Callable[[Any], None]
    where: str = ""
    """A pattern of the FQN; the first module that matches is the faulty one."""
    shown_by: str = OUTPUTS
    is_written: bool = False
    """Whether it is in the files that a conversion writes."""
    fits: Callable[[Any], bool] = lambda made: True
    """Whether an object can show the fault at all."""


@dataclass
class Overrides:
    """The overrides and flags of one module, before they are applied."""

    overrides: tuple[Any, ...]
    flags: tuple[str, ...] = ()


@dataclass
class Part:
    """A part of a parameter, before it is taken."""

    rank: int
    tp: int
    dim: int
    """The sharded dim; -1 if there is none."""
    is_even: bool
    """Whether all ranks have parts of one shape."""
    is_partial: bool
    is_held_by_all: bool = False
    """Whether all ranks hold the values of a parameter that is partial."""
    offset: int = 0
    """How many positions late the part begins."""


@dataclass
class PackedPart:
    """The stored tensors of a rank's part of a packed weight, before they are dequantized."""

    tensors: dict[str, Tensor]


# Watching --------------------------------------------------------------------------------------------

STEPS = ("Reduce", "Gather", "Slice", "ReduceScatter", "KeepOnFirst", "GradReduce", "GradDivide")


@contextlib.contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """While active, ``seen`` is called with each object that is made for a module."""
    around: list[str] = []

    def of_module(kind: str, made: Any) -> None:
        if around:
            seen(kind, around[-1], made)

    def initialized(kind: Any) -> Callable[..., None]:
        original = kind.__init__

        @functools.wraps(original)
        def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            of_module(kind.__name__, self)

        return initialize

    class At(local_modules._at):
        def __enter__(self) -> None:
            around.append(self._fqn)

        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            around.pop()
            super().__exit__(kind, error, trace)

    def converted(original: Any, target: Any) -> Any:
        module = original(target)
        is_norm = isinstance(module, ShardedNorm)  # of a class for the norm that it replaces
        of_module(ShardedNorm.__name__ if is_norm else type(module).__name__, module)
        return module

    def overridden(original: Any, module: Any, overrides: Any, rank: int) -> None:
        call = Overrides(overrides)
        of_module("Overrides", call)
        original(module, call.overrides, rank)

    def flagged(original: Any, module: Any, flags: Any) -> None:
        call = Overrides((), flags)
        of_module("Flags", call)
        original(module, call.flags)

    def fused(original: Any, model: Any, groups: Any) -> None:
        original(model, groups)
        for group, product in zip(groups, fused_products(model), strict=True):
            seen("FusedProduct", group[0], product)

    def gated(original: Any, owner: Any, name: str, fqn: str, gate: Any) -> Any:
        seen("GradientGate", fqn.rpartition(".")[0], gate)
        return original(owner, name, fqn, gate)

    def taken(original: Any, entry: Any, tensor: Any, mesh: Any, rank: int) -> Any:
        sharded = [index for index, dim in enumerate(entry.dims) if axes_of(dim)]
        tp = torch.Size(mesh).numel()
        is_even = len({local_shape(entry, mesh, each) for each in range(tp)}) == 1
        part = Part(rank, tp, sharded[0] if sharded else -1, is_even, bool(entry.partial))
        for name in expand_all(entry.names):
            seen("Weight", name.rpartition(".")[0], part)
        if part.is_held_by_all:
            entry = dataclasses.replace(entry, partial=())
        return original(entry, rolled(tensor, part.offset, part.dim), mesh, part.rank)

    checked: list[str] = []

    def named(original: Any, packing: Any, tensors: Any, held: Any, name: str) -> None:
        checked[:] = [name]
        original(packing, tensors, held, name)

    def dequantized(original: Any, packing: Any, tensors: Any, held: Any, dtype: Any) -> Any:
        part = PackedPart(dict(tensors))
        if held.local_shape != held.shape:
            seen("PackedWeight", checked[0].rpartition(".")[0], part)
        return original(packing, part.tensors, held, dtype)

    def around_function(place: Any, name: str, function: Callable[..., Any]) -> Any:
        return mock.patch.object(place, name, functools.partial(function, getattr(place, name)))

    with contextlib.ExitStack() as stack:
        for kind in (*(getattr(steps, name) for name in STEPS), row_ids.RowIds):
            if "__init__" in vars(kind):
                stack.enter_context(mock.patch.object(kind, "__init__", initialized(kind)))
        # Gather, Slice and ReduceScatter share the constructor of their base class.
        base = steps.Resharding.__init__

        def resharding(self: Any, *args: Any, **kwargs: Any) -> None:
            base(self, *args, **kwargs)
            of_module(type(self).__name__, self)

        stack.enter_context(mock.patch.object(steps.Resharding, "__init__", resharding))
        stack.enter_context(mock.patch.object(local_modules, "_at", At))
        for place, name, function in (
            (local_modules, "_convert", converted),
            (local_modules, "apply_overrides", overridden),
            (local_modules, "raise_flags", flagged),
            (build, "fuse", fused),
            (prepare, "Gated", gated),
            (random_weights, "local_tensor", taken),
            (writer, "shard", taken),
            (numerics, "check_values", named),
            (numerics, "dequantize", dequantized),
        ):
            stack.enter_context(around_function(place, name, function))
        yield


def rolled(tensor: Any, offset: int, dim: int) -> Any:
    """A tensor in memory or in files whose first positions of a dim are its last ones."""
    if not offset:
        return tensor
    if not isinstance(tensor, LazyTensor):
        return tensor.roll(-offset, dim)
    size = tensor.shape[dim]
    return concatenate([take(tensor, dim, ((offset, size),)), take(tensor, dim, ((0, offset),))], dim)


@contextlib.contextmanager
def faulty(fault: Fault, fqn: str) -> Iterator[None]:
    """While active, the code has a fault at one module."""

    def change(kind: str, name: str, made: Any) -> None:
        if (kind, name) == (fault.kind, fqn) and fault.fits(made):
            fault.change(made)

    with watching(change):
        yield


# Changes ---------------------------------------------------------------------------------------------


def setting(**attributes: Any) -> Callable[[Any], None]:
    """Set attributes of the object."""

    def change(made: Any) -> None:
        for name, value in attributes.items():
            setattr(made, name, value)

    return change


def calling(name: str, function: Callable[..., Any]) -> Callable[[Any], None]:
    """Replace a method of the object; the function is given the original, and the arguments."""

    def change(made: Any) -> None:
        setattr(made, name, functools.partial(function, getattr(made, name)))

    return change


def of_parts(name: str, function: Callable[..., Any]) -> Callable[[Any], None]:
    """The same, of the parts of a step that reshards."""

    def change(step: Any) -> None:
        if step.axes:
            calling(name, function)(step.parts)

    return change


def result(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any], None]:
    """Change the result of a ``Reduce``, by whichever method it is called."""

    def change(step: Any) -> None:
        for name in ("_forward", "overwriting"):
            original = getattr(step, name)
            setattr(step, name, lambda x, original=original: function(step, original(x.clone())))

    return change


def _next_part(step: Any) -> None:
    """A slice that takes the part of the next rank."""
    parts = step.parts
    index = step.comm.group(step.axes).index(step.comm.rank)
    if hasattr(parts, "_members"):
        parts._select = parts._members[(index + 1) % len(parts._members)]
    else:
        parts._index = (parts._index + 1) % parts._count


def _bias_on_each_rank(layer: Any) -> None:
    def forward(input: Tensor) -> Tensor:
        for step in layer.inputs:
            input = step(input)
        y = finish(layer.reductions, F.linear(input, layer.weight, layer.bias))
        return finish(layer.outputs, y)

    layer.forward = forward


def _rows(function: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Any], None]:
    """Change local ids and the mask of those that are out of the shard."""

    def change(embedding: Any) -> None:
        rows = embedding.rows

        class Changed:
            num_rows, num_global_rows = rows.num_rows, rows.num_global_rows

            def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
                return function(rows, *rows(ids))

        embedding.rows = Changed()

    return change


def _one_row_late(rows: Any, local: Tensor, out_of_shard: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(out_of_shard, local, (local + 1) % rows.num_rows), out_of_shard


def _override(function: Callable[[Any], tuple[int, ...]]) -> Callable[[Any], None]:
    def change(call: Any) -> None:
        call.overrides = tuple(
            dataclasses.replace(override, local=function(override)) for override in call.overrides
        )

    return change


def _next_rank(part: Any) -> None:
    part.rank = (part.rank + 1) % part.tp


def _has_equal_parts(product: Any) -> bool:
    return len(set(product.sizes)) == 1


def _is_partial_over(name: str) -> Callable[[Any], bool]:
    return lambda step: bool(step.axes) and bool(getattr(step, name))


def _is_uneven(step: Any) -> bool:
    return (
        bool(step.axes)
        and hasattr(step.parts, "_local")
        and step.parts._size < step.parts._largest * len(step.parts._members)
        and not step.is_partially_sharded
    )


def _is_even(step: Any) -> bool:
    return bool(step.axes) and not _is_uneven(step) and not step.is_partially_sharded


def _has_axes(step: Any) -> bool:
    return bool(step.axes)


def _has_bias(layer: Any) -> bool:
    return layer.bias is not None


def _flipped(tensors: dict[str, Tensor], is_factor: bool) -> dict[str, Tensor]:
    return {n: t.flip(0) if (n != "*") == is_factor and t.dim() else t for n, t in tensors.items()}


EMBEDDING = r"embed|wte|shared"
ROW = r"(o_proj|\.o|dense|down_proj|c_proj)$"

FAULTS: tuple[Fault, ...] = (
    # Steps and collectives
    Fault("sum skipped after a row-parallel layer", "steps", "Reduce", setting(axes=()), ROW, fits=_has_axes),
    Fault("sum skipped after an embedding", "steps", "Reduce", setting(axes=()), EMBEDDING, fits=_has_axes),
    Fault(
        "sum skipped at a block",
        "steps",
        "Reduce",
        setting(axes=()),
        r"(layers|h|block)\.\d+$|drop$",
        fits=_has_axes,
    ),
    Fault(
        "sum has this rank's term twice",
        "collectives",
        "Reduce",
        result(lambda step, y: y * (1 + 1 / (2 + step.comm.rank))),
        ROW,
        fits=_has_axes,
    ),
    Fault(
        "sum is an average",
        "collectives",
        "Reduce",
        result(lambda step, y: y / step.comm.num_ranks(step.axes)),
        r"mlp|wo$|experts",
        fits=_has_axes,
    ),
    Fault(
        "gather joins in reverse order",
        "dim_parts",
        "Gather",
        of_parts("joined", lambda f, members, dim: f(members[::-1], dim)),
        fits=_has_axes,
    ),
    Fault(
        "gather takes the first rank's part for all",
        "dim_parts",
        "Gather",
        of_parts("joined", lambda f, members, dim: f((members[0],) * len(members), dim)),
        r"lm_head",
        fits=_has_axes,
    ),
    Fault(
        "gather pads in front",
        "dim_parts",
        "Gather",
        of_parts("padded", lambda f, x, dim: f(x, dim).roll(f(x, dim).shape[dim] - x.shape[dim], dim)),
        fits=_is_uneven,
    ),
    Fault("slice of the next rank", "dim_parts", "Slice", _next_part, fits=_is_even),
    Fault(
        "slice begins one position late",
        "dim_parts",
        "Slice",
        of_parts("own", lambda f, x, dim: f(x.roll(-1, dim), dim)),
        fits=_has_axes,
    ),
    Fault(
        "reduce_scatter is scaled",
        "steps",
        "ReduceScatter",
        calling("forward", lambda f, x: f(x) * 2),
        shown_by=SEQUENCE,
        fits=_has_axes,
    ),
    Fault(
        "reduce_scatter gives the next rank's part",
        "dim_parts",
        "ReduceScatter",
        of_parts("separated", lambda f, x, dim: [*f(x, dim)[1:], f(x, dim)[0]]),
        shown_by=SEQUENCE,
        fits=_has_axes,
    ),
    Fault(
        "gather along the sequence in reverse order",
        "dim_parts",
        "Gather",
        of_parts("joined", lambda f, members, dim: f(members[::-1], dim)),
        r"self_attn|mlp|experts",
        shown_by=SEQUENCE,
        fits=_has_axes,
    ),
    # Parallel layers
    Fault(
        "row-parallel bias on every rank",
        "layers",
        "RowParallelLinear",
        _bias_on_each_rank,
        fits=lambda layer: _has_bias(layer) and bool(layer.reductions),
    ),
    Fault(
        "row-parallel bias left out",
        "layers",
        "RowParallelLinear",
        lambda layer: setattr(
            layer,
            "forward",
            lambda x: finish(
                (*layer.reductions, *layer.outputs),
                F.linear(functools.reduce(lambda y, step: step(y), layer.inputs, x), layer.weight),
            ),
        ),
        ROW,
        fits=_has_bias,
    ),
    Fault(
        "column-parallel layer without its steps",
        "layers",
        "ColumnParallelLinear",
        setting(outputs=()),
        r"lm_head|v_proj",
        fits=lambda layer: bool(layer.outputs),
    ),
    Fault(
        "fused layers get each other's part",
        "fused_products",
        "FusedProduct",
        calling("product_of", lambda f, x: None if f(x) is None else f(x).roll(f(x).shape[-1] // 2, -1)),
        fits=_has_equal_parts,
    ),
    Fault(
        "fused layers are given rows one late",
        "fused_products",
        "FusedProduct",
        calling("product_of", lambda f, x: None if f(x) is None else f(x).roll(-1, -1)),
    ),
    # Norms
    Fault(
        "norm statistic is not summed", "norms", "ShardedNorm", lambda norm: setattr(norm.reduce, "axes", ())
    ),
    Fault(
        "norm divides by another size",
        "norms",
        "ShardedNorm",
        lambda norm: setattr(norm, "info", dataclasses.replace(norm.info, size=norm.info.size + 1)),
    ),
    # Embeddings
    Fault(
        "rows out of the shard are not zeroed",
        "embeddings",
        "VocabParallelEmbedding",
        _rows(lambda rows, local, out: (local, torch.zeros_like(out))),
    ),
    Fault("local ids are off by one", "embeddings", "VocabParallelEmbedding", _rows(_one_row_late)),
    Fault(
        "first row counts as out of the shard",
        "embeddings",
        "VocabParallelEmbedding",
        _rows(lambda rows, local, out: (local, out | (local == 0))),
    ),
    Fault(
        "ids of experts are off by one",
        "row_ids",
        "RowIds",
        lambda rows: setattr(rows, "_range", tuple(at + 1 for at in rows._range)),
        r"experts",
    ),
    # Overrides
    Fault("override is not applied", "overrides", "Overrides", setting(overrides=())),
    Fault(
        "override is one too many",
        "overrides",
        "Overrides",
        _override(lambda override: tuple(value + 1 for value in override.local)),
    ),
    Fault(
        "override of the next rank",
        "overrides",
        "Overrides",
        _override(lambda override: (*override.local[1:], override.local[0])),
        fits=lambda call: any(len(set(override.local)) > 1 for override in call.overrides),
    ),
    Fault("flag is not set", "overrides", "Flags", setting(flags=()), fits=lambda call: bool(call.flags)),
    # Slices of weights
    Fault(
        "weight of the next rank",
        "slices",
        "Weight",
        _next_rank,
        r"(q_proj|\.q|c_attn|gate_proj|dense_h_to_4h)$",
        is_written=True,
        fits=lambda part: part.dim >= 0 and part.is_even,
    ),
    Fault(
        "weight of the next rank in a row-parallel layer",
        "slices",
        "Weight",
        _next_rank,
        r"(down_proj|wo|c_proj|dense_4h_to_h)$",
        is_written=True,
        fits=lambda part: part.dim >= 0 and part.is_even,
    ),
    Fault(
        "weight begins one row late",
        "slices",
        "Weight",
        setting(offset=1),
        r"(k_proj|\.k|c_fc|query_key_value|lm_head)$",
        is_written=True,
        fits=lambda part: part.dim >= 0,
    ),
    Fault(
        "partial bias on every rank",
        "slices",
        "Weight",
        setting(is_held_by_all=True),
        is_written=True,
        fits=lambda part: part.is_partial,
    ),
    # Gradients
    Fault(
        "gate is left out",
        "gradients",
        "GradientGate",
        setting(_sums=()),
        shown_by=GRADIENTS,
        fits=lambda gate: bool(gate._sums),
    ),
    Fault(
        "gate adds its own gradient again",
        "gradients",
        "GradientGate",
        calling("_backward", lambda f, g: f(g) + g),
        shown_by=GRADIENTS,
        fits=lambda gate: bool(gate._sums),
    ),
    Fault(
        "gradient of an input is not summed",
        "gradients",
        "GradReduce",
        setting(axes=()),
        r"mlp|attn|Attention|attention|wi",
        shown_by=GRADIENTS,
        fits=_has_axes,
    ),
    Fault(
        "gradient of the head's input is not summed",
        "gradients",
        "GradReduce",
        setting(axes=()),
        r"lm_head",
        shown_by=GRADIENTS,
        fits=_has_axes,
    ),
    Fault(
        "adjoint of a sum does not sum",
        "gradients",
        "Reduce",
        setting(_back=()),
        shown_by=GRADIENTS,
        fits=_is_partial_over("_back"),
    ),
    Fault(
        "adjoint of a gather does not sum",
        "gradients",
        "Gather",
        lambda step: setattr(step, "backward", step._own),
        shown_by=GRADIENTS,
        fits=_is_partial_over("_partial"),
    ),
    Fault(
        "adjoint of a slice does not gather",
        "gradients",
        "Slice",
        lambda step: setattr(step, "backward", lambda g: step.parts.own_in_zeros(g, step.dim % g.dim())),
        shown_by=GRADIENTS,
        fits=lambda step: bool(step.axes) and not step._partial,
    ),
    Fault(
        "adjoint of a norm's statistic does not sum",
        "gradients",
        "ShardedNorm",
        lambda norm: setattr(norm.reduce, "_back", ()),
        shown_by=GRADIENTS,
    ),
    Fault(
        "adjoint of reduce_scatter is scaled",
        "gradients",
        "ReduceScatter",
        calling("backward", lambda f, g: f(g) * 2),
        shown_by=SEQUENCE,
        fits=_has_axes,
    ),
    # Packed weights
    Fault(
        "packed values in reverse order",
        "packed",
        "PackedWeight",
        lambda part: setattr(part, "tensors", _flipped(part.tensors, False)),
        r"q_proj|o_proj|mlp",
        shown_by=PACKED,
    ),
    Fault(
        "packed factors in reverse order",
        "packed",
        "PackedWeight",
        lambda part: setattr(part, "tensors", _flipped(part.tensors, True)),
        r"down_proj",
        shown_by=PACKED,
    ),
)
