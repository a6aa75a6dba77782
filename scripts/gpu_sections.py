"""The sections of ``gpu_check.py``, each run as: gpu_sections.py SECTION --device cuda --scratch DIRECTORY.

A section prints a line of JSON for each check. Other output only goes to its log.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from gpu_loads import load
from gpu_packed import packed
from gpu_ranks import FEW, gpus
from gpu_same import run_graphs_as_captured
from gpu_section import (
    MIDDLE,
    NEW_TOKENS,
    SMALL,
    TINY,
    TOLERANCE,
    Section,
    batched,
    continued,
    difference,
    free_port,
    greedy,
    never_stop,
    one_by_one,
    prompts,
    rank_variables,
    run_ranks,
    why_no_compiler,
)
from gpu_training import training
from lone_rank import Alone, OneProcess, lone_rank
from shardconv_runtime.comm.collectives import ProcessCommunicator
from shardconv_runtime.comm.mesh import Launch
from shardconv_runtime.comm.symmetric import prepare_symmetric, symmetric_sum
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.inference.compiling import compile_model
from shardconv_runtime.inference.generation import DECODER
from synthetic import LLAMA_8B, Shape, step_bytes
from torch import Tensor

PROMPT = 512
COMPILE_S = 60
"""About how long compiling a step of 32 layers takes, with the calls that are measured."""

# ----------------------------------------------------------------------------- generate, eager and compiled


def _tell_machine(section: Section) -> tuple[float, float]:
    """Bytes and operations per second that the device reaches in plain copies and products."""
    bandwidth, flops = section.bandwidth(), section.flops()
    section.tell("memory bandwidth, by a copy", bandwidth / 1e9, "GB/s")
    section.tell("product of bfloat16 matrices", flops / 1e12, "TFLOP/s")
    return bandwidth, flops


def _roofline_s(section: Section, model: Any, length: int, bandwidth: float) -> float:
    """Seconds in which the memory can deliver the bytes that a decoding step reads."""
    num_bytes = step_bytes(model, length)
    floor = num_bytes / bandwidth
    section.tell("roofline of a token", floor * 1e3, "ms", why=f"{num_bytes / 1e9:.3g} GB a step")
    return floor


def _tell_prefill(section: Section, model: Any, ids: Tensor, flops: float, label: str) -> float:
    """Milliseconds of a prefill, beside the rate of products."""
    seconds = section.prefill_s(model, ids)
    matrices = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    floor = 2 * matrices * ids.shape[1] / flops
    section.tell_time(
        f"prefill of {ids.shape[1]} tokens, {label}", seconds, "ms", floor, "its products alone"
    )
    return seconds


def _tell_tokens(
    section: Section, model: Any, ids: Tensor, floor: float, label: str, **options: Any
) -> float:
    """Milliseconds of a token of ``generate``, beside the roofline."""
    seconds = section.token_s(model, ids, **options)
    section.tell_time(f"token of generate, {label}", seconds, "ms", floor, "the roofline")
    return seconds


def _tell_recordings(
    section: Section, model: Any, label: str, wanted: int = 1, *, graphs: bool = True
) -> None:
    """A number of recordings: one for each kind of step, however many calls there were.

    Args:
        graphs: on a GPU they are CUDA graphs; else each is a compiled function.
    """
    decoder = vars(model)[DECODER]
    replays = [replay for _, found in decoder._recorded.values() for replay in found]
    as_wanted = all((replay._graph is not None) == (graphs and section.is_cuda) for replay in replays)
    is_well = decoder.num_recordings == len(replays) == wanted and as_wanted
    section.tell(f"recordings of steps, {label}", decoder.num_recordings, "", ok=is_well)


def _compiled(section: Section, model: Any, ids: Tensor, floor: float, label: str, *, graphs: bool) -> None:
    """Compile a model, and tell what a token takes and how many steps were recorded."""
    torch._dynamo.reset()  # stay below the limit of compiled forms of one function
    compile_model(model, cuda_graphs=graphs and section.is_cuda)
    _tell_tokens(section, model, ids, floor, label)
    _tell_recordings(section, model, label, graphs=graphs)


# ------------------------------------------------------------------------------------------------- rank


def _tell_rank(section: Section, connect: Callable[[Plan], Any], variants: bool) -> None:
    """One rank of eight of an 8B model, whose communicator ``connect`` makes."""
    shape = Shape(64, 128, 8, 8, 512, 2) if section.small else replace(LLAMA_8B, layers=32)
    model = lone_rank(shape, 8, section.scratch / "config", connect, section.device, torch.bfloat16)
    ids = section.prompt(16 if section.small else PROMPT, shape.vocab)
    bandwidth, flops = _tell_machine(section)
    floor = _roofline_s(section, model, ids.shape[1] + 64, bandwidth)
    _tell_tokens(section, model, ids, floor, "eager")
    if variants:
        _tell_prefill(section, model, ids, flops, "eager")
    before = continued(model, ids, NEW_TOKENS)
    if why := why_no_compiler(section):
        section.skip("token of generate, CUDA graphs", why)
        return
    if section.has_time("token of generate, CUDA graphs", COMPILE_S):
        with section.attempt("token of generate, CUDA graphs"):
            _compiled(section, model, ids, floor, "CUDA graphs", graphs=True)
            after = continued(model, ids, NEW_TOKENS)
            # Kernels round differently, and of random weights two tokens are often nearly equally likely.
            share = float((before == after)[:, ids.shape[1] :].float().mean())
            section.tell("share of tokens that are those of eager", share, "")
    if variants and section.has_time("token of generate, compiled, no graphs", COMPILE_S / 2):
        with section.attempt("token of generate, compiled, no graphs"):
            _compiled(section, model, ids, floor, "compiled, no graphs", graphs=False)


def rank(section: Section) -> None:
    """The compute of one rank of eight."""
    _tell_rank(section, lambda plan: Alone(0, plan.mesh, section.device), variants=True)


# ------------------------------------------------------------------------------------------------- nccl


def nccl(section: Section) -> None:
    """The same with the collectives of the plan over NCCL, in a group of one process."""
    if section.is_cuda and not dist.is_nccl_available():
        section.skip("the section", f"torch {torch.__version__} was built without NCCL")
        return
    os.environ.update(rank_variables(0, 1, free_port()))
    dist.init_process_group("nccl" if section.is_cuda else "gloo")
    group = dist.group.WORLD
    assert group is not None
    with section.attempt("all_reduce and all_gather"):
        _collectives(section, group)
    with section.attempt("rank 0 of 8"):
        _tell_rank(section, lambda plan: OneProcess(plan, group, section.device), variants=False)
    if not section.is_cuda:
        section.skip("sums in symmetric memory", "no CUDA")
    elif section.has_time("sums in symmetric memory", COMPILE_S):
        with section.attempt("sums in symmetric memory"):
            _symmetric(section, group)
    dist.destroy_process_group()


def _collectives(section: Section, group: Any) -> None:
    """The runtime's own operations over a real group, and in a CUDA graph."""
    comm = ProcessCommunicator(0, (1,), {(0,): group}, device=section.device)
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
    # As the runtime records: NCCL's watchdog, another thread, calls CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    x.fill_(7)
    graph.replay()
    section.synchronize()
    section.tell("all_reduce and all_gather in a CUDA graph", ok=bool((out == 7).all()))


