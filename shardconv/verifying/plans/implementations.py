"""Proves a plan for the other implementations that a user may choose when the model is loaded.

transformers can run attention and experts in several ways. A plan is solved for the one that the config
chooses; the others run other code on the same parameters. The plain one ("eager") of both, and those of
attention that run on a CPU, are simulated as well. A fused kernel for GPUs cannot be: it is given the same
heads as the implementation that was traced.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from shardconv_runtime.errors import ShardconvError
from torch import nn

from ..simulation.rank_simulation import Logits, Unprovable
from .simulate import Case, simulate

PLAIN = "eager"
OTHERS = ("sdpa", "flex_attention")
"""Further implementations of attention that run on a CPU."""
_SETTERS = {
    "attention": ("_attn_implementation", "set_attn_implementation"),
    "experts": ("_experts_implementation", "set_experts_implementation"),
}
"""Kind -> the attribute of a config that names its implementation, and the method of a model that sets it."""


@dataclass(frozen=True)
class Wrong:
    """An implementation under which the ranks compute something else than the unsharded model."""

    kind: str
    name: str
    note: str
    """For the plan."""


def other_kinds(model: nn.Module) -> list[str]:
    """What the model implements in another way than the plain one."""
    return [kind for kind in _SETTERS if _chosen(model, kind) not in (None, PLAIN)]


def with_implementations(case: Case, names: Mapping[str, str]) -> Case | None:
    """The case with these implementations, by kind; None where the model is none other then."""
    other = copy.deepcopy(case.model)
    try:
        for kind, name in names.items():
            getattr(other, _SETTERS[kind][1])(name)
    except (ValueError, NotImplementedError, ImportError):
        return None  # the model does not offer it
    if all(_chosen(other, kind) == _chosen(case.model, kind) for kind in names):
        return None
    return case.with_model(other)


def wrong_plain(case: Case) -> tuple[Wrong, ...]:
    """The plain implementations under which the plan does not hold.

    Args:
        case: proven for the implementations of the model's config.
    """
    kinds = other_kinds(case.model)
    if not kinds or _problem(case, dict.fromkeys(kinds, PLAIN), calls=2) is None:
        return ()
    return tuple(wrong for kind in kinds for wrong in _wrong(case, kind, PLAIN, calls=2))


def wrong_others(case: Case) -> tuple[Wrong, ...]:
    """The further implementations of attention under which the plan does not hold; argument as above."""
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
    """Why the plan does not hold with these implementations, by kind; None if it does, or if they cannot be
    run at all."""
    other = with_implementations(case, names)
    if other is None:
        return None
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # flex attention compiles itself, and warns where it may not
            simulate(other, calls=calls, logits=Logits.GATHERED)
    except Unprovable:
        return None
    except ShardconvError as error:
        return str(error).partition(". Nothing was written")[0]
    return None
