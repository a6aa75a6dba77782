"""The format of a checkpoint, by the ``quantization_config`` of its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
"""By ``quant_method``."""


def scheme_of(settings: Mapping[str, Any], where: str, *, dequantize: bool = False) -> Scheme:
    """The scheme of a quantized checkpoint.

    Args:
        settings: its ``quantization_config``.
        where: the checkpoint, for messages.
        dequantize: the model is to compute with plain weights, and a plain cache.

    Raises:
        SourceError: no such method is known, or the settings ask for a variant that is not covered.
    """
    method = _method(settings)
    if method not in SCHEMES:
        raise SourceError(
            f"{where} is quantized ({method or 'an unnamed method'}), which cannot be sharded; convert the "
            f"unquantized model, or one that is quantized with {', '.join(sorted(SCHEMES))}"
        )
    left_out = ("kv_cache_scheme",) if dequantize else ()
    known = {name: value for name, value in settings.items() if name not in left_out}
    return SCHEMES[method]({**known, "quant_method": method}, where)


def _method(settings: Mapping[str, Any]) -> str:
    """The method; bitsandbytes once left it out."""
    found = settings.get("quant_method")
    if found is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    return str(getattr(found, "value", found) or "")
