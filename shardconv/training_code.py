"""Find code of a model that runs in training mode only, beyond dropout.

The tape of a plan is a forward pass in evaluation. Code may also mask activations while it is trained
(SpecAugment: https://arxiv.org/abs/1904.08779), with masks as wide as the full activations, or read
parameters that no other code reads. A second tape, of a pass in training mode, shows this. Where its code
needs a whole tensor that the first tape may shard, the tensor is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from shardconv_runtime.comm.host_numbers import digests, host_seed, host_states
from shardconv_runtime.errors import SolveError
from torch import nn

from .dim_analysis import dim_trees
from .dim_analysis.analysis import Analysis, find_partial
from .dim_analysis.analyze import analyze
from .dim_analysis.rules import RULES
from .inputs.trace_inputs import TraceInputs
from .tracing.tape import Event, Op, Tape, reads_and_writes
from .tracing.trace import trace


@dataclass(frozen=True, slots=True)
class TrainingCode:
    """The needs of a forward pass in training mode, beyond one in evaluation."""

    reads_whole: tuple[int, ...] = ()
    """Tensors of the tape of the evaluation that must be replicated for it."""
    draws_on_host: bool = False
    """Whether it draws random numbers with numpy or Python."""


def training_code(tape: Tape, analysis: Analysis, model: nn.Module, inputs: TraceInputs) -> TrainingCode:
    """Trace a pass in training mode, and compare it with one in evaluation.

    Nothing is found if the pass in training mode cannot be traced. Then the proof on numbers decides.
    """
    was_training = model.training
    model.train()
    try:
        with host_seed(0):
            before = digests(host_states())
            other = trace(model, inputs.tensors, RULES, inputs.options, few_chosen=inputs.few_chosen)
            draws_on_host = digests(host_states()) != before
    except SolveError:
        return TrainingCode()
    finally:
        model.train(was_training)
    in_training = analyze(other)
    same = dict(_same_tensors(other, tape))
    whole = {
        same[tid]: None
        for event in _events_only_in(other, tape)
        if isinstance(event, Op)
        for tid in event.inputs
        if tid in same and _is_freer(analysis, same[tid], in_training, tid)
    }
    return TrainingCode(tuple(whole), draws_on_host)


def _is_freer(analysis: Analysis, tid: int, in_training: Analysis, other: int) -> bool:
    """Return whether a tensor may be sharded in more ways, or be partial, where training does not allow it.

    Parameters, inputs and constants have the layouts that the evaluation gives them.
    """
    if analysis.tape.tensors[tid].kind != "value" or tid not in analysis.dims:
        return False
    if other not in in_training.dims:
        return False
    if find_partial(in_training.partial[other]).zero and not find_partial(analysis.partial[tid]).zero:
        return True
    pairs = zip(analysis.dims[tid], in_training.dims[other], strict=True)
    return any(_free_size(dim) > _free_size(dim_in_training) for dim, dim_in_training in pairs)


def _free_size(dim: dim_trees.Node) -> int:
    """Return the product of the sizes of the leaves of a dim that may be sharded."""
    return math.prod(leaf.size for leaf in dim_trees.leaves(dim) if not leaf.blocked)


def _same_tensors(tape: Tape, other: Tape) -> Iterator[tuple[int, int]]:
    """Yield the tensors of a tape that are also on another tape, with their numbers there."""
    names = {(info.kind, info.name): tid for tid, info in enumerate(other.tensors) if info.name}
    for tid, info in enumerate(tape.tensors):
        if info.name and (info.kind, info.name) in names:
            yield tid, names[info.kind, info.name]
    for tag, i, _, j, j_end in _compared(tape, other):
        for k in range(j_end - j if tag == "equal" else 0):
            made, other_made = (reads_and_writes(e)[1] for e in (tape.events[i + k], other.events[j + k]))
            for a, b in zip(made, other_made, strict=False):
                if tape.tensors[a].shape == other.tensors[b].shape:
                    yield a, b


def _events_only_in(tape: Tape, other: Tape) -> Iterator[Event]:
    """Yield the events of a tape that another one does not have."""
    for tag, i, i_end, _, _ in _compared(tape, other):
        if tag in ("delete", "replace"):
            yield from tape.events[i:i_end]


def _compared(tape: Tape, other: Tape) -> list[tuple[str, int, int, int, int]]:
    """Compare the events of two tapes in order; see ``SequenceMatcher.get_opcodes``."""
    events, other_events = ([_key(t, event) for event in t.events] for t in (tape, other))
    opcodes = SequenceMatcher(None, events, other_events, autojunk=False).get_opcodes()
    return [(tag, i, i_end, j, j_end) for tag, i, i_end, j, j_end in opcodes]


def _key(tape: Tape, event: Event) -> tuple[str, object]:
    """Return the module and the operation of an event."""
    return tape.calls[event.call].fqn, event.name if isinstance(event, Op) else event.ports
