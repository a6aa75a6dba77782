"""The rules of a plan's stages and of its measured memory, checked where a plan has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .measured import MemoryPlan, Numerics
from .pipeline_stages import RETURNS, StagedModule, StagesPlan, StandInItem, StandInTensor
from .plan import Plan
from .plan_checks import MAX_TENSOR_DIMS, MAX_TP, check_dims, check_dtype, check_slot, fail, one_of
from .staged_names import staged_modules

# The rules of what was measured, which are checked where a plan or a manifest has it.

MAX_BYTES = 2**53
"""Largest number of bytes, or of tokens of a window."""
MAX_ENTRIES = 64
"""Most moments of a prefill, or terms of a cache."""
MAX_NAME_LENGTH = 1000
"""Most characters of the name of an input."""
MAX_DIMS = 64
"""Of an input, as many as torch allows."""


def check_memory(memory: MemoryPlan) -> None:
    """Check the rules of ``docs/plan-format.md`` for ``memory``.

    Raises:
        MalformedError: a rule is broken; the message begins with the path of the field.
    """
    for name in ("prefill", "cache"):
        if len(getattr(memory, name)) > MAX_ENTRIES:
            fail(f"memory.{name}", f"more than {MAX_ENTRIES} entries")
    for name in ("sequence_bytes", "fixed_bytes", "logits_token_bytes", "buffer_bytes"):
        _check_bytes(f"memory.{name}", getattr(memory, name))
    for index, term in enumerate(memory.cache):
        _check_bytes(f"memory.cache[{index}].token_bytes", term.token_bytes)
        _check_bytes(f"memory.cache[{index}].window", term.window)
    for index, moment in enumerate(memory.prefill):
        for coefficient in (*moment.sequence, *moment.once):
            if abs(coefficient) > MAX_BYTES:  # a part of a sum may be negative
                fail(f"memory.prefill[{index}]", f"a coefficient is larger than {MAX_BYTES}")


def check_numerics(found: Numerics) -> None:
    """Check the rules of ``docs/plan-format.md`` for ``numerics``, of a manifest.

    Raises:
        MalformedError: a rule is broken; the message begins with the path of the field.
    """
    if not 0 <= found.worst <= found.tolerance:
        fail("numerics.worst", "must be from 0 to the tolerance")
    if any(len(text) > MAX_NAME_LENGTH for text in (found.dtype, *found.inputs)):
        fail("numerics", f"a name has more than {MAX_NAME_LENGTH} characters")
    for name, shape in found.inputs.items():
        if len(shape) > MAX_DIMS or any(size < 0 for size in shape):
            fail(f"numerics.inputs.{name}", "expected the sizes of a tensor's dims")


def _check_bytes(where: str, value: int) -> None:
    if not 0 <= value <= MAX_BYTES:
        fail(where, f"must be 0 or more, and at most {MAX_BYTES}")


MAX_ITEMS = 256
"""Most items that a module returns, arguments of a call of a cache, or calls of one."""


def check_stages(plan: Plan) -> None:
    """Check the rules of ``docs/plan-format.md`` for ``stages``.

    Raises:
        MalformedError: a rule is broken; the message begins with the path of the field.
        PlanError: two entries claim one name, or the patterns stand for too many names.
    """
    stages = plan.stages
    assert stages is not None
    if not stages.count >= 2 or stages.count * plan.tp > MAX_TP:
        fail("stages.count", f"must be 2 or more, and at most {MAX_TP} ranks in all, got {stages.count}")
    if stages.own is not None and not 0 <= stages.own < stages.count:
        fail("stages.own", f"{stages.own} is not one of {stages.count} stages")
    if len(stages.layers) != stages.count:
        fail("stages.layers", f"expected one pair for each of {stages.count} stages")
    if len(stages.memory) not in (0, stages.count):
        fail("stages.memory", f"expected one for each of {stages.count} stages")
    for each in stages.memory:
        check_memory(each)
    for index, entry in enumerate(stages.modules):
        _check_module(f"stages.modules[{index}]", entry, stages, plan)
    staged_modules(plan)
    sequence = plan.training.sequence if plan.training is not None else None
    if sequence is not None:
        for index, entry in enumerate(sequence.stages):
            _check_module(f"training.sequence.stages[{index}]", entry, stages, plan)
        of_form = replace(plan, stages=replace(stages, modules=sequence.stages))
        if _ways(of_form) != _ways(plan):
            fail("training.sequence.stages", "other modules, or other results that are sent, than in stages")


def _ways(plan: Plan) -> dict[str, tuple[object, ...]]:
    """By module where it runs, and what of its results is sent where."""
    found = staged_modules(plan)
    return {fqn: (entry.stages, [(s.item, s.to) for s in entry.sent]) for fqn, (entry, _) in found.items()}


def _check_module(where: str, entry: StagedModule, stages: StagesPlan, plan: Plan) -> None:
    if not entry.names or "" in entry.names:
        fail(f"{where}.names", "a module of a stage needs a name")
    _check_ascending(f"{where}.stages", entry.stages, stages.count)
    if entry.returns not in RETURNS:
        fail(f"{where}.returns", one_of(entry.returns, RETURNS))
    if entry.returns == "tensor" and len(entry.items) != 1:
        fail(f"{where}.items", "a module that returns a tensor has one item")
    if max(len(entry.items), len(entry.cache), *(len(c.arguments) for c in entry.cache), 0) > MAX_ITEMS:
        fail(where, f"more than {MAX_ITEMS} items, calls or arguments")
    for call in entry.cache:
        if not call.method.startswith("update") or not call.method.isidentifier():
            fail(f"{where}.cache", f"{call.method!r} is not a method that updates a cache")
    for tensor in _tensors(entry):
        _check_tensor(where, tensor, plan)
    for sent in entry.sent:
        if not 0 <= sent.item < len(entry.items) or entry.items[sent.item].tensor is None:
            fail(f"{where}.sent", f"item {sent.item} is not a tensor")
        _check_ascending(f"{where}.sent", sent.to, stages.count)
        if len(entry.stages) != 1 or sent.to[0] <= entry.stages[0]:
            fail(f"{where}.sent", "what is sent is made on one stage, and received on later ones")


def _tensors(entry: StagedModule) -> Iterator[StandInTensor]:
    items: list[StandInItem] = [*entry.items]
    yield from (item.tensor for item in items if item.tensor is not None)
    yield from (a.tensor for call in entry.cache for a in call.arguments if a.tensor is not None)


def _check_tensor(where: str, tensor: StandInTensor, plan: Plan) -> None:
    if len(tensor.dims) > MAX_TENSOR_DIMS:
        fail(where, f"more than {MAX_TENSOR_DIMS} dims")
    if tensor.dtype:
        check_dtype(where, tensor.dtype)
    for dim in tensor.dims:
        if len(dim.of) > MAX_TENSOR_DIMS:
            fail(where, f"more than {MAX_TENSOR_DIMS} dims make one")
        for each in dim.of:
            check_slot(where, each.slot, "input")
        if min(dim.times, dim.over) < 1 or max(dim.times, dim.over) > plan.tp:
            fail(where, f"a part of a dim should be one of at most {plan.tp} ranks")
        if dim.at_most < 0:
            fail(where, f"a dim of at most {dim.at_most}")
        if dim.size is not None:
            check_dims(where, (dim.size,), plan.mesh)


def _check_ascending(where: str, stages: tuple[int, ...], count: int) -> None:
    if not stages or list(stages) != sorted(set(stages)) or not 0 <= stages[0] <= stages[-1] < count:
        fail(where, f"expected stages below {count}, ascending, each once; got {list(stages)}")
