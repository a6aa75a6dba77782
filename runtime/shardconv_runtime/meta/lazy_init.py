"""Record how the tensors of a model are made while it is constructed, and make some of them later.

The constructor runs on the meta device, and each operator that writes to memory becomes a **step**. The steps
that a tensor depends on are found backwards from its last value. A step that overwrites all of a tensor ends
the search for earlier ones, so numbers that are drawn and never used (by the constructor, before transformers
draws them again) are not drawn. Running these steps on real tensors gives the values of the real model.
(The idea of torchdistX's deferred initialization, which worked per tensor; here it works per storage, so
views and in-place operators need no bookkeeping.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from types import TracebackType
from typing import Any, NewType

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import PlanError

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

FILLS = frozenset(
    {nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, nn.init._no_grad_trunc_normal_}
)
"""Functions that are one step, as they were when torch was imported: most calls in constructors of many
layers. One level lower, each costs as much as a module, and their values are almost never needed."""

_COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
_CPU = torch.device("cpu")
_META = torch.device("meta")

MemoryKey = NewType("MemoryKey", int)
"""Identifies the memory under tensors, as long as one of the tensors or a window exists: torch keeps one
Python object for each storage."""


def memory_key(tensor: Tensor) -> MemoryKey:
    """Return the key of the memory under a tensor."""
    return MemoryKey(id(tensor.untyped_storage()))


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
        return MemoryKey(id(self.memory))

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
        return _Traits.of(self.func).is_random

    @property
    def is_blank(self) -> bool:
        """Whether it allocates memory without values."""
        return _packet(self.func) in BLANK


@dataclass(frozen=True, slots=True)
class Chain:
    """The steps that a tensor's value depends on."""

    indices: tuple[int, ...]
    """Indices of the steps, ascending."""
    blank: bool
    """Whether some of them may leave elements without values."""
    is_written: bool
    """Whether any step gives values to the tensor itself."""


class LazyInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, every tensor that is made is a meta tensor, and the operators that made it are recorded.

    Code that needs a value at once (``item``, ``tolist``, ``numpy``, a data-dependent shape) gets the true
    one by replay. Random fills are recorded like other operators, so they cost nothing unless asked for;
    a replay draws them from a fixed seed, the same on every rank.

    Example:
        >>> with LazyInit() as lazy:
        ...     layer = SomeModule()
        >>> layer.table = lazy.materialize(layer.table)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self._writers: dict[MemoryKey, list[int]] = defaultdict(list)
        self._constants: dict[MemoryKey, Tensor] = {}
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        """Id of a tensor with values -> the tensor, and its meta tensor."""
        self._values = _Values(self)
        self._paused = False

    def __enter__(self) -> LazyInit:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._values.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._values.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if not all(t.is_meta for t in _tensors((*args, *kwargs.values()))):
            args, kwargs = tree_map_only(Tensor, self.meta, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        if func is aten._local_scalar_dense.default:
            return self.materialize(args[0]).item()
        if _Traits.of(func).is_fill:
            self.record(func, args, kwargs, args[0])
            return args[0]
        try:
            outputs = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            # Meta tensors cannot run it, since its shape depends on data: run it now, and keep the result.
            with self.pause():
                args, kwargs = tree_map_only(Tensor, self.materialize, (args, kwargs))
                outputs = func(*args, **_on_cpu(kwargs))
            return tree_map_only(Tensor, self.meta, outputs)
        self.record(func, args, kwargs, outputs)
        return outputs

    def materialize(self, tensor: Tensor) -> Tensor:
        """Return the real CPU tensor of a meta tensor, in separate memory, with its shape and dtype."""
        twin = self._twins.get(id(tensor))
        if twin is not None:
            tensor = twin[1]
        elif not tensor.is_meta:
            return tensor
        with self.pause():
            return self.value(tensor, self.chain(tensor))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let operators run unrecorded if values are needed while the mode is active."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def meta(self, tensor: Tensor) -> Tensor:
        """Return a tensor's meta tensor; the value of a tensor with data becomes a constant of the record."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._twins:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
            self._twins[id(tensor)] = (tensor, twin)
            self._constants[memory_key(twin)] = tensor.detach()
        return self._twins[id(tensor)][1]

    def record(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Record an operator as a step, unless it only makes a view, which its geometry describes."""
        traits = _Traits.of(func)
        if traits.is_inplace_view:
            return
        args, outputs = tuple(_windowed(value) for value in args), _windowed(outputs)
        kwargs = {name: _windowed(value) for name, value in kwargs.items()} if kwargs else kwargs
        windows = windows_in((*args, *kwargs.values()))
        changed = traits.changed(args, kwargs)
        read_keys = {window.key for window in windows}
        made = {window.key for window in windows_in((outputs,))} - read_keys
        changed_keys = {window.key for window in changed}
        writes = made | changed_keys
        if not writes:
            return
        reads, covered = read_keys, set[MemoryKey]()
        if traits.is_shaped:
            reads = set()
        elif traits.overwrites:
            reads = {window.key for window in windows if window not in changed}
            covered = {window.key for window in changed if window.spans} - reads
        for key in writes:
            self._writers[key].append(len(self.steps))
        sets = frozenset(reads), frozenset(writes), frozenset(made | covered)
        self.steps.append(Step(func, args, kwargs, outputs, torch.get_default_dtype(), *sets))

    def is_written(self, tensor: Tensor) -> bool:
        """Return whether an operator wrote to the memory of a meta tensor."""
        return bool(self._writers.get(memory_key(tensor)))

    def chain(self, tensor: Tensor) -> Chain:
        """Return the steps that a meta tensor depends on.

        Raises:
            PlanError: it depends on a meta tensor that was made outside of the block.
        """
        memory = memory_key(tensor)
        todo: list[int] = []
        live: set[MemoryKey] = set()
        indices: set[int] = set()
        blank = is_written = False

        def want(storage: MemoryKey, before: int) -> None:
            live.add(storage)
            writers = self._writers.get(storage, [])
            at = bisect_left(writers, before)
            if at:
                heappush(todo, -writers[at - 1])
            elif storage not in self._constants:
                raise PlanError(
                    f"a tensor of shape {tuple(tensor.shape)} cannot be computed: it was made outside of the "
                    "model's constructor, on the meta device; build the model without that device"
                )

        want(memory, len(self.steps))
        while todo:
            index = -heappop(todo)
            if index in indices:
                continue
            indices.add(index)
            step = self.steps[index]
            blank |= step.is_blank
            is_written |= memory in step.writes and not step.is_blank
            for storage in step.writes & live:
                live.discard(storage)
                if storage not in step.covers:
                    want(storage, index)
            for storage in step.reads - live:
                want(storage, index)
        return Chain(tuple(sorted(indices)), blank, is_written or memory in self._constants)

    def value(self, tensor: Tensor, chain: Chain) -> Tensor:
        """Return the values of a meta tensor on the CPU, in new memory."""
        memory = _Memory(self._constants)
        is_random = any(self.steps[index].is_random for index in chain.indices)
        with torch.no_grad(), fixed_seed(0 if is_random else None):
            for index in chain.indices:
                step = self.steps[index]
                args, kwargs = tree_map_only(Window, memory, (step.args, step.kwargs))
                with default_dtype(step.default_dtype):
                    memory.keep(step.outputs, self.run(index, args, _on_cpu(kwargs)))
        return memory(Window.of(tensor))

    def run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step on real tensors and return its outputs."""
        return self.steps[index].func(*args, **kwargs)


@dataclass(slots=True)
class _Memory:
    """Real memory for meta storages. Calling it with a window returns the real tensor.

    Memory that no step made is allocated without values, since its first step overwrites it or reads only its
    shape.
    """

    constants: Mapping[MemoryKey, Tensor]
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
        memory = self.real[window.key]
        if window.is_neg:  # the imaginary part of a conjugate, which is at odd offsets
            pairs = torch.empty(0, dtype=_COMPLEX[window.dtype])
            strides = [stride // 2 for stride in window.stride]
            return pairs.set_(memory, window.offset // 2, window.shape, strides).conj().imag
        real = torch.empty(0, dtype=window.dtype)
        real.set_(memory, window.offset, window.shape, window.stride)
        return real.conj() if window.is_conj else real

    def keep(self, windows: Any, reals: Any) -> None:
        """Keep the memory of new results."""
        for window, real in zip(tree_leaves(windows), tree_leaves(reals), strict=True):
            if isinstance(window, Window) and window.key not in self.real:
                if real.stride() != window.stride or real.storage_offset() != window.offset:
                    real = torch.empty_strided(window.shape, window.stride, dtype=real.dtype).copy_(real)
                self.real[window.key] = real.untyped_storage()


class _Values(TorchFunctionMode):
    """Conversions to Python data never reach the dispatcher, so they are intercepted one level higher.

    So are the functions of ``FILLS``.
    """

    _CONVERSIONS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})

    def __init__(self, lazy: LazyInit) -> None:
        super().__init__()
        self._lazy = lazy

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._CONVERSIONS and isinstance(args[0], Tensor):
            real = self._lazy.materialize(args[0].detach())
            with self._lazy.pause():
                return func(real, *args[1:], **(kwargs or {}))
        if func in FILLS and not self._lazy._paused:
            (tensor,) = _tensors((*args, *(kwargs or {}).values()))
            if tensor.is_meta:
                self._lazy.record(func, args, kwargs or {}, tensor)
                return tensor
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Traits:
    """What is recorded of each call of an operator, or of a function of ``FILLS``."""

    is_random: bool
    is_fill: bool
    """It only puts random numbers into its first argument, like ``normal_``."""
    is_shaped: bool
    overwrites: bool
    is_inplace_view: bool
    written: tuple[bool, ...]
    """Whether it writes to an argument, by position."""
    written_names: frozenset[str]

    @staticmethod
    @cache
    def of(func: Any) -> _Traits:
        """Return the traits of an operator."""
        if func in FILLS:
            return _Traits(True, True, False, True, False, (True,), frozenset({"tensor"}))
        arguments = func._schema.arguments
        flags = tuple(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        return _Traits(
            is_random,
            is_random and func._schema.is_mutable and func._schema.name.endswith("_"),
            _packet(func) in SHAPED,
            _packet(func) in OVERWRITES,
            torch.Tag.inplace_view in func.tags,
            flags if any(flags) else (),
            frozenset(a.name for a, flag in zip(arguments, flags, strict=True) if flag),
        )

    def changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Window]:
        """Return the tensors to which a call writes."""
        if not self.written_names:
            return []
        written_values = [value for value, written in zip(args, self.written, strict=False) if written]
        return windows_in(
            [*written_values, *(value for name, value in kwargs.items() if name in self.written_names)]
        )


def _packet(func: Any) -> Any:
    return getattr(func, "overloadpacket", func)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": _CPU} if "device" in kwargs else kwargs


def _windowed(value: Any) -> Any:
    """Return a value with windows in place of tensors, which may be in lists (``tree_map`` is slow)."""
    if isinstance(value, Tensor):
        return Window.of(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return tuple(_windowed(item) for item in value)
    return value


def windows_in(values: Iterable[Any]) -> list[Window]:
    """Return the windows among values, at the top or one list deep."""
    windows: list[Window] = []
    for value in values:
        if isinstance(value, Window):
            windows.append(value)
        elif isinstance(value, tuple):
            windows.extend(item for item in value if isinstance(item, Window))
    return windows


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, at the top or one list deep."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors.extend(item for item in value if isinstance(item, Tensor))
    return tensors


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make ``dtype`` torch's default within this context."""
    before = torch.get_default_dtype()
    if dtype != before:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def fixed_seed(seed: int | None) -> Iterator[None]:
    """Seed torch's default generator, as many operators take no other one, and restore it; None: neither."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
