"""Translate a plan to a transformers ``tp_plan``: ``{"model.layers.*.mlp.up_proj": "colwise", ...}``.

Every module and parameter gets the style that does exactly the same as the plan. If there is none, an error
is raised, since a rule that is almost right gives wrong numbers. A ``tp_plan`` changes no attributes, gives
each rank one equal block of a dim (or of each half of it), has one rule for all layers, and all ranks take
part in each collective.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.errors import PlanError, UnsupportedError
from shardconv_runtime.format.dims import Dim, axes_of, size, to_text
from shardconv_runtime.format.module_steps import AllReduceStep, layout_of
from shardconv_runtime.format.plan import (
    ModulePlan,
    ParameterPlan,
    Plan,
    global_shape,
    local_shape,
    module_plans,
    parameter_plans,
)
from shardconv_runtime.format.slices import Range, ranges
from shardconv_runtime.format.stored_layout import stored_plans
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.saving.dcp_boxes import held_boxes
from shardconv_runtime.saving.local_windows import full_window
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from ..planning.solution import inference_only
from .tp_styles import IDENTITIES, LEAVE_ALONE, EvenShards, Inexpressible, PlannedModule

SHOWN_PROBLEMS = 4
"""Most modules that an error names."""

_Held = tuple[tuple[Range, ...], ...]
"""The positions of a dim that each rank holds."""

_QUANTIZED = (
    "a tp_plan cannot express a plan of quantized weights: transformers puts modules of its own in place of "
    "those that were planned; use shardconv convert"
)

_UNPLANNED = ModulePlan((), "boundary")


def tp_plan(plan: Plan, model: nn.Module) -> dict[str, str]:
    """Return the rules with which transformers' own tensor parallelism does exactly the same as the plan.

    They are for ``DistributedConfig(tp_size=plan.tp, tp_plan=rules)``. Recent versions of transformers add
    them to the rules of the model's class. If the plan does not change such a module, a rule says so.

    Returns:
        The style of each name, in which ``*`` is any layer number; empty for one rank.
    """
    if plan.experts == "ep":
        raise UnsupportedError(
            "a tp_plan cannot express --experts ep: its styles shard every expert; use --experts tp"
        )
    if any(entry.packing for entry in plan.parameters):
        raise PlanError(_QUANTIZED)
    translation = _Translation(plan, model)
    rules = translation.rules()
    if plan.tp == 1:
        return {}
    if not rules:
        raise PlanError(f"the plan shards nothing over {plan.tp} ranks: there is no tp_plan that says so")
    return rules | translation.left_alone(rules)


def to_json(rules: Mapping[str, str]) -> str:
    """Return the rules as JSON text, in the order of the model's modules."""
    return json.dumps(rules, indent=2) + "\n"


def skeleton(
    model: str | os.PathLike[str] | Any,
    hub: Hub | None = None,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    tied: Mapping[str, str] | None = None,
) -> nn.Module:
    """Build a model from its config, with parameters on the meta device.

    Args:
        hub, dtype, trust_remote_code: how to read it, see ``checkpoint.resolve``.
    """
    spec = resolve(model, hub, dtype=dtype, trust_remote_code=trust_remote_code, need_weights=False)
    if spec.quantization is not None:
        raise PlanError(f"{spec.name}: {_QUANTIZED}")
    return build_model(spec.model_class, spec.config, getattr(torch, spec.dtype), tied)


