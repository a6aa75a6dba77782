"""Refuses calls of a model with stages for which some stage would return numbers that it does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..comm.stage_link import StageLink
from ..errors import ShardconvError
from ..format.plan import Plan
from ..format.staged_names import staged_modules

_INNER = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments that ask for what layers compute, on whatever stage they are."""


def attach_stage_guards(model: nn.Module, plan: Plan, link: StageLink) -> None:
    """Refuse arguments and calls of parts of a model that no stage could answer alone, in place."""
    running = _Running(link)
    model.register_forward_pre_hook(running.enter, with_kwargs=True)
    model.register_forward_hook(running.leave, always_call=True)
    inner: dict[str, set[int]] = {}
    for fqn, (entry, _) in staged_modules(plan).items():
        parts = fqn.split(".")
        for length in range(1, len(parts)):
            inner.setdefault(".".join(parts[:length]), set()).update(entry.stages)
    for fqn, stages in inner.items():
        if len(stages) > 1 and type(model.get_submodule(fqn)).forward is not nn.Module.forward:
            module = model.get_submodule(fqn)
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                module.register_forward_pre_hook(running.require(fqn))


class _Running:
    """Whether a call is running in which all stages take part."""

    def __init__(self, link: StageLink) -> None:
        self._link = link

    def enter(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """The model is called."""
        config = getattr(model, "config", None)
        for name in _INNER:
            asked = kwargs.get(name)
            if getattr(config, name, None) if asked is None else asked:
                raise ShardconvError(
                    f"{name} asks for what every layer computes, which a model with stages does not collect; "
                    "load a directory that was converted without --pp"
                )
        self._link.depth += 1
        self._link.handed_on.clear()

    def leave(self, *_: Any) -> None:
        """It has returned, or failed."""
        self._link.depth = max(0, self._link.depth - 1)

    def require(self, fqn: str) -> Any:
        """A hook that refuses a call of one of its modules by itself."""

        def check(module: nn.Module, args: Any) -> None:
            if not self._link.depth:
                raise ShardconvError(
                    f"{fqn} has layers on several stages; call the model itself, whose results all get"
                )

        return check
