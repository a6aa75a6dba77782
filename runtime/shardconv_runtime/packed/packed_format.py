"""A packed format is one object that answers all questions of loading, converting and computing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..format.header import dtype_name
from ..format.plan import PackedDim, Packing
from .stored_weights import Checkpoint, Found, Info, WeightSlice


@dataclass(frozen=True)
class Part:
    """A rank's part of a packed weight."""

    packing: Packing
    tensors: Mapping[str, Tensor]
    """Local stored tensors by their names in the packing, in the shape of its dims."""
    held: WeightSlice
    """The part of the weight that they are."""
    dtype: torch.dtype
    """The dtype of activations."""

    def dims(self, name: str) -> tuple[PackedDim, ...]:
        """Return the dims of a stored tensor."""
        return next(stored.dims for stored in self.packing.tensors if stored.name == name)


@dataclass(frozen=True)
class Chosen:
    """The weights of a plain model that a library quantizes."""

    quantizer: Any
    """The library's own description, for ``PackedFormat.packed``."""
    settings: Mapping[str, Any]
    """All settings, as the library writes them to config.json."""
    skipped: tuple[str, ...]
    """Names of modules that stay plain."""
    weights: Mapping[str, str]
    """FQN of each weight -> the dtype in which it is loaded."""


Rows = Mapping[str, tuple[Tensor, int | None]]
"""Name -> tensor, and the number of rows or values for each of its positions; None: the tensor must be the
same for all weights."""


