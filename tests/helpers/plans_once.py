"""Plans that these tests have solved and proven are not solved again: solving is deterministic.

Many tests convert a model for what comes after the plan. The first of them solves and proves it; the others,
in this process or in another, read what it got, and are told the same stages. A solver that a test has
changed solves anew, and so does one that is given a class of the tests' own.

What ranks need beside their weights is measured for tests with the fixture ``measured`` alone: it is a third
of the time, and nothing that comes after depends on it. For the same reason a plan is proven for the further
implementations of attention and for attention weights, for tests with the fixture ``other_attentions`` alone:
a third of the time.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.plan import Plan

from shardconv import conversion, passes
from shardconv.arguments import SolveOptions
from shardconv.converted import adaptation, new_solution
from shardconv.planning.parameter_plans import Grains
from shardconv.simulation import rank_simulation
from shardconv.verifying import implementations, proof

SOLVER = (
    "shardconv.adapted_plan",
    "shardconv.dim_analysis.",
    "shardconv.inputs.",
    "shardconv.numeric_check",
    "shardconv.passes",
    "shardconv.plan_forms",
    "shardconv.planning.",
    "shardconv.pp.",
    "shardconv.simulation.",
    "shardconv.tracing.",
    "shardconv.training_code",
    "shardconv.verifying.",
    "shardconv_runtime.comm.",
    "shardconv_runtime.format.",
    "shardconv_runtime.parallel.",
    "shardconv_runtime.pp.",
)
"""The modules that take part in solving."""

_solve = passes.ModelSolver._solved


class Solved:
    """Where the plans of this run are."""

    directory: Path | None = None
    measures: bool = False
    """Plans say how much memory ranks need, as they do for users."""
    other_attentions: bool = False
    """Plans are proven for the further implementations of attention, and attention weights, as for users."""
    attention_weights: bool = False
    """Plans are proven for attention weights."""
    solver: list[tuple[Mapping[str, Any], str, Any]]
    """The functions and constants of the solver: where each is, its name, and what it is."""


def install(directory: Path) -> None:
    """Replace the solver by one that remembers."""
    passes.ModelSolver._solved = _remembered  # type: ignore[method-assign]
    Solved.directory = directory
    Solved.solver = list(_parts())


def _remembered(solver: passes.ModelSolver, options: SolveOptions, inspect: passes.Inspect | None) -> Plan:
    if Solved.directory is None or inspect is not None:  # which looks at the model, too
        return _solve(solver, options, inspect)
    options = replace(options, measure=options.measure and Solved.measures)
    spec = solver.spec
    is_shared = solver.adaptation is None and spec.twin is None and not _own_class(spec) and not _changed()
    path = Solved.directory / _name(spec, options, solver.grains) if is_shared else None
    if path is not None and path.exists():
        return _read(path, solver.tell)
    with _in_short():
        if path is None:
            return _solve(solver, options, None)
        return _write(path, solver, options)


@contextmanager
def _in_short() -> Iterator[None]:
    """Prove nothing for the further implementations of attention and for attention weights, unless the test
    asks for them; and leave the garbage of tiny models for later."""
    before = implementations.OTHERS, rank_simulation.collect_garbage
    gathers = proof.attention_gathers
    rank_simulation.collect_garbage = lambda: None
    if not Solved.other_attentions:
        implementations.OTHERS = ()  # type: ignore[assignment]
    if not (Solved.other_attentions or Solved.attention_weights):
        proof.attention_gathers = lambda model, inputs, plan: None
    try:
        yield
    finally:
        implementations.OTHERS, rank_simulation.collect_garbage = before
        proof.attention_gathers = gathers


def _read(path: Path, tell: passes.Tell) -> Plan:
    plan: Plan
    plan, told = pickle.loads(path.read_bytes())
    for text in told:
        tell(text)
    return plan


def _write(path: Path, solver: passes.ModelSolver, options: SolveOptions) -> Plan:
    told: list[str] = []
    tell = solver.tell

    def keep(text: str) -> None:
        told.append(text)
        tell(text)

    solver.tell = keep
    try:
        plan = _solve(solver, options, None)
    finally:
        solver.tell = tell
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(pickle.dumps((plan, told)))
    unfinished.replace(path)
    return plan


def _own_class(spec: ModelSpec) -> bool:
    return not spec.model_class.__module__.startswith("transformers.models.")


def _changed() -> bool:
    """Whether a test has put something else in the place of a part of the solver."""
    return any(place.get(name) is not value for place, name, value in Solved.solver)


def _parts() -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """What the modules define, and what the classes in them do."""
    for module in [module for name, module in sys.modules.items() if name.startswith(SOLVER)]:
        yield sys.modules, module.__name__, module
        for name, value in list(vars(module).items()):
            yield vars(module), name, value
            if isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, inner in list(vars(value).items()):
                    yield vars(value), attribute, inner


def _name(spec: ModelSpec, options: SolveOptions, grains: Grains) -> str:
    """Names everything that a plan depends on."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("SHARDCONV_")}
    settings.pop("SHARDCONV_CACHE", None)
    model = [spec.class_name, spec.dtype, spec.trust_remote_code, _content(spec.config)]
    tied = None if spec.tied is None else sorted(spec.tied.items())
    asked = [*model, tied, repr(options), sorted(grains.items()), settings, Solved.other_attentions]
    asked.append(Solved.attention_weights)
    return hashlib.sha256(json.dumps(asked, default=repr).encode()).hexdigest()


def _content(value: Any) -> Any:
    """A config with all of its attributes but where it was read."""
    if not isinstance(value, transformers.PreTrainedConfig):
        return value
    return {name: _content(v) for name, v in sorted(vars(value).items()) if name != "_name_or_path"}


def solve_with(patch: pytest.MonkeyPatch, solver: Callable[..., Plan]) -> None:
    """Put a function in the place of ``solve_plan``, wherever a model or a converted directory is solved."""
    for module in (conversion, new_solution, adaptation):
        patch.setattr(module, "solve_plan", solver)


def solve_as(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the solver find this plan."""
    solve_with(patch, lambda *args, **kwargs: plan)
