"""The sections of ``gpu_check.py``, each run as: gpu_sections.py SECTION --device cuda --scratch DIRECTORY.

A section prints a line of JSON for each check. Other output is ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from gpu_loads import load
from gpu_ranks import FEW, gpus
from gpu_section import (
    GROUPS,
    MIDDLE,
    NEW_TOKENS,
    SMALL,
    TINY,
    TOLERANCE,
    WARM_UP,
    Section,
    batched,
    difference,
    free_port,
    greedy,
    one_by_one,
    prompts,
    rank_result,
    rank_variables,
    start_rank,
    step_bytes,
    why_no_compiler,
)
from shardconv_runtime.comm.collectives import Communicator, ProcessCommunicator
from shardconv_runtime.inference.compiling import compile_model
from shardconv_runtime.parallel.build import owner_of, parallelize, retie, stored_tensors
from shardconv_runtime.parallel.meta_model import build_model
from synthetic import LLAMA_8B, Shape
from torch import Tensor

# ------------------------------------------------------------------------------------------------- nccl


def nccl(section: Section) -> None:
    """One rank over NCCL beside the unsharded model."""
    if section.is_cuda and not dist.is_nccl_available():
        section.skip("the section", f"torch {torch.__version__} was built without NCCL")
        return
    os.environ.update(rank_variables(0, 1, free_port()))
    with section.attempt("all_reduce over NCCL"):
        _collectives(section)
    shape = TINY if section.small else MIDDLE
    with section.attempt("tokens in float32"):
        source = section.checkpoint("small", SMALL, torch.float32)
        _same_tokens(section, section.unsharded(source), section.converted(source, 1), "eager")
    with section.attempt("generate_batch"):
        model = shardconv_runtime.load(section.converted(source, 1), device=section.device)
        given = prompts(section, model.config.vocab_size)
        alike = batched(model, given) == one_by_one(model, given)
        section.tell("generate_batch has the tokens of generate", ok=alike)
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


def _same_tokens(section: Section, unsharded: Any, converted: Path, label: str, **options: Any) -> None:
    ids = section.prompt(24, unsharded.config.vocab_size)
    model = shardconv_runtime.load(converted, device=section.device, **options)
    found = difference(model(ids).logits, unsharded(ids).logits)
    section.tell(f"logits, float32, {label}", found, "of the largest", ok=found <= TOLERANCE[torch.float32])
    section.tell(
        f"{NEW_TOKENS} greedy tokens, float32, {label}", ok=greedy(model, ids) == greedy(unsharded, ids)
    )


def _steps(section: Section, source: Path, converted: Path) -> None:
    length, num_steps = (16, 2) if section.small else (512, 20)
    unsharded = section.unsharded(source)
    ids = section.prompt(length, unsharded.config.vocab_size)
    model = shardconv_runtime.load(converted, device=section.device)
    _same_logits(section, model(ids, use_cache=False).logits, unsharded(ids, use_cache=False).logits, "eager")
    floor = _roofline_s(section, model, length, num_steps)
    unsharded_s = _tell_steps(section, unsharded, ids, num_steps, floor, "eager, unsharded", {})
    _tell_steps(section, model, ids, num_steps, floor, "eager", unsharded_s)
    if why := why_no_compiler(section):
        section.skip("compiled steps", why)
        return
    with section.attempt("compiled, without CUDA graphs"):
        expected = unsharded(ids, use_cache=False, logits_to_keep=1).logits
        compile_model(model, cuda_graphs=False)
        found = model(ids, use_cache=False, logits_to_keep=1).logits
        _same_logits(section, found, expected, "compiled")
        _tell_steps(section, model, ids, num_steps, floor, "compiled", unsharded_s)
    if not section.is_cuda:
        section.skip("decode, CUDA graphs", "no CUDA")
        return
    with section.attempt("compiled, with CUDA graphs"):
        torch._dynamo.reset()  # stay below the limit of compiled forms of one function
        graphs = shardconv_runtime.load(converted, device=section.device, compile=True)
        decode = section.decode_s(graphs, ids, num_steps)
        section.tell_time("decode, CUDA graphs", decode, "ms a token", floor, "the roofline")
        compile_model(unsharded, cuda_graphs=True)
        unsharded_decode_s = section.decode_s(unsharded, ids, num_steps)
        than = "CUDA graphs, unsharded"
        section.tell_time("decode, CUDA graphs", decode, "ms a token", unsharded_decode_s, than)


def _roofline_s(section: Section, model: Any, length: int, num_steps: int) -> float:
    """Seconds in which the memory can deliver the bytes that a decoding step reads."""
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
    """Prefill and decode, beside the roofline and beside other times of the same."""
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
    """A rank without the others: results have the right shapes at almost no cost."""

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
    """Rank 0 of a model with random weights that is not stored."""
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
    for name, shape, tp in (("small", SMALL, 2), ("small", SMALL, 4), ("few", FEW, 4)):
        label = f"tp {tp}, {shape.kv_heads} kv heads"
        with section.attempt(label):
            source = section.checkpoint(name, shape, torch.float32)
            converted = section.converted(source, tp)
            port, children = free_port(), []
            for number in range(tp):
                command = [sys.executable, __file__, "one-of-ranks", "--device", section.device.type]
                command += ["--scratch", str(section.scratch), "--models", str(source), str(converted)]
                children.append(start_rank(command, rank_variables(number, tp, port)))
            found = [rank_result(child) for child in children]
            worst = max(result["difference"] for result in found)
            section.tell(f"logits, float32, {label}", worst, "of the largest", ok=worst <= 1e-3)
            alike = all(result["same"] for result in found)
            section.tell(f"{NEW_TOKENS} greedy tokens, {label}", ok=alike)


def one_of_ranks(section: Section, source: Path, converted: Path) -> None:
    """A rank of ``ranks``: prints its result."""
    dist.init_process_group("gloo")
    try:
        model = shardconv_runtime.load(converted, device=section.device, group=dist.group.WORLD)
        unsharded = section.unsharded(source)
        ids = section.prompt(24, unsharded.config.vocab_size)
        value = difference(model(ids).logits, unsharded(ids).logits)
        result = {"difference": value, "same": greedy(model, ids) == greedy(unsharded, ids)}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(result), flush=True)
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------- memory


def memory(section: Section) -> None:
    """Peak memory of a load, and tokens of CUDA graphs."""
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
            section, section.unsharded(source), section.converted(source, 1), "CUDA graphs", compile=True
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


SECTIONS = {"nccl": nccl, "rank": rank, "ranks": ranks, "gpus": gpus, "load": load, "memory": memory}


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
