"""Proves a plan for the other implementations that a user may choose when the model is loaded.

transformers can run attention and experts in several ways. A plan is solved for the one that the config
chooses; the others run other code on the same parameters. The plain one ("eager") of both is simulated as
well. A fused kernel for GPUs cannot be: it is given the same heads as the implementation that was traced.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

from shardconv_runtime.errors import ShardconvError
from torch import nn

from ..simulation.rank_simulation import Logits, Unprovable
from .simulate import Case, simulate

PLAIN = "eager"
_SETTERS = {
    "attention": ("_attn_implementation", "set_attn_implementation"),
    "experts": ("_experts_implementation", "set_experts_implementation"),
}
"""Kind -> the attribute of a config that names its implementation, and the method of a model that sets it."""


def plain_case(case: Case, kinds: Collection[str]) -> Case | None:
    """The case with the plain implementations of these; None where the model is none other then."""
    other = copy.deepcopy(case.model)
    try:
        for kind in kinds:
            getattr(other, _SETTERS[kind][1])(PLAIN)
    except (ValueError, NotImplementedError):
        return None  # the model does not offer it
    if all(_chosen(other, kind) == _chosen(case.model, kind) for kind in kinds):
        return None
    return case.with_model(other)


def other_kinds(model: nn.Module) -> list[str]:
    """What the model implements in another way than the plain one."""
    return [kind for kind in _SETTERS if _chosen(model, kind) not in (None, PLAIN)]


def notes_on_others(case: Case) -> tuple[str, ...]:
    """Notes for the plan on the implementations under which it does not hold.

    Args:
        case: proven for the implementations of the model's config.
    """
    kinds = other_kinds(case.model)
    if not kinds or _problem(case, kinds) is None:
        return ()
    out = []
    for kind in kinds:
        problem = _problem(case, [kind])
        if problem is not None:
            chosen = _chosen(case.model, kind)
            out.append(f"this plan is for {kind} implemented as {chosen!r}, not as {PLAIN!r}: {problem}")
    return tuple(out)


def _chosen(model: nn.Module, kind: str) -> str | None:
    attribute, setter = _SETTERS[kind]
    if not hasattr(model, setter):
        return None
    return getattr(getattr(model, "config", None), attribute, None)


def _problem(case: Case, kinds: list[str]) -> str | None:
    """Why the plan does not hold with the plain implementation of these; None if it does, or if that
    cannot be run at all."""
    other = plain_case(case, kinds)
    if other is None:
        return None
    try:
        simulate(other, calls=2, logits=Logits.GATHERED)
    except Unprovable:
        return None
    except ShardconvError as error:
        return str(error).partition(". Nothing was written")[0]
    return None
