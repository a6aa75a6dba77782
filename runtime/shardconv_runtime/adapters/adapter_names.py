"""Names of adapters and of their files."""

from __future__ import annotations

PLAN_NAME = "adapter_plan.json"
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
DEFAULT = "default"
"""The name that peft gives an adapter without one."""
ANY_NAME = "ADAPTER"
"""The name that a plan has for an adapter, in place of the one that the user gives it: a part of FQNs of its
modules and parameters (``q_proj.lora_A.ADAPTER.weight``)."""


def renamed(fqn: str, name: str) -> str:
    """An FQN or a pattern of a plan, with the adapter's name in place of ``ANY_NAME``."""
    return ".".join(name if part == ANY_NAME else part for part in fqn.split("."))


def is_of_adapter(fqn: str, name: str = ANY_NAME) -> bool:
    """Whether a module or a parameter is of one adapter alone."""
    return name in fqn.split(".")
