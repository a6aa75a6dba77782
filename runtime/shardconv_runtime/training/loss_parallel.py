"""A model's loss from logits that stay sharded over the vocabulary.

In a call with labels, the module that computes the logits does not gather them, and the model's loss function
is replaced by one that takes local logits. The model then returns, by the caller's choice, gathered logits,
local logits, or none: a training loop that does not read the logits need not pay for the gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss import loss_utils

from ..comm.collectives import Communicator
from ..comm.steps import Gather
from ..errors import RefusedCallError
from ..format.dims import Dim
from ..parallel.boundary import TensorStep, forward_signature, replace_at
from ..pp.stage_units import is_elsewhere
from .loss import LossInputError, VocabParallelCrossEntropy

# transformers' losses of language models on logits that are sharded over the vocabulary.

Loss = Callable[..., Tensor]
"""A value of ``model.loss_function`` of transformers."""


def parallel_loss(loss_type: str | None, cross_entropy: VocabParallelCrossEntropy) -> Loss | None:
    """Return the loss that replaces transformers' own for this kind of model.

    Returns:
        For ``model.loss_function``; None if the loss is another one, which needs the full logits.
    """
    make = _maker(loss_type)
    return make(cross_entropy) if make is not None else None


def has_parallel_loss(loss_type: str | None) -> bool:
    """Return whether the loss of this kind of model can be computed from sharded logits."""
    return _maker(loss_type) is not None


def predicts_next(loss_type: str | None) -> bool:
    """Return whether the labels of this kind of model belong to the next positions."""
    return _maker(loss_type) is causal_lm_loss


def is_replaced(loss_type: str | None) -> bool:
    """Return whether other code has put a loss in place of the one that a model of this kind was built with.

    Libraries replace torch's or transformers' functions, before or after a model is loaded; their function
    needs the full logits.
    """
    return (
        F.cross_entropy is not _CROSS_ENTROPY
        or loss_utils.fixed_cross_entropy is not _FIXED_CROSS_ENTROPY
        or LOSS_OF_TYPE.get(loss_type, loss_utils.ForCausalLMLoss)
        is not loss_utils.LOSS_MAPPING.get(loss_type, loss_utils.ForCausalLMLoss)
    )


def _own(module: Any, name: str) -> Any:
    """Return a function of a module; None if other code has replaced it already."""
    function = getattr(module, name)
    is_own = function.__module__ == module.__name__ and not hasattr(function, "__wrapped__")
    return function if is_own else None


_CROSS_ENTROPY = _own(F, "cross_entropy")
_FIXED_CROSS_ENTROPY = _own(loss_utils, "fixed_cross_entropy")
LOSS_OF_TYPE = {
    kind: loss if loss.__module__.startswith("transformers.") else None
    for kind, loss in loss_utils.LOSS_MAPPING.items()
}
"""transformers' losses as they were when this module was imported."""


def _maker(loss_type: str | None) -> Callable[[VocabParallelCrossEntropy], Loss] | None:
    original = loss_utils.LOSS_MAPPING.get(loss_type, loss_utils.ForCausalLMLoss)
    if original is loss_utils.ForCausalLMLoss:
        return causal_lm_loss
    return masked_lm_loss if original is loss_utils.ForMaskedLMLoss else None


def causal_lm_loss(cross_entropy: VocabParallelCrossEntropy) -> Loss:
    """Compute ``ForCausalLMLoss`` of transformers on local logits: a position predicts the next token.

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
        """Return the loss, a replicated scalar; float64 for float64 logits, otherwise float32.

        Args:
            logits: local ``[..., S, local_size]``.
            labels: global ids ``[..., S]``, not shifted; ignored if there are ``shift_labels``.
            vocab_size: ignored, since the layout has it. Some models pass the last size of their logits,
                which is local; with any other wrong one, labels and rows of logits do not fit each other.
            shift_labels: global ids ``[..., S]``, already shifted.
        """
        if shift_labels is None:
            if labels is None:
                raise LossInputError("a causal language model's loss needs labels or shift_labels")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return _language_model_loss(cross_entropy, logits, shift_labels, num_items_in_batch, ignore_index)

    return loss


def masked_lm_loss(cross_entropy: VocabParallelCrossEntropy) -> Loss:
    """Compute ``ForMaskedLMLoss`` of transformers on local logits: labels are not shifted.

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
        """Return a replicated scalar; see ``causal_lm_loss`` for the arguments. Labels are not shifted: each
        belongs to the position at its index.
        """
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


