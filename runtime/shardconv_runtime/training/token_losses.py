"""The cross entropy of each token from logits that are sharded over the vocabulary, and its gradient.

Each rank reduces its columns to a few numbers per token (``VocabColumns.statistics``), which one all_gather
exchanges and every rank combines (``VocabColumns.combine``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Communicator
from ..errors import ShardconvError
from ..format.dims import Dim, axes_of, size
from ..format.slices import Range, gather_index


class LossInputError(ShardconvError):
    """A loss was called with labels, shapes or options that it cannot use."""


class VocabColumns:
    """The columns of the logits on each rank, and which of them the rank counts.

    A column that several ranks hold is counted by one of them.

    Args:
        comm: this rank.
        layout: of the vocabulary.
    """

    def __init__(self, comm: Communicator, layout: Dim) -> None:
        self.vocab_size = size(layout)
        self._comm = comm
        self._axes = tuple(sorted(a for a in axes_of(layout) if comm.mesh[a] > 1))
        index = gather_index(layout, comm.mesh)
        member = comm.group(axes_of(layout)).index(comm.rank)
        counted: list[list[Range]] = [[] for _ in index.sizes]
        for piece in index.pieces:
            counted[piece.member].append((piece.start, piece.stop))
        self._num_counted = tuple(sum(b - a for a, b in parts) for parts in counted)
        all_counted = self._num_counted[member] == index.sizes[member]
        self._counted: tuple[Range, ...] | None = None if all_counted else tuple(counted[member])

    def statistics(self, logits: Tensor, ids: Tensor, out_of_shard: Tensor, *, smoothed: bool) -> Tensor:
        """This rank's statistics of some tokens.

        Args:
            logits: local ``[n, V_local]``.
            ids: local ``[n]``, int64: the label's column on this rank.
            out_of_shard: ``[n]``, bool: this rank does not hold the label.
            smoothed: add the fourth row.

        Returns:
            ``[3 or 4, n]``, float64 for float64 logits, else float32: largest logit (-inf without any), sum
            of exponentials relative to it, logit of the label (-inf if out of shard), sum of distances to the
            largest.
        """
        # The dtype of the statistics.
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if not logits.shape[1]:
            nothing = logits.new_zeros((3 + smoothed, logits.shape[0]), dtype=dtype)
            nothing[:3:2] = -math.inf
            return nothing
        largest = logits.amax(1).to(dtype)
        label = logits.gather(1, ids[:, None])[:, 0].to(dtype).masked_fill(out_of_shard, -math.inf)
        shifted = logits - _finite(largest)[:, None]  # in float32, without a copy of the logits before
        distances = [-self._sum(shifted)] if smoothed else []
        return torch.stack([largest, self._sum(shifted.exp_()), label, *distances])

    def combine(self, own: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
        """Combine the statistics of all ranks; one all_gather.

        Args:
            own: this rank's ``[3 or 4, T]``.
            smoothing: of the labels.

        Returns:
            Loss, largest logit and sum of exponentials relative to it, replicated ``[T]`` each.
        """
        gathered = self._comm.concatenate(own[None], self._axes)
        largest = gathered[:, 0].amax(0)
        sums = (gathered[:, 1] * (gathered[:, 0] - largest).exp()).sum(0)
        losses = sums.log() + (1 - smoothing) * (largest - gathered[:, 2].amax(0))
        if smoothing:
            distances = gathered[:, 3].sum(0)
            for statistics, count in zip(gathered.unbind(), self._num_counted, strict=True):
                distances = distances + count * (largest - _finite(statistics[0]))
            losses = losses + smoothing / self.vocab_size * distances
        return losses, largest, sums

    def _sum(self, x: Tensor) -> Tensor:
        """The sum ``[n]`` of local ``[n, V_local]`` over the columns that this rank counts."""
        if self._counted is None:
            return x.sum(1)
        parts = [x[:, start:stop].sum(1) for start, stop in self._counted]
        return torch.stack(parts).sum(0) if parts else x.new_zeros(x.shape[0])


class TokenLosses(torch.autograd.Function):
    """The loss of each token, replicated ``[T]``, of local logits ``[T, V_local]``; 0 for ignored tokens.

    Backward: the local columns of ``softmax - one_hot(label)`` times the gradient; no collective.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        out_of_shard: Tensor,
        ignored: Tensor,
        smoothing: float,
        columns: VocabColumns,
        chunk: int,
    ) -> Tensor:
        """The losses ``[T]``; one all_gather.

        Args:
            ctx: for the backward.
            logits: local ``[T, V_local]``.
            ids: local ``[T]``, int64: the label's column on this rank.
            out_of_shard: ``[T]``, bool: this rank does not hold the label.
            ignored: ``[T]``, bool: the token has no loss.
            smoothing: of the labels.
            columns: of this rank.
            chunk: rows of logits in float32 at a time.
        """
        own = [
            columns.statistics(*tensors, smoothed=smoothing > 0)
            for tensors in _chunks(chunk, logits, ids, out_of_shard)
        ]
        losses, largest, sums = columns.combine(torch.cat(own, 1), smoothing)
        ctx.save_for_backward(logits, ids, out_of_shard, ignored, largest, sums)
        ctx.smoothing, ctx.vocab_size, ctx.chunk = smoothing, columns.vocab_size, chunk
        return losses.masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the local logits ``[T, V_local]``; no collective.

        Args:
            ctx: from the forward.
            grad: replicated ``[T]``.

        Raises:
            LossInputError: the gradient is to be differentiated again.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise LossInputError(
                "the loss of sharded logits can be differentiated once; leave create_graph out, or compute "
                "the loss of the full logits"
            )
        logits, ids, out_of_shard, ignored, largest, sums = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0)
        per_label = (grad * (1 - ctx.smoothing)).masked_fill(out_of_shard, 0)
        terms = (largest, grad / sums, grad * (ctx.smoothing / ctx.vocab_size), per_label)
        if torch.compiler.is_compiling():
            return _fused_gradient(logits, ids, *terms), *(None,) * 6
        out = torch.empty_like(logits)
        for part, *rest in _chunks(ctx.chunk, out, logits, ids, *terms):
            if part.numel():
                part.copy_(_gradient(*rest))
        return out, *(None,) * 6


