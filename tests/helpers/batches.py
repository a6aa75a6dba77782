"""Requests for continuous batching, and the tokens that one after another gives."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from checkpoints import VOCAB
from shardconv_runtime.inference.batching_manager import PAGE_SIZE
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

NEW = 8
SOON_S = 20
"""Well under any timeout of torch; these machines are slow."""


def prompts(number: int = 9, longest: int = 12) -> list[list[int]]:
    """Of different lengths; some begin alike."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(3, VOCAB, (number, longest), generator=generator).tolist()
    return [drawn[i % 4][:3] + ids[3 : 1 + (5 * i) % longest] for i, ids in enumerate(drawn)]


def config(**options: Any) -> GenerationConfig:
    """Greedy, unless an option says otherwise."""
    return GenerationConfig(
        **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0} | options
    )


def pages(**options: Any) -> ContinuousBatchingConfig:
    """A small cache: prompts are divided over steps, and requests wait for each other."""
    sizes = {PAGE_SIZE: 16, "num_blocks": 24, "max_batch_tokens": 40, "cpu_group_timeout": 60.0}
    return ContinuousBatchingConfig(**sizes | options)


def one_by_one(model: Any, inputs: list[list[int]]) -> list[list[int]]:
    """The new tokens after each prompt."""
    return [after(model, ids) for ids in inputs]


def after(model: Any, ids: list[int]) -> list[int]:
    """The new tokens after a prompt."""
    tokens: Tensor = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        generation_config=config(),
    )
    return tokens[0, len(ids) :].tolist()


def batch(model: Any, inputs: list[list[int]], **options: Any) -> list[list[int]]:
    """The new tokens after each prompt, of a batch."""
    given = {"generation_config": config(), "continuous_batching_config": pages()} | options
    return [answer.generated_tokens for answer in model.generate_batch(inputs, **given).values()]


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    """An error of one rank."""
    raise ValueError("only here")
