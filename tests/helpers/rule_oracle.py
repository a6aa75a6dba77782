"""Checks what the rules say of an operator against numbers.

A small function is traced and analyzed. For every leaf that the rules leave free (and every state that
may be partial) the solver is asked for an assignment that uses it. Then each operator of the tape is run
on each rank's part of its true inputs: what comes out must be the rank's part of the true output, or,
where the output is partial, sum to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from shardconv_runtime.format import slices
from shardconv_runtime.format.dims import Dim, size, to_text
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardconv.dim_analysis import view_rules
from shardconv.dim_analysis.analysis import Analysis
from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.rule_builder import Arguments
from shardconv.dim_analysis.rules import RULES
from shardconv.planning.axis_variables import SolverInput
from shardconv.planning.elimination import Table
from shardconv.planning.layout import Layouts
from shardconv.planning.mesh_axis_problem import AxisProblem
from shardconv.planning.solve import Assignment
from shardconv.tracing.fold import Folded
from shardconv.tracing.tape import Mark, Op, Ref, Tape
from shardconv.tracing.trace import trace

MODES = ("parameter", "summed")
"""What the operands are: parameters; or activations, which are sums that may be partial."""
TERMS = 5
"""Number of terms of a ``summed`` operand."""


class Wrong(AssertionError):
    """The rules are unsound."""


# Programs ------------------------------------------------------------------------------------------


class _Body(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: Tensor) -> Any:
        return self.function(*operands)


class Program(nn.Module):
    """``function`` over float operands that are made of parameters, and ints that are inputs."""

    def __init__(self, function: Callable[..., Any], operands: tuple[Tensor, ...], mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.body = _Body(function)
        self.num_operands = len(operands)
        for i, operand in enumerate(operands):
            if operand.is_floating_point():
                extra = (TERMS,) if mode == "summed" else ()
                shape = (*operand.shape, *extra)
                self.register_parameter(f"p{i}", nn.Parameter(torch.empty(shape, dtype=torch.float64)))

    def forward(self, one: Tensor, **ints: Tensor) -> Any:
        return self.body(*(self._operand(i, one, ints) for i in range(self.num_operands)))

    def _operand(self, i: int, one: Tensor, ints: dict[str, Tensor]) -> Tensor:
        if f"i{i}" in ints:
            return ints[f"i{i}"]
        parameter = getattr(self, f"p{i}")
        return parameter if self.mode == "parameter" else (parameter * one).sum(-1)


def check(
    function: Callable[..., Any], *operands: Tensor, mode: str, extents: tuple[int, ...] = (2, 3)
) -> Analysis:
    """Trace ``function(*operands)`` and check every operator in it under every assignment.

    Raises:
        Wrong: an operator gives other numbers on the parts than its rule says.
    """
    model = Program(function, operands, mode).to("meta")
    ints = {f"i{i}": x for i, x in enumerate(operands) if not x.is_floating_point()}
    inputs = {"one": torch.full((1,), 1.5, dtype=torch.float64), **ints}
    tape = trace(model, inputs, RULES)
    analysis = analyze(tape)
    values = _values(tape, inputs)
    for extent in extents:
        done: set[Any] = set()
        for assignment in assignments(analysis, extent):
            _check_assignment(Layouts(analysis, assignment), values, extent, done)
    return analysis


def body_dims(analysis: Analysis) -> list[str]:
    """The dims of what the function returned: before any mark."""
    tape = analysis.tape
    ends = [
        e for e in tape.events if isinstance(e, Mark) and e.is_output and tape.calls[e.call].fqn == "body"
    ]
    return [" ".join(map(repr, analysis.dims[e.source])) for e in ends]


def assignments(analysis: Analysis, extent: int) -> Iterator[Assignment]:
    """For every variable, one assignment that uses it with little else, and one with much else."""
    given = SolverInput(analysis, (), Folded(analysis.tape))
    generator = np.random.default_rng(extent)
    problem = AxisProblem(given, extent, {})
    summed: dict[tuple[int, ...], Table] = {}  # it is solved many times
    for variables, table in problem.costs:
        summed[variables] = summed[variables] + table if variables in summed else table
    problem.costs = list(summed.items())
    num, num_costs = len(problem.keys), len(problem.costs)
    seen: set[tuple[Any, ...]] = set()
    for wanted, much in itertools.product(range(num), (False, True)):
        del problem.costs[num_costs:]
        for v in range(num):
            cost = -1e6 * generator.random() if much else 1e6
            problem._add((v,), np.array([0.0, -1e12 if v == wanted else cost]))
        sharded, partial = problem.solve()
        key = (*sharded, None, *partial)
        if key not in seen:
            seen.add(key)
            axes = dict.fromkeys(sharded, (0,))
            yield Assignment((extent,), axes, dict.fromkeys(partial, (0,)))


# Running a tape ------------------------------------------------------------------------------------


def _values(tape: Tape, inputs: dict[str, Tensor]) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values: dict[int, Tensor] = {}
    for tid, info in enumerate(tape.tensors):
        if info.kind == "parameter":
            values[tid] = torch.randn(info.shape, generator=generator, dtype=info.dtype)
        elif info.kind == "input":
            values[tid] = inputs[info.name]
    for event in tape.events:
        if isinstance(event, Mark):
            values[event.target] = values[event.source]
        else:
            args, kwargs = event.args, event.kwargs
            values.update(zip(event.outputs, _run(event, args, kwargs, values), strict=True))
    return values


def _run(op: Op, args: Any, kwargs: Any, values: dict[int, Tensor]) -> list[Tensor]:
    assert op.overload is not None, f"{op.name} cannot be run alone"
    mutable = op.overload._schema.is_mutable

    def load(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.tid].clone() if mutable else values[value.tid]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    args, kwargs = pytree.tree_map(load, (args, kwargs), is_leaf=lambda x: isinstance(x, Ref))
    result = op.overload(*args, **kwargs)
    if mutable:
        named = dict(zip((a.name for a in op.overload._schema.arguments), args, strict=False)) | kwargs
        arguments = op.overload._schema.arguments
        result = [named[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


def part(x: Tensor, dims: tuple[Dim, ...], mesh: tuple[int, ...], rank: int) -> Tensor:
    """What a rank holds of a tensor."""
    for d, layout in enumerate(dims):
        held = [p for a, b in slices.ranges(layout, mesh, rank) for p in range(a, b)]
        x = x.index_select(d, torch.tensor(held, dtype=torch.long))
    return x


def terms(x: Tensor, count: int) -> list[Tensor]:
    """Tensors that sum to ``x``."""
    if x.dtype == torch.bool:
        raise Wrong("a bool tensor is partial")
    generator = torch.Generator().manual_seed(x.numel())
    if x.is_floating_point() or x.is_complex():
        parts = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(count - 1)]
    else:
        parts = [torch.randint(-9, 9, x.shape, generator=generator, dtype=x.dtype) for _ in range(count - 1)]
    return [*parts, x - sum(parts)]  # type: ignore[list-item]


def _check_assignment(layouts: Layouts, values: dict[int, Tensor], extent: int, done: set[Any]) -> None:
    """Check the function's operators; ``done`` are those that were checked under the same layouts."""
    analysis = layouts.analysis
    split_up: dict[int, list[Tensor]] = {}

    def held(tid: int, rank: int) -> Tensor:
        if _is_partial(layouts, tid):
            if tid not in split_up:
                split_up[tid] = terms(values[tid], extent)
            return split_up[tid][rank]
        return part(values[tid], layouts.dims(tid), (extent,), rank)

    inside_norms = {index for norm in analysis.norms for index in norm.site.events}
    for index, op in enumerate(analysis.tape.events):
        if not isinstance(op, Op) or index in inside_norms:
            continue
        if any(t not in analysis.dims for t in (*op.inputs, *op.outputs)):
            continue
        tids = (*op.inputs, *op.outputs)
        state = (index, *((layouts.dims(t), _is_partial(layouts, t)) for t in tids))
        is_split = any(layouts.is_sharded(t) or _is_partial(layouts, t) for t in tids)
        if not is_split or state in done or not analysis.tape.calls[op.call].fqn:
            continue
        done.add(state)
        results = []
        for rank in range(extent):
            try:
                results.append(_run_local(op, layouts, {t: held(t, rank) for t in op.inputs}, rank))
            except Wrong:
                raise
            except (RuntimeError, IndexError, ValueError) as error:
                raise Wrong(f"{_describe(op, layouts)} fails on rank {rank}: {error}") from error
        for position, tid in enumerate(op.outputs):
            _compare(op, layouts, tid, values[tid], [r[position] for r in results])


