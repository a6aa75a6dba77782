"""Plans one model of the zoo, runs its ranks on numbers and says how it went.

The converter proves a plan by itself before it writes. Here the plan is judged again, by other means: other
weights, other inputs of another length and batch, in plain float64, all outputs compared.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from made_inputs import make_inputs
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.format.dims import axes_of, size
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from torch import Tensor, nn

from shardconv.arguments import SolveOptions
from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.passes import solve_plan
from shardconv.reporting.summary import all_notes
from shardconv.simulation.model_runs import Float64
from shardconv.simulation.random_weights import fill, local_weights
from shardconv.simulation.rank_threads import run_ranks
from shardconv.tracing.tape import starred
from shardconv.tracing.trace import results

from .models import ZooModel

TOLERANCE = 1e-9
"""Largest difference of any output in float64, relative to the largest value."""
FLOAT32_TOLERANCE = 1e-5
"""The same where the model's own code computes in float32."""
AMPLIFIED = 10 * 2.0**29
"""So much larger than a difference in float64 may be one in float32: the ratio of their digits, and room."""


@dataclass(frozen=True)
class Result:
    """How one model came out at one tp size."""

    family: str
    type: str
    variant: str
    tp: int
    status: str
    """``equal``, ``float32`` (equal, but for float32 inside of the model), ``wrong``, ``refused``."""
    message: str = ""
    error: float = math.nan
    """Largest difference of an output, relative to the largest value, in plain float64; in float32 where
    the model's code cannot compute in float64."""
    exact_error: float = math.nan
    """The same where the model's casts to float32 keep float64."""
    parameters: int = 0
    sharded: float = 0.0
    """Fraction of the elements of parameters of two or more dims that are split, of those that a forward
    pass can reach."""
    unused: float = 0.0
    """Fraction of the elements that no forward pass of this model reads."""
    overrides: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    """Of one forward pass, by kind."""
    per_layer: float = 0.0
    replicated: dict[str, str] = field(default_factory=dict)
    """Parameters of two or more dims that every rank holds whole, numbers as ``*``, and why."""
    notes: tuple[str, ...] = ()
    plan_seconds: float = 0.0
    """CPU seconds of the plan with its numerical check."""
    seconds: float = 0.0
    """CPU seconds, with the runs of the ranks too."""


def measure(model: ZooModel, tp: int, variant: str = "") -> Result:
    """Plan ``model`` for ``tp`` ranks, run them, compare."""
    start = time.process_time()
    about = {"family": model.family, "type": model.type, "variant": variant, "tp": tp}
    spec = ModelSpec(name=model.type, config=model.config, model_class=model.model_class, dtype="float32")
    try:
        plan = solve_plan(spec, SolveOptions(tp))
    except Exception as error:
        return Result(**about, status="refused", message=_line(error), seconds=time.process_time() - start)
    planned = time.process_time()
    try:
        judged, message = judge(plan, model), ""
    except Exception as problem:
        judged, message = Judged(math.inf, math.inf, math.inf, Counter()), _line(problem)
    return Result(
        **about,
        status=judged.status,
        message=message,
        error=judged.error if not math.isnan(judged.error) else judged.single,
        exact_error=judged.exact,
        **plan_facts(plan),
        collectives=dict(judged.collectives),
        notes=all_notes(plan),
        plan_seconds=planned - start,
        seconds=time.process_time() - start,
    )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


# What the plan says ------------------------------------------------------------------------------


def plan_facts(plan: Plan) -> dict[str, Any]:
    """What a result says of a plan, by the names of its fields."""
    entries = parameter_plans(plan)
    numel = {n: math.prod(size(d) for d in e.dims) for n, e in entries.items()}
    unused = {n for n, e in entries.items() if "does not use it" in e.reason}
    wide = [n for n, e in entries.items() if len(e.dims) > 1 and n not in unused]
    split = {n for n in wide if any(axes_of(d) for d in entries[n].dims)}
    replicated = {starred(n): entries[n].reason for n in wide if n not in split}
    layers = _layers(plan)
    inside = collectives_in_layers(plan).total()
    total = sum(numel[n] for n in wide)
    overrides = {
        (starred(x), e.attribute) for m in plan.modules for x in expand_all(m.names) for e in m.overrides
    }
    return {
        "parameters": plan.model.num_parameters,
        "sharded": sum(numel[n] for n in split) / total if total else 1.0,
        "unused": sum(numel[n] for n in unused) / max(1, sum(numel.values())),
        "overrides": len(overrides),
        "per_layer": inside / len(layers) if layers else float(inside),
        "replicated": replicated,
    }


def collectives_in_layers(plan: Plan) -> Counter[str]:
    """Where the collectives inside of layers are, and how many."""
    layers = _layers(plan)
    return Counter(
        f"{starred(name)} ({what})"
        for m in plan.modules
        for name in expand_all(m.names, 10**6)
        if any(name == x or name.startswith(x + ".") for x in layers)
        for what in (
            *(b.op for b in (*m.inputs, *m.outputs) if b.op in ("all_reduce", "all_gather")),
            *(["statistic of a norm"] if m.norm else []),
        )
    )


def _layers(plan: Plan) -> set[str]:
    """FQNs of the repeated layers."""
    return {m[0] for n in parameter_plans(plan) if (m := re.match(r"(.*?\.)?\d+(?=\.)", n))}


