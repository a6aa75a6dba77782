"""A run is resumed in another dtype than it was saved in: bfloat16 before, float32 with mixed precision now.

torch's ``load_state_dict`` casts an optimizer's tensors to the dtype of their parameters, without which AdamW
raises in its first step; it does so too where an optimizer keeps another dtype on purpose, and loses that.
Reports: OpenTau#184 (bfloat16 moments, float32 parameters), torchtitan#4615 (moments kept in bfloat16 on
purpose), speculators#899, pytorch#43706.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardconv

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
DTYPES = {
    "as it was": (torch.bfloat16, torch.bfloat16),
    "more exact": (torch.bfloat16, torch.float32),
    "less exact": (torch.float32, torch.bfloat16),
}
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}
Outcome = tuple[set[tuple[str, torch.dtype]], Tensor]


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()


def outcome(model: Any, optimizer: torch.optim.Optimizer) -> Outcome:
    """The dtypes of the state, and the logits after two steps more."""
    found = {
        (key, thing.dtype)
        for state in optimizer.state.values()
        for key, thing in state.items()
        if isinstance(thing, Tensor)
    }
    step(model, optimizer)
    with torch.no_grad():
        return found, model(IDS).logits.float()


def resumed(out: Path, root: Path, kind: str, case: str) -> list[Outcome]:
    """Whole, and in parts of two replicas."""
    before, after = DTYPES[case]
    model = shardconv_runtime.load(out, training=True, dtype=before)
    optimizer = OPTIMIZERS[kind](model.parameters())
    step(model, optimizer)
    place = root / f"{kind}-{case}"
    shardconv_runtime.save(model, place / "model")
    shardconv_runtime.save_optimizer(model, optimizer, place / "optimizer")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for options in ({}, {"mesh": mesh, "data_parallel": True}):
        again: Any = shardconv_runtime.load(place / "model", training=True, dtype=after, **options)
        optimizer = OPTIMIZERS[kind](again.parameters())
        shardconv_runtime.load_optimizer(again, optimizer, place / "optimizer")
        found.append(outcome(again, optimizer))
    return found


def keep_own_dtype(out: Path, root: Path) -> set[tuple[str, torch.dtype]]:
    """Moments in float32 of parameters in bfloat16."""
    model = shardconv_runtime.load(out, training=True, dtype=torch.bfloat16)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter, dtype=torch.float32)
    shardconv_runtime.save_optimizer(model, optimizer, root / "own")
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    shardconv_runtime.load_optimizer(model, optimizer, root / "own")
    return outcome(model, optimizer)[0]


def resume_all(out: Path, root: Path) -> tuple[dict[tuple[str, str], list[Outcome]], Any]:
    found = {(kind, case): resumed(out, root, kind, case) for kind in OPTIMIZERS for case in DTYPES}
    return found, keep_own_dtype(out, root)


def one_process(source: Path, kind: str, case: str) -> Outcome:
    before, after = DTYPES[case]
    model = transformers.LlamaForCausalLM.from_pretrained(source, dtype=before)
    optimizer = OPTIMIZERS[kind](model.parameters())
    step(model, optimizer)
    again = transformers.LlamaForCausalLM.from_pretrained(source, dtype=after)
    again.load_state_dict(model.state_dict())
    next_optimizer = OPTIMIZERS[kind](again.parameters())
    next_optimizer.load_state_dict(optimizer.state_dict())
    return outcome(again, next_optimizer)


def test_state_has_the_dtype_of_its_parameters(saved_llama: Path, tmp_path: Path) -> None:
    """As in one process; a dtype that was not theirs stays."""
    shardconv.convert(saved_llama, tmp_path / "out", tp=2, check=False)
    for found, own in run_processes(2, resume_all, tmp_path / "out", tmp_path, start_group=True):
        assert own == {("momentum_buffer", torch.float32)}
        for (kind, case), outcomes in found.items():
            dtypes, logits = one_process(saved_llama, kind, case)
            for ours, theirs in outcomes:
                assert ours == dtypes, (kind, case)
                assert torch.allclose(theirs, logits, atol=0.05 * float(logits.abs().max())), (kind, case)
