"""Quantized checkpoints: their packed weights as the parameters of the plain model.

The unquantized model is planned, and transformers loads the checkpoint as one of it: the stored tensors of a
packed weight are replaced by a proxy of the weight's shape, which transformers renames, stacks and
concatenates like any other tensor. The operations recorded on the proxies tell which stored tensors make up
each parameter. A proxy that is read is computed: it is the dequantized weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SourceError
from ..format.plan import PackedDim, PackedTensor, Packing
from ..format.slices import Range
from ..packed.formats import dequantize, format_of, format_of_checkpoint
from ..packed.stored_weights import Found, Info, WeightSlice, global_size
from ..storage.file_access import WeightFile
from . import lazy_tensor as lazy
from .copying import read_tensor
from .lazy_tensor import ComputedLeaf, LazyLeaf, LazyTensor, Shape, StridedBox, contiguous_strides
from .recording_tensors import RecordedTensor
from .stored_leaves import header_metadata

Settings = Mapping[str, Any]
"""The ``quantization_config`` of a config."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed parameter."""

    shape: Shape
    """The shape of the dequantized weight."""
    packing: Packing
    tensors: Mapping[str, LazyTensor]
    """Global stored tensors, in the shapes of their ``dims``, by their names in the packing."""


def quantization_of(config: Any) -> Settings | None:
    """Return the quantization settings of a config or of a sub-config; None if there are none."""
    for part in _parts(config):
        settings = getattr(part, "quantization_config", None)
        if settings:
            quantization = settings if isinstance(settings, dict) else settings.to_dict()
            return dict(quantization)
    return None


def require_supported(settings: Settings, where: str, *, dequantize: bool) -> None:
    """Check that weights of this format can be read."""
    format_of_checkpoint(settings, where, dequantize=dequantize)


def is_of_cache(name: str, settings: Settings) -> bool:
    """Return whether a tensor is a factor of a quantized cache, which a plain cache does not need."""
    last = name.rpartition(".")[2]
    return last in _OF_CACHES or (last in _OF_OUTPUTS and bool(settings.get("kv_cache_scheme")))


def without_quantization(config: Any) -> Any:
    """Return a copy of a config that builds the unquantized model."""
    plain = type(config).from_dict(config.to_dict())
    for part in _parts(plain):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return plain


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", ()):
        if getattr(config, name, None) is not None:
            yield getattr(config, name)


_OF_CACHES = frozenset(
    {"k_scale", "v_scale", "kv_scale", "q_scale", "prob_output_scale", "k_zero_point", "v_zero_point"}
)
"""Ends of the names of factors of keys, values and attention, which engines read in addition to the factors
of weights."""
_OF_OUTPUTS = frozenset({"output_scale", "output_zero_point"})
"""The same of the outputs of projections to keys and values, in older checkpoints."""


