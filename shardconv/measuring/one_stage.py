"""One stage of a pipeline, run without the others: what it receives is memory without values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from shardconv_runtime.comm.stage_link import Crossing, StageLink
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.staged_names import absent_modules, is_inside, staged_modules
from torch import Tensor

from ..verifying.simulation.layer_bypass import Bypass


class UnansweredLink(StageLink):
    """Sends nothing, and allocates what it receives.

    Args:
        plan: with stages.
        stage: of this rank.
    """

    def __init__(self, plan: Plan, stage: int) -> None:
        assert plan.stages is not None
        super().__init__(stage, plan.stages.count)
        self.handed_on = _Always(
            (fqn, sent.item) for fqn, (entry, _) in staged_modules(plan).items() for sent in entry.sent
        )

    def send(self, x: Tensor, stages: Sequence[int]) -> None:
        """Nothing is kept of what was sent."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
        """Memory for it."""
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def share(self, results: Sequence[Tensor]) -> None:
        """The results are where they were made."""


class _Always(set[Crossing]):
    """All values that stages hand on: a layer that is left out, and counted, hands on none itself."""

    def clear(self) -> None:
        """They stay."""


def bypassed_on(plan: Plan, stage: int, bypassed: Mapping[str, Bypass]) -> dict[str, Bypass]:
    """The layers of one stage that can be left out, where the first one of each kind on it stands for them.

    Args:
        plan: with stages.
        stage: its number.
        bypassed: layers of all stages.
    """
    absent = absent_modules(plan, stage)
    shown_by: dict[str, str] = {}
    out: dict[str, Bypass] = {}
    for like in dict.fromkeys(how.like for how in bypassed.values()):
        if not is_inside(like, absent):
            shown_by[like] = like
    for fqn, how in bypassed.items():
        if is_inside(fqn, absent):
            continue
        if how.like in shown_by:
            out[fqn] = replace(how, like=shown_by[how.like])
        else:
            shown_by[how.like] = fqn
    return out
