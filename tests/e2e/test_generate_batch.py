"""Many requests at once in real processes: the tokens of one after another, on every rank, or an error."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from batches import SOON_S, after, batch, config, fail, kill, one_by_one, pages, prompts
from checkpoints import VOCAB, save_causal
from distributed import run_errors, run_outcomes, run_processes
from shardconv_runtime import Communication, LaunchError, PlanError, ShardconvError
from shardconv_runtime.inference import continuous_batching
from shardconv_runtime.inference.batching_manager import PAGE_SIZE, RankBatchingManager
from torch import Tensor
from transformers.generation.continuous_batching import cache
from warm_compiler import warm_up

import shardconv

CASES = {
    "even": ("llama", 2, {}),
    "few heads": ("llama", 2, {"num_key_value_heads": 1}),
    "uneven": ("llama", 3, {}),
    "sliding": ("mistral", 2, {}),
    "sliding, few heads": ("mistral", 2, {"num_key_value_heads": 1}),
    "as many heads": ("gpt2", 2, {}),
    "gathered": ("gemma2", 2, {}),
    "states": ("mamba", 2, {}),
}
"""Type, number of ranks and what is changed in the config; 4 key/value heads at 3 ranks are 2, 1 and 1."""


@dataclass(frozen=True)
class Converted:
    """One model: its converted directory, its number of ranks, and the unsharded one."""

    out: Path
    tp: int
    unsharded: Any


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Converted]:
    """A case, converted once."""
    found: dict[str, Converted] = {}

    def convert(case: str) -> Converted:
        if case not in found:
            name, tp, changes = CASES[case]
            root = tmp_path_factory.mktemp("batch")
            source = root / "source"
            save_mamba(source) if name == "mamba" else save_causal(name, source, **changes)
            shardconv.convert(source, root / "out", tp=tp, check=False)
            auto = transformers.AutoModelForCausalLM
            found[case] = Converted(
                root / "out", tp, auto.from_pretrained(source, dtype=torch.float64).eval()
            )
        return found[case]

    return convert


def save_mamba(path: Path) -> Path:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=4)
    transformers.MambaForCausalLM(config).to(torch.float64).save_pretrained(path)
    return path


def load(path: Path, **options: Any) -> Any:
    """A hang would be an error after a minute."""
    options.setdefault("communication", Communication(timeout_s=60))
    return shardconv_runtime.load(path, **options)


def batches_on_rank(path: Path, attentions: Sequence[str]) -> list[tuple[list[list[int]], list[int], str]]:
    """With each implementation of attention, and an ordinary call after each batch."""
    model, found = load(path), []
    for attention in attentions:
        model.set_attn_implementation(attention)
        tokens, alone = batch(model, prompts()), after(model, prompts()[1])
        found.append((tokens, alone, model.config._attn_implementation))
    return found


@pytest.mark.parametrize(
    ("case", "attentions"),
    [
        ("even", ("sdpa", "eager")),
        ("sliding, few heads", ("sdpa",)),
        ("as many heads", ("sdpa",)),
        pytest.param("sliding", ("sdpa",), marks=pytest.mark.slow),
        pytest.param("few heads", ("sdpa",), marks=pytest.mark.slow),
        pytest.param("uneven", ("eager",), marks=pytest.mark.slow),
    ],
)
def test_the_tokens_of_one_request_after_another(
    converted: Any, case: str, attentions: tuple[str, ...]
) -> None:
    model = converted(case)
    want = one_by_one(model.unsharded, prompts())
    assert len({tuple(tokens) for tokens in want}) > 5, "not the same tokens again and again"
    for rank in run_processes(model.tp, batches_on_rank, model.out, attentions):
        for (tokens, alone, implementation), attention in zip(rank, attentions, strict=True):
            assert tokens == want
            assert alone == want[1]
            assert implementation == attention, "as it was before"


def batches_in_graphs(path: Path) -> tuple[list[list[int]], int]:
    """Tokens where the caller has transformers compile the steps, and the number of graphs."""
    graphs: list[Any] = []

    def captured(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    options = {"mode": "default", "fullgraph": False, "dynamic": True}  # pages are read between the graphs
    compiling = transformers.CompileConfig(backend=captured, **options)
    model = load(path, compile=True)
    return batch(model, prompts(), continuous_batching_config=pages(varlen_compile_config=compiling)), len(
        graphs
    )


def test_steps_that_the_caller_compiles(converted: Any) -> None:
    model = converted("even")
    want = one_by_one(model.unsharded, prompts())
    warm_up()
    for tokens, num_graphs in run_processes(model.tp, batches_in_graphs, model.out):
        assert tokens == want
        assert num_graphs > 2


def compiled_batches(path: Path) -> list[list[int]]:
    """Twice: an ordinary call would take its time to compile."""
    model = load(path, compile=True)
    first = batch(model, prompts())
    assert batch(model, prompts()) == first
    return first


def test_a_compiled_model(converted: Any) -> None:
    model = converted("even")
    want = one_by_one(model.unsharded, prompts())
    assert run_processes(2, compiled_batches, model.out) == [want, want]


def keep(path: Path) -> tuple[Any, Any]:
    """A manager is kept from call to call, as long as these ask for the same."""
    model = load(path)
    first, second = (batch(model, prompts(n), persistent_manager=True) for n in (4, 6))
    with pytest.raises(PlanError, match="was kept"):
        batch(model, prompts(2), generation_config=config(max_new_tokens=2))
    model.destroy_cached_continuous_batching_manager()
    assert [len(tokens) for tokens in batch(model, prompts(2), max_new_tokens=2)] == [2, 2]
    model.set_attn_implementation("paged|eager")
    assert batch(model, prompts(2)) == first[:2]
    return first, second


def test_a_manager_that_is_kept(converted: Any) -> None:
    model = converted("even")
    want = one_by_one(model.unsharded, prompts(6))
    for first, second in run_processes(2, keep, model.out):
        assert first == one_by_one(model.unsharded, prompts(4))
        assert second == want


def serve(path: Path, number: int) -> dict[int, list[list[int]]]:
    """Requests arrive at rank 0 over time, each of them streamed."""
    model = load(path)
    inputs = prompts(number)
    streamed: dict[int, list[list[int]]] = {}
    with model.continuous_batching_context_manager(
        config(), continuous_batching_config=pages(max_requests_per_batch=8)
    ) as manager:
        if not manager.is_tp_driver:
            return {-1: [[int(manager.add_request([3]) is None)]]}
        feeding = threading.Thread(target=feed, args=(manager, inputs))
        feeding.start()
        finished = 0
        while finished < number:
            answer = manager.get_result(timeout=10)
            assert answer is not None, manager.failure
            streamed.setdefault(int(answer.request_id), []).append(answer.generated_tokens)
            finished += answer.is_finished()
        feeding.join()
    return streamed


def feed(manager: Any, inputs: list[list[int]]) -> None:
    for index, ids in enumerate(inputs):
        manager.add_request(ids, request_id=str(index), streaming=True)
        time.sleep(0.01)


def test_requests_that_arrive_over_time(converted: Any) -> None:
    model, number = converted("even"), 24
    first, second = run_processes(2, serve, model.out, number)
    want = one_by_one(model.unsharded, prompts(number))
    assert second == {-1: [[1]]}, "requests are those of rank 0"
    for index in range(number):
        assert first[index][-1] == want[index]
        assert [len(tokens) for tokens in first[index]] == list(range(1, len(want[index]) + 1))


def sample(path: Path, seeds: tuple[int | None, ...]) -> list[list[list[int]]]:
    """The ranks start from different random states."""
    model = load(path)
    torch.manual_seed(11 + int(os.environ["RANK"]))
    sampling = config(do_sample=True, temperature=1.3, eos_token_id=-1)
    return [
        batch(model, prompts(), generation_config=sampling, continuous_batching_config=pages(seed=seed))
        for seed in seeds
    ]


def test_all_ranks_draw_the_same_tokens(converted: Any) -> None:
    first, second = run_processes(2, sample, converted("even").out, (None, None, 5, 5))
    assert first == second
    assert first[0] != first[1]
    assert first[2] == first[3]


def draw_on_rank_0(path: Path) -> None:
    """Code beside the loop draws from torch's default generator, on one rank."""
    model = load(path)
    sampling = config(do_sample=True, eos_token_id=-1, max_new_tokens=200)
    with model.continuous_batching_context_manager(sampling, continuous_batching_config=pages()) as manager:
        if manager.is_tp_driver:
            manager.add_request([5, 6, 7], streaming=True)
            assert manager.get_result(timeout=10) is not None
            torch.rand(3)
            while manager.is_running():
                manager.get_result(timeout=0.1)


