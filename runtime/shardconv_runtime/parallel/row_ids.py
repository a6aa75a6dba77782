"""Global row ids of a table to local ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.collectives import Communicator
from ..errors import PlanError
from ..format.dims import Dim, size
from ..format.slices import ranges
from .id_checks import IdCheck, is_recorded

MAX_TABLE_ROWS = 2**26
"""Most rows of a table whose local ids are looked up: 8 bytes for each."""


class RowIds:
    """Global row ids of a table to local ones, for any layout of its rows.

    Args:
        comm: this rank.
        layout: of the rows.
        past_end: out-of-shard ids become ``num_rows``, one past the last local row, instead of 0.
        table: refuse ids that no rank has a row for, as the table does that is not sharded: its name. None:
            such ids are out-of-shard.

    Attributes:
        num_rows: local number of rows.
        num_global_rows: global number of rows.

    Raises:
        PlanError: the rank's rows are not one range, and the table is too large for a lookup.
    """

    def __init__(
        self, comm: Communicator, layout: Dim, *, past_end: bool = False, table: str | None = None
    ) -> None:
        held = ranges(layout, comm.mesh, comm.rank)
        self.num_rows = sum(stop - start for start, stop in held)
        self.num_global_rows = size(layout)
        self._out_of_shard_id = self.num_rows if past_end else 0
        self._check = None if table is None else IdCheck(self.num_global_rows, table)
        self._range = held[0] if len(held) == 1 else None
        if len(held) > 1 and size(layout) > MAX_TABLE_ROWS:
            raise PlanError(f"local ids cannot be looked up among more than {MAX_TABLE_ROWS} rows")
        self._held = held
        self._table = _row_table(size(layout), held).to(comm.device) if len(held) > 1 else None

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Local ids of ``ids``' dtype, and the bool mask of out-of-shard ones; both of ``ids``' shape.

        Raises:
            OutOfRangeError: see ``IdCheck``. Compiled code raises nothing here, and gives each rank a local
                id past its rows, which the operator that looks it up refuses.
        """
        outside: Tensor | None = None
        if self._check is not None and is_recorded(ids):
            outside = (ids < 0) | (ids >= self.num_global_rows)
        elif self._check is not None:
            self._check(ids)
        if self._table is not None:
            known = ids if outside is None else ids.masked_fill(outside, 0)
            local = self._table_on(ids.device)[known]
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
        """The local id of one row; None if another rank holds it."""
        before = 0
        for start, stop in self._held:
            if start <= row < stop:
                return before + row - start
            before += stop - start
        return None

    def _table_on(self, device: torch.device) -> Tensor:
        assert self._table is not None
        if self._table.device != device:
            self._table = self._table.to(device)
        return self._table


def zero_out_of_shard(x: Tensor, out_of_shard: Tensor) -> Tensor:
    """``x`` with zeros where ids were out-of-shard; its gradient is zero there, too.

    Args:
        x: local ``[*out_of_shard.shape, ...]``.
        out_of_shard: bool mask, from ``RowIds``.
    """
    return x.masked_fill(out_of_shard.reshape(out_of_shard.shape + (1,) * (x.dim() - out_of_shard.dim())), 0)


def _row_table(num_rows: int, held: tuple[tuple[int, int], ...]) -> Tensor:
    """Local id of each global row, -1 for out-of-shard ones: int64 ``[num_rows]``."""
    table = torch.full((num_rows,), -1, dtype=torch.int64, device="cpu")
    local = 0
    for start, stop in held:
        table[start:stop] = torch.arange(local, local + stop - start, device="cpu")
        local += stop - start
    return table