def shares(plan: Plan) -> tuple[float, dict[str, str]]:
    """Of a plan, what ``Result`` calls ``sharded`` and ``replicated``."""
    facts = plan_facts(plan)
    return facts["sharded"], facts["replicated"]


# Numbers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """How far the ranks' outputs are from the unsharded model's, relative to the largest value of each."""

    error: float
    """In plain float64; NaN where the model's own code cannot compute in it."""
    exact: float
    """In float64 whose casts to float32 are left out; NaN where plain float64 is enough, or as above."""
    single: float
    """In float32, where float64 cannot be computed in at all."""
    collectives: Counter[str]

    @property
    def status(self) -> str:
        """``equal``, ``float32`` (equal, but for float32 inside of the model) or ``wrong``."""
        if self.error <= TOLERANCE:
            return "equal"
        # A model that amplifies rounding does so with that of its float32 parts, too.
        amplified = AMPLIFIED * self.exact if self.exact <= TOLERANCE else 0.0
        if self.exact <= TOLERANCE and not self.error > max(FLOAT32_TOLERANCE, amplified):
            return "float32"
        return "float32" if math.isnan(self.exact) and self.single <= FLOAT32_TOLERANCE else "wrong"


def judge(plan: Plan, model: ZooModel, seed: int = 7) -> Judged:
    """Run the unsharded model and all ranks on the same random weights, and compare all outputs."""
    double = _Trial(plan, model, seed, torch.float64)
    error, collectives = double.run(exact=False)
    exact = single = math.nan
    if not error <= TOLERANCE:
        exact, collectives = double.run(exact=True)
    if math.isnan(error) and math.isnan(exact):
        single, collectives = _Trial(plan, model, seed, torch.float32).run(exact=False)
    return Judged(error, exact, single, collectives)


class _Trial:
    """One model with its weights and inputs, in one dtype."""

    def __init__(self, plan: Plan, model: ZooModel, seed: int, dtype: torch.dtype) -> None:
        self.plan = plan
        self.entries = parameter_plans(plan)
        self.whole = build_model(model.model_class, copy.deepcopy(model.config), dtype)
        if hasattr(self.whole, "set_experts_implementation"):
            self.whole.set_experts_implementation("eager")  # torch's grouped product has no float64 on CPUs
        generator = torch.Generator().manual_seed(seed)
        stored = {n: t for n, t in stored_tensors(self.whole) if n in self.entries}
        self.weights = {n: random_weight(t, generator) for n, t in stored.items()}
        single = build_model(model.model_class, copy.deepcopy(model.config), torch.float32)
        self.inputs = make_inputs(single, seed=seed).to(dtype)  # found by running: some code forbids float64

    def run(self, exact: bool) -> tuple[float, Counter[str]]:
        """The largest difference, and one rank's collectives; NaN where the unsharded model fails."""
        counts = Counter[str]()
        whole, weights = self.whole, self.weights
        if exact:  # code may keep a parameter in float32, and cast what meets it
            whole = copy.deepcopy(whole).to(torch.float64)
            weights = {n: w.double() if w.is_floating_point() else w for n, w in weights.items()}
        try:
            want = _run(fill(copy.deepcopy(whole), weights).eval(), self.inputs, exact)
        except (RuntimeError, ValueError):
            return math.nan, counts
        if not want or not all(t.isfinite().any() for t in want if t.numel()):
            return math.nan, counts

        def rank(comm: Communicator) -> float:
            if comm.rank == 0:
                _count(comm, counts)
            local = parallelize(copy.deepcopy(whole), self.plan, comm)
            parts = local_weights(weights, self.plan, comm.rank)
            return difference(_run(fill(local, parts).eval(), self.inputs, exact), want)

        return max(run_ranks(self.plan.mesh, rank)), counts


def random_weight(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Matrices of a gain of one, vectors (norms, biases, decays) about one half: none is zero or one."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    value = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    if tensor.dim() < 2:
        value = (0.5 + 0.2 * value).abs()
    else:
        value /= math.sqrt(max(1, tensor.shape[-1]))
    return value.to(tensor.dtype)


def _run(model: nn.Module, inputs: TraceInputs, exact: bool) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.inference_mode():
        if exact:
            with Float64():
                result = model(**inputs.tensors, **inputs.options)
        else:
            result = model(**inputs.tensors, **inputs.options)
    return results(model, result)


def _count(comm: Communicator, counts: Counter[str]) -> None:
    """Count what this rank's communicator is asked for."""
    reduce, concatenate = comm._sum, comm._concatenate

    def counted_sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        counts["all_reduce"] += 1
        return reduce(x, axes)

    def counted_concatenate(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        counts["all_gather"] += 1
        return concatenate(x, axes)

    comm._sum, comm._concatenate = counted_sum, counted_concatenate  # type: ignore[method-assign]


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest difference over the largest value of the same output; infinite where nothing is finite."""
    if [t.shape for t in got] != [t.shape for t in want] or not want:
        return math.inf
    worst = 0.0
    for x, y in zip(got, want, strict=True):
        if not y.numel():
            continue
        x, y = x.double(), y.double()
        finite = y.isfinite()
        if not finite.any():
            return math.inf
        same = (x == y) | (x.isnan() & y.isnan())
        error = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=math.inf)
        worst = max(worst, float(error.max() / y[finite].abs().max().clamp_min(1e-30)))
    return worst
