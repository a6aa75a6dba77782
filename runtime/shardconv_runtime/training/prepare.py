"""Parallelizing a model for training or with sequence parallelism."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..comm.collectives import Communicator
from ..errors import PlanError, RefusedCallError
from ..format.dims import axes_of
from ..format.module_steps import (
    AllGatherStep,
    AllReduceStep,
    GradAllReduceStep,
    GradDivideStep,
    ModuleStep,
    SliceStep,
)
from ..format.plan import ModulePlan, ParameterPlan, Plan, module_plans, parameter_plans
from ..format.plan_json import of_sequence, require_training
from ..format.stage_names import is_inside
from ..format.stored_layout import sums
from ..parallel.boundary import attach_output, renumber
from ..parallel.build import apply_plan, owner_of, require_mesh, submodule
from ..parallel.hidden_states import ARGUMENT, WHY_NO_STATES
from ..parallel.layers import WHY_NO_LABELS, without_logits_gather
from ..parallel.packed_modules import PackedModules
from ..parallel.refusals import refuse
from .checkpointing import resume_in_layers
from .gates import Gated, GradientGate, attach_gates
from .loss_parallel import GATHERED, LOCAL, LogitsGather, attach_loss
from .random_streams import attach_random_streams
from .regather import MIN_BYTES, attach_regather
from .sequence import FLAT_OUTPUTS, attach_sequence


def watch_first_pass(model: nn.Module, modules: Mapping[str, ModulePlan]) -> None:
    """Check in the first forward pass that no module returns sharded activations without their sum.

    A fused kernel takes the local weights and returns a local term of the sum, without an error. It runs
    where it is installed, so the converter has not seen it; the first forward pass for training reveals it.

    A module with row-parallel layers calls one of them if it calls a column-parallel one; otherwise the pass
    raises a ``PlanError``. Compiled code is not watched.
    """
    kinds: dict[str, dict[str, list[nn.Module]]] = {}
    for fqn, entry in modules.items():
        if entry.category in ("column", "row"):
            of_parent = kinds.setdefault(fqn.rpartition(".")[0], {"column": [], "row": []})
            of_parent[entry.category].append(model.get_submodule(fqn))
    for parent, by_category in kinds.items():
        if by_category["column"] and by_category["row"]:
            _Watch(parent, model.get_submodule(parent), by_category["column"], by_category["row"])


class _Watch:
    """Forward hooks of one module and its parallel layers, until the first pass is over."""

    def __init__(self, fqn: str, parent: nn.Module, columns: list[nn.Module], rows: list[nn.Module]) -> None:
        self._fqn = fqn
        self._is_sharded = self._is_summed = False
        self._handles: list[RemovableHandle] = [
            *(renumber(layer, layer.register_forward_hook(self._after_column)) for layer in columns),
            *(renumber(layer, layer.register_forward_hook(self._after_row)) for layer in rows),
            renumber(parent, parent.register_forward_hook(self._end)),
        ]

    def _after_column(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._is_sharded = True

    def _after_row(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._is_summed = True

    def _end(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_sharded:
            return
        if not self._is_summed:
            raise RefusedCallError(
                f"{self._fqn} computes sharded activations and returns without calling the layer that sums "
                "them: code that was not traced (e.g. a fused kernel for training) bypasses that layer; "
                "disable the kernel"
            )
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class TrainingForm:
    """The form of a rank's model beyond plain inference; see ``load``."""

    training: bool = True
    sequence_parallel: bool = False
    regather: bool | None = False
    gather_logits: bool | None = None


