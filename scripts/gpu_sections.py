"""The sections of ``gpu_check.py``, each run as: gpu_sections.py SECTION --device cuda --scratch DIRECTORY.

A section prints a line of JSON for each check. Other output is of no account.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from disk import evict, read_all, resident_share
from gpu_section import (
    GROUPS,
    NEW_TOKENS,
    TOLERANCE,
    WARM_UP,
    Section,
    difference,
    free_port,
    greedy,
    place,
    step_bytes,
    why_no_compiler,
)
from shardconv_runtime.comm.collectives import Communicator, ProcessCommunicator
from shardconv_runtime.inference.compiling import compile_model
from shardconv_runtime.parallel.build import owner_of, parallelize, retie, stored_tensors
from shardconv_runtime.parallel.meta_model import build_model
from synthetic import LLAMA_8B, Shape
from torch import Tensor

BLOCK_BYTES = 64 << 20


# ------------------------------------------------------------------------------------------------- nccl

SMALL = Shape(hidden=256, intermediate=512, heads=8, kv_heads=4, vocab=1000, layers=4)
TINY = Shape(hidden=64, intermediate=128, heads=8, kv_heads=4, vocab=500, layers=2)
MIDDLE = Shape(hidden=2048, intermediate=7168, heads=16, kv_heads=8, vocab=32000, layers=16)


def nccl(section: Section) -> None:
    """One rank over NCCL beside the unsharded model."""
    if section.is_cuda and not dist.is_nccl_available():
        section.skip("the section", f"torch {torch.__version__} was built without NCCL")
        return
    os.environ.update(place(0, 1, free_port()))
    with section.attempt("all_reduce over NCCL"):
        _collectives(section)
    shape = TINY if section.small else MIDDLE
    with section.attempt("tokens in float32"):
        source = section.checkpoint("small", SMALL, torch.float32)
        _same_tokens(section, section.whole(source), section.converted(source, 1), "eager")
    source = section.checkpoint("middle", shape, torch.bfloat16)
    with section.attempt("eager and compiled steps"):
        _steps(section, source, section.converted(source, 1))
    dist.destroy_process_group()


def _collectives(section: Section) -> None:
    """The runtime's own operations over a real group, and in a CUDA graph."""
    dist.init_process_group("nccl" if section.is_cuda else "gloo")
    comm = ProcessCommunicator(0, (1,), {(0,): dist.group.WORLD})
    x = torch.arange(1024.0, device=section.device)

    def call() -> Tensor:
        return comm._concatenate(comm._sum_in_place(comm._sum(x, (0,)), (0,)), (0,))

    out = call()
    section.synchronize()
    section.tell("all_reduce and all_gather", ok=torch.equal(out, x))
    if not section.is_cuda:
        section.skip("all_reduce and all_gather in a CUDA graph", "no CUDA")
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    x.fill_(7)
    graph.replay()
    section.synchronize()
    section.tell("all_reduce and all_gather in a CUDA graph", ok=bool((out == 7).all()))


def _same_tokens(section: Section, whole: Any, converted: Path, label: str, **options: Any) -> None:
    ids = section.prompt(24, whole.config.vocab_size)
    model = shardconv_runtime.load(converted, device=section.device, **options)
    found = difference(model(ids).logits, whole(ids).logits)
    section.tell(f"logits, float32, {label}", found, "of the largest", ok=found <= TOLERANCE[torch.float32])
    section.tell(f"{NEW_TOKENS} greedy tokens, float32, {label}", ok=greedy(model, ids) == greedy(whole, ids))


