"""Values of the tensors of a tape: true values if they depend on no parameter, otherwise consistent guesses.

Parameters have no values while a model is traced, and shapes rarely depend on them; but some code asks for
values (``.item()``, ``nonzero``, ``.tolist()``). Inputs and buffers have true values, and tensors that depend
only on them are computed by evaluating the tape backwards from the question.

All other answers are guesses, by evaluating the tape from **stand-ins**: a product with weights becomes a
ramp that is rotated from row to row. So all questions about a tensor have consistent answers (the sizes of
all groups add up, a mask has as many positions as the ids that it gives). A choice of the largest scores is
spread over all columns, or over a few of them from the first to the last, so that all experts are on the
tape, or some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .tape import Op, Ref, Tape, TensorInfo

MAX_STAND_IN = 1 << 22
"""Elements above which a stand-in is one number repeated."""
_MOST_BYTES = 1 << 26
"""Most bytes of guesses that are kept. Older ones are computed again when they are needed."""
VALUE_FREE = frozenset(
    f"aten.{name}"
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "empty_like")
)
"""Operators that use only the shape of their operand."""
_OF_THE_SHAPE = frozenset(("aten.expand_as", "aten.view_as", "aten.reshape_as"))
"""Operators that use only the shape of their second operand."""


class Unknown(Exception):
    """The value depends on parameters."""


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The position of a tensor in its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryLayout:
        """Return the layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def end(self) -> int:
        """Return the index behind the last element in memory."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


class Values:
    """Values of the tensors of one tape, which are computed on demand.

    Attributes:
        known: true values by tensor.
        guessed: guesses for tensors that depend on parameters, if they were needed.
    """

    def __init__(self, tape: Tape, few_chosen: bool = False) -> None:
        self.known: dict[int, Tensor] = {}
        self.guessed: dict[int, Tensor] = {}
        self._tape = tape
        self._few_chosen = few_chosen
        self._producer: dict[int, Op] = {}
        self._layouts: dict[int, tuple[MemoryLayout, MemoryLayout]] = {}
        self._unknown: set[int] = set()
        self._weights: set[int] = set()
        self._recent: dict[int, tuple[int, list[int]]] = {}
        """Address of memory -> its bytes, and the guesses in it, which can be computed again; oldest
        first."""
        self._recent_bytes = 0

    # Told by the recorder -------------------------------------------------------------------

    def is_unknown(self, tid: int) -> bool:
        """Return whether the value depends on parameters."""
        return tid in self._unknown

    def add_unknown(self, tid: int, is_weight: bool = False) -> None:
        """Add a tensor without a value: a parameter, or a buffer that is stored in a file."""
        self._unknown.add(tid)
        if is_weight:
            self._weights.add(tid)

    def made(self, op: Op) -> None:
        """Note that an operator made its outputs."""
        self._producer.update(dict.fromkeys(op.outputs, op))
        if op.base in VALUE_FREE and not self._is_empty_of_runtime(op):
            return
        if self._is_empty_of_runtime(op) or not self._unknown.isdisjoint(_read(op)):
            self._unknown.update(op.outputs)
        if op.inputs and self._weights.issuperset(op.inputs):
            self._weights.update(op.outputs)

    def wrote(self, op: Op, old: MemoryLayout, written: MemoryLayout) -> None:
        """Note that ``op`` is an ``alias_write``: its output is the first input after a write through the
        second."""
        self.made(op)
        self._layouts[op.outputs[0]] = old, written

    def forget(self, first: int, end: int) -> None:
        """Remove tensors that were taken off the tape."""
        for tid in range(first, end):
            for table in (self.known, self.guessed, self._producer, self._layouts):
                table.pop(tid, None)
            self._unknown.discard(tid)
            self._weights.discard(tid)

    @staticmethod
    def _is_empty_of_runtime(op: Op) -> bool:
        """Return whether this is the result of a collective in a retrace, which has no values."""
        return op.origin.startswith("shardconv") and "empty" in op.name

    # Questions -------------------------------------------------------------------------------

    def value(self, tid: int) -> Tensor | None:
        """Return the true value of a tensor, global, on the CPU; None if it depends on parameters."""
        try:
            self._evaluate(tid, guessing=False)
        except Unknown:
            return None
        return self.known[tid]

    def guess(self, tid: int) -> Tensor:
        """Return the true value, or the value that follows from the stand-ins, global, on the CPU."""
        value = self.value(tid)
        if value is None:
            self._evaluate(tid, guessing=True)
            value = self.guessed[tid]
        return value

    def results(self, op: Op, asked: Collection[int]) -> Any:
        """Return the results of an operator."""
        return _call(op, lambda t: self.guess(t) if t in asked else _repeated(0, self._tape.tensors[t]))

    def stand_in(self, tid: int) -> Tensor:
        """Return a plausible value of a tensor that depends on parameters."""
        return stand_in(self._tape.tensors[tid], self._few_chosen)

    # Evaluation ------------------------------------------------------------------------------

    def _evaluate(self, tid: int, guessing: bool) -> None:
        # Masks of thousands of tokens by hundreds of experts would take gigabytes if all layers' were kept.
        while self._recent_bytes > _MOST_BYTES:
            size, tids = self._recent.pop(next(iter(self._recent)))
            self._recent_bytes -= size
            for old in tids:
                self.guessed.pop(old, None)
        for op in self._needed(tid, guessing):
            if not self._unknown.isdisjoint(_read(op)):
                self._unknown.update(op.outputs)
            try:
                results = self._run(op)
            except Exception:  # the operator fails on stand-ins
                self._unknown.update(op.outputs)
                results = []
            for index, output in enumerate(op.outputs):
                info = self._tape.tensors[output]
                value = results[index] if index < len(results) else None
                if value is None or value.shape != info.shape:
                    self._unknown.add(output)
                    value = self.stand_in(output)
                (self.guessed if output in self._unknown else self.known)[output] = value
                if output in self._unknown:
                    memory = value.untyped_storage()
                    if memory.data_ptr() not in self._recent:
                        self._recent[memory.data_ptr()] = memory.nbytes(), []
                        self._recent_bytes += memory.nbytes()
                    self._recent[memory.data_ptr()][1].append(output)
            if not guessing and op.outputs[0] in self._unknown:
                raise Unknown

    def _needed(self, tid: int, guessing: bool) -> list[Op]:
        """Return the operators to run, in order, before a tensor has a value, and add the stand-ins."""
        pending, ops = [tid], set[Op]()
        while pending:
            current = pending.pop()
            if current in self.known or (guessing and current in self.guessed):
                continue
            op = self._producer.get(current)
            if current in self._unknown:
                if not guessing:
                    raise Unknown
                if op is None or self._ends_at(op):
                    self.guessed[current] = self.stand_in(current)
                    continue
            if op is None:
                raise Unknown
            if op not in ops:
                ops.add(op)
                pending += _read(op)
        return sorted(ops, key=lambda op: op.outputs[0])

    def _ends_at(self, op: Op) -> bool:
        """Return whether a guess starts at this operator, since it multiplies with weights."""
        if op.overload is None and op.name != "alias_write":
            return True
        weights = self._weights.intersection(op.inputs)
        is_float = self._tape.tensors[op.outputs[0]].dtype.is_floating_point
        return is_float and any(len(self._tape.tensors[t].shape) > 1 for t in weights)

    def _run(self, op: Op) -> list[Tensor]:
        if op.name == "alias_write":
            return [self._written(op)]
        read = _read(op)

        def load(tid: int) -> Tensor:
            return self._held(tid) if tid in read else _repeated(0, self._tape.tensors[tid])

        result = _call(op, load)
        return [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if t is not None]

    def _written(self, op: Op) -> Tensor:
        old, written = self._layouts[op.outputs[0]]
        before, part = (self._held(t) for t in op.inputs)
        with _disable_current_modes():
            memory = before.new_zeros(max(old.end(), written.end()))
            torch.as_strided(memory, old.shape, old.stride, old.offset).copy_(before)
            torch.as_strided(memory, written.shape, written.stride, written.offset).copy_(part)
            return torch.as_strided(memory, old.shape, old.stride, old.offset).clone()

    def _held(self, tid: int) -> Tensor:
        value = self.known.get(tid)
        return self.guessed[tid] if value is None else value


def stand_in(info: TensorInfo, few_chosen: bool = False) -> Tensor:
    """Return a plausible value: a ramp from -1 to 1 along the last dim, rotated by row.

    Vectors are ones, bools are true, ints and large tensors are 0. The largest number of a row is in each
    column equally often or, with ``few_chosen``, in the last column, the first, and a few between.
    """
    if not (info.dtype.is_floating_point or info.dtype.is_complex):
        return _repeated(int(info.dtype == torch.bool), info)
    if len(info.shape) < 2 or 0 in info.shape:
        return _repeated(1, info)
    numel = math.prod(info.shape)
    if numel > MAX_STAND_IN:
        return _repeated(0, info)
    columns = info.shape[-1]
    rows = numel // columns
    with _disable_current_modes():
        row = torch.arange(rows)
        turns = row * -(-columns // rows)
        if few_chosen:
            some = torch.tensor([0, 1, columns // 4, columns // 2, 3 * columns // 4])
            turns = some[row % len(some)]
        column = torch.arange(columns)[None] - turns[:, None]
        return ((column % columns) * (2 / columns) - 1).view(info.shape).to(info.dtype)


def _repeated(value: int, info: TensorInfo) -> Tensor:
    """Return one number in any shape, without memory."""
    with _disable_current_modes():
        return torch.full((), value, dtype=info.dtype, device="cpu").expand(info.shape)


def _read(op: Op) -> tuple[int, ...]:
    """Return the inputs of an operator whose values its result depends on."""
    return () if op.base in VALUE_FREE else op.inputs[:1] if op.base in _OF_THE_SHAPE else op.inputs


def _call(op: Op, load: Callable[[int], Tensor]) -> Any:
    """Run an operator on CPU tensors. It writes to copies, and always draws the same random numbers."""
    func = op.overload
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    with _disable_current_modes(), fixed_seed() if seeded else nullcontext():
        args, kwargs = _restored(op.args, op, load), _restored(op.kwargs, op, load)
        return func(*args, **kwargs)


def _restored(value: Any, op: Op, load: Callable[[int], Tensor]) -> Any:
    """Return an argument of an operator on the CPU, as a copy if it may be written to."""
    if isinstance(value, Ref):
        tensor = load(value.tid)
        return tensor.clone() if op.overload._schema.is_mutable else tensor
    if isinstance(value, dict):
        return {k: _restored(v, op, load) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_restored(v, op, load) for v in value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


@contextmanager
def fixed_seed() -> Iterator[None]:
    """Draw the same random numbers each time, and restore the caller's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