def _is_partial(layouts: Layouts, tid: int) -> bool:
    return bool(layouts.assignment.partial_axes(layouts.analysis.partial[tid]))


def _compare(op: Op, layouts: Layouts, tid: int, full: Tensor, got: list[Tensor]) -> None:
    if _is_partial(layouts, tid):
        if any(g.shape != full.shape for g in got):
            raise Wrong(f"{_describe(op, layouts)}: partial, with shapes {[tuple(g.shape) for g in got]}")
        if not torch.allclose(sum(_real(g) for g in got), _real(full), atol=1e-9):  # type: ignore[arg-type]
            raise Wrong(f"{_describe(op, layouts)}: the ranks' terms do not sum to the full result")
        return
    for rank, mine in enumerate(got):
        want = part(full, layouts.dims(tid), layouts.mesh, rank)
        if mine.shape != want.shape or not torch.allclose(_real(mine), _real(want), atol=1e-9):
            raise Wrong(f"{_describe(op, layouts)}: wrong on rank {rank}")


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x.double()


def _describe(op: Op, layouts: Layouts) -> str:
    def show(tid: int) -> str:
        dims = " ".join(to_text(d) if size(d) else "0" for d in layouts.dims(tid))
        return f"[{dims}{'; partial' if _is_partial(layouts, tid) else ''}]"

    numbers = [a for a in op.args if not isinstance(a, Ref)]
    sides = (", ".join(map(show, side)) for side in (op.inputs, op.outputs))
    return f"{op.name} {numbers} {op.kwargs or ''}: " + " -> ".join(sides)