class PackedFormat:
    """A format. A new one is a subclass in a file of its own, and an entry in ``formats.FORMATS``."""

    method: ClassVar[str]
    """Name of the format in plans."""
    quant_methods: ClassVar[tuple[str, ...]] = ()
    """Names in the ``quantization_config`` of checkpoints in which ``find`` finds the weights."""
    packages: ClassVar[tuple[str, ...]]
    """The packages that compute with packed weights, by their names on pip."""
    why: ClassVar[str]
    """Their purpose, and where they compute; a phrase for errors and model cards."""
    quantizer: ClassVar[str] = ""
    """``quant_method`` of the modules of transformers that compute with weights as stored; empty: none do."""
    values: ClassVar[tuple[str, ...]] = ("*",)
    """Stored tensors with the values themselves; all others are factors, zero points and indices."""
    on_gpus_only: ClassVar[bool] = False
    """Whether the kernels are only for GPUs."""
    has_backward: ClassVar[bool] = False
    """Whether the modules compute gradients of their inputs."""
    keeps_modules: ClassVar[bool] = False
    """Whether plain modules hold the packed tensors."""
    is_of_linear_layers: ClassVar[bool] = False
    """Whether it stores weights of linear layers only, as (out, in)."""
    packers: ClassVar[tuple[str, ...]] = ()
    """The packages beside transformers that ``packed`` calls, by their names on pip."""
    skips: ClassVar[str] = ""
    """The setting with the names of modules that stay plain."""
    can_be_joined: ClassVar[bool] = False
    """Whether weights of one input can be joined by their rows, see ``rows``."""

    @property
    def command(self) -> str:
        """Return the command that installs the packages."""
        return f"pip install {' '.join(self.packages)}"

    def configured(self, settings: Mapping[str, Any], where: str) -> Self:
        """Return the format with the settings of a checkpoint; ``SourceError`` for other variants."""
        return self

    def find(self, checkpoint: Checkpoint) -> dict[str, Found]:
        """Return the packed parameters, by the names that their weights have in a plain checkpoint."""
        raise NotImplementedError

    def dequantized(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
        """Return the local weight, from local stored tensors, in the dtype of the library's result."""
        raise NotImplementedError

    def schemes(self, dtype: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the schemes in which it packs plain weights, and their ``quantization_config``.

        Args:
            dtype: the dtype of the plain model.
        """
        return {}

    def choose(self, model: nn.Module, settings: Mapping[str, Any]) -> Chosen:
        """Let the library choose the weights that it quantizes; it may replace modules of the model.

        Args:
            model: the plain model, on meta.
            settings: one of the ``schemes``, perhaps with more settings.

        Raises:
            Exception: of any kind; the library cannot quantize the model.
        """
        from transformers.quantizers import AutoHfQuantizer  # imports all quantizers, and their libraries

        dtypes = {n: dtype_name(p.dtype) for n, p in model.named_parameters(remove_duplicate=False)}
        quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=False)
        dtype = next(model.parameters()).dtype
        quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": "cpu"}, checkpoint_files=None)
        weights = {n: dtype for n, dtype in dtypes.items() if quantizer.param_needs_quantization(model, n)}
        all_settings = json.loads(json.dumps(quantizer.quantization_config.to_dict()))
        return Chosen(quantizer, all_settings, tuple(quantizer.modules_to_not_convert), weights)

    def packed(self, weight: Tensor, quantizer: Any) -> dict[str, Tensor]:
        """Return the stored tensors of a plain weight, as the format's library computes them.

        Args:
            weight: on the CPU; or on meta, and so are then the results that depend on its values.
            quantizer: from ``choose``.

        Returns:
            Stored tensors by their names in a packing; only the weight if the library leaves it plain.
        """
        raise NotImplementedError

    def header(
        self, tensors: Mapping[str, Info], settings: Mapping[str, Any], dtype: str
    ) -> Mapping[str, str]:
        """Return the metadata of a checkpoint's files that describes its packed weights.

        Args:
            tensors: all tensors of the checkpoint.
            settings: its ``quantization_config``.
            dtype: the dtype of the plain model.
        """
        return {}

    def check(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, name: str) -> None:
        """Check local stored tensors, in addition to shapes, dtypes and finite factors."""

    def scales_tokens(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint scales each token's activations by a factor from that token."""
        return False

    def is_computed(self, packing: Packing, settings: Mapping[str, Any]) -> bool:
        """Return whether some module computes with such a weight as it is stored."""
        return bool(self.quantizer)

    def kernel_settings(self, packings: Collection[Packing], *, tiles: bool) -> Mapping[str, Any]:
        """Return settings that choose a kernel which computes parts of weights rightly.

        ``tiles``: whether the rows of each layer fill the tiles of torch's product on CPUs.
        """
        return {}

    def fill(self, module: nn.Module, attribute: str, part: Part) -> None:
        """Give a module of the library its part of the weight ``attribute``."""
        fill_as_stored(module, attribute, part.tensors)

    def is_repacked(self, module: nn.Module, part: Part) -> bool:
        """Return whether a module moves its weight to other memory when it is first called."""
        return False

    def rows(self, part: Part, is_last: bool) -> Rows | None:
        """Return the stored tensors by rows of the weight; None if this weight cannot be joined with others.

        That works if stored tensors run along the rows (the outputs) in their first dim, or are flat in the
        order of rows. Only the last weight may end inside of a step.
        """
        rows: dict[str, tuple[Tensor, int | None]] = {}
        num_rows = part.held.local_shape[0]
        for stored in part.packing.tensors:
            tensor, along = part.tensors[stored.name], [dim.of for dim in stored.dims]
            if along[:1] == [0] and 0 not in along[1:]:
                step = stored.dims[0].step
                if len(tensor) != math.ceil(num_rows / step) or (num_rows % step and not is_last):
                    return None
                rows[stored.name] = tensor, step
            elif len(along) < 2 and set(along) <= {None}:
                rows[stored.name] = tensor, None
            else:
                return None
        return rows


BAND_VALUES = 2**20
"""Values that are packed together; libraries need about 20 bytes for each."""


def in_bands(weight: Tensor, step: int, pack: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pack a weight some rows at a time, since libraries compute all of a tensor in float32.

    Args:
        step: rows that cannot be packed apart from each other.
        pack: returns stored tensors whose first dim runs along the rows.
    """
    count = max(BAND_VALUES // math.prod(weight.shape[1:]) // step, 1) * step
    if weight.is_meta or len(weight) <= count:
        return pack(weight)
    forms = pack(weight.to("meta"))
    stored = {part: torch.empty(form.shape, dtype=form.dtype) for part, form in forms.items()}
    ends = dict.fromkeys(stored, 0)
    for band in torch.split(weight, count):
        for part, tensor in pack(band).items():
            stored[part][ends[part] : ends[part] + len(tensor)] = tensor
            ends[part] += len(tensor)
    return stored


def fill_as_stored(module: nn.Module, attribute: str, tensors: Mapping[str, Tensor]) -> None:
    """Fill a module that has a tensor for each stored one, or raise ``PlanError`` if it lacks one."""
    for stored, tensor in tensors.items():
        name = stored.replace("*", attribute)
        table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        if table.get(name) is None:
            raise PlanError(
                f"a {type(module).__name__} has no tensor {name!r}; the installed package is another version"
            )
        # Floating-point tensors get the dtype that the module declares, as in transformers.
        declared = table[name].dtype
        if declared.is_floating_point and tensor.is_floating_point() and declared.itemsize > 1:
            tensor = tensor.to(declared)  # itself, if it has this dtype
        table[name] = nn.Parameter(tensor, requires_grad=False) if table is module._parameters else tensor
