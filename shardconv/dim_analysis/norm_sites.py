"""Find norms over dims on a tape. Their modules are sharded as one operator."""

from __future__ import annotations

from dataclasses import dataclass

from ..tracing.tape import Mark, Op, Ref, Tape

_REDUCTIONS = {"aten.mean", "aten.var", "aten.var_mean", "aten.std", "aten.sum", "aten.linalg_vector_norm"}


_NORMS = {"aten.layer_norm", "aten.native_layer_norm", "aten.rms_norm", "aten._fused_rms_norm"}


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


_VIEWS = {"aten.view", "aten.reshape", "aten._unsafe_view", "aten.unflatten", "aten.flatten"}


ACTIVATIONS = {"aten.silu": "silu", "aten.sigmoid": "sigmoid", "aten.gelu": "gelu", "aten.relu": "relu"}
"""Operators that may be applied to a gate -> their names in a plan."""


@dataclass(frozen=True, slots=True)
class NormSite:
    """A call of a norm module: its operators (indices into the tape), tensors and parameters.

    A module whose complete tape is "reduce the last dim, scale, multiply by weights", perhaps also by a gate,
    becomes one operator instead, and the runtime reduces its statistic over the ranks. A site that is found
    here is only a candidate: ``simulation/norm_formulas.py`` compares it with the module on numbers.
    """

    call: int
    fqn: str
    events: tuple[int, ...]
    inputs: tuple[int, ...]
    """The tensors that the module reads, behind its input marks: one, or two of which one is a gate."""
    arguments: tuple[str, ...]
    """Their names in the module's forward."""
    output: int
    """The tensor that it returns: before its output mark."""
    parameters: tuple[int, ...]
    groups: int = 1
    """Number of equal parts of the last dim that are normalized separately."""


def find_norms(tape: Tape) -> list[NormSite]:
    """Return all module calls that look like a norm over the last dim."""
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
        if call not in parents and len(indices) <= 24:
            site = _site(tape, call, indices, marks.get(call, []))
            if site is not None:
                sites.append(site)
    return sites


def _site(tape: Tape, call: int, indices: list[int], marks: list[Mark]) -> NormSite | None:
    entries = [m for m in marks if not m.is_output]
    exits = [m for m in marks if m.is_output]
    if len(entries) not in (1, 2) or len(exits) != 1 or any(len(m.ports) > 1 for m in entries):
        return None
    sources, result = [m.target for m in entries], exits[0].source
    shape = tape.tensors[result].shape
    if not shape or any(
        tape.tensors[t].shape != shape or not tape.tensors[t].dtype.is_floating_point for t in sources
    ):
        return None
    operators = [op for i in indices if isinstance(op := tape.events[i], Op)]
    groups = _groups(tape, operators, shape)
    if groups is None:
        return None
    made = {t for op in operators for t in op.outputs}
    outside = {t for op in operators for t in op.inputs} - made - set(sources)
    if any(tape.tensors[t].kind != "parameter" or tape.tensors[t].shape != shape[-1:] for t in outside):
        return None
    if result not in made or not set(sources) <= {t for op in operators for t in op.inputs}:
        return None
    names = tuple(m.ports[0].partition(".")[2] for m in entries)
    fqn, parameters = tape.calls[call].fqn, tuple(sorted(outside))
    return NormSite(call, fqn, tuple(indices), tuple(sources), names, result, parameters, groups)


def _groups(tape: Tape, ops: list[Op], shape: tuple[int, ...]) -> int | None:
    """Return the number of groups of the last dim; None if these operators are not a norm."""
    members = _NORMS | _REDUCTIONS | _POINTWISE | _VIEWS | ACTIVATIONS.keys()
    calls: set[int | None] = set()
    for op in ops:
        name = op.base
        if name not in members:
            return None
        if name in _NORMS:
            calls.add(1 if len(op.args[1]) == 1 else None)
        elif name in _REDUCTIONS:
            calls.add(_groups_reduced(op, tape.tensors[op.inputs[0]].shape, shape))
    return calls.pop() if len(calls) == 1 else None


def _groups_reduced(op: Op, reduced: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """Return the number of groups of the last dim of ``shape`` if each was reduced separately."""
    dims = op.args[1] if len(op.args) > 1 and not isinstance(op.args[1], Ref) else op.kwargs.get("dim")
    if not isinstance(dims, (list, tuple)) or [d % len(reduced) for d in dims] != [len(reduced) - 1]:
        return None
    if reduced == shape:
        return 1
    return reduced[-2] if reduced[:-2] == shape[:-1] and reduced[-2] * reduced[-1] == shape[-1] else None
