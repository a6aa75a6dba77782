"""ModuleStep steps by the name of their op, as plan.json has them."""

from __future__ import annotations

from typing import Any, get_args

from shardconv_runtime.format.module_steps import ModuleStep

KINDS: dict[str, Any] = {kind.__dataclass_fields__["op"].default: kind for kind in get_args(ModuleStep)}


def boundary(port: str, op: str, *args: Any, **fields: Any) -> Any:
    """The step ``op`` at ``port``."""
    return KINDS[op](port, *args, **fields)
