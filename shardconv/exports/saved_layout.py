"""Find the layout in which transformers saves a model: its parameters as tensors of an ordinary checkpoint.

When transformers loads a checkpoint, it renames, stacks and splits tensors; ``save_pretrained`` reverses
this. This file runs the same functions of transformers on tensors that only record the operations. The
functions are not documented, but ``save_pretrained`` has called them in this order since 5.17, and no
documented function gives the layout without writing the model. They are used only in this file.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from shardconv_runtime.checkpoint import lazy_tensor as lazy
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import (
    ComputedLeaf,
    FileLeaf,
    LazyTensor,
    Shape,
    StridedBox,
    contiguous_strides,
    from_leaf,
)
from shardconv_runtime.checkpoint.quantized import PackedWeight
from shardconv_runtime.checkpoint.recording_tensors import RecordedTensor, recording
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import SourceError, brief
from shardconv_runtime.format.header import dtype_name
from shardconv_runtime.format.plan import PackedDim, global_shape, parameter_plans
from shardconv_runtime.format.slices import Range
from shardconv_runtime.format.stored_layout import tensor_name
from shardconv_runtime.library_logging import without_library_logging
from shardconv_runtime.meta.meta_model import build_model
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ..converted import derived_directory
from ..converted.derived_directory import gathered, is_interleaved
from ..converted.shards import Converted

# Stored tensors of packed parameters follow the layout in which transformers saves the plain model.
#
# A stored tensor is placed like its positions of the weight. A layout that divides a step is an
# error.


def positions(name: str, dtype: str, shape: Shape) -> LazyTensor:
    """Make a proxy for a packed weight, whose elements are identified by their positions in it."""
    leaf = FileLeaf(Path(name), 0, dtype, math.prod(shape))
    return lazy.from_leaf(leaf, shape)


def with_packed(
    saved: Mapping[str, LazyTensor], weights: Mapping[str, PackedWeight]
) -> dict[str, LazyTensor]:
    """Return the tensors of a checkpoint, with stored tensors instead of proxies."""
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in saved.items():
        owners = {_owner(piece) for piece in tensor.pieces}
        if not owners & weights.keys():
            tensors[name] = tensor
        elif not owners <= weights.keys():
            raise _divided(name)
        else:
            tensors |= _stored(name, tensor, weights)
    return tensors


def _stored(name: str, saved: LazyTensor, weights: Mapping[str, PackedWeight]) -> dict[str, LazyTensor]:
    """Return the stored tensors of a saved weight."""
    owner = _owner(saved.pieces[0])
    of = weights[owner]
    is_unmoved = saved.shape == of.shape and saved.pieces == positions(owner, saved.dtype, of.shape).pieces
    out = {}
    for packed in of.packing.tensors:
        if is_unmoved:
            tensor = _as_in_checkpoint(name, of.tensors[packed.name], packed.checkpoint_shape)
        else:
            tensor = _joined(name, saved, dict(_parts(name, packed.name, saved, weights)))
        out[tensor_name(name, packed.name)] = tensor
    return out


def _as_in_checkpoint(name: str, tensor: LazyTensor, shape: Shape) -> LazyTensor:
    if not shape:
        return tensor
    reshaped = lazy.reshape(tensor, shape)
    if reshaped is None:  # sharded columns are short runs in flat memory
        made = ComputedLeaf(name, lambda: read_tensor(tensor), tensor.dtype, math.prod(shape))
        reshaped = lazy.from_leaf(made, shape)
    return reshaped


@dataclass(frozen=True, slots=True)
class _Part:
    """A stored tensor of a packed parameter that is divided or joined on saving."""

    shape: Shape
    """Shape of the weight."""
    block: Shape
    """The tensor's step in each dim of the weight."""
    tensor: LazyTensor