def test_random_states_that_part_are_an_error(converted: Any) -> None:
    for error in run_errors(2, draw_on_rank_0, converted("even").out):
        assert isinstance(error, LaunchError)
        assert "random states differ" in str(error)


def batches_of_their_size(path: Path, fails_on: str) -> tuple[list[list[int]], list[int]]:
    """Tokens of a batch whose cache has no given size, and the number of blocks of each cache that was made.

    On one of the ranks, the memory has no room for a cache of the size that the prompts need.
    """
    model, sizes = load(path), []
    make = RankBatchingManager._create_batch_processor
    check = cache.PagedAttentionMemoryHandler._check_footprint

    def noted(self: Any) -> Any:
        made = make(self)
        sizes.append(made.cache.num_blocks)
        return made

    def checked(self: Any, *given: int) -> Any:
        if self.cb_config.num_blocks is not None and os.environ["RANK"] == fails_on:
            raise MemoryError("no room")
        return check(self, *given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RankBatchingManager, "_create_batch_processor", noted)
        patched.setattr(cache.PagedAttentionMemoryHandler, "_check_footprint", checked)
        return batch(
            model,
            prompts(),
            continuous_batching_config=pages(num_blocks=None, max_memory_percent=SMALL_SHARE),
        ), sizes


SMALL_SHARE = 0.01
"""Share of the memory: some thousand times of what is needed."""


