#!/usr/bin/env python3
"""``generate_batch`` of shardconv beside transformers', in the same processes, in turns.

At one rank the model is the demo's SmolLM2-135M-Instruct in float32, beside the unsharded one. At two ranks
the other one has transformers' tensor parallelism, which cannot divide the 3 key/value heads of SmolLM2, so
that a llama of the same size with 4 of them is measured, too. Both answer with continuous batching and the
same settings. Prompts have 8 to 64 random tokens (``--prompt``). With ``--compiled``, steps are compiled
(``default_compile_level=1``); the manager of the first call is kept, so that a step is compiled once.

- *Tokens/s* counts new tokens, from the call to its return.
- *First token* is the median over requests, from the call.
- *Peak* is the resident memory of a call above its start, in the process where it is largest.
- *Same tokens* counts the requests whose tokens are those of transformers' call.
- *Processor* is the processor time of rank 0 for a call, which counts on a machine that does other work, too.
- Calls take turns; the first of each is not timed. Numbers are medians, with the lowest and the highest.

    python benchmarks/batches.py [--sizes 1,16,64] [--tokens 32] [--rounds 5] [--markdown FILE]
    python benchmarks/batches.py --small          to see that everything comes out
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import inference_rank
import torch
import torch.distributed as dist
import transformers
from convert import describe, render, show, spread, versions
from disk import machine
from inference import SAVE
from measured import Phase
from serving_rank import PAGE_SIZE, PAGE_TOKENS, config
from synthetic import DEMO_CHECKPOINT, Shape
from transformers import ContinuousBatchingConfig

OURS, THEIRS = "shardconv", "transformers"
EVEN = Shape(hidden=512, intermediate=1536, heads=8, kv_heads=4, vocab=49152, layers=32)
TIME_LIMIT_S = 1800


def prompts(size: int, longest: int, vocab: int) -> list[list[int]]:
    """Return random token ids, which are the same on all ranks."""
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(longest // 8, longest + 1, (size,), generator=generator).tolist()
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def answer(model: Any, asked: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Call ``generate_batch`` once, and return what was measured and the tokens."""
    pages = ContinuousBatchingConfig(
        **{PAGE_SIZE: PAGE_TOKENS},
        num_blocks=576,
        max_batch_tokens=512,
        default_compile_level=int(options.compiled),
    )
    gc.collect()
    inference_rank.barrier()
    phase, cpu_s = Phase.begin(), time.process_time()
    found = model.generate_batch(
        asked,
        generation_config=config(options.tokens),
        continuous_batching_config=pages,
        record_timestamps=True,
        persistent_manager=True,
    )
    measured, cpu_s = phase.end(), time.process_time() - cpu_s
    answers = list(found.values())
    if len(answers) != len(asked):
        raise RuntimeError(f"{len(answers)} answers to {len(asked)} requests")
    return {
        "seconds": measured["phase_s"],
        "processor": cpu_s,
        "first": statistics.median(each.timestamps[0] - phase.start for each in answers),
        "peak": measured["peak_above"],
        "tokens": [each.generated_tokens for each in answers],
    }


