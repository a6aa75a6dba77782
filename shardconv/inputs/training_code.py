"""Find code that only runs in training: the loss that a model returns, and modules that it bypasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from torch import Tensor, nn

from ..tracing.tape import Tape
from ..tracing.trace import trace
from .trace_inputs import TraceInputs


def not_in_training(
    tape: Tape, model: nn.Module, inputs: TraceInputs, shown_by: Callable[[str], str] = str
) -> frozenset[str]:
    """Return the FQNs of modules that are only called in evaluation, so that steps at their boundaries miss
    in training.

    Code that bypasses a module in training reads its parameters itself. The result is empty if the forward
    pass cannot be traced in training mode.

    Args:
        tape: of the forward pass in evaluation.
        model: on meta; it does not change.
        inputs: of the trace.
        shown_by: maps a module's FQN to the FQN of a module that does the same. The model may only run the
            latter.
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
    """Whether the model returns the result of its ``loss_function``, and calls it once.

    Some models have the function and compute another loss. The result is False if the model cannot be traced
    with labels.

    Args:
        model: on meta; it cannot be used afterwards.
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
