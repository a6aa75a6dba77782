"""Boundary steps by the name of their op, as plan.json has them."""

from __future__ import annotations

from typing import Any, get_args

from shardconv_runtime.format.slot_steps import Boundary

KINDS: dict[str, Any] = {kind.__dataclass_fields__["op"].default: kind for kind in get_args(Boundary)}


def boundary(slot: str, op: str, *args: Any, **fields: Any) -> Any:
    """The step ``op`` at ``slot``."""
    return KINDS[op](slot, *args, **fields)
