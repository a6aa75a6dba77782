"""Cross entropy over a vocabulary that is sharded over ranks, without gathering the logits.

Each rank reads its own columns of the logits once and computes three numbers per token: the largest logit,
the sum of exponentials relative to it, and the logit of the label if the rank holds it (a fourth one for
label smoothing). One all_gather exchanges these; all ranks combine them in the same order and so get the
same bits. The loss and its gradient are replicated: the gradient of the local logits,
``softmax - one_hot(label)``, needs no collective.
(Megatron-LM, arXiv 1909.08053, section 3; they are combined as in online softmax, arXiv 1805.02867.)

Low precision logits are computed with in float32, as transformers does, but a float32 copy of them never
exists: both directions iterate over chunks of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from ..comm.collectives import Communicator, refuse_second_gradient
from ..errors import ShardconvError
from ..format.dims import Dim, axes_of, size, to_text
from ..format.slices import Range, gather_index, local_size
from ..parallel.row_ids import LaterError, RowIds


class LossInputError(ShardconvError):
    """A loss was called with labels, shapes or options that it cannot use."""


class VocabColumns:
    """The columns of the logits on each rank, and which of them the rank counts.

    One all_gather exchanges these numbers (``statistics``), and every rank combines them (``combine``).

    A column that several ranks hold is counted by one of them.
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
        """Return this rank's statistics of some tokens.

        Args:
            logits: local ``[n, V_local]``.
            ids: local ``[n]``, int64: the label's column on this rank.
            out_of_shard: ``[n]``, bool: this rank does not hold the label.

        Returns:
            ``[3 or 4, n]``, float64 for float64 logits, otherwise float32: largest logit (-inf without any),
            sum of exponentials relative to it, logit of the label (-inf if out of shard), sum of distances to
            the largest.
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
        """Return the sum ``[n]`` of local ``[n, V_local]`` over the columns that this rank counts."""
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
        """Return the losses ``[T]``; one all_gather.

        Args:
            logits: local ``[T, V_local]``.
            ids: local ``[T]``, int64: the label's column on this rank.
            out_of_shard: ``[T]``, bool: this rank does not hold the label.
            ignored: ``[T]``, bool: the token has no loss.
        """
        statistics = [
            columns.statistics(*tensors, smoothed=smoothing > 0)
            for tensors in _chunks(chunk, logits, ids, out_of_shard)
        ]
        losses, largest, sums = columns.combine(torch.cat(statistics, 1), smoothing)
        ctx.save_for_backward(logits, ids, out_of_shard, ignored, largest, sums)
        ctx.smoothing, ctx.vocab_size, ctx.chunk = smoothing, columns.vocab_size, chunk
        return losses.masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the local logits ``[T, V_local]``; no collective.

        Args:
            grad: replicated ``[T]``.
        """
        refuse_second_gradient()
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
    """Return ``exp(x - largest) * per_sum - per_column`` - ``per_label`` at the label, ``[n, V_local]``."""
    out = (logits - largest[:, None]).exp_()
    torch.addcmul(-per_column[:, None], out, per_sum[:, None], out=out)
    return out.scatter_add_(1, ids[:, None], -per_label[:, None])


def _fused_gradient(
    logits: Tensor, ids: Tensor, largest: Tensor, per_sum: Tensor, per_column: Tensor, per_label: Tensor
) -> Tensor:
    """Compute the same in the dtype of the logits in one pass, for compilers."""
    out = (logits - largest[:, None]).exp() * per_sum[:, None] - per_column[:, None]
    is_label = torch.arange(logits.shape[1], device=logits.device) == ids[:, None]
    return torch.where(is_label, out - per_label[:, None], out).to(logits.dtype)


