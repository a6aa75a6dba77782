"""Modules that code calls in evaluation, and in training bypasses: it reads their parameters itself."""

from __future__ import annotations

from collections.abc import Callable

from shardconv_runtime.errors import SolveError
from torch import nn

from .inputs import TraceInputs
from .tape import Tape
from .trace import trace


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
