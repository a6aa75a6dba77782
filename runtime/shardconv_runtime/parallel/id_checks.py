"""Ids outside of a table are errors, as they are where the table is not sharded.

An embedding refuses such ids by itself. On a rank that holds a part of its rows, an id of another rank's
part is ordinary, so that each rank has to ask whether any of them has the row. On a CPU that is an error at
once. On a GPU it is one in the next call, as no call waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import PlanError


class OutOfRangeError(PlanError, IndexError):
    """A model was called with ids that its table does not have."""


class LaterError:
    """Reports what a call found: at once on a CPU, otherwise in the next call, even if it is known before.

    So ranks that are called with the same values raise in the same call.
    """

    def __init__(self) -> None:
        self._earlier: Callable[[], None] = _nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a model has called nothing yet."""
        return type(self)()

    def raise_earlier(self) -> None:
        """Raise what the call before has found."""
        earlier, self._earlier = self._earlier, _nothing
        earlier()

    def report(self, found: Tensor, require: Callable[[Tensor, str], None]) -> None:
        """Call ``require`` with what was found, on the CPU, and with the words for the call that found it.

        Args:
            found: small; its device decides when it is read.
            require: raises if something is wrong.
        """
        read = to_host(found)
        if is_on_host(found):
            require(read(), "")
        else:
            self._earlier = lambda: require(read(), " of the call before")


class IdCheck:
    """The check of the ids that one module looks up.

    Args:
        num_rows: of the table, global.
        table: the name of the module.
    """

    def __init__(self, num_rows: int, table: str = "") -> None:
        self._num_rows = num_rows
        self._table = table
        self._later = LaterError()

    def __call__(self, ids: Tensor) -> None:
        """Check ids, of any shape and integer dtype; those without numbers (on meta) are not checked.

        Raises:
            OutOfRangeError: ids on a CPU are not in the table, or those of the call before on another device
                were not. Ranks raise alike, as they have the same ids.
        """
        self._later.raise_earlier()
        if ids.numel() and not ids.is_meta:
            self._later.report(torch.stack(torch.aminmax(ids.detach())), self._require)

    def _require(self, found: Tensor, which: str) -> None:
        least, most = found.tolist()
        require_in_table(least, most, self._num_rows, self._table or "an embedding", which)


def require_in_table(least: int, most: int, num_rows: int, table: str, which: str = "") -> None:
    """Check the smallest and the largest one of some ids.

    Args:
        least: the smallest.
        most: the largest.
        num_rows: of the table, global.
        table: its name, or its owner's.
        which: words for the call.

    Raises:
        OutOfRangeError: the table does not have them.
    """
    if least < 0 or most >= num_rows:
        raise OutOfRangeError(
            f"{table} was given the id {least if least < 0 else most}{which}, and its table has the rows 0 "
            f"to {num_rows - 1}; check the tokenizer and its padding id (token ids), or the length of the "
            "sequence (positions)"
        )


def is_on_host(x: Tensor) -> bool:
    """Whether reading the values of a tensor waits for no device."""
    return x.device.type == "cpu"


def to_host(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the CPU; the result returns it, and waits for the copy only."""
    if x.device.type != "cuda":
        return x.cpu
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    event = torch.cuda.current_stream(x.device).record_event()

    def read() -> Tensor:
        event.synchronize()
        return copy

    return read


def is_recorded(x: Tensor) -> bool:
    """Whether a compiler or a CUDA graph records the running code, so that nothing can be read in it."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _nothing() -> None:
    """No call came before."""
