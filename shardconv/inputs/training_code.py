"""What only code for training does: the loss that a model returns, and modules that it bypasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from torch import Tensor, nn

from ..tracing.tape import Tape
from ..tracing.trace import trace
from .trace_inputs import TraceInputs

# Modules that code calls in evaluation, and in training bypasses: it reads their parameters itself.


def not_in_training(
    tape: Tape, model: nn.Module, inputs: TraceInputs, shown_by: Callable[[str], str] = str
) -> frozenset[str]:
    """FQNs of the modules that are called in evaluation alone: no step at their boundaries runs in training.

    Nothing is known of a model whose forward pass cannot be traced in training mode.

    Args:
        tape: of the forward pass in evaluation.
        model: on meta; left as it was.
        inputs: of the trace.
        shown_by: a module's FQN -> that of one that does the same: the model may run these alone.
    """
    was_training = model.training
    model.train()
    try:
        other = trace(model, inputs.tensors, (), inputs.options, few_chosen=inputs.few_chosen)
    except SolveError:
        return frozenset()
    finally:
        model.train(was_training)
    called = {shown_by(call.fqn) for call in other.calls}
    return frozenset(call.fqn for call in tape.calls if shown_by(call.fqn) not in called)


def returns_its_loss_function(model: nn.Module, inputs: TraceInputs) -> bool:
    """Whether the model returns what its ``loss_function`` does, and calls it once.

    Some models have the function and compute a loss of their own. Nothing is known of a model that cannot be
    traced with labels.

    Args:
        model: on meta; to be thrown away afterwards.
        inputs: of a trace, without labels.
    """
    made: list[Tensor] = []
    returned: list[Any] = []

    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        made.append(torch.zeros((), device="meta"))
        return made[-1]

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        returned.append(getattr(output, "loss", None))

    model.loss_function = stand_in  # type: ignore[assignment]
    model.register_forward_hook(keep)
    try:
        trace(model, inputs.with_labels().tensors, (), inputs.options, few_chosen=inputs.few_chosen)
    except SolveError:
        return False
    return len(made) == 1 and len(returned) == 1 and returned[0] is made[0]
