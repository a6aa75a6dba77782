"""``generate`` in real processes: however it decodes, the tokens of the unsharded model, on every rank."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import HIDDEN, LAYERS, VOCAB, save, save_causal
from distributed import run_errors_of_each, run_processes
from shardconv_runtime import Communication, LaunchError, PlanError
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

import shardconv

TP = 2
MODELS = ("llama", "mistral", "t5")
"""A decoder, one with a sliding window of 6, and an encoder with a decoder."""

PAD, EOS = 0, 2


def prompts() -> dict[str, Tensor]:
    """Two prompts of 7 and 4 tokens, the second padded on the left: ``[2, 7]``."""
    ids = torch.tensor([[11, 245, 3, 77, 130, 9, 201], [PAD, PAD, PAD, 88, 5, 254, 19]])
    return {"input_ids": ids, "attention_mask": (torch.arange(7) >= torch.tensor([[0], [3]])).long()}


def long_prompt(length: int) -> dict[str, Tensor]:
    """One prompt without padding ``[1, length]``."""
    ids = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def words() -> PreTrainedTokenizerFast:
    """A word for each token: ``w3``, ``w4``, ...; the last one is what a search for stops starts with."""
    vocabulary = {f"w{i}": i for i in range(VOCAB - 1)} | {"abcdef": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2")


# Ways of decoding: each is given the unsharded model, and that of a rank -------------------------------

NEW = 12
_GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
_SAMPLE: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}


def _plain(**options: Any) -> Callable[[Any], Any]:
    return lambda model: model.generate(**prompts(), **options)


def _seeded(**options: Any) -> Callable[[Any], Any]:
    """The ranks start from different random states."""

    def run(model: Any) -> Any:
        torch.manual_seed(11 + int(os.environ.get("RANK", 0)))
        return model.generate(**prompts(), **options)

    return run


def _stop_strings(model: Any) -> Any:
    """Each row stops at a word that its own greedy continuation has, one of them inside of a longer text."""
    rows = model.generate(**prompts(), **_GREEDY)[:, 7:]
    stops = [f"w{int(rows[0, 4])}", f"w{int(rows[1, 7])}"]
    return model.generate(**prompts(), **_GREEDY, stop_strings=stops, tokenizer=words())


def _eos(model: Any) -> Any:
    """The end of sequence is the token that row 0 has as its third, so that row 0 is padded after it."""
    rows = model.generate(**prompts(), **_GREEDY)[:, 7:]
    return model.generate(**prompts(), **_GREEDY, eos_token_id=int(rows[0, 2]))


def _scores(model: Any) -> Any:
    """Scores and logits of every step ``[B, V]``."""
    out = model.generate(
        **prompts(), **_GREEDY, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    return out.sequences, torch.stack(out.scores), torch.stack(out.logits)


def _beam_scores(model: Any) -> Any:
    out = model.generate(
        **prompts(),
        **_GREEDY,
        num_beams=3,
        num_return_sequences=2,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return out.sequences, out.sequences_scores, out.beam_indices


def _by_position(model: Any) -> Any:
    """Inputs and config by position, as some callers do."""
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=PAD)
    return model.generate(prompts()["input_ids"][:1], config)


def _lookup(model: Any) -> Any:
    """Candidates come from the prompt, which repeats itself and what follows it."""
    first = model.generate(**long_prompt(8), **_GREEDY)
    ids = torch.cat([first, first[:, :8]], 1)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **_GREEDY,
        prompt_lookup_num_tokens=4,
        max_matching_ngram_size=2,
    )


def _chunks(model: Any) -> Any:
    return model.generate(**long_prompt(40), **_GREEDY, prefill_chunk_size=16)


DECODER_WAYS: dict[str, Callable[[Any], Any]] = {
    "greedy": _plain(**_GREEDY),
    "without a cache": _plain(**_GREEDY, use_cache=False),
    "static cache": _plain(**_GREEDY, cache_implementation="static", disable_compile=True),
    "repetition penalty": _plain(**_GREEDY, repetition_penalty=1.3, no_repeat_ngram_size=2),
    "sample": _seeded(**_SAMPLE),
    "top k": _seeded(**_SAMPLE | {"top_k": 20}, temperature=0.7),
    "top p": _seeded(**_SAMPLE, top_p=0.8, temperature=1.5),
    "samples": _seeded(**_SAMPLE, num_return_sequences=3),
    "beams": _plain(**_GREEDY, num_beams=3),
    "beams with scores": _beam_scores,
    "sampled beams": _seeded(**_SAMPLE, num_beams=3),
    "prompt lookup": _lookup,
    "stop strings": _stop_strings,
    "end of sequence": _eos,
    "scores": _scores,
    "by position": _by_position,
    "long": lambda model: model.generate(**long_prompt(300), max_new_tokens=16, do_sample=False),
    "prefill in chunks": _chunks,
}
WINDOW_WAYS = {
    name: DECODER_WAYS[name] for name in ("greedy", "static cache", "beams", "long", "end of sequence")
}
ENCODER_WAYS = {
    name: DECODER_WAYS[name]
    for name in ("greedy", "sample", "beams", "scores", "static cache", "without a cache")
}
WAYS = {"llama": DECODER_WAYS, "mistral": WINDOW_WAYS, "t5": ENCODER_WAYS}
CASES = [(model, way) for model in MODELS for way in WAYS[model]]


def decode_all(model: Any, name: str) -> dict[str, Any]:
    """What each way gives."""
    return {way: decode(model) for way, decode in WAYS[name].items()}


def decode_all_on_rank(path: Path, name: str) -> dict[str, Any]:
    return decode_all(load(path), name)


def load(path: Path, **options: Any) -> Any:
    """A hang would be an error after a minute."""
    options.setdefault("communication", Communication(timeout_s=60))
    return shardconv_runtime.load(path, **options)


def save_model(name: str, path: Path) -> Path:
    """A random checkpoint in float64 with room for long texts."""
    if name != "t5":
        return save_causal(name, path)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=8, d_ff=128, num_layers=LAYERS, num_heads=8,
        decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=EOS,
    )  # fmt: skip
    return save(transformers.T5ForConditionalGeneration._from_config(config, dtype=torch.float64), path)


@dataclass(frozen=True)
class Converted:
    """One model: its converted directory, and the unsharded one."""

    out: Path
    unsharded: Any


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Converted]:
    """Each model, converted once."""
    root = tmp_path_factory.mktemp("generate")
    found = {}
    for name in MODELS:
        source = save_model(name, root / name)
        shardconv.convert(source, root / f"{name}-out", tp=TP, check=False)
        auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
        unsharded = auto.from_pretrained(source, dtype=torch.float64).eval()
        found[name] = Converted(root / f"{name}-out", unsharded)
    return found


@pytest.fixture(scope="module")
def decoded(converted: dict[str, Converted]) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """For each model what the unsharded one gives, and what each rank gives."""
    return {
        name: (decode_all(model.unsharded, name), run_processes(TP, decode_all_on_rank, model.out, name))
        for name, model in converted.items()
    }


@pytest.mark.parametrize(("name", "way"), CASES)
def test_every_way_of_decoding(decoded: Any, name: str, way: str) -> None:
    unsharded, ranks = decoded[name]
    want = as_tuple(unsharded[way])
    for rank in ranks:
        got = as_tuple(rank[way])
        assert torch.equal(got[0], want[0]), "tokens"
        for a, b in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9 * float(b.abs().max()))


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_the_ways_differ(decoded: Any) -> None:
    """What is compared above is not the same few tokens again and again."""
    unsharded = decoded["llama"][0]
    assert len(unsharded["greedy"][:, 7:].unique()) > 6
    for way in ("sample", "top k", "top p", "repetition penalty"):
        assert not torch.equal(unsharded[way], unsharded["greedy"])
    assert unsharded["samples"].shape == (6, 7 + NEW)
    assert len(unsharded["samples"].unique(dim=0)) == 6
    ended = unsharded["end of sequence"]
    assert (ended[0, 10:] == PAD).all(), "row 0 is padded behind its end"
    assert (ended[1, 10:12] != PAD).all(), "while row 1 goes on"
    assert unsharded["stop strings"].shape[1] < 7 + NEW
    assert unsharded["long"].shape == (1, 316)


# What crosses between ranks -------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """The operators of collectives, with the shapes of their inputs, and how many sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.in_place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = str(func).split(".")[:2]
        if (namespace == "_c10d_functional" and name != "wait_tensor") or name == "allreduce_":
            x = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.calls.append((name, tuple(x.shape)))
            self.in_place += name in ("allreduce_", "all_reduce_")
        return func(*args, **(kwargs or {}))


