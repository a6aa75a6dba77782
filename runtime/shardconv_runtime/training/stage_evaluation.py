"""A call, without gradients, of the model of a process that has several stages: one pass for each of them.

What crosses the border of two neighboring stages goes from process to process as in a schedule, in which this
is one microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.stage_link import Crossing, StageLink
from ..errors import ShardconvError
from ..parallel.boundary import forward_signature
from ..parallel.stage_model import StageModel
from .stage_forms import StageBoundary, ValueForm, forms_inside
from .without_cache import without_cache

_CACHE = "past_key_values"


def evaluate_in_passes(model: nn.Module, stage: StageModel) -> None:
    """Have a call of a model run all stages of this process, in place.

    Args:
        model: of this process; its ``forward`` is replaced on the instance.
        stage: its link and forms.
    """
    inner = getattr(model.forward, "__func__", type(model).forward)
    names = list(forward_signature(model).parameters)

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if stage.link.is_scheduled():
            return inner(self, *args, **kwargs)
        given = _without_cache(self, names, dict(zip(names, args, strict=False)) | kwargs)
        return _without_state(names, _in_passes(self, stage, given))

    model.__dict__["forward"] = MethodType(forward, model)


def _without_cache(model: nn.Module, names: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that makes no cache: each pass would make one, of the layers of its stage."""
    if given.get(_CACHE) is not None:
        raise ShardconvError(
            f"{_CACHE} was given to a model with several stages in each process, which keeps none; pass full "
            "sequences, or load it without stages_per_process"
        )
    return without_cache(model, names, given)


def _without_state(names: list[str], output: Any) -> Any:
    """The results but for those that are handed back to the model, as caches are: they are of one pass."""
    for name in names if isinstance(output, MutableMapping) else ():
        if output.get(name) is not None:
            output[name] = None
    return output


def _in_passes(model: nn.Module, stage: StageModel, given: Mapping[str, Any]) -> Any:
    link, output = stage.link, None
    forms = forms_inside(model, stage, given)
    for number in link.stages:
        border = StageBoundary.of(stage, number, forms)
        handover = border.handover(_received(link, number, border.received, stage.device))
        with link.passing(number, handover):
            output = model.forward(**given)
        if number < link.count - 1:
            for x in border.leaving(handover):
                link.send(x, (number + 1,))
    return output


def _received(
    link: StageLink, number: int, forms: Mapping[Crossing, ValueForm], device: torch.device
) -> list[Tensor]:
    """What the stage before that of a number leaves."""
    return [link.receive(form.shape, form.dtype, device, number - 1) for form in forms.values()]