class _Translation:
    """The translation of one plan and its model."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._plan = plan = inference_only(plan)  # transformers has its own gradients
        self._modules = dict(model.named_modules())
        self._names = {_joined(path, n) for path, m in self._modules.items() for n in m._parameters}
        self._entries = module_plans(plan)
        self._parameters = parameter_plans(plan)
        self._tied = dict(plan.tied)
        self._own: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
        self._converters = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]
        self._known: dict[Dim, _Held] = {}

    def rules(self) -> dict[str, str]:
        """Return the rules that do the same as the plan."""
        rules: dict[str, set[str | None]] = {}
        problems: dict[str, str] = {}
        for path in sorted(self._entries.keys() - self._modules.keys()):
            problems[_starred(path)] = "it is one module under two names"
        for name in sorted(self._parameters.keys() - self._names):
            if any(map(axes_of, self._parameters[name].dims)):
                problems[_starred(name)] = "it is sharded, but not a parameter, or one under two names"
        for path, module in self._modules.items():
            try:
                style, parameters = self._planned(path, module).styles()
                for needed in (style, *parameters.values()):
                    if needed is not None and needed not in ALL_PARALLEL_STYLES:
                        raise Inexpressible(
                            f'it needs the style "{needed}", which the installed transformers lacks'
                        )
                rules.setdefault(_starred(path), set()).add(style)
                for name, rule in parameters.items():
                    rules.setdefault(_starred(_joined(path, name)), set()).add(rule)
            except Inexpressible as why:
                problems.setdefault(_starred(path), str(why))
        for name, styles in rules.items():
            if len(styles) > 1:
                needed = " or ".join(sorted(style or "none" for style in styles))
                problems.setdefault(name, f"one style is for all layers, and they need {needed}")
        if problems:
            shown = [f"{name or 'the model'}: {why}" for name, why in problems.items()][:SHOWN_PROBLEMS]
            more = f"; and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
            raise UnsupportedError(
                f"a tp_plan cannot express this plan for {self._plan.tp} ranks: {'; '.join(shown)}{more}; "
                "use shardconv convert, or another number of ranks"
            )
        return {name: style for name, (style,) in rules.items() if style is not None}

    def left_alone(self, rules: Mapping[str, str]) -> dict[str, str]:
        """Return rules for names of the class's own rules that ``rules`` lack."""
        parameters, modules = set(map(_starred, self._names)), set(map(_starred, self._modules))
        alone = next(style for style in LEAVE_ALONE if style in ALL_PARALLEL_STYLES)
        out: dict[str, str] = {}
        for name, style in self._own.items():
            if name not in rules and name in modules | parameters:
                owner = rules.get(name.rpartition(".")[0]) if name in parameters else None
                out[name] = owner or (style if style in IDENTITIES else alone)
        return out

    def _planned(self, path: str, module: nn.Module) -> PlannedModule:
        entry = self._entries.get(path, _UNPLANNED)
        # Styles add steps and shard parameters, and can do nothing else.
        if entry.overrides:
            override = entry.overrides[0]
            local = " or ".join(map(str, sorted(set(override.local))))
            raise Inexpressible(
                f"its {override.attribute} must be {local} on a rank, and stays {override.value}"
            )
        if entry.norm is not None:
            raise Inexpressible("it normalizes a sharded dim, and the ranks must share a statistic")
        if entry.flags:
            raise Inexpressible("it needs more than steps and slices")
        first = next(iter(forward_signature(module).parameters), "")
        for step in (*entry.inputs, *entry.outputs):
            if step.port not in ("output", "input.0", f"input.{first}"):
                raise Inexpressible(
                    f"{step.op} at {step.port}, and styles act on the first input and the output"
                )
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        plans = {name: self._parameter(_joined(path, name), p) for name, p in parameters.items()}
        shardings = {name: self._sharding(name, each) for name, each in plans.items()}
        sharded = {self._held(dim) for each in plans.values() for dim in each.dims if axes_of(dim)}
        for step in (*entry.inputs, *entry.outputs):
            # Check that a step is over all ranks, and about the dim in which the parameters are sharded.
            if isinstance(step, AllReduceStep) and set(step.axes) != set(range(len(self._plan.mesh))):
                raise Inexpressible(f"only some of the ranks take part in the all_reduce at {step.port}")
            layout = layout_of(step)
            if layout is not None and ("?" in to_text(layout) or self._held(layout) not in sharded):
                raise Inexpressible(
                    f"the {step.op} at {step.port} is of a dim that none of its parameters has"
                )
        for name, sharding in shardings.items():
            if sharding is not None:
                self._check_loading(_joined(path, name), sharding, parameters[name].dim())
        return PlannedModule(module, entry, shardings)

    def _parameter(self, fqn: str, parameter: torch.Tensor) -> ParameterPlan:
        entry = self._parameters.get(self._tied.get(fqn, fqn))
        if entry is None or global_shape(entry) != tuple(parameter.shape):
            raise PlanError(f"{fqn}: the plan is not for this model; plan the model again")
        return entry

    def _sharding(self, name: str, found: ParameterPlan) -> EvenShards | None:
        """Return how a parameter is sharded; None if it is replicated."""
        if found.partial:
            raise Inexpressible(f"{name} has its values on one rank and zeros on the others")
        sharded = [i for i, dim in enumerate(found.dims) if axes_of(dim)]
        if not sharded:
            return None
        if len(sharded) > 1:
            raise Inexpressible(f"{name} is sharded in {len(sharded)} dims")
        return EvenShards(len(found.dims) - sharded[0], self._is_of_halves(name, found.dims[sharded[0]]))

    def _is_of_halves(self, name: str, dim: Dim) -> bool:
        """Return whether each rank holds an equal block of each half of the dim (True), or of the dim
        (False).
        """
        layout, tp = self._held(dim), self._plan.tp
        for parts in (1, 2):
            block, rest = divmod(size(dim), parts * tp)
            starts = [[(part * tp + rank) * block for part in range(parts)] for rank in range(tp)]
            if not rest and layout == tuple(tuple((s, s + block) for s in row) for row in starts):
                return parts == 2
        counts = {sum(stop - start for start, stop in part) for part in layout}
        if len(set(layout)) < len(layout):
            why = f"several ranks hold the same shard of {name}"
        elif len(counts) > 1:
            why = f"the ranks hold uneven shards of {name}"
        else:
            why = f"the shards of {name} are neither one block nor a block of each half"
        raise Inexpressible(f"{why} ({to_text(dim)})")

    def _held(self, dim: Dim) -> _Held:
        if dim not in self._known:
            mesh, tp = self._plan.mesh, self._plan.tp
            self._known[dim] = tuple(ranges(dim, mesh, rank) for rank in range(tp))
        return self._known[dim]

    def _check_loading(self, fqn: str, sharding: EvenShards, num_dims: int) -> None:
        """Check that a parameter is sharded right if a checkpoint stores it in another form.

        transformers takes a rank's shard of the stored tensors before it makes the parameter from them.
        """
        for converter in self._converters:
            patterns = [re.sub(r"\\\d|\*", ".*", target.strip("^$")) for target in converter.target_patterns]
            may_make_it = any(re.search(pattern, fqn) for pattern in patterns)
            if may_make_it and not _keeps_shards(converter, sharding, num_dims):
                stored = " and ".join(converter.source_patterns)
                raise Inexpressible(
                    f"transformers takes a rank's shard of {stored} before it makes {fqn.rpartition('.')[2]} "
                    "of that, and gets another shard"
                )


