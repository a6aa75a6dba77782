"""compressed-tensors: integers or floats of 4 or 8 bits, with factors of tensors, channels, groups or blocks.

Values of a byte stand under the name of the weight, smaller ones are packed along the inputs. Zero points of
packed integers are packed along the outputs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, SourceError
from ..format.header import dtype_name
from ..format.plan import PackedDim, PackedTensor, Packing
from . import number_formats
from .number_formats import PER_BYTE, WORD, check_exponents, from_float8, unpacked, unpacked_fp4
from .packed_format import Chosen, PackedFormat, Part, Rows, fill_as_stored, in_bands
from .stored_weights import (
    REMEDY,
    Checkpoint,
    Found,
    StoredGroup,
    WeightSlice,
    along,
    global_size,
    info,
    matrix,
    require_owners,
    spread,
)

# The settings of compressed-tensors: how weights of each group of modules are quantized.
#
# Which group a module belongs to follows from classes and patterns that a checkpoint does not show. Its
# tensors tell them apart as well: their dtypes and shapes fit one group.

FORMATS = (
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
CACHE = "kv_cache_scheme"
EXTRAS = (CACHE, "transform_config")
"""Settings that change more of the model than its weights."""


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """The settings of one group of modules."""

    kind: str
    """``int`` or ``float``."""
    bits: int
    strategy: str
    """The values that share a factor: a ``tensor``, ``channel``, ``group``, ``tensor_group`` or ``block``."""
    group_size: int = 0
    """Inputs of a group."""
    block: tuple[int, ...] = ()
    """Rows and columns."""

    def dims(self, shape: tuple[int, int]) -> tuple[PackedDim, ...]:
        """Return the dims of the factors of a weight ``[out, in]``."""
        if self.strategy == "tensor":
            return (PackedDim(None, 1),)
        if self.strategy == "block":
            return along(0, self.block[0], shape[0]), along(1, self.block[1], shape[1])
        return PackedDim(0, 1), along(1, self.group_size or shape[1], shape[1])


def weight_settings(settings: Mapping[str, Any], where: str) -> tuple[WeightSettings, ...]:
    """Return the settings of all groups of modules."""
    try:
        return _read(settings, where)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise _refused(where, f"with settings that cannot be read ({error})") from error


def _read(settings: Mapping[str, Any], where: str) -> tuple[WeightSettings, ...]:
    groups = (settings.get("config_groups") or {}).values()
    for group in groups:
        if not isinstance(group, Mapping):
            raise _refused(where, f"in the group {group}, which is not covered")
    formats = {str(settings.get("format"))} | {str(g["format"]) for g in groups if g.get("format")}
    for name in sorted(formats - {*FORMATS, "dense", "None"}):
        raise _refused(where, f"in the format {name}; {', '.join(FORMATS)} are covered")
    for name in EXTRAS:
        if settings.get(name):
            remedy = (
                "; pass --dtype to convert it dequantized, with a plain cache" if name == CACHE else REMEDY
            )
            raise _refused(where, f"with {name}, which is not covered", remedy)
    if str((settings.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise _refused(where, "and sparse, which is not covered")
    return tuple(_of(group["weights"], where) for group in groups if group.get("weights"))


def _of(weights: Mapping[str, Any], where: str) -> WeightSettings:
    size, block = weights.get("group_size"), weights.get("block_structure")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "group" if size > 0 else "channel"
    if isinstance(block, str):
        block = [int(part) for part in block.split("x")]
    if strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
        raise _refused(where, f"with one factor for each {strategy}")
    if strategy == "block" and (not block or len(block) != 2 or min(block) < 1):
        raise _refused(where, f"in blocks of {block}")
    if strategy.endswith("group") and (not size or size < 1):
        raise _refused(where, f"in groups of {size}")
    return WeightSettings(
        str(weights.get("type", "int")),
        int(weights.get("num_bits", 8)),
        strategy,
        int(size or 0) if strategy.endswith("group") else 0,
        tuple(block or ()) if strategy == "block" else (),
    )


def _refused(where: str, what: str, remedy: str = REMEDY) -> SourceError:
    return SourceError(f"{where} is quantized with compressed-tensors {what}{remedy}")


SCALE = ".weight_scale"
FLOATS = ("float32", "bfloat16", "float16")
SCALES = {
    "float8_e4m3fn": (*FLOATS, "uint8"),
    "int8": FLOATS,
    "int32": FLOATS,
    "uint8": ("float8_e4m3fn", "uint8"),
}
"""Dtypes of factors, keyed by the dtype of the values."""
INPUTS = ("input_scale", "input_zero_point", "input_global_scale")
"""Factors of quantized inputs, which are replicated."""
OTHERS = ("*_zero_point", "*_shape", "*_g_idx", "*_global_scale", *INPUTS)
DTYPES = {
    "*_zero_point": ("int8",),
    "*_shape": ("int64", "int32"),
    "*_g_idx": ("int32",),
    "*_global_scale": ("float32",),
    "input_scale": FLOATS,
    "input_zero_point": ("int8", "float8_e4m3fn"),
    "input_global_scale": FLOATS,
}
COMPANIONS = (".weight_packed", ".weight_scale", *(f".{part.replace('*', 'weight')}" for part in OTHERS))
PRESETS = ("fp8_dynamic", "w4a16", "w8a16", "w8a8")
"""Names of the library's settings that need no data."""
BITS = (1, 2, 4, 8)
"""Numbers of bits that fill a word."""


