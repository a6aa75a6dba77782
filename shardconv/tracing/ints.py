"""Integers that remember where they came from.

While a model is traced, its int attributes and the sizes of its tensors are ``TracedInt``. Arithmetic on them
builds an expression, so that the arguments of a view or a split tell which attributes and tensor sizes
determine its shape. ``evaluate`` computes such an expression with other values, to find attribute edits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Expr = tuple[Any, ...]
"""``("attr", fqn, attribute, value)``, ``("size", tensor, dim)`` or ``(operation, left, right)``, where an
operand is an ``Expr`` or a plain int."""

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


class TracedInt(int):
    """An int with an ``expr``. It behaves like its value everywhere."""

    expr: Expr

    def __new__(cls, value: int, expr: Expr) -> TracedInt:
        """Wrap ``value``, to which ``expr`` evaluates in the traced model."""
        self = super().__new__(cls, value)
        self.expr = expr
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedInt:
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __neg__(self) -> TracedInt:
        return TracedInt(-int(self), ("-", 0, self.expr))


def _operand(value: int) -> Expr | int:
    return value.expr if type(value) is TracedInt else int(value)


def _arithmetic(symbol: str, name: str, is_reflected: bool) -> Callable[[TracedInt, Any], Any]:
    compute = getattr(int, name)

    def method(self: TracedInt, other: Any) -> Any:
        result = compute(self, other)
        if result is NotImplemented or not isinstance(other, int):
            return result
        operands = (_operand(other), self.expr) if is_reflected else (self.expr, _operand(other))
        return TracedInt(result, (symbol, *operands))

    return method


_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__")
_watchers: list[Callable[[Expr | int, Expr | int], None]] = []


@contextmanager
def watching(watcher: Callable[[Expr | int, Expr | int], None]) -> Iterator[None]:
    """Pass both sides to ``watcher`` whenever code asks which of two ints is larger."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.pop()


def _compared(name: str) -> Callable[[TracedInt, Any], Any]:
    compute = getattr(int, name)

    def method(self: TracedInt, other: Any) -> Any:
        if _watchers and isinstance(other, int):
            _watchers[-1](self.expr, _operand(other))
        return compute(self, other)

    return method


for _name in _COMPARISONS:
    setattr(TracedInt, _name, _compared(_name))
for _symbol, _function in _OPERATIONS.items():
    for _reflected in (False, True):
        _name = f"__{'r' if _reflected else ''}{_function.__name__}__"
        setattr(TracedInt, _name, _arithmetic(_symbol, _name, _reflected))


def evaluate(value: Any, lookup: Callable[[Expr], int]) -> Any:
    """Return ``value`` with every ``TracedInt`` computed again. ``lookup`` returns attributes and sizes.

    Containers (tuple, list, dict, slice) are rebuilt; other values are returned unchanged.
    """
    if type(value) is TracedInt:
        return _evaluate_expr(value.expr, lookup)
    if isinstance(value, tuple):
        return tuple(evaluate(v, lookup) for v in value)
    if isinstance(value, list):
        return [evaluate(v, lookup) for v in value]
    if isinstance(value, dict):
        return {k: evaluate(v, lookup) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(evaluate(v, lookup) for v in (value.start, value.stop, value.step)))
    return value


def _evaluate_expr(expr: Expr | int, lookup: Callable[[Expr], int]) -> int:
    if isinstance(expr, int):
        return expr
    if expr[0] in ("attr", "size"):
        return lookup(expr)
    return _OPERATIONS[expr[0]](_evaluate_expr(expr[1], lookup), _evaluate_expr(expr[2], lookup))


def traced_ints(value: Any) -> Iterator[TracedInt]:
    """Yield every ``TracedInt`` in ``value`` and in nested containers."""
    if type(value) is TracedInt:
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from traced_ints(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from traced_ints(item)
    elif isinstance(value, slice):
        yield from traced_ints((value.start, value.stop, value.step))


def sources(expr: Expr | int) -> Iterator[Expr]:
    """Yield the attributes and sizes that an expression reads."""
    if isinstance(expr, int):
        return
    if expr[0] in ("attr", "size"):
        yield expr
    else:
        yield from sources(expr[1])
        yield from sources(expr[2])