GATHERED, LOCAL, NONE = "gathered", "local", "none"
"""The logits that a call with labels returns."""


class LogitsGather:
    """The all_gather of the logits, omitted while ``is_skipped``; its backward is ``Gather``'s."""

    def __init__(self, comm: Communicator, dim: int, layout: Dim, grad_axes: tuple[int, ...]) -> None:
        self.layout = layout
        self.comm = comm
        self.is_skipped = False
        self.was_called = False
        """Whether this forward pass called it for logits."""
        self.was_used = False
        """Whether this forward pass used it for a loss."""
        self._gather = Gather(comm, dim, layout, grad_axes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits, global ``[..., V]``, or local ``[..., V_local]`` while skipped.

        Args:
            x: logits, local ``[..., V_local]``.
        """
        self.was_called = True
        return x if self.is_skipped else self._gather(x)


def attach_loss(model: Any, gather: LogitsGather, returned: str | None, head: nn.Module) -> None:
    """Make a model compute its loss from sharded logits."""
    loss = parallel_loss(
        getattr(model, "loss_type", None), VocabParallelCrossEntropy(gather.comm, gather.layout)
    )
    if loss is None:
        raise RefusedCallError(f"the loss of a {type(model).__name__} cannot be computed from sharded logits")
    hooks = _LossHooks(model, gather, returned, head)
    model.loss_function = _Loss(getattr(model, "loss_type", None), loss, gather)
    model.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
    model.register_forward_hook(hooks.after)


def read_logits(model: Any) -> None:
    """Let the call that is going on return full logits, though it has labels: its forward reads them."""
    loss = _loss_of(model)
    if loss is not None:
        loss.gather.is_skipped = False


class _Loss:
    """Replaces the model's loss function, unless other code replaces it again."""

    def __init__(self, loss_type: str | None, of_local: Loss, gather: LogitsGather) -> None:
        self.loss_type = loss_type
        self._of_local = of_local
        self.gather = gather

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.gather.was_used = True
        if self.gather.is_skipped:
            return self._of_local(*args, **kwargs)
        of_full: Loss = loss_utils.LOSS_MAPPING.get(self.loss_type, loss_utils.ForCausalLMLoss)
        return of_full(*args, **kwargs)


def _loss_of(model: Any) -> _Loss | None:
    """Return the loss of sharded logits, also from inside of a stage's loss; None if another is in place."""
    loss = getattr(model.loss_function, "own", model.loss_function)
    return loss if isinstance(loss, _Loss) else None


class _LossHooks:
    """Forward hooks of the model."""

    def __init__(self, model: nn.Module, gather: LogitsGather, returned: str | None, head: nn.Module) -> None:
        names = list(forward_signature(model).parameters)
        self._position = names.index("labels") if "labels" in names else None
        self._gather = gather
        self._returned = returned
        self._head = head

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Skip the gather in a call with labels."""
        labels = kwargs.get("labels")
        if labels is None and self._position is not None and self._position < len(args):
            labels = args[self._position]
        loss = _loss_of(module)
        is_other = loss is None or is_replaced(loss.loss_type)
        if is_other and labels is not None and self._returned == LOCAL:
            raise RefusedCallError(
                "another loss, which needs the full logits, was put in place of the model's own in a model "
                "that was loaded with gather_logits=False; load it with gather_logits=True"
            )
        self._gather.is_skipped = labels is not None and not is_other
        self._gather.was_used = self._gather.was_called = False

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the logits that the caller wants into the output of a call with labels."""
        with_labels, self._gather.is_skipped = self._gather.is_skipped, False
        if is_elsewhere(self._head):
            return output
        skips_head = self._returned != LOCAL and not self._gather.was_called  # local logits have no such step
        if skips_head or (with_labels and not self._gather.was_used):
            raise RefusedCallError(
                f"a {type(module).__name__} did not call its head, or with labels its loss_function, so it "
                "returns results of a part of the vocabulary: code that replaced its forward method (for "
                "example, a fused loss of TRL) reads the weights of its head; use the model's own loss, see "
                "docs/training.md"
            )
        if not with_labels:
            return output
        returned = self._returned or (NONE if module.training else GATHERED)
        if returned == LOCAL:
            return output
        step: TensorStep = _drop if returned == NONE else self._gather
        is_tuple = not hasattr(output, "logits")
        return replace_at(output, ("1" if is_tuple else "logits",), step, "output.logits")


def _drop(x: Tensor) -> Any:
    return None
