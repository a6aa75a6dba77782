"""Calls of a model with stages for which some stage would return numbers that it lacks are refused."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import RefusedCallError
from ..format.plan import Plan
from ..format.stage_names import staged_modules
from .stage_link import StageLink

_INNER = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments that ask for activations of layers on any stage."""


def attach_stage_guards(model: nn.Module, plan: Plan, link: StageLink) -> None:
    """Refuse arguments and calls of parts of a model that no single stage could answer, in place."""

    def begin(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        config = getattr(model, "config", None)
        for name in _INNER:
            asked = kwargs.get(name)
            if getattr(config, name, None) if asked is None else asked:
                raise RefusedCallError(
                    f"{name} asks for results of every layer, which a model with stages does not collect; "
                    "load a directory that was converted without --pp"
                )
        link.begin_call()

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(lambda *_: link.end_call(), always_call=True)
    inner: dict[str, set[int]] = {}
    for fqn, (entry, _) in staged_modules(plan).items():
        parts = fqn.split(".")
        for length in range(1, len(parts)):
            inner.setdefault(".".join(parts[:length]), set()).update(entry.stages)
    for fqn, stages in inner.items():
        module = model.get_submodule(fqn)
        is_called = type(module).forward is not nn.Module.forward
        if len(stages) > 1 and is_called and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            module.register_forward_pre_hook(functools.partial(_require_call, link, fqn))


def _require_call(link: StageLink, fqn: str, module: nn.Module, args: Any) -> None:
    """Refuse a separate call of a module whose layers are on several stages; a hook."""
    if not link.is_called:
        raise RefusedCallError(
            f"{fqn} has layers on several stages; call the model itself, whose results all get"
        )
