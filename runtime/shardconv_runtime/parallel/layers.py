"""The parallel layers that replace exact ``torch.nn`` classes.

A linear layer computes ``Y = X W^T + b``. Sharded over the rows of W (its output dim), each rank has a
part of Y: column-parallel. Sharded over the columns of W (its input dim), each rank has a term of the sum:
row-parallel. An embedding sharded over its rows gives zeros for out-of-shard ids.
(Megatron-LM, arXiv 1909.08053, section 3; "column" and "row" refer to W^T.)

Parameters keep their names, so that every FQN of the model stays. Layers of a plan have the ``in_features``,
``out_features`` and ``num_embeddings`` that the model's code reads: the global ones, unless the plan has an
edit. The weight has the local shape. The backward of a layer is the backward of the steps that it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import functional

from ..comm.collectives import Communicator, refuse_gradient
from ..comm.steps import Reduce, ReduceScatter
from ..errors import PlanError
from ..format.names import expand_all
from ..format.pipeline_stages import PlaceholderDim, PlaceholderItem, StagedModule
from ..format.plan import LogitsInfo, ModulePlan, NormInfo, Plan, module_plans
from ..format.slot_steps import AllGatherStep
from ..format.stage_names import staged_modules
from .boundary import TensorStep, forward_signature
from .row_ids import RowIds, zero_out_of_shard

# Models that keep their shard of the logits.

WHY_NO_LABELS = (
    "that was loaded with gather_logits=False: its loss would be that of a shard of the vocabulary; load "
    "with gather_logits=True"
)


def without_logits_gather(
    modules: dict[str, ModulePlan], logits: LogitsInfo | None, heads: Collection[str]
) -> dict[str, ModulePlan]:
    """Return the modules without the gather of the logits.

    Args:
        modules: the modules of a plan.
        logits: the logits of the plan.
        heads: further modules that compute the logits in place of the plan's, in other calls.

    Raises:
        PlanError: the plan gathers none.
    """
    module, gather = _gather(modules, logits)
    found = dict(modules)
    for name in {module, *heads}:
        outputs = tuple(step for step in modules[name].outputs if step != gather)
        found[name] = replace(modules[name], outputs=outputs, gather_output=False)
    return found


def _gather(modules: Mapping[str, ModulePlan], logits: LogitsInfo | None) -> tuple[str, AllGatherStep]:
    """Return the FQN of the module that computes the logits, and the step that gathers them."""
    entry = modules.get(logits.module) if logits else None
    if logits is None or entry is None:
        raise PlanError("gather_logits=False: the plan does not shard the logits")
    for step in entry.outputs:
        if step.slot == logits.slot and isinstance(step, AllGatherStep):
            return logits.module, step
    raise PlanError(f"{logits.module}: the plan gathers no logits at slot {logits.slot!r}")


def with_local_logits(plan: Plan) -> Plan:
    """Return the plan of stages whose last one keeps a rank's shard of the logits, as placeholders of the
    head do.

    Args:
        plan: a plan with stages, in the form that is to run.

    Raises:
        PlanError: the plan lacks the result of a placeholder for only the head.
    """
    assert plan.stages is not None
    gather = _gather(module_plans(plan), plan.logits)
    module, slot = gather[0], gather[1].slot
    found = staged_modules(plan).get(module)
    if found is None or found[0].returns != "tensor" or slot != "output":
        raise PlanError(
            f"gather_logits=False: with stages, the module that computes the logits ({module}) should not be "
            "a part of another one that has parameters; leave it out, or convert without --pp"
        )
    entry, step = found[0], gather[1]
    tensor = entry.items[0].tensor
    assert tensor is not None, "it is the only item"
    dims = list(tensor.dims)
    dims[step.dim] = PlaceholderDim(size=step.layout)
    own = replace(entry, names=(module,), items=(PlaceholderItem(replace(tensor, dims=tuple(dims))),))
    others = [replace(each, names=_without(each, module)) for each in plan.stages.modules]
    modules = (*(each for each in others if each.names), own)
    return replace(plan, stages=replace(plan.stages, modules=modules))


def _without(entry: StagedModule, name: str) -> tuple[str, ...]:
    names = expand_all(entry.names)
    return tuple(other for other in names if other != name) if name in names else entry.names


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose output dim is sharded.

    Args:
        in_features: local; equal to the global one unless the plan shards it too.
        out_features: local.
        bias: whether there is a bias, sharded like the output.
        inputs: steps on the input, in order.
        outputs: steps on the output; a ``Gather`` makes it replicated.
        training: the steps have backwards; without it, an input that requires a gradient is refused.

    Shapes: ``input: [..., in_features]``, output: local ``[..., out_features]``, global after a ``Gather``;
    the dtype of the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        inputs: Sequence[TensorStep] = (),
        outputs: Sequence[TensorStep] = (),
        training: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._has_backward = training

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        if not self._has_backward:
            refuse_gradient(input)
        return finish(self.outputs, F.linear(_apply(self.inputs, input), self.weight, self.bias))


class RowParallelLinear(nn.Linear):
    """A linear layer whose input dim is sharded.

    Args:
        in_features: local.
        out_features: local; equal to the global one unless the plan shards it too.
        bias: whether there is a bias.
        bias_is_partial: the bias is zero on all ranks but one, and is added before the reduction; otherwise
            it is replicated, and is added once, after the reduction.
        inputs: steps on the input; a ``Slice`` if it arrives replicated.
        outputs: steps on the output; a ``Reduce`` sums the ranks' terms.

    Shapes: ``input: local [..., in_features]`` (global before a ``Slice``), output ``[..., out_features]``, a
    Partial before a ``Reduce``; the dtype of the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bias_is_partial: bool = False,
        inputs: Sequence[TensorStep] = (),
        outputs: Sequence[TensorStep] = (),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        reduced = 0
        if bias and not bias_is_partial:  # the bias is added after the last step that sums over ranks
            sums = (Reduce, ReduceScatter)
            reduced = max((i + 1 for i, step in enumerate(outputs) if isinstance(step, sums)), default=0)
        self.inputs = tuple(inputs)
        self.reductions = tuple(outputs[:reduced])
        self.outputs = tuple(outputs[reduced:])

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        x = _apply(self.inputs, input)
        if not self.reductions:
            return finish(self.outputs, F.linear(x, self.weight, self.bias))
        y = finish(self.reductions, F.linear(x, self.weight))
        return finish(self.outputs, y + self.bias)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose rows are sharded.

    Args:
        rows: maps ids to local rows.
        embedding_dim: local; equal to the global one unless the plan shards it too.
        padding_idx: local row of the padding id; None if it is out-of-shard.
        num_embeddings: the value that the model's code reads under this name; None is the global number of
            rows.
        inputs: steps on the ids.
        outputs: steps on the output; a ``Reduce`` sums the ranks' rows.

    Shapes: ``input``: global row ids, int ``[...]``; output ``[..., embedding_dim]``, a Partial before a
    ``Reduce``; the dtype of the weight.
    """

    def __init__(
        self,
        rows: RowIds,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        num_embeddings: int | None = None,
        inputs: Sequence[TensorStep] = (),
        outputs: Sequence[TensorStep] = (),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(rows.num_rows, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.num_embeddings = rows.num_global_rows if num_embeddings is None else num_embeddings
        self.rows = rows
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        ids, out_of_shard = self.rows(_apply(self.inputs, input))
        if self.rows.num_rows:
            rows = zero_out_of_shard(F.embedding(ids, self.weight, self.padding_idx), out_of_shard)
        else:  # there are more ranks than rows of the table
            rows = self.weight.new_zeros((*ids.shape, self.embedding_dim))
        return finish(self.outputs, rows)


def _apply(steps: Sequence[TensorStep], x: Tensor) -> Tensor:
    for step in steps:
        x = step(x)
    return x


def finish(steps: Sequence[TensorStep], y: Tensor) -> Tensor:
    """Return the steps on a result that a layer has just computed, so that sums may take its memory."""
    for step in steps:
        y = step.overwriting(y) if isinstance(step, Reduce) else step(y)
    return y


# Norms over a sharded dim: their statistic is reduced, and the tensor stays sharded.


_LOW_PRECISION = (torch.float16, torch.bfloat16)


class ShardedNorm(nn.Module):
    """RMS, L2 or layer norm over the last dim, or over groups of it, sharded over ranks.

    RMS and L2 norms reduce one number for each token, the sum of squares; a layer norm two, one after the
    other (the sum, then the sum of squared deviations from the true mean, which loses no digits if
    the mean is large). A gate, if there is one, multiplies before or after.

    Args:
        info: the formula of the norm that this one replaces.
        replaced: the replaced norm; its weight and bias keep their names.
        comm: the ranks.
        training: give it a backward. The gradient of the statistic is a Partial, since all ranks use the
            statistic: it is all-reduced as well.

    Shapes: ``x``, gate and output: local ``[..., D/n]``, the dtype of ``x``.

    Raises:
        PlanError: the norm lacks a parameter that the plan names.
    """

    def __init__(
        self, info: NormInfo, replaced: nn.Module, comm: Communicator, training: bool = False
    ) -> None:
        super().__init__()
        self.info = info
        self.groups = info.groups[0] if len(info.groups) == 1 else info.groups[comm.rank]
        self.reduce = Reduce(comm, info.axes, info.axes if training else None)
        self.names = tuple(forward_signature(replaced).parameters)
        for name in (info.weight, info.bias):
            if name:
                parameter = replaced._parameters.get(name)
                if parameter is None:
                    raise PlanError(f"a {type(replaced).__name__} has no parameter {name!r}")
                self.register_parameter(name, parameter)
        for name in vars(replaced):
            if not hasattr(self, name):
                setattr(self, name, _Withheld(name))
        self.train(replaced.training)

    def extra_repr(self) -> str:
        """Return kind, global size and eps."""
        return f"{self.info.kind}, size={self.info.size}, eps={self.info.eps}"

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the local output; the arguments are the replaced norm's, local ``[..., D/n]``."""
        info, gate = self.info, None
        if info.gate:
            given: dict[str, Any] = dict(zip(self.names, args, strict=False)) | kwargs
            gate = given.get(info.gate)
            if gate is None:
                raise PlanError(f"a gated norm was called without {info.gate!r}")
            x = given[info.input]
        else:
            (x,) = (*args, *kwargs.values())
        if info.compute_dtype != "input":
            dtype: torch.dtype = getattr(torch, info.compute_dtype)
        else:  # torch's layer_norm accepts low precision as input, and still computes in float32
            dtype = torch.float32 if info.kind == "layer" and x.dtype in _LOW_PRECISION else x.dtype
        wide = x.to(dtype)
        if gate is not None and info.gate_first:
            wide = wide * self._activated(gate, dtype)
        y = self._scale(self._normalized(wide), x.dtype)
        if gate is None or info.gate_first:
            return y
        return (y * self._activated(gate, dtype)).to(x.dtype)

    def _activated(self, gate: Tensor, dtype: torch.dtype) -> Tensor:
        name, gate = self.info.gate_activation, gate.to(dtype)
        activated: Tensor = gate if name == "identity" else getattr(functional, name)(gate)
        return activated

    def _normalized(self, x: Tensor) -> Tensor:
        shape, eps = x.shape, self.info.eps
        if self.groups != 1:
            x = x.reshape(*shape[:-1], self.groups, -1)
        if self.info.kind == "layer":
            x = x - self._mean(x)
        mean = self._mean(x.square())
        y = x * torch.rsqrt((mean * self.info.size if self.info.kind == "l2" else mean) + eps)
        return y if self.groups == 1 else y.reshape(shape)

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean of local ``[..., D/n]`` over the global dim, ``[..., 1]``, in float32 or wider."""
        wide = torch.float32 if x.dtype in _LOW_PRECISION else x.dtype
        return (self.reduce(x.sum(-1, keepdim=True, dtype=wide)) / self.info.size).to(x.dtype)

    def _scale(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        native_layer_norm = self.info.kind == "layer" and self.info.compute_dtype == "input"
        early = self.info.weight_before_cast or native_layer_norm
        if not early:
            y = y.to(dtype)
        if self.info.weight:
            weight = getattr(self, self.info.weight)
            weight = weight.to(y.dtype) if early else weight
            y = y * (weight + self.info.weight_offset if self.info.weight_offset else weight)
        if self.info.bias:
            bias = getattr(self, self.info.bias)
            y = y + (bias.to(y.dtype) if early else bias)
        return y.to(dtype) if early else y


class _Withheld:
    """Replaces an attribute of the replaced norm: other code may pass it on, but not use it.

    Code that computes the norm by itself, in a fused kernel, would compute the norm of the rank's part.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *args: object) -> Any:
        raise PlanError(
            f"{self._name} of a norm whose statistic the ranks share was used from outside: code that was "
            "not traced computes this norm itself (for example a fused kernel for training without a cache); "
            "call the model with use_cache=True and without activation checkpointing, or without that kernel"
        )

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse: an operator was given this object."""
        for each in (*args, *(kwargs or {}).values()):
            if isinstance(each, cls):
                each._refuse()
        cls("an attribute")._refuse()
