"""The rule of each operator for dims: one table, one module per family.

A rule is ``rule(builder, op, arguments)``, and analyzes one call of its operator. It reads the dims of the
inputs and gives every output its dims and its partial state; all shapes are global. It raises ``NotCovered``
for a call that it does not cover. Such a call, and an operator without a rule that is not pointwise, blocks
every dim that it touches; the plan reports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import contraction_rules, factory_rules, pointwise_rules, reduction_rules, selection_rules, view_rules
from .operator_traits import Traits, traits_of_rule

Rule = Callable[[Any, Any, Any], None]

RULES: dict[str, Rule] = {
    **pointwise_rules.RULES,
    **contraction_rules.RULES,
    **view_rules.RULES,
    **selection_rules.RULES,
    **reduction_rules.RULES,
    **factory_rules.RULES,
}
"""Name of an operator without the overload, such as ``aten.linear`` -> its rule."""

POINTWISE: Rule = pointwise_rules.nonlinear
"""The rule of operators that torch tags as pointwise and that ``RULES`` lacks."""


def rule_of(name: str) -> Rule | None:
    """Return the rule of an operator, or of the one that it does in place, with or without the overload."""
    base = ".".join(name.split(".")[:2])
    return RULES.get(name) or RULES.get(base) or RULES.get(base.rstrip("_"))


def traits_of(name: str) -> Traits:
    """Return the traits of an operator; see ``rule_of``."""
    return traits_of_rule(rule_of(name))
