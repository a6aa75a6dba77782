"""Converted directories loaded by real processes: the same numbers, and errors that hang nobody."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
from converted import llama_plan, random_llama, write_directory
from distributed import comm_counts, run_errors, run_processes
from shardconv_runtime.comm import agreement, mesh
from shardconv_runtime.comm.launchers import OTHER_LAUNCHERS
from shardconv_runtime.errors import (
    CheckpointError,
    CodeMismatchError,
    LaunchError,
    PlanError,
    ShardconvError,
)
from shardconv_runtime.files import manifest
from shardconv_runtime.files.manifest import rank_directory
from shardconv_runtime.files.tp_folders import nothing_for
from shardconv_runtime.format.slices import Mesh
from torch.distributed.tensor.debug import CommDebugMode
from warm_compiler import warm_up

IDS = [[1, 5, 100, 7, 50], [3, 2, 99, 0, 51]]


def converted(path: Path, mesh: Mesh = (2,), **changes: object) -> tuple[Path, Any]:
    model = random_llama(**changes)
    model.generation_config.pad_token_id = 0
    return write_directory(path / "out", model, llama_plan(model.config, mesh), shards=2), model


def run_model(path: Path) -> dict[str, Any]:
    """Everything that a user does with a model, on one rank."""
    model = shardconv_runtime.load(path)
    ids = torch.tensor(IDS)
    with torch.no_grad(), CommDebugMode() as counter:
        logits = model(ids).logits
    greedy = model.generate(ids, max_new_tokens=5, do_sample=False)
    torch.manual_seed(7 + int(os.environ.get("RANK", 0)))  # the ranks' states differ
    sampled = model.generate(ids, max_new_tokens=8, do_sample=True, top_k=0)
    counts = comm_counts(counter)
    assert not model.training
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(p.requires_grad for p in model.parameters())
    return {"logits": logits, "greedy": greedy, "sampled": sampled, "counts": counts}


@pytest.mark.parametrize(
    ("mesh_shape", "tied"),
    [
        ((1,), True),
        ((2,), True),
        ((2, 2), False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (((1,), True), ((2,), False), ((2, 2), True))
        ),
    ],
)
def test_same_logits_and_tokens(tmp_path: Path, mesh_shape: Mesh, tied: bool) -> None:
    path, model = converted(tmp_path, mesh_shape, tie_word_embeddings=tied)
    ids = torch.tensor(IDS)
    with torch.no_grad():
        logits = model(ids).logits
    greedy = model.generate(ids, max_new_tokens=5, do_sample=False)
    torch.manual_seed(7)
    sampled = model.generate(ids, max_new_tokens=8, do_sample=True, top_k=0)
    num_ranks = torch.Size(mesh_shape).numel()
    for result in run_processes(num_ranks, run_model, path):
        torch.testing.assert_close(result["logits"], logits, rtol=0, atol=1e-9 * float(logits.abs().max()))
        assert torch.equal(result["greedy"], greedy)
        assert torch.equal(result["sampled"], sampled), "as rank 0 alone would have drawn"
        layers = model.config.num_hidden_layers
        expected = {"all_reduce": 1 + 2 * layers, "all_gather_into_tensor": 1}
        assert result["counts"] == (expected if num_ranks > 1 else {})


def test_one_rank_needs_no_launcher(tmp_path: Path) -> None:
    path, model = converted(tmp_path, (1,))
    part = shardconv_runtime.load(path)
    assert not dist.is_initialized()
    with torch.no_grad():
        assert torch.allclose(part(torch.tensor(IDS)).logits, model(torch.tensor(IDS)).logits)


def load_again_and_again(path: Path) -> tuple[int, list[torch.dtype], list[int]]:
    ids = torch.tensor(IDS)
    models = [
        shardconv_runtime.load(path),
        shardconv_runtime.load(str(path), dtype="float32"),
        shardconv_runtime.load(path, dtype=torch.bfloat16, device="cpu", gather_logits=False),
    ]
    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        models.append(shardconv_runtime.load(path))
    assert len(dist.distributed_c10d._world.pg_map) == groups, "loads share their groups"
    with torch.no_grad():
        logits = [model(ids).logits for model in models]
    again = dict(models[-1].named_parameters())
    assert all(torch.equal(parameter, again[name]) for name, parameter in models[0].named_parameters())
    torch.testing.assert_close(logits[-1], logits[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits[1].double(), logits[0], rtol=1e-4, atol=1e-3)
    with pytest.raises(PlanError, match="gather_logits=True"):
        models[2].generate(ids, max_new_tokens=1)
    return groups, [x.dtype for x in logits[:3]], list(logits[2].shape)


def test_many_loads_in_one_process_that_has_a_group(tmp_path: Path) -> None:
    path, _ = converted(tmp_path)
    first, second = run_processes(2, load_again_and_again, path, start_group=True)
    assert first[1] == [torch.float64, torch.float32, torch.bfloat16]
    assert (first[2][-1], second[2][-1]) == (51, 50)


def load_in_halves(paths: list[Path]) -> torch.Tensor:
    """Two models, each on two of four processes."""
    half = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[half]
    assert isinstance(group, dist.ProcessGroup)
    model = shardconv_runtime.load(paths[half], process_group=group)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor(IDS)).logits
    return logits


def test_a_group_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = converted(tmp_path / "a"), converted(tmp_path / "b", num_hidden_layers=1)
    results = run_processes(4, load_in_halves, [first[0], second[0]], start_group=True)
    for rank, logits in enumerate(results):
        with torch.no_grad():
            torch.testing.assert_close(logits, (first, second)[rank // 2][1](torch.tensor(IDS)).logits)


def load_outside(path: Path) -> None:
    group = dist.new_group([0, 1])
    shardconv_runtime.load(path, process_group=group)


def test_a_process_outside_of_the_group_is_told(tmp_path: Path) -> None:
    first, second, outside = run_errors(3, load_outside, converted(tmp_path)[0], start_group=True)
    assert (first, second) == (None, None)
    assert isinstance(outside, LaunchError)
    assert "not in the group" in str(outside)


def compile_it(path: Path) -> bool:
    model = shardconv_runtime.load(path)
    ids = torch.tensor(IDS)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        return torch.allclose(compiled(ids, use_cache=False).logits, expected, rtol=1e-12)


def test_a_loaded_model_compiles_into_one_graph(tmp_path: Path) -> None:
    warm_up()
    assert run_processes(2, compile_it, converted(tmp_path)[0]) == [True, True]


# --- errors: every rank raises, none hangs


def load(path: Path) -> None:
    shardconv_runtime.load(path)


def errors_of(path: Path, num_processes: int = 2) -> list[BaseException]:
    begin = time.monotonic()
    errors = run_errors(num_processes, load, path)
    assert time.monotonic() - begin < 60
    assert all(isinstance(error, ShardconvError) for error in errors), errors
    return errors


@pytest.mark.parametrize("num_processes", [1, 3])
def test_wrong_world_size(tmp_path: Path, num_processes: int) -> None:
    for error in errors_of(converted(tmp_path)[0], num_processes):
        assert isinstance(error, LaunchError)
        assert f"converted for tp=2, and {num_processes} process(es) load it" in str(error)
        assert "torchrun --nproc-per-node 2 your_script.py" in str(error)


@pytest.mark.parametrize("name", OTHER_LAUNCHERS)
def test_a_launcher_that_torch_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each process takes itself for the only one."""
    monkeypatch.setenv(name, "2")
    with pytest.raises(LaunchError, match="started 2, but RANK is not set: start torchrun with it"):
        load(converted(tmp_path)[0])
    assert "started 2, but RANK is not set" in nothing_for("user/model", ["tp-2/manifest.json"], 1)
    monkeypatch.setenv("RANK", "0")
    assert "RANK is not set" not in nothing_for("user/model", ["tp-2/manifest.json"], 1)


