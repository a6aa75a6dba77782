"""Compare a plan with other implementations of attention and experts than the one that was traced.

A user may choose another one when the model is loaded. It runs other code on the same parameters. The eager
implementations, and attention that runs on a CPU, are simulated. Fused kernels for GPUs cannot be simulated,
but they get the same heads as the implementation that was traced.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from shardconv_runtime.errors import ShardconvError
from torch import nn
from torch.nn.attention import flex_attention

from ..simulation.rank_simulation import Logits, RanksWrong, Unprovable
from .proof_case import Case, simulate

EAGER = "eager"
OTHERS = ("sdpa", "flex_attention")
"""Further implementations of attention that run on a CPU."""
_SETTERS = {
    "attention": ("_attn_implementation", "set_attn_implementation"),
    "experts": ("_experts_implementation", "set_experts_implementation"),
}
"""Kind -> the attribute of a config that names its implementation, and the method of a model that sets it."""


@dataclass(frozen=True)
class Wrong:
    """An implementation with which the ranks differ from the unsharded model."""

    kind: str
    name: str
    note: str
    """Note for the plan."""


def other_kinds(model: nn.Module) -> list[str]:
    """Return the kinds of implementations of the model that are not eager."""
    return [kind for kind in _SETTERS if _chosen(model, kind) not in (None, EAGER)]


def with_implementations(case: Case, names: Mapping[str, str]) -> Case | None:
    """Return the case with these implementations, by kind; None if the model does not change."""
    other = copy.deepcopy(case.model)
    try:
        for kind, name in names.items():
            getattr(other, _SETTERS[kind][1])(name)
    except (ValueError, NotImplementedError, ImportError):
        return None  # the model does not offer it
    if all(_chosen(other, kind) == _chosen(case.model, kind) for kind in names):
        return None
    return case.with_model(other)


def wrong_eager(case: Case) -> tuple[Wrong, ...]:
    """Find the eager implementations for which the plan is wrong."""
    kinds = other_kinds(case.model)
    if not kinds or _problem(case, dict.fromkeys(kinds, EAGER), calls=2) is None:
        return ()
    return tuple(wrong for kind in kinds for wrong in _wrong(case, kind, EAGER, calls=2))


def wrong_others(case: Case) -> tuple[Wrong, ...]:
    """Find the other implementations of attention for which the plan is wrong."""
    chosen = _chosen(case.model, "attention")
    names = [name for name in OTHERS if chosen is not None and name != chosen]
    return tuple(wrong for name in names for wrong in _wrong(case, "attention", name, calls=1))


def _wrong(case: Case, kind: str, name: str, calls: int) -> list[Wrong]:
    problem = _problem(case, {kind: name}, calls)
    if problem is None:
        return []
    chosen = _chosen(case.model, kind)
    note = f"this plan is for {kind} implemented as {chosen!r}, not as {name!r}: {problem}"
    return [Wrong(kind, name, note)]


def _chosen(model: nn.Module, kind: str) -> str | None:
    attribute, setter = _SETTERS[kind]
    if not hasattr(model, setter):
        return None
    return getattr(getattr(model, "config", None), attribute, None)


def _problem(case: Case, names: Mapping[str, str], calls: int) -> str | None:
    """Say why the plan is wrong with these implementations, by kind; None if it is right, or if they cannot
    run."""
    other = with_implementations(case, names)
    if other is None:
        return None
    try:
        with _uncompiled(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # flex attention warns if it is not compiled
            simulate(other, calls=calls, logits=Logits.GATHERED)
    except Unprovable:
        return None
    except RanksWrong as error:
        return error.located().problem
    except ShardconvError as error:
        return str(error)
    return None


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run code that compiles itself, such as flex attention, without compilation.

    ``torch.compile`` imports Inductor even if nothing is compiled, which takes longer than the proof of
    most models. Here, it leaves that to the first call afterwards: transformers keeps its result. Before it
    compiles flex attention, torch (2.13) looks for a backend, which imports networkx and much of Inductor.
    """
    compile_, prepare = torch.compile, getattr(flex_attention, _PREPARING, None)
    torch.compile = _compiled_later  # type: ignore[assignment]
    if prepare is not None:
        setattr(flex_attention, _PREPARING, nullcontext)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.compile = compile_
        if prepare is not None:
            setattr(flex_attention, _PREPARING, prepare)


_PREPARING = "setup_compilation_env"
"""Name of the context in which torch compiles flex attention; it yields the backend."""


def _compiled_later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replace ``torch.compile``, which may be called as a decorator."""
    if function is None:
        return partial(_compiled_later, **options)
    compiled: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if torch.compile is _compiled_later:
            return function(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(function, **options)
        return compiled(*args, **kwargs)

    return call
