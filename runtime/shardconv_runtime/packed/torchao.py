"""torchao: 8-bit integers and float8, with a factor for each block of a weight; mostly for each row.

MODULE.NAME is stored as MODULE._NAME_qdata, MODULE._NAME_scale and perhaps MODULE._NAME_zero_point. The
header of the file has, as JSON, the class and the block size of each NAME.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MissingPackageError, SourceError
from ..format.plan import PackedDim, Packing
from .packed_format import Chosen, PackedFormat, Part, in_bands
from .stored_weights import (
    REMEDY,
    Checkpoint,
    Found,
    Info,
    StoredGroup,
    WeightSlice,
    along,
    info,
    require_owners,
    spread,
)

VALUES = {"Int8Tensor": "int8", "Float8Tensor": "float8_e4m3fn"}
"""Dtypes of values, by the class of the tensor."""
SCALES = ("float32", "bfloat16", "float16")
PLAIN = "Tensor"
PARTS = ("qdata", "scale", "zero_point")
QDATA = re.compile(r"(?P<module>.+)\._(?P<attribute>[^.]+)_qdata")
CONFIGS = {"torchao_float8": "Float8WeightOnlyConfig", "torchao_int8": "Int8WeightOnlyConfig"}
"""The library's configs, by the names of schemes."""
NAMES = "tensor_names"
"""Key of the header with the names of all tensors."""


class Torchao(PackedFormat):
    """Any parameters."""

    method = "torchao"
    quant_methods = ("torchao",)
    packages = ("torchao",)
    why = "torchao has the classes of tensors, for CPUs and GPUs"
    quantizer = "torchao"
    values = ("_*_qdata",)
    keeps_modules = True
    can_be_joined = True
    packers = ("torchao",)
    skips = "modules_to_not_convert"

    def find(self, checkpoint: Checkpoint) -> dict[str, Found]:
        """See ``PackedFormat``."""
        weights = {name: _parameter(checkpoint, name, said) for name, said in _packed(checkpoint)}
        ends = tuple(f"_{part}" for part in PARTS)
        suffixes = tuple(
            f"._{attribute}{end}" for attribute in {n.rpartition(".")[2] for n in weights} for end in ends
        )
        require_owners(checkpoint, weights, suffixes or ("._weight_qdata",), self.method)
        return weights

    def dequantized(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
        """Compute (value - zero point) * factor in float32, as the library does."""
        stored = {tensor.name: tensor for tensor in packing.tensors}
        values = tensors["_*_qdata"].float()
        if "_*_zero_point" in tensors:
            values = values - spread(tensors["_*_zero_point"].float(), stored["_*_zero_point"], held)
        return values * spread(tensors["_*_scale"].float(), stored["_*_scale"], held)

    def schemes(self, dtype: str) -> Mapping[str, Mapping[str, Any]]:
        """See ``PackedFormat``; 4-bit integers are left out, since the library packs them on GPUs only."""
        return {
            name: {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}}
            for name, kind in CONFIGS.items()
        }

    def choose(self, model: nn.Module, settings: Mapping[str, Any]) -> Chosen:
        """See ``PackedFormat``; a scheme is the installed library's config with its defaults."""
        quant_type = settings["quant_type"]["default"]
        if "_version" not in quant_type:
            from torchao import quantization  # an optional library
            from torchao.core.config import config_to_dict

            config = config_to_dict(getattr(quantization, quant_type["_type"])())
            settings = {**settings, "quant_type": {"default": config}}
        return super().choose(model, settings)

    def packed(self, weight: Tensor, quantizer: Any) -> dict[str, Tensor]:
        """Compute values and factors of rows by the library."""
        config = _config(quantizer)

        def pack(rows: Tensor) -> dict[str, Tensor]:
            tensors, _ = _flattened(_quantized(rows, config))
            return {name.replace("_weight_", "_*_"): tensor for name, tensor in tensors.items()}

        return in_bands(weight, 1, pack)

    def header(
        self, tensors: Mapping[str, Info], settings: Mapping[str, Any], dtype: str
    ) -> Mapping[str, str]:
        """Return the class of each weight, as the library writes it; other tensors are plain ones."""
        if find_spec("torchao") is None:
            raise MissingPackageError(
                "checkpoints of torchao are written with torchao, which is not installed: pip install torchao"
            )
        from transformers.quantizers import AutoHfQuantizer  # imports all quantizers, and their libraries

        config = _config(AutoHfQuantizer.from_config(dict(settings), pre_quantized=True))
        forms: dict[tuple[int, ...], str] = {}
        entries: dict[str, str] = {}
        packed: set[str] = set()
        for name, tensor in tensors.items():
            if (match := QDATA.fullmatch(name)) is None:
                continue
            if tensor.shape not in forms:
                form = torch.empty(tensor.shape, dtype=getattr(torch, dtype), device="meta")
                forms[tensor.shape] = _flattened(_quantized(form, config))[1]
            entries[f"{match['module']}.{match['attribute']}"] = forms[tensor.shape]
            start = f"{match['module']}._{match['attribute']}_"
            packed |= {f"{start}{part}" for part in PARTS}
        entries |= {name: json.dumps({"_type": PLAIN}) for name in tensors if name not in packed}
        return {**entries, NAMES: json.dumps(list(entries))}

    def is_computed(self, packing: Packing, settings: Mapping[str, Any]) -> bool:
        """Return whether activations stay as they are; the header of the file says nothing of them."""
        names, todo = [], [settings.get("quant_type")]
        while todo:
            value = todo.pop()
            if isinstance(value, Mapping):
                names += [str(value["_type"])] if "_type" in value else []
                todo += value.values()
        configs = [name for name in names if name.endswith("Config") and not name.startswith("Fqn")]
        return bool(configs) and all(name.endswith("WeightOnlyConfig") for name in configs)

    def fill(self, module: nn.Module, attribute: str, part: Part) -> None:
        """Fill a plain module with a tensor of the library's class, with the local size of blocks."""
        from torchao.quantization import Float8Tensor, Int8Tensor  # an optional library

        values, scale = part.tensors["_*_qdata"], part.tensors["_*_scale"]
        steps = {dim.of: dim.step for dim in part.dims("_*_scale")}
        block = [steps.get(dim, size) for dim, size in enumerate(values.shape)]
        if values.dtype == torch.int8:
            zeros = part.tensors.get("_*_zero_point")
            tensor = Int8Tensor(values, scale, block, part.dtype, zero_point=zeros)
        else:
            tensor = Float8Tensor(values, scale, block, dtype=part.dtype)
        module._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)


