"""Record how a model's constructor initializes each tensor, so that one tensor can be made without the
others.

A model is built on the meta device, with transformers' initialization, and each operator that writes to
memory becomes a **step**. The steps that a tensor depends on are found backwards from its last value. A step
that overwrites all of a tensor ends the search for earlier ones, so numbers that are drawn and never used (by
the constructor, before transformers draws them again) are not drawn at all. Running these steps on real
tensors gives the same values as building the real model, including special cases of parents and neighbors.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from typing import Any, NewType

import torch
from shardconv_runtime.parallel.meta_model import LazyInit, _building, default_dtype
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

BLANK = {
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
"""Operators that allocate memory without values."""

SHAPED = {
    *BLANK,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.rand_like,
    aten.randn_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
}
"""Operators that read at most the shape of their first argument."""

OVERWRITES = {
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.normal_,
    aten.uniform_,
    aten.log_normal_,
    aten.exponential_,
    aten.cauchy_,
    aten.bernoulli_,
    aten.random_,
}
"""Operators that write every element of their first argument without reading it."""

FILLS = frozenset({nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_})
"""Functions that ``LazyInit`` records as one step, as they were when torch was imported."""

TRUNCATED = nn.init._no_grad_trunc_normal_
"""Private in torch (2.13), but every reference to ``trunc_normal_`` calls it, wherever it was imported to. On
a meta tensor it does nothing, and as separate steps it would draw until no element is outside of the
range."""

ELEMENTWISE = {nn.init.uniform_, nn.init.normal_, TRUNCATED, aten.normal_.default, aten.uniform_.default}
"""Functions that draw each element independently from one distribution, so parts can be drawn separately."""


MemoryKey = NewType("MemoryKey", int)
"""Identifies the memory under tensors, as long as one of the tensors or a window exists."""


def memory_key(tensor: Tensor) -> MemoryKey:
    """Return the key of the memory under a tensor."""
    return MemoryKey(int(tensor.untyped_storage()._cdata))


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The geometry of a meta tensor when it was seen, since some operators change a tensor's shape in
    place."""

    memory: torch.UntypedStorage
    """The storage. It is kept alive, so that its key stays unique."""
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Window:
        """Return the window of a tensor."""
        offset = int(tensor.storage_offset())
        flags = tensor.is_conj(), tensor.is_neg()
        return cls(tensor.untyped_storage(), tensor.dtype, offset, tensor.shape, tensor.stride(), *flags)

    @property
    def key(self) -> MemoryKey:
        """Return the key of the memory."""
        return MemoryKey(int(self.memory._cdata))

    @property
    def spans(self) -> bool:
        """Whether the window covers all of its memory, each element once."""
        expected = 1
        for size, stride in sorted(zip(self.shape, self.stride, strict=True), key=lambda dim: dim[1]):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return self.shape.numel() * self.dtype.itemsize == self.memory.nbytes()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operator that wrote to memory, with windows instead of tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    default_dtype: torch.dtype
    reads: frozenset[MemoryKey]
    """Storages whose values it reads."""
    writes: frozenset[MemoryKey]
    covers: frozenset[MemoryKey]
    """Storages whose older values it replaces completely, including those that it made."""

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return _is_random(self.func)

    @property
    def is_blank(self) -> bool:
        """Whether it allocates memory without values."""
        return packet_of(self.func) in BLANK


@dataclass(frozen=True, slots=True)
class Chain:
    """The steps that a tensor's value depends on."""

    indices: tuple[int, ...]
    """Indices of the steps, ascending."""
    blank: bool
    """Whether some of them may leave elements without values."""
    is_written: bool
    """Whether any step gives values to the tensor itself."""


def draw(step: Step, tensor: Tensor, seed: int) -> None:
    """Run an elementwise step on another tensor, in place. Several threads may do this at the same time."""
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = tree_map_only(Window, lambda _: tensor, (step.args, step.kwargs))
    with torch.no_grad():
        step.func(*args, **{**kwargs, "generator": generator})


def changed_windows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Window]:
    """Return the tensors that an operator writes to."""
    if func in FILLS or func is TRUNCATED:
        return windows_in((args, kwargs))
    given = [value for value, written in zip(args, _written(func)[0], strict=False) if written]
    return windows_in(given + [value for name, value in kwargs.items() if name in _written(func)[1]])


