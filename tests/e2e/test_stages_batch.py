"""Many requests on the stages of a pipeline: the tokens of one after another, on every rank, or an error."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from batches import NEW, SOON_S, after, batch, config, fail, kill, one_by_one, pages, prompts
from checkpoints import HIDDEN, save_causal
from distributed import run_outcomes, run_processes
from shardconv_runtime import Communication, LaunchError, PlanError, ShardconvError
from shardconv_runtime.format import plan_json
from transformers import GenerationConfig

import shardconv

PP = 2
MANY = 24
KV_BYTES = 2 * (HIDDEN // 8) * 4
"""Of one head's key and value of a token."""


def staged(root: Path, model_type: str, tp: int, **changes: Any) -> tuple[Path, Path]:
    """A model, and a plan of it in two stages."""
    source, path = save_causal(model_type, root / model_type, **changes), root / "staged.json"
    plan_json.write(shardconv.plan(source, tp, pp=PP, dtype="float32", check=False), path)
    return source, path


def unsharded(source: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Five layers, of which the stages have three and two, or two and three."""
    return staged(tmp_path_factory.mktemp("stages"), "llama", 1, num_hidden_layers=5)


def load(source: Path, plan: Path) -> Any:
    """A hang would be an error after a minute."""
    return shardconv_runtime.load(source, plan=plan, communication=Communication(timeout_s=60))


def in_every_way(source: Path, plan: Path) -> dict[str, Any]:
    """Batches in all that may differ, one after another, and what is seen of them."""
    model = load(source, plan)
    found: dict[str, Any] = {"num_layers": of_own_layers(model)}
    for number in (None, 1, 2, 3):
        found[f"{number} microbatches"] = batch(model, prompts(), num_microbatches=number)
    found["small cache"] = batch(model, prompts(), continuous_batching_config=pages(num_blocks=6))
    found["kept"] = kept(model)
    several = config(num_return_sequences=3, do_sample=True, top_k=1)
    found["forked"] = batch(model, prompts(), generation_config=several)
    torch.manual_seed(11 + int(os.environ["RANK"]))
    sampling = config(do_sample=True, temperature=1.3, eos_token_id=-1)
    found["sampled"] = [batch(model, prompts(), generation_config=sampling) for _ in range(2)]
    found["refused"] = refused(model)
    found["streamed"] = streamed(model)
    found["alone"] = after(model, prompts()[1])
    return found


def of_own_layers(model: Any) -> int:
    """How many layers the cache of this stage is made for."""
    model_config = GenerationConfig(max_new_tokens=NEW, eos_token_id=-1)
    with model.continuous_batching_context_manager(
        model_config, continuous_batching_config=pages()
    ) as manager:
        cache = manager.batch_processor.cache
        if not hasattr(cache, "cache_tensor"):
            return len(cache.key_cache)  # in earlier versions
        of_layer = cache.num_blocks * 16 * model.config.num_key_value_heads * KV_BYTES
        return round((cache.cache_tensor.nbytes - 2 * cache.bytes_per_sector) / of_layer)


def kept(model: Any) -> list[list[int]]:
    """A manager that is kept goes on with as many microbatches."""
    options: dict[str, Any] = {"persistent_manager": True, "num_microbatches": 2}
    batch(model, prompts(3), **options)
    with pytest.raises(PlanError, match="was kept"):
        batch(model, prompts(2), persistent_manager=True, num_microbatches=1)
    tokens = batch(model, prompts(), **options)
    model.destroy_cached_continuous_batching_manager()
    return tokens


def refused(model: Any) -> list[str]:
    """The errors of wrong calls, after which others go on."""
    calls = [
        lambda: batch(model, prompts(), num_microbatches=0),
        lambda: batch(model, prompts(), num_microbatches=1 + int(os.environ["RANK"])),
        lambda: batch(model, prompts(), continuous_batching_config=pages(default_compile_level=1)),
        lambda: batch(model, [[3, 4, 5], [7] * 300], continuous_batching_config=pages(num_blocks=4)),
        lambda: batch(model, prompts(), generation_config=config(num_beams=3)),
    ]
    found = []
    for call in calls:
        with pytest.raises(ShardconvError) as error:
            call()
        found.append(str(error.value))
    return found


def streamed(model: Any) -> dict[str, Any]:
    """Requests arrive at rank 0 over time; one is taken back. And the most in flight when one begins."""
    answers = {}
    with model.continuous_batching_context_manager(
        config(), continuous_batching_config=pages(max_requests_per_batch=4), num_microbatches=2
    ) as manager:
        with pytest.raises(LaunchError, match="while its ranks answer requests"):
            model(torch.tensor([[3]]))
        count = model.register_forward_pre_hook(lambda *_: sizes.append(len(manager._flight)))
        sizes: list[int] = []
        if manager.is_tp_driver:
            manager.add_request([5, 6, 7], request_id="taken back", max_new_tokens=60, eos_token_id=-1)
            for index, ids in enumerate(prompts(MANY)):
                manager.add_request(ids, request_id=str(index), streaming=True)
                time.sleep(0.005)
            manager.cancel_request("taken back")
        paused = None
        if hasattr(manager, "pause"):  # of transformers, in later versions
            with manager.pause(), torch.inference_mode():
                paused = model(torch.tensor([[5, 6, 7]])).logits[0, -1]
        if manager.is_tp_driver:
            while len(answers) < MANY:
                answer = manager.get_result(timeout=10)
                assert answer is not None, manager.failure
                if answer.is_finished():
                    answers[answer.request_id] = answer.generated_tokens
    count.remove()
    return {"answers": answers, "most in flight": max(sizes), "paused": paused}


def test_the_tokens_of_one_request_after_another(llama: tuple[Path, Path]) -> None:
    source, plan = llama
    model = unsharded(source)
    want = one_by_one(model, prompts())
    assert len({tuple(tokens) for tokens in want}) > 6, "not the same tokens again and again"
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    first, last = run_processes(PP, in_every_way, source, plan)
    for found in (first, last):
        for way in (*(f"{n} microbatches" for n in (None, 1, 2, 3)), "small cache", "kept"):
            assert found[way] == want, way
        assert found["forked"] == [tokens for tokens in want for _ in range(3)]
        assert found["alone"] == want[1]
        for error, text in zip(
            found["refused"],
            ("at least one group", "another num_micro", "default_compile_level", "does not fit", "num_beams"),
            strict=True,
        ):
            assert text in error
        assert found["streamed"]["most in flight"] >= 1, "a step begins before the one before is over"
        if found["streamed"]["paused"] is not None:
            torch.testing.assert_close(found["streamed"]["paused"], logits, rtol=1e-4, atol=1e-4)
    assert sorted((first["num_layers"], last["num_layers"])) == [2, 3]
    assert first["sampled"] == last["sampled"]
    assert first["sampled"][0] != first["sampled"][1]
    answers = one_by_one(model, prompts(MANY))
    assert first["streamed"]["answers"] == {str(index): tokens for index, tokens in enumerate(answers)}


def batch_on_rank(source: Path, plan: Path) -> list[list[int]]:
    """A batch by default options."""
    return batch(load(source, plan), prompts())


@pytest.mark.parametrize(
    ("model_type", "tp", "changes"),
    [
        ("llama", 2, {"num_key_value_heads": 1}),
        ("gpt2", 1, {}),
        (
            "gemma3_text",
            1,
            {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2},
        ),
    ],
)
def test_ranks_and_kinds_of_layers(
    model_type: str, tp: int, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, plan = staged(tmp_path, model_type, tp, **changes)
    want = one_by_one(unsharded(source), prompts())
    for tokens in run_processes(PP * tp, batch_on_rank, source, plan):
        assert tokens == want


def test_stages_whose_layers_are_of_other_kinds(tmp_path: Path) -> None:
    from shardconv_runtime.inference.paged_model import kinds_of_stages

    full, sliding = "full_attention", "sliding_attention"
    assert kinds_of_stages([[sliding] * 3, [sliding] * 2], 1) == [sliding] * 2
    assert kinds_of_stages([[sliding, sliding, full], [full, full]], 1) == [full, full, sliding, sliding]
    assert kinds_of_stages([[], []], 0) == []


# Ranks that end ---------------------------------------------------------------------------------------


def end(source: Path, plan: Path, action: Callable[[], object], stage: int) -> list[str]:
    """A rank ends at its sixth step; the others' errors, in two calls."""
    model = load(source, plan)
    calls: list[None] = []

    def sixth(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 6 and int(os.environ["RANK"]) == stage:
            action()

    model.register_forward_hook(sixth)
    found = []
    options = config(max_new_tokens=60, eos_token_id=-1)
    for call in (
        lambda: batch(model, prompts(), generation_config=options),
        lambda: model(torch.tensor([[3]])),
    ):
        try:
            call()
        except ShardconvError as error:
            found.append(str(error))
        except ValueError as error:
            found.append(f"own {error}")
    return found


@pytest.mark.parametrize("stage", range(PP))
@pytest.mark.parametrize("action", [kill, fail])
def test_one_rank_ends(llama: tuple[Path, Path], action: Callable[[], object], stage: int) -> None:
    begin = time.monotonic()
    outcomes = run_outcomes(PP, end, *llama, action, stage)
    assert time.monotonic() - begin < SOON_S
    assert outcomes[1 - stage][0] is not None, outcomes[1 - stage][1]
    called, again = outcomes[1 - stage][0]
    assert "another rank ended" in called or f"rank {stage} failed" in called
    assert "failed while its stages answered requests" in again
    if action is fail:
        assert outcomes[stage][0] == ["own only here", again]
