#!/usr/bin/env python3
"""Bytes that one decoding step moves, from its compiled graph: rank 0 of 8 of an 8B model.

torch's compiler lowers the step's graph to kernels, which are not generated: the bytes that each kernel
reads and writes are added up. The floor is the weights (of the embedding one row) and the cache, each read
once. Two forms of attention: transformers' ``sdpa``, and the one of ``decode_attention.py``.

    python benchmarks/step_bytes.py [--layers 32] [--length 512 8192] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from convert import render
from lone_rank import Alone, lone_rank
from shardconv_runtime.inference import decoding
from shardconv_runtime.inference.compiling import compile_model
from shardconv_runtime.inference.generation import DECODER
from synthetic import LLAMA_8B, Shape

# Private to the compiler, all of it: nothing public counts bytes of kernels that are not generated.
from torch._dynamo.utils import detect_fake_mode
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import compile_fx, view_to_reshape
from torch._inductor.debug import DebugContext
from torch._inductor.dependencies import MemoryDep, StarDep, WeakDep
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

LEAST_REACH = decoding.LEAST_REACH
ONCE = "one look at the cache"
FORMS = {"transformers' sdpa": False, ONCE: True}


def count_bytes(graph: GraphLowering) -> int:
    """Add up what the kernels of a lowered graph read and write."""
    total = 0
    for node in graph.scheduler.nodes:
        mutated = {name for buffer in node.get_outputs() for name in buffer.get_mutations()}
        for dep in node.read_writes.reads | node.read_writes.writes:
            # An order only; or a buffer in which some rows are written, which the write counts.
            if isinstance(dep, WeakDep) or (isinstance(dep, StarDep) and dep.name in mutated):
                continue
            if isinstance(dep, MemoryDep) and dep.is_indirect():  # picked rows of a table
                count = 1
                for size in dep.size:
                    count *= int(size)
                total += count * graph.get_dtype(dep.name).itemsize
            else:
                total += graph.get_dep_size_hint(dep)
    return total


@contextmanager
def counting() -> Iterator[list[int]]:
    """In this context ``torch.compile`` generates no code; gives the bytes of each graph."""
    found: list[int] = []

    def inner(module: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            view_to_reshape(module)
            post_grad_passes(module, is_inference=True)
        graph = GraphLowering(module)
        with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            graph._update_scheduler()
            found.append(count_bytes(graph))
        return make_boxed_func(module.forward)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(module, inputs, inner_compile=inner)

    compile_ = torch.compile
    torch.compile = lambda function, **given: compile_(function, fullgraph=True, backend=backend)
    try:
        yield found
    finally:
        torch.compile = compile_


def bytes_of_step(shape: Shape, tp: int, length: int, attends_once: bool, reach: int) -> dict[str, int]:
    """Bytes of one step of rank 0 and their floor.

    Args:
        length: tokens of the text, prompt and answer; the cache has as many slots, or more.
        reach: of these slots, how many a step reads.
    """
    torch._dynamo.reset()
    decoding.LEAST_REACH = reach
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as place, counting() as found, torch.no_grad():
        model = lone_rank(shape, tp, Path(place), lambda p: Alone(0, p.mesh), cpu, torch.bfloat16)
        compile_model(model, cuda_graphs=False)
        decoder: decoding.Decoder = vars(model)[DECODER]
        decoder._attends_once = attends_once
        ids = torch.arange(16)[None]
        decoder._least_slots = length
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
    assert decoder._attends_once == attends_once, "the two forms of attention differ"
    state, _ = list(decoder._recorded.values())[-1]
    table = model.get_input_embeddings().weight
    weights = sum(p.nbytes for p in model.parameters() if p is not table)
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in state.cache.layers)
    (moved,) = found
    slots = {"slots": state.bucket.slots, "read": state.bucket.reach}
    return {"moved": moved, "weights": weights, "cache": cache, **slots}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = []
    cases = [(length, *form, length) for length in options.length for form in FORMS.items()]
    cases.append((max(options.length), ONCE, True, LEAST_REACH))
    for length, name, attends_once, reach in cases:
        found = bytes_of_step(replace(LLAMA_8B, layers=options.layers), 8, length, attends_once, reach)
        row = {"slots": str(found["slots"]), "read": str(found["read"]), "attention": name}
        for what in ("moved", "weights", "cache"):
            row[f"{what}, MB"] = f"{found[what] / 1e6:.1f}"
        rows.append(row | {"x floor": f"{found['moved'] / (found['weights'] + found['cache']):.3f}"})
        print(rows[-1], flush=True)
    if options.markdown:
        options.markdown.write_text(render(rows, ()))


if __name__ == "__main__":
    main()
