"""Tokens of ``load(compile=True)`` on two ranks: drawn alike, rows that end apart, a streamer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from captured import capturing
from checkpoints import VOCAB, save_causal
from distributed import run_processes
from shardconv_runtime import Communication
from shardconv_runtime.inference.generation import DECODER
from streamers import Streamer
from torch import Tensor
from warm_compiler import warm_up

import shardconv

SEED = 11
SAMPLED: dict[str, Any] = {
    "do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95, "max_new_tokens": 10,
    "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """The texts of both calls, and what a streamer got."""

    free: Tensor
    stopped: Tensor
    streamed: list[Any]
    num_recordings: int = 0


def prompts() -> dict[str, Tensor]:
    """Two, of which the second is padded."""
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(7) >= torch.tensor([[0], [3]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def draw(model: Any, seed: int, stops: list[int]) -> Drawn:
    """Without a stop token, then with some."""
    streamer = Streamer()
    torch.manual_seed(seed)
    free = model.generate(**prompts(), **SAMPLED, eos_token_id=None)
    torch.manual_seed(seed)
    stopped = model.generate(**prompts(), **SAMPLED, eos_token_id=stops, streamer=streamer)
    return Drawn(free, stopped, streamer.given, getattr(vars(model).get(DECODER), "num_recordings", 0))


def draw_on_rank(path: Path, stops: list[int]) -> Drawn:
    """The random state of rank 0 is that of all."""
    with capturing():
        model = shardconv_runtime.load(path, compile=True, communication=Communication(timeout_s=100))
        return draw(model, SEED + int(os.environ["RANK"]), stops)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Drawn, list[Drawn]]:
    """Of the unsharded model, and of each rank."""
    warm_up()
    root = tmp_path_factory.mktemp("drawn")
    source = save_causal("llama", root / "llama", num_hidden_layers=1)
    shardconv.convert(source, root / "out", tp=2, check=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    free = draw(model, SEED, []).free[:, 7:]
    stops = [int(free[0, 2]), int(free[1, 6])]
    return draw(model, SEED, stops), run_processes(2, draw_on_rank, root / "out", stops)


def test_ranks_draw_what_one_process_draws(drawn: tuple[Drawn, list[Drawn]]) -> None:
    want, ranks = drawn
    assert len(want.free[:, 7:].unique()) > 10
    for rank in ranks:
        assert torch.equal(rank.free, want.free)
        assert rank.num_recordings == 2, "with stop tokens, the step is another graph"


def test_rows_end_at_their_own_steps(drawn: tuple[Drawn, list[Drawn]]) -> None:
    want, ranks = drawn
    ends = [(row[7:] != 0).sum() for row in want.stopped]
    assert len(set(map(int, ends))) == 2
    assert want.stopped.shape[1] < want.free.shape[1]
    for rank in ranks:
        assert torch.equal(rank.stopped, want.stopped)


def test_ranks_stream(drawn: tuple[Drawn, list[Drawn]]) -> None:
    want, ranks = drawn
    for rank in ranks:
        assert rank.streamed == want.streamed
