"""What one rank, and the unsharded model, do with a checkpoint: the numbers that the tests compare."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
from distributed import comm_counts
from shardconv_runtime.parallel.build import stored_tensors
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from shardconv.simulation.model_runs import Float64

NEW_TOKENS = 10


@dataclass(frozen=True)
class Measured:
    """Of one rank; or of the unsharded model, whose collectives are none."""

    double: Tensor
    """Logits of the float64 model without padding ``[B, S, V]``."""
    exact: Tensor
    """Of the padded prompts, where code that asks for float32 gets float64."""
    single: Tensor
    """Of the padded prompts, by the float32 model."""
    greedy: Tensor
    """Prompt and new tokens of the float32 model ``[B, S + T]``; with left padding and a KV cache."""
    sampled: Tensor
    collectives: Counter[str]
    """Of one forward pass, by kind."""
    by_module: dict[str, Counter[str]]
    """The same for each child of each layer, by FQN; what is outside of the layers under its own."""
    sizes: dict[str, int]
    """Elements held of each parameter of two or more dims."""
    shard: Tensor | None = None
    """Logits with ``gather_logits=False``: local ``[B, S, V/tp]``."""
    refusal: str = ""
    """What that model says when it is given labels."""


def prompts() -> dict[str, Tensor]:
    """Two prompts of 7 and 4 tokens, the second padded on the left: ``[2, 7]``."""
    ids = torch.tensor([[11, 245, 3, 77, 130, 9, 201], [0, 0, 0, 88, 5, 254, 19]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])
    return {"input_ids": ids, "attention_mask": mask}


def measure_rank(path: Path, eager_experts: bool) -> Measured:
    """Load a converted directory on this rank, in float64 and in float32, and run it."""
    double = shardconv_runtime.load(path)
    measured = measure(double, shardconv_runtime.load(path, dtype="float32"), eager_experts)
    if int(os.environ["WORLD_SIZE"]) == 1:
        return measured
    local = shardconv_runtime.load(path, dtype="float32", gather_logits=False)
    shard, refusal = _without_gather(local)
    return Measured(**(vars(measured) | {"shard": shard, "refusal": refusal}))


def measure_unsharded(path: Path, eager_experts: bool) -> Measured:
    """The same of the unsharded model, as transformers loads it."""
    import transformers

    def load(dtype: torch.dtype) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    return measure(load(torch.float64), load(torch.float32), eager_experts)


def measure(double: Any, single: Any, eager_experts: bool) -> Measured:
    """Run a float64 and a float32 instance of one model.

    Args:
        eager_experts: let the float64 model loop over its experts: torch's grouped matmul has no
            float64 kernel on the CPU.
    """
    if eager_experts:
        double.set_experts_implementation("eager")
    inputs = prompts()
    with torch.no_grad():
        # Not padded: eager attention casts the mask's lowest float64 to float32, and gets NaN.
        logits = double(inputs["input_ids"]).logits
        with Float64():
            exact = double(**inputs).logits
        with _counting() as counter, _by_module(single, counter) as by_module:
            float32 = single(**inputs).logits
    greedy = single.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    torch.manual_seed(5 + int(os.environ.get("RANK", 0)))  # the ranks start from different states
    sampled = single.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0)
    sizes = {name: t.numel() for name, t in stored_tensors(double) if t.dim() >= 2}
    return Measured(logits, exact, float32, greedy, sampled, comm_counts(counter), by_module, sizes)


def _without_gather(model: Any) -> tuple[Tensor, str]:
    with torch.no_grad():
        shard = model(**prompts()).logits
        try:
            model(**prompts(), labels=prompts()["input_ids"])
        except shardconv_runtime.PlanError as error:
            return shard, str(error)
    return shard, ""


@contextmanager
def _counting() -> Iterator[CommDebugMode]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "For backward hooks to be called")  # the mode has some
        with CommDebugMode() as counter:
            yield counter


@contextmanager
def _by_module(model: nn.Module, counter: CommDebugMode) -> Iterator[dict[str, Counter[str]]]:
    """Collect the collectives of the modules that ``_parts`` names while they run.

    The counter's own table by module is of no use here: it sees what a module's forward does, and the
    collectives of a boundary are around that.
    """
    found: dict[str, Counter[str]] = {}
    before: dict[str, Counter[str]] = {}
    handles = []
    for name in _parts(model):
        module = model.get_submodule(name)

        def enter(*_: Any, name: str = name) -> None:
            before[name] = comm_counts(counter)

        def leave(*_: Any, name: str = name) -> None:
            if used := comm_counts(counter) - before[name]:
                found[name] = found.get(name, Counter()) + used

        handles += [  # past the wrapper of a loaded model, which compares what ranks have there
            nn.Module.register_forward_pre_hook(module, enter, prepend=True),
            nn.Module.register_forward_hook(module, leave),
        ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _parts(model: nn.Module) -> list[str]:
    """Children of the repeated layers, and of all other modules those that have no such child."""
    lists = [
        name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and name.count(".") <= 1
    ]
    layers = [f"{name}.{i}" for name in lists for i in range(len(model.get_submodule(name)))]
    inside = [
        f"{layer}.{child}" for layer in layers for child, _ in model.get_submodule(layer).named_children()
    ]
    leaves = [n for n, m in model.named_modules() if not list(m.children())]
    return inside + [n for n in leaves if not n.startswith(tuple(f"{name}." for name in lists))]
