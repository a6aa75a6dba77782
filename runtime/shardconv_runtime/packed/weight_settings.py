"""The settings of compressed-tensors: how weights of each group of modules are quantized.

Which group a module belongs to follows from classes and patterns that a checkpoint does not show. Its tensors
tell them apart as well: their dtypes and shapes fit one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SourceError
from ..format.plan import PackedDim
from .checkpoint_view import REMEDY
from .held import along

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
"""Settings that change what the model computes beside its weights."""


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """Of one group of modules."""

    kind: str
    """``int`` or ``float``."""
    bits: int
    strategy: str
    """What shares a factor: a ``tensor``, ``channel``, ``group``, ``tensor_group`` or ``block``."""
    group_size: int = 0
    """Inputs of a group."""
    block: tuple[int, ...] = ()
    """Rows and columns."""

    def dims(self, shape: tuple[int, int]) -> tuple[PackedDim, ...]:
        """Dims of the factors of a weight ``[out, in]``."""
        if self.strategy == "tensor":
            return (PackedDim(None, 1),)
        if self.strategy == "block":
            return along(0, self.block[0], shape[0]), along(1, self.block[1], shape[1])
        return PackedDim(0, 1), along(1, self.group_size or shape[1], shape[1])


def weight_settings(settings: Mapping[str, Any], where: str) -> tuple[WeightSettings, ...]:
    """Of all groups of modules.

    Raises:
        SourceError: the checkpoint is quantized in a way that is not covered.
    """
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