def _steps(section: Section, source: Path, converted: Path) -> None:
    length, num_steps = (16, 2) if section.small else (512, 20)
    whole = section.whole(source)
    ids = section.prompt(length, whole.config.vocab_size)
    model = shardconv_runtime.load(converted, device=section.device)
    _same_logits(section, model(ids, use_cache=False).logits, whole(ids, use_cache=False).logits, "eager")
    floor = _roofline_s(section, model, length, num_steps)
    whole_s = _tell_steps(section, whole, ids, num_steps, floor, "eager, unsharded", {})
    _tell_steps(section, model, ids, num_steps, floor, "eager", whole_s)
    if why := why_no_compiler(section):
        section.skip("compiled steps", why)
        return
    with section.attempt("compiled, without CUDA graphs"):
        expected = whole(ids, use_cache=False, logits_to_keep=1).logits
        compile_model(model, cuda_graphs=False)
        found = model(ids, use_cache=False, logits_to_keep=1).logits
        _same_logits(section, found, expected, "compiled")
        _tell_steps(section, model, ids, num_steps, floor, "compiled", whole_s)
    if not section.is_cuda:
        section.skip("decode, CUDA graphs", "no CUDA")
        return
    with section.attempt("compiled, with CUDA graphs"):
        torch._dynamo.reset()  # or one function would have more compiled forms than are allowed
        graphs = shardconv_runtime.load(converted, device=section.device, compile=True)
        decode = section.decode_s(graphs, ids, num_steps)
        section.tell_time("decode, CUDA graphs", decode, "ms a token", floor, "the roofline")
        compile_model(whole, cuda_graphs=True)
        whole_decode = section.decode_s(whole, ids, num_steps)
        than = "CUDA graphs, unsharded"
        section.tell_time("decode, CUDA graphs", decode, "ms a token", whole_decode, than)


def _roofline_s(section: Section, model: Any, length: int, num_steps: int) -> float:
    """Seconds in which the memory can give what a decoding step reads."""
    bandwidth = section.bandwidth()
    section.tell("memory bandwidth, by a copy", bandwidth / 1e9, "GB/s")
    num_bytes = step_bytes(model, length + WARM_UP + GROUPS * num_steps)
    floor = num_bytes / bandwidth
    section.tell("roofline of decode", floor * 1e3, "ms a token", why=f"{num_bytes / 1e9:.3g} GB a step")
    return floor


def _tell_steps(
    section: Section,
    model: Any,
    ids: Tensor,
    num_steps: int,
    floor: float,
    label: str,
    than: dict[str, float],
) -> dict[str, float]:
    """Prefill and decode, beside the roofline and beside other seconds of the same."""
    found = {"prefill": section.prefill_s(model, ids), "decode": section.decode_s(model, ids, num_steps)}
    matrices = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    flops = 2 * matrices * ids.shape[1] / found["prefill"]
    what = f"prefill of {ids.shape[1]} tokens, {label}"
    section.tell(what, found["prefill"] * 1e3, "ms", why=f"{flops / 1e12:.3g} TFLOP/s in matrices")
    section.tell_time(f"decode, {label}", found["decode"], "ms a token", floor, "the roofline")
    for step, seconds in than.items():
        section.tell_time(f"{step}, {label}", found[step], "ms", seconds, "eager, unsharded")
    return found


def _same_logits(section: Section, found: Tensor, expected: Tensor, label: str) -> None:
    value = difference(found, expected)
    is_well = value <= TOLERANCE[torch.bfloat16]
    section.tell(f"logits, bfloat16, {label}", value, "of the largest", ok=is_well)


# ------------------------------------------------------------------------------------------------- rank


class Alone(Communicator):
    """A rank without the others: results have the shapes of the true ones, and cost next to nothing."""

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return torch.cat([x] * self.num_ranks(axes))


def rank(section: Section) -> None:
    """The compute of one rank of eight."""
    shape = Shape(64, 128, 8, 8, 512, 2) if section.small else replace(LLAMA_8B, layers=32)
    length, num_steps = (16, 2) if section.small else (512, 20)
    model = _lonely(section, shape, 8)
    ids = section.prompt(length, shape.vocab)
    floor = _roofline_s(section, model, length, num_steps)
    _tell_steps(section, model, ids, num_steps, floor, "eager", {})
    if why := why_no_compiler(section):
        section.skip("compiled steps", why)
        return
    with section.attempt("compiled, without CUDA graphs"):
        compile_model(model, cuda_graphs=False)
        _tell_steps(section, model, ids, num_steps, floor, "compiled", {})
    if not section.is_cuda:
        section.skip("decode, CUDA graphs", "no CUDA")
        return
    with section.attempt("compiled, with CUDA graphs"):
        compile_model(model, cuda_graphs=True)
        decode = section.decode_s(model, ids, num_steps)
        section.tell_time("decode, CUDA graphs", decode, "ms a token", floor, "the roofline")