def _chunks(length: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the tensors, at most ``length`` rows at a time.

    A compiler gets the full tensors: it would unroll the loop for each number of tokens, and needs no chunks
    to keep float32 values out of memory.
    """
    if torch.compiler.is_compiling():
        return iter([tensors])
    return zip(*(torch.split(x, length) for x in tensors), strict=True)


def _finite(largest: Tensor) -> Tensor:
    """Return 0 for the -inf of a rank without logits or with only -inf, relative to which these stay -inf."""
    return largest.masked_fill(largest == -math.inf, 0)


class LabelCheck:
    """The check of the labels of one loss.

    Args:
        vocab_size: global.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._later = LaterError()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an object that has seen no call."""
        return type(self)(self._vocab_size)

    def __call__(self, labels: Tensor, ignore_index: int) -> None:
        """Check labels, of any shape and integer dtype."""
        self._later.raise_earlier()
        if labels.numel():
            shape = tuple(labels.shape)
            # The number of bad labels, the position of the first one, and that label.
            flat = labels.to(torch.int64).reshape(-1)
            bad = ((flat < 0) | (flat >= self._vocab_size)) & (flat != ignore_index)
            first = bad.to(torch.uint8).argmax()
            summary = torch.stack([bad.sum(), first, flat[first]])
            self._later.report(summary, lambda x, which: self._require_none(x, shape, ignore_index, which))

    def _require_none(self, found: Tensor, shape: tuple[int, ...], ignore_index: int, which: str) -> None:
        count, first, label = found.tolist()
        if not count:
            return
        position = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), shape))
        raise LossInputError(
            f"label {label} at position {position} of labels{which} of shape {shape} is outside of the "
            f"vocabulary of {self._vocab_size} tokens, and is not ignore_index ({ignore_index}); "
            f"{count} labels are"
        )


CHUNK_ELEMENTS = 2**24
"""Logits that are held in float32 at a time: 64 MiB, enough to keep an accelerator busy."""

CPU_CHUNK_ELEMENTS = 2**20
"""The same on a CPU: the chunk stays in caches, which takes less than half of the time."""


class VocabParallelCrossEntropy:
    """``F.cross_entropy`` of the full logits, from this rank's columns of them.

    Attributes:
        vocab_size: global.
        local_size: the local size of this rank.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Dim,
        *,
        chunk_elements: int | None = None,
        check_labels: bool = True,
    ) -> None:
        self.vocab_size = size(layout)
        self.local_size = local_size(layout, comm.mesh, comm.rank)
        self._columns = VocabColumns(comm, layout)
        self._rows = RowIds(comm, layout)
        self._layout = to_text(layout)
        self._chunk_elements = chunk_elements
        self._check_ids = LabelCheck(self.vocab_size) if check_labels else None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        weight: Tensor | None = None,
        num_items: Tensor | int | None = None,
    ) -> Tensor:
        """Return the loss, bitwise equal on every rank; one all_gather of ``[3, tokens]``, 4 with smoothing.

        Backward: a slice of the full gradient, in the dtype of the logits; no collective, and no second
        derivative.

        Args:
            logits: local ``[..., local_size]``, floating point.
            labels: global ids ``[...]``, of an integer dtype, on any device; the same on all ranks that
                share the logits.

        Returns:
            Replicated, float64 for float64 logits, otherwise float32: a scalar, or ``[...]`` for ``"none"``.
        """
        if weight is not None:
            raise LossInputError(
                "weights of classes are not implemented for sharded logits; leave weight out, or compute the "
                "loss of the full logits"
            )
        if reduction not in ("mean", "sum", "none"):
            raise LossInputError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
        if not 0.0 <= label_smoothing <= 1.0:
            raise LossInputError(f"label_smoothing must be from 0.0 to 1.0, not {label_smoothing}")
        if num_items is not None and reduction != "mean":
            raise LossInputError(
                f"num_items divides the loss, reduction={reduction!r} does not: leave one out"
            )
        self._check_tensors(logits, labels)
        if self._check_ids is not None and not torch.compiler.is_compiling():
            self._check_ids(labels, ignore_index)
        losses, ignored = self._token_losses(logits, labels, ignore_index, label_smoothing)
        if reduction == "none":
            return losses.reshape(labels.shape)
        if reduction == "sum":
            return losses.sum()
        if num_items is None:
            return losses.sum() / (~ignored).sum()
        return losses.sum() / (num_items.to(losses.device) if isinstance(num_items, Tensor) else num_items)

    def _token_losses(
        self, logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each token ``[tokens]``, and which tokens are ignored ``[tokens]``, bool."""
        flat = labels.to(logits.device, torch.int64).reshape(-1)
        ignored = flat == ignore_index
        outside = (flat < 0) | (flat >= self.vocab_size)
        ids, out_of_shard = self._rows(flat.masked_fill(outside, 0))
        default = CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else CHUNK_ELEMENTS
        rows_at_once = max(1, (self._chunk_elements or default) // max(1, self.local_size))
        losses: Tensor = TokenLosses.apply(  # type: ignore[no-untyped-call]
            logits.reshape(flat.shape[0], self.local_size),
            ids,
            out_of_shard | outside,
            ignored,
            label_smoothing,
            self._columns,
            rows_at_once,
        )
        return losses, ignored

    def _check_tensors(self, logits: Tensor, labels: Tensor) -> None:
        if not logits.is_floating_point():
            raise LossInputError(f"logits must be of a floating point dtype, not {logits.dtype}")
        if not logits.dim() or logits.shape[-1] != self.local_size:
            raise LossInputError(
                f"logits of shape {tuple(logits.shape)}: their last dim should be this rank's "
                f"{self.local_size} of {self.vocab_size} columns, laid out as {self._layout}; pass the "
                "logits of this rank before they are gathered"
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise LossInputError(
                f"labels must be token ids of an integer dtype, not {labels.dtype}; probabilities of classes "
                "are not implemented"
            )
        if labels.shape != logits.shape[:-1]:
            raise LossInputError(
                f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}: "
                f"they should be {tuple(logits.shape[:-1])}, one for each row of logits"
            )
