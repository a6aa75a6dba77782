"""Traits of operators, which stand at their rules and are asked for after the analysis of dims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

R = TypeVar("R", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of the operators of a rule."""

    is_product: bool = False
    """A product of matrices or vectors: a module is classified by the weight that it multiplies with."""
    is_grouped: bool = False
    """A product of rows with a stack of matrices, given the ends of the rows of each matrix."""
    picks: bool = False
    """It can take single matrices out of a stack."""
    is_attention: bool = False
    """Its probabilities have all dims of its first operand, the query, except the last."""
    passes: bool = False
    """The result is the stack of matrices that it reads, perhaps transposed or cast."""


NO_TRAITS = Traits()


def traits(**values: bool) -> Callable[[R], R]:
    """Return a decorator that gives a rule its traits."""

    def decorate(rule: R) -> R:
        rule.traits = Traits(**values)  # type: ignore[attr-defined]
        return rule

    return decorate


def traits_of_rule(rule: Any) -> Traits:
    """Return the traits of a rule; none of an operator without a rule."""
    return getattr(rule, "traits", NO_TRAITS)
