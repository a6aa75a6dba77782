"""Exports read by torch in real processes, into tensors that are sharded in another way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from distributed import run_processes
from export_cases import CASES, Exported, convert, same
from library_checkpoints import save_gptq
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.plan import Plan, parameter_plans
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import shardconv
from shardconv.exports.export_dcp import export


def save_state(case: Exported, path: Path) -> Path:
    """Save what is expected; return ``path``."""
    save_file({name: tensor.clone() for name, tensor in case.state.items()}, path)  # tied ones apart
    return path


def placements(dims: int, rotation: int) -> Sequence[Placement]:
    """One of those that a tensor can have."""
    choices: list[Placement] = [Replicate(), *map(Shard, range(dims))]
    return [choices[rotation % len(choices)]]


def all_differing(directory: Path, expected: Path) -> list[tuple[int, list[str]]]:
    """On a rank, with each tensor placed in three ways."""
    return [differing(directory, expected, rotation) for rotation in range(3)]


def differing(directory: Path, expected: Path, rotation: int) -> tuple[int, list[str]]:
    """How many local tensors a rank reads, and which are not what they should be."""
    mesh = init_device_mesh("cpu", (2,))
    wanted = {
        name: distribute_tensor(tensor, mesh, placements(tensor.dim(), index + rotation))
        for index, (name, tensor) in enumerate(sorted(load_file(expected).items()))
    }
    found = {name: torch.full_like(tensor, 77) for name, tensor in wanted.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(directory)))
    bad = [name for name, tensor in wanted.items() if not same(found[name].to_local(), tensor.to_local())]
    return len(found), bad


@pytest.mark.parametrize("name", CASES)
def test_tensors_that_are_sharded_otherwise(name: str, tmp_path: Path) -> None:
    case = convert(CASES[name], tmp_path)
    export(case.out, case.directory)
    save_file(
        {name: tensor.clone() for name, tensor in case.state.items()}, tmp_path / "expected.safetensors"
    )
    for rank in run_processes(
        2, all_differing, case.directory, tmp_path / "expected.safetensors", start_group=True
    ):
        assert rank == [(len(case.state), [])] * 3


def save_as_planned(state: Path, plan: Plan, directory: Path) -> None:
    """On a rank: have torch save tensors that are sharded as by a plan."""
    mesh = init_device_mesh("cpu", (2,))
    tensors = load_file(state)
    aliases = dict(plan.tied)
    found = {}
    for name, tensor in tensors.items():
        dims = parameter_plans(plan)[aliases.get(name, name)].dims
        split = [Shard(index) for index, dim in enumerate(dims) if axes_of(dim)]
        found[name] = distribute_tensor(tensor, mesh, split or [Replicate()])
    dcp.save(found, storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True))


def headers(directory: Path) -> dict[str, dict[str, str]]:
    """Metadata by file."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found[path.name] = file.metadata()
    return found


def test_files_are_like_those_that_torch_writes(tmp_path: Path) -> None:
    case = convert(CASES["tied"], tmp_path)
    export(case.out, case.directory)
    state = save_state(case, tmp_path / "state.safetensors")
    run_processes(2, save_as_planned, state, case.plan, tmp_path / "torch", start_group=True)
    ours, theirs = headers(case.directory), headers(tmp_path / "torch")
    assert list(ours) == list(theirs)
    assert len(ours) == 2
    both: list[dict[str, Any]] = []
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        both.append({})
        for which, metadata in (("ours", a), ("theirs", b)):
            both[-1][which] = json.loads(metadata.pop("DCP_SHARDING_INFO"))
        assert a == b
    everywhere = set.intersection(*(set(file["theirs"]) for file in both))
    assert (
        len(everywhere) == 2 * 7 + 2
    )  # what is sharded; which rank writes the rest is no part of the format
    for file in both:
        assert {name: file["ours"][name] for name in everywhere} == {n: file["theirs"][n] for n in everywhere}
    assert {n for file in both for n in file["ours"]} == {n for file in both for n in file["theirs"]}


def logits(directory: Path, ids: torch.Tensor, **sizes: int) -> torch.Tensor:
    """On a rank: those of transformers' own tensor and data parallelism."""
    import transformers.integrations.accelerate as integration
    from transformers.distributed import DistributedConfig

    # from_pretrained asks that accelerate be installed, and uses nothing of it here
    integration.is_accelerate_available = lambda: True
    config = DistributedConfig(tp_plan="auto", **sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, distributed_config=config)
    with torch.no_grad():
        return model.eval()(ids).logits


IDS = torch.tensor([[11, 45, 3, 37, 30, 9, 21]])


def unsharded_logits(model: Path) -> torch.Tensor:
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(model)(IDS).logits


def test_transformers_shards_it_on_loading(tmp_path: Path) -> None:
    case = convert(CASES["uneven, heads cut"], tmp_path)
    export(case.out, case.directory)
    for found in run_processes(2, partial(logits, tp_size=2), case.directory, IDS):
        torch.testing.assert_close(found, unsharded_logits(case.model))


@pytest.mark.slow
def test_transformers_loads_it_on_a_mesh_of_tensor_and_data_parallel_ranks(tmp_path: Path) -> None:
    """Written for 4 ranks, read by 2 that are sharded twice over data-parallel ones."""
    case = convert(replace(CASES["fewer key/value heads than ranks"], dtype="float32"), tmp_path)
    export(case.out, case.directory)
    assert case.plan.tp == 4
    wanted = unsharded_logits(case.model)
    for found in run_processes(4, partial(logits, tp_size=2, fsdp_size=2), case.directory, IDS):
        torch.testing.assert_close(found, wanted)


@pytest.mark.formats
def test_transformers_refuses_it_quantized(tmp_path: Path) -> None:
    """Its quantizers have no tensor parallelism for weights that stay packed."""
    save_gptq(tmp_path / "model", 4, 32, act_order=False)
    shardconv.convert(tmp_path / "model", tmp_path / "out", 2, check=False)
    export(tmp_path / "out", tmp_path / "dir")
    with pytest.raises(
        Exception, match="Quantization is not supported when loading a distributed checkpoint"
    ):
        run_processes(2, partial(logits, tp_size=2), tmp_path / "dir", IDS)
