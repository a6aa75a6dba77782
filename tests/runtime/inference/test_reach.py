"""Texts that outgrow what a step reads of its cache: the same tokens, one graph for each reach."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captured import Captured, capturing
from recorded_steps import record_all
from shardconv_runtime.inference import decoding
from shardconv_runtime.inference.compiling import warm_up_decoding
from test_decoding import CASES, REASON, SAMPLED, compiled, make, prompt, same
from warm_compiler import warm_up

SHOWN_ELSEWHERE = ("gpt2", "bloom", "mistral", "mamba2", "deepseek_v3")
"""Slow tests: the other kinds have positions that rotate, windows, and states beside attention."""

LONG: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40}


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    """A step reads 8 slots, then 16, 32, 64; there are 128."""
    warm_up()
    monkeypatch.setattr(decoding, "LEAST_REACH", 8)
    with capturing() as found, warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{REASON}.*")
        yield found


def reaches(decoder: decoding.Decoder) -> list[int]:
    return sorted({bucket.reach for bucket in decoder._recorded})


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SHOWN_ELSEWHERE else n for n in CASES]
)
def test_tokens_of_every_kind_of_cache(name: str) -> None:
    model = make(name)
    twin, decoder = compiled(model)
    same(twin, model, prompt(1, 5), **LONG)
    assert reaches(decoder) == [8, 16, 32, 64]
    recordings = decoder.num_recordings
    same(twin, model, prompt(1, 6), **LONG)
    same(twin, model, prompt(1, 20), **LONG)
    assert decoder.num_recordings == recordings


@pytest.mark.parametrize("is_recorded", [False, True])
def test_batches_with_padding_samples_and_stop_tokens(
    is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_recorded:
        record_all(monkeypatch)
    model = make()
    twin, decoder = compiled(model)
    text = same(twin, model, prompt(2, 7, num_padded=3), **LONG)
    assert reaches(decoder) == [8, 16, 32, 64]
    stop = {"eos_token_id": int(text[0, 40]), "do_sample": False, "max_new_tokens": 60}
    same(twin, model, prompt(2, 7, num_padded=3), **stop)
    same(twin, model, prompt(2, 7), **SAMPLED, max_new_tokens=30)
    same(twin, model, prompt(2, 7, num_padded=3), **LONG)


def test_short_calls_read_few_slots() -> None:
    """Although there is memory for a long text."""
    model = make()
    twin, decoder = compiled(model)
    text = same(twin, model, prompt(1, 3), **LONG)
    stop = {"eos_token_id": int(text[0, 5]), "do_sample": False, "max_new_tokens": 100}
    twin, decoder = compiled(model)
    same(twin, model, prompt(1, 3), **stop)
    (((_, state),),) = [[(bucket, state) for bucket, (state, _) in decoder._recorded.items()]]
    assert state.cache.layers[0].keys.shape[-2] == 8
    assert state.cache.layers[0].buffers[0].shape[-2] == 128


def test_warm_up_has_all_of_them(graphs: Captured) -> None:
    model = make()
    twin, decoder = compiled(model)
    warm_up_decoding(twin, [(1, 100)])
    assert reaches(decoder) == [8, 16, 32, 64, 128]
    recordings, count = decoder.num_recordings, graphs.count
    same(twin, model, prompt(1, 5), do_sample=False, max_new_tokens=90, eos_token_id=2)
    assert (decoder.num_recordings, graphs.count) == (recordings, count)


def test_no_more_graphs_are_compiled_than_two(graphs: Captured) -> None:
    """The first one, and one for every other length."""
    twin, decoder = compiled(make())
    twin.generate(**prompt(1, 5), **LONG)
    assert decoder.num_recordings == 4
    assert graphs.count == 2


def test_the_state_is_as_before_a_recording() -> None:
    twin, decoder = compiled(make("bamba"))
    twin.generate(**prompt(2, 5), **LONG)
    (state, _), *_ = decoder._recorded.values()
    before = [tensor.clone() for tensor in (state.token, state.count, *state.cache.written(4))]
    with state.kept(4):
        for tensor in (state.token, state.count, *state.cache.written(4)):
            tensor.fill_(1)
    after = (state.token, state.count, *state.cache.written(4))
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
