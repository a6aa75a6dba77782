"""What one process of ``serving.py`` measures; rank 0 writes a JSON file.

serving_rank.py CONVERTED SOURCE RESULT OPTIONS

The place among the other ranks comes from the environment that torchrun sets.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import inference_rank
import torch
import torch.distributed as dist
import transformers
from shardconv_runtime.inference.batching_manager import PAGE_SIZE
from transformers import ContinuousBatchingConfig, GenerationConfig

PAGE_TOKENS = 32


@dataclass(frozen=True)
class Arrival:
    """A request, and when it arrives."""

    name: str
    prompt: list[int]
    num_new: int
    after_s: float


Answers = dict[str, tuple[list[int], float]]
"""By name of the request: new tokens, and seconds from its arrival to its answer."""


def arrivals(options: argparse.Namespace, vocab: int) -> list[Arrival]:
    """Prompts and answers of different lengths, at random times: the same on all ranks."""
    generator = torch.Generator().manual_seed(7)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    gaps = -torch.rand(options.requests, generator=generator, dtype=torch.float64).log() * options.gap
    times = (gaps.cumsum(0) - gaps[0]).tolist()
    return [
        Arrival(
            str(index),
            torch.randint(3, vocab, (draw(8, options.prompt),), generator=generator).tolist(),
            draw(8, options.tokens),
            times[index],
        )
        for index in range(options.requests)
    ]


def config(num_new: int) -> GenerationConfig:
    """Greedy, without an end."""
    return GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)


def one_by_one(model: Any, requests: list[Arrival]) -> tuple[Answers, float]:
    """``generate`` for each request, when the one before it is done."""
    answers: Answers = {}
    inference_rank.barrier()
    begin = time.perf_counter()
    for request in requests:
        time.sleep(max(0.0, begin + request.after_s - time.perf_counter()))
        ids = torch.tensor([request.prompt])
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config(request.num_new)
        )
        done = time.perf_counter() - begin
        answers[request.name] = tokens[0, ids.shape[1] :].tolist(), done - request.after_s
    return answers, time.perf_counter() - begin


def batched(model: Any, requests: list[Arrival], has_answers: bool) -> tuple[Answers, float]:
    """The manager of continuous batching, fed at rank 0; the clock starts when it runs.

    ``has_answers``: ranks other than 0 get the answers, too, and have to stay until all are there.
    """
    pages = ContinuousBatchingConfig(**{PAGE_SIZE: PAGE_TOKENS}, num_blocks=512, max_batch_tokens=512)
    answers: Answers = {}
    with model.continuous_batching_context_manager(config(1), continuous_batching_config=pages) as manager:
        manager.add_request(requests[0].prompt * 8, request_id="warm-up", max_new_tokens=4)
        if manager.is_tp_driver or has_answers:
            next_answer(manager)
        begin = time.perf_counter()
        if manager.is_tp_driver:
            threading.Thread(target=_feed, args=(manager, requests, begin), daemon=True).start()
        elif not has_answers:
            return {}, 0.0  # at the end of the block, it waits for rank 0
        after = {request.name: request.after_s for request in requests}
        while len(answers) < len(requests):
            name, tokens = next_answer(manager)
            answers[name] = tokens, time.perf_counter() - begin - after[name]
        seconds = time.perf_counter() - begin
    return answers, seconds


def _feed(manager: Any, requests: list[Arrival], begin: float) -> None:
    for request in requests:
        time.sleep(max(0.0, begin + request.after_s - time.perf_counter()))
        manager.add_request(request.prompt, request_id=request.name, max_new_tokens=request.num_new)


def next_answer(manager: Any) -> tuple[str, list[int]]:
    """The name of the next request that is answered, and its new tokens."""
    while True:
        answer = manager.get_result(timeout=1)
        if answer is not None and answer.is_finished():
            if answer.error is not None:
                raise RuntimeError(answer.error)
            return answer.request_id, answer.generated_tokens
        if not manager.is_running():
            raise RuntimeError("the loop has ended")


def measure(converted: Path, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """For each variant: seconds and latencies of each round, or why there are none."""
    import shardconv_runtime

    inference_rank.join()
    ours = shardconv_runtime.load(converted, device="cpu")
    theirs = inference_rank.load_transformers(source, parallel=inference_rank.world_size() > 1)
    requests = arrivals(options, ours.config.vocab_size)
    variants: dict[str, Callable[[], tuple[Answers, float]]] = {
        "batched": lambda: batched(ours, requests, False),
        "one by one": lambda: one_by_one(ours, requests),
        "transformers batched": lambda: batched(theirs, requests, True),
        "transformers one by one": lambda: one_by_one(theirs, requests),
    }
    found: dict[str, Any] = {"tokens": sum(request.num_new for request in requests), "rounds": {}}
    tokens: dict[str, list[list[int]]] = {}
    for number in range(options.rounds):
        for name in sorted(variants, reverse=number % 2 == 1):
            rounds = found["rounds"].setdefault(name, [])
            if isinstance(rounds, str):
                continue
            try:
                answers, seconds = variants[name]()
            except Exception as error:  # on all ranks, or this run ends
                found["rounds"][name] = inference_rank.why(error)
                continue
            rounds.append({"seconds": seconds, "latencies": [s for _, s in answers.values()]})
            if dist.get_rank() == 0:
                tokens[name] = [answers[request.name][0] for request in requests]
                print(f"round {number + 1}, {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    first = tokens.get("one by one", [])  # of rank 0
    found["same"] = {n: sum(a == b for a, b in zip(first, t, strict=True)) for n, t in tokens.items()}
    return found


def run(measured: Callable[[], dict[str, Any]], result: Path) -> None:
    """Measure on every process, which starts the group or finds it started; rank 0 writes what it found."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    found = measured()
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("converted", "source", "result"):
        parser.add_argument(name, type=Path)
    for name in ("requests", "prompt", "tokens", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--gap", type=float, required=True)
    options = parser.parse_args()
    run(lambda: measure(options.converted, options.source, options), options.result)


if __name__ == "__main__":
    main()
