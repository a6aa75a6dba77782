"""Our files beside what vLLM's own loader puts into its parameters, byte for byte, on both ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT
from ports import free_port
from safetensors.torch import load_file
from vllm_models import KINDS, NEEDS_VLLM, save

import shardconv
from shardconv.arguments import Writing
from shardconv.exports.state_files import verify_state

pytestmark = [pytest.mark.vllm, NEEDS_VLLM]

TP = 2
TIMEOUT_S = 300


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def really_loaded(directory: Path, folder: Path, dtype: str = "bfloat16") -> list[dict[str, torch.Tensor]]:
    """vLLM's state of each rank, by a process for each."""
    program, port = ROOT / "tests" / "engines" / "real_load.py", free_port()
    commands = [
        [sys.executable, str(program), str(directory), str(rank), str(TP), str(port), dtype]
        for rank in range(TP)
    ]
    started = [
        subprocess.Popen(
            [*command, str(folder / f"real-{rank}.pt")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank, command in enumerate(commands)
    ]
    try:
        for process in started:
            output, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, output.decode()[-3000:]
    finally:
        for process in started:
            process.kill()
    return [torch.load(folder / f"real-{rank}.pt") for rank in range(TP)]


def exported(directory: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors in the files of each rank."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(TP)]
    for rank, tensors in enumerate(found):
        for file in directory.glob(f"model-rank-{rank}-part-*.safetensors"):
            tensors |= load_file(file)
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def require_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name


def test_the_bytes_are_those_of_the_loader(kind: str, tmp_path: Path) -> None:
    model = save(kind, tmp_path / "model")
    shardconv.export_vllm(model, tmp_path / "state", TP, writing=Writing(max_file_size=200_000))
    verify_state(tmp_path / "state")
    for found, wanted in zip(exported(tmp_path / "state"), really_loaded(model, tmp_path), strict=True):
        require_same(found, wanted)


def test_a_converted_directory_gives_the_same_files(tmp_path: Path) -> None:
    model = save("mixture", tmp_path / "model")
    shardconv.convert(model, tmp_path / "out", 4, check=False)
    shardconv.export_vllm(model, tmp_path / "one", TP)
    shardconv.export_vllm(tmp_path / "out", tmp_path / "other", TP)
    for found, wanted in zip(exported(tmp_path / "one"), exported(tmp_path / "other"), strict=True):
        require_same(found, wanted)
