"""Exports for torch's distributed checkpoint: read by torch and by transformers, killed and continued."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from export_cases import CASES, Exported, convert, require_cover, require_same, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import SUFFIX, dense_config, save_quantized
from random_plans import Declared, declared, plans, random_bytes
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from shardconv_runtime.checkpoint.stored_leaves import lazy_tensors
from shardconv_runtime.errors import CheckpointError, ShardconvError
from shardconv_runtime.files.manifest import Source
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.stored_layout import stored_plans
from small_conversion import Model, Stages, contents, crashes, placed
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

import shardconv
from shardconv import cli
from shardconv.exports import export_dcp
from shardconv.exports.export_dcp import export
from shardconv.reporting.progress import Silent
from shardconv.writing import fill, job, local_files, writer
from shardconv.writing.outputs import Output, WriteOptions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def read(directory: Path, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What torch's reader makes of a directory, in one process, into tensors that are something else."""
    found = {name: torch.full_like(tensor, 77) for name, tensor in state.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return found


@functools.cache
def _converted(name: str) -> tuple[Exported, tempfile.TemporaryDirectory[str]]:
    place = tempfile.TemporaryDirectory()
    return convert(CASES[name], Path(place.name)), place


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Exported:
    """Each case, converted."""
    return replace(_converted(request.param)[0], directory=tmp_path / "dir")


class TestReaders:
    """What others make of it."""

    def test_torch_reads_it_in_one_process(self, case: Exported) -> None:
        found = export(case.out, case.directory)
        require_same(read(case.directory, case.state), case.state)
        require_cover(case.directory, case.state)
        assert found.num_tensors == len(case.state)
        assert found.num_bytes == sum(tensor.nbytes for tensor in case.state.values())
        assert found.num_files == len(list(case.directory.glob("*.safetensors")))

    def test_transformers_loads_it(self, case: Exported) -> None:
        export(case.out, case.directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            case.directory, dtype=next(iter(case.state.values())).dtype
        )
        require_same(model.state_dict(), case.state)

    def test_torch_consolidates_it(self, case: Exported, tmp_path: Path) -> None:
        export(case.out, case.directory)
        dcp_files = "torch.distributed.checkpoint._consolidate_hf_safetensors"
        consolidate = pytest.importorskip(dcp_files).consolidate_safetensors_files
        (tmp_path / "one").mkdir()
        consolidate(str(case.directory), str(tmp_path / "one"), dict.fromkeys(case.state, 1))
        require_same(load_file(tmp_path / "one" / "model-00001-of-00001.safetensors"), case.state)

    def test_the_cases_have_what_they_are_for(self) -> None:
        def plan(name: str) -> Plan:
            return _converted(name)[0].plan

        assert any(entry.partial for entry in plan("biases of sums").parameters)
        assert plan("tied").tied
        assert len(plan("fewer key/value heads than ranks").mesh) == 2  # some axis does not split all heads
        assert plan("whole experts").experts == "ep"


class TestFiles:
    """What is on disk."""

    def test_names_and_metadata(self, tmp_path: Path) -> None:
        case = replace(_converted("fused projections")[0], directory=tmp_path / "dir")
        export(case.out, case.directory)
        assert sorted(path.name for path in case.directory.iterdir()) == [
            "config.json",
            "generation_config.json",
            "shard-00001-model-00001-of-00003.safetensors",
            "shard-00001-model-00002-of-00003.safetensors",
            "shard-00001-model-00003-of-00003.safetensors",
            "shard-00002-model-00001-of-00003.safetensors",
            "shard-00002-model-00002-of-00003.safetensors",
            "shard-00002-model-00003-of-00003.safetensors",
        ]
        with safe_open(case.directory / "shard-00002-model-00003-of-00003.safetensors", "pt") as file:
            metadata = file.metadata()
        fused = [name for name in case.state if "qkv_proj" in name]
        rows = case.state[fused[0]].shape[0]
        assert metadata.keys() == {"format", "DCP_VERSION", "DCP_SHARDING_INFO"}
        assert (metadata["format"], metadata["DCP_VERSION"]) == ("pt", "1.0")
        assert json.loads(metadata["DCP_SHARDING_INFO"]) == {
            name: {"saved_offsets": [rows - 8, 0]}
            for name in fused  # of two heads of v, the second
        }

    def test_each_block_is_in_the_file_of_a_rank_that_holds_it(self, tmp_path: Path) -> None:
        case = replace(_converted("fused projections")[0], directory=tmp_path / "dir")
        export(case.out, case.directory)
        for rank in range(2):
            local = load_file(case.out / f"rank-0000{rank}-of-00002" / "model-00001-of-00001.safetensors")
            for name, tensor in local.items():
                chunks = [
                    c
                    for c in stored(case.directory)
                    if c.name == name and c.file.startswith(f"shard-0000{rank + 1}-")
                ]
                dim = next(
                    (d for d in range(tensor.dim()) if tensor.shape[d] != case.state[name].shape[d]), 0
                )
                ordered = sorted(chunks, key=lambda chunk: chunk.offsets)
                assert torch.equal(torch.cat([chunk.tensor for chunk in ordered], dim), tensor)

    def test_what_all_ranks_hold_is_written_by_the_first(self, tmp_path: Path) -> None:
        case = replace(_converted("fused projections")[0], directory=tmp_path / "dir")
        export(case.out, case.directory)
        common = load_file(case.out / "common" / "model-00001-of-00001.safetensors")
        files = {chunk.file for chunk in stored(case.directory) if chunk.name in common}
        assert common
        assert files == {"shard-00001-model-00001-of-00003.safetensors"}

    @pytest.mark.parametrize("limit", [1, 5000])
    def test_files_are_split_at_the_limit(self, limit: int, tmp_path: Path) -> None:
        case = replace(_converted("fused projections")[0], directory=tmp_path / "dir")
        export(case.out, case.directory, max_file_size=limit)
        by_file: dict[str, list[int]] = {}
        for chunk in stored(case.directory):
            by_file.setdefault(chunk.file, []).append(chunk.tensor.nbytes)
        assert all(len(sizes) == 1 or sum(sizes) <= limit for sizes in by_file.values())
        assert len(by_file) > 6
        require_same(read(case.directory, case.state), case.state)

    def test_very_many_blocks_are_cut_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        case = replace(_converted("uneven, heads cut")[0], directory=tmp_path / "dir")
        monkeypatch.setattr(export_dcp, "MAX_CHUNKS", 1)
        found = export(case.out, case.directory)
        assert found.num_files == 3
        require_cover(case.directory, case.state)
        require_same(read(case.directory, case.state), case.state)
        name = "model.layers.0.self_attn.q_proj.weight"
        rows = [chunk.offsets for chunk in stored(case.directory) if chunk.name == name]
        assert rows == [(0, 0), (11, 0), (22, 0)]  # of 32

    def test_block_scaled_parameters_are_two_tensors(self, tmp_path: Path) -> None:
        save_quantized(dense_config(), transformers.Qwen3ForCausalLM, tmp_path / "model")
        plan = shardconv.convert(tmp_path / "model", tmp_path / "out", 2, check=False)
        export(tmp_path / "out", tmp_path / "dir")
        state = load_file(tmp_path / "model" / "model.safetensors")
        assert any(name.endswith(SUFFIX) for name in state)
        assert {entry.dtype for entry in stored_plans(plan).values()} > {"float8_e4m3fn"}
        require_same(read(tmp_path / "dir", state), state)
        require_cover(tmp_path / "dir", state)

    def test_the_same_input_gives_the_same_bytes(self, case: Exported, tmp_path: Path) -> None:
        export(case.out, case.directory)
        export(case.out, tmp_path / "other", memory="1MiB")
        assert contents(case.directory) == contents(tmp_path / "other")


MEMORY = Path("/dev/shm")


def quick() -> Path | None:
    """Where syncing is quick."""
    return MEMORY if os.access(MEMORY, os.W_OK) else None


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_layout(data: st.DataObject) -> None:
    tensors: list[Declared] = data.draw(declared())
    plan = data.draw(plans(tensors))
    expected = {tensor.name: random_bytes(tensor, seed) for seed, tensor in enumerate(tensors)}
    with tempfile.TemporaryDirectory(dir=quick()) as name, pytest.MonkeyPatch.context() as patch:
        path = Path(name)
        patch.setattr(export_dcp, "MAX_CHUNKS", data.draw(st.sampled_from((1, 2, 8))))
        save_file(expected, path / "model.safetensors")
        write(plan, path / "model.safetensors", path / "out")
        export(path / "out", path / "dir", max_file_size=data.draw(st.sampled_from((1, 64, 10**9))))
        require_cover(path / "dir", expected)
        require_same(read(path / "dir", expected), expected)


def write(plan: Plan, weights: Path, out: Path) -> None:
    """Convert, without a model."""
    origin = writer.Origin(Source("random"), {}, lambda directory: [])
    output = Output.prepare(out, overwrite=False, source=weights)
    assert writer.write(plan, lazy_tensors([weights]), output, origin, WriteOptions(10**9, 1 << 20), Silent())


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory."""
    with tempfile.TemporaryDirectory(dir=quick()) as path:
        yield Path(path)


@pytest.fixture
def tiny(place: Path) -> Path:
    """A converted directory of less than a thousand parameters."""
    Model.save(place / "model").convert(place / "out")
    return place / "out"


def fail_on_write(patch: pytest.MonkeyPatch, after: int) -> None:
    """A write to a file fails."""
    write, calls = local_files.LocalFiles.put, itertools.count()

    def failing(*args: Any) -> None:
        if next(calls) >= after:
            raise OSError(28, "No space left on device")
        write(*args)

    patch.setattr(local_files.LocalFiles, "put", failing)


def fail_on_move(patch: pytest.MonkeyPatch, after: int) -> None:
    """Moving a file to its place fails."""
    move, calls = job._move, itertools.count()

    def failing(*args: Any) -> None:
        if next(calls) >= after:
            raise OSError(5, "Input/output error")
        move(*args)

    patch.setattr(job, "_move", failing)


def refused_or_whole(directory: Path, state: Mapping[str, Tensor]) -> bool:
    """Whether torch reads a directory; where it does, all must be there.

    Without a shard at all it misses the names, which is asked for here too.
    """
    try:
        found = read(directory, state)
    except (SafetensorError, OSError, RuntimeError, dcp.CheckpointException):
        return False
    require_same(found, dict(state))
    return True


class TestInterrupted:
    """Killed at any moment: no reader takes it for whole, and the same call continues."""

    def test_a_failure_leaves_what_can_be_continued(
        self, tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        export(tiny, place / "expected")
        with monkeypatch.context() as patch:
            fail_on_write(patch, 5)
            with pytest.raises(
                ShardconvError, match="No space left on device; correct that and run the same"
            ):
                export(tiny, place / "dir")
        assert [path.name for path in (place / "dir").iterdir()] == [".partial"]
        stages = Stages()
        export(tiny, place / "dir", progress=stages)
        assert not [text for text in stages.told if "is discarded" in text]
        assert contents(place / "dir") == contents(place / "expected")

    @pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("when", ["half", "after"])
    def test_killed_at_calls(
        self, tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch, when: str, step: int
    ) -> None:
        monkeypatch.setattr(export_dcp, "tool_versions", dict)
        state = load_file(place / "model" / "model.safetensors")
        export(tiny, place / "expected")
        expected, out = contents(place / "expected"), place / "dir"
        readable = torn = 0
        for number in itertools.count(1, step):
            shutil.rmtree(out, ignore_errors=True)
            if not crashes(lambda: export(tiny, out), number, when):
                break
            if out.is_dir():
                is_readable = refused_or_whole(out, state)
                readable += is_readable
                torn += not is_readable and any(path.endswith(".safetensors") for path in placed(out))
            if placed(out) == expected and contents(out / ".partial").keys() <= {"setup.lock"}:
                continue
            export(tiny, out)
            assert contents(out) == expected
        assert number > (40 if when == "after" else 20)
        if when == "after":
            assert readable > 0
            assert torn * step > 5  # of the moments when some shards are in their places

    def test_readers_do_not_ask_whether_they_find_everything(self, tiny: Path, place: Path) -> None:
        state = load_file(place / "model" / "model.safetensors")
        export(tiny, place / "dir", max_file_size=1)
        name = "model.layers.0.self_attn.o_proj.weight"  # split by columns
        first = min(chunk.file for chunk in stored(place / "dir") if chunk.name == name)
        (place / "dir" / first).unlink()
        assert (read(place / "dir", {name: state[name]})[name] == 77).any()

    def test_what_is_half_moved_is_closed(
        self, tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        num_files = export(tiny, place / "expected", max_file_size=500).num_files
        assert num_files > 5
        for num_moves in range(1 + num_files):
            with monkeypatch.context() as patch:
                fail_on_move(patch, num_moves)
                with pytest.raises(OSError, match="Input/output error"):
                    export(tiny, place / "dir", max_file_size=500)
            found = list((place / "dir").glob("*.safetensors"))
            assert len(found) == max(num_moves, 1)  # the first to come is config.json
            with pytest.raises(SafetensorError, match="header too small"):
                HuggingFaceStorageReader(str(place / "dir")).read_metadata()
            if num_moves:
                with pytest.raises((SafetensorError, dcp.CheckpointException), match="header too small"):
                    transformers.AutoModelForCausalLM.from_pretrained(place / "dir")
            export(tiny, place / "dir", max_file_size=500)
            assert contents(place / "dir") == contents(place / "expected")
            shutil.rmtree(place / "dir")

    def test_another_source_begins_anew(
        self, tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = Model.save(place / "other" / "model")
        save_file({name: t + 1 for name, t in load_file(other.file).items()}, other.file, {"format": "pt"})
        other.convert(place / "out2")
        with monkeypatch.context() as patch:
            fail_on_write(patch, 20)
            with pytest.raises(ShardconvError, match="No space"):
                export(tiny, place / "dir")
        stages = Stages()
        export(place / "out2", place / "dir", progress=stages)
        assert [text for text in stages.told if "is discarded" in text]
        export(place / "out2", place / "expected")
        assert contents(place / "dir") == contents(place / "expected")


class TestRefused:
    """Before anything is written."""

    def test_a_directory_with_anything_in_it(self, tiny: Path, place: Path) -> None:
        (place / "dir").mkdir()
        (place / "dir" / "thesis.txt").write_text("mine")
        with pytest.raises(ShardconvError, match=r"DST .* is not empty; name another directory"):
            export(tiny, place / "dir")
        assert contents(place / "dir") == {"thesis.txt": b"mine"}

    def test_an_export_that_is_complete(self, tiny: Path, place: Path) -> None:
        export(tiny, place / "dir")
        before = contents(place / "dir")
        assert export(tiny, place / "dir").was_complete
        with pytest.raises(ShardconvError, match="is not empty: it is complete, and of another conversion"):
            export(tiny, place / "dir", max_file_size=1000)
        assert contents(place / "dir") == before

    def test_files_that_others_put_there_meanwhile(
        self, tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def late(*args: Any, **kwargs: Any) -> None:
            fill_files(*args, **kwargs)
            (place / "dir" / "thesis.txt").write_text("mine")

        fill_files = fill.fill
        monkeypatch.setattr(fill, "fill", late)
        with pytest.raises(ShardconvError, match=r"DST .* was written to by others meanwhile"):
            export(tiny, place / "dir")
        assert placed(place / "dir") == {"thesis.txt": b"mine"}

    @pytest.mark.parametrize("lost", ["manifest.json", "plan.json", "rank-00001-of-00002"])
    def test_an_incomplete_source(self, tiny: Path, place: Path, lost: str) -> None:
        path = tiny / lost
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        with pytest.raises(CheckpointError, match=r"or run that command again|convert the model again"):
            export(tiny, place / "dir")
        assert not (place / "dir").exists()

    def test_a_config_that_was_changed(self, tiny: Path, place: Path) -> None:
        text = (tiny / "config.json").read_text()
        (tiny / "config.json").write_text(text.replace("11", "12"))
        with pytest.raises(CheckpointError, match=r"config\.json was changed since it was written"):
            export(tiny, place / "dir")
        assert not [path for path in placed(place / "dir") if path.endswith("safetensors")]

    def test_the_source_itself(self, tiny: Path) -> None:
        for directory in (tiny, tiny / "sub"):
            with pytest.raises(ShardconvError, match="is read; name a directory outside of it"):
                export(tiny, directory)

    def test_other_formats(self, tiny: Path, place: Path) -> None:
        with pytest.raises(ShardconvError, match="format must be one of dcp, got 'gguf'"):
            export(tiny, place / "dir", "gguf")

    def test_more_files_than_names(self, tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(export_dcp, "_MAX_NUMBER", 3)
        with pytest.raises(ShardconvError, match="allow larger files"):
            export(tiny, place / "dir", max_file_size=1)
        assert not (place / "dir").exists()


class TestCommand:
    """``shardconv export``."""

    def test_it_exports(self, tiny: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.run(["export", str(tiny), "--format", "dcp", str(place / "dir")]) == 0
        captured = capsys.readouterr()
        assert captured.out == f"{place / 'dir'}: 12 tensors in 2 files, 2.6 kB\n"
        assert captured.err == "checksums: 0.0 MB\nwriting: 0.0 MB\n"
        shardconv.export(tiny, place / "other", format="dcp")
        assert contents(place / "dir") == contents(place / "other")

    def test_quiet_prints_nothing(self, tiny: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = [
            "export",
            str(tiny),
            str(place / "dir"),
            "-q",
            "--io-memory",
            "1MiB",
            "--max-file-size",
            "1kB",
        ]
        assert cli.run(argv) == 0
        assert capsys.readouterr() == ("", "")
