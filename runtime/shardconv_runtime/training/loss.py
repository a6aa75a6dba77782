"""Cross entropy over a vocabulary that is sharded over ranks, without gathering the logits.

Each rank reads its own columns of the logits once and computes three numbers per token: the largest logit,
the sum of exponentials relative to it, and the logit of the label if the rank holds it (a fourth one for
label smoothing). One all_gather exchanges these; all ranks combine them in the same order and so get the
same bits. The loss is replicated, and so is its gradient: the gradient of the local logits,
``softmax - one_hot(label)``, needs no collective.
(Megatron-LM, arXiv 1909.08053, section 3; the combination is that of online softmax, arXiv 1805.02867.)

Low precision logits are computed with in float32, as transformers does, but a float32 copy of them never
exists: both directions iterate over chunks of tokens.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..comm.collectives import Communicator
from ..format.dims import Dim, size, to_text
from ..format.slices import local_size
from ..parallel.row_ids import LaterError, RowIds
from .token_losses import LossInputError, TokenLosses, VocabColumns

# Labels outside of the vocabulary are errors; on a GPU one call later, as no call waits for the device.


class LabelCheck:
    """The check of the labels of one loss.

    Args:
        vocab_size: global.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._later = LaterError()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a model has called nothing yet."""
        return type(self)(self._vocab_size)

    def __call__(self, labels: Tensor, ignore_index: int) -> None:
        """Check labels, of any shape and integer dtype.

        Raises:
            LossInputError: labels on a CPU are outside of the vocabulary, or those of the call before on
                another device were. Ranks with the same labels raise in the same call.
        """
        self._later.raise_earlier()
        if labels.numel():
            shape = tuple(labels.shape)
            found = self._found(labels, ignore_index)
            self._later.report(found, lambda x, which: self._require_none(x, shape, ignore_index, which))

    def _found(self, labels: Tensor, ignore_index: int) -> Tensor:
        """The number of bad labels, the position of the first one, and that label: int64 ``[3]``."""
        flat = labels.to(torch.int64).reshape(-1)
        bad = ((flat < 0) | (flat >= self._vocab_size)) & (flat != ignore_index)
        first = bad.to(torch.uint8).argmax()
        return torch.stack([bad.sum(), first, flat[first]])

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

    Args:
        comm: this rank.
        layout: of the vocabulary, the last dim of the logits: any tree, with shards of any size, also empty.
        chunk_elements: logits that are held in float32 at a time, at least one row of them; by default
            suited to the device.
        check_labels: raise for labels outside of the vocabulary; on an accelerator the call after the one
            that was given them raises. Compiled code does not check. The loss of a bad label is infinite.

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
        """The loss, the same bits on every rank; one all_gather of ``[3, tokens]``, 4 with smoothing.

        Backward: a slice of the full gradient, in the dtype of the logits; no collective, and no second
        derivative.

        Args:
            logits: local ``[..., local_size]``, floating point.
            labels: global ids ``[...]``, of an integer dtype, on any device; the same on all ranks that
                share the logits.
            ignore_index: tokens with this label have no loss.
            label_smoothing: from 0 to 1.
            reduction: ``"mean"`` of the tokens with a loss (nan without any), ``"sum"`` or ``"none"``.
            weight: None; weights of classes are not implemented.
            num_items: divides the sum, instead of the number of tokens with a loss, e.g. that of several
                batches.

        Returns:
            Replicated, float64 for float64 logits, else float32: a scalar, or ``[...]`` for ``"none"``.

        Raises:
            LossInputError: before any collective: a shape, dtype or option is not as above, or a label is
                outside of the vocabulary (on every rank, as they have the same labels), see ``check_labels``.
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
        """The loss of each token ``[tokens]``, and which tokens are ignored ``[tokens]``, bool."""
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
