"""Resharding: the files are those of a conversion for that many ranks, and nothing is cast or lost."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from plans_once import solve_as
from safetensors.torch import load_file, save_file
from shardconv_runtime.errors import CheckpointError, DamagedError, PlanError, ShardconvError, SourceError
from shardconv_runtime.files import manifest
from shardconv_runtime.format.plan import Plan
from small_models import hand_plan, make_custom, small_config

import shardconv
from shardconv.arguments import Writing
from shardconv.writing import local_files

pytestmark = pytest.mark.usefixtures("hand_solver")


def contents(path: Path) -> dict[str, bytes]:
    """All files."""
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


@pytest.fixture
def out(llama_dir: Path, tmp_path: Path, hand_solver: None) -> Path:
    """A small Llama for two ranks."""
    (llama_dir / "tokenizer.json").write_text("{}")
    shardconv.convert(llama_dir, tmp_path / "out", 2)
    return tmp_path / "out"


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_the_files_are_those_of_a_conversion(tp: int, out: Path, llama_dir: Path, tmp_path: Path) -> None:
    before = contents(out)
    plan = shardconv.reshard(out, tmp_path / "out2", tp)
    assert plan == shardconv.convert(llama_dir, tmp_path / "direct", tp)
    assert contents(tmp_path / "out2") == contents(tmp_path / "direct")
    assert contents(out) == before
    found = manifest.read(tmp_path / "out2")
    assert found.source == manifest.read(out).source
    assert found.source.name == "llama"


def test_files_are_divided_at_the_limit(out: Path, llama_dir: Path, tmp_path: Path) -> None:
    shardconv.reshard(out, tmp_path / "out2", 3, writing=Writing(max_file_size="10kB"))
    shardconv.convert(llama_dir, tmp_path / "direct", 3, writing=Writing(max_file_size="10kB"))
    assert contents(tmp_path / "out2") == contents(tmp_path / "direct")
    assert len(list((tmp_path / "out2" / "rank-00000-of-00003").iterdir())) > 1


def test_the_dtype_stays(out: Path, llama_dir: Path, tmp_path: Path) -> None:
    shardconv.convert(llama_dir, out, 2, dtype="float16", writing=Writing(overwrite=True))
    assert shardconv.reshard(out, tmp_path / "out2", 1).model.dtype == "float16"
    found = load_file(tmp_path / "out2" / "common" / "model-00001-of-00001.safetensors")
    assert found["model.norm.weight"].dtype == torch.float16


def test_parts_are_written_one_by_one(out: Path, tmp_path: Path) -> None:
    shardconv.reshard(out, tmp_path / "out2", 3, writing=Writing(ranks="0,2"))
    assert not (tmp_path / "out2" / "manifest.json").exists()
    shardconv.reshard(out, tmp_path / "out2", 3, writing=Writing(ranks="1"))
    shardconv.reshard(out, tmp_path / "whole", 3)
    assert contents(tmp_path / "out2") == contents(tmp_path / "whole")


def cut_short(patch: pytest.MonkeyPatch, out: Path, out2: Path) -> None:
    """Reshard for three ranks, on a disk that fills up."""
    write, calls = local_files.LocalFiles.put, itertools.count()

    def failing(*args: Any) -> None:
        if next(calls) >= 20:
            raise OSError(28, "No space left on device")
        write(*args)

    with patch.context() as inner:
        inner.setattr(local_files.LocalFiles, "put", failing)
        with pytest.raises(ShardconvError, match="No space left on device"):
            shardconv.reshard(out, out2, 3)
    assert {path.name for path in out2.iterdir()} == {".partial"}


def test_a_run_that_was_killed_goes_on(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_short(monkeypatch, out, tmp_path / "out2")
    shardconv.reshard(out, tmp_path / "out2", 3)
    shardconv.reshard(out, tmp_path / "whole", 3)
    assert contents(tmp_path / "out2") == contents(tmp_path / "whole")


def test_of_other_weights_it_begins_anew(
    out: Path, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_short(monkeypatch, out, tmp_path / "out2")
    tensors = load_file(llama_dir / "model.safetensors")
    save_file({n: t + 1 for n, t in tensors.items()}, llama_dir / "model.safetensors", {"format": "pt"})
    shardconv.convert(llama_dir, out, 2, writing=Writing(overwrite=True))
    shardconv.reshard(out, tmp_path / "out2", 3)
    shardconv.reshard(out, tmp_path / "whole", 3)
    assert contents(tmp_path / "out2") == contents(tmp_path / "whole")


def test_code_must_be_trusted(llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_custom(llama_dir)
    custom = hand_plan(small_config(), 2)
    info = dataclasses.replace(custom.model, class_name="modeling_mine:MyModel", trust_remote_code=True)
    solve_as(monkeypatch, dataclasses.replace(custom, model=info))
    shardconv.convert(llama_dir, tmp_path / "out", 2, trust_remote_code=True)
    with pytest.raises(SourceError, match=r"runs custom code; read its .* pass --trust-remote-code"):
        shardconv.reshard(tmp_path / "out", tmp_path / "out2", 2)
    shardconv.reshard(tmp_path / "out", tmp_path / "out2", 2, trust_remote_code=True)
    assert contents(tmp_path / "out2") == contents(tmp_path / "out")


class TestRefused:
    """What cannot be resharded is refused before anything is written."""

    @pytest.mark.parametrize("inside", [".", "out2", "../out/common"])
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_the_directory_itself(self, out: Path, inside: str, overwrite: bool) -> None:
        before = contents(out)
        with pytest.raises(ShardconvError, match="which is read; name a directory outside of it"):
            shardconv.reshard(out, out / inside, 3, writing=Writing(overwrite=overwrite))
        assert contents(out) == before

    def test_only_a_converted_directory_is_replaced(self, out: Path, llama_dir: Path, tmp_path: Path) -> None:
        shardconv.reshard(out, tmp_path / "out2", 3)
        with pytest.raises(ShardconvError, match=r"\(tp was 3, is now 1\); name another directory"):
            shardconv.reshard(out, tmp_path / "out2", 1)
        shardconv.reshard(out, tmp_path / "out2", 1, writing=Writing(overwrite=True))
        assert manifest.read(tmp_path / "out2").tp == 1
        with pytest.raises(ShardconvError, match="was not written by shardconv"):
            shardconv.reshard(out, llama_dir, 1, writing=Writing(overwrite=True))
        with pytest.raises(ShardconvError, match="holds the model to convert"):
            shardconv.reshard(out, tmp_path, 1, writing=Writing(overwrite=True))

    def test_bad_arguments(self, out: Path, llama_dir: Path, tmp_path: Path) -> None:
        with pytest.raises(ShardconvError, match="tp must be a whole number"):
            shardconv.reshard(out, tmp_path / "out2", 0)
        with pytest.raises(ShardconvError, match="are not ranks of 2"):
            shardconv.reshard(out, tmp_path / "out2", 2, writing=Writing(ranks="0-2"))
        with pytest.raises(CheckpointError, match="is not a converted model"):
            shardconv.reshard(llama_dir, tmp_path / "out2", 2)
        assert not (tmp_path / "out2").exists()

    def changed(self, **changes: object) -> Plan:
        """The plan for three ranks, its last parameter changed."""
        plan = hand_plan(small_config(), 3)
        *rest, last = plan.parameters
        assert last.names == ("lm_head.weight",)
        return dataclasses.replace(plan, parameters=(*rest, dataclasses.replace(last, **changes)))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dtype": "float16"}, r"lm_head\.weight, which is in float32 there, and in float16 here"),
            ({"names": ("head.weight",)}, r"for head\.weight, which is not there"),
        ],
    )
    def test_a_plan_of_other_tensors(
        self,
        out: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        changes: dict[str, object],
        message: str,
    ) -> None:
        solve_as(monkeypatch, self.changed(**changes))
        with pytest.raises(PlanError, match=message):
            shardconv.reshard(out, tmp_path / "out2", 3)
        assert not (tmp_path / "out2").exists()

    def test_a_plan_that_leaves_a_tensor_out(
        self, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = hand_plan(small_config(), 3)
        for tied in ((), (("lm_head.weight", "model.embed_tokens.weight"),)):
            solve_as(monkeypatch, dataclasses.replace(plan, parameters=plan.parameters[:-1], tied=tied))
            message = r"for lm_head\.weight, which the model lacks in this environment"
            with pytest.raises(PlanError, match=message):
                shardconv.reshard(out, tmp_path / "out2", 3)
        assert not (tmp_path / "out2").exists()

    def test_a_tied_tensor_may_have_its_other_name(
        self, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which name comes first is the model code's affair."""
        plan = hand_plan(small_config(), 2)
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        tensors = load_file(llama_dir / "model.safetensors")
        tensors[head] = tensors[embedding].clone()
        save_file(tensors, llama_dir / "model.safetensors", {"format": "pt"})
        by_name = {p.names[0]: p for p in plan.parameters}
        rest = tuple(p for p in plan.parameters if p.names[0] not in (embedding, head))
        for name, out, source in (
            (embedding, "first", None),
            (head, "second", tmp_path / "first"),
            (embedding, "third", tmp_path / "second"),
        ):
            alias = head if name == embedding else embedding
            tied = dataclasses.replace(
                plan, parameters=(*rest, by_name[name]), tied=((alias, name),), notes=("tied",)
            )
            solve_as(monkeypatch, tied)
            if source is None:
                shardconv.convert(llama_dir, tmp_path / out, 2)
            else:
                shardconv.reshard(source, tmp_path / out, 2)
        assert contents(tmp_path / "third") == contents(tmp_path / "first")
        assert contents(tmp_path / "second") != contents(tmp_path / "first")


def test_a_damaged_source_is_not_copied_on(llama_dir: Path, tmp_path: Path) -> None:
    """The copy would have checksums of its own, and verify would find it intact."""
    shardconv.convert(llama_dir, tmp_path / "out", 2, check=False)
    shard = next((tmp_path / "out").glob("rank-*/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    calls = (
        lambda: shardconv.reshard(tmp_path / "out", tmp_path / "other", 1, check=False),
        lambda: shardconv.export(tmp_path / "out", tmp_path / "hf", format="hf"),
        lambda: shardconv.export(tmp_path / "out", tmp_path / "dcp", format="dcp"),
    )
    for call in calls:
        with pytest.raises(DamagedError, match=r"should be|is not the file that was written"):
            call()
