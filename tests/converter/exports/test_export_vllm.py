"""The files for vLLM: written, continued, in parts, verified. vLLM itself is stood in for by two slices."""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import save_causal
from hub_server import HubServer
from safetensors.torch import load_file, save_file
from shardconv_runtime.checkpoint import lazy_tensor as lazy
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, LazyTensor, from_leaf
from shardconv_runtime.errors import DamagedError, ShardconvError
from small_conversion import crashes

import shardconv
from shardconv import cli
from shardconv.arguments import Writing
from shardconv.converted import shards
from shardconv.exports import export_vllm as exporting
from shardconv.exports import state_files as verifying
from shardconv.exports import vllm_calls, vllm_state
from shardconv.exports.state_files import is_engine_state, read, verify_state
from shardconv.exports.vllm_state import EngineState

TP = 2
VERSION = f"{vllm_calls.TESTED[0]}.0"


def rows(tensor: LazyTensor, rank: int, tp: int) -> LazyTensor:
    """A rank's rows."""
    size = tensor.shape[0] // tp
    return lazy.take(tensor, 0, ((rank * size, (rank + 1) * size),))


def computed(tensor: LazyTensor) -> LazyTensor:
    """A tensor's elements as those of a leaf of its own, as a loader's computation leaves them."""
    leaf = ComputedLeaf("computed", partial(read_tensor, tensor), tensor.dtype, math.prod(tensor.shape))
    return from_leaf(leaf, tensor.shape)


