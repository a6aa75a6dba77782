"""Find which modules draw the same random numbers on all ranks, and which draw independent ones.

A mask of dropout on a replicated tensor must be the same on all ranks; on shards, the ranks' masks must
be independent. The runtime changes the stream of random numbers at module boundaries, so each operator
that may draw is assigned to the stretch between two boundaries. Dropout is on the tape although it does
nothing in evaluation.

Modules that draw only in training, and are on no tape, draw like the code around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import DrawPlan
from shardconv_runtime.parallel.build import DROPOUTS
from torch import nn

from ..dim_analysis.dim_trees import leaves
from ..dim_analysis.rules import traits_of
from ..tracing.tape import Mark, ModuleCall, Op, starred
from .gradients import PARTIALLY_SHARDED, placement
from .solution import Solution

Kind = tuple[int, ...] | None
"""Mesh axes over which drawn numbers differ between ranks; None: on some positions of a tensor only."""


@dataclass
class _Module:
    """The draws of a module's own code."""

    kinds: dict[str, set[Kind]] = field(default_factory=dict)
    """Kinds of draws by the inner module that returned last; empty before the first."""
    inside: list[str] = field(default_factory=list)
    """Modules that its code calls."""

    def all_kinds(self) -> set[Kind]:
        """Return the kinds of all draws in its code."""
        return set[Kind]().union(*self.kinds.values())


def draw_plans(solution: Solution, model: nn.Module) -> tuple[DrawPlan, ...]:
    """Return the modules at which the stream of random numbers changes; equal ones share an entry."""
    modules = _modules(solution, model)
    if not any(kind != () for module in modules.values() for kind in module.all_kinds()):
        return ()
    by_module = {fqn: DrawPlan((), _only(module)) for fqn, module in modules.items()}
    needed = {fqn for fqn, module in modules.items() if by_module[fqn].axes}
    for fqn, module in modules.items():
        if len(module.all_kinds()) > 1 or None in module.all_kinds():
            needed |= {fqn, *module.inside}
            following = _following(fqn, module)
            if following is None:
                by_module[fqn] = replace(by_module[fqn], axes=(), mixed=True)
            else:
                by_module[fqn] = replace(by_module[fqn], axes=following.get("", ()))
                for child in module.inside:
                    by_module[child] = replace(by_module[child], afterwards=following.get(child, ()))
    alike = {fqn for fqn, module in modules.items() if module.all_kinds() == {()}}
    inside = {fqn for fqn in alike if any(not n or fqn.startswith(n + ".") for n in needed)}
    grouped: dict[tuple[str, DrawPlan], list[str]] = {}
    for fqn, entry in by_module.items():
        if fqn in needed | inside:
            for name in solution.folded.names(fqn):
                grouped.setdefault((starred(name), entry), []).append(name)
    return tuple(replace(entry, names=tuple(compress(names))) for (_, entry), names in grouped.items())


def _following(fqn: str, module: _Module) -> dict[str, tuple[int, ...]] | None:
    """Return the draws of a module after each module that it calls; None if they cannot be told apart."""
    out: dict[str, tuple[int, ...]] = {}
    for after, kinds in module.kinds.items():
        kind = next(iter(kinds))
        if len(kinds) > 1 or kind is None:
            return None
        out[after] = kind
    is_own = all(not fqn or child.startswith(fqn + ".") for child in module.inside)
    return out if is_own else None


def _only(module: _Module) -> tuple[int, ...]:
    kinds = list(module.all_kinds())
    return (kinds[0] or ()) if len(kinds) == 1 else ()


def _modules(solution: Solution, model: nn.Module) -> dict[str, _Module]:
    """Find the draws of each module on the tape, by FQN, in the order of their calls."""
    tape = solution.analysis.tape
    modules = {call.fqn: _Module() for call in tape.calls}
    last: dict[int, str] = {}
    drawing: set[int] = set()
    for event in tape.events:
        inner = event.call
        while (call := tape.calls[inner].parent) >= 0:  # for each call around the event
            child = tape.calls[inner].fqn
            inner = call
            if last.get(call) != child:
                last[call] = child
                modules[tape.calls[call].fqn].inside.append(child)
        if isinstance(event, Op) and event.is_random:
            drawing.add(event.call)
            _note(modules, tape.calls, last, event.call, _of_op(solution, event))
        elif isinstance(event, Mark) and event.call not in drawing and _is_dropout(solution, model, event):
            _note(modules, tape.calls, last, event.call, _of_tensor(solution, event.source))
    for site, count in solution.analysis.experts:
        axes = solution.layouts.assignment.axes(count)
        if axes and not modules[site.where.fqn].kinds:  # modules inside are not on the tape
            modules[site.where.fqn].kinds[""] = {tuple(sorted(axes))}
    return modules


def _note(
    found: Mapping[str, _Module], calls: list[ModuleCall], last: Mapping[int, str], call: int, kind: Kind
) -> None:
    found[calls[call].fqn].kinds.setdefault(last.get(call, ""), set()).add(kind)


def _is_dropout(solution: Solution, model: nn.Module, mark: Mark) -> bool:
    """Return whether a tensor leaves a dropout (for example of channels) that has no operator on the tape."""
    fqn = solution.analysis.tape.calls[mark.call].fqn
    return mark.is_output and isinstance(model.get_submodule(fqn), DROPOUTS)


def _of_op(solution: Solution, op: Op) -> Kind:
    # The mask of attention is on the probabilities, which have all dims of the query except the last.
    if traits_of(op.name).is_attention and op.inputs[0] in solution.analysis.dims:
        return _split(solution, op.inputs[0], slice(-1))
    kinds = {_of_tensor(solution, t) for t in op.outputs}
    return kinds.pop() if len(kinds) == 1 else None


def _of_tensor(solution: Solution, tid: int) -> Kind:
    if tid not in solution.analysis.dims:
        return ()
    mesh = range(len(solution.layouts.mesh))
    if any(
        placement(solution.analysis, solution.layouts.assignment, tid, axis) == PARTIALLY_SHARDED
        for axis in mesh
    ):
        return None
    return _split(solution, tid, slice(None))


def _split(solution: Solution, tid: int, dims: slice) -> tuple[int, ...]:
    parts = [x for dim in solution.analysis.dims[tid][dims] for x in leaves(dim) if x.size > 1]
    return tuple(sorted({axis for x in parts for axis in solution.layouts.assignment.axes(x)}))
