"""Exact minimization of a sum of small cost tables over binary variables.

Variable elimination (bucket elimination, Dechter 1999) removes a variable by minimizing it out of the tables
that mention it; going back gives the optimum. The cost is exponential only in the width of the graph, which
is small here. If it is not, the search conditions on the variable of highest degree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
MAX_WIDTH = 16


class Infeasible(ValueError):
    """The constraints contradict each other."""


class Problem:
    """Costs over binary variables ``0 .. n-1``; ``solve`` returns the cheapest assignment."""

    def __init__(self, num_variables: int) -> None:
        self.num_variables = num_variables
        self._tables: dict[tuple[int, ...], Table] = {}

    def add(self, variables: Sequence[int], table: Table) -> None:
        """Add a cost table: one dim of length 2 for each of the (distinct) variables."""
        key, moved = tuple(variables), table
        if any(a > b for a, b in pairwise(key)):
            order = sorted(range(len(variables)), key=lambda i: variables[i])
            key = tuple(variables[i] for i in order)
            moved = table.transpose(order)
        old_table = self._tables.get(key)
        self._tables[key] = moved if old_table is None else old_table + moved

    def add_unary(self, variable: int, cost: float) -> None:
        """Add ``cost`` if the variable is 1."""
        self.add((variable,), np.array([0.0, cost]))

    def forbid_both(self, a: int, b: int) -> None:
        """Forbid that both are 1."""
        self.add((a, b), np.array([[0.0, 0.0], [0.0, np.inf]]))

    def solve(self) -> list[int]:
        """Return the assignment of least cost, with 0 for variables that do not matter."""
        solution = [0] * self.num_variables
        if _eliminate(dict(self._tables), solution) == np.inf:
            raise Infeasible
        return solution


def _eliminate(tables: dict[tuple[int, ...], Table], solution: list[int]) -> float:
    """Fill ``solution`` for every variable in ``tables``, and return the cost."""
    touching: dict[int, set[tuple[int, ...]]] = {}
    for key in tables:
        for variable in key:
            touching.setdefault(variable, set()).add(key)
    neighbors = {v: {u for key in keys for u in key} - {v} for v, keys in touching.items()}
    steps: list[tuple[int, tuple[int, ...], Table]] = []
    constant = 0.0
    waiting = [(len(adjacent), v) for v, adjacent in neighbors.items()]
    heapq.heapify(waiting)
    while neighbors:
        degree, variable = heapq.heappop(waiting)
        if variable not in neighbors or degree != len(neighbors[variable]):
            continue  # an outdated entry; the variable is in the heap again with its current degree
        scope = tuple(sorted(neighbors[variable] | {variable}))
        if len(scope) > MAX_WIDTH:
            constant += _condition(tables, neighbors, solution)
            break
        total = np.zeros((2,) * len(scope))
        for key in sorted(touching[variable]):
            total += tables[key].reshape(tuple(2 if v in key else 1 for v in scope))
        steps.append((variable, scope, total))
        rest = tuple(v for v in scope if v != variable)
        message = total.min(axis=scope.index(variable))
        for key in touching[variable]:
            del tables[key]
            for other in key:
                if other != variable:
                    touching[other].discard(key)
        for other in rest:
            neighbors[other] |= set(rest) - {other}
            neighbors[other].discard(variable)
            heapq.heappush(waiting, (len(neighbors[other]), other))
        del neighbors[variable], touching[variable]
        if rest:
            tables[rest] = message + tables[rest] if rest in tables else message
            for other in rest:
                touching[other].add(rest)
        else:
            constant += float(message)
    for variable, scope, total in reversed(steps):
        index = tuple(slice(None) if v == variable else solution[v] for v in scope)
        solution[variable] = int(np.argmin(total[index]))
    return constant


def _condition(
    tables: dict[tuple[int, ...], Table], neighbors: dict[int, set[int]], solution: list[int]
) -> float:
    """Try both values of the variable with the most neighbors."""
    hub = max(neighbors, key=lambda v: (len(neighbors[v]), -v))
    best, best_solution = np.inf, None
    for value in (0, 1):
        reduced: dict[tuple[int, ...], Table] = {}
        cost = 0.0
        for key, table in tables.items():
            if hub in key:
                rest = tuple(v for v in key if v != hub)
                table = np.take(table, value, axis=key.index(hub))
                if not rest:
                    cost += float(table)
                    continue
                key = rest
            reduced[key] = reduced[key] + table if key in reduced else table
        trial = list(solution)
        trial[hub] = value
        if np.isfinite(cost):
            cost += _eliminate(reduced, trial)
        if cost < best:
            best, best_solution = cost, trial
    if best_solution is not None:
        solution[:] = best_solution
    return float(best)
