"""Cross entropy over a vocabulary that is split over ranks, without gathering the logits.

Each rank reads its own columns of the logits once and makes three numbers of each token: the largest logit,
the sum of exponentials relative to it, and the logit of the label where the rank holds it (a fourth one for
label smoothing). One collective moves these; all ranks combine them in coordinate order and so get the same
bits. The loss is whole on every rank, and so is the gradient that arrives for it: the gradient of the local
logits, ``softmax - one_hot(label)``, needs no collective.
(Megatron-LM, arXiv 1909.08053, section 3; the combination is that of online softmax, arXiv 1805.02867.)

Low precision logits are computed with in float32, as transformers does, but a float32 copy of them never
exists: both directions walk over chunks of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import Communicator
from ..errors import ShardconvError
from ..format.dims import Dim, axes_of, size, to_text
from ..format.slices import Range, gather_index, local_size
from ..parallel.boundary import RowIds

CHUNK_ELEMENTS = 2**24
"""Logits that are held in float32 at a time: 64 MiB, enough to keep an accelerator busy."""

CPU_CHUNK_ELEMENTS = 2**20
"""The same on a CPU, where less stays in caches: less than half of the time."""

Loss = Callable[..., Tensor]
"""What ``model.loss_function`` of transformers is set to."""


class LossInputError(ShardconvError):
    """A loss was called with labels, shapes or options that it cannot use."""


class VocabParallelCrossEntropy:
    """``F.cross_entropy`` of whole logits, from this rank's columns of them.

    Args:
        comm: this rank.
        layout: of the vocabulary, the last dim of the logits: any tree, shares of any size, none too.
        chunk_elements: logits that are held in float32 at a time, one row of them at least; by default what
            suits the device.
        check_labels: raise for labels outside of the vocabulary. Labels on an accelerator cost a wait for
            it. Compiled code does not check: the loss of such a label is infinite there, and in general
            if this is False.

    Attributes:
        vocab_size: global.
        local_size: of this rank.
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
        self._columns = _Columns(comm, layout)
        self._rows = RowIds(comm, layout)
        self._layout = to_text(layout)
        self._chunk_elements = chunk_elements
        self._checks_labels = check_labels

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
        """The loss, the same bits on every rank; one all_gather of ``[3, tokens]``, 4 with smoothing.

        Backward: a slice of the whole gradient, in the dtype of the logits; no collective, and no second
        derivative.

        Args:
            logits: local ``[..., local_size]``.
            labels: global ids ``[...]``, of an integer dtype, on any device; the same on all ranks that
                share the logits.
            ignore_index: tokens with this label have no loss.
            label_smoothing: from 0 to 1.
            reduction: ``"mean"`` of the tokens with a loss (nan without any), ``"sum"`` or ``"none"``.
            weight: None; weights of classes are not implemented.
            num_items: divides the sum, instead of the number of tokens with a loss (which may be those of
                several batches).

        Returns:
            float64 for float64 logits, else float32: a scalar, ``[...]`` if nothing is reduced.

        Raises:
            LossInputError: before anything is communicated: another shape or dtype than described above, an
                option out of range, a label outside of the vocabulary (on every rank, as they have the
                same labels).
        """
        _check_options(label_smoothing, reduction, weight, num_items)
        self._check_tensors(logits, labels)
        if self._checks_labels and not torch.compiler.is_compiling():
            self._check_ids(labels, ignore_index)
        flat = labels.to(logits.device, torch.int64).reshape(-1)
        ignored = flat == ignore_index
        outside = (flat < 0) | (flat >= self.vocab_size)
        ids, foreign = self._rows(flat.masked_fill(outside, 0))
        losses: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
            logits.reshape(flat.shape[0], self.local_size),
            ids,
            foreign | outside,
            ignored,
            label_smoothing,
            self._columns,
            self._rows_at_a_time(logits.device),
        )
        if reduction == "none":
            return losses.reshape(labels.shape)
        if reduction == "sum":
            return losses.sum()
        if num_items is None:
            return losses.sum() / (~ignored).sum()
        return losses.sum() / (num_items.to(losses.device) if isinstance(num_items, Tensor) else num_items)

    def _rows_at_a_time(self, device: torch.device) -> int:
        default = CPU_CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS
        return max(1, (self._chunk_elements or default) // max(1, self.local_size))

    def _check_tensors(self, logits: Tensor, labels: Tensor) -> None:
        if not logits.is_floating_point():
            raise LossInputError(f"logits must be of a floating point dtype, not {logits.dtype}")
        if not logits.dim() or logits.shape[-1] != self.local_size:
            raise LossInputError(
                f"logits of shape {tuple(logits.shape)}: their last dim should be this rank's "
                f"{self.local_size} of {self.vocab_size} columns, laid out as {self._layout}; give the loss "
                "the logits of this rank before they are gathered"
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

    def _check_ids(self, labels: Tensor, ignore_index: int) -> None:
        """Look at the labels where they are: on the CPU no accelerator is waited for."""
        labels = labels.to(torch.int64)
        bad = ((labels < 0) | (labels >= self.vocab_size)) & (labels != ignore_index)
        if not bad.any():
            return
        position = tuple(bad.nonzero()[0].tolist())
        raise LossInputError(
            f"label {int(labels[position])} at position {position} of labels of shape {tuple(labels.shape)} "
            f"is outside of the vocabulary of {self.vocab_size} tokens, and is not ignore_index "
            f"({ignore_index}); {int(bad.sum())} labels are"
        )


def parallel_loss(loss_type: str | None, cross_entropy: VocabParallelCrossEntropy) -> Loss | None:
    """The loss that takes the place of transformers' own for this kind of model.

    Args:
        loss_type: ``model.loss_type``; transformers takes what it does not know for causal language models.
        cross_entropy: over the columns of this rank.

    Returns:
        For ``model.loss_function``; None where the loss is another one, which needs whole logits.
    """
    make = _maker(loss_type)
    return make(cross_entropy) if make is not None else None


def has_parallel_loss(loss_type: str | None) -> bool:
    """Whether there is a loss from shards of the logits for this kind of model."""
    return _maker(loss_type) is not None


def _maker(loss_type: str | None) -> Callable[[VocabParallelCrossEntropy], Loss] | None:
    from transformers.loss import loss_utils

    whole = loss_utils.LOSS_MAPPING.get(loss_type, loss_utils.ForCausalLMLoss)
    if whole is loss_utils.ForCausalLMLoss:
        return causal_lm_loss
    return masked_lm_loss if whole is loss_utils.ForMaskedLMLoss else None


def causal_lm_loss(cross_entropy: VocabParallelCrossEntropy) -> Loss:
    """transformers' ``ForCausalLMLoss`` on local logits: the token at a place predicts the next one.

    Differences: float64 logits stay float64, and a bad label is a ``LossInputError``.
    """

    def loss(
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """A scalar.

        Args:
            logits: local ``[..., S, local_size]``.
            labels: ``[..., S]``, not shifted; not read if there are ``shift_labels``.
            vocab_size: not read: the layout says it. Some models pass the last size of their logits, which is
                local; with any other wrong one, labels and rows of logits do not fit each other.
            num_items_in_batch: divides the sum; None: as many tokens as have a loss.
            ignore_index: tokens with this label have no loss.
            shift_labels: ``[..., S]``, shifted already.
            kwargs: not read, as in transformers.

        Raises:
            LossInputError: see ``VocabParallelCrossEntropy``.
        """
        if shift_labels is None:
            if labels is None:
                raise LossInputError("a causal language model's loss needs labels or shift_labels")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return _language_model_loss(cross_entropy, logits, shift_labels, num_items_in_batch, ignore_index)

    return loss


def masked_lm_loss(cross_entropy: VocabParallelCrossEntropy) -> Loss:
    """transformers' ``ForMaskedLMLoss`` on local logits: nothing is shifted.

    Differences: float64 logits stay float64, and a bad label is a ``LossInputError``.
    """

    def loss(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> Tensor:
        """A scalar; arguments as those of ``causal_lm_loss``, ``labels`` belonging to their own places."""
        return _language_model_loss(cross_entropy, logits, labels, num_items_in_batch, ignore_index)

    return loss


def _language_model_loss(
    cross_entropy: VocabParallelCrossEntropy,
    logits: Tensor,
    labels: Tensor,
    num_items: Tensor | int | None,
    ignore_index: int,
) -> Tensor:
    rows = logits.shape[:-1]
    if labels.shape != rows and labels.numel() == rows.numel():
        labels = labels.reshape(rows)  # transformers flattens both
    return cross_entropy(logits, labels, ignore_index=ignore_index, num_items=num_items)


class _Columns:
    """The vocabulary's columns on the ranks: which are counted where, and what counts put together.

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

    def statistics(self, logits: Tensor, ids: Tensor, foreign: Tensor, *, smoothed: bool) -> Tensor:
        """What the other ranks need to know of these tokens.

        Args:
            logits: local ``[n, V_local]``.
            ids: local ``[n]``.
            foreign: ``[n]``, bool: other ranks hold the label.
            smoothed: the fourth row is wanted.

        Returns:
            ``[3 or 4, n]``: largest logit (-inf if there is none), sum of exponentials relative to it, logit
            of the label (-inf if foreign), sum of distances to the largest.
        """
        dtype = _dtype(logits)
        if not logits.shape[1]:
            nothing = logits.new_zeros((3 + smoothed, logits.shape[0]), dtype=dtype)
            nothing[:3:2] = -math.inf
            return nothing
        largest = logits.amax(1).to(dtype)
        label = logits.gather(1, ids[:, None])[:, 0].to(dtype).masked_fill(foreign, -math.inf)
        shifted = logits - _finite(largest)[:, None]  # in float32, without a copy of the logits before
        distances = [-self._sum(shifted)] if smoothed else []
        return torch.stack([largest, self._sum(shifted.exp_()), label, *distances])

    def combine(self, own: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
        """Put the statistics of all ranks together; one all_gather.

        Args:
            own: ``[3 or 4, T]`` of this rank.
            smoothing: of the labels.

        Returns:
            Loss, largest logit and sum of exponentials relative to it, of each token ``[T]``.
        """
        shares = self._comm.concatenate(own[None], self._axes)
        largest = shares[:, 0].amax(0)
        sums = (shares[:, 1] * (shares[:, 0] - largest).exp()).sum(0)
        losses = sums.log() + (1 - smoothing) * (largest - shares[:, 2].amax(0))
        if smoothing:
            distances = shares[:, 3].sum(0)
            for share, count in zip(shares.unbind(), self._num_counted, strict=True):
                distances = distances + count * (largest - _finite(share[0]))
            losses = losses + smoothing / self.vocab_size * distances
        return losses, largest, sums

    def _sum(self, x: Tensor) -> Tensor:
        """Over the columns that this rank counts: those that several ranks hold are counted once."""
        if self._counted is None:
            return x.sum(1)
        parts = [x[:, start:stop].sum(1) for start, stop in self._counted]
        return torch.stack(parts).sum(0) if parts else x.new_zeros(x.shape[0])


class _TokenLosses(torch.autograd.Function):
    """The loss of each token, ``[T]``, of local logits ``[T, V_local]``; zero for ignored ones."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        foreign: Tensor,
        ignored: Tensor,
        smoothing: float,
        columns: _Columns,
        chunk: int,
    ) -> Tensor:
        """One all_gather; see ``_Columns``."""
        own = [
            columns.statistics(*tensors, smoothed=smoothing > 0)
            for tensors in _chunks(chunk, logits, ids, foreign)
        ]
        losses, largest, sums = columns.combine(torch.cat(own, 1), smoothing)
        ctx.save_for_backward(logits, ids, foreign, ignored, largest, sums)
        ctx.smoothing, ctx.vocab_size, ctx.chunk = smoothing, columns.vocab_size, chunk
        return losses.masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """``grad`` is the whole one on every rank; no collective.

        Raises:
            LossInputError: the gradient is to be differentiated again.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise LossInputError(
                "the loss of logits that are split over ranks can be differentiated once; leave create_graph "
                "out, or take the loss of whole logits"
            )
        logits, ids, foreign, ignored, largest, sums = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0)
        per_label = (grad * (1 - ctx.smoothing)).masked_fill(foreign, 0)
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

    A compiler gets them whole: it would write the loop out, once for each number of tokens, and needs none to
    keep float32 values out of memory.
    """
    if torch.compiler.is_compiling():
        return iter([tensors])
    return zip(*(torch.split(x, length) for x in tensors), strict=True)


def _dtype(logits: Tensor) -> torch.dtype:
    """What is computed in."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _finite(largest: Tensor) -> Tensor:
    """0 for the largest of no logits, or of such that are all -inf: relative to it they are -inf, not nan."""
    return largest.masked_fill(largest == -math.inf, 0)


def _check_options(
    label_smoothing: float, reduction: str, weight: Tensor | None, num_items: Tensor | int | None
) -> None:
    if weight is not None:
        raise LossInputError(
            "weights of classes are not implemented for logits that are split over ranks; leave weight out, "
            "or take the loss of whole logits"
        )
    if reduction not in ("mean", "sum", "none"):
        raise LossInputError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise LossInputError(f"label_smoothing must be from 0.0 to 1.0, not {label_smoothing}")
    if num_items is not None and reduction != "mean":
        raise LossInputError(f"num_items divides the loss, reduction={reduction!r} does not: leave one out")
