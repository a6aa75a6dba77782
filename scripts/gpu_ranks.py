"""The section ``gpus`` of ``gpu_check``: ranks over NCCL, one for each GPU, each beside the unsharded model.

Run as a script, it is one rank: gpu_ranks.py CASE --device cuda --scratch DIRECTORY --models SOURCE OUT.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from gpu_same import (
    Line,
    can_compile,
    line,
    load_rank,
    run_graphs_as_captured,
    same,
    same_in_batches,
    same_in_bfloat16,
    same_loss,
    tokens,
)
from gpu_section import (
    MIDDLE,
    SMALL,
    TINY,
    Section,
    free_port,
    greedy,
    rank_result,
    rank_variables,
    start_rank,
)
from shardconv_runtime.inference.generation import DECODER
from synthetic import Shape, step_bytes
from torch import Tensor

FEW = Shape(hidden=256, intermediate=512, heads=8, kv_heads=2, vocab=1000, layers=4)
LENGTHS = (5, 40, 17, 64, 9, 33)
"""Of the prompts of repeated calls, in new tokens too."""
ROUNDS = 6
"""Of repeated calls; memory must not grow after the second one."""

Check = Callable[[Section, Path, Path], list[Line]]


@dataclass(frozen=True)
class Case:
    """A model, how it is converted, and what its ranks check."""

    source: Callable[[Section], Path]
    check: Check
    options: tuple[str, ...] = field(default=())


def gpus(section: Section) -> None:
    """As many ranks as there are GPUs."""
    if section.is_cuda:
        _tell(
            section, "one GPU for two", ONE_GPU, 2, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": _first_gpu()}
        )
    count = torch.cuda.device_count() if section.is_cuda else 2
    if count < 2:
        section.skip("ranks over NCCL", "there is one GPU")
        return
    for name, case in CASES.items():
        _tell(section, name, case, count)


def _tell(section: Section, name: str, case: Case, count: int, env: Mapping[str, str] | None = None) -> None:
    with section.attempt(f"{name}, {count} ranks"):
        source = case.source(section)
        try:
            converted = section.converted(source, count, *case.options)
        except RuntimeError as error:
            if case.options and "could not be proven to be a sum over its experts" in str(error):
                section.skip(f"{name}, {count} ranks", str(error))  # by this version of transformers
                return
            raise
        for line in _joined(_run(section, name, count, source, converted, env or {})):
            section.tell(f"{name}, {count} ranks: {line.pop('what')}", **line)


def _first_gpu() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _run(
    section: Section, name: str, count: int, source: Path, converted: Path, env: Mapping[str, str]
) -> list[list[Line]]:
    """The lines of each rank."""
    command = [sys.executable, __file__, name, "--device", section.device.type]
    command += ["--scratch", str(section.scratch), "--models", str(source), str(converted)]
    command += ["--small"] * section.small
    port = free_port()
    ranks = [
        start_rank(command, {**rank_variables(rank, count, port), "LOCAL_RANK": str(rank), **env})
        for rank in range(count)
    ]
    return [rank_result(rank)["lines"] for rank in ranks]


def _joined(ranks: list[list[Line]]) -> list[Line]:
    """What all ranks say: the slowest rate, the largest of other numbers."""
    out = []
    for lines in zip(*ranks, strict=True):
        worst = min if lines[0].get("unit") == "tokens/s" else max
        numbers = [line["number"] for line in lines if line.get("number") is not None]
        joined = {**lines[0], "ok": all(line.get("ok", True) for line in lines)}
        out.append({**joined, "number": worst(numbers)} if numbers else joined)
    return out


# -------------------------------------------------------------------------------------- models of cases


def _small(section: Section) -> Path:
    return section.checkpoint("small", SMALL, torch.float32)


def _few(section: Section) -> Path:
    return section.checkpoint("few", FEW, torch.float32)


def _middle(section: Section) -> Path:
    return section.checkpoint("middle", TINY if section.small else MIDDLE, torch.bfloat16)


def _experts(section: Section, dtype: torch.dtype = torch.float32) -> Path:
    config = transformers.Qwen3MoeConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, moe_intermediate_size=192, num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip
    path = section.scratch / f"experts-{str(dtype).removeprefix('torch.')}"
    if not path.exists():
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=dtype)
        model.save_pretrained(path)
    return path


def _half_experts(section: Section) -> Path:
    return _experts(section, torch.bfloat16)


# ------------------------------------------------------------------------------------------ on each rank


def _repeated(section: Section, source: Path, converted: Path) -> list[Line]:
    """Calls of many lengths, with the device's memory after each round."""
    lines: list[Line] = []
    for label, options in (("eager", {}), ("compiled", {"compile": True})):
        if options and not can_compile(section):
            continue
        model = load_rank(section, converted, **options)
        reserved = []
        for _ in range(2 if section.small else ROUNDS):
            for length in LENGTHS[: 2 if section.small else None]:
                ids = section.prompt(length, model.config.vocab_size)
                tokens(model, ids, max_new_tokens=length, min_new_tokens=length)
            reserved.append(torch.cuda.memory_reserved() if section.is_cuda else 0)
        growth = reserved[-1] - reserved[1]
        what = f"memory that repeated calls of generate add, {label}"
        lines.append(line(what, growth / 1e6, "MB", ok=growth <= 0))
        del model
        _free(section)
    return lines


