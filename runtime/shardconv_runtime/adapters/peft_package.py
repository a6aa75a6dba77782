"""The peft library: imported when an adapter is used, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import PlanError, ShardconvError, SourceError, brief


def peft() -> Any:
    """The library.

    Raises:
        PlanError: it is not installed.
    """
    try:
        import peft as package
    except ImportError as error:
        raise PlanError(
            f"adapters need the peft library ({error}); run `pip install shardconv-runtime[peft]`"
        ) from error
    return package


@contextmanager
def naming_errors(what: str) -> Iterator[None]:
    """Raise what the library raises as errors of ours.

    Args:
        what: of which adapter, for messages.

    Raises:
        SourceError: the library refuses the adapter for this model.
    """
    try:
        yield
    except ShardconvError:
        raise
    except Exception as error:  # the library raises anything
        raise SourceError(
            f"{what}: peft {peft().__version__} refuses it for this model ({brief(error)}); correct its "
            "adapter_config.json, or adapt the model that it was made for"
        ) from error
