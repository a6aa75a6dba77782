"""A model's loss from logits that stay split over the vocabulary.

While labels are given, the module that computes the logits does not gather them; the model's loss function is
replaced by one that needs only this rank's part. What the model then returns as logits is, as its caller
wishes, gathered afterwards, the rank's part, or nothing: a training loop that does not look at them should
not pay for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..comm.collectives import Communicator, Gather
from ..errors import PlanError
from ..format.dims import Dim
from ..parallel.boundary import Step, forward_signature, replace_at
from .loss import VocabParallelCrossEntropy, parallel_loss

GATHERED, LOCAL, NONE = "gathered", "local", "none"
"""What becomes of the logits of a call with labels."""


class LogitsGather:
    """The gather of the logits, which is left out while ``is_skipped``.

    Args:
        comm: the ranks.
        dim: of the logits, the vocabulary.
        layout: of that dim.
        grad_axes: see ``Gather``.
    """

    def __init__(self, comm: Communicator, dim: int, layout: Dim, grad_axes: tuple[int, ...]) -> None:
        self.layout = layout
        self.comm = comm
        self.is_skipped = False
        self.was_used = False
        self._gather = Gather(comm, dim, layout, grad_axes)

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.is_skipped else self._gather(x)


def attach_loss(model: Any, gather: LogitsGather, returned: str | None) -> None:
    """Let a model compute its loss from split logits.

    Args:
        model: has a ``loss_function``, which it calls once for its labels.
        gather: the step of the module that computes the logits.
        returned: what becomes of the logits where labels are given; None: nothing in training mode, else they
            are gathered.

    Raises:
        PlanError: the loss of this model needs whole logits.
    """
    loss = parallel_loss(
        getattr(model, "loss_type", None), VocabParallelCrossEntropy(gather.comm, gather.layout)
    )
    if loss is None:
        raise PlanError(f"the loss of a {type(model).__name__} cannot be computed from split logits")
    hooks = _LossHooks(model, gather, returned)
    model.loss_function = _Loss(model.loss_function, loss, gather)
    model.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
    model.register_forward_hook(hooks.after)


class _Loss:
    """In place of the model's loss function."""

    def __init__(
        self, whole: Callable[..., Tensor], split: Callable[..., Tensor], gather: LogitsGather
    ) -> None:
        self._whole = whole
        self._split = split
        self._gather = gather

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self._gather.was_used = True
        return (self._split if self._gather.is_skipped else self._whole)(*args, **kwargs)


class _LossHooks:
    """Forward hooks of the model."""

    def __init__(self, model: nn.Module, gather: LogitsGather, returned: str | None) -> None:
        names = list(forward_signature(model).parameters)
        self._position = names.index("labels") if "labels" in names else None
        self._gather = gather
        self._returned = returned

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """With labels, the logits stay split."""
        labels = kwargs.get("labels")
        if labels is None and self._position is not None and self._position < len(args):
            labels = args[self._position]
        self._gather.is_skipped = labels is not None
        self._gather.was_used = False

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """What the caller gets of the logits."""
        if not self._gather.is_skipped:
            return output
        self._gather.is_skipped = False
        if not self._gather.was_used:
            raise PlanError(
                f"a {type(module).__name__} was given labels and did not call its loss_function, so that its "
                "loss is that of a part of the vocabulary; this is a bug in shardconv, please report it"
            )
        returned = self._returned or (NONE if module.training else GATHERED)
        if returned == LOCAL:
            return output
        step: Step = _drop if returned == NONE else self._gather
        is_tuple = not hasattr(output, "logits")
        return replace_at(output, ("1" if is_tuple else "logits",), step, "output.logits")


def _drop(x: Tensor) -> Any:
    return None