def run_rank(options: argparse.Namespace) -> None:
    """Measure on this rank, and write what was found."""
    import shardconv_runtime

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    inference_rank.join()
    parallel = inference_rank.world_size() > 1
    models = {
        OURS: shardconv_runtime.load(options.converted, device="cpu"),
        THEIRS: inference_rank.load_transformers(options.source, parallel=parallel),
    }
    found: list[dict[str, Any]] = []
    for size in map(int, options.sizes.split(",")):
        asked = prompts(size, options.prompt, models[OURS].config.vocab_size)
        calls: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
        errors: dict[str, str] = {}
        for number in range(options.rounds + 1):  # the first one warms up
            for name in sorted(set(models) - set(errors), reverse=number % 2 == 1):
                try:
                    calls[name].append(answer(models[name], asked, options))
                except Exception as error:  # on all ranks, or this run ends
                    errors[name] = inference_rank.why(error)
                took = errors.get(name) or f"{calls[name][-1]['seconds']:.2f} s"
                inference_rank.tell(f"{size} requests, round {number}, {name}: {took}")
        for name, model in models.items():
            model.destroy_cached_continuous_batching_manager()
            what = {"error": errors[name]} if name in errors else {"calls": calls[name][1:]}
            found.append({"size": size, "name": name, **what})
    (options.result / f"rank-{inference_rank.rank()}.json").write_text(json.dumps(found))
    inference_rank.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def table(model: str, tp: int, ranks: list[list[dict[str, Any]]], num_new: int) -> list[dict[str, str]]:
    """Return a row for each size and variant; ratios are of neighbors in time."""
    rows = []
    for of_ranks in zip(*ranks, strict=True):
        size, name = of_ranks[0]["size"], of_ranks[0]["name"]
        row = {"model": model, "tp": str(tp), "requests": str(size), "answered by": name}
        row |= dict.fromkeys(("tokens/s", "first token, s", "processor, s", "ratio to transformers"), "")
        row |= dict.fromkeys(("peak, MB", "same tokens"), "")
        rows.append(row)
        if error := next((found["error"] for found in of_ranks if "error" in found), None):
            row["tokens/s"] = error
            continue
        calls = of_ranks[0]["calls"]
        row["tokens/s"] = spread([size * num_new / call["seconds"] for call in calls], 1)
        row["first token, s"] = f"{statistics.median(call['first'] for call in calls):.2f}"
        row["processor, s"] = f"{statistics.median(call['processor'] for call in calls):.2f}"
        row["peak, MB"] = f"{max(call['peak'] for found in of_ranks for call in found['calls']) / 1e6:.0f}"
        theirs = next(f for f in ranks[0] if (f["size"], f["name"]) == (size, THEIRS))
        if name == OURS and "calls" in theirs:
            ratios = [a["seconds"] / b["seconds"] for a, b in zip(calls, theirs["calls"], strict=True)]
            row["ratio to transformers"] = spread(ratios, 3)
            tokens = (found[-1]["tokens"] for found in (calls, theirs["calls"]))
            same = [a == b for a, b in zip(*tokens, strict=True)]
            row["same tokens"] = f"{sum(same)} of {size}"
    return rows


def launch(source: Path, tp: int, options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Convert the model and measure in ``tp`` processes; return what each found."""
    converted, result = source.with_name(f"{source.name}-tp{tp}"), source.with_name(f"{source.name}-{tp}")
    result.mkdir()
    convert = [sys.executable, "-m", "shardconv", "convert", source, "--tp", str(tp), converted]
    subprocess.run([*convert, "--no-check", "--quiet"], check=True)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)] if tp > 1 else []
    command = [sys.executable, *ranks, __file__, "--converted", converted, "--source", source]
    for name in ("sizes", "prompt", "tokens", "rounds", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--result", result, *(["--compiled"] if options.compiled else [])]
    env = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(command, check=True, env=env, timeout=TIME_LIMIT_S, stdout=sys.stderr)
    return [json.loads((result / f"rank-{rank}.json").read_text()) for rank in range(tp)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1,16,64", help="requests of a call (default 1,16,64)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a request (default 32)")
    parser.add_argument("--prompt", type=int, default=64, help="most tokens of a prompt (default 64)")
    parser.add_argument("--tps", default="1,2", help="numbers of ranks (default 1,2)")
    parser.add_argument("--rounds", type=int, default=5, help="that are timed (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="of a process (default 1)")
    parser.add_argument("--dtype", default="float32", help="of SmolLM2; the llama is in float32")
    parser.add_argument("--compiled", action="store_true", help="compile the steps")
    parser.add_argument("--small", action="store_true", help="few requests and tokens")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    for name in ("--converted", "--source", "--result"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        options.sizes, options.tokens, options.rounds = "2", 4, 1
    if options.result:
        run_rank(options)
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shardconv-") as scratch:
        root, begin = Path(scratch), time.monotonic()
        subprocess.run([sys.executable, DEMO_CHECKPOINT, root / "bfloat16"], check=True)
        dtype = getattr(torch, options.dtype)
        small = transformers.AutoModelForCausalLM.from_pretrained(root / "bfloat16", dtype=dtype)
        small.save_pretrained(root / "SmolLM2")
        subprocess.run([sys.executable, "-c", SAVE, json.dumps(EVEN.config()), root / "llama"], check=True)
        rows = []
        for model, tp in (("SmolLM2", 1), ("SmolLM2", 2), ("llama", 2)):
            if str(tp) in options.tps.split(","):
                rows += table(model, tp, launch(root / model, tp, options), options.tokens)
        notes = [
            f"{machine(root)}, {versions('torch', 'transformers')}",
            f"SmolLM2-135M-Instruct in {options.dtype}, and a llama of {describe(EVEN)} in float32; "
            f"{options.threads} thread(s) for each rank, prompts of {options.prompt // 8} to "
            f"{options.prompt} tokens, {options.tokens} new ones, {options.rounds} rounds",
            f"load of the machine {load:.1f} before; {time.monotonic() - begin:.0f} s in all",
        ]
    show(render(rows, notes), options.markdown)


if __name__ == "__main__":
    main()