def _parts(
    name: str, part: str, saved: LazyTensor, weights: Mapping[str, PackedWeight]
) -> Iterator[tuple[str, _Part]]:
    """Yield one stored tensor of each packed parameter in a saved weight."""
    for owner in dict.fromkeys(map(_owner, saved.pieces)):
        weight = weights[owner]
        packed = next((t for t in weight.packing.tensors if t.name == part), None)
        if packed is None or len(packed.dims) != len(weight.shape):
            raise _divided(name)
        block = []
        for index, (dim, size) in enumerate(zip(packed.dims, weight.shape, strict=True)):
            if dim not in (PackedDim(index, dim.step), PackedDim(None, 1)):
                raise _divided(name)
            block.append(size if dim.of is None else dim.step)  # all positions share a single factor
        yield owner, _Part(weight.shape, tuple(block), weight.tensors[part])


def _owner(piece: StridedBox) -> str:
    """Return the parameter of a piece; empty for a computed one."""
    return str(piece.leaf.path) if isinstance(piece.leaf, FileLeaf) else ""


def _divided(name: str) -> SourceError:
    return SourceError(
        f"{name} would be saved with parts of its packed steps; convert the model with --dtype, "
        "dequantized, and merge that"
    )


def _joined(name: str, saved: LazyTensor, parts: Mapping[str, _Part]) -> LazyTensor:
    dims = [_dims(name, piece, parts[_owner(piece)]) for piece in saved.pieces]
    # Blocks of the saved tensor have the sizes of the parameters' blocks, which must be the same in all of
    # it.
    lengths: list[set[int]] = [set() for _ in saved.shape]
    for piece, mapped in zip(saved.pieces, dims, strict=True):
        for index, dim in enumerate(mapped):
            if dim is not None:
                lengths[index].add(parts[_owner(piece)].block[dim])
    if any(len(each) > 1 for each in lengths):
        raise _divided(name)
    block = tuple(max(each, default=1) for each in lengths)
    shape = tuple(-(-extent // length) for extent, length in zip(saved.shape, block, strict=True))
    placed = [
        _part(name, saved, piece, mapped, block, parts[_owner(piece)])
        for piece, mapped in zip(saved.pieces, dims, strict=True)
    ]
    return lazy.assemble(placed[0][0].dtype, shape, placed)


def _dims(name: str, piece: StridedBox, of: _Part) -> list[int | None]:
    """Map each dim of a piece to a dim of the parameter; None if it has one position."""
    strides = contiguous_strides(of.shape)
    by_stride = {stride: dim for dim, stride in enumerate(strides) if of.shape[dim] > 1}
    if any(n > 1 and s not in by_stride for n, s in zip(piece.shape, piece.strides, strict=True)):
        raise _divided(name)
    return [by_stride[s] if n > 1 else None for n, s in zip(piece.shape, piece.strides, strict=True)]


def _part(
    name: str, saved: LazyTensor, piece: StridedBox, dims: list[int | None], block: Shape, of: _Part
) -> tuple[LazyTensor, list[list[Range]]]:
    """Return the factors of a piece, and their positions among the factors of the saved tensor."""
    tensor, offset = of.tensor, piece.offset
    extents = {dim: n for dim, n in zip(dims, piece.shape, strict=True) if dim is not None}
    for dim, stride in enumerate(contiguous_strides(of.shape)):
        start, offset = divmod(offset, stride)
        span = _blocks(name, (start, start + extents.get(dim, 1)), of.shape[dim], of.block[dim])
        tensor = lazy.take(tensor, dim, (span,))
    local_dims = [dim for dim in dims if dim is not None]
    single = [dim for dim in range(len(of.shape)) if dim not in local_dims]
    tensor = lazy.permute(tensor, [*single, *local_dims])
    for _ in single:
        tensor = lazy.squeeze(tensor, 0)
    for index in (index for index, dim in enumerate(dims) if dim is None):
        tensor = lazy.unsqueeze(tensor, index)
    starts = zip(piece.start, piece.shape, saved.shape, block, strict=True)
    return tensor, [[_blocks(name, (a, a + n), size, length)] for a, n, size, length in starts]


def _blocks(name: str, span: Range, size: int, length: int) -> Range:
    """Return the blocks of a range of a dim, which must begin and end between blocks."""
    start, stop = span
    if start % length or (stop % length and stop != size):
        raise _divided(name)
    return start // length, -(-stop // length)


LazyWeights = Mapping[str, LazyTensor]
"""Global parameters and persistent buffers by FQN. A tied tensor is one object under several names."""


def model_of(spec: ModelSpec) -> Any:
    """Build the model without numbers for ``saved_tensors``."""
    return build_model(spec.model_class, spec.config, getattr(torch, spec.dtype), spec.tied)


def saved_tensors(model: Any, weights: LazyWeights) -> dict[str, LazyTensor]:
    """Return the tensors that ``model.save_pretrained`` would write, by name, in its order."""
    state = dict(model.state_dict())
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    try:
        names = list(remove_tied_weights_from_state_dict(state, model))
    except Exception as error:  # RuntimeError if it finds ties that the class does not declare
        raise _cannot_save(model, error) from error
    absent = [name for name in names if name not in weights]
    if absent:
        raise SourceError(
            f"the plan does not name {absent[0]}, which {type(model).__name__} of transformers "
            f"{transformers.__version__} has; use the version that it was planned for"
        )
    with recording({name: weights[name] for name in names}) as recorded:
        try:
            saved = revert_weight_conversion(model, recorded)
        except Exception as error:  # converters may raise anything
            raise _cannot_save(model, error) from error
    out = {}
    for name, tensor in saved.items():
        assert isinstance(tensor, RecordedTensor), f"{name} is made of no parameter"
        assert not tensor.absent
        out[name] = tensor.lazy
    return out


def require_loadable(spec: ModelSpec, model: Any, weights: LazyWeights, tied: Mapping[str, str]) -> None:
    """Check that transformers loads the model that it saves, with the same parameters byte for byte.

    Saving and loading run on tensors that only record the operations. If elements are only moved, the record
    says where each one came from. Computations run on random bytes, once for all layers that are alike.

    Args:
        weights: the weights of the model. Only their dtypes and shapes are used.
    """
    made = {}
    for name, weight in weights.items():
        if name not in tied:
            count = torch.Size(weight.shape).numel()
            leaf = ComputedLeaf(name, _random(name, weight.dtype, weight.shape), weight.dtype, count)
            made[name] = from_leaf(leaf, weight.shape)
    probes = {name: made[tied.get(name, name)] for name in weights}
    # transformers makes a state dict from the checkpoint.
    saved = saved_tensors(model, probes)
    with without_library_logging(), recording(dict(saved)) as checkpoint:
        try:
            model, info = spec.model_class.from_pretrained(  # type: ignore[attr-defined]
                None,
                config=spec.config,
                state_dict=checkpoint,
                dtype=getattr(torch, spec.dtype),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:  # converters and custom code may raise anything
            raise SourceError(f"{_not_loaded(spec)}: {brief(error)}; {_REMEDY}") from error
    state = model.state_dict()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        _require_none(spec, info[kind], kind.replace("_", " "))
    ignored = set(model._keys_to_ignore_on_save or ())
    same = _Comparison()
    changed = [
        name for name in probes if name not in ignored and not same(name, probes[name], state.get(name))
    ]
    _require_none(spec, changed, "parameters that differ")


def _cannot_save(model: Any, error: Exception) -> SourceError:
    version = transformers.__version__
    return SourceError(
        f"transformers {version} cannot save a {type(model).__name__}: {brief(error)}; try another version"
    )


_REMEDY = "try another version of transformers"


def _not_loaded(spec: ModelSpec) -> str:
    name, version = spec.model_class.__name__, transformers.__version__
    return f"transformers {version} would not load the {name} that it saves"


def _require_none(spec: ModelSpec, names: Iterable[Any], what: str) -> None:
    listed = sorted(map(str, names))
    if listed:
        raise SourceError(f"{_not_loaded(spec)}: {len(listed)} {what}, as {listed[0]}; {_REMEDY}")


def _random(name: str, dtype: str, shape: Shape) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        torch_dtype = getattr(torch, dtype)
        count = torch.Size(shape).numel() * torch_dtype.itemsize
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if torch_dtype == torch.bool:
            return torch.randint(2, shape, dtype=torch_dtype, generator=generator)
        data = torch.randint(256, (count,), dtype=torch.uint8, generator=generator)
        return data.view(torch_dtype).reshape(shape)

    return make


class _Comparison:
    """Compare loaded tensors with the tensors that were saved."""

    def __init__(self) -> None:
        self._computed: dict[tuple[object, ...], bool] = {}

    def __call__(self, name: str, probe: LazyTensor, loaded: torch.Tensor | None) -> bool:
        """Return whether ``loaded`` has the same bytes as the parameter ``probe``."""
        if not isinstance(loaded, RecordedTensor) or loaded.absent:
            return False
        lazy = loaded.lazy
        if (lazy.dtype, lazy.shape) != (probe.dtype, probe.shape):
            return False
        strides = contiguous_strides(lazy.shape)
        leaves = {piece.leaf for piece in probe.pieces}
        is_unmoved = all(
            piece.leaf in leaves
            and piece.offset == sum(a * b for a, b in zip(piece.start, strides, strict=True))
            and all(n == 1 or a == b for a, b, n in zip(piece.strides, strides, piece.shape, strict=True))
            for piece in lazy.pieces
        )
        if is_unmoved:
            return True
        kind = (re.sub(r"\d+", "#", name), lazy.dtype, lazy.shape)
        if kind not in self._computed:  # layers that are alike are compared once
            a, b = (read_tensor(tensor).reshape(-1).view(torch.uint8) for tensor in (probe, lazy))
            self._computed[kind] = torch.equal(a, b)
        return self._computed[kind]


def checkpoint_tensors(found: Converted, spec: ModelSpec) -> tuple[dict[str, LazyTensor], int]:
    """Return the tensors that transformers would save, in its order, and the number of parameters."""
    model = model_of(spec)
    state = model.state_dict()
    tensors = derived_directory.weights_of(found)
    packed = {
        name: PackedWeight(
            global_shape(entry),
            entry.packing,
            {tensor.name: tensors[tensor_name(name, tensor.name)] for tensor in entry.packing.tensors},
        )
        for name, entry in parameter_plans(found.plan).items()
        if entry.packing is not None
    }
    stored = {tensor_name(name, part) for name, weight in packed.items() for part in weight.tensors}
    weights = {name: tensor for name, tensor in tensors.items() if name not in stored}
    for name, weight in packed.items():
        dtype = dtype_name(state[name].dtype) if name in state else "float32"
        weights[name] = positions(name, dtype, weight.shape)
    weights |= {alias: weights[name] for alias, name in found.plan.tied}
    extra = sorted(set(weights) - set(state))
    if extra:
        raise SourceError(
            f"{found.files.name} holds {extra[0]}, which the model lacks in this environment; "
            "use the version of transformers that it was planned for"
        )
    require_loadable(spec, model, weights, dict(found.plan.tied))
    saved = with_packed(saved_tensors(model, weights), packed)
    in_bands = {n: gathered(n, t) if is_interleaved(t) else t for n, t in saved.items()}
    return in_bands, model.num_parameters()


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """The weights of a checkpoint: its tensors, divided into files like ``save_pretrained`` does."""

    tensors: Mapping[str, LazyTensor]
    files: Mapping[str, Sequence[str]]
    """File -> names of tensors."""
    index: Mapping[str, Any]
    """Contents of ``model.safetensors.index.json``; empty for a single file."""


def divided_into_files(
    tensors: Mapping[str, LazyTensor], num_parameters: int, limit: int
) -> CheckpointLayout:
    """Divide the tensors into files, like huggingface_hub does for ``save_pretrained``."""
    sizes = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for name, tensor in tensors.items()
    }
    split = split_torch_state_dict_into_shards(
        sizes, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    index = {
        "metadata": {"total_parameters": num_parameters, **split.metadata},
        "weight_map": split.tensor_to_filename,
    }
    return CheckpointLayout(tensors, split.filename_to_tensors, index if split.is_sharded else {})
