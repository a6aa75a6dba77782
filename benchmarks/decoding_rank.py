"""One process of ``decoding.py``."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from inference_rank import join, load_transformers
from measured import status_bytes
from shardconv_runtime import Compiling
from shardconv_runtime.comm import mesh
from shardconv_runtime.files import manifest
from shardconv_runtime.files.model_config import read_config
from shardconv_runtime.inference.compiling import compile_model
from shardconv_runtime.inference.generation import DECODER, prepare_generation
from shardconv_runtime.meta.meta_model import build_model, find_class
from shardconv_runtime.parallel.build import parallelize, retie
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PROMPT, FEW, MANY = 16, 8, 108
PRODUCTS = ("mm", "addmm", "bmm", "linear", "_grouped_mm")
WAITS = ("_local_scalar_dense",)
IDS = torch.arange(5, 5 + PROMPT)[None]


# ------------------------------------------------------------------------- host time, without any others


def free_backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A graph that costs nothing once it has run: it returns what it returned first."""
    kept: list[Any] = []

    def run(*args: Any) -> Any:
        if not kept:
            kept.append(graph.forward(*args))
        return kept[0]

    return run


def fake_ranks(tp: int) -> mesh.Launch:
    """One rank of several, whose collectives do nothing."""
    device = torch.device("cpu")
    if tp == 1:
        return mesh.Launch(0, 1, device)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    return mesh.Launch(0, tp, device, dist.group.WORLD)


def alone(out: Path, start: mesh.Launch) -> Any:
    """The runtime's model of this rank, with other weights: no other rank has to agree."""
    found = manifest.read(out)
    plan = manifest.read_plan(out, found)
    model = build_model(find_class(plan.model.class_name), read_config(out, found, plan), torch.float32)
    parallelize(model, plan, mesh.connect(plan, start))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                values = torch.randn(parameter.shape) * 0.02
                module._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
    retie(model, plan)
    prepare_generation(model, transformers.GenerationConfig(eos_token_id=None), start, gather_logits=True)
    return model.eval()


def host(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds around graphs that cost nothing; counts of eager tokens."""
    torch.set_num_threads(1)
    start = fake_ranks(options.tp)
    ours = alone(options.out, start)
    theirs = load_transformers(options.source, parallel=options.tp > 1).float()
    eager = {"shardconv, eager": counts(ours), "transformers, eager": counts(theirs)}
    compile_ = torch.compile
    torch.compile = lambda function, **given: compile_(
        function, **{**given, "backend": free_backend, "options": None}
    )
    compiled = alone(options.out, start)
    compile_model(compiled, cuda_graphs=False)
    torch.compile = compile_
    subjects = {"shardconv": (compiled, {}), "transformers": (theirs, static(free_backend))}
    times = in_turns(subjects, options.rounds)
    return {f"{name}, compiled": {"ms": ms} for name, ms in times.items()} | eager


def kernels(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a compiled token with its kernels, of one rank whose collectives cost nothing."""
    torch.set_num_threads(1)
    start = fake_ranks(options.tp)
    compiled = alone(options.out, start)
    compile_model(compiled, cuda_graphs=False, same_bits=options.tp > 1)
    theirs = load_transformers(options.source, parallel=options.tp > 1).float()
    subjects = {"shardconv": (compiled, {}), "transformers": (theirs, static("inductor"))}
    times = in_turns(subjects, options.rounds)
    return {f"{name}, compiled, with its kernels": {"ms": ms} for name, ms in times.items()}


def static(backend: Any) -> dict[str, Any]:
    """Options with which transformers compiles a token."""
    config = transformers.CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def in_turns(subjects: dict[str, tuple[Any, dict[str, Any]]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds for each token, by subject; all ranks take them in the same order."""
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds + 1):
        for name in sorted(subjects, reverse=number % 2 == 1):
            if dist.is_initialized():
                dist.barrier()
            seconds = per_token(*subjects[name])
            if number:
                found[name].append(1e3 * seconds)
    return found


def counts(model: Any) -> dict[str, int]:
    """Of one token of ``generate``, eager: the difference of two calls."""
    totals = []
    for new in (FEW, FEW + 1):
        with _Counting() as counting:
            generate(model, new)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            generate(model, new)
        allocated = sum(e.cpu_memory_usage > 0 for e in profile.events() if e.name == "[memory]")
        totals.append(counting.found + Counter(allocations=allocated))
    return {name: totals[1][name] - totals[0][name] for name in totals[1]}


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        is_collective = "c10d" in namespace and not name.startswith("wait")
        self.found["operators"] += 1
        self.found["products"] += name in PRODUCTS
        self.found["collectives"] += is_collective
        self.found["waits"] += name in WAITS
        return func(*args, **(kwargs or {}))


def generate(model: Any, new: int, **options: Any) -> Tensor:
    """Greedy, exactly ``new`` tokens."""
    with torch.no_grad():
        tokens: Tensor = model.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=new, do_sample=False, eos_token_id=None,
            pad_token_id=0, **options,
        )  # fmt: skip
    assert tokens.shape == (1, PROMPT + new)
    return tokens


def per_token(model: Any, options: dict[str, Any]) -> float:
    """Seconds for a token: prefill and set-up are in two calls, and cancel out."""
    seconds = []
    for new in (FEW, MANY):
        begin = time.perf_counter()
        generate(model, new, **options)
        seconds.append(time.perf_counter() - begin)
    return (seconds[1] - seconds[0]) / (MANY - FEW)


# ---------------------------------------------------------------------------------------------- ranks


def tokens(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds for each token, by mode and side, alternately."""
    torch.set_num_threads(1)
    join()
    found: dict[str, Any] = {}
    for mode in options.modes:
        torch._dynamo.reset()
        ours = shardconv_runtime.load(options.out, device="cpu", dtype="float32", compile=mode == "compiled")
        theirs = load_transformers(options.source, parallel=options.tp > 1).float()
        extra: dict[str, Any] = {}
        if mode == "compiled":
            extra = static("inductor")
        found[mode] = in_turns({"shardconv": (ours, {}), "transformers": (theirs, extra)}, options.rounds)
    return found


def calls(options: argparse.Namespace) -> dict[str, Any]:
    """Recordings, graphs and memory before many calls of random sizes, and after each fifth of them."""
    torch.set_num_threads(1)
    join()
    sizes = [(batch, length) for length in (256, 128) for batch in (8, 4, 2, 1)]
    model = shardconv_runtime.load(
        options.out, device="cpu", dtype="float32", compile=Compiling(warm_up=sizes)
    )
    decoder = vars(model)[DECODER]
    generator = torch.Generator().manual_seed(0)
    parts: list[dict[str, int]] = []
    num_calls = 10 * options.rounds
    for number in range(num_calls + 1):
        if number % (num_calls // 5) == 0:
            parts.append(
                {
                    "calls": number,
                    "recordings": decoder.num_recordings,
                    "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
                    "buffers": decoder.num_bytes,
                    "resident": status_bytes("RssAnon"),
                    "peak": status_bytes("VmHWM"),
                }
            )
        rows, length, new = (int(torch.randint(1, most, (), generator=generator)) for most in (9, 120, 60))
        ids = torch.randint(3, 100, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, : (length - 1) // 2 * (number % 2)] = 0
        model.generate(ids * mask, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=1)
    return {"parts": parts}


COMMANDS = {"host": host, "kernels": kernels, "tokens": tokens, "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    for name in ("source", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--modes", nargs="+", default=[])
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    result = COMMANDS[options.command](options)
    options.result.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
