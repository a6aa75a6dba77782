"""Training a model of images and text on text alone: the vision tower has no gradients.

Norms, clipping and the optimizer take the gradients that there are, the same ones on all ranks.
https://github.com/huggingface/trl/issues/6617
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from made_inputs import make_inputs
from one_and_ranks import Use, of_one, of_ranks, require_same
from torch import Tensor
from zoo.saved import save_random

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 93, 2]])


def two_steps(model: Any, **given: Tensor) -> Tensor:
    """Losses, norms, how many parameters have no gradient, and the loss afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**given).logits.double().pow(2).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found += [loss.item(), norm.item(), sum(p.grad is None for p in model.parameters())]
        optimizer.step()
    with torch.no_grad():
        found.append(model(**given).logits.double().pow(2).mean().item())
    return torch.tensor(found, dtype=torch.float64)


def text_alone(model: Any) -> Tensor:
    return two_steps(model, input_ids=IDS)


def text_then_image(model: Any, image: dict[str, Tensor]) -> Tensor:
    return torch.cat((text_alone(model), two_steps(model, **image)))


def frozen_tower(model: Any, image: dict[str, Tensor]) -> Tensor:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision" not in name)
    return two_steps(model, **image)


def test_steps_are_those_of_one_process(tmp_path: Path) -> None:
    image = dict(make_inputs(save_random("other", "llava", tmp_path / "model"), seed=5).tensors)
    shardconv.convert(tmp_path / "model", tmp_path / "out", tp=2, check=False)
    uses: list[Use] = [text_alone]
    for use in (text_then_image, frozen_tower):
        uses.append(partial(use, image=image))
        uses[-1].__name__ = use.__name__  # type: ignore[attr-defined]
    one = of_one(tmp_path / "model", uses, training=True)
    require_same(uses, one, of_ranks(tmp_path / "out", uses, training=True), 1e-5)
