"""The tensors that lie next to each other in files, as the parameters of a group of fused layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .fused_groups import FUSED_PARAMETERS, fused_groups
from .packed_layout import WHOLE, tensor_name
from .plan import ParameterPlan, Plan, parameter_plans


def adjacent_tensors(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Names of the tensors of the files that lie next to each other in this order.

    Those of different dtypes do not; of packed parameters those do that run along the rows first.

    Raises:
        PlanError: see ``fused_groups``.
    """
    if not plan.fused:
        return ()
    parameters = parameter_plans(plan)
    found: list[tuple[str, ...]] = []
    for group in fused_groups(plan):
        for attribute in FUSED_PARAMETERS:
            names = tuple(f"{fqn}.{attribute}" for fqn in group)
            if all(name in parameters for name in names):
                dtypes = [_dtypes_by_rows(parameters[name]) for name in names]
                alike = (s for s, dtype in dtypes[0].items() if all(d.get(s) == dtype for d in dtypes))
                found += (tuple(tensor_name(name, stored) for name in names) for stored in alike)
    return tuple(found)


def _dtypes_by_rows(entry: ParameterPlan) -> dict[str, str]:
    """Dtypes of the tensors as which a parameter is stored, if they run along its rows in their first dim."""
    if entry.packing is None:
        return {WHOLE: entry.dtype}
    return {t.name: t.dtype for t in entry.packing.tensors if t.dims and t.dims[0].of == 0}


def in_units(names: Iterable[str], adjacent: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Names in their order, but for those that lie next to each other: these follow the first one at once.

    Args:
        names: all of them.
        adjacent: groups of names; one of which some are missing is left out.
    """
    present = dict.fromkeys(names)
    groups = [group for group in adjacent if present.keys() >= set(group)]
    unit_of = {name: group for group in groups for name in group}
    done: set[str] = set()
    for name in present:
        if name not in done:
            unit = unit_of.get(name, (name,))
            done.update(unit)
            yield unit
