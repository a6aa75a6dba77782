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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from gpu_section import (
    MIDDLE,
    NEW_TOKENS,
    SMALL,
    TINY,
    TOLERANCE,
    Section,
    difference,
    free_port,
    greedy,
    rank_result,
    rank_variables,
    start_rank,
    step_bytes,
    why_no_compiler,
)
from synthetic import Shape
from torch import Tensor

FEW = Shape(hidden=256, intermediate=512, heads=8, kv_heads=2, vocab=1000, layers=4)
LENGTHS = (5, 40, 17, 64, 9, 33)
"""Of the prompts of repeated calls, in new tokens too."""
ROUNDS = 6
"""Of repeated calls; memory must not grow after the second one."""

Line = dict[str, Any]
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
        converted = section.converted(source, count, *case.options)
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


def _experts(section: Section) -> Path:
    config = transformers.Qwen3MoeConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, moe_intermediate_size=192, num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip
    path = section.scratch / "experts"
    if not path.exists():
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32)
        model.save_pretrained(path)
    return path


# ------------------------------------------------------------------------------------------ on each rank


def _same(section: Section, source: Path, converted: Path) -> list[Line]:
    """Logits, and greedy, sampled, beam and compiled tokens."""
    model, unsharded = _load(section, converted), section.unsharded(source)
    ids = section.prompt(24, unsharded.config.vocab_size)
    found = difference(model(ids).logits, unsharded(ids).logits)
    is_well = found <= TOLERANCE[torch.float32]
    lines: list[Line] = [_line("logits, float32", found, "of the largest", ok=is_well)]
    for what, options in (
        ("greedy", {}),
        ("beams", {"num_beams": 3}),
        ("greedy, a padded batch", {"padded": True}),
    ):
        same = torch.equal(_tokens(model, ids, **options), _tokens(unsharded, ids, **options))
        lines.append({"what": f"{NEW_TOKENS} tokens, {what}", "ok": same})
    torch.manual_seed(dist.get_rank())  # the ranks continue with the state of the first
    sampled = _tokens(model, ids, do_sample=True)
    lines.append({"what": f"{NEW_TOKENS} sampled tokens on all ranks", "ok": _is_same_on_all(sampled)})
    if _can_record(section):
        compiled = _load(section, converted, compile=True)
        lines.append({"what": "compiled tokens", "ok": greedy(compiled, ids) == greedy(unsharded, ids)})
    return lines


def _tokens(model: Any, ids: Tensor, padded: bool = False, **options: Any) -> Tensor:
    mask = torch.ones_like(ids)
    if padded:
        ids, mask = ids.repeat(3, 1), mask.repeat(3, 1)
        mask[1, :7] = 0
    fixed = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    tokens: Tensor = model.generate(ids, attention_mask=mask, **{"do_sample": False, **fixed, **options})
    return tokens


def _is_same_on_all(x: Tensor) -> bool:
    first = x.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, x)


def _repeated(section: Section, source: Path, converted: Path) -> list[Line]:
    """Calls of many lengths, with the device's memory after each round."""
    lines: list[Line] = []
    for label, options in (("eager", {}), ("compiled", {"compile": True})):
        if options and not _can_record(section):
            continue
        model = _load(section, converted, **options)
        reserved = []
        for _ in range(2 if section.small else ROUNDS):
            for length in LENGTHS[: 2 if section.small else None]:
                ids = section.prompt(length, model.config.vocab_size)
                _tokens(model, ids, max_new_tokens=length, min_new_tokens=length)
            reserved.append(torch.cuda.memory_reserved() if section.is_cuda else 0)
        growth = reserved[-1] - reserved[1]
        what = f"memory that repeated calls of generate add, {label}"
        lines.append(_line(what, growth / 1e6, "MB", ok=growth <= 0))
        del model
        _free(section)
    return lines


def _speed(section: Section, source: Path, converted: Path) -> list[Line]:
    """Tokens per second of ``generate``, beside transformers' tensor parallelism and the roofline."""
    ways: dict[str, dict[str, Any]] = {"eager": {}, "symmetric sums": {"all_reduce": "symmetric"}}
    if _can_record(section):
        graphs = {"CUDA graphs": {"compile": True}}
        ways |= graphs | {"CUDA graphs, symmetric sums": {"compile": True, "all_reduce": "symmetric"}}
    if not section.is_cuda:
        ways = {"eager": {}}
    model = _load(section, converted)
    length = 64 if section.small else 512
    roof = section.bandwidth() / step_bytes(model, length)
    lines = [_line("roofline of decode", roof, "tokens/s")]
    del model
    _free(section)
    theirs = _rate(section, _transformers_parallel(section, source))
    for label, options in ways.items():
        rate = _rate(section, _load(section, converted, **options))
        lines.append(_line(label, rate, "tokens/s", ratio=rate / roof, of="the roofline"))
        lines.append(
            _line(f"{label}, beside tp_plan", rate, "tokens/s", ratio=rate / theirs, of="transformers'")
        )
        _free(section)
    lines.append(_line('transformers, tp_plan="auto"', theirs, "tokens/s"))
    return lines


def _line(what: str, number: float, unit: str, **more: Any) -> Line:
    return {"what": what, "number": number, "unit": unit, **more}


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
    _tokens(model, ids, **fixed)
    section.synchronize()
    begin = time.perf_counter()
    _tokens(model, ids, **fixed)
    section.synchronize()
    return length / (time.perf_counter() - begin)


def _can_record(section: Section) -> bool:
    """Whether decoding is compiled to CUDA graphs; the section ``nccl`` compiles on CPUs, too."""
    return section.is_cuda and not why_no_compiler(section)


def _shared(section: Section, source: Path, converted: Path) -> list[Line]:
    """Ranks of one GPU are refused over NCCL."""
    try:
        _load(section, converted)
    except shardconv_runtime.LaunchError as error:
        return [{"what": "they are refused", "ok": "use the same GPU" in str(error), "why": str(error)}]
    return [{"what": "they are refused", "ok": False}]


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
    """A rank fails while the others decode, from CUDA graphs if there are any: all raise."""
    model = _load(section, converted, compile=_can_record(section), timeout_s=30)
    ids = section.prompt(24, model.config.vocab_size)
    greedy(model, ids)  # the compiler's time counts
    begin, raised = time.perf_counter(), ""
    try:
        _tokens(model, ids, logits_processor=[_Fails()])
    except (shardconv_runtime.LaunchError, ArithmeticError) as error:
        raised = str(error)
    return [_line("they raise", time.perf_counter() - begin, "s", ok=bool(raised), why=raised)]


def _load(section: Section, converted: Path, timeout_s: float = 120, **options: Any) -> Any:
    """This rank's model: on a GPU, the one that the runtime finds."""
    device = None if section.is_cuda else section.device
    return shardconv_runtime.load(converted, device=device, timeout_s=timeout_s, **options)


def _free(section: Section) -> None:
    gc.collect()
    torch._dynamo.reset()
    section.free()


CASES = {
    "dense": Case(_small, _same),
    "several mesh axes": Case(_few, _same),
    "experts": Case(_experts, _same),
    "whole experts": Case(_experts, _same, ("--experts", "ep")),
    "repeated calls": Case(_small, _repeated),
    "speed": Case(_middle, _speed),
    "a rank fails": Case(_small, _failing),
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
    try:
        with torch.no_grad():
            case = CASES.get(options.case, ONE_GPU)
            result: Line = {"lines": case.check(section, *options.models)}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # the groups may wait for a rank that has failed


if __name__ == "__main__":
    main()