def _lonely(section: Section, shape: Shape, tp: int) -> Any:
    """Rank 0 of a model that was never written, with random weights."""
    from shardconv_runtime.checkpoint.resolve import resolve

    from shardconv.arguments import SolveOptions
    from shardconv.pipeline.stages import solve_plan

    directory = section.scratch / "config"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    spec = resolve(directory, need_weights=False)
    plan = solve_plan(spec, SolveOptions(tp, check=False))
    model = build_model(spec.model_class, spec.config, torch.bfloat16)
    parallelize(model, plan, Alone(0, plan.mesh))
    generator = torch.Generator(section.device).manual_seed(0)
    for name, meta in list(stored_tensors(model)):
        owner, attribute = owner_of(model, name)
        weight = torch.empty(meta.shape, dtype=meta.dtype, device=section.device)
        weight.normal_(0, 0.02, generator=generator)
        owner._parameters[attribute] = torch.nn.Parameter(weight, requires_grad=False)
    retie(model, plan)
    return model.to(section.device).eval()


# ------------------------------------------------------------------------------------------------ ranks


def ranks(section: Section) -> None:
    """Several ranks over gloo that share one device."""
    few = Shape(hidden=256, intermediate=512, heads=8, kv_heads=2, vocab=1000, layers=4)
    for name, shape, tp in (("small", SMALL, 2), ("small", SMALL, 4), ("few", few, 4)):
        label = f"tp {tp}, {shape.kv_heads} kv heads"
        with section.attempt(label):
            source = section.checkpoint(name, shape, torch.float32)
            converted = section.converted(source, tp)
            port, children = free_port(), []
            for number in range(tp):
                command = [sys.executable, __file__, "one-of-ranks", "--device", section.device.type]
                command += ["--scratch", str(section.scratch), "--models", str(source), str(converted)]
                children.append(_start(command, place(number, tp, port)))
            found = [_result(child) for child in children]
            worst = max(result["difference"] for result in found)
            section.tell(f"logits, float32, {label}", worst, "of the largest", ok=worst <= 1e-3)
            alike = all(result["same"] for result in found)
            section.tell(f"{NEW_TOKENS} greedy tokens, {label}", ok=alike)


def _start(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    threads = {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env={**os.environ, **env, **threads}, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    )


def _result(child: subprocess.Popen[str]) -> Any:
    output, _ = child.communicate()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        raise RuntimeError(f"a rank ended with exit code {child.returncode}")
    result = json.loads(lines[-1])
    if "error" in result:
        raise RuntimeError(result["error"])
    return result


def one_of_ranks(section: Section, source: Path, converted: Path) -> None:
    """A rank of ``ranks``: prints what it found."""
    dist.init_process_group("gloo")
    try:
        model = shardconv_runtime.load(converted, device=section.device, group=dist.group.WORLD)
        whole = section.whole(source)
        ids = section.prompt(24, whole.config.vocab_size)
        value = difference(model(ids).logits, whole(ids).logits)
        result = {"difference": value, "same": greedy(model, ids) == greedy(whole, ids)}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(result), flush=True)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------- load