def _keeps_shards(converter: Any, sharding: EvenShards, num_dims: int) -> bool:
    """Return whether converting the shards of the stored tensors gives the shard of the parameter.

    It does if tensors are concatenated in a dim that is not sharded, and if they are stacked: each rank gets
        one block
    of a dim of a stack, and a block of each half of two stacks that are concatenated.
    """
    dim = num_dims - sharding.from_end
    stacks = [op for op in converter.operations if isinstance(op, MergeModulelist)]
    joins = [op for op in converter.operations if isinstance(op, Concatenate)]
    if len(stacks) + len(joins) < len(converter.operations) or (stacks and dim == 0):
        return False
    if not any(op.dim % num_dims == dim for op in joins):
        return not (stacks and sharding.of_halves)
    return bool(stacks) and sharding.of_halves and len(converter.source_patterns) == 2


def _starred(name: str) -> str:
    """Return the name in the form of rules, with stars for layer numbers."""
    out: str = replace_layer_number_by_wildcard(name)
    return out


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# A plan as boxes, in JSON: the parts of each global tensor that the ranks hold.
#
# This is for programs that move weights between processes with different sharding, such as from training to
# inference. ``docs/plan-format.md`` describes the format.


FORMAT = "shardconv.shards"
VERSION = 1


def shard_boxes(plan: Plan) -> dict[str, Any]:
    """Return the document: ``parameters`` has dtype, global shape, and the shards of all ranks by name.

    A packed parameter is there as its stored tensors, with their names in a converted directory.
    """
    parameters = {}
    for name, entry in stored_plans(plan).items():
        shards = []
        for rank in range(plan.tp):
            boxes = [
                {
                    "offsets": list(box.offsets),
                    "sizes": list(box.sizes),
                    "local_offsets": list(box.local_offsets),
                }
                for box in held_boxes(entry, plan.mesh, rank, full_window(entry, plan.mesh, rank))
            ]
            shards.append({"shape": list(local_shape(entry, plan.mesh, rank)), "boxes": boxes})
        parameters[name] = {"dtype": entry.dtype, "shape": list(global_shape(entry)), "ranks": shards}
    return {
        "format": FORMAT,
        "version": VERSION,
        "tp": plan.tp,
        "tied": dict(plan.tied),
        "parameters": parameters,
    }


def dumps(plan: Plan) -> str:
    """Return the document as text, with one parameter in each line."""
    boxes = shard_boxes(plan)
    parameters = boxes.pop("parameters")
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in boxes.items()]
    each = [f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in parameters.items()]
    return "{\n" + ",\n".join(lines) + ',\n  "parameters": {\n' + ",\n".join(each) + "\n  }\n}\n"
