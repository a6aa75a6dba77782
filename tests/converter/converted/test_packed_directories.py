"""What can be made of a converted directory whose parameters are packed."""

from __future__ import annotations

from pathlib import Path

import pytest
from library_checkpoints import save_mxfp4, stored
from shardconv_runtime.checkpoint.packed_plan import packings_of
from shardconv_runtime.format import plan_json

import shardconv


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 3 and of 5 blocks of 32."""
    return save_mxfp4(tmp_path_factory.mktemp("packed") / "model")


@pytest.fixture(scope="module")
def out(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For three ranks, which have uneven shares."""
    path = tmp_path_factory.mktemp("packed") / "out"
    shardconv.convert(source, path, 3, check=False)
    return path


def require_same(one: Path, other: Path) -> None:
    """The tensors of two checkpoints, byte for byte."""
    expected, found = stored(one), stored(other)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].equal(tensor), name


def test_merging_gives_the_quantized_checkpoint(source: Path, out: Path, tmp_path: Path) -> None:
    shardconv.merge(out, tmp_path / "merged")
    require_same(source, tmp_path / "merged")
    assert "mxfp4" in (tmp_path / "merged" / "config.json").read_text()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_another_number_of_ranks(tp: int, source: Path, out: Path, tmp_path: Path) -> None:
    plan = shardconv.reshard(out, tmp_path / "other", tp, check=False)
    assert packings_of(plan) == packings_of(plan_json.read(out / "plan.json"))
    found = shardconv.verify(tmp_path / "other", source)
    assert found.num_tensors == len(stored(source))
    shardconv.merge(tmp_path / "other", tmp_path / "merged")
    require_same(source, tmp_path / "merged")


def test_planning_again_keeps_the_shards(out: Path) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*.safetensors")}
    plan = plan_json.read(out / "plan.json")
    assert packings_of(shardconv.replan(out, check=False)) == packings_of(plan)
    assert {path: path.read_bytes() for path in out.rglob("*.safetensors")} == before


def test_numbers_are_those_of_the_dequantized_model(source: Path, out: Path) -> None:
    found = shardconv.verify(out, source, numerics=True)
    assert found.numerics is not None
    assert found.numerics.worst < 1e-12
