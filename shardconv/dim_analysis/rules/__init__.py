"""The rule of each operator for dims: one table, one module per family.

A rule is ``rule(builder, op, arguments)``, and analyzes one call of its operator. It reads the dims of the
inputs and gives every output its dims and its partial state; all shapes are global. It raises ``NotCovered``
for a call that it does not cover. Such a call, and an operator without a rule that is not pointwise, blocks
every dim that it touches; the plan reports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import contraction, factory, pointwise, reduction, selection, views

Rule = Callable[[Any, Any, Any], None]

RULES: dict[str, Rule] = {
    **pointwise.RULES,
    **contraction.RULES,
    **views.RULES,
    **selection.RULES,
    **reduction.RULES,
    **factory.RULES,
}
"""Name of an operator without the overload, such as ``aten.linear`` -> its rule."""

POINTWISE: Rule = pointwise.nonlinear
"""The rule of operators that torch tags as pointwise and that ``RULES`` lacks."""
