"""A run is resumed in which some parameters never had a gradient, or are frozen or trained from a step on.

The images of a model that is trained on text, and the scores of a sparse attention, have no state to store,
and a fresh optimizer made one was then missing in the checkpoint; state of a parameter that was frozen later
was lost. Reports: prime-rl#2800 (a crash loop), prime-rl#3399, torchtitan#4474, pytorch#192202.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from small_models import save_random
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardconv

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
CASES = ("all are trained", "some are frozen for a step", "some are frozen at first")

Load = Callable[[Any], Any]
"""The model as it was, or as it was stored."""
Store = Callable[[Any, torch.optim.Optimizer], Any]
Resume = Callable[[Any, torch.optim.Optimizer, Any], None]


def freeze(model: Any, frozen: bool) -> None:
    for name, parameter in model.named_parameters():
        if "down_proj" in name:
            parameter.requires_grad_(not frozen)


def run(case: str, load: Load, store: Store, resume: Resume) -> Tensor:
    """The logits at the end of a run that is interrupted twice."""

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()

    def begin(stored: Any) -> tuple[Any, torch.optim.Optimizer]:
        model = load(stored)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer

    model, optimizer = begin(None)
    freeze(model, case == CASES[2])
    step(model, optimizer)
    stored = store(model, optimizer)
    model, optimizer = begin(stored)
    freeze(model, case == CASES[1])
    resume(model, optimizer, stored)
    step(model, optimizer)
    stored = store(model, optimizer)
    model, optimizer = begin(stored)
    resume(model, optimizer, stored)
    step(model, optimizer)
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=IDS).logits
    return logits


def on_rank(out: Path, root: Path) -> dict[tuple[str, bool], Tensor]:
    """Whole, and in parts of two replicas."""
    found = {}
    for case in CASES:
        for in_parts in (False, True):
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
            options: Any = {"mesh": mesh, "data_parallel": True} if in_parts else {}
            place = root / f"{case}-{in_parts}"

            def load(stored: Path | None, options: Any = options) -> Any:
                return shardconv_runtime.load(
                    out if stored is None else stored / "model", training=True, **options
                )

            def store(model: Any, optimizer: torch.optim.Optimizer, place: Path = place) -> Path:
                target = place / str(int(max(s["step"] for s in optimizer.state.values())))
                shardconv_runtime.save(model, target / "model")
                shardconv_runtime.save_optimizer(model, optimizer, target / "optimizer")
                return target

            def resume(model: Any, optimizer: torch.optim.Optimizer, stored: Path) -> None:
                shardconv_runtime.load_optimizer(model, optimizer, stored / "optimizer")

            found[case, in_parts] = run(case, load, store, resume)
    return found


def one_process(source: Path, case: str) -> Tensor:
    def load(stored: Any) -> Any:
        model = transformers.LlavaForConditionalGeneration.from_pretrained(source).train()
        if stored is not None:
            model.load_state_dict(stored[0])
        return model

    def store(model: Any, optimizer: torch.optim.Optimizer) -> Any:
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    return run(case, load, store, lambda model, optimizer, stored: optimizer.load_state_dict(stored[1]))


def test_runs_are_those_of_one_process(tmp_path: Path) -> None:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 101} | SIZES,
        vision_config={
            "model_type": "clip_vision_model",
            "num_hidden_layers": 2,
            "image_size": 16,
            "patch_size": 8,
        }
        | SIZES,
        image_token_index=100,
    )
    save_random(config, transformers.LlavaForConditionalGeneration, tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", tp=2, check=False)
    ranks = run_processes(2, on_rank, tmp_path / "out", tmp_path, start_group=True)
    for case in CASES:
        wanted = one_process(tmp_path / "model", case)
        for found in ranks:
            for in_parts in (False, True):
                assert torch.allclose(found[case, in_parts], wanted, atol=1e-4), (case, in_parts)
