"""The groups of linear layers that a plan fuses, and their tensors, which lie next to each other in files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .dims import axes_of, size
from .field_checks import fail
from .module_steps import AllGatherStep
from .names import MAX_NAMES, expand_all
from .plan import WHOLE, ModulePlan, ParameterPlan, Plan, module_plans, parameter_plans
from .stored_layout import is_common, tensor_name

FUSED_PARAMETERS = ("weight", "bias")
"""Parameters of each member of a group; parameters of the same name are next to each other."""


def fused_groups(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return the FQNs of the members of each group, in call order."""
    groups: list[tuple[str, ...]] = []
    num_names = 0
    for index, entry in enumerate(plan.fused):
        names = []
        for patterns in entry.members:
            names.append(expand_all(patterns, MAX_NAMES - num_names))
            num_names += len(names[-1])
        if len(names) < 2 or len({len(each) for each in names}) > 1 or not names[0]:
            fail(f"fused[{index}].members", "needs two members or more, of as many groups each")
        groups += zip(*names, strict=True)
    return tuple(groups)


def check_fused(plan: Plan) -> None:
    """Check the groups: each could be one linear layer with the parameters of all members."""
    parameters, modules = parameter_plans(plan), module_plans(plan)
    tied = {name for pair in plan.tied for name in pair}
    seen: set[str] = set()
    for group in fused_groups(plan):
        for fqn in group:
            if fqn in seen:
                fail("fused", f"{fqn!r} is a member twice")
            seen.add(fqn)
            if (entry := modules.get(fqn)) is not None and not is_fusible(entry):
                fail("fused", f"{fqn!r} is no column-parallel layer without steps on its input")
        weights = _of_members("weight", group, parameters)
        if any(entry is None or len(entry.dims) != 2 for entry in weights):
            fail("fused", f"a member of the group of {group[0]!r} has no matrix")
        biases = _of_members("bias", group, parameters)
        if any(biases) and not all(biases):
            fail("fused", f"some members of the group of {group[0]!r} have a bias, others have none")
        entries = [entry for entry in (*weights, *biases) if entry is not None]
        if len({size(entry.dims[1]) for entry in entries if len(entry.dims) > 1}) > 1:
            fail("fused", f"the members of the group of {group[0]!r} have inputs of different sizes")
        if any(entry.partial or any(map(axes_of, entry.dims[1:])) for entry in entries):
            fail("fused", f"a member of the group of {group[0]!r} gives terms of a sum over ranks")
        if len({is_common(entry) for entry in entries}) > 1:
            fail("fused", f"some members of the group of {group[0]!r} are replicated, others are not")
        if bad := tied.intersection(f"{fqn}.{attribute}" for fqn in group for attribute in FUSED_PARAMETERS):
            fail("fused", f"{min(bad)!r} is tied")


def _of_members(
    attribute: str, group: tuple[str, ...], parameters: Mapping[str, ParameterPlan]
) -> list[ParameterPlan | None]:
    return [parameters.get(f"{fqn}.{attribute}") for fqn in group]


def is_fusible(entry: ModulePlan) -> bool:
    """Return whether a module with this entry may be in a group: it may only gather its output."""
    gathers = all(isinstance(step, AllGatherStep) for step in entry.outputs)
    return entry.category == "column" and gathers and not (entry.inputs or entry.overrides)


def adjacent_tensors(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return the names of the tensors of the files that lie next to each other in this order.

    Tensors of different dtypes do not. A packed parameter's tensors do if their first dim is the rows.
    """
    if not plan.fused:
        return ()
    parameters = parameter_plans(plan)
    adjacent: list[tuple[str, ...]] = []
    for group in fused_groups(plan):
        for attribute in FUSED_PARAMETERS:
            names = tuple(f"{fqn}.{attribute}" for fqn in group)
            if all(name in parameters for name in names):
                dtypes = [_dtypes_by_rows(parameters[name]) for name in names]
                alike = (s for s, dtype in dtypes[0].items() if all(d.get(s) == dtype for d in dtypes))
                adjacent += (tuple(tensor_name(name, stored) for name in names) for stored in alike)
    return tuple(adjacent)


def _dtypes_by_rows(entry: ParameterPlan) -> dict[str, str]:
    """Return the dtypes of a parameter's stored tensors that run along its rows in their first dim."""
    if entry.packing is None:
        return {WHOLE: entry.dtype}
    return {t.name: t.dtype for t in entry.packing.tensors if t.dims and t.dims[0].of == 0}


def in_units(names: Iterable[str], adjacent: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield names in their order, except that adjacent ones directly follow the first of them."""
    present = dict.fromkeys(names)
    groups = [group for group in adjacent if present.keys() >= set(group)]
    unit_of = {name: group for group in groups for name in group}
    done: set[str] = set()
    for name in present:
        if name not in done:
            unit = unit_of.get(name, (name,))
            done.update(unit)
            yield unit
