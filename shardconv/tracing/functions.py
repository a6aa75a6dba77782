"""Trace ints through torch functions, to find the attributes that must shrink with the parameters.

A ``TorchFunctionMode`` returns sizes as ``TracedInt``. Int attributes of modules and of their configs are
wrapped as well, and every torch call with traced ints among its arguments is recorded as a ``TracedIntCall``.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig

from .recorder import Recorder
from .tape import Ref, TracedIntCall

# Integers that remember where they came from.
#
# While a model is traced, its int attributes and the sizes of its tensors are ``TracedInt``. Arithmetic on
# them builds an expression, so that the arguments of a view or a split tell which attributes and tensor
# sizes determine its shape. ``evaluate`` computes such an expression with other values, to find attribute
# overrides.


Expr = tuple[Any, ...]
"""``("attr", fqn, attribute, value)``, ``("size", tensor, dim)`` or ``(operation, left, right)``, where an
operand is an ``Expr`` or a plain int."""

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


class TracedInt(int):
    """An int with an ``expr``. It behaves like its value everywhere."""

    expr: Expr

    def __new__(cls, value: int, expr: Expr) -> TracedInt:
        """Wrap ``value``, to which ``expr`` evaluates in the traced model."""
        self = super().__new__(cls, value)
        self.expr = expr
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedInt:
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __neg__(self) -> TracedInt:
        return TracedInt(-int(self), ("-", 0, self.expr))


def _operand(value: int) -> Expr | int:
    return value.expr if type(value) is TracedInt else int(value)


def _arithmetic(symbol: str, name: str, is_reflected: bool) -> Callable[[TracedInt, Any], Any]:
    compute = getattr(int, name)

    def method(self: TracedInt, other: Any) -> Any:
        result = compute(self, other)
        if result is NotImplemented or not isinstance(other, int):
            return result
        operands = (_operand(other), self.expr) if is_reflected else (self.expr, _operand(other))
        return TracedInt(result, (symbol, *operands))

    return method


_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__")
_watchers: list[Callable[[Expr | int, Expr | int], None]] = []


@contextmanager
def watching(watcher: Callable[[Expr | int, Expr | int], None]) -> Iterator[None]:
    """Pass both sides to ``watcher`` whenever code asks which of two ints is larger."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.pop()


def _compared(name: str) -> Callable[[TracedInt, Any], Any]:
    compute = getattr(int, name)

    def method(self: TracedInt, other: Any) -> Any:
        if _watchers and isinstance(other, int):
            _watchers[-1](self.expr, _operand(other))
        return compute(self, other)

    return method


for _name in _COMPARISONS:
    setattr(TracedInt, _name, _compared(_name))
for _symbol, _function in _OPERATIONS.items():
    for _reflected in (False, True):
        _name = f"__{'r' if _reflected else ''}{_function.__name__}__"
        setattr(TracedInt, _name, _arithmetic(_symbol, _name, _reflected))


def evaluate(value: Any, lookup: Callable[[Expr], int]) -> Any:
    """Return ``value`` with every ``TracedInt`` computed again. ``lookup`` returns attributes and sizes.

    Containers (tuple, list, dict, slice) are rebuilt; other values are returned unchanged.
    """
    if type(value) is TracedInt:
        return _evaluate_expr(value.expr, lookup)
    if isinstance(value, tuple):
        return tuple(evaluate(v, lookup) for v in value)
    if isinstance(value, list):
        return [evaluate(v, lookup) for v in value]
    if isinstance(value, dict):
        return {k: evaluate(v, lookup) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(evaluate(v, lookup) for v in (value.start, value.stop, value.step)))
    return value


def _evaluate_expr(expr: Expr | int, lookup: Callable[[Expr], int]) -> int:
    if isinstance(expr, int):
        return expr
    if expr[0] in ("attr", "size"):
        return lookup(expr)
    return _OPERATIONS[expr[0]](_evaluate_expr(expr[1], lookup), _evaluate_expr(expr[2], lookup))