def _speed(section: Section, source: Path, converted: Path) -> list[Line]:
    """Tokens per second of ``generate``, beside transformers' tensor parallelism and the roofline."""
    ways: dict[str, dict[str, Any]] = {"eager": {}, "symmetric sums": {"all_reduce": "symmetric"}}
    if can_compile(section):
        graphs = {"CUDA graphs": {"compile": True}}
        ways |= graphs | {"CUDA graphs, symmetric sums": {"compile": True, "all_reduce": "symmetric"}}
    if not section.is_cuda:
        ways = {"eager": {}}
    model = load_rank(section, converted)
    length = 64 if section.small else 512
    roof = section.bandwidth() / step_bytes(model, length)
    lines = [line("roofline of decode", roof, "tokens/s")]
    del model
    _free(section)
    theirs = _rate(section, _transformers_parallel(section, source))
    for label, options in ways.items():
        rate = _rate(section, load_rank(section, converted, **options))
        lines.append(line(label, rate, "tokens/s", ratio=rate / roof, of="the roofline"))
        lines.append(
            line(f"{label}, beside tp_plan", rate, "tokens/s", ratio=rate / theirs, of="transformers'")
        )
        _free(section)
    lines.append(line('transformers, tp_plan="auto"', theirs, "tokens/s"))
    return lines


def _transformers_parallel(section: Section, source: Path) -> Any:
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_plan="auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto", distributed_config=config)
    return model.requires_grad_(False).eval()


def _rate(section: Section, model: Any) -> float:
    """Tokens per second of a long answer to a short prompt."""
    ids = section.prompt(16, model.config.vocab_size)
    length = 8 if section.small else 256
    fixed = {"max_new_tokens": length, "min_new_tokens": length}
    tokens(model, ids, **fixed)
    section.synchronize()
    begin = time.perf_counter()
    tokens(model, ids, **fixed)
    section.synchronize()
    return length / (time.perf_counter() - begin)


def _shared(section: Section, source: Path, converted: Path) -> list[Line]:
    """Ranks of one GPU are refused over NCCL."""
    try:
        load_rank(section, converted)
    except shardconv_runtime.LaunchError as error:
        return [{"what": "they are refused", "ok": "use the same GPU" in str(error), "why": str(error)}]
    return [{"what": "they are refused", "ok": False}]


class _FailsAtPut:
    """A streamer that raises at its sixth call; rank 0 alone has it."""

    def __init__(self) -> None:
        self._num_puts = 0

    def put(self, value: Tensor) -> None:
        """The prompt, then tokens."""
        self._num_puts += 1
        if self._num_puts == 6:
            raise ArithmeticError("this rank fails")

    def end(self) -> None:
        """No more."""


class _Fails(transformers.LogitsProcessor):
    """Raises before the sixth token, on one rank."""

    def __init__(self) -> None:
        self._step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._step += 1
        if self._step == 6 and dist.get_rank() == dist.get_world_size() - 1:
            raise ArithmeticError("this rank fails")
        return scores


def _failing(section: Section, source: Path, converted: Path) -> list[Line]:
    """A streamer fails while all decode, from CUDA graphs if there are any: all raise."""
    model = load_rank(section, converted, compile=can_compile(section), timeout_s=30)
    ids = section.prompt(24, model.config.vocab_size)
    greedy(model, ids)  # the compiler's time counts
    lines = []
    if can_compile(section):
        recordings = vars(model)[DECODER].num_recordings
        lines.append({"what": "the steps are recorded", "ok": recordings > 0})
    return [*lines, _all_raise(model, ids, streamer=_FailsAtPut() if dist.get_rank() == 0 else None)]


def _failing_eager(section: Section, source: Path, converted: Path) -> list[Line]:
    """A processor fails in transformers' own loop: all raise."""
    model = load_rank(section, converted, timeout_s=30)
    ids = section.prompt(24, model.config.vocab_size)
    return [_all_raise(model, ids, logits_processor=[_Fails()])]


def _all_raise(model: Any, ids: Tensor, **options: Any) -> Line:
    begin, raised = time.perf_counter(), ""
    try:
        tokens(model, ids, **options)
    except (shardconv_runtime.LaunchError, ArithmeticError) as error:
        raised = str(error)
    return line("they raise", time.perf_counter() - begin, "s", ok=bool(raised), why=raised)


def _free(section: Section) -> None:
    gc.collect()
    torch._dynamo.reset()
    section.free()


CASES = {
    "dense": Case(_small, same),
    "several mesh axes": Case(_few, same),
    "experts": Case(_experts, same),
    "whole experts": Case(_experts, same, ("--experts", "ep")),
    "experts, bfloat16": Case(_half_experts, same_in_bfloat16),
    "whole experts, bfloat16": Case(_half_experts, same_in_bfloat16, ("--experts", "ep")),
    "loss": Case(_small, same_loss),
    "many requests": Case(_small, same_in_batches),
    "repeated calls": Case(_small, _repeated),
    "speed": Case(_middle, _speed),
    "a rank fails": Case(_small, _failing),
    "a rank fails, eager": Case(_small, _failing_eager),
}
ONE_GPU = Case(_small, _shared)


def main() -> None:
    """One rank: prints its lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--models", type=Path, nargs=2, required=True)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    section = Section("gpus", options.device, options.small, options.scratch)
    if section.is_cuda:
        section.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(section.device)
    else:
        run_graphs_as_captured()
    try:
        with torch.no_grad():
            case = CASES.get(options.case, ONE_GPU)
            result: Line = {"lines": case.check(section, *options.models)}
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # the groups may wait for a rank that has failed


if __name__ == "__main__":
    main()
