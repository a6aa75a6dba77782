"""The interface of the rules: read a call, and relate the dims of its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..tracing.tape import Mark, Op, Ref, Tape, makers, prefixes
from . import dim_trees
from .analysis import Analysis, Contraction, NormUse, Partial, TableLookup, Work, find_partial
from .dim_trees import IncompatibleDims, Node
from .norm_sites import NormSite


class NotCovered(Exception):
    """The rule does not cover this call. Everything that the call touches is replicated, with a note."""


class Builder:
    """Fill an ``Analysis``. Rules read dims of inputs from it, and set the dims of outputs.

    Dims are trees; tensors that share a node have the same dim. All shapes are global.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.result = Analysis(tape)
        self.mark_of: dict[int, Mark] = {}
        """Tensor -> the mark that made it."""
        self.lookup_calls = pure_lookups(tape)
        self.passive_calls = passive_calls(tape)
        self.input_sizes = {n for tid in tape.inputs for n in tape.tensors[tid].shape if n > 1}
        self.why = ""
        """Why the current operator blocks a dim, for the report."""
        self.parametric = self.result.parametric
        self.from_stack = self.result.from_stack

    # Tensors ---------------------------------------------------------------------------------

    @cached_property
    def made_by(self) -> dict[int, Mark | Op]:
        """Tensor -> the event that made it."""
        return makers(self.tape)

    def tensor(self, tid: int) -> tuple[Node, ...]:
        """Return the dims of a tensor. Parameters, inputs and constants get theirs here."""
        known_dims = self.result.dims.get(tid)
        if known_dims is not None:
            return known_dims
        info = self.tape.tensors[tid]
        is_parameter = info.kind in ("parameter", "buffer")
        dims = tuple(dim_trees.leaf(n, blocked=not is_parameter) for n in info.shape)
        if info.kind == "input":
            self.result.frozen += dims
            for dim in dims:
                dim_trees.make_atomic(dim)
        self.result.dims[tid] = dims
        self.result.partial[tid] = Partial(zero=info.kind != "parameter")
        if info.kind == "parameter":
            self.parametric.add(tid)
        return dims

    def partial(self, tid: int) -> Partial:
        """Return the partial state of a tensor."""
        self.tensor(tid)
        return find_partial(self.result.partial[tid])

    def shape(self, tid: int) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return self.tape.tensors[tid].shape

    def is_parameter(self, tid: int) -> bool:
        """Return whether the tensor is a parameter itself."""
        return self.tape.tensors[tid].kind == "parameter"

    # Said by rules ---------------------------------------------------------------------------

    def set(self, tid: int, dims: Sequence[Node], partial: Partial | None = None) -> None:
        """Set the dims of an output. It is not partial unless a state is given."""
        shape = self.shape(tid)
        assert tuple(d.size for d in dims) == shape, f"dims {dims} for a tensor of shape {shape}"
        self.result.dims[tid] = tuple(dims)
        self.result.partial[tid] = partial if partial is not None else Partial(zero=True)

    def never_partial(self, *tids: int) -> None:
        """Forbid that these tensors are partial."""
        for tid in tids:
            self.partial(tid).zero = True

    def same_partial(self, *states: Partial) -> Partial:
        """Make all of these states the same."""
        first = find_partial(states[0])
        for other in states[1:]:
            root = find_partial(other)
            if root is not first:
                root.parent = first
                first.zero |= root.zero
        return first

    def bilinear_partial(self, a: int, b: int) -> Partial:
        """Return the state of a product. At most one factor may be partial, and never a parameter."""
        self.never_partial(*(t for t in (a, b) if t in self.parametric))
        p, q = self.partial(a), self.partial(b)
        if q.zero:
            return p
        if p.zero:
            return q
        output = Partial()
        self.result.contractions.append(Contraction(output, (), (p, q)))
        return output

    def contract(self, dims: Sequence[Node], *inputs: int) -> Partial:
        """Return the state of an output that is summed over ``dims`` and linear in ``inputs``."""
        states = [s for s in dict.fromkeys(map(self.partial, inputs)) if not s.zero]
        output = Partial()
        has_weight = not self.parametric.isdisjoint(inputs)
        self.result.contractions.append(Contraction(output, tuple(dims), tuple(states), has_weight))
        return output

    def work(self, dims: Sequence[Node]) -> None:
        """Note a product over all these dims. Sharding any of them divides the work."""
        self.result.works.append(Work(tuple(dims), math.prod(d.size for d in dims)))

    def take_from_stack(self, source: int, target: int) -> None:
        """Note that ``target`` is taken from ``source`` along its first dim."""
        info = self.tape.tensors[source]
        if len(info.shape) == 3 and info.dtype.is_floating_point and source in self.parametric:
            self.from_stack.add(target)

    def lookup(self, mark: Mark, table: int, output: int) -> None:
        """Note that rows of a table are looked up by ids that enter a module at ``mark``."""
        returned = self.lookup_calls[mark.call]
        self.result.lookups.append(TableLookup(mark.call, mark.ports[0], returned, table, output))

    def free_partial(self) -> Partial:
        """Return the state of zeros, which may be partial or not."""
        return Partial()

    def block(self, *tids: int) -> None:
        """Forbid to shard any dim of these tensors, and that they are partial."""
        for tid in tids:
            for dim in self.tensor(tid):
                self.block_dim(dim)
        self.never_partial(*tids)

    def block_dim(self, dim: Node) -> None:
        """Forbid to shard a dim, since the current operator needs all of it."""
        dim_trees.block(dim, self.why)

    def blocked(self, *sizes: int) -> list[Node]:
        """Return new dims that are never sharded."""
        return [dim_trees.leaf(n, blocked=True) for n in sizes]

    def split(self, dim: Node, inner: int) -> tuple[Node, Node]:
        """Return (outer, inner) factors of a dim, which are blocked if its structure has none."""
        try:
            return dim_trees.split(dim, inner)
        except IncompatibleDims:
            self.block_dim(dim)
            return dim_trees.leaf(dim.size // inner, True), dim_trees.leaf(inner, True)

    def cut(self, dim: Node, sizes: Sequence[int]) -> list[Node]:
        """Return consecutive segments of a dim, which are blocked if its structure has none."""
        try:
            return dim_trees.cut(dim, sizes)
        except IncompatibleDims:
            self.block_dim(dim)
            return [dim_trees.leaf(n, True) for n in sizes]

    # Events ----------------------------------------------------------------------------------

    def mark(self, mark: Mark) -> None:
        """Add a mark. Dims before and after it have one structure, but separate leaves and states."""
        before = self.tensor(mark.source)
        if mark.call in self.passive_calls:
            self.set(mark.target, before, self.partial(mark.source))
            return
        after = []
        for dim in before:
            twin = dim_trees.leaf(dim.size)
            # A dim may be as long as an input, but have parts none of which may ever be sharded, for example
            # a sequence that was padded and cut into chunks. Behind a mark it is one leaf again.
            parts = dim_trees.leaves(dim)
            is_settled = dim_trees.find(dim).kind != dim_trees.LEAF and all(
                x.blocked and not x.atomic for x in parts
            )
            if dim.size in self.input_sizes and is_settled:
                dim_trees.make_atomic(twin)
            else:
                dim_trees.link(dim, twin)
            after.append(twin)
        if is_returned_input(self.mark_of.get(mark.source), mark):
            self.result.returned.add(mark.target)
        state = Partial(zero=self.partial(mark.source).zero and mark.target not in self.result.returned)
        self.set(mark.target, after, state)
        self.mark_of[mark.target] = mark

    def norm(self, site: NormSite) -> None:
        """Add a norm module as one operator. Dims pass through, and sharding the normalized one costs a
        statistic."""
        dims = self.tensor(site.inputs[0])
        for other in site.inputs[1:]:
            for x, y in zip(dims, self.tensor(other), strict=True):
                dim_trees.unify(x, y)
        for tid in site.parameters:
            dim_trees.unify(self.tensor(tid)[-1], dims[-1])
        self.never_partial(*site.inputs, *site.parameters)
        groups, normalized = dim_trees.leaf(1), dims[-1]
        if site.groups > 1:
            groups, normalized = self.split(dims[-1], dims[-1].size // site.groups)
        self.set(site.output, dims)
        self.result.norms.append(NormUse(site, groups, normalized))


def owning_modules(tape: Tape) -> set[str]:
    """Return FQNs of the modules that have parameters or buffers, themselves or in modules inside."""
    return {p for i in tape.tensors if i.kind in ("parameter", "buffer") for p in prefixes(i.name)}


def passive_calls(tape: Tape) -> frozenset[int]:
    """Return calls of modules whose marks change no placement.

    These are modules without parameters that are called in several forms, and modules that are not called in
    training. For example, one dropout may be used for scores and states, and a step of the module would run
    in each of its calls. A module that returns its input may be called with any number of rows.
    """
    forms: dict[str, dict[tuple[str, ...], set[tuple[int, ...]]]] = {}
    identities = {tape.calls[mark.call].fqn for mark in returned_inputs(tape)}
    for event in tape.events:
        if isinstance(event, Mark):
            fqn, shape = tape.calls[event.call].fqn, tape.tensors[event.source].shape
            form = shape[1:] if fqn in identities and len(shape) == 2 else shape
            forms.setdefault(fqn, {}).setdefault(event.ports, set()).add(form)
    several = {fqn for fqn, ports in forms.items() if any(len(shapes) > 1 for shapes in ports.values())}
    passive = (several - owning_modules(tape) - {""}) | tape.not_in_training
    return frozenset(i for i, call in enumerate(tape.calls) if call.fqn in passive)


def is_returned_input(entered: Mark | None, mark: Mark) -> bool:
    """Return whether a module returns, at a mark, the tensor that entered it at another mark."""
    return entered is not None and mark.is_output and not entered.is_output and entered.call == mark.call


def returned_inputs(tape: Tape) -> list[Mark]:
    """Return the marks where modules return an input."""
    marks = {event.target: event for event in tape.events if isinstance(event, Mark)}
    return [mark for mark in marks.values() if is_returned_input(marks.get(mark.source), mark)]


def pure_lookups(tape: Tape) -> dict[int, str]:
    """Map module calls that only return rows of a table times scalars to the ports where they return them.

    Out-of-shard rows are zeroed at these ports.
    """
    ops: dict[int, list[Op]] = {}
    results: dict[int, list[Mark]] = {}
    for event in tape.events:
        if isinstance(event, Op):
            ops.setdefault(event.call, []).append(event)
        elif event.is_output:
            results.setdefault(event.call, []).append(event)
    parents = {c.parent for c in tape.calls}
    return {
        call: results[call][0].ports[0]
        for call, mine in ops.items()
        if call not in parents
        and len(results.get(call, ())) == 1
        and _is_lookup(tape, mine, results[call][0])
    }


def _is_lookup(tape: Tape, ops: list[Op], result: Mark) -> bool:
    rows: set[int] = set()
    for op in ops:
        if op.base == "aten.embedding" and not rows:
            rows.update(op.outputs)
        elif rows.intersection(op.inputs):
            sides = [t for t in op.inputs if t not in rows]
            if any(math.prod(tape.tensors[t].shape) != 1 for t in sides):
                return False
            rows.update(op.outputs)
    return result.source in rows


class Arguments:
    """An operator's arguments by the names in its schema."""

    __slots__ = ("values",)

    def __init__(self, op: Op) -> None:
        self.values: dict[str, Any] = dict(op.kwargs)
        if op.overload is not None:
            schema = op.overload._schema.arguments
            for argument, value in zip(schema, op.args, strict=False):
                self.values[argument.name] = value
            for argument in schema:
                if argument.name not in self.values and argument.has_default_value():
                    self.values[argument.name] = argument.default_value
        else:
            self.values.update({str(i): a for i, a in enumerate(op.args)})

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def tensor(self, name: str) -> int | None:
        """Return the tensor given for ``name``; None if it is missing or a number."""
        value = self.values.get(name)
        return value.tid if isinstance(value, Ref) else None

    def tensors(self, name: str) -> list[int]:
        """Return the tensors given as a list."""
        return [v.tid for v in self.values.get(name) or () if isinstance(v, Ref)]
