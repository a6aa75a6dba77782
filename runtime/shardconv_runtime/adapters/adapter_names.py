"""Names of adapters and of their files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import MissingPackageError, ShardconvError, SourceError, brief

# The peft library: imported when an adapter is used, and its errors.


def peft() -> Any:
    """Import the library, or say how to install it."""
    try:
        import peft as package
    except ImportError as error:
        raise MissingPackageError(
            f"adapters need the peft library ({error}); run `pip install peft`"
        ) from error
    return package


@contextmanager
def naming_errors(what: str) -> Iterator[None]:
    """Raise errors of the library as our own."""
    try:
        yield
    except ShardconvError:
        raise
    except Exception as error:  # the library raises anything
        raise SourceError(
            f"{what}: peft {peft().__version__} refuses it for this model ({brief(error)}); correct its "
            "adapter_config.json, or adapt the model that it was made for"
        ) from error


PLAN_NAME = "adapter_plan.json"
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
DEFAULT = "default"
"""The name that peft gives an adapter without one."""
ANY_NAME = "ADAPTER"
"""The name that a plan has for an adapter, in place of the one that the user gives it: a part of FQNs of its
modules and parameters (``q_proj.lora_A.ADAPTER.weight``)."""


def renamed(fqn: str, name: str) -> str:
    """Return an FQN or a pattern of a plan, with the adapter's name in place of ``ANY_NAME``."""
    return ".".join(name if part == ANY_NAME else part for part in fqn.split("."))


def is_of_adapter(fqn: str, name: str = ANY_NAME) -> bool:
    """Return whether a module or a parameter belongs to only one adapter."""
    return name in fqn.split(".")