def test_a_truncated_file_of_one_rank(tmp_path: Path) -> None:
    path, _ = converted(tmp_path)
    file = next((path / rank_directory(1, 2)).iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    other, own = errors_of(path)
    assert isinstance(own, CheckpointError)
    assert file.name in str(own)
    assert "bytes" in str(own)
    assert isinstance(other, LaunchError)
    assert str(other) == f"rank 1: {own}"


def test_a_missing_file_of_one_rank(tmp_path: Path) -> None:
    path, _ = converted(tmp_path)
    shutil.rmtree(path / rank_directory(0, 2))
    own, other = errors_of(path)
    assert "is missing (rank 0 needs it)" in str(own)
    assert str(other).startswith("rank 0: ")


def test_swapped_rank_files(tmp_path: Path) -> None:
    path, _ = converted(tmp_path)
    files = [path / rank_directory(rank, 2) / "model-00001-of-00002.safetensors" for rank in (0, 1)]
    first, second = (file.read_bytes() for file in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    for rank, error in enumerate(errors_of(path)):
        assert isinstance(error, CheckpointError)
        assert "rank" in str(error)
        assert rank_directory(rank, 2) in str(error)


def test_a_directory_that_only_one_rank_has(tmp_path: Path) -> None:
    path, _ = converted(tmp_path)
    own, other = run_errors(2, load_other_path, path)
    assert isinstance(own, CheckpointError)
    assert "no such directory" in str(own)
    assert isinstance(other, LaunchError)
    assert "rank 0: " in str(other)


def load_other_path(path: Path) -> None:
    shardconv_runtime.load(path if int(os.environ["RANK"]) else path / "nowhere")


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        shardconv_runtime.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="not a converted model"):
        shardconv_runtime.load(tmp_path)


def rewrite(path: Path, **changes: Any) -> None:
    """Change the plan, and let the manifest agree."""
    found = manifest.read(path)
    text = (path / manifest.PLAN_NAME).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (path / manifest.PLAN_NAME).write_text(text)
    manifest.write(
        dataclasses.replace(found, plan_sha256=manifest.sha256_of(path / manifest.PLAN_NAME)), path
    )


def test_a_plan_of_another_version(tmp_path: Path) -> None:
    path, _ = converted(tmp_path)
    rewrite(path, **{'"version": 6': '"version": 99'})
    for error in errors_of(path):
        assert isinstance(error, PlanError)
        assert "99" in str(error)
        assert "convert the model again" in str(error)


def test_other_model_code(tmp_path: Path) -> None:
    path, _ = converted(tmp_path)
    rewrite(path, modeling_llama="modeling_mistral", LlamaForCausalLM="MistralForCausalLM")
    for error in errors_of(path):
        assert isinstance(error, CodeMismatchError)
        assert "replan" in str(error)


def test_remote_code_needs_consent(tmp_path: Path) -> None:
    model = random_llama()
    plan = llama_plan(model.config, (1,))
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, trust_remote_code=True))
    with pytest.raises(PlanError, match="trust_remote_code=True"):
        shardconv_runtime.load(write_directory(tmp_path / "remote", model, plan))