@pytest.mark.skipif(PAGE_SIZE != "page_size", reason="caches of earlier versions count other blocks")
@pytest.mark.parametrize("fails_on", ["", "1"])
def test_a_cache_is_as_large_as_the_prompts_need(converted: Any, fails_on: str) -> None:
    model = converted("even")
    want = one_by_one(model.unsharded, prompts())
    for tokens, sizes in run_processes(model.tp, batches_of_their_size, model.out, fails_on):
        assert tokens == want
        assert (sizes[0] > 1000) is bool(fails_on)
        assert len(prompts()) < sizes[0]


# Requests and calls that fail -------------------------------------------------------------------------


def refuse_all(paths: Mapping[str, Path]) -> dict[str, Exception]:
    """What each call raises; ranks that a call left waiting would not come to the next one."""
    found = {}
    for what, path in paths.items():
        try:
            refuse(path, what)
        except Exception as error:
            found[what] = error
    return found


def refuse(path: Path, what: str) -> None:
    model = load(path, gather_logits=False if what == "shards" else None)
    if what == "too long":
        batch(model, [[3, 4, 5], [7] * 300], continuous_batching_config=pages(num_blocks=4))
    elif what == "other prompts":
        batch(model, [[3, 4, 5 + int(os.environ["RANK"])]])
    elif what == "other config":
        batch(model, [[3, 4]], generation_config=config(temperature=0.5 + int(os.environ["RANK"])))
    elif what == "empty":
        batch(model, [[3], []])
    elif what == "argument":
        batch(model, [[3]], do_sample=True)
    elif what == "penalty":
        batch(model, [[3]], generation_config=config(repetition_penalty=1.5))
    elif what == "beams":
        batch(model, [[3]], generation_config=config(num_beams=3))
    elif what == "graphs":
        batch(model, [[3]], continuous_batching_config=pages(use_cuda_graph=(False, True)))
    elif what == "ahead":
        batch(model, [[3]], continuous_batching_config=pages(use_async_batching=True))
    elif what == "compiled graphs":
        compiling = transformers.CompileConfig(mode="reduce-overhead")
        batch(model, [[3]], continuous_batching_config=pages(varlen_compile_config=compiling))
    elif what == "pages":
        batch(model, [[3]], continuous_batching_config=pages(**{PAGE_SIZE: 2}))
    else:
        batch(model, [[3, 4, 5, 6, 7, 8]])