def _config(quantizer: Any) -> Any:
    """Return the library's config of all weights."""
    config = quantizer.quantization_config.get_apply_tensor_subclass()
    if hasattr(config, "fqn_to_config"):
        raise SourceError(
            "the settings of torchao have one config for each module, and only checkpoints with one for all "
            "are written; pass --dtype to convert the model dequantized"
        )
    return config


def _quantized(weight: Tensor, config: Any) -> Tensor:
    """Return a weight of a linear layer as a tensor of the library's class."""
    from torchao.quantization import quantize_  # an optional library

    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(linear, config)
    quantized = linear.weight
    # The library (0.18) gives the layer a bound method of itself, a cycle that would keep all tensors until
    # garbage is collected, 11 GB in a conversion of 16 GB.
    del linear.weight
    return quantized


def _flattened(weight: Tensor) -> tuple[dict[str, Tensor], str]:
    """Return the stored tensors of a weight, ``_weight_qdata`` and so on, and its entry in the header."""
    # An optional library; transformers saves by the same function.
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensors, metadata = flatten_tensor_state_dict({"module.weight": weight})
    return {n.removeprefix("module."): t for n, t in tensors.items()}, metadata["module.weight"]


def _packed(checkpoint: Checkpoint) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names of the packed parameters with their entries in the header."""
    if NAMES not in checkpoint.metadata:
        raise SourceError(
            f"the files have no {NAMES} in their headers, so torchao did not write them{REMEDY}"
        )
    kinds = {"_data": dict, "_tensor_data_names": list}
    for name, text in checkpoint.metadata.items():
        if "." not in name:
            continue
        try:
            said = json.loads(text)
        except ValueError as error:
            raise SourceError(f"{name}: its entry in the header is not JSON: {error}{REMEDY}") from error
        if not isinstance(said, dict) or not all(isinstance(said.get(k, t()), t) for k, t in kinds.items()):
            raise SourceError(f"{name}: its entry in the header is not in the format of torchao{REMEDY}")
        if said.get("_type") != PLAIN:
            yield name, said


def _parameter(checkpoint: Checkpoint, name: str, said: Mapping[str, Any]) -> Found:
    kind, parts = str(said.get("_type")), set(map(str, said.get("_tensor_data_names", [])))
    if kind not in VALUES:
        raise SourceError(
            f"{name} is quantized by torchao as {kind}; {', '.join(VALUES)} are covered{REMEDY}"
        )
    if unknown := parts - set(PARTS):
        raise SourceError(f"{name} is quantized by torchao with {min(unknown)}, which is not covered{REMEDY}")
    module, _, attribute = name.rpartition(".")
    names = {
        f"_*_{part}": f"{module}._{attribute}_{part}"
        for part in ("qdata", "scale", *sorted(parts & {"zero_point"}))
    }
    shape = info(checkpoint, names["_*_qdata"], name).shape
    scale = info(checkpoint, names["_*_scale"], name).shape
    dims = _dims(name, shape, scale, said.get("_data", {}).get("block_size"))
    group = StoredGroup(checkpoint, shape, names)
    group.add("_*_qdata", [VALUES[kind]], tuple(PackedDim(dim, 1) for dim in range(len(shape))))
    group.add("_*_scale", SCALES, dims)
    if "_*_zero_point" in names:
        group.add("_*_zero_point", ["int8"], dims)
    return group.found("torchao")


def _dims(name: str, shape: tuple[int, ...], scale: tuple[int, ...], block: Any) -> tuple[PackedDim, ...]:
    """Return the dims of the factors; a single factor may have any number of them."""
    if all(size == 1 for size in scale):
        return tuple(PackedDim(None, 1) for _ in scale)
    sizes = block or [size if count == 1 else 1 for size, count in zip(shape, scale, strict=False)]
    if (
        not isinstance(sizes, list)
        or len(sizes) != len(shape)
        or not all(type(n) is int and n > 0 for n in sizes)
    ):
        raise SourceError(f"{name} of {list(shape)} is quantized by torchao in blocks of {block}{REMEDY}")
    return tuple(along(dim, size, shape[dim]) for dim, size in enumerate(sizes))