def test_a_failure_while_building_reaches_all_ranks(tmp_path: Path) -> None:
    path, _ = converted(tmp_path)
    own, other = run_errors(2, fail_while_reading, path)
    assert isinstance(own, OSError)
    assert str(other) == "rank 0: the disk is gone"


def fail_while_reading(path: Path) -> None:
    from shardconv_runtime.loading import rank_files

    def fill(*args: object) -> None:
        raise OSError("the disk is gone")

    if os.environ["RANK"] == "0":
        rank_files.fill = fill  # type: ignore[assignment]
    shardconv_runtime.load(path)


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    waiting, _ = run_errors(2, leave_the_other_alone, converted(tmp_path)[0], start_group=True)
    assert isinstance(waiting, LaunchError)
    assert "another rank did not answer within 1 s" in str(waiting)


def leave_the_other_alone(path: Path) -> None:
    agreement.AGREE_TIMEOUT_S = 1  # type: ignore[misc]
    start, gave_up = mesh.launch(), path.parent / "rank 0 gave up"
    if start.rank == 0:
        try:
            shardconv_runtime.load(path)
        finally:
            gave_up.touch()
    else:
        while not gave_up.exists():
            time.sleep(0.05)


def load_on_cuda(path: Path) -> None:
    shardconv_runtime.load(path, device="cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without cuda")
def test_a_device_that_the_group_cannot_serve(tmp_path: Path) -> None:
    for error in run_errors(2, load_on_cuda, converted(tmp_path)[0], start_group=True):
        assert isinstance(error, LaunchError)
        assert "cuda" in str(error)


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="dtype='float23'"):
        shardconv_runtime.load(tmp_path, dtype="float23")
