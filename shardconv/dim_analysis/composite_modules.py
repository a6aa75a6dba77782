"""Find experts, and norms over dims, on a tape. These modules are sharded as one operator.

A module of experts computes ``M(x, ids, weights) = sum over k of weights[:, k] * expert[ids[:, k]](x)`` from
parameters whose leading dim counts the experts. Its code (a loop, a batched product, a grouped one) blocks
that dim for the rules. A call that is found here is only a candidate, by its inputs and parameters.
``shardconv.simulation.expert_sums`` shows by numbers that it is the sum of its parts before the tape is
changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..tracing.tape import Event, Mark, Op, Ref, Tape, TensorInfo, reads_and_writes

EXPERTS = "shardconv.experts"
"""Name, without overload, of the operator that replaces a module of experts."""


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """A module call with the inputs of experts."""

    call: int
    fqn: str
    x: str
    """Port of the activations ``[..., H]``."""
    ids: str
    """Port of the chosen experts ``[..., K]``, or ``[...]`` if each token has one."""
    weights: str
    """Port of their weights, in the shape of ``ids``, or with a last dim of 1."""
    inputs: tuple[int, int, int]
    """The tensors of these ports, behind their marks."""
    output: int
    """The tensor that it returns, before its mark."""
    parameters: tuple[int, ...]
    """All parameters of the module and of modules in it."""


@dataclass(frozen=True, slots=True)
class ExpertSharding:
    """How to make a module of experts one of fewer experts, from the proof."""

    num_experts: int
    past_end: bool
    """Whether out-of-shard ids become one past the last expert; otherwise they become 0. Their weights are
    zero."""
    flags: tuple[str, ...]
    """Bool attributes to set, so that the module skips ids past the end."""
    overrides: tuple[tuple[str, str], ...]
    """(path of a module from this one, int attribute) that become the local number of experts."""


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """A call of a module that is a sum over its experts, proven."""

    where: ExpertCall
    sharding: ExpertSharding


def find_experts(tape: Tape) -> list[ExpertCall]:
    """Return all module calls with activations, ids and weights of matching shapes, and with parameters.

    A module that contains another candidate does not count, and neither does a module whose inner values are
    read outside of it.
    """
    marks: dict[int, list[Mark]] = {}
    for event in tape.events:
        if isinstance(event, Mark):
            marks.setdefault(event.call, []).append(event)
    candidates = [c for call, mine in marks.items() if (c := _candidate(tape, call, mine)) is not None]
    outer = {
        c.call for c in candidates if any(c.call in _ancestors(tape, other.call) for other in candidates)
    }
    return [c for c in candidates if c.call not in outer]


def _candidate(tape: Tape, call: int, marks: list[Mark]) -> ExpertCall | None:
    entries = [m for m in marks if not m.is_output]
    exits = [m for m in marks if m.is_output]
    plain = all(len(m.ports) == 1 for m in marks) and all(m.ports[0].count(".") == 1 for m in entries)
    if len(entries) != 3 or len(exits) != 1 or exits[0].ports != ("output",) or not plain:
        return None
    fqn = tape.calls[call].fqn
    parameters = tuple(
        t for t, i in enumerate(tape.tensors) if i.kind == "parameter" and i.name.startswith(fqn + ".")
    )
    roles = _roles(tape, entries)
    shapes = [tape.tensors[t].shape for t in parameters]
    if roles is None or not shapes or math.gcd(*(shape[0] if shape else 1 for shape in shapes)) < 2:
        return None
    # Leave it out if anything that is computed inside of the call, except its output, is read outside.
    output = exits[0].source
    inside = _inside(tape, call)
    made: set[int] = set()
    read: set[int] = set(tape.outputs)
    for event in tape.events:
        if event.call not in inside:
            read.update(reads_and_writes(event)[0])
        elif isinstance(event, Op):
            made.update(event.outputs)
        elif event.call != call:
            made.add(event.target)
    if (made - {output}) & read:
        return None
    x, ids, weights = roles
    inputs = x.target, ids.target, weights.target
    return ExpertCall(
        call, fqn, x.ports[0], ids.ports[0], weights.ports[0], inputs, exits[0].source, parameters
    )


def _roles(tape: Tape, entries: list[Mark]) -> tuple[Mark, Mark, Mark] | None:
    """Find out which input is the activations, which the ids, and which the weights."""
    infos = {m.target: tape.tensors[m.target] for m in entries}
    floats = [m for m in entries if infos[m.target].dtype.is_floating_point]
    ints = [m for m in entries if m not in floats]
    if len(ints) != 1 or not str(infos[ints[0].target].dtype).startswith("torch.int"):
        return None
    shape = infos[ints[0].target].shape
    for x, weights in (floats, floats[::-1]):
        tokens = math.prod(infos[x.target].shape[:-1])
        of_ids = infos[weights.target].shape in (shape, (*shape, 1))
        if shape and of_ids and tokens in (math.prod(shape), math.prod(shape[:-1])):
            return x, ints[0], weights
    return None


def _ancestors(tape: Tape, call: int) -> set[int]:
    """Return the calls around a call."""
    out: set[int] = set()
    while (call := tape.calls[call].parent) >= 0:
        out.add(call)
    return out


def _inside(tape: Tape, call: int) -> set[int]:
    """Return the call and all calls in it."""
    out = {call}
    for index in range(call + 1, len(tape.calls)):
        if tape.calls[index].parent in out:
            out.add(index)
    return out


def isolate(tape: Tape, sites: Iterable[ExpertSite]) -> Tape:
    """Return the tape on which each site is one operator ``EXPERTS`` between the marks of its module."""
    sources = tape.sources()
    for site in sites:
        call, fqn = site.where.call, site.where.fqn
        inside = _inside(tape, call)
        events: list[Event] = []
        for event in tape.events:
            if event.call not in inside:
                events.append(event)
            elif isinstance(event, Mark) and event.call == call:
                if event.is_output:
                    tids = (*site.where.inputs, *site.where.parameters)
                    refs, outputs = tuple(Ref(t) for t in tids), (site.where.output,)
                    events.append(Op(f"{EXPERTS}.default", refs, {"site": site}, tids, outputs, call))
                events.append(event)
        replays = [r for r in tape.replays if r.fqn != fqn and not r.fqn.startswith(fqn + ".")]
        tape = replace(tape, events=events, replays=replays)
    return replace(tape, inner_sources=sources)


def isolated_sites(tape: Tape) -> list[ExpertSite]:
    """Return the sites that are one operator of this tape."""
    return [e.kwargs["site"] for e in tape.events if isinstance(e, Op) and e.name == f"{EXPERTS}.default"]


def leave_out(model: nn.Module, tape: Tape) -> set[str]:
    """Make the modules of isolated sites return empty tensors of the right shapes, on meta; return their
    FQNs.

    This is for tracing a rank's model. Their computation was proven, and may depend on data.
    """
    outputs: dict[str, list[TensorInfo]] = {}
    for site in isolated_sites(tape):
        outputs.setdefault(site.where.fqn, []).append(tape.tensors[site.where.output])
    for fqn, infos in outputs.items():
        module = model.get_submodule(fqn)
        module.forward = _returning(infos, module.forward)
    return set(outputs)


def _returning(infos: list[TensorInfo], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a forward method: return one empty tensor in each call."""
    remaining = iter(infos)

    @functools.wraps(forward)
    def stand_in(*_: Any, **__: Any) -> Any:
        info = next(remaining)
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    return stand_in