class PackedWeights:
    """The packed weights of a checkpoint.

    Args:
        settings: its ``quantization_config``.
        tensors: all of its tensors.
        files: the files of the tensors; only their headers are read here.
        where: the checkpoint, for messages.
        dtype: the dtype of the dequantized weights.
        dequantize: whether they are wanted; ``of`` then has no packed weights.
        metadata: the metadata of its files; None: it is read from their headers.

    Attributes:
        plain: the checkpoint as one of the unquantized model, with proxies for packed weights.
        of_linear_layers: names of packed weights in formats that store linear layers' weights, as (out, in).
        is_empty: no weight is packed, although the config says that the checkpoint is quantized.

    Raises:
        SourceError: the format is not supported, or stored tensors are malformed, or some are missing.
    """

    def __init__(
        self,
        settings: Settings,
        tensors: Mapping[str, LazyTensor],
        files: tuple[WeightFile, ...],
        where: str,
        dtype: str,
        dequantize: bool,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._tensors = tensors
        self._dequantize = dequantize
        self._by_leaf: dict[LazyLeaf, Found] = {}
        weights = format_of_checkpoint(settings, where, dequantize=dequantize).find(
            _Checkpoint(tensors, files, metadata)
        )
        packed = {stored for weight in weights.values() for stored in weight.tensors.values()}
        self.is_empty = not weights
        self.plain = {name: tensor for name, tensor in tensors.items() if name not in packed}
        for name, weight in weights.items():
            self.plain[name] = self._proxy(name, weight, dtype)
        self.of_linear_layers = {
            n for n, w in weights.items() if format_of(w.packing.method).is_of_linear_layers
        }

    def is_of_linear_layers(self, tensor: torch.Tensor) -> bool:
        """Return whether a parameter, as transformers loaded it, is made of such weights."""
        if not isinstance(tensor, RecordedTensor) or tensor.absent:
            return False
        packed_weights = (self._by_leaf.get(piece.leaf) for piece in tensor.lazy.pieces)
        return any(
            one is not None and format_of(one.packing.method).is_of_linear_layers for one in packed_weights
        )

    def of(self, name: str, weight: LazyTensor) -> PackedWeight | None:
        """Return the stored tensors of a parameter; None if it has no packed weights."""
        packed = [piece.leaf in self._by_leaf for piece in weight.pieces]
        if not any(packed):
            return None
        if not all(packed):
            raise _inseparable(name, "packed and plain weights")
        packed_weight = self._by_leaf[weight.pieces[0].leaf]
        if weight.shape == packed_weight.shape and _is_whole(weight):
            return PackedWeight(weight.shape, packed_weight.packing, self._stored(packed_weight))
        return self._composed(name, weight)

    def as_stored(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Return tensors of ``plain`` as they are in the checkpoint: packed weights as stored tensors."""
        stored_tensors: dict[str, LazyTensor] = {}
        for name, tensor in tensors.items():
            weight = self._by_leaf.get(tensor.pieces[0].leaf) if tensor.pieces else None
            stored = [name] if weight is None else weight.tensors.values()
            stored_tensors |= {each: self._tensors[each] for each in stored}
        return stored_tensors

    def _proxy(self, name: str, found: Found, dtype: str) -> LazyTensor:
        """Return the weight as a tensor that is computed when it is read, a stack of matrices one by one."""
        is_stack = all(PackedDim(0, 1) in tensor.dims for tensor in found.packing.tensors)
        if self._dequantize and len(found.shape) > 2 and is_stack:
            first, *rest = found.shape
            parts = [self._part(f"{name}[{i}]", found, dtype, (i, i + 1)) for i in range(first)]
            return lazy.concatenate([lazy.from_leaf(part, (1, *rest)) for part in parts], 0)
        leaf = self._part(name, found, dtype, (0, found.shape[0]))
        self._by_leaf[leaf] = found
        return lazy.from_leaf(leaf, found.shape)

    def _part(self, name: str, found: Found, dtype: str, span: Range) -> ComputedLeaf:
        """Return some positions of the first dim of a weight."""
        part = WeightSlice.whole(found.shape).rows(*span)

        def compute() -> torch.Tensor:
            stored = self._stored(found)
            read = {t.name: read_tensor(rows_of(stored[t.name], t, span)) for t in found.packing.tensors}
            return dequantize(found.packing, read, part, getattr(torch, dtype))

        count = torch.Size(part.local_shape).numel()
        return ComputedLeaf(f"{name}, dequantized", compute, dtype, count)

    def _stored(self, found: Found) -> dict[str, LazyTensor]:
        """Return the stored tensors of a weight, in the shapes of their dims."""
        made = {}
        for packed in found.packing.tensors:
            tensor = self._tensors[found.tensors[packed.name]]
            if packed.checkpoint_shape:
                reshaped = lazy.reshape(tensor, [global_size(dim, found.shape) for dim in packed.dims])
                assert reshaped is not None, "a stored tensor is contiguous"
                tensor = reshaped
            made[packed.name] = tensor
        return made

    def _composed(self, name: str, weight: LazyTensor) -> PackedWeight:
        """Return a parameter that is stacked, concatenated or transposed from packed weights."""
        pieces = [_Piece(name, piece, self._by_leaf[piece.leaf]) for piece in weight.pieces]
        first = pieces[0].found.packing
        packings = [piece.found.packing for piece in pieces]
        if len({(p.method, p.settings, tuple((t.name, t.dtype) for t in p.tensors)) for p in packings}) > 1:
            raise _inseparable(name, "weights that are packed in different ways")
        stored = [self._stored(piece.found) for piece in pieces]
        made: dict[str, LazyTensor] = {}
        packed = []
        for tensor in first.tensors:
            # The steps in the dims of the parameter must be the same in all pieces.
            steps_by_dim: list[set[int]] = [set() for _ in weight.shape]
            for piece in pieces:
                for index, step in enumerate(piece.steps(tensor.name)):
                    if step is not None:
                        steps_by_dim[index].add(step)
            if any(len(each) > 1 for each in steps_by_dim):
                raise _inseparable(name, "weights that are packed in different steps")
            steps = tuple(max(each, default=1) for each in steps_by_dim)
            shape = tuple(-(-size // step) for size, step in zip(weight.shape, steps, strict=True))
            boxes = (
                piece.box(tensors[tensor.name], tensor.name, weight.shape, steps)
                for piece, tensors in zip(pieces, stored, strict=True)
            )
            made[tensor.name] = LazyTensor(tensor.dtype, shape, tuple(boxes))
            dims = tuple(map(PackedDim, range(len(shape)), steps))
            packed.append(PackedTensor(tensor.name, tensor.dtype, dims))
        return PackedWeight(weight.shape, Packing(first.method, tuple(packed), first.settings), made)


class _Piece:
    """A box of a parameter that is a window of a packed weight."""

    def __init__(self, name: str, piece: StridedBox, found: Found) -> None:
        self.piece = piece
        self.found = found
        self._name = name
        strides = contiguous_strides(found.shape)
        by_stride = {stride: dim for dim, stride in enumerate(strides) if found.shape[dim] > 1}
        extents = zip(piece.shape, piece.strides, strict=True)
        self.dims = [by_stride.get(stride, -1) if extent > 1 else None for extent, stride in extents]
        """The dim of the packed weight for each dim of the parameter; None if the piece has one position."""
        if -1 in self.dims:
            raise _inseparable(name, "rearranged parts of packed weights")

    def steps(self, tensor: str) -> list[int | None]:
        """Return the steps of a stored tensor in the dims of the parameter."""
        steps = self._own_steps(tensor)
        return [None if dim is None else steps[dim] for dim in self.dims]

    def _own_steps(self, tensor: str) -> list[int]:
        """Return the steps of a stored tensor in the dims of the packed weight; one for a single factor."""
        (stored,) = (t for t in self.found.packing.tensors if t.name == tensor)
        shape = self.found.shape
        if len(stored.dims) != len(shape) or any(
            dim.of not in (None, index) or (dim.of is None and dim.step != 1)
            for index, dim in enumerate(stored.dims)
        ):
            raise _inseparable(self._name, f"packed weights, whose {tensor} cannot be cut")
        return [size if dim.of is None else dim.step for dim, size in zip(stored.dims, shape, strict=True)]

    def box(self, tensor: LazyTensor, name: str, shape: Shape, steps: tuple[int, ...]) -> StridedBox:
        """Return the window of a stored tensor that belongs to the piece."""
        own_steps = self._own_steps(name)
        (source,) = tensor.pieces
        offset, rest = source.offset, self.piece.offset
        extents = {dim: n for dim, n in zip(self.dims, self.piece.shape, strict=True) if dim is not None}
        strides = contiguous_strides(self.found.shape)
        for dim, stride in enumerate(strides):
            start, rest = divmod(rest, stride)
            step, size = own_steps[dim], self.found.shape[dim]
            self._require_between(start, extents.get(dim, 1), size, step)
            offset += start // step * source.strides[dim]
        for start, extent, size, step in zip(self.piece.start, self.piece.shape, shape, steps, strict=True):
            self._require_between(start, extent, size, step)
        return StridedBox(
            start=tuple(start // step for start, step in zip(self.piece.start, steps, strict=True)),
            shape=tuple(-(-extent // step) for extent, step in zip(self.piece.shape, steps, strict=True)),
            leaf=source.leaf,
            offset=offset,
            strides=tuple(0 if dim is None else source.strides[dim] for dim in self.dims),
        )

    def _require_between(self, start: int, extent: int, size: int, step: int) -> None:
        """Check that a stretch begins and ends at steps, or at the end of the dim."""
        if start % step or ((start + extent) % step and start + extent != size):
            raise _inseparable(self._name, f"parts of blocks of {step}")


def header_of_packed(
    settings: Mapping[str, Any], where: str, tensors: Mapping[str, LazyTensor], dtype: str
) -> Mapping[str, str]:
    """Return the metadata of a checkpoint's files that describes its quantized weights, perhaps none.

    Args:
        settings: its ``quantization_config``.
        where: the checkpoint, for messages.
        tensors: all of its tensors.
        dtype: the dtype of the plain model.
    """
    return format_of_checkpoint(settings, where).header(_infos(tensors), settings, dtype)


def _infos(tensors: Mapping[str, LazyTensor]) -> dict[str, Info]:
    return {name: Info(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


class _Checkpoint:
    """The tensors of a checkpoint, as a format sees them."""

    def __init__(
        self,
        tensors: Mapping[str, LazyTensor],
        files: tuple[WeightFile, ...],
        metadata: Mapping[str, str] | None,
    ) -> None:
        self.tensors = _infos(tensors)
        self._lazy = tensors
        self._files = files
        self._metadata = metadata

    @property
    def metadata(self) -> Mapping[str, str]:
        """Return the metadata in the headers of all files."""
        return header_metadata(self._files) if self._metadata is None else self._metadata

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor's values."""
        return read_tensor(self._lazy[name])


def rows_of(tensor: LazyTensor, packed: PackedTensor, span: Range) -> LazyTensor:
    """Return the part of a stored tensor for some positions of the weight's first dim."""
    if PackedDim(0, 1) in packed.dims:
        return lazy.take(tensor, packed.dims.index(PackedDim(0, 1)), (span,))
    return tensor


def _is_whole(weight: LazyTensor) -> bool:
    """Return whether the tensor is an unchanged proxy, perhaps under another name."""
    if len(weight.pieces) != 1:
        return False
    (piece,) = weight.pieces
    strides = contiguous_strides(weight.shape)
    return (
        piece.shape == weight.shape
        and piece.leaf.num_elements == torch.Size(weight.shape).numel()
        and all(n == 1 or a == b for n, a, b in zip(piece.shape, piece.strides, strides, strict=True))
    )


def _inseparable(name: str, what: str) -> SourceError:
    return SourceError(f"{name} is put together from {what}; pass --dtype to convert it dequantized")