class Recorder:
    """What an engine would hold that shards matrices by rows, and computes biases and norms."""

    def recorded_state(
        self,
        name: str,
        directory: Path,
        tensors: Mapping[str, LazyTensor],
        tp: int,
        *,
        ranks: Collection[int],
        dtype: str | None,
        trust_remote_code: bool,
    ) -> EngineState:
        """The state of the ranks; tensors go through pickle, as to a process for each."""
        assert (directory / "config.json").is_file()
        found: dict[int, dict[str, LazyTensor]] = {}
        for rank in range(tp):
            copies = pickle.loads(pickle.dumps(dict(tensors)))
            own = {f"engine.{n}": rows(t, rank, tp) for n, t in copies.items()}
            found[rank] = {n: computed(t) if len(t.shape) == 1 else t for n, t in own.items()}
        declared = tuple({n: (t.dtype, t.shape) for n, t in found[rank].items()} for rank in range(tp))
        asked = {rank: found[rank] for rank in ranks}
        return EngineState(declared, asked, dtype or "float64", "cpu", "Engine")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "require_vllm", lambda: VERSION)
    monkeypatch.setattr(verifying, "installed_version", lambda: VERSION)
    monkeypatch.setattr(vllm_state, "started", lambda: nullcontext(Recorder()))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal("llama", tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture
def state(checkpoint: Path, tmp_path: Path) -> Path:
    shardconv.export_vllm(checkpoint, tmp_path / "state", TP)
    return tmp_path / "state"


def require_state(directory: Path, stored: Mapping[str, torch.Tensor], tp: int = TP) -> None:
    for rank in range(tp):
        found: dict[str, torch.Tensor] = {}
        for file in directory.glob(f"model-rank-{rank}-part-*.safetensors"):
            found |= load_file(file)
        assert found.keys() == {f"engine.{name}" for name in stored}
        for name, tensor in stored.items():
            assert torch.equal(found[f"engine.{name}"], tensor.chunk(tp)[rank])


def test_an_ordinary_checkpoint(checkpoint: Path, stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    found = shardconv.export_vllm(checkpoint, tmp_path / "state", TP, writing=Writing(max_file_size=100_000))
    require_state(tmp_path / "state", stored)
    assert found.is_complete
    assert found.num_tensors == len(stored)
    assert found.num_files > TP
    assert (tmp_path / "state" / "config.json").read_text() == (checkpoint / "config.json").read_text()
    assert is_engine_state(tmp_path / "state")
    manifest = read(tmp_path / "state")
    assert (manifest.tp, manifest.engine_version, manifest.platform) == (TP, VERSION, "cpu")


@pytest.mark.parametrize("tp", [1, 4])
def test_a_converted_directory_of_any_tp(
    checkpoint: Path, stored: dict[str, torch.Tensor], tmp_path: Path, tp: int
) -> None:
    shardconv.convert(checkpoint, tmp_path / "out", tp, check=False)
    shardconv.export_vllm(tmp_path / "out", tmp_path / "state", TP)
    require_state(tmp_path / "state", stored)
    verify_state(tmp_path / "state")


def test_a_damaged_source_is_not_copied_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is compared; opening the files compares some blocks only, which here are left out."""
    monkeypatch.setattr(shards, "check_sample", lambda path, sample: None)
    shardconv.convert(checkpoint, tmp_path / "out", 1, check=False)
    file = next((tmp_path / "out").rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=r"safetensors: is damaged: its checksum"):
        shardconv.export_vllm(tmp_path / "out", tmp_path / "state", TP)
    assert not (tmp_path / "state" / "manifest.json").exists()


def test_parts_that_several_machines_write(
    checkpoint: Path, stored: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert not shardconv.export_vllm(
        checkpoint, tmp_path / "state", TP, writing=Writing(ranks=[1])
    ).is_complete
    assert not (tmp_path / "state" / "manifest.json").exists()
    assert shardconv.export_vllm(checkpoint, tmp_path / "state", TP, writing=Writing(ranks="0")).is_complete
    require_state(tmp_path / "state", stored)


@pytest.mark.parametrize("number", [5, 20, 40])
def test_a_killed_run_is_continued(
    checkpoint: Path, stored: dict[str, torch.Tensor], tmp_path: Path, number: int
) -> None:
    def export() -> None:
        shardconv.export_vllm(checkpoint, tmp_path / "state", TP)

    crashes(export, number, "before")
    export() if not (tmp_path / "state" / "manifest.json").exists() else None
    require_state(tmp_path / "state", stored)
    verify_state(tmp_path / "state")


@pytest.mark.parametrize("number", [5, 15, 25])
def test_a_killed_part_is_continued_by_all(
    checkpoint: Path, stored: dict[str, torch.Tensor], tmp_path: Path, number: int
) -> None:
    """What the part has finished stays."""
    crashes(
        lambda: shardconv.export_vllm(checkpoint, tmp_path / "state", TP, writing=Writing(ranks=[1])),
        number,
        "before",
    )
    shardconv.export_vllm(checkpoint, tmp_path / "state", TP)
    require_state(tmp_path / "state", stored)
    verify_state(tmp_path / "state")


def test_a_repository_on_the_hub(
    checkpoint: Path, stored: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the weights, only what the rank needs is asked for."""
    with HubServer() as server:
        server.use(monkeypatch, tmp_path / "home")
        server.add_repo("user/model", checkpoint)
        shardconv.export_vllm("user/model", tmp_path / "state", TP, writing=Writing(ranks=[0]))
        served = sum(count for name, count in server.served().items() if name.endswith(".safetensors"))
        assert served < 0.7 * (checkpoint / "model.safetensors").stat().st_size
        shardconv.export_vllm("user/model", tmp_path / "state", TP, writing=Writing(ranks=[1]))
    require_state(tmp_path / "state", stored)
    assert read(tmp_path / "state").source.name == "user/model"


def test_the_config_says_the_dtype(checkpoint: Path, tmp_path: Path) -> None:
    shardconv.export_vllm(checkpoint, tmp_path / "state", TP, dtype="bfloat16")
    assert '"dtype": "bfloat16"' in (tmp_path / "state" / "config.json").read_text()
    assert read(tmp_path / "state").dtype == "bfloat16"


def test_a_full_directory_is_its_own_or_refused(checkpoint: Path, state: Path, tmp_path: Path) -> None:
    assert shardconv.export_vllm(checkpoint, state, TP).was_complete
    with pytest.raises(ShardconvError, match="is not empty: it is complete, and of another conversion"):
        shardconv.export_vllm(checkpoint, state, TP, dtype="bfloat16")
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ShardconvError, match="is not empty"):
        shardconv.export_vllm(checkpoint, tmp_path, TP)


# verify ----------------------------------------------------------------------------------------------


def test_an_intact_directory(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", str(state)]) == 0
    assert "all checksums match" in capsys.readouterr().out


def damaged(state: Path) -> str:
    with pytest.raises(DamagedError) as caught:
        verify_state(state)
    return "\n".join(caught.value.problems)


def test_a_changed_byte(state: Path) -> None:
    file = state / "model-rank-1-part-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert damaged(state).startswith("model-rank-1-part-0.safetensors: is damaged: its checksum is ")


def test_swapped_files(state: Path) -> None:
    one, other = (state / f"model-rank-{rank}-part-0.safetensors" for rank in range(TP))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    assert len(damaged(state).split("\n")) == TP


def test_a_file_that_the_engine_would_read_too(state: Path) -> None:
    save_file({"x": torch.ones(1)}, state / "model-rank-0-part-7.safetensors")
    assert "model-rank-0-part-7.safetensors: the manifest does not name it" in damaged(state)


def test_a_missing_file(state: Path) -> None:
    (state / "model-rank-0-part-0.safetensors").unlink()
    assert damaged(state) == "model-rank-0-part-0.safetensors: is missing"


def test_another_version_of_the_engine(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "installed_version", lambda: "0.99.0")
    assert damaged(state) == f"written for vllm {VERSION}, and 0.99.0 is installed: export again"
    monkeypatch.setattr(verifying, "installed_version", lambda: None)
    assert verify_state(state).remarks == ("vllm is not installed: its version was not compared",)


def test_a_changed_manifest(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = state / "manifest.json"
    path.write_text(path.read_text().replace(VERSION, "0.99.0"))
    assert cli.run(["verify", str(state)]) == 3
    assert "was changed since it was written" in capsys.readouterr().err


def test_other_tensors_than_were_recorded(state: Path) -> None:
    """Files whose checksums are right, under signatures that are not theirs."""
    from dataclasses import replace

    from shardconv.exports.state_files import dumps

    path = state / "manifest.json"
    path.write_text(dumps(replace(read(state), signatures=("0" * 64,) * TP)))
    assert "rank 0: its files do not have the tensors that vllm wants" in damaged(state)