def traced_ints(value: Any) -> Iterator[TracedInt]:
    """Yield every ``TracedInt`` in ``value`` and in nested containers."""
    if type(value) is TracedInt:
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from traced_ints(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from traced_ints(item)
    elif isinstance(value, slice):
        yield from traced_ints((value.start, value.stop, value.step))


def sources(expr: Expr | int) -> Iterator[Expr]:
    """Yield the attributes and sizes that an expression reads."""
    if isinstance(expr, int):
        return
    if expr[0] in ("attr", "size"):
        yield expr
    else:
        yield from sources(expr[1])
        yield from sources(expr[2])


class Functions(TorchFunctionMode):
    """Return sizes as traced ints, and record the calls with traced ints."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument in args:  # a plain loop, since this is run for each attribute of a tensor
            if isinstance(argument, torch.Tensor) and _is_slice(argument):
                return func(*args, **kwargs)
        if func in _SIZES:
            size, tid = func(*args, **kwargs), self.recorder.identities.tid(args[0])
            if isinstance(size, int):
                dim = args[1] if len(args) > 1 else kwargs["dim"]
                return TracedInt(size, ("size", tid, dim % args[0].dim()))
            return torch.Size([TracedInt(n, ("size", tid, d)) for d, n in enumerate(size)])
        if func in _CONVERSIONS and isinstance(args[0], torch.Tensor):  # of the true value
            real = self.recorder.ask(args[0])
            with torch.utils._python_dispatch._disable_current_modes():
                return func(real, *args[1:], **kwargs)
        if func in _ROW_LOOKUPS:
            return func(*args, **kwargs)
        if func in _PUTTING:
            _check_rows(*args, **kwargs)
        if func in _NARROW:
            args = (args[0], *self._numbers(args[1:]))
            kwargs = self._numbers(kwargs)
        elif func in _FACTORIES:
            args, kwargs = self._numbers(args), self._numbers(kwargs)
        if not _has_traced(args) and not (kwargs and _has_traced(kwargs.values())):
            return self._call(func, args, kwargs)
        refs = self._refs(args), {k: self._refs(v) for k, v in kwargs.items()}
        result = self._call(func, args, kwargs)
        leaves = result if isinstance(result, (tuple, list)) else (result,)
        outputs = tuple(self.recorder.identities.tid(t) for t in leaves if isinstance(t, torch.Tensor))
        self.recorder.tape.replays.append(
            TracedIntCall(func, refs[0], refs[1], outputs, self.recorder.current_fqn())
        )
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``func``. A tensor that is made from numbers keeps its values on all devices."""
        if func in _INDEXING:
            return func(args[0], self._index(args[1]), *args[2:], **kwargs)
        if func not in _LITERALS or isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        if "device" not in kwargs and not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(args)):
            return func(*args, **kwargs)
        values = pytree.tree_map_only(torch.Tensor, self.recorder.ask, args)
        with torch.utils._python_dispatch._disable_current_modes():
            real = func(*values, **{**kwargs, "device": "cpu"})
        return self.recorder.identities.meta(real)

    def _numbers(self, arguments: Any) -> Any:
        """Replace tensors among arguments by their numbers."""
        return pytree.tree_map_only(torch.Tensor, lambda t: self.recorder.ask(t).item(), arguments)

    def _index(self, index: Any) -> Any:
        """Replace lists of numbers in an index by tensors with values. torch would make tensors without
        values."""
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        flat = pytree.tree_leaves(index) if isinstance(index, list) else []
        if not flat or not all(isinstance(v, int) for v in flat):
            return index
        with torch.utils._python_dispatch._disable_current_modes():
            real = torch.tensor(index)
        return self.recorder.identities.meta(real)

    def _refs(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self.recorder.identities.tid(value))
        if isinstance(value, (tuple, list)):
            items = [self._refs(v) for v in value]
            return tuple(items) if isinstance(value, tuple) else items
        return value