def parallelize_for_training(
    model: nn.Module,
    plan: Plan,
    comm: Communicator,
    form: TrainingForm,
    packed: PackedModules | None = None,
    *,
    absent: Sequence[Collection[str]] = (frozenset(),),
    heads: Collection[str] = (),
) -> nn.Module:
    """Make ``model`` local to one rank, in place, with a backward pass or with sequence parallelism."""
    training, sequence_parallel, gather_logits = form.training, form.sequence_parallel, form.gather_logits
    if training:
        require_training(plan)
    sequence = plan.training.sequence if plan.training is not None else None
    may_pad = sequence_parallel and sequence is not None and sequence.may_pad
    if sequence_parallel:
        plan = of_sequence(plan)
    require_mesh(plan, comm)
    elsewhere = frozenset.intersection(*map(frozenset, absent))
    modules = module_plans(plan)
    gather = _logits_gather(plan, modules, comm) if training else None
    if gather is not None or gather_logits is False:
        modules = without_logits_gather(modules, plan.logits, heads)
    if gather is None and gather_logits is False:
        refuse(model, "labels", WHY_NO_LABELS)
    if plan.modules and plan.tp > 1:
        # Refuse outputs of inner activations, except those that the plan was solved for.
        planned_outputs = plan.training.extra_outputs if plan.training is not None else ()
        asked = FLAT_OUTPUTS if training and not sequence_parallel else (ARGUMENT, *FLAT_OUTPUTS)
        for argument in asked:
            if argument not in planned_outputs:
                refuse(model, argument, WHY_NO_STATES, unless_inference=not sequence_parallel)
    apply_plan(model, plan, comm, modules, training=training, packed=packed)
    if training:
        assert plan.training is not None
        entries = parameter_plans(plan)
        trained = entries if packed is None else {n: e for n, e in entries.items() if n not in packed.names}
        _attach_gates(model, plan, trained, comm, elsewhere)
        attach_random_streams(model, plan.training.draws, comm)
        resume_in_layers(model)
        for missing in absent:
            watch_first_pass(model, {fqn: m for fqn, m in modules.items() if not is_inside(fqn, missing)})
    if gather is not None and plan.logits and not is_inside(plan.logits.module, elsewhere):
        _attach_loss(model, plan, gather, gather_logits, heads)
    if sequence_parallel:
        # With stages, positions would be picked only on the head's stage.
        head = None if plan.logits is None or plan.stages else submodule(model, plan.logits.module)
        attach_sequence(model, plan.tp, may_pad, head, comm)
        if training and form.regather is not False:
            attach_regather(model, comm, 0 if form.regather else MIN_BYTES)
    return model


def _attach_loss(
    model: nn.Module,
    plan: Plan,
    gather: LogitsGather,
    gather_logits: bool | None,
    heads: Collection[str],
) -> None:
    """Compute the loss from sharded logits, and gather these if the caller wants it."""
    assert plan.logits is not None
    head = submodule(model, plan.logits.module)
    if gather_logits is not False:
        for name in {plan.logits.module, *heads}:
            attach_output(submodule(model, name), plan.logits.port, gather)
    attach_loss(model, gather, {None: None, True: GATHERED, False: LOCAL}[gather_logits], head)


def _logits_gather(plan: Plan, modules: dict[str, ModulePlan], comm: Communicator) -> LogitsGather | None:
    """Return the gather of the logits that a loss of sharded logits omits; None without such a loss."""
    logits = plan.logits
    if logits is None or plan.training is None or not plan.training.parallel_loss:
        return None
    steps = modules[logits.module].outputs if logits.module in modules else ()
    gather = next((b for b in steps if isinstance(b, AllGatherStep) and b.port == logits.port), None)
    if gather is None:
        raise PlanError(f"{logits.module}: this form of the plan gathers no logits at port {logits.port!r}")
    return LogitsGather(comm, gather.dim, gather.layout, gather.grad_axes)


def _attach_gates(
    model: nn.Module,
    plan: Plan,
    parameters: dict[str, ParameterPlan],
    comm: Communicator,
    absent: Collection[str],
) -> None:
    """Sum the gradients of parameters that ranks share, except parameters of modules on other stages."""
    gated: dict[nn.Module, dict[tuple[nn.Module, str], Gated]] = {}
    tied = [(alias, name) for alias, name in plan.tied if name in parameters]
    for name, source in [(name, name) for name in parameters] + tied:
        entry = parameters[source]
        gate = GradientGate(comm, entry, entry.grad_axes)
        owner, attribute = owner_of(model, name)
        if not gate.is_open and attribute in owner._parameters and not is_inside(name, absent):
            around = model.get_submodule(".".join(name.split(".")[: -1 - entry.grad_levels]))
            # Layers of an adapter may share a module, which then has a name in each of them.
            gated.setdefault(around, {}).setdefault((owner, attribute), Gated(owner, attribute, name, gate))
    for module, gated_parameters in gated.items():
        attach_gates(module, tuple(gated_parameters.values()))


def backward_axes(plan: Plan) -> list[Iterable[int]]:
    """Return the sets of mesh axes of the collectives that only training needs."""
    steps = [step for entry in plan.modules for step in (*entry.inputs, *entry.outputs)]
    return [
        range(len(plan.mesh)),
        *(axes for step in steps for axes in _of_step(step)),
        *(port.grad_axes for entry in plan.hooks for port in (*entry.inputs, *entry.outputs)),
        *(s.axes for entry in plan.attentions for s in entry.outputs if isinstance(s, GradDivideStep)),
        *(each.axes for p in plan.parameters for each in sums(p, plan.mesh, 0, p.grad_axes)),
    ]


def _of_step(step: ModuleStep) -> Iterable[Iterable[int]]:
    match step:
        case GradAllReduceStep():
            yield step.axes
        case AllReduceStep() | AllGatherStep():
            yield step.grad_axes
        case SliceStep():
            yield axes_of(step.layout).difference(step.grad_axes)
