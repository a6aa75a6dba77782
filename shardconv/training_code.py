"""Find code of a model that runs in training mode only, beyond dropout.

The tape of a plan is a forward pass in evaluation. Code may also mask activations while it is trained
(SpecAugment: https://arxiv.org/abs/1904.08779), with masks as wide as the full activations, or read
parameters that no other code reads. A second tape, of a pass in training mode, shows this. Where its code
needs a whole tensor that the first tape may shard, the tensor is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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

Opcode = tuple[str, int, int, int, int]
"""How a part of one tape becomes a part of another: a tag, and the ends of both parts."""


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
    differences = _compared(other, tape)
    only_in_training = [
        e for tag, i, i_end, _, _ in differences if tag != "equal" for e in other.events[i:i_end]
    ]
    if not only_in_training:
        return TrainingCode(draws_on_host=draws_on_host)
    in_training = analyze(other)
    same = dict(_same_tensors(other, tape, differences))
    whole = {
        same[tid]: None
        for event in only_in_training
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


def _same_tensors(tape: Tape, other: Tape, differences: Sequence[Opcode]) -> Iterator[tuple[int, int]]:
    """Yield the tensors of a tape that are also on another tape, with their numbers there."""
    names = {(info.kind, info.name): tid for tid, info in enumerate(other.tensors) if info.name}
    for tid, info in enumerate(tape.tensors):
        if info.name and (info.kind, info.name) in names:
            yield tid, names[info.kind, info.name]
    for tag, i, _, j, j_end in differences:
        for k in range(j_end - j if tag == "equal" else 0):
            made, other_made = (reads_and_writes(e)[1] for e in (tape.events[i + k], other.events[j + k]))
            for a, b in zip(made, other_made, strict=False):
                if tape.tensors[a].shape == other.tensors[b].shape:
                    yield a, b


def _compared(tape: Tape, other: Tape) -> list[Opcode]:
    """Compare the events of two tapes in order; see ``SequenceMatcher.get_opcodes``.

    The matcher takes the square of the number of events that look alike, such as those of a loop. It
    sees only what lies between the first difference and the last.
    """
    events, other_events = ([_key(t, event) for event in t.events] for t in (tape, other))
    most = min(len(events), len(other_events))
    first = next((i for i in range(most) if events[i] != other_events[i]), most)
    last = next((i for i in range(most - first) if events[-1 - i] != other_events[-1 - i]), most - first)
    ends = len(events) - last, len(other_events) - last
    middle = SequenceMatcher(None, events[first : ends[0]], other_events[first : ends[1]], autojunk=False)
    between = (
        (t, first + i, first + i_end, first + j, first + j_end)
        for t, i, i_end, j, j_end in middle.get_opcodes()
    )
    return [
        ("equal", 0, first, 0, first),
        *between,
        ("equal", ends[0], len(events), ends[1], len(other_events)),
    ]


def _key(tape: Tape, event: Event) -> tuple[str, object]:
    """Return the module and the operation of an event."""
    return tape.calls[event.call].fqn, event.name if isinstance(event, Op) else event.ports