def _is_slice(x: torch.Tensor) -> bool:
    """Return whether a tensor is a slice inside of ``torch.vmap``, which has no memory of its own.

    Its operators reach the recorder as operators on the full tensor.
    """
    try:
        x.data_ptr()
    except RuntimeError:
        return True
    return False


_SIZES = frozenset({torch.Tensor.shape.__get__, torch.Tensor.size})  # type: ignore[attr-defined]
_LITERALS = frozenset({torch.tensor, torch.as_tensor})
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_CONVERSIONS = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__format__}
)
_FACTORIES = frozenset({torch.zeros, torch.ones, torch.empty, torch.arange})
_NARROW = frozenset({torch.narrow, torch.Tensor.narrow})
_PUTTING = frozenset({torch.index_put, torch.Tensor.index_put, torch.Tensor.index_put_})
_ROW_LOOKUPS = frozenset({F.embedding, F.embedding_bag, torch.embedding})
"""Functions whose shapes depend only on tensors. The row of padding is a position of the table."""


def _check_rows(into: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False) -> None:
    """Check that there are as many rows as places for them, which torch only checks for real tensors."""
    places: tuple[int, ...] = indices[0].shape if indices and indices[0] is not None else ()
    if len(places) != 1 or values.dim() != into.dim() - len(indices) + 1 or indices[0].dtype == torch.bool:
        return
    if values.shape[0] not in (1, places[0]):
        raise ValueError(f"{values.shape[0]} rows cannot be put in the places of {places[0]} tokens")


def _has_traced(values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind is TracedInt:
            return True
        if kind is slice:
            if _has_traced((value.start, value.stop, value.step)):
                return True
        elif isinstance(value, (tuple, list)) and _has_traced(value):
            return True
    return False


def wrap_ints(module: nn.Module, fqn: str) -> dict[int, Any]:
    """Wrap the int attributes of a module. Return a map from ``id`` of each new config to the old config."""
    attributes = module.__dict__
    replaced: dict[int, Any] = {}
    for key, value in list(attributes.items()):
        if key.startswith("_"):
            continue
        if type(value) is int:
            attributes[key] = TracedInt(value, ("attr", fqn, key, value))
        elif type(value) in (tuple, list) and value and all(type(v) is int for v in value):
            attributes[key] = type(value)(
                TracedInt(v, ("attr", fqn, f"{key}.{i}", v)) for i, v in enumerate(value)
            )
        elif _is_config(value):
            attributes[key] = _traced_config(value, fqn, key)
            replaced[id(attributes[key])] = value
    return replaced


def _is_config(value: Any) -> bool:
    return isinstance(value, PreTrainedConfig)


def _traced_config(config: Any, fqn: str, key: str) -> Any:
    """Copy ``config`` so that its int attributes are traced as ``key.<name>`` of module ``fqn``.

    Attributes of nested configs are traced as ``key.<config>.<name>``.
    """
    kind = type(config)
    inner: dict[tuple[str, int], Any] = {}

    def read(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)  # type: ignore[call-arg]
        if type(value) is int and not name.startswith("_"):
            return TracedInt(value, ("attr", fqn, f"{key}.{name}", value))
        if _is_config(value):
            if (name, id(value)) not in inner:
                inner[name, id(value)] = _traced_config(value, fqn, f"{key}.{name}")
            return inner[name, id(value)]
        return value

    traced = copy.copy(config)
    # transformers makes each subclass of a config a dataclass, which is slow. A base without that is made
    # once.
    plain_class = _MADE_PLAIN.get(kind)
    if plain_class is None:
        members = {"__init_subclass__": classmethod(lambda cls: None)}
        plain_class = _MADE_PLAIN[kind] = type(kind.__name__, (kind,), members)
    object.__setattr__(traced, "__class__", type(kind.__name__, (plain_class,), {"__getattribute__": read}))
    return traced


_MADE_PLAIN: dict[type, type] = {}
