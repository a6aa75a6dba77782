"""The packed formats: their modules here, and the packages that compute with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SourceError
from .awq import AwqScheme
from .bnb import BnbScheme
from .checkpoint_view import Scheme
from .compressed_tensors import CompressedScheme
from .fbgemm_fp8 import FbgemmFp8Scheme
from .fp8 import Fp8Scheme
from .gptq import GptqScheme
from .mxfp4 import Mxfp4Scheme
from .torchao import TorchaoScheme

# The format of a checkpoint, by the ``quantization_config`` of its config.

SCHEMES: dict[str, Callable[[Mapping[str, Any], str], Scheme]] = {
    "awq": AwqScheme.of,
    "bitsandbytes": lambda settings, where: BnbScheme(),
    "compressed-tensors": CompressedScheme.of,
    "fbgemm_fp8": lambda settings, where: FbgemmFp8Scheme(),
    "fp8": Fp8Scheme.of,
    "gptq": GptqScheme.of,
    "mxfp4": lambda settings, where: Mxfp4Scheme(),
    "mxfp8": Fp8Scheme.of,
    "torchao": lambda settings, where: TorchaoScheme(),
}
"""``quant_method`` -> scheme for its settings."""


def scheme_of(settings: Mapping[str, Any], where: str, *, dequantize: bool = False) -> Scheme:
    """Return the scheme of a quantized checkpoint.

    Args:
        settings: its ``quantization_config``.
        where: the checkpoint, for messages.
        dequantize: the model is to compute with plain weights, and a plain cache.

    Raises:
        SourceError: no such method is known, or the settings ask for a variant that is not covered.
    """
    found = settings.get("quant_method")
    if found is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    else:
        method = str(getattr(found, "value", found) or "")
    if method not in SCHEMES:
        raise SourceError(
            f"{where} is quantized ({method or 'an unnamed method'}), which cannot be sharded; convert the "
            f"unquantized model, or one that is quantized with {', '.join(sorted(SCHEMES))}"
        )
    left_out = ("kv_cache_scheme",) if dequantize else ()
    known = {name: value for name, value in settings.items() if name not in left_out}
    return SCHEMES[method]({**known, "quant_method": method}, where)


# Formats that also quantize activations may scale each token by its own values.


def rounds_activations(settings: Mapping[str, Any]) -> bool:
    """Return whether each token's activations are scaled by a factor from that token.

    Each rank of a row-parallel layer then takes it from its own part of the token.

    Args:
        settings: a ``quantization_config``.
    """
    match settings.get("quant_method"):
        case "fp8" | "mxfp8":
            return bool(settings.get("activation_scheme", "dynamic") == "dynamic")
        case "fbgemm_fp8":
            return True
        case "compressed-tensors":
            groups = settings.get("config_groups") or {}
            return any(_is_dynamic(group) for group in groups.values())
        case _:
            return bool(settings.get("load_in_8bit"))


def _is_dynamic(group: Any) -> bool:
    inputs = group.get("input_activations") if isinstance(group, Mapping) else None
    return isinstance(inputs, Mapping) and bool(inputs.get("dynamic"))


@dataclass(frozen=True, slots=True)
class Requirement:
    """The packages that one format needs."""

    packages: tuple[str, ...]
    """Packages that transformers imports, by their names on pip."""
    why: str
    """Their purpose, and where they compute; a phrase for errors and model cards."""

    @property
    def command(self) -> str:
        """Return the command that installs the packages."""
        return f"pip install {' '.join(self.packages)}"


BNB = Requirement(("bitsandbytes", "accelerate"), "bitsandbytes has the kernels, for CPUs and GPUs")

REQUIREMENTS = {
    "awq": Requirement(("gptqmodel", "accelerate"), "gptqmodel has the kernels, for CPUs and GPUs"),
    "bnb_4bit": BNB,
    "bnb_8bit": BNB,
    "compressed_tensors": Requirement(
        ("compressed-tensors",),
        "compressed-tensors reads the tensors; it dequantizes most of its formats to compute",
    ),
    "fbgemm_fp8": Requirement(
        ("accelerate", "fbgemm-gpu-genai"),
        "fbgemm-gpu-genai has the kernels, for GPUs with compute capability 9.0 or more",
    ),
    "fp8": Requirement(
        ("accelerate", "kernels"),
        "kernels downloads those that multiply float8, for GPUs with compute capability 8.9 or more",
    ),
    "gptq": Requirement(
        ("gptqmodel", "optimum"),
        "gptqmodel has the kernels, for CPUs and GPUs, and optimum puts them into the model",
    ),
    "mxfp4": Requirement(
        ("accelerate", "kernels"),
        "kernels downloads those that multiply 4-bit floats, for GPUs with compute capability 7.5 or more",
    ),
    "torchao": Requirement(("torchao",), "torchao has the classes of tensors, for CPUs and GPUs"),
}
"""Method of a packing -> the packages that it needs."""


def requirement(method: str) -> Requirement:
    """Return the packages that computing with parameters of this method needs."""
    return REQUIREMENTS[method]
