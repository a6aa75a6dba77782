"""Models that tests of transformers make, replaced by their parts on ranks; and what their calls return."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import shardconv_runtime
import torch
from shardconv_runtime import Communication, PlanError, Planning, ShardconvError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.loaded import loaded
from torch import Tensor, nn
from transformers import PreTrainedModel

from .peers_suite import PACKAGE

READY = "_peers_ready"
"""Entry of a model that ``__new__`` has completed, so that ``__init__`` has nothing to do."""
COLLECTIVE_S = 20
"""How long a rank waits for another one that has left a test."""
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}
"""How far results may be from those of the unsharded model, relative to the root of their mean square.

Ranks add in another order, and tests leave float64 out.
"""


SAVED = ("_name_or_path", "architectures", "dtype", "transformers_version")
"""Attributes of a config that ``save_pretrained`` sets; the dtypes of the tensors are named themselves."""


RATES = re.compile("drop|jitter|noise|mask_(time|feature)_prob")
"""Names of options of configs with which models draw random numbers in training mode."""


@dataclass(frozen=True)
class Digest:
    """A tensor in few numbers: ranks cannot keep what every call returns."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    size: float
    """The root of the mean square."""
    projections: tuple[float, ...]
    """On directions that are drawn from the number of elements."""

    def difference(self, other: Digest) -> str:
        """Return how another tensor differs from this one, or nothing."""
        for what in ("name", "shape", "dtype"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                return f"{self.name} has {what} {theirs} instead of {mine}"
        error = max(
            (abs(x - y) for x, y in zip(self.projections, other.projections, strict=True)), default=0.0
        )
        limit = TOLERANCES.get(self.dtype, 0.0) * max(self.size, 1e-3)
        if error <= limit:
            return ""
        return f"{self.name} {self.shape} differs by {error / max(self.size, 1e-3):.0e} of its size"


@dataclass
class Models:
    """Replaces every model that a test makes, by construction or ``from_pretrained``.

    Args:
        num_ranks: over which models are sharded; 0 if they stay as they are.
        plans: plans of earlier runs by a digest of what they are for; new ones are added.
    """

    num_ranks: int
    plans: dict[str, Plan] = field(default_factory=dict)
    training: bool = True
    """Models can be trained, unless their plan is for inference only; this form refuses more calls."""
    without_sums: bool = False
    """Every sum over ranks is left out, to see that the tests find it."""
    digests: list[Digest] = field(default_factory=list)
    """What the calls of models returned since the list was emptied."""
    _is_inside: bool = False
    """A constructor has begun, which makes the parts of a model: they stay as they are."""
    _depth: int = 0
    _trained: PreTrainedModel | None = None
    """The model whose call in training mode was the last one, if it can be compared."""

    def install(self) -> None:
        """Replace models of this process from now on."""
        models = self

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            # Without arguments, it is copied or unpickled.
            if models._is_inside or not (args or kwargs) or not _is_asked_for_by_a_suite():
                return object.__new__(cls)
            _skip_when_ready(cls)
            with models._inside(), _zeros_in_new_memory():
                model: Any = object.__new__(cls)
                model.__init__(*args, **kwargs)
            return models._replaced(model, is_constructed=True)

        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            if models._is_inside or not _is_asked_for_by_a_suite():
                return original(cls, *args, **kwargs)
            with models._inside(), _zeros_in_new_memory():
                result = original(cls, *args, **kwargs)
            if isinstance(result, tuple):
                return (models._replaced(result[0]), *result[1:])
            return models._replaced(result)

        original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
        PreTrainedModel.__new__ = new  # type: ignore[assignment,method-assign]
        PreTrainedModel.from_pretrained = classmethod(from_pretrained)
        PreTrainedModel.__call__ = self._recording(nn.Module.__call__)
        torch.Tensor.backward = self._recording_gradients(torch.Tensor.backward)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _replaced(self, model: PreTrainedModel, is_constructed: bool = False) -> PreTrainedModel:
        result = model
        if self.num_ranks:
            with self._inside():
                result = self._sharded(model).train(model.training)
        if is_constructed:
            vars(result)[READY] = True
        return result

    def _sharded(self, model: PreTrainedModel) -> PreTrainedModel:
        key = _key(model, self.num_ranks)
        communication = Communication(
            timeout_s=COLLECTIVE_S, all_reduce=_no_sum if self.without_sums else None
        )
        # As ``convert`` does, a new plan is checked, since an unchecked one refuses embeddings.
        plan = self.plans.get(key, Planning(check=True))
        options: dict[str, Any] = {"plan": plan, "communication": communication}
        try:
            # Models in training return logits beside the loss, as unsharded ones do.
            logits = True if self.training else None
            sharded = shardconv_runtime.parallelize(
                model, training=self.training, gather_logits=logits, **options
            )
        except PlanError:
            if not self.training:
                raise
            # The plan is for inference only, or the model has none.
            sharded = shardconv_runtime.parallelize(model, **options)
        self.plans[key] = loaded(sharded).plan
        return sharded

    def _recording(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``__call__`` of models, which notes the result of outermost calls without dropout."""

        def recorded(model: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                result = call(model, *args, **kwargs)
            finally:
                self._depth -= 1
            if not (self._depth or self._is_inside):
                is_compared = not model.training or not _drops_out(model)
                self._trained = model if model.training and is_compared else None
                self.digests += digests_of(result) if is_compared else ()
            return result

        return recorded

    def _recording_gradients(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Return ``backward`` of tensors, which notes the norm of a model's gradients."""

        def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            backward(tensor, *args, **kwargs)
            if self._trained is not None and not self._is_inside:
                # Over all ranks; gradients stay as they are.
                norm = torch.nn.utils.clip_grad_norm_(self._trained.parameters(), float("inf"))
                self.digests.append(Digest("gradients", (), torch.float32, float(norm), (float(norm),)))

        return recorded


def _drops_out(model: PreTrainedModel) -> bool:
    """Return whether a call in training mode draws random numbers, which ranks draw for their parts."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None))
    }
    rates = [
        value for config in configs.values() for name, value in vars(config).items() if RATES.search(name)
    ]
    rates += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(isinstance(rate, float | int) and rate > 0 for rate in rates)


def _is_asked_for_by_a_suite() -> bool:
    """Return whether a suite makes a model, and not code of ours that a suite has called."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith((f"{PACKAGE}.", "shardconv")):
            return bool(name.startswith(PACKAGE))
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _no_sum(tensor: Tensor, group: str) -> Tensor:
    return tensor.clone()


def _skip_when_ready(cls: type) -> None:
    """Make ``__init__`` of a class do nothing for a model that ``__new__`` has completed."""
    initialize = cls.__init__  # type: ignore[misc]
    if getattr(initialize, READY, False):
        return

    @functools.wraps(initialize)
    def unless_ready(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.__dict__.pop(READY, False):
            initialize(self, *args, **kwargs)

    setattr(unless_ready, READY, True)
    cls.__init__ = unless_ready  # type: ignore[misc]


@contextmanager
def _zeros_in_new_memory() -> Iterator[None]:
    """Fill new memory, which ranks would find with other values where nothing initializes it.

    Some tests skip the initialization of weights, and some types leave a weight uninitialized.
    """

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            with torch.no_grad():
                return make(*args, **kwargs).zero_()

        return made

    with torch.device("cpu"):  # torch notes at its first use which functions a device is for
        torch.empty(0)
    names = ("empty", "empty_like")
    with mock.patch.multiple(torch, **{name: filled(getattr(torch, name)) for name in names}):
        yield


def _key(model: PreTrainedModel, num_ranks: int) -> str:
    """Name everything that the plan of a model that was just made depends on."""
    tensors = [
        (name, tuple(value.shape), str(value.dtype), value.is_meta)
        for name, value in (*model.named_parameters(), *model.named_buffers())
    ]
    asked = [type(model).__qualname__, num_ranks, tensors, _content(model.config)]
    return hashlib.sha256(json.dumps(asked, default=repr).encode()).hexdigest()


def _content(value: Any) -> Any:
    """Return a config with all of its attributes but those that say where and how it was saved."""
    if not hasattr(value, "sub_configs"):
        return value
    content = {name: _content(each) for name, each in sorted(vars(value).items())}
    return {name: each for name, each in content.items() if name not in SAVED}


def digests_of(value: Any, name: str = "output") -> Iterator[Digest]:
    """Yield the digests of all tensors in a result but those of caches, which have a rank's heads."""
    if isinstance(value, Tensor):
        yield _digest(value, name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key != "past_key_values":
                yield from digests_of(each, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from digests_of(each, f"{name}.{number}")


@torch.no_grad()
def _digest(tensor: Tensor, name: str) -> Digest:
    about = name, tuple(tensor.shape), tensor.dtype
    if tensor.is_meta or not tensor.numel():
        return Digest(*about, 0.0, ())
    values = tensor.detach().reshape(-1).double().nan_to_num(0.5, 1e3, -1e3).clamp(-1e3, 1e3)
    signs = torch.empty(2, len(values), dtype=torch.float64)
    signs.bernoulli_(0.5, generator=torch.Generator().manual_seed(len(values))).mul_(2).sub_(1)
    projections = signs @ values / len(values) ** 0.5
    return Digest(*about, float(values.square().mean().sqrt()), tuple(projections.tolist()))


def is_refusal(error: BaseException | None) -> bool:
    """Return whether an error of ours is at the bottom, other than one of ranks that have lost each other."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, ShardconvError):
            return not isinstance(error, shardconv_runtime.RanksTimeoutError)
        error = error.__cause__ or error.__context__
        seen += 1
    return False