REFUSED = {
    "too long": ("even", ShardconvError, "a request for 300 tokens and 8 new ones does not fit"),
    "other prompts": ("even", LaunchError, "another inputs on rank 1"),
    "other config": ("even", LaunchError, "another generation_config on rank 1"),
    "empty": ("even", ShardconvError, "a prompt without tokens"),
    "argument": ("even", PlanError, "takes no do_sample"),
    "penalty": ("even", PlanError, "no RepetitionPenaltyLogitsProcessor"),
    "beams": ("even", PlanError, "no num_beams"),
    "graphs": ("even", PlanError, "use_cuda_graph asks for CUDA graphs"),
    "ahead": ("even", PlanError, "use_async_batching asks for CUDA graphs"),
    "compiled graphs": ("even", PlanError, "varlen_compile_config asks for CUDA graphs"),
    "pages": ("even", PlanError, "must be at least 4"),
    "shards": ("even", PlanError, "gather_logits=True"),
    "cap": ("gathered", PlanError, "logits from pages differ"),
    "state": ("states", PlanError, "MambaForCausalLM does not support"),
}


def test_what_fails_is_an_error_on_every_rank(converted: Any) -> None:
    paths = {what: converted(case).out for what, (case, _, _) in REFUSED.items()}
    for found in run_processes(2, refuse_all, paths):
        for what, (_, kind, message) in REFUSED.items():
            assert isinstance(found[what], kind), (what, found.get(what))
            assert message in str(found[what])


def test_several_ranks_record_nothing() -> None:
    """Where transformers would, without being asked: on GPUs, if attention needs no mask."""
    made = transformers.ContinuousBatchingConfig()
    assert made.use_cuda_graph is None
    continuous_batching._record_nothing(made, transformers.GenerationConfig())
    assert (made.use_cuda_graph, made.use_async_batching) == (False, False)


def call_meanwhile(path: Path) -> list[str]:
    model = load(path)
    found = []
    with model.continuous_batching_context_manager(config(), continuous_batching_config=pages()) as manager:
        for call in (lambda: model(torch.tensor([[3]])), lambda: model.generate_batch([[3]])):
            with pytest.raises(LaunchError) as error:
                call()
            found.append(str(error.value))
        if manager.is_tp_driver:
            with pytest.raises(ShardconvError, match="does not fit"):
                manager.add_request([3] * 500)
            failed = manager.add_request([3], unheard_of=1.0)
            good = manager.add_request(prompts()[1])
            answers = {a.request_id: a for a in (manager.get_result(timeout=10) for _ in range(2))}
            found += [str(answers[failed].error), str(answers[good].generated_tokens)]
    assert after(model, prompts()[1])
    return found


def test_a_request_that_fails_leaves_the_others(converted: Any) -> None:
    model = converted("even")
    first, second = run_processes(2, call_meanwhile, model.out)
    for called, again in (first[:2], second):
        assert "while its ranks answer requests" in called
        assert "another manager runs on these ranks" in again
    assert "unheard_of" in first[2]
    assert first[3] == str(one_by_one(model.unsharded, prompts()[1:2])[0])


# Ranks that end ---------------------------------------------------------------------------------------


class Fatal(transformers.LogitsProcessor):
    """Does something on rank 1 at the fourth step; its kind is known to work in batches."""

    supports_continuous_batching = True

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._steps = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._steps += 1
        if self._steps == 4 and os.environ["RANK"] == "1":
            self._action()
        return scores


def end(path: Path, action: Callable[[], object], way: str) -> None:
    model = load(path)
    processors = transformers.LogitsProcessorList([Fatal(action)])
    model._get_logits_processor = lambda *args, **kwargs: processors
    if way == "generate_batch":
        batch(model, prompts(), generation_config=config(max_new_tokens=60, eos_token_id=-1))
        return
    with model.continuous_batching_context_manager(
        config(max_new_tokens=60, eos_token_id=-1), continuous_batching_config=pages()
    ) as manager:
        if manager.is_tp_driver:
            manager.add_request([3, 4, 5])
            while manager.is_running():
                time.sleep(0.1)


@pytest.mark.parametrize("way", ["generate_batch", "manager"])
@pytest.mark.parametrize("action", [kill, fail])
def test_one_rank_ends(converted: Any, action: Callable[[], object], way: str) -> None:
    begin = time.monotonic()
    first, second = run_outcomes(2, end, converted("even").out, action, way)
    assert time.monotonic() - begin < SOON_S
    assert isinstance(first[2], LaunchError), first[1]
    if action is fail:
        assert "only here" in str(second[2])
