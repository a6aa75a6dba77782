"""`verify`: whatever is wrong with a converted directory is found and said, all of it, in one line each."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from plans_once import solve_as
from shardconv_runtime.checkpoint import copying
from shardconv_runtime.errors import CheckpointError, DamagedError, ShardconvError, SourceError
from shardconv_runtime.files import manifest
from small_models import hand_plan, make_custom, save_random, small_config
from torch import Tensor
from verify_cases import change_plan, change_tensors, describe_again, flip, set_element, shard

import shardconv
from shardconv import cli
from shardconv.arguments import Writing
from shardconv.converted import file_checks
from shardconv.converted.verify import Verified
from shardconv.reporting.progress import Advance, Silent

pytestmark = pytest.mark.usefixtures("hand_solver")


@pytest.fixture
def out(llama_dir: Path, tmp_path: Path) -> Path:
    """A converted Llama."""
    path = tmp_path / "out"
    shardconv.convert(llama_dir, path, 2)
    return path


def damage(out: Path, **options: object) -> DamagedError:
    """What ``verify`` says of a directory with problems."""
    with pytest.raises(DamagedError) as caught:
        shardconv.verify(out, **options)
    problems = caught.value.problems
    assert problems
    assert all(line.isprintable() for line in problems)
    count = "1 problem;" if len(problems) == 1 else f"{len(problems)} problems;"
    assert str(caught.value).startswith(f"{out}: {count} ")
    return caught.value


class TestFiles:
    """Every byte of every file."""

    def test_a_converted_directory_is_right(self, out: Path) -> None:
        files = [file for file in out.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        assert shardconv.verify(out) == Verified(len(files), size, ())

    def test_the_command(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.run(["verify", str(out)]) == 0
        captured = capsys.readouterr()
        size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        assert captured.out == f"{out}: 7 files, {size / 1000:.1f} kB: all checksums match\n"
        assert captured.err == "checksums: 0.1 MB\n"
        assert cli.run(["verify", str(out), "-q"]) == 0
        assert capsys.readouterr() == ("", "")

    def test_the_command_lists_all_problems(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (out / "config.json").unlink()
        flip(out / shard(0), -1)
        (out / "notes.txt").write_text("mine")
        assert cli.run(["verify", str(out), "-q"]) == 3
        captured = capsys.readouterr()
        lines = captured.err.splitlines()
        assert captured.out == ""
        assert lines[0] == "config.json: is missing"
        assert lines[1].startswith(f"{shard(0)}: is damaged: its checksum (crc32-of-pieces) is ")
        assert lines[2:] == [
            "remark: not in the manifest: notes.txt",
            f"error: {out}: 2 problems; copy the directory again, or convert the model again",
        ]

    def test_every_one_of_200_flips_is_found(self, out: Path) -> None:
        """Of random bits of random bytes, in all files."""
        rng = random.Random(0)
        files = sorted(file for file in out.rglob("*") if file.is_file())
        weights = [file.stat().st_size for file in files]
        chosen = [*(file for file in files for _ in range(10)), *rng.choices(files, weights, k=200)][:200]
        for file in chosen:
            whole = file.read_bytes()
            position, mask = rng.randrange(len(whole)), rng.randrange(1, 256)
            flip(file, position, mask)
            with pytest.raises(CheckpointError):
                shardconv.verify(out)
            file.write_bytes(whole)
        shardconv.verify(out)

    def test_a_missing_file(self, out: Path) -> None:
        (out / shard(1)).unlink()
        assert damage(out).problems == (f"{shard(1)}: is missing",)

    def test_a_truncated_file(self, out: Path) -> None:
        size = (out / shard(1)).stat().st_size
        os.truncate(out / shard(1), size - 1)
        problem = f"{shard(1)}: has {size - 1:,} bytes and should have {size:,}"
        assert damage(out).problems == (problem,)

    def test_bytes_at_the_end(self, out: Path) -> None:
        with (out / "generation_config.json").open("ab") as file:
            file.write(b"\n")
        assert "generation_config.json: has " in damage(out).problems[0]

    def test_files_of_two_ranks_swapped(self, out: Path) -> None:
        a, b = out / shard(0), out / shard(1)
        a.rename(out / "kept"), b.rename(a), (out / "kept").rename(b)
        first, second = damage(out).problems
        assert first.startswith(f"{shard(0)}: ")
        assert first.endswith("; by its header it belongs to rank 1 of 2 ranks: it was swapped")
        assert second.endswith("; by its header it belongs to rank 0 of 2 ranks: it was swapped")

    def test_a_file_of_another_conversion(
        self, out: Path, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shardconv.convert(llama_dir, tmp_path / "other", 2, dtype="float16")
        shutil.copy(tmp_path / "other" / shard(0), out / shard(0))
        (problem,) = damage(out).problems
        assert problem.endswith("; by its header it belongs to another conversion: it was swapped")

    def test_a_file_of_another_number_of_ranks(self, out: Path, llama_dir: Path, tmp_path: Path) -> None:
        shardconv.convert(llama_dir, tmp_path / "other", 4)
        shutil.copy(tmp_path / "other" / shard(0, 4), out / shard(0))
        (problem,) = damage(out).problems
        assert problem.endswith("; by its header it belongs to rank 0 of 4 ranks: it was swapped")

    def test_what_is_no_file(self, out: Path) -> None:
        """A pipe is not waited for."""
        (out / shard(0)).unlink()
        os.mkfifo(out / shard(0))
        (out / "config.json").unlink()
        (out / "config.json").mkdir()
        assert damage(out).problems == ("config.json: is not a file", f"{shard(0)}: is not a file")

    def test_links_out_of_the_directory_are_not_followed(self, out: Path, tmp_path: Path) -> None:
        for name in ("config.json", "plan.json", "manifest.json"):
            (out / name).rename(tmp_path / name)
            (out / name).symlink_to(tmp_path / name)
            with pytest.raises(CheckpointError) as caught:
                shardconv.verify(out)
            said = "\n".join(getattr(caught.value, "problems", [str(caught.value)]))
            assert f"{name} is a link out of the directory" in said or f"{name}: is a link out" in said
            (out / name).unlink()
            (tmp_path / name).rename(out / name)

    def test_the_plan(self, out: Path) -> None:
        """What it says of the files is not used."""
        flip(out / "plan.json", 200)
        problems = damage(out).problems
        assert len(problems) == 1
        assert problems[0].startswith("plan.json is not the plan that the files were written for")
        (out / "plan.json").unlink()
        flip(out / shard(0), 3000)
        first, second = damage(out).problems
        assert first.startswith("plan.json is missing")
        assert second.startswith(f"{shard(0)}: is damaged: its checksum (crc32-of-pieces) is ")

    def test_many_at_once(self, out: Path) -> None:
        flip(out / "plan.json", 200)
        (out / "config.json").unlink()
        os.truncate(out / shard(0), 100)
        flip(out / shard(1), -1)
        flip(out / shard(None), 9)
        assert [line.split()[0].rstrip(":") for line in damage(out).problems] == [
            "plan.json",
            shard(None),
            "config.json",
            shard(0),
            shard(1),
        ]


class TestManifest:
    """Without a manifest that can be read, nothing else can be checked."""

    def refused(self, out: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            shardconv.verify(out)
        assert not isinstance(caught.value, DamagedError)
        return str(caught.value)

    def test_there_is_none(self, out: Path, tmp_path: Path) -> None:
        (out / "manifest.json").unlink()
        assert "has no manifest.json: it is not a converted model" in self.refused(out)
        assert "there is no such directory" in self.refused(tmp_path / "absent")

    def test_a_conversion_that_did_not_finish(self, out: Path) -> None:
        (out / "manifest.json").unlink()
        (out / ".partial").mkdir()
        assert "holds an unfinished conversion (.partial) and no manifest.json" in self.refused(out)

    def test_another_version(self, out: Path) -> None:
        text = (out / "manifest.json").read_text()
        (out / "manifest.json").write_text(text.replace('"version": 3', '"version": 2'))
        message = "manifest.json: version: this reads version 3, the file has 2; convert the model again"
        assert message in self.refused(out)

    def test_no_json(self, out: Path) -> None:
        (out / "manifest.json").write_text("{")
        assert "manifest.json: " in self.refused(out)

    def test_a_change_that_reads_well(self, out: Path) -> None:
        """And one that changes white space alone."""
        text = (out / "manifest.json").read_text()
        for changed in (text.replace('"llama"', '"lamma"'), text + "\n"):
            (out / "manifest.json").write_text(changed)
            (problem,) = damage(out).problems
            assert problem == "manifest.json: was changed since it was written, by its sha256"


class TestOtherFiles:
    """What the manifest does not name."""

    def test_tensors_are_a_problem(self, out: Path) -> None:
        shutil.copy(out / shard(0), out / "rank-00000-of-00002" / "model-00002-of-00002.safetensors")
        name = "rank-00000-of-00002/model-00002-of-00002.safetensors"
        assert damage(out).problems == (f"{name}: the manifest does not name it; move it away",)

    def test_all_else_is_remarked(self, out: Path, tmp_path: Path) -> None:
        for name in ("a.txt", "common/b.txt", "c\n\x1b[31m", "d", "e"):
            (out / name).write_text("x")
        (out / "link").symlink_to(tmp_path)
        (remark,) = shardconv.verify(out).remarks
        assert remark == "not in the manifest: a.txt, c \\x1b[31m, d and 3 more"

    def test_a_name_that_is_no_text(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        try:
            (out / os.fsdecode(b"\xff.safetensors")).write_text("x")
        except OSError:
            pytest.skip("this file system has no such names")
        assert cli.run(["verify", str(out)]) == 3
        assert "\\udcff.safetensors: the manifest does not name it" in capsys.readouterr().err

    def test_a_conversion_that_was_begun(self, out: Path) -> None:
        (out / ".partial" / "rank-00000-of-00004").mkdir(parents=True)
        (out / ".partial" / "rank-00000-of-00004" / "model.safetensors").write_text("x")
        (remark,) = shardconv.verify(out).remarks
        assert remark == ".partial is there: a conversion to this directory was begun and is not finished"


class TestHeaders:
    """Files that are as the manifest says, and hold something else than the plan says."""

    def test_other_tensors(self, out: Path) -> None:
        norm, head = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"

        def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            tensors["extra\n"] = torch.ones(2)
            tensors[norm] = tensors[norm].bfloat16()
            tensors[head] = tensors[head][1:].contiguous()
            del tensors["model.layers.1.mlp.up_proj.weight"]
            return tensors

        change_tensors(out, shard(1), change)
        assert sorted(damage(out).problems) == sorted(
            (
                f"{shard(1)}: holds extra , which by the plan does not belong there",
                f"{shard(1)}: {norm} is BF16 [24, 32], and by the plan F32 [24, 32]",
                f"{shard(1)}: {head} is F32 [49, 32], and by the plan F32 [50, 32]",
                "rank-00001-of-00002: no file holds model.layers.1.mlp.up_proj.weight",
            )
        )

    def test_a_tensor_twice(self, llama_dir: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        shardconv.convert(llama_dir, out, 2, writing=Writing(max_file_size="10kB"))
        first, second = sorted(
            p.relative_to(out).as_posix() for p in (out / "rank-00000-of-00002").iterdir()
        )[:2]
        name = "model.embed_tokens.weight"
        twice = torch.zeros(51, 32)
        change_tensors(out, second, lambda tensors: {**tensors, name: twice})
        assert damage(out).problems == (f"{second}: holds {name}, and so does {first}",)

    def test_metadata(self, out: Path) -> None:
        data = (out / shard(0)).read_bytes()
        (out / shard(0)).write_bytes(data.replace(b'"shardconv.rank":"0"', b'"shardconv.rank":"1"'))
        describe_again(out, shard(0))
        (problem,) = damage(out).problems
        assert problem.startswith(f"{shard(0)}: shardconv.rank is '1' and should be '0'")

    def test_a_rank_without_files(self, out: Path) -> None:
        found = manifest.read(out)
        files = tuple(entry for entry in found.files if entry.path != shard(1))
        manifest.write(dataclasses.replace(found, files=files), out)
        problems = damage(out).problems
        assert f"{shard(1)}: the manifest does not name it; move it away" in problems
        assert sum(line.startswith("rank-00001-of-00002: no file holds ") for line in problems) == 16


class TestProgress:
    """Of reading all files."""

    def test_progress_is_told_all_bytes(self, out: Path) -> None:
        log: dict[str, list[int]] = {}

        class Counting(Silent):
            @contextmanager
            def bar(self, label: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Advance]:
                log[label] = [total_bytes]
                yield log[label].append

        found = shardconv.verify(out, progress=Counting())
        total, *steps = log["checksums"]
        own = sum((out / name).stat().st_size for name in ("plan.json", "manifest.json"))
        assert total == sum(steps) == found.num_bytes - own


class TestAgainst:
    """Every byte against the source."""

    def test_the_source(self, out: Path, llama_dir: Path) -> None:
        found = shardconv.verify(out, llama_dir)
        assert (found.num_tensors, found.remarks) == (21, ())

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
    def test_it_is_cast_in_the_same_way(self, llama_dir: Path, tmp_path: Path, dtype: str) -> None:
        shardconv.convert(llama_dir, tmp_path / "out", 3, dtype=dtype, writing=Writing(max_file_size="10kB"))
        assert shardconv.verify(tmp_path / "out", llama_dir).num_tensors == 21
        set_element(
            tmp_path / "out", shard_of(tmp_path / "out", "model.norm.weight"), "model.norm.weight", (5,)
        )
        (problem,) = damage(tmp_path / "out", against=llama_dir).problems
        assert problem.startswith(
            f"model.norm.weight: differs from {llama_dir} first at [5], in common/model-0000"
        )

    def test_the_command(self, out: Path, llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.run(["verify", str(out), "--against", str(llama_dir)]) == 0
        captured = capsys.readouterr()
        assert captured.out.splitlines()[1:] == [f"all 21 tensors equal those of {llama_dir}, byte for byte"]
        assert captured.err.splitlines() == [f"reading {llama_dir}", "checksums: 0.1 MB", "comparing: 0.1 MB"]

    def test_a_fine_tune_is_found(self, out: Path, llama_dir: Path) -> None:
        """Of the same shape, with checksums that fit: every tensor."""
        torch.manual_seed(1)
        tuned = transformers.LlamaForCausalLM(small_config())
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter.normal_()
        tuned.save_pretrained(llama_dir.parent / "tuned")
        shutil.rmtree(out)
        shardconv.convert(llama_dir.parent / "tuned", out, 2)
        shardconv.verify(out)
        problems = damage(out, against=llama_dir).problems
        assert sorted(line.partition(":")[0] for line in problems) == sorted(dict(tuned.named_parameters()))
        assert sum(line.endswith(", and in 2 of 2 files") for line in problems) == 16

    @pytest.mark.parametrize(
        ("name", "rank", "local", "position"),
        [
            ("model.layers.1.mlp.down_proj.weight", 1, (3, 5), [3, 29]),
            ("model.layers.0.self_attn.o_proj.weight", 0, (31, 15), [31, 15]),
            ("lm_head.weight", 1, (49, 31), [100, 31]),
            ("model.layers.0.input_layernorm.weight", None, (0,), [0]),
        ],
    )
    def test_the_position_is_named(
        self,
        out: Path,
        llama_dir: Path,
        name: str,
        rank: int | None,
        local: tuple[int, ...],
        position: list[int],
    ) -> None:
        path = shard(rank)
        byte = set_element(out, path, name, local)
        shardconv.verify(out)
        (problem,) = damage(out, against=llama_dir).problems
        files = "" if rank is None else ", and in 1 of 2 files"
        assert problem == (
            f"{name}: differs from {llama_dir} first at {position}, in {path} at {list(local)} "
            f"(byte {byte} of the file){files}"
        )

    @pytest.mark.parametrize("band", [1 << 20, 64, 8])
    def test_the_first_of_several_differences(
        self, out: Path, llama_dir: Path, monkeypatch: pytest.MonkeyPatch, band: int
    ) -> None:
        """In whichever order they are found."""
        monkeypatch.setattr(copying, "BAND_BYTES", band)
        monkeypatch.setattr(copying, "UNIT_BYTES", 4 * band)
        name = "model.layers.1.mlp.down_proj.weight"
        for local in ((30, 2), (3, 5), (3, 6), (4, 0), (31, 23)):
            set_element(out, shard(0), name, local)
        set_element(out, shard(1), name, (0, 0))
        (problem,) = damage(out, against=llama_dir).problems
        assert "first at [3, 5], in rank-00000-of-00002" in problem
        assert problem.endswith(", and in 2 of 2 files")

    def test_every_changed_bit_is_found(self, out: Path, llama_dir: Path) -> None:
        """That of a zero's sign, too."""
        rng = random.Random(1)
        path = shard(1)
        whole = (out / path).read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")
        for position in [begin, len(whole) - 1, *(rng.randrange(begin, len(whole)) for _ in range(20))]:
            flip(out / path, position, 1 << rng.randrange(8))
            describe_again(out, path)
            (problem,) = damage(out, against=llama_dir).problems
            assert abs(int(problem.partition("(byte ")[2].partition(" ")[0]) - position) < 4
            (out / path).write_bytes(whole)

    def test_damage_is_placed(self, out: Path, llama_dir: Path) -> None:
        """A bad checksum does not keep the tensor from being named."""
        flip(out / shard(0), -1)
        first, second = damage(out, against=llama_dir).problems
        assert first.startswith(f"{shard(0)}: is damaged: its checksum (crc32-of-pieces) is ")
        assert f": differs from {llama_dir} first at " in second

    def test_what_cannot_be_compared(self, out: Path, llama_dir: Path) -> None:
        (out / shard(0)).unlink()
        found = damage(out, against=llama_dir)
        assert found.problems == (f"{shard(0)}: is missing",)
        assert found.remarks[0].startswith(f"not compared with {llama_dir}: ")
        flip(out / "plan.json", 200)
        assert damage(out, against=llama_dir).remarks == (
            f"not compared with {llama_dir}, since the plan cannot be used",
        )

    def test_other_small_files(self, out: Path, llama_dir: Path) -> None:
        config = json.loads((llama_dir / "config.json").read_text())
        (llama_dir / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
        (llama_dir / "generation_config.json").unlink()
        (llama_dir / "tokenizer.json").write_text("{}")
        assert shardconv.verify(out, llama_dir).remarks == (
            f"config.json: differs from that of {llama_dir}",
            f"generation_config.json: is not in {llama_dir}",
            f"tokenizer.json: is in {llama_dir} and not here",
        )

    def test_a_model_of_another_shape(self, out: Path, tmp_path: Path) -> None:
        save_random(small_config(vocab_size=103), transformers.LlamaForCausalLM, tmp_path / "other")
        problems = damage(out, against=tmp_path / "other").problems
        shapes = f"is [103, 32] in {tmp_path / 'other'}, and [101, 32] in the plan"
        assert problems[:2] == (f"model.embed_tokens.weight: {shapes}", f"lm_head.weight: {shapes}")

    def test_a_model_that_is_not_there(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is said before anything is read."""
        monkeypatch.setattr(file_checks, "checksums", None)
        with pytest.raises(SourceError, match="no such directory"):
            shardconv.verify(out, "./absent")

    @pytest.mark.parametrize("layers", [1, 3])
    def test_a_model_of_other_parameters(self, out: Path, tmp_path: Path, layers: int) -> None:
        """Fewer or more than there are."""
        save_random(small_config(num_hidden_layers=layers), transformers.LlamaForCausalLM, tmp_path / "other")
        problems = damage(out, against=tmp_path / "other").problems
        name = f"model.layers.{min(layers, 2)}.mlp.down_proj.weight"
        other = tmp_path / "other"
        shapes = f"is not in {other}, and [32, 48] in the plan"
        assert f"{name}: {shapes if layers == 1 else f'is in {other}, and not in the plan'}" in problems
        assert sum(f".layers.{min(layers, 2)}." in line for line in problems) == 9

    def test_a_model_of_the_hub(self, out: Path, llama_dir: Path, tmp_path: Path) -> None:
        """And a converted directory that is one: all files are links into the cache."""
        cached(tmp_path / "hub", "org/llama", llama_dir)
        options = {"cache_dir": tmp_path / "hub", "local_files_only": True, "revision": "main"}
        assert shardconv.verify(out, "org/llama", **options).num_tensors == 21
        linked = cached(tmp_path / "hub", "org/out", out)
        assert shardconv.verify(linked, llama_dir).num_tensors == 21
        set_element(out, shard(1), "lm_head.weight", (0, 0))
        other = cached(tmp_path / "hub", "org/other", out)
        (problem,) = damage(other, against="org/llama", **options).problems
        assert problem.startswith(
            f"lm_head.weight: differs from org/llama first at [51, 0], in {shard(1)} at [0, 0]"
        )

    @pytest.mark.parametrize("truncated", ["source", "shard"])
    def test_a_file_that_is_cut_off_meanwhile(self, out: Path, llama_dir: Path, truncated: str) -> None:
        class Cutting(Silent):
            @contextmanager
            def bar(self, label: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Advance]:
                if label == "comparing":
                    os.truncate(
                        llama_dir / "model.safetensors" if truncated == "source" else out / shard(0), 9000
                    )
                yield lambda count: None

        with pytest.raises(ShardconvError, match=r"byte \d+: it was cut off since its header was read"):
            shardconv.verify(out, llama_dir, progress=Cutting())

    def test_options_of_the_hub_need_a_model(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.run(["verify", str(out), "--revision", "main"]) == 2
        assert "error: revision says how to read a model to compare with" in capsys.readouterr().err

    def test_custom_code(self, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is compared and run only if it is trusted."""
        make_custom(llama_dir)
        plan = hand_plan(small_config(), 1)
        model = dataclasses.replace(plan.model, trust_remote_code=True)
        custom = dataclasses.replace(plan, model=model)
        solve_as(monkeypatch, custom)
        out = tmp_path / "out"
        shardconv.convert(llama_dir, out, 1, trust_remote_code=True)
        shardconv.verify(out)
        with pytest.raises(SourceError, match=r"runs custom code; read its .* pass --trust-remote-code"):
            shardconv.verify(out, llama_dir)
        (llama_dir / "modeling_mine.py").write_text((llama_dir / "modeling_mine.py").read_text() + "# new\n")
        found = shardconv.verify(out, llama_dir, trust_remote_code=True)
        assert found.remarks == (f"modeling_mine.py: differs from that of {llama_dir}",)


def cached(hub: Path, name: str, directory: Path) -> Path:
    """A directory as a hub cache holds it; its snapshot."""
    repository, commit = hub / f"models--{name.replace('/', '--')}", "0" * 40
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for index, file in enumerate(sorted(p for p in directory.rglob("*") if p.is_file())):
        shutil.copy(file, repository / "blobs" / str(index))
        link = repository / "snapshots" / commit / file.relative_to(directory)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repository / "blobs" / str(index), link.parent))
    return repository / "snapshots" / commit


def shard_of(out: Path, name: str) -> str:
    """The file that holds a tensor."""
    holding = [p for p in sorted(out.rglob("*.safetensors")) if name.encode() in p.read_bytes()]
    return holding[0].relative_to(out).as_posix()


def test_torch_is_not_imported_to_check_files(out: Path) -> None:
    code = (
        "import sys, shardconv; shardconv.verify(sys.argv[1]); "
        "assert not {'torch', 'transformers', 'numpy', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(out)], check=True, timeout=60)


def test_a_plan_may_be_changed_with_its_manifest(out: Path) -> None:
    """Solved again for other code, say."""
    change_plan(out, lambda plan: dataclasses.replace(plan, notes=("other",)))
    shardconv.verify(out)
