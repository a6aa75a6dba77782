"""Traces one rank's model and compares it with the global tape, before a byte is written.

The plan is applied to a copy of the model by the runtime's own code, with collectives as functions of
shapes. The tape of the result must agree with the global one operator by operator: every shape being
the expected local shape, every position the expected local position, every number the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import PlanError, SolveError
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import Plan, layout_of
from shardconv_runtime.format.slices import local_size
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from torch import Tensor, nn

from ...dim_analysis.dim_trees import Node, leaves
from ...dim_analysis.expert_sites import leave_out
from ...dim_analysis.rules import RULES
from ...planning.layout import Layouts
from ...planning.obstacle import Obstacle
from ...tracing.inputs import TraceInputs
from ...tracing.tape import Op
from ...tracing.trace import trace
from ..simulation.closed_modules import repeat_results
from ..simulation.layer_bypass import Bypass, bypass, planned_alike
from .tape_comparison import compare_tapes


class _ShapeCommunicator(Communicator):
    """Collectives as functions of shapes, on meta tensors."""

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return torch.empty_like(x)

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x.new_empty((len(self.group(axes)) * x.shape[0], *x.shape[1:]))


def retrace(
    plan: Plan,
    layouts: Layouts,
    model: nn.Module,
    inputs: TraceInputs,
    bypassed: Mapping[str, Bypass] | None = None,
) -> Obstacle | None:
    """Compare the tapes of ranks' models, one for each kind of rank, with the global one.

    Args:
        plan: of the ranks' models.
        layouts: expected dims of every tensor of the global tape.
        model: the global model, on meta; it is copied.
        inputs: as for the global trace.
        bypassed: layers that need not be run where the plan says of them what it says of those that stand
            for them; the global tape has these alone. Of those that are read elsewhere, too, the modules
            that are not closed are run.

    Returns:
        An obstacle where a shape or a position differs, with the leaves that are sharded there; None if
        the tapes of all ranks agree.

    Raises:
        PlanError: a parameter has another dtype in the plan than in the model.
    """
    alike = planned_alike(plan, bypassed or {})
    left_out = {fqn: how for fqn, how in alike.items() if not how.is_read_elsewhere}
    repeated = {f"{fqn}.{name}": f"{how.like}.{name}" for fqn, how in alike.items() for name in how.closed}
    for rank in _unlike_ranks(plan):
        run = _RankRun(plan, layouts, model, inputs, left_out, rank)
        obstacle = run.obstacle(repeated)
        if obstacle is not None and repeated:  # a model may find out that modules are not run
            obstacle = run.obstacle({})
        if obstacle is not None:
            return obstacle
    return None


@dataclass(frozen=True)
class _RankRun:
    """The trace of one rank."""

    plan: Plan
    layouts: Layouts
    model: nn.Module
    inputs: TraceInputs
    left_out: Mapping[str, Bypass]
    rank: int

    def obstacle(self, repeated: Mapping[str, str]) -> Obstacle | None:
        """How its tape differs from the global one.

        Args:
            repeated: modules that return what others have returned, see ``repeat_results``.
        """
        plan, layouts = self.plan, self.layouts
        local = parallelize(copy.deepcopy(self.model), plan, _ShapeCommunicator(self.rank, plan.mesh))
        # Numbers do not show this: simulated ranks have all parameters in one dtype.
        dtypes = {name: tensor.dtype for name, tensor in stored_tensors(self.model)}
        for name, tensor in stored_tensors(local):
            if tensor.dtype != dtypes[name]:
                raise PlanError(f"{name}: the plan says {tensor.dtype}, the model has {dtypes[name]}")
        changed = {f for f, m in local.named_modules() if type(m) is not type(self.model.get_submodule(f))}
        changed |= leave_out(local, layouts.analysis.tape)
        bypass(local, self.left_out)
        repeat_results(local, repeated)
        try:
            tape = trace(local, self.inputs.tensors, RULES, self.inputs.options, layouts.analysis.tape)
        except SolveError as error:
            where = str(error).partition(":")[0]
            return Obstacle(_to_blame(layouts, plan, where), str(error))
        found = compare_tapes(layouts, tape, changed, self.rank, pass_on=bool(self.left_out))
        if found is None:
            return None
        fqn = found.where.partition(" ")[0]
        return replace(found, nodes=tuple(found.nodes) or _to_blame(layouts, plan, fqn))


def _unlike_ranks(plan: Plan) -> list[int]:
    """The first rank of each kind: of those that hold the same shapes and get the same values."""
    layouts = [layout_of(step) for m in plan.modules for step in (*m.inputs, *m.outputs)]
    dims = {*(d for p in plan.parameters for d in p.dims), *(d for d in layouts if d is not None)}
    edits = [edit.local for m in plan.modules for edit in m.edits if len(edit.local) > 1]
    kinds: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for rank in range(plan.tp):
        sizes = tuple(local_size(d, plan.mesh, rank) for d in dims)
        kinds.setdefault((sizes, tuple(values[rank] for values in edits)), rank)
    return list(kinds.values())


def _to_blame(layouts: Layouts, plan: Plan, fqn: str) -> tuple[Node, ...]:
    """Sharded leaves that may be why a module's code failed on a rank.

    Those of the tensors that the module computes itself; where there are none (its code may check an
    attribute, or build other modules from a config), those around edited attributes, or of modules in it.
    """
    edited = {n for m in plan.modules if m.edits for n in expand_all(m.names)}
    inside = f"{fqn}."  # for the model itself this is the name of its class, which only the last test matches
    tests: tuple[Callable[[str], bool], ...] = (
        lambda name: name == fqn,
        lambda name: name in edited,
        lambda name: name.startswith(inside),
        lambda name: True,
    )
    for with_inputs in (False, True):
        for test in tests:
            # Sharded leaves of the tensors that some modules make, and maybe of those that they read.
            tape = layouts.analysis.tape
            found: dict[Node, None] = {}
            for event in tape.events:
                if isinstance(event, Op) and test(tape.calls[event.call].fqn):
                    for tid in (*event.inputs, *event.outputs) if with_inputs else event.outputs:
                        for dim in layouts.analysis.dims.get(tid, ()):
                            found |= {x: None for x in leaves(dim) if layouts.assignment.axes(x)}
            nodes = tuple(found)
            if nodes:
                return nodes
    return ()