@dataclass(frozen=True)
class CompressedTensors(PackedFormat):
    """Weights of linear layers."""

    method = "compressed_tensors"
    quant_methods = ("compressed-tensors",)
    packages = ("compressed-tensors",)
    why = "compressed-tensors reads the tensors; it dequantizes most of its formats to compute"
    quantizer = "compressed-tensors"
    values = ("*", "*_packed")
    on_gpus_only = True
    can_be_joined = True

    packers = ("compressed-tensors",)
    skips = "ignore"

    weights: tuple[WeightSettings, ...] = ()
    """The weights of all groups of modules."""

    def configured(self, settings: Mapping[str, Any], where: str) -> CompressedTensors:
        """See ``PackedFormat``."""
        return CompressedTensors(weight_settings(settings, where))

    def find(self, checkpoint: Checkpoint) -> dict[str, Found]:
        """See ``PackedFormat``."""
        modules = [name.removesuffix(SCALE) for name in checkpoint.tensors if name.endswith(SCALE)]
        weights = {f"{name}.weight": _Weight(checkpoint, name).found(self.weights) for name in modules}
        require_owners(checkpoint, weights, COMPANIONS, "compressed-tensors")
        return weights

    def dequantized(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
        """Compute (value - zero point) * factor in the dtype of the factors, as the library does.

        Factors of 4-bit floats are read as bfloat16; a factor of the whole tensor divides them
        first. Groups of any inputs (``g_idx``) are read as the library did before it gave them up.
        """
        stored = {tensor.name: tensor for tensor in packing.tensors}
        factors = tensors["*_scale"]
        if factors.dtype == torch.uint8:  # exponents of two
            factors = 2.0 ** (factors.int() - number_formats.BIAS).bfloat16()
        elif factors.element_size() == 1:  # float8, in which torch does not multiply
            factors = factors.bfloat16()
        scale = _for_inputs(factors, stored["*_scale"], tensors, held)
        values = _values(dict(packing.settings), tensors, held)
        if "*_global_scale" in tensors:
            return (values * (scale / tensors["*_global_scale"])).to(values.dtype)
        is_float8 = values.is_floating_point() and values.element_size() == 1
        values = from_float8(values, scale.dtype) if is_float8 else values.to(scale.dtype)
        if "*_zero_point" in tensors:
            values = values - _zero_points(packing, tensors, held).to(scale.dtype)
        return values * scale

    def schemes(self, dtype: str) -> Mapping[str, Mapping[str, Any]]:
        """See ``PackedFormat``; they have the names of the library's presets."""
        method = {"quant_method": "compressed-tensors"}
        return {name: {**method, "config_groups": {name.upper(): ["Linear"]}} for name in PRESETS}

    def choose(self, model: nn.Module, settings: Mapping[str, Any]) -> Chosen:
        """Let the library choose linear layers; heads, which it has no rule for, are transformers' choice."""
        from compressed_tensors.compressors import ModelCompressor  # an optional library
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationStatus,
            apply_quantization_config,
            preset_name_to_scheme,
        )
        from compressed_tensors.quantization.utils import is_module_quantized
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.quantizers.base import HfQuantizer
        from transformers.quantizers.quantizers_utils import should_convert_module

        skipped = settings.get(self.skips)
        if skipped is None:
            in_float32 = getattr(model, "_keep_in_fp32_modules", None)
            patterns = HfQuantizer.get_modules_to_not_convert(model, None, in_float32)
            names = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
            skipped = [name for name in names if not should_convert_module(name, patterns)]
        config = QuantizationConfig(config_groups=settings["config_groups"], ignore=skipped)
        presets = [preset_name_to_scheme(name, ["Linear"]) for name in PRESETS]
        for group in config.config_groups.values():
            if group.model_copy(update={"format": None}) not in presets:
                raise ValueError(f"its settings are none of {', '.join(PRESETS)}")
        apply_quantization_config(model, config, show_progress=False)
        # The library writes the names that modules have in checkpoints, which it takes from this attribute.
        # transformers looks for these in the model, where a module may have another name.
        model._weight_conversions = get_model_conversion_mapping(model)
        compressor = ModelCompressor.from_pretrained_model(model)
        if compressor.quantization_config is None:
            raise ValueError("it has no linear layers")
        compressor.quantization_config.quantization_status = QuantizationStatus.COMPRESSED
        with TemporaryDirectory() as directory:
            compressor.update_config(directory)
            text = Path(directory, "config.json").read_text(encoding="utf-8")
        written = json.loads(text)["quantization_config"]
        written[self.skips] = list(dict.fromkeys([*written[self.skips], *skipped]))
        (scheme,) = compressor.quantization_config.config_groups.values()
        weights = {
            f"{name}.weight": dtype_name(module.get_parameter("weight").dtype)
            for name, module in model.named_modules()
            if is_module_quantized(module)
        }
        return Chosen(scheme, written, tuple(skipped), weights)

    def packed(self, weight: Tensor, quantizer: Any) -> dict[str, Tensor]:
        """Compute stored tensors by the library, with factors from the largest values as its own way is."""
        from compressed_tensors.compressors import BaseCompressor  # an optional library
        from compressed_tensors.quantization.utils import calculate_qparams

        settings = quantizer.weights
        columns = settings.group_size or weight.shape[1]
        if weight.dim() != 2 or weight.shape[1] % columns:
            return {"*": weight}  # the library refuses the last group
        compressor = BaseCompressor.get_value_from_registry(quantizer.format)

        def pack(rows: Tensor) -> dict[str, Tensor]:
            low, high = rows.reshape(len(rows), -1, columns).aminmax(dim=-1)
            factors, _ = calculate_qparams(low, high, settings)
            return dict(compressor.compress({"weight": rows, "weight_scale": factors}, quantizer))

        forms = pack(weight.to("meta"))
        computed = {part for part, form in forms.items() if form.is_meta}
        stored = in_bands(weight, 1, lambda rows: {p: t for p, t in pack(rows).items() if p in computed})
        return {part.replace("weight", "*"): tensor for part, tensor in (forms | stored).items()}

    def check(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, name: str) -> None:
        """Check the exponents, and the shape and the groups of the weight that the tensors describe."""
        check_exponents({part: t for part, t in tensors.items() if part not in self.values}, name)
        if "*_shape" in tensors and tuple(tensors["*_shape"].tolist()) != held.shape:
            raise CheckpointError(
                f"{name} is {list(held.shape)}, and its stored shape says {tensors['*_shape'].tolist()}"
            )
        if "*_g_idx" in tensors:
            groups = next(stored.dims[-1] for stored in packing.tensors if stored.name == "*_scale")
            index = tensors["*_g_idx"].cpu().long()
            if (index == -1).all():
                return
            if groups.of is None:
                if not 0 <= int(index.min()) <= int(index.max()) < groups.step:
                    raise CheckpointError(
                        f"{name}: g_idx names a group outside of the {groups.step} of the weight"
                    )
            elif not torch.equal(index, held.positions(1) // groups.step):
                raise CheckpointError(
                    f"{name}: g_idx does not count groups of {groups.step} consecutive inputs"
                )

    def scales_tokens(self, settings: Mapping[str, Any]) -> bool:
        """See ``PackedFormat``."""
        groups = (settings.get("config_groups") or {}).values()
        inputs = [group.get("input_activations") for group in groups if isinstance(group, Mapping)]
        return any(isinstance(each, Mapping) and bool(each.get("dynamic")) for each in inputs)

    def is_computed(self, packing: Packing, settings: Mapping[str, Any]) -> bool:
        """Return whether values are float8 with a factor for each row, or for all."""
        stored = {tensor.name: tensor for tensor in packing.tensors}
        values, scale = stored.get("*"), stored["*_scale"]
        return (
            values is not None
            and values.dtype == "float8_e4m3fn"
            and "*_zero_point" not in stored
            and all((dim.of == 0 and dim.step == 1) or dim == PackedDim(None, 1) for dim in scale.dims)
        )

    def kernel_settings(self, packings: Collection[Packing], *, tiles: bool) -> Mapping[str, Any]:
        """See ``PackedFormat``."""
        return {"use_optimized_inference": True}  # otherwise all is decompressed at the first call

    def fill(self, module: nn.Module, attribute: str, part: Part) -> None:
        """Fill a module with a factor for each row, in the layout of the kernel, and none of the inputs."""
        values = part.tensors["*"]
        scale = part.tensors["*_scale"].float().reshape(1, -1).expand(1, values.shape[0]).contiguous()
        fill_as_stored(module, attribute, {"*": values, "*_scale": scale})

    def rows(self, part: Part, is_last: bool) -> Rows | None:
        """Return the operands of the kernel: values, and a factor for each row."""
        values, scale = part.tensors["*"], part.tensors["*_scale"].reshape(-1, 1)
        return {"*": (values, 1), "*_scale": (scale.expand(len(values), 1), 1)}


class _Weight:
    """A weight in a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, module: str) -> None:
        self._checkpoint = checkpoint
        self._module = module
        packed = self._name("*_packed")
        self._values = "*_packed" if packed in checkpoint.tensors else "*"
        stored = info(checkpoint, self._name(self._values), module + SCALE)
        self._kind = stored.dtype
        self._stored = matrix(checkpoint, self._name(self._values), module + SCALE)
        rows, columns = self._stored
        if self._kind == "int32" and self._values == "*_packed":
            name = self._name("*_shape")
            if info(self._checkpoint, name, self._module + SCALE).shape != (2,):
                raise SourceError(f"{name} is not the shape of a matrix{REMEDY}")
            said = tuple(int(size) for size in self._checkpoint.read(name).tolist())
            if said[0] != rows:
                raise SourceError(f"{name} says {list(said)}, and the weight has {rows} rows{REMEDY}")
            self._shape = said[0], said[1]
        else:
            self._shape = rows, columns * (PER_BYTE if self._values == "*_packed" else 1)

    def found(self, choices: tuple[WeightSettings, ...]) -> Found:
        """Return its description with the settings that fit."""
        scale = info(self._checkpoint, self._module + SCALE, self._module)
        right = [weights for weights in choices if self._is_of(weights)]
        for weights in right:
            if scale.shape in ((), tuple(global_size(dim, self._shape) for dim in weights.dims(self._shape))):
                return self._described(weights)
        raise SourceError(
            f"{self._module}{SCALE} is {list(scale.shape)}, for values in {self._kind} of a weight of "
            f"{list(self._shape)}, which fits no group of modules in config.json{REMEDY}"
        )

    def _name(self, part: str) -> str:
        is_of_weight = part.startswith("*")
        return f"{self._module}.{part.replace('*', 'weight')}" if is_of_weight else f"{self._module}.{part}"

    def _is_of(self, weights: WeightSettings) -> bool:
        """Return whether the values may be of a group with these settings."""
        if self._values == "*":
            return self._kind == {"int": "int8", "float": "float8_e4m3fn"}.get(weights.kind)
        if self._kind == "uint8":
            return (weights.kind, weights.bits) == ("float", 4)
        return (
            weights.kind == "int"
            and weights.bits in BITS
            and -(-self._shape[1] * weights.bits // WORD) == self._stored[1]
        )

    def _described(self, weights: WeightSettings) -> Found:
        parts = [self._values, "*_scale", *(p for p in OTHERS if self._name(p) in self._checkpoint.tensors)]
        group = StoredGroup(self._checkpoint, self._shape, {part: self._name(part) for part in parts})
        step = {"int32": WORD // weights.bits, "uint8": PER_BYTE}.get(self._kind, 1)
        group.add(self._values, [self._kind], (PackedDim(0, 1), PackedDim(1, step)))
        scale = self._scale_dims(weights)
        group.add("*_scale", SCALES[self._kind], scale)
        for part in parts[2:]:
            shape = self._checkpoint.tensors[self._name(part)].shape
            dims = tuple(PackedDim(None, size) for size in shape)
            if part == "*_g_idx":
                dims = (PackedDim(1, 1),)
            elif part == "*_zero_point":
                dims = scale
            if part == "*_zero_point" and self._kind == "int32" and len(scale) == 2:
                group.add(part, ["int32"], (PackedDim(0, step), scale[1]))
            else:
                group.add(part, DTYPES[part], dims)
        return group.found(CompressedTensors.method, bits=weights.bits)

    def _scale_dims(self, weights: WeightSettings) -> tuple[PackedDim, ...]:
        if self._checkpoint.tensors[self._name("*_scale")].shape == ():
            return ()
        dims = weights.dims(self._shape)
        name = self._name("*_g_idx")
        if name not in self._checkpoint.tensors:
            return dims
        if self._checkpoint.tensors[name].shape != (self._shape[1],):
            raise SourceError(f"{name} has no group for each of {self._shape[1]} inputs{REMEDY}")
        groups = global_size(dims[-1], self._shape)
        index = self._checkpoint.read(name).long()
        in_order = torch.arange(self._shape[1]) // max(weights.group_size, 1)
        if (index == -1).all() or torch.equal(index, in_order):
            return dims
        if len(dims) != 2 or not 0 <= int(index.min()) <= int(index.max()) < groups:
            raise SourceError(f"{name} names a group outside of the {groups} of the weight{REMEDY}")
        return dims[0], PackedDim(None, groups)


def _values(settings: Mapping[str, int], tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
    """Return local values of the weight, before zero points and factors."""
    if "*" in tensors:
        return tensors["*"]
    packed, columns = tensors["*_packed"], held.local_shape[1]
    if packed.dtype == torch.uint8:
        return unpacked_fp4(packed)
    return _signed(packed, settings["bits"], 1, columns)


def _zero_points(packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
    """Return local zero points; they broadcast with the weight."""
    stored = {tensor.name: tensor for tensor in packing.tensors}
    points = tensors["*_zero_point"]
    if points.dtype != torch.int32:
        return spread(points, stored["*_zero_point"], held)
    points = _signed(points, dict(packing.settings)["bits"], 0, held.local_shape[0])
    return _for_inputs(points, stored["*_scale"], tensors, held)


def _signed(words: Tensor, bits: int, dim: int, size: int) -> Tensor:
    """Unpack integers of words, which are stored from 0 and perhaps padded to a full word."""
    integers: Tensor = unpacked(words, bits, dim).narrow(dim, 0, size) - 2 ** (bits - 1)
    return integers


def _for_inputs(
    values: Tensor, stored: PackedTensor, tensors: Mapping[str, Tensor], held: WeightSlice
) -> Tensor:
    """Repeat the values of groups to the part of the weight."""
    if stored.dims and stored.dims[-1].of is None and stored.dims[-1].step > 1:
        return values.index_select(1, tensors["*_g_idx"].long())
    return spread(values, stored, held)