def windows_in(values: Any) -> list[Window]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Window)]


@cache
def _written(func: Any) -> tuple[tuple[bool, ...], frozenset[str]]:
    """Return which arguments an operator writes to, by position and by name."""
    arguments = func._schema.arguments
    flags = tuple(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    return flags, frozenset(a.name for a, flag in zip(arguments, flags, strict=True) if flag)


@cache
def _is_random(func: Any) -> bool:
    return func in FILLS or func is TRUNCATED or torch.Tag.nondeterministic_seeded in func.tags


def packet_of(func: Any) -> Any:
    return getattr(func, "overloadpacket", func)


Seeds = Callable[[int], int]
"""Function from the index of a step to its seed."""


class Construction(LazyInit):  # type: ignore[no-untyped-call]
    """While active, build models on the meta device, and record how each tensor gets its values.

    Code that needs a value immediately, such as ``item``, gets the value of a replay.
    """

    def __init__(self, seeds: Seeds) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._writers_of: dict[MemoryKey, list[int]] = defaultdict(list)
        self._seeds = seeds

    @contextmanager
    def active(self) -> Iterator[Construction]:
        """Record the operators of the block, including those that torch leaves out on the meta device.

        Only one thread at a time builds a model.
        """
        with _building, self, _OnCpu():
            nn.init._no_grad_trunc_normal_ = self._truncated
            try:
                yield self
            finally:
                nn.init._no_grad_trunc_normal_ = TRUNCATED

    def meta(self, tensor: Tensor) -> Tensor:
        """Return the meta tensor of another tensor: itself, unless it was made before the block, with
        values."""
        return self._as_meta(tensor)

    def chain(self, tensor: Tensor) -> Chain:
        """Return the steps that a meta tensor depends on."""
        own = memory_key(tensor)
        todo: list[int] = []
        live: set[MemoryKey] = set()
        found: set[int] = set()
        blank = is_written = False

        def want(storage: MemoryKey, before: int) -> None:
            live.add(storage)
            writers = self._writers_of.get(storage, [])
            at = bisect_left(writers, before)
            if at:
                heappush(todo, -writers[at - 1])
            elif storage not in self._constants:
                raise ValueError("it was made outside of the model's constructor")

        want(own, len(self.steps))
        while todo:
            index = -heappop(todo)
            if index in found:
                continue
            found.add(index)
            step = self.steps[index]
            blank |= step.is_blank
            is_written |= own in step.writes and not step.is_blank
            for storage in step.writes & live:
                live.discard(storage)
                if storage not in step.covers:
                    want(storage, index)
            for storage in step.reads - live:
                want(storage, index)
        return Chain(tuple(sorted(found)), blank, is_written or own in self._constants)

    def elementwise(self, tensor: Tensor, chain: Chain) -> Step | None:
        """Return the only step that draws a tensor, if it draws each element independently."""
        if len(chain.indices) != 1 or not tensor.is_contiguous() or not Window.of(tensor).spans:
            return None
        step = self.steps[chain.indices[0]]
        drawn = windows_in((step.args, step.kwargs))
        alike = len(drawn) == 1 and drawn[0].dtype == tensor.dtype
        return step if alike and step.func in ELEMENTWISE else None

    def value(self, tensor: Tensor, chain: Chain) -> Tensor:
        """Return the values of a meta tensor on the CPU. Elements without a value are NaN."""
        memory = _Memory(self._constants)
        for index in chain.indices:
            step = self.steps[index]
            args, kwargs = tree_map_only(Window, memory, (step.args, step.kwargs))
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            if kwargs.get("generator") is not None:  # the state of the model's own generator is not recorded
                kwargs = {**kwargs, "generator": None}
            with default_dtype(step.default_dtype), torch.no_grad(), _seeded(step, index, self._seeds):
                outputs = step.func(*args, **kwargs)
            if step.is_blank and (outputs.is_floating_point() or outputs.is_complex()):
                outputs.fill_(torch.nan)
            memory.keep(step.outputs, outputs)
        return memory(Window.of(tensor))

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Record an operator; called by ``LazyInit`` for each."""
        if torch.Tag.inplace_view in getattr(func, "tags", ()):
            return
        args, kwargs, outputs = tree_map_only(Tensor, Window.of, (args, kwargs, outputs))
        packet, given = packet_of(func), windows_in((args, kwargs))
        made = {window.key for window in windows_in(outputs)} - {window.key for window in given}
        changed = changed_windows(func, args, kwargs)
        writes = made | {window.key for window in changed}
        if not writes:
            return  # a view, which its geometry describes
        overwrites = packet in OVERWRITES or func in FILLS or func is TRUNCATED
        unread = set(changed) if overwrites else set()
        reads = {window.key for window in given if window not in unread and packet not in SHAPED}
        covered = {window.key for window in changed if overwrites and window.spans} - reads
        for key in writes:
            self._writers_of[key].append(len(self.steps))
        sets = frozenset(reads), frozenset(writes), frozenset(made | covered)
        self.steps.append(Step(func, args, kwargs, outputs, torch.get_default_dtype(), *sets))

    def _replay(self, tensor: Tensor) -> Any:
        """Return the function that computes the value; ``LazyInit`` calls it if one is needed immediately."""
        chain = self.chain(tensor)
        return lambda meta: self.value(meta, chain)

    def _truncated(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record a truncated draw; called instead of ``TRUNCATED``."""
        if not tensor.is_meta:
            made: Tensor = TRUNCATED(tensor, *args, **kwargs)
            return made
        self._record(TRUNCATED, (tensor, *args), kwargs, tensor)
        return tensor


@dataclass(slots=True)
class _Memory:
    """Real memory for meta storages. Calling it with a window returns the real tensor.

    Memory that no step made is allocated without values, since its first step overwrites it or reads only its
    shape.
    """

    constants: Mapping[int, Tensor]
    real: dict[MemoryKey, torch.UntypedStorage] = field(default_factory=dict)

    def __call__(self, window: Window) -> Tensor:
        if window.key not in self.real:
            constant = self.constants.get(window.key)
            self.real[window.key] = (
                torch.empty(window.memory.nbytes(), dtype=torch.uint8).untyped_storage()
                if constant is None
                else torch.empty_strided(constant.shape, constant.stride(), dtype=constant.dtype)
                .copy_(constant)
                .untyped_storage()
            )
        real = torch.empty(0, dtype=window.dtype)
        real.set_(self.real[window.key], window.offset, window.shape, window.stride)
        real = real.conj() if window.is_conj else real
        return torch._neg_view(real) if window.is_neg else real

    def keep(self, windows: Any, reals: Any) -> None:
        """Keep the memory of new results."""
        for window, real in zip(tree_leaves(windows), tree_leaves(reals), strict=True):
            if isinstance(window, Window) and window.key not in self.real:
                if real.stride() != window.stride or real.storage_offset() != window.offset:
                    real = torch.empty_strided(window.shape, window.stride, dtype=real.dtype).copy_(real)
                self.real[window.key] = real.untyped_storage()


class _OnCpu(TorchFunctionMode):
    """Pretend to models and initializers that meta tensors are on the CPU. Code of torch and ours sees the
    truth.

    torch's initializers skip some meta tensors. transformers skips a model's initialization if a new empty
    tensor is on the meta device. Data that is moved to a tensor's device would be lost on the meta device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ASKING and _is_misled(sys._getframe(1).f_globals.get("__name__", "")):
            return _ASKING[func]
        return func(*args, **(kwargs or {}))


_ASKING = {
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.device.__get__: torch.device("cpu"),  # type: ignore[attr-defined]
}


_OWN = ("torch", "shardconv_runtime", "shardconv")


def _is_misled(module: str) -> bool:
    """Return whether this is an initializer of torch's, or the code of a model."""
    return module == nn.init.__name__ or module.partition(".")[0] not in _OWN


@contextmanager
def _seeded(step: Step, index: int, seeds: Seeds) -> Iterator[None]:
    """Seed torch's default generator for a step and restore it, since many operators take no other one."""
    if not step.is_random:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seeds(index))
        yield