# One operator on a rank's part -----------------------------------------------------------------------


def _run_local(op: Op, layouts: Layouts, local: dict[int, Tensor], rank: int) -> list[Tensor]:
    """Run an operator on parts, with the ints that an attribute override would give it."""
    base = op.base.rstrip("_")
    handler = _LOCAL.get(base)
    if handler is not None:
        return handler(op, layouts, local, rank)
    return _run(op, op.args, op.kwargs, local)


def _shapes(op: Op, layouts: Layouts, rank: int) -> list[tuple[int, ...]]:
    return [layouts.local_shape(t, rank) for t in op.outputs]


def _view(op: Op, layouts: Layouts, local: dict[int, Tensor], rank: int) -> list[Tensor]:
    return [local[op.inputs[0]].reshape(_shapes(op, layouts, rank)[0])]


def _expand(op: Op, layouts: Layouts, local: dict[int, Tensor], rank: int) -> list[Tensor]:
    return [local[op.inputs[0]].expand(_shapes(op, layouts, rank)[0])]


def _split(op: Op, layouts: Layouts, local: dict[int, Tensor], rank: int) -> list[Tensor]:
    source = local[op.inputs[0]]
    dim = Arguments(op)["dim"] % source.dim()
    return list(source.split([s[dim] for s in _shapes(op, layouts, rank)], dim))


