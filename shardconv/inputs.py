"""Inputs for one traced forward pass: real values, of sizes that coincide with nothing else."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from torch import nn


@dataclass(frozen=True, slots=True)
class TraceInputs:
    """What the model is called with, all by keyword."""

    tensors: dict[str, torch.Tensor]
    """Real CPU tensors; ids and masks ``[B, S]``."""
    options: dict[str, Any]


def make_inputs(model: nn.Module, seed: int = 0) -> TraceInputs:
    """Token ids with a left-padded attention mask, and what else the model's forward asks for.

    Args:
        model: on any device.
        seed: other values, and other sizes than those of seed 0, for a second run on numbers.

    Raises:
        SolveError: the model is not called with token ids.
    """
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main != "input_ids" or main not in parameters:
        raise SolveError(
            f"{type(model).__name__} takes {main}, not input_ids; only text models can be converted so far"
        )
    batch, length = _sizes(model)
    if seed:
        batch, length = batch - 1, length - 3
    tensors = {"input_ids": _ids(model, batch, length, seed)}
    if "attention_mask" in parameters:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, :2] = 0
        tensors["attention_mask"] = mask
    if "decoder_input_ids" in parameters:
        tensors["decoder_input_ids"] = _ids(model, batch, length - 5, seed + 1)
    options = {"use_cache": False} if "use_cache" in parameters else {}
    return TraceInputs(tensors, options)


def _ids(model: nn.Module, batch: int, length: int, seed: int) -> torch.Tensor:
    table = model.get_input_embeddings()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        min(3, table.weight.shape[0] - 1), table.weight.shape[0], (batch, length), generator=generator
    )


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Batch and sequence length: unlike each other's multiples and every size of a parameter."""
    taken = {n for p in model.parameters() for n in p.shape}
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 1 << 20
    for length in (24, 26, 22, 21, 27, 19, 17, 23, 29, 15, 13, 11, 14, 10, 9):
        for batch in (3, 5, 7):
            if length < longest and not taken & {length, batch, length * batch, length - 5}:
                return batch, length
    return 3, min(24, int(longest) - 1)
