"""Global row ids of a table to local ones, and its weight, which refuses to be indexed by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from ..comm.collectives import Communicator
from ..errors import PlanError, RefusedCallError
from ..format.dims import Dim, size
from ..format.slices import ranges

# Ids outside of a table are errors, as with a table that is not sharded.
#
# An embedding refuses such ids by itself. On a rank that holds a part of its rows, an id of another rank's
# part is ordinary, so that each rank has to ask whether any of them has the row. On a CPU that is an error at
# once. On a GPU it is one in the next call, as no call waits for the device.


class OutOfRangeError(PlanError, IndexError):
    """A model was called with ids that its table does not have."""


class LaterError:
    """Reports a finding of a call: at once on a CPU, otherwise in the next call, even if it is known before.

    So ranks that are called with the same values raise in the same call.
    """

    def __init__(self) -> None:
        self._earlier: Callable[[], None] = _nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an object that has seen no call."""
        return type(self)()

    def raise_earlier(self) -> None:
        """Raise the error of the previous call."""
        earlier, self._earlier = self._earlier, _nothing
        earlier()

    def report(self, found: Tensor, require: Callable[[Tensor, str], None]) -> None:
        """Call ``require`` with the finding, on the CPU, and with the words for the call that found it."""
        read = to_host(found)
        if is_on_host(found):
            require(read(), "")
        else:
            self._earlier = lambda: require(read(), " of the call before")


class IdCheck:
    """The check of the ids that one module looks up.

    Args:
        num_rows: the number of rows of the table, global.
    """

    def __init__(self, num_rows: int, table: str = "") -> None:
        self._num_rows = num_rows
        self._table = table
        self._later = LaterError()

    def __call__(self, ids: Tensor) -> None:
        """Check ids, of any shape and integer dtype; ids without numbers (on meta) are not checked."""
        self._later.raise_earlier()
        if ids.numel() and not ids.is_meta:
            self._later.report(torch.stack(torch.aminmax(ids.detach())), self._require)

    def _require(self, found: Tensor, which: str) -> None:
        least, most = found.tolist()
        require_in_table(least, most, self._num_rows, self._table or "an embedding", which)


def require_in_table(least: int, most: int, num_rows: int, table: str, which: str = "") -> None:
    """Check the smallest and the largest one of some ids.

    Args:
        num_rows: the number of rows of the table, global.
    """
    if least < 0 or most >= num_rows:
        raise OutOfRangeError(
            f"{table} was given the id {least if least < 0 else most}{which}, and its table has the rows 0 "
            f"to {num_rows - 1}; check the tokenizer and its padding id (token ids), or the length of the "
            "sequence (positions)"
        )


def is_on_host(x: Tensor) -> bool:
    """Return whether reading the values of a tensor waits for no device."""
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
    """Return whether a compiler or a CUDA graph records the running code, which then cannot read values."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _nothing() -> None:
    """Do nothing: no call came before."""


MAX_TABLE_ROWS = 2**26
"""Most rows of a table whose local ids are looked up: 8 bytes for each."""


class RowIds:
    """Global row ids of a table to local ones, for any layout of its rows.

    Args:
        past_end: out-of-shard ids become ``num_rows``, one past the last local row, instead of 0.

    Attributes:
        num_rows: local number of rows.
        num_global_rows: global number of rows.
    """

    def __init__(
        self, comm: Communicator, layout: Dim, *, past_end: bool = False, table: str | None = None
    ) -> None:
        local_ranges = ranges(layout, comm.mesh, comm.rank)
        self.num_rows = sum(stop - start for start, stop in local_ranges)
        self.num_global_rows = size(layout)
        self._out_of_shard_id = self.num_rows if past_end else 0
        self._check = None if table is None else IdCheck(self.num_global_rows, table)
        self._range = local_ranges[0] if len(local_ranges) == 1 else None
        if len(local_ranges) > 1 and size(layout) > MAX_TABLE_ROWS:
            raise PlanError(f"local ids cannot be looked up among more than {MAX_TABLE_ROWS} rows")
        self._held = local_ranges
        self._table: Tensor | None = None
        if len(local_ranges) > 1:
            # The local id of each global row, int64 [num_global_rows]; -1 for out-of-shard rows.
            local_ids = torch.full((self.num_global_rows,), -1, dtype=torch.int64, device="cpu")
            local = 0
            for start, stop in local_ranges:
                local_ids[start:stop] = torch.arange(local, local + stop - start, device="cpu")
                local += stop - start
            self._table = local_ids.to(comm.device)

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return local ids of ``ids``' dtype, and the mask of out-of-shard ones, both of ``ids``' shape."""
        outside: Tensor | None = None
        if self._check is not None and is_recorded(ids):
            outside = (ids < 0) | (ids >= self.num_global_rows)
        elif self._check is not None:
            self._check(ids)
        if self._table is not None:
            valid_ids = ids if outside is None else ids.masked_fill(outside, 0)
            if self._table.device != ids.device:
                self._table = self._table.to(ids.device)
            local = self._table[valid_ids]
            out_of_shard = local < 0
        else:
            start, stop = self._range or (0, 0)
            local = ids - start
            out_of_shard = (ids < start) | (ids >= stop)
        local = local.masked_fill(out_of_shard, self._out_of_shard_id)
        if outside is not None:
            local = local.masked_fill(outside, self.num_rows)
        return local.to(ids.dtype), out_of_shard

    def local(self, row: int) -> int | None:
        """Return the local id of one row; None if another rank holds it."""
        before = 0
        for start, stop in self._held:
            if start <= row < stop:
                return before + row - start
            before += stop - start
        return None


def zero_out_of_shard(x: Tensor, out_of_shard: Tensor) -> Tensor:
    """Replace rows of out-of-shard ids by zeros; the gradient is zero there, too.

    Args:
        x: local ``[*out_of_shard.shape, ...]``.
    """
    return x.masked_fill(out_of_shard.reshape(out_of_shard.shape + (1,) * (x.dim() - out_of_shard.dim())), 0)


# A rank's rows have other numbers than tokens, by which users read and write rows.


def _refuse_numbers(self: Tensor, *args: object, **kwargs: object) -> NoReturn:
    raise RefusedCallError(
        f"the weight {tuple(self.shape)} of an embedding or a head was indexed, and it has a rank's rows of "
        "the vocabulary, which are not numbered as tokens. embedding(ids) returns rows of tokens; to "
        "write some, call local, elsewhere = embedding.rows(ids) on all ranks, and then write to "
        "embedding.weight.detach()[local[~elsewhere]]"
    )


class _Unnumbered:
    """Operations of tensors that take numbers of rows."""

    __getitem__ = __setitem__ = index_select = select = _refuse_numbers
    index_add_ = index_copy_ = index_fill_ = index_put_ = _refuse_numbers


class VocabularyRows(_Unnumbered, nn.Parameter):
    """A weight with a rank's rows of a vocabulary, which refuses to be indexed; otherwise it is a parameter.

    Its ``data`` is a plain tensor, as compiled code expects of parameters.
    """


# Otherwise optimizers on a GPU would go through all parameters one by one. torch appends DTensor in this way.
_foreach_supported_types.append(VocabularyRows)
