"""What a plan fuses, for reports."""

from __future__ import annotations

from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import Plan


def fused_lines(plan: Plan) -> list[str]:
    """One line for each entry: the modules, the members, and how many products become how many."""
    return [_line(entry.members) for entry in plan.fused]


def _line(members: tuple[tuple[str, ...], ...]) -> str:
    count = len(expand_all(members[0]))
    where = ", ".join(pattern.rpartition(".")[0] or "(the model)" for pattern in members[0])
    names = " + ".join(patterns[0].rpartition(".")[2] for patterns in members)
    return f"{where}: {names} ({count * len(members)} products are {count})"
