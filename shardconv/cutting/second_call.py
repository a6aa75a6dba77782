"""Shapes of a second call, which continues the first; query and key lengths differ in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardconv_runtime.errors import SolveError
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from ..dim_analysis.rules import RULES
from ..inputs.trace_inputs import TraceInputs
from ..simulation.model_runs import continuation
from ..tracing.tape import CacheUpdate, Mark, Ref, Returned, Tape
from ..tracing.trace import trace

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SecondCall:
    """The inputs and results of modules in a second call of the model."""

    shapes: dict[tuple[str, str], Shape] = field(default_factory=dict)
    """(FQN, slot) -> shape, in the first call of the module."""
    returned: dict[str, Returned] = field(default_factory=dict)
    updates: dict[str, list[tuple[CacheUpdate, list[Shape]]]] = field(default_factory=dict)
    """FQN -> updates of the caches that the module was given, and the shapes of the tensors in each."""

    def called(self, fqn: str) -> bool:
        """Return whether the module was called."""
        return fqn in self.returned


def second_call(model: nn.Module, inputs: TraceInputs) -> SecondCall:
    """Trace a call with one more token, given the cache that the first call returned.

    Args:
        model: the model on meta.
        inputs: the inputs of the first call.

    Returns:
        An empty result if the model returns no cache or cannot be called again.
    """
    for keeps_encoded in (True, False):
        try:
            twice = _Twice(model, inputs, keeps_encoded)
            return _read(trace(twice, inputs.tensors, RULES, few_chosen=inputs.few_chosen))
        except SolveError:
            continue
    return SecondCall()


class _Twice(nn.Module):
    """A model that is called twice.

    Args:
        model: the model on meta.
        inputs: the inputs of the first call.
        keeps_encoded: reuse the encoder's output in the second call, as ``generate`` does.
    """

    def __init__(self, model: nn.Module, inputs: TraceInputs, keeps_encoded: bool) -> None:
        super().__init__()
        self.model = model
        self._inputs = inputs
        self._keeps_encoded = keeps_encoded

    def forward(self, **tensors: Tensor) -> Any:
        """Return the results of the second call."""
        first = self.model(**tensors, **self._inputs.options)
        given = continuation(self.model, replace(self._inputs, tensors=tensors), first)
        encoded = getattr(first, "encoder_last_hidden_state", None)
        if self._keeps_encoded and encoded is not None:
            given = {**given, "encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}
        return self.model(**given)


def _read(tape: Tape) -> SecondCall:
    """Collect the calls of modules inside the second call of the model."""
    (second,) = [i for i, call in enumerate(tape.calls) if call.fqn == "model" and call.index == 1]
    names: dict[int, str] = {}
    for index, made in enumerate(tape.calls[second:], second):
        fqn = made.fqn.removeprefix("model").removeprefix(".")
        if fqn not in names.values():
            names[index] = fqn
    found = SecondCall()
    for event in tape.events:
        if isinstance(event, Mark) and event.call in names:
            for slot in event.slots:
                tid = event.target if event.is_output else event.source
                found.shapes[names[event.call], slot] = tape.tensors[tid].shape
    found.returned.update({fqn: tape.returned[i] for i, fqn in names.items() if i in tape.returned})
    for update in tape.cache_updates:
        for call in update.givers:
            if call in names:
                found.updates.setdefault(names[call], []).append(
                    (update, [tape.tensors[tid].shape for tid in tensors_of_update(update)])
                )
    return found


def tensors_of_update(update: CacheUpdate) -> Sequence[int]:
    """Return the tensors that an update of a cache is given, in order."""
    return [v.tid for v in (*update.args, *update.kwargs.values()) if isinstance(v, Ref)]