def load(section: Section) -> None:
    """From the disk to the device."""
    shape = TINY if section.small else Shape(4096, 14336, 32, 8, 32000, 12)
    source = section.checkpoint("large", shape, torch.bfloat16)
    converted = section.converted(source, 1)
    if not section.small:
        shutil.rmtree(source)  # its room on the disk, and in the page cache
    section.free()
    os.sync()
    files = sorted(converted.rglob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    tiny = section.converted(section.checkpoint("tiny", TINY, torch.float32), 1)
    shardconv_runtime.load(tiny, device=section.device)  # imports, the context of the device
    section.tell("size of the rank", num_bytes / 1e9, "GB")
    with section.attempt("pinned copy"):
        copy_s = _pinned_copy_s(section, num_bytes)
        section.tell("pinned memory to the device", num_bytes / copy_s / 1e9, "GB/s")
    for cache in ("cold", "warm"):
        with section.attempt(f"loading, {cache}"):
            _tell_loads(section, converted, files, num_bytes, cache)


def _tell_loads(section: Section, converted: Path, files: list[Path], num_bytes: int, cache: str) -> None:
    from safetensors.torch import load_file

    device = str(section.device)
    calls: dict[str, Callable[[], Any]] = {
        "read into memory": lambda: read_all(files),
        "safetensors load_file": lambda: _touched([load_file(path, device=device) for path in files]),
        "load": lambda: _touched(shardconv_runtime.load(converted, device=device)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    why = ""
    for turn in range(2):
        for name in sorted(calls, reverse=turn % 2 == 1):
            (evict if cache == "cold" else read_all)(files)
            why = why or _not_as_wanted(files, cache)
            seconds[name].append(section.seconds(calls[name]))
            section.free()
    plain = min(seconds["safetensors load_file"])
    for name, found in seconds.items():
        rate = num_bytes / min(found) / 1e9
        section.tell(
            f"{name}, {cache}", rate, "GB/s", ratio=min(found) / plain, of="the time of load_file", why=why
        )


def _not_as_wanted(files: list[Path], cache: str) -> str:
    """Why the page cache is not as cold or as warm as it should be; empty if it is."""
    try:
        share = resident_share(files)
    except OSError as error:
        return f"the system does not tell what is in the page cache: {error.strerror}"
    is_well = share <= 0.01 if cache == "cold" else share >= 0.99
    return "" if is_well else f"{share:.0%} of the files were in the page cache"


def _touched(loaded: Any) -> None:
    """On a CPU files are only mapped so far; on a device all is there."""
    found = [loaded.parameters()] if hasattr(loaded, "parameters") else [part.values() for part in loaded]
    for tensor in (tensor for part in found for tensor in part):
        if tensor.device.type == "cpu":
            tensor.detach().view(torch.uint8).reshape(-1)[::4096].sum()


def _pinned_copy_s(section: Section, num_bytes: int) -> float:
    """The bus alone: one pinned buffer, copied again and again."""
    size = min(BLOCK_BYTES, num_bytes)
    source = torch.empty(size, dtype=torch.uint8, pin_memory=section.is_cuda)
    target = torch.empty(size, dtype=torch.uint8, device=section.device)

    def copy() -> None:
        for _ in range(max(1, num_bytes // size)):
            target.copy_(source, non_blocking=True)

    section.seconds(copy)
    return section.seconds(copy) * num_bytes / (max(1, num_bytes // size) * size)


# ----------------------------------------------------------------------------------------------- memory


def memory(section: Section) -> None:
    """What a load needs of the device, and what CUDA graphs compute."""
    shape = TINY if section.small else MIDDLE
    with section.attempt("peak device memory of a load"):
        converted = section.converted(section.checkpoint("middle", shape, torch.bfloat16), 1)
        section.free()
        _peak(section, converted)
    if why := "no CUDA" if not section.is_cuda else why_no_compiler(section):
        section.skip("tokens of CUDA graphs", why)
        return
    with section.attempt("tokens of CUDA graphs"):
        source = section.checkpoint("small", SMALL, torch.float32)
        _same_tokens(
            section, section.whole(source), section.converted(source, 1), "CUDA graphs", compile=True
        )


def _peak(section: Section, converted: Path) -> None:
    what = "peak device memory of a load"
    if not section.is_cuda:
        shardconv_runtime.load(converted, device=section.device)
        section.skip(what, "no CUDA")
        return
    torch.cuda.reset_peak_memory_stats(section.device)
    before = torch.cuda.memory_allocated(section.device)
    model = shardconv_runtime.load(converted, device=section.device)
    peak = torch.cuda.max_memory_allocated(section.device) - before
    own = sum(parameter.nbytes for parameter in model.parameters())
    section.tell(what, peak / 1e9, "GB", ratio=peak / own, of="the rank's bytes", ok=peak <= 1.05 * own)


SECTIONS = {"nccl": nccl, "rank": rank, "ranks": ranks, "load": load, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=[*SECTIONS, "one-of-ranks"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--models", type=Path, nargs=2)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    section = Section(options.section, options.device, options.small, options.scratch)
    with torch.no_grad():
        if options.models:
            one_of_ranks(section, *options.models)
        else:
            SECTIONS[options.section](section)


if __name__ == "__main__":
    main()
