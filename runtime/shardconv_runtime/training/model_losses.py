"""transformers' losses of language models on logits that are sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .loss import VocabParallelCrossEntropy
from .token_losses import LossInputError

Loss = Callable[..., Tensor]
"""A value of ``model.loss_function`` of transformers."""


def parallel_loss(loss_type: str | None, cross_entropy: VocabParallelCrossEntropy) -> Loss | None:
    """The loss that replaces transformers' own for this kind of model.

    Args:
        loss_type: ``model.loss_type``; transformers treats an unknown one as a causal language model.
        cross_entropy: over the columns of this rank.

    Returns:
        For ``model.loss_function``; None if the loss is another one, which needs the full logits.
    """
    make = _maker(loss_type)
    return make(cross_entropy) if make is not None else None


def has_parallel_loss(loss_type: str | None) -> bool:
    """Whether the loss of this kind of model can be computed from sharded logits."""
    return _maker(loss_type) is not None


def predicts_next(loss_type: str | None) -> bool:
    """Whether the labels of this kind of model are those of the next positions."""
    return _maker(loss_type) is causal_lm_loss


def _maker(loss_type: str | None) -> Callable[[VocabParallelCrossEntropy], Loss] | None:
    from transformers.loss import loss_utils

    original = loss_utils.LOSS_MAPPING.get(loss_type, loss_utils.ForCausalLMLoss)
    if original is loss_utils.ForCausalLMLoss:
        return causal_lm_loss
    return masked_lm_loss if original is loss_utils.ForMaskedLMLoss else None


def causal_lm_loss(cross_entropy: VocabParallelCrossEntropy) -> Loss:
    """transformers' ``ForCausalLMLoss`` on local logits: the token at a position predicts the next one.

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
        """The loss, a replicated scalar; float64 for float64 logits, else float32.

        Args:
            logits: local ``[..., S, local_size]``.
            labels: global ids ``[..., S]``, not shifted; ignored if there are ``shift_labels``.
            vocab_size: ignored, since the layout has it. Some models pass the last size of their logits,
                which is local; with any other wrong one, labels and rows of logits do not fit each other.
            num_items_in_batch: divides the sum; None: the number of tokens with a loss.
            ignore_index: tokens with this label have no loss.
            shift_labels: global ids ``[..., S]``, already shifted.
            kwargs: ignored, as in transformers.

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
    """transformers' ``ForMaskedLMLoss`` on local logits: labels are not shifted.

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
        """A replicated scalar; arguments as for ``causal_lm_loss``, but labels are of their own positions."""
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