def _repeat(op: Op, layouts: Layouts, local: dict[int, Tensor], rank: int) -> list[Tensor]:
    source, shape = local[op.inputs[0]], _shapes(op, layouts, rank)[0]
    have = (1,) * (len(shape) - source.dim()) + tuple(source.shape)
    return [source.repeat([n // h for n, h in zip(shape, have, strict=True)])]


def _repeat_interleave(op: Op, layouts: Layouts, local: dict[int, Tensor], rank: int) -> list[Tensor]:
    args = Arguments(op)
    if not isinstance(args["repeats"], int) or args["dim"] is None:
        return _run(op, op.args, op.kwargs, local)
    source, dim = local[op.inputs[0]], args["dim"]
    return [source.repeat_interleave(_shapes(op, layouts, rank)[0][dim] // source.shape[dim], dim)]


def _slice(op: Op, layouts: Layouts, local: dict[int, Tensor], rank: int) -> list[Tensor]:
    args, source = Arguments(op), local[op.inputs[0]]
    shape = layouts.analysis.tape.tensors[op.inputs[0]].shape
    dim = args["dim"] % len(shape)
    if "narrow" in op.name:
        start = args["start"] % max(shape[dim], 1)
        start, stop, step = start, start + args["length"], 1
    else:
        start, stop, step = slice(args["start"], args["end"], args["step"]).indices(shape[dim])
    if step == 1:
        held = slices.ranges(layouts.dims(op.inputs[0])[dim], layouts.mesh, rank) if shape[dim] else ()
        start, stop = (sum(max(0, min(b, at) - a) for a, b in held) for at in (start, max(start, stop)))
    elif source.shape[dim] != shape[dim] and stop > start:
        stop = source.shape[dim]
    return [source[(slice(None),) * dim + (slice(start, stop, step),)]]


def _factory(op: Op, layouts: Layouts, local: dict[int, Tensor], rank: int) -> list[Tensor]:
    values = dict(Arguments(op).values)
    values["size"] = list(_shapes(op, layouts, rank)[0])
    return _run(op, (), values, local)


def _convolution(op: Op, layouts: Layouts, local: dict[int, Tensor], rank: int) -> list[Tensor]:
    """With as many groups as the rank holds, as an overridden attribute would say."""
    source, weight = local[op.inputs[0]], local[op.inputs[1]]
    channels = _shapes(op, layouts, rank)[0][1] if Arguments(op)["transposed"] else source.shape[1]
    return _run(op, (*op.args[:-1], channels // weight.shape[1]), op.kwargs, local)


def _embedding(op: Op, layouts: Layouts, local: dict[int, Tensor], rank: int) -> list[Tensor]:
    """Rows that the rank does not hold are zero."""
    table, ids = local[op.inputs[0]], local[op.inputs[1]]
    held = [
        p for a, b in slices.ranges(layouts.dims(op.inputs[0])[0], layouts.mesh, rank) for p in range(a, b)
    ]
    row_of = {p: i for i, p in enumerate(held)}
    rows = torch.tensor([row_of.get(int(i), 0) for i in ids.flatten()]).reshape(ids.shape)
    mine = torch.tensor([int(i) in row_of for i in ids.flatten()]).reshape(ids.shape)
    return [table[rows] * mine[..., None]]


_LOCAL: dict[str, Callable[[Op, Layouts, dict[int, Tensor], int], list[Tensor]]] = {
    **{
        name: _view
        for name, rule in view_rules.RULES.items()
        if rule is view_rules.view or rule is view_rules.squeeze
    },
    "aten.convolution": _convolution,
    **{name: _expand for name, rule in view_rules.RULES.items() if rule is view_rules.expand},
    **dict.fromkeys(("aten.split", "aten.chunk", "aten.split_with_sizes", "aten.tensor_split"), _split),
    "aten.repeat": _repeat,
    "aten.repeat_interleave": _repeat_interleave,
    "aten.slice": _slice,
    "aten.narrow": _slice,
    "aten.embedding": _embedding,
    **dict.fromkeys(
        [f"aten.{n}" for n in ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")], _factory
    ),
}
