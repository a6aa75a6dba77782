"""torchtitan reads what ``shardconv export --format dcp`` writes, and its checkpoints can be converted.

Its own checkpointer does both, with its own adapter of names. ``scripts/test_integrations`` installs it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes

pytest.importorskip("torchtitan")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import AsyncMode, CheckpointManager, ModelWrapper
from torchtitan.models import llama3

import shardconv

IDS = torch.arange(3, 19)[None]


def ordinary() -> Any:
    """The model of transformers that is torchtitan's "debugmodel"."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=16,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def checkpointer(seed: int, sharded: bool = False) -> CheckpointManager:
    """torchtitan's, of a new model; the parts that training adds are left out."""
    spec = llama3.model_registry("debugmodel")
    torch.manual_seed(seed)
    model = spec.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    found = CheckpointManager.__new__(CheckpointManager)
    found.states = {"model": ModelWrapper([model])}
    found.sd_adapter = spec.state_dict_adapter(spec.model, None)
    return found


def weights(manager: CheckpointManager) -> dict[str, torch.Tensor]:
    """Of the model, by transformers' names."""
    found: dict[str, Any] = manager.sd_adapter.to_hf(manager.states["model"].state_dict())
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in found.items()
    }


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def load_exported(root: Path, sharded: bool) -> None:
    manager = checkpointer(seed=1, sharded=sharded)
    want = transformers.AutoModelForCausalLM.from_pretrained(root / "plain", dtype="auto").state_dict()
    assert not torch.equal(weights(manager)["lm_head.weight"], want["lm_head.weight"])
    state = manager.states["model"].state_dict()
    manager.dcp_load(state, str(root / "dcp"), from_hf=True, from_quantized=False)
    require_equal(weights(manager), want)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``plain``, and ``dcp``, which was exported of its shards for three ranks."""
    root = tmp_path_factory.mktemp("titan")
    ordinary().save_pretrained(root / "plain")
    shardconv.convert(root / "plain", root / "out", 3)
    shardconv.export(root / "out", root / "dcp")
    return root


def test_torchtitan_loads_an_export(root: Path) -> None:
    load_exported(root, sharded=False)


def test_ranks_of_torchtitan_load_their_parts(root: Path) -> None:
    run_processes(2, load_exported, root, True, start_group=True)


def logits_on_rank(out: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = shardconv_runtime.load(out)(IDS).logits
    return found


def test_a_checkpoint_of_torchtitan_is_converted(root: Path, tmp_path: Path) -> None:
    """As it saves the last one with ``last_save_in_hf``; the config is that of transformers."""
    manager = checkpointer(seed=2)
    manager.pg = None
    state = manager.states["model"].state_dict()
    manager.dcp_save(state, str(tmp_path / "saved"), AsyncMode.DISABLED, to_hf=True)
    shutil.copy(root / "plain" / "config.json", tmp_path / "saved")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    require_equal(dict(model.state_dict()), weights(manager))
    shardconv.convert(tmp_path / "saved", tmp_path / "out", 2)
    with torch.no_grad():
        want = model(IDS).logits
    for found in run_processes(2, logits_on_rank, tmp_path / "out"):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-4)
