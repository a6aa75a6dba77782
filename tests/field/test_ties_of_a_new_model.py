"""A model with a tied head is initialized, trained in parts of replicas, and resumed.

Made on meta, the head came untied, and got the gradient of its own use alone; the checkpoint left it out, and
what was resumed was another model. Reports: Automodel#2511, verl#7835, lmms-engine#157, and accelerate#4171
and ezpz#237 (FSDP2 refuses a parameter of two groups).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from safetensors import safe_open
from small_models import small_config
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardconv
from shardconv.arguments import RandomInit

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])


def step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def on_rank(out: Path, root: Path) -> dict[str, list[Tensor]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, options in {"whole": {}, "in parts": {"mesh": mesh, "data_parallel": True}}.items():
        model: Any = shardconv_runtime.load(out, training=True, **options)
        step(model)
        shardconv_runtime.save(model, root / name)
        again: Any = shardconv_runtime.load(root / name, training=True, **options)
        found[name] = [logits(model), logits(again)]
        step(again)
        assert again.lm_head.weight is again.model.embed_tokens.weight
        found[name].append(logits(again))
        again.save_pretrained(root / f"{name}-plain")
    return found


def test_it_stays_tied(tmp_path: Path) -> None:
    """As in one process."""
    small_config(tie_word_embeddings=True, architectures=["LlamaForCausalLM"]).save_pretrained(
        tmp_path / "new"
    )
    shardconv.convert(tmp_path / "new", tmp_path / "out", tp=2, random_init=RandomInit(seed=1), check=False)
    shardconv.merge(tmp_path / "out", tmp_path / "merged")
    ranks = run_processes(2, on_rank, tmp_path / "out", tmp_path, start_group=True)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    step(model)
    trained = logits(model)
    step(model)
    wanted = [trained, trained, logits(model)]
    for found in ranks:
        for name, states in found.items():
            for ours, theirs in zip(states, wanted, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-4), name
    for name in ("whole", "in parts"):
        plain = tmp_path / f"{name}-plain"
        with safe_open(plain / "model.safetensors", "pt") as file:
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert torch.allclose(
            logits(transformers.LlamaForCausalLM.from_pretrained(plain)), wanted[2], atol=1e-4
        )