def _gradient(
    logits: Tensor, ids: Tensor, largest: Tensor, per_sum: Tensor, per_column: Tensor, per_label: Tensor
) -> Tensor:
    """``exp(x - largest) * per_sum - per_column``, less ``per_label`` at the label: ``[n, V_local]``."""
    out = (logits - largest[:, None]).exp_()
    torch.addcmul(-per_column[:, None], out, per_sum[:, None], out=out)
    return out.scatter_add_(1, ids[:, None], -per_label[:, None])


def _fused_gradient(
    logits: Tensor, ids: Tensor, largest: Tensor, per_sum: Tensor, per_column: Tensor, per_label: Tensor
) -> Tensor:
    """The same in the dtype of the logits, for compilers: one pass, where a scatter would be another."""
    out = (logits - largest[:, None]).exp() * per_sum[:, None] - per_column[:, None]
    is_label = torch.arange(logits.shape[1], device=logits.device) == ids[:, None]
    return torch.where(is_label, out - per_label[:, None], out).to(logits.dtype)


def _chunks(length: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, at most ``length`` rows at a time.

    A compiler gets the full tensors: it would unroll the loop for each number of tokens, and needs no chunks
    to keep float32 values out of memory.
    """
    if torch.compiler.is_compiling():
        return iter([tensors])
    return zip(*(torch.split(x, length) for x in tensors), strict=True)


def _finite(largest: Tensor) -> Tensor:
    """0 for the -inf of a rank without logits or with only -inf: relative to 0 these are -inf, not nan."""
    return largest.masked_fill(largest == -math.inf, 0)