def _symmetric(section: Section, group: Any) -> None:
    """The sum in symmetric memory, alone and in the step of a model with fewer layers."""
    prepare_symmetric(Launch(0, 1, section.device, group), [group])
    x = torch.randn(4096, device=section.device, dtype=torch.bfloat16)
    is_same = torch.equal(symmetric_sum(x, group.group_name), x)
    section.tell("sum in symmetric memory", ok=is_same)
    shape = replace(LLAMA_8B, layers=4)

    def connect(plan: Plan) -> OneProcess:
        return OneProcess(plan, group, section.device, symmetric_sum)

    model = lone_rank(shape, 8, section.scratch / "config", connect, section.device, torch.bfloat16)
    ids = section.prompt(PROMPT, shape.vocab)
    floor = step_bytes(model, PROMPT + 64) / section.bandwidth()
    _compiled(section, model, ids, floor, "4 layers, CUDA graphs, symmetric sums", graphs=True)


# -------------------------------------------------------------------------------------------------- tp1


def tp1(section: Section) -> None:
    """Full models beside transformers."""
    can_compile = not section.is_cuda or not why_no_compiler(section)
    with section.attempt("tokens in float32"):
        _same_tokens(section, can_compile)
    with section.attempt("generate_batch"):
        converted = section.converted(section.checkpoint("small", SMALL, torch.float32), 1)
        model = shardconv_runtime.load(converted, device=section.device)
        given = prompts(section, model.config.vocab_size)
        alike = batched(model, given) == one_by_one(model, given)
        section.tell("generate_batch has the tokens of generate", ok=alike)
    if section.has_time("1B beside transformers", COMPILE_S):
        with section.attempt("1B"):
            source = section.checkpoint("middle", TINY if section.small else MIDDLE, torch.bfloat16)
            converted = section.converted(source, 1)
            ours = shardconv_runtime.load(converted, device=section.device)
            _beside(section, never_stop(ours), section.unsharded(source), "1B", can_compile)
    if section.has_time("8B beside transformers", 1.5 * COMPILE_S):
        with section.attempt("8B"):
            shape = TINY if section.small else replace(LLAMA_8B, layers=32)
            place = section.scratch / "config"
            ours = lone_rank(
                shape,
                1,
                place,
                lambda plan: Alone(0, plan.mesh, section.device),
                section.device,
                torch.bfloat16,
            )
            _beside(section, ours, section.random_model(shape, torch.bfloat16), "8B", can_compile)