def count_collectives(path: Path) -> tuple[list[tuple[str, tuple[int, ...]]], int]:
    model = load(path)
    with Collectives() as seen:
        model.generate(**prompts(), max_new_tokens=1, do_sample=False)
    return seen.calls, seen.in_place


def test_a_prefill_gathers_the_logits_of_one_position(converted: dict[str, Converted]) -> None:
    """And each sum of the layers takes the memory of the term that this rank has computed."""
    for calls, in_place in run_processes(TP, count_collectives, converted["llama"].out):
        assert [call for call in calls if call[0] == "all_gather_into_tensor"] == [
            ("all_gather_into_tensor", (1, 2, 1, VOCAB // TP))
        ]
        sums = Counter(shape for name, shape in calls if name.replace("_", "") == "allreduce")
        assert sums == {(2, 7, HIDDEN): 1 + 2 * LAYERS}
        assert in_place == 1 + 2 * LAYERS


# Streams --------------------------------------------------------------------------------------------


class Collected:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def stream(path: Path, everywhere: bool) -> tuple[Tensor, Tensor, list[int], int]:
    model = load(path)
    rank = int(os.environ["RANK"])
    inputs = {name: value[:1] for name, value in prompts().items()}
    streamer = Collected()
    options: dict[str, Any] = {"streamer": streamer} if everywhere or rank == 0 else {}
    first = model.generate(**inputs, **_GREEDY, **options)
    ids = inputs["input_ids"]
    by_position = (None,) * 6 + ((streamer,) if options else (None,))
    second = model.generate(ids, *by_position, **_GREEDY)
    return first, second, streamer.tokens, streamer.ended


@pytest.mark.parametrize("everywhere", [True, False])
def test_every_streamer_gets_the_tokens(converted: dict[str, Converted], everywhere: bool) -> None:
    first, second = run_processes(TP, stream, converted["llama"].out, everywhere)
    inputs = {name: value[:1] for name, value in prompts().items()}
    want = converted["llama"].unsharded.generate(**inputs, **_GREEDY)
    for result in (first, second):
        assert torch.equal(result[0], want)
        assert torch.equal(result[1], want)
    assert first[2] == 2 * want[0].tolist()
    assert first[3] == 2
    assert second[2:] == (first[2:] if everywhere else ([], 0))


# What only rank 0 decides -----------------------------------------------------------------------------


class EndsAt(StoppingCriteria):
    """Stops at a length, which differs between the ranks; remembers that it was asked."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.calls += 1
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class Slow(transformers.LogitsProcessor):
    """Takes its time on one rank."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        time.sleep(0.2 * int(os.environ["RANK"]))
        return scores


def stop_by_rank_0(path: Path) -> dict[str, Any]:
    model = load(path)
    rank = int(os.environ["RANK"])
    criterion = EndsAt(12 if rank == 0 else 9)
    return {
        "criterion": model.generate(
            **prompts(), **_GREEDY, stopping_criteria=StoppingCriteriaList([criterion])
        ),
        "asked": criterion.calls,
        "plain list": model.generate(**prompts(), **_GREEDY, stopping_criteria=[EndsAt(14 - rank)]),
        "beams": model.generate(**prompts(), **_GREEDY, num_beams=2, stopping_criteria=[EndsAt(13 + rank)]),
        "time": model.generate(
            **prompts(), max_new_tokens=100, do_sample=False, max_time=1.0, logits_processor=[Slow()]
        ),
    }


def test_rank_0_decides_when_it_is_over(converted: dict[str, Converted]) -> None:
    first, second = run_processes(TP, stop_by_rank_0, converted["llama"].out)
    for name in ("criterion", "plain list", "beams", "time"):
        assert torch.equal(first[name], second[name])
    assert first["criterion"].shape == (2, 12)
    assert (first["asked"], second["asked"]) == (5, 0)
    assert first["plain list"].shape == (2, 14)
    assert first["beams"].shape[1] == 13
    assert 8 < first["time"].shape[1] < 7 + 20


# Calls that are refused -----------------------------------------------------------------------------


def differ(path: Path, what: str) -> None:
    model = load(path)
    rank = int(os.environ["RANK"])
    inputs: dict[str, Any] = {**prompts(), **_GREEDY}
    if what == "input_ids":
        inputs["input_ids"] = inputs["input_ids"] + rank
    elif what == "attention_mask":
        inputs["attention_mask"] = inputs["attention_mask"][:, : 7 - rank]
    elif what == "max_new_tokens":
        inputs["max_new_tokens"] = 4 + rank
    elif what == "generation_config":
        inputs["generation_config"] = GenerationConfig(top_k=4 + rank)
    elif what == "num_beams" and rank:
        inputs["num_beams"] = 2
    elif what == "inputs":
        model.generate(inputs.pop("input_ids") + rank, **inputs)
    elif what == "stop_strings":
        inputs |= {"stop_strings": ["a", "b" * (1 + rank)], "tokenizer": words()}
    model.generate(**inputs)


DIFFERENT = (
    "input_ids",
    "attention_mask",
    "max_new_tokens",
    "generation_config",
    "num_beams",
    "inputs",
    "stop_strings",
)


def test_ranks_that_are_called_differently(converted: dict[str, Converted]) -> None:
    """All of them say so, and which argument it is."""
    calls = [(converted["llama"].out, what) for what in DIFFERENT]
    for what, errors in zip(DIFFERENT, run_errors_of_each(TP, differ, calls), strict=True):
        for error in errors:
            assert isinstance(error, LaunchError)
            assert f"generate was called with another {what} on rank 1 (" in str(error)
            assert "from_rank_0" in str(error)


def generate_on_rank_0_alone(path: Path) -> float:
    model = shardconv_runtime.load(path, communication=Communication(timeout_s=3))
    begin, gave_up = time.monotonic(), path / "rank 0 gave up"
    if os.environ["RANK"] == "0":
        with pytest.raises(LaunchError, match="another rank did not answer within 3 s"):
            model.generate(**prompts(), **_GREEDY)
        gave_up.touch()
    else:
        while not gave_up.exists():
            time.sleep(0.05)
    return time.monotonic() - begin


def test_a_rank_that_does_not_call_generate(converted: dict[str, Converted]) -> None:
    first, _ = run_processes(TP, generate_on_rank_0_alone, converted["llama"].out)
    assert 2 < first < 20


def generate_from_shards(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        load(path, gather_logits=False).generate(**prompts())
    return str(caught.value)


def test_generate_needs_full_logits(converted: dict[str, Converted]) -> None:
    for message in run_processes(TP, generate_from_shards, converted["llama"].out):
        assert "gather_logits=True" in message
