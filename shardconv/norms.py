"""Finds the modules of a tape that normalise over their last dim.

A norm over a sharded dim would block it. A module whose whole tape is "reduce the last dim, scale,
multiply by weights" is taken as one operator instead; the runtime reduces its statistic over the
ranks. What is found here is a candidate: ``shardconv.prove`` compares it with the module on numbers
before a plan relies on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .tape import Mark, Op, Ref, Tape

_REDUCTIONS = {"aten.mean", "aten.var", "aten.var_mean", "aten.std", "aten.sum", "aten.linalg_vector_norm"}
_WHOLE = {"aten.layer_norm", "aten.native_layer_norm", "aten.rms_norm", "aten._fused_rms_norm"}
_POINTWISE = {
    "aten.add",
    "aten.sub",
    "aten.mul",
    "aten.div",
    "aten.pow",
    "aten.square",
    "aten.rsqrt",
    "aten.sqrt",
    "aten.reciprocal",
    "aten.to",
    "aten._to_copy",
    "aten.neg",
    "aten.alias",
    "aten.detach",
    "aten.clone",
    "aten.contiguous",
    "aten.rsub",
}


@dataclass(frozen=True, slots=True)
class NormSite:
    """A call of a norm module: its operators (indices into the tape), tensors and parameters."""

    call: int
    fqn: str
    events: tuple[int, ...]
    input: int
    """The tensor that the module reads: behind its input mark."""
    output: int
    """The tensor that it returns: before its output mark."""
    parameters: tuple[int, ...]


def find_norms(tape: Tape) -> list[NormSite]:
    """All module calls that look like a norm over the last dim."""
    marks: dict[int, list[Mark]] = {}
    ops: dict[int, list[int]] = {}
    parents = {c.parent for c in tape.calls}
    for index, event in enumerate(tape.events):
        if isinstance(event, Mark):
            marks.setdefault(event.call, []).append(event)
        else:
            ops.setdefault(event.call, []).append(index)
    sites = []
    for call, indices in ops.items():
        if call not in parents and len(indices) <= 16:
            site = _site(tape, call, indices, marks.get(call, []))
            if site is not None:
                sites.append(site)
    return sites


def _site(tape: Tape, call: int, indices: list[int], marks: list[Mark]) -> NormSite | None:
    entries = [m for m in marks if not m.is_output]
    exits = [m for m in marks if m.is_output]
    if len(entries) != 1 or len(exits) != 1 or entries[0].slots == exits[0].slots:
        return None
    source, result = entries[0].target, exits[0].source
    shape = tape.tensors[source].shape
    if tape.tensors[result].shape != shape or not shape or not tape.tensors[source].dtype.is_floating_point:
        return None
    operators = [tape.events[i] for i in indices]
    if not _is_norm(tape, [op for op in operators if isinstance(op, Op)], len(shape)):
        return None
    made = {t for op in operators if isinstance(op, Op) for t in op.outputs} | {source}
    outside = {t for op in operators if isinstance(op, Op) for t in op.inputs} - made
    if any(tape.tensors[t].kind != "parameter" or tape.tensors[t].shape != shape[-1:] for t in outside):
        return None
    if result not in made or result == source:
        return None
    fqn = tape.calls[call].fqn
    return NormSite(call, fqn, tuple(indices), source, result, tuple(sorted(outside)))


def _is_norm(tape: Tape, ops: list[Op], rank: int) -> bool:
    names = [op.name.rsplit(".", 1)[0] for op in ops]
    whole = [n for n in names if n in _WHOLE]
    reductions = [op for op, n in zip(ops, names, strict=True) if n in _REDUCTIONS]
    if any(n not in _WHOLE | _REDUCTIONS | _POINTWISE for n in names) or not (whole or reductions):
        return False
    if any(len(op.args[1]) != 1 for op, n in zip(ops, names, strict=True) if n in _WHOLE):
        return False
    return all(_over_last_dim(op, rank) for op in reductions)


def _over_last_dim(op: Op, rank: int) -> bool:
    dims = op.args[1] if len(op.args) > 1 and not isinstance(op.args[1], Ref) else op.kwargs.get("dim")
    return isinstance(dims, (list, tuple)) and [d % rank for d in dims] == [rank - 1]
