"""Apply the rules to a tape, to get the dims of every tensor and the constraints for the solver."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from shardconv_runtime.parallel.boundary import forward_signature
from torch import nn

from ..inputs.label_forms import loss_arguments
from ..tracing.functions import sources
from ..tracing.opaque import OPAQUE
from ..tracing.tape import ALIAS_WRITE, Mark, Op, Tape, makers, reads_and_writes, starred, tensors_read
from . import dim_trees, view_rules
from .analysis import Analysis, Reader, frozen_leaves
from .dim_trees import IncompatibleDims, Node
from .norm_sites import NormSite, find_norms
from .rule_builder import Arguments, Builder, NotCovered, owning_modules
from .rules import POINTWISE, rule_of

STRICT_RULES = "SHARDCONV_STRICT_RULES"
"""Environment variable. If it is set, errors in rules are raised."""


class RuleError(Exception):
    """A rule failed in an unexpected way."""


def analyze(
    tape: Tape, ties: Sequence[tuple[int, int]] = (), same: Sequence[tuple[int, int]] = ()
) -> Analysis:
    """Apply the rules to every operator of the tape, in order.

    Args:
        tape: the tape of the global model.
    """
    builder = Builder(tape)
    norms = find_norms(tape)
    skip: dict[int, NormSite] = {index: site for site in norms for index in site.events}
    for index, event in enumerate(tape.events):
        if isinstance(event, Mark):
            builder.mark(event)
            continue
        site = skip.get(index)
        if site is None:
            _apply(builder, event)
        elif index == site.events[-1]:
            builder.norm(site)
    for tid in tape.outputs:
        builder.tensor(tid)
    _block_compared(builder)
    dims = builder.result.dims
    for a, b in same:
        if a in dims and b in dims:
            builder.same_partial(builder.partial(a), builder.partial(b))
            for x, y in zip(dims[a], dims[b], strict=True):
                dim_trees.unify(x, y)
    for a, b in ties:
        if a in dims and b in dims:
            for x, y in zip(dims[a], dims[b], strict=True):
                dim_trees.link(x, y)
    _link_repeats(
        builder.result, owning_modules(tape)
    )  # modules without parameters may have several purposes
    # A tensor that is handed back is paired with the tensor that the code made, and wrote to, because it got
    # none. The next call reads the returned tensor where this call read the made one. Code that makes an
    # unsharded state cannot read a sharded one, even if each layer takes its slice.
    made_by = makers(tape)
    for tid in tape.handed_back:
        made, maker = tid, made_by.get(tid)
        while maker is not None and _is_same_memory(maker):
            made = reads_and_writes(maker)[0][0]
            maker = made_by.get(made)
        if made != tid and isinstance(maker, Op) and not maker.inputs:
            builder.result.handed_back.append((made, tid))
    return builder.result


def _block_compared(builder: Builder) -> None:
    """Keep the size of a parameter global if code compares it with a size of the input.

    Code may reject more tokens than a table has rows, and the trace of a short input would not show it.
    """
    result = builder.result
    frozen: set[Node] | None = None
    for sides in result.tape.comparisons:
        sizes = [[s for s in sources(side) if s[0] == "size" and s[1] in result.dims] for side in sides]
        for first, other in (sizes, reversed(sizes)):
            tables = [result.dims[tid][dim] for _, tid, dim in first if builder.is_parameter(tid)]
            if not tables or not other:
                continue
            frozen = frozen_leaves(result) if frozen is None else frozen
            compared = [x for _, tid, dim in other for x in dim_trees.leaves(result.dims[tid][dim])]
            if any(x in frozen for x in compared):
                builder.why = "its size is compared with that of the input"
                for dim in tables:
                    builder.block_dim(dim)


def with_calls_alike(analysis: Analysis, fqns: Collection[str]) -> Analysis:
    """Return the analysis in which all calls of each of these modules get the same steps."""
    out = replace(analysis, repeats=list(analysis.repeats))
    _link_repeats(out, fqns)
    return out


def with_parts(analysis: Analysis, model: nn.Module) -> Analysis:
    """Return the analysis in which results of parts of the model that other code may read are replicated.

    These are results of the encoder, if the model takes them as an argument, outputs of the base model that
    the model itself does not read, such as a pooler's, and tensors of which a loss may be
    computed.
    """
    readers: dict[int, Reader] = {}
    if "encoder_outputs" in forward_signature(model).parameters:
        first = ("output", "output.0", "output.last_hidden_state")
        encoder = model.get_encoder()  # type: ignore[operator]  # a method of transformers' models
        readers |= {
            m.target: Reader.CALLER for m in _marks_of(analysis, model, encoder) if m.ports[0] in first
        }
    read = tensors_read(analysis.tape).union(analysis.tape.handed_back)
    for mark in _marks_of(analysis, model, getattr(model, "base_model", model)):
        if mark.is_output and mark.target not in read:
            readers[mark.target] = Reader.CALLER
    readers |= dict.fromkeys(_read_by_losses(analysis, model), Reader.LOSS)
    return replace(analysis, read_elsewhere=readers)


def _read_by_losses(analysis: Analysis, model: nn.Module) -> Iterator[int]:
    """Yield the results of modules that take labels, and what they were made of alone, back to the last mark.

    Labels are not part of the trace: a collective at the output of such a module would run after its code has
    computed a loss. Scores may be a part of what a layer returns, without the padding of the vocabulary. If
    only the part were gathered, the layer's gradient would be full in it, and partial in the padding.
    """
    taking = {name for name, module in model.named_modules() if loss_arguments(module)}
    calls, made_by = analysis.tape.calls, makers(analysis.tape)
    for event in analysis.tape.events:
        if (
            isinstance(event, Mark)
            and event.is_output
            and calls[event.call].fqn in taking
            and event.source in analysis.dims
        ):
            tid: int | None = event.source
            while tid in analysis.dims:
                yield tid
                maker = made_by.get(tid)
                tid = maker.inputs[0] if isinstance(maker, Op) and len(maker.inputs) == 1 else None


def _marks_of(analysis: Analysis, model: nn.Module, part: nn.Module) -> Iterator[Mark]:
    """Yield the marks of a part of the model at tensors that were analyzed."""
    names = {name for name, module in model.named_modules() if module is part and name}
    calls = analysis.tape.calls
    for event in analysis.tape.events:
        if isinstance(event, Mark) and calls[event.call].fqn in names and event.target in analysis.dims:
            yield event


def _link_repeats(result: Analysis, fqns: Collection[str]) -> None:
    """Give the calls of modules that are called more than once equal structures."""
    tape = result.tape
    first: dict[tuple[str, tuple[str, ...]], Mark] = {}
    for event in tape.events:
        if isinstance(event, Mark) and event.target in result.dims and tape.calls[event.call].fqn in fqns:
            other = first.setdefault((tape.calls[event.call].fqn, event.ports), event)
            if other is not event:
                result.repeats += [(other.source, event.source), (other.target, event.target)]
    for a, b in result.repeats:
        for x, y in zip(reversed(result.dims[a]), reversed(result.dims[b]), strict=False):
            if x.size == y.size:
                dim_trees.link(x, y)


def _is_same_memory(event: Mark | Op) -> bool:
    """Return whether an event makes a new value of its first operand: a mark, a write to it, an alias."""
    if isinstance(event, Mark):
        return True
    base = event.base
    is_alias = event.name == ALIAS_WRITE or base in ("aten.alias", "aten.detach")
    return bool(event.inputs) and (is_alias or base.endswith("_"))


def _apply(builder: Builder, op: Op) -> None:
    """Apply the rule of an operator. Without a rule, block everything that it touches."""
    base = op.base
    where = starred(builder.tape.calls[op.call].fqn) or "the model"
    builder.why = f"{base.partition('.')[2] or 'code'} in {where} needs all of it"
    if base == OPAQUE:
        builder.why = f"{where} could not be traced"
    rule = rule_of(op.name)
    if rule is None and op.overload is not None:
        if op.overload not in _POINTWISE_TAG:  # tags are looked up once
            _POINTWISE_TAG[op.overload] = torch.Tag.pointwise in op.overload.tags
        rule = POINTWISE if _POINTWISE_TAG[op.overload] else None
    if rule is None:
        _block_all(builder, op, op.name)
        return
    try:
        # An error in a rule is a bug, or an unexpected call. Replicating all tensors of the call is always
        # right, so users get a plan with a note. Tests set ``STRICT_RULES`` to find bugs.
        try:
            rule(builder, op, Arguments(op))
        except (LookupError, TypeError, ValueError, AssertionError) as error:
            if os.environ.get(STRICT_RULES):
                raise RuleError(f"the rule of {op.name} failed: {type(error).__name__}: {error}") from error
            raise NotCovered from error
    except (IncompatibleDims, NotCovered):
        # Calls of the builder that the rule made so far only add constraints.
        _block_all(builder, op, f"{op.name} as it is called")
        return
    if op.inputs and builder.parametric.issuperset(op.inputs):
        builder.parametric.update(op.outputs)
    if (base in view_rules.RULES or base in _PARTS) and not builder.from_stack.isdisjoint(op.inputs):
        builder.from_stack.update(op.outputs)


_PARTS = frozenset({"aten.split", "aten.chunk", "aten.slice", "aten.contiguous"})


def _block_all(builder: Builder, op: Op, what: str) -> None:
    builder.result.unknown.setdefault(what, builder.tape.calls[op.call].fqn)
    builder.block(*op.inputs)
    for tid in op.outputs:
        if tid in builder.result.dims:
            builder.block(tid)
        else:
            builder.set(tid, builder.blocked(*builder.shape(tid)))


_POINTWISE_TAG: dict[Any, bool] = {}