def _same_tokens(section: Section, can_compile: bool) -> None:
    """Logits and tokens of a small model in float32: eager, in graphs, sampled."""
    source = section.checkpoint("small", SMALL, torch.float32)
    unsharded, converted = section.unsharded(source), section.converted(source, 1)
    ids = section.prompt(24, unsharded.config.vocab_size)
    model = never_stop(shardconv_runtime.load(converted, device=section.device))
    found = difference(model(ids).logits, unsharded(ids).logits)
    section.tell("logits, float32", found, "of the largest", ok=found <= TOLERANCE[torch.float32])
    wanted = greedy(unsharded, ids)
    section.tell(f"{NEW_TOKENS} greedy tokens, eager", ok=greedy(model, ids) == wanted)
    if not can_compile:
        section.skip("tokens of CUDA graphs", why_no_compiler(section))
        return
    graphs = never_stop(shardconv_runtime.load(converted, device=section.device, compile=True))
    section.tell(f"{NEW_TOKENS} greedy tokens, CUDA graphs", ok=greedy(graphs, ids) == wanted)
    likeliest = continued(graphs, ids, NEW_TOKENS, do_sample=True, top_k=1)[0, ids.shape[1] :].tolist()
    section.tell(f"{NEW_TOKENS} tokens, sampled of one, CUDA graphs", ok=likeliest == wanted)
    drawn = []
    for each in (unsharded, graphs):
        torch.manual_seed(3)
        drawn.append(continued(each, ids, NEW_TOKENS, do_sample=True, top_k=0)[:, ids.shape[1] :])
    share = float((drawn[0] == drawn[1]).float().mean())
    # On a GPU, compiled code may take other random numbers than torch takes elsewhere.
    is_well = section.is_cuda or share == 1
    section.tell("share of sampled tokens that are those of eager", share, "", ok=is_well)
    _tell_recordings(section, graphs, "small model, greedy and sampled", wanted=3)


def _beside(section: Section, ours: Any, theirs: Any, label: str, can_compile: bool) -> None:
    """Tokens of ``generate`` and prefills, ours and transformers', eager and compiled."""
    ids = section.prompt(16 if section.small else PROMPT, ours.config.vocab_size)
    never_stop(theirs)
    bandwidth, flops = _tell_machine(section)
    floor = _roofline_s(section, ours, ids.shape[1] + 64, bandwidth)
    for name, model in (("transformers", theirs), ("shardconv", ours)):
        _tell_prefill(section, model, ids, flops, f"{label}, {name}")
        _tell_tokens(section, model, ids, floor, f"{label}, {name}, eager")
    if not can_compile:
        section.skip(f"token of generate, {label}, compiled", why_no_compiler(section))
        return
    with section.attempt(f"token of generate, {label}, shardconv, CUDA graphs"):
        _compiled(section, ours, ids, floor, f"{label}, shardconv, CUDA graphs", graphs=True)
    del ours
    section.free()
    if not section.is_cuda:
        section.skip(f"token of generate, {label}, transformers, compiled", "no CUDA")
    elif section.has_time(f"token of generate, {label}, transformers, compiled", COMPILE_S):
        with section.attempt(f"token of generate, {label}, transformers, compiled"):
            torch._dynamo.reset()
            options = {"cache_implementation": "static", "disable_compile": False}
            _tell_tokens(section, theirs, ids, floor, f"{label}, transformers, compiled", **options)


# ------------------------------------------------------------------------------------------------ ranks


def ranks(section: Section) -> None:
    """Several ranks over gloo that share one device."""
    for name, shape, tp in (("small", SMALL, 2), ("small", SMALL, 4), ("few", FEW, 4)):
        label = f"tp {tp}, {shape.kv_heads} kv heads"
        with section.attempt(label):
            source = section.checkpoint(name, shape, torch.float32)
            found = run_ranks(section, source, section.converted(source, tp), tp)
            worst = max(result["difference"] for result in found)
            section.tell(f"logits, float32, {label}", worst, "of the largest", ok=worst <= 1e-3)
            alike = all(result["same"] for result in found)
            section.tell(f"{NEW_TOKENS} greedy tokens, {label}", ok=alike)


def one_of_ranks(section: Section, source: Path, converted: Path) -> None:
    """A rank of ``ranks``: prints its result."""
    dist.init_process_group("gloo")
    try:
        model = shardconv_runtime.load(converted, device=section.device, process_group=dist.group.WORLD)
        unsharded = section.unsharded(source)
        ids = section.prompt(24, unsharded.config.vocab_size)
        value = difference(model(ids).logits, unsharded(ids).logits)
        result = {"difference": value, "same": greedy(model, ids) == greedy(unsharded, ids)}
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(result), flush=True)
    dist.destroy_process_group()


SECTIONS = {
    "rank": rank,
    "nccl": nccl,
    "tp1": tp1,
    "load": load,
    "training": training,
    "ranks": ranks,
    "packed": packed,
    "gpus": gpus,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=[*SECTIONS, "one-of-ranks"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--models", type=Path, nargs=2)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    section = Section(options.section, options.device, options.small, options.scratch, options.seconds)
    if not section.is_cuda:
        run_graphs_as_captured()
    with torch.no_grad():
        if options.models:
            one_of_ranks(section, *options.models)
        else:
            SECTIONS[options.section](section)


if __name__ == "__main__":
    main()
