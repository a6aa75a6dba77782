"""What is written: the bytes of each rank, the files, and nothing when something goes wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import zlib
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans_once import solve_as
from safetensors.torch import load_file
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.files import manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, size
from shardconv_runtime.format.header import ShardFile, read_header
from shardconv_runtime.format.plan import ParameterPlan, Plan, parameter_plans
from shardconv_runtime.format.slices import Mesh, coordinates
from shardconv_runtime.format.stored_layout import layout_sha256
from shardconv_runtime.parallel.local_modules import local_tensor
from small_models import hand_plan, make_custom, small_config

import shardconv
from shardconv.arguments import Writing, parse_ranks, parse_size
from shardconv.reporting.progress import Advance, Silent
from shardconv.writing import local_files
from shardconv.writing.outputs import Output

pytestmark = pytest.mark.usefixtures("hand_solver")


def files_in(path: Path) -> set[str]:
    """Relative paths of all files."""
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def contents(path: Path) -> dict[str, bytes]:
    """All files."""
    return {file: (path / file).read_bytes() for file in files_in(path)}


def fail_on_write(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The third write to a file fails."""
    write, calls = local_files.LocalFiles.put, itertools.count()

    def failing(*args: Any) -> None:
        if next(calls) >= 2:
            raise error
        write(*args)

    patch.setattr(local_files.LocalFiles, "put", failing)


def held(dim: Dim, mesh: Mesh, rank: int) -> list[int]:
    """Brute force: the positions that a rank holds, counting them out one by one."""
    if isinstance(dim, Leaf):
        part, parts = 0, 1
        for axis in dim.axes:
            part, parts = part * mesh[axis] + coordinates(mesh, rank)[axis], parts * mesh[axis]
        shares = [dim.size // parts + (i < dim.size % parts) for i in range(parts)]
        return list(range(sum(shares[:part]), sum(shares[: part + 1])))
    if isinstance(dim, Sum):
        starts = itertools.accumulate((size(s) for s in dim.segments), initial=0)
        return [
            start + i for start, s in zip(starts, dim.segments, strict=False) for i in held(s, mesh, rank)
        ]
    positions = [0]
    for factor in dim.factors:
        positions = [p * size(factor) + i for p in positions for i in held(factor, mesh, rank)]
    return positions


LAYOUTS: tuple[Dim, ...] = (
    Leaf(7),
    Leaf(7, (0,)),
    Leaf(6, (0, 1)),
    Product((Leaf(3, (1,)), Leaf(4))),
    Product((Leaf(2), Leaf(5, (0,)))),
    Sum((Product((Leaf(4, (0,)), Leaf(2))), Product((Leaf(2, (0,)), Leaf(2))), Leaf(3))),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (2, 2), (3, 1), (2, 3)]),
    st.data(),
)
def test_a_rank_holds_exactly_its_positions(dims: list[Dim], mesh: Mesh, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, math.prod(mesh) - 1))
    full = torch.arange(math.prod(map(size, dims))).reshape([size(dim) for dim in dims])
    expected = full
    for index, dim in enumerate(dims):
        expected = expected.index_select(index, torch.tensor(held(dim, mesh, rank), dtype=torch.int64))
    found = local_tensor(ParameterPlan(("w",), tuple(dims), "int64"), full, mesh, rank)
    assert torch.equal(found, expected)
    assert found.is_contiguous()


def test_a_partial_parameter_sums_up_to_itself() -> None:
    bias = torch.randn(6)
    entry = ParameterPlan(("b",), (Leaf(6),), "float32", partial=(0,))
    pieces = [local_tensor(entry, bias, (2, 2), rank) for rank in range(4)]
    for replica in (0, 1):
        assert torch.equal(pieces[replica] + pieces[2 + replica], bias)
    assert torch.equal(pieces[0], bias)
    assert not pieces[2].any()


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_every_tensor_can_be_put_together_again(llama_dir: Path, tmp_path: Path, tp: int) -> None:
    out = tmp_path / "out"
    plan = shardconv.convert(llama_dir, out, tp)
    assert plan_json.read(out / "plan.json") == plan
    source = load_file(llama_dir / "model.safetensors")
    common = load_file(out / "common" / "model-00001-of-00001.safetensors")
    ranks = [load_file(out / manifest.shard_path(rank, tp, 0, 1)) for rank in range(tp)]
    entries = parameter_plans(plan)
    assert source.keys() == entries.keys()
    for name, full in source.items():
        if name in common:
            assert torch.equal(common[name], full)
            assert not any(name in rank for rank in ranks)
            continue
        merged = torch.full_like(full, math.nan)
        for rank, tensors in enumerate(ranks):
            index = torch.meshgrid(
                *(torch.tensor(held(dim, plan.mesh, rank), dtype=torch.int64) for dim in entries[name].dims),
                indexing="ij",
            )
            merged[index] = tensors[name]
        assert torch.equal(merged, full), name


def test_the_manifest_names_every_file_with_its_size_and_checksum(llama_dir: Path, tmp_path: Path) -> None:
    (llama_dir / "tokenizer.json").write_text("{}")
    (llama_dir / "modeling_custom.py").write_text("raise SystemExit")
    (llama_dir / "README.md").write_text("not needed")
    out = tmp_path / "out"
    plan = shardconv.convert(llama_dir, out, 2)
    found = manifest.read(out)
    assert {entry.path for entry in found.files} | {"plan.json", "manifest.json"} == files_in(out)
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= files_in(out)
    assert not {"modeling_custom.py", "README.md"} & files_in(out)
    for entry in found.files:
        data = (out / entry.path).read_bytes()
        if entry.path.endswith(".safetensors"):  # of one piece
            expected = f"crc32-of-pieces:{zlib.crc32(zlib.crc32(data).to_bytes(4, 'little')):08x}"
        else:
            expected = f"sha256:{hashlib.sha256(data).hexdigest()}"
        assert entry.checksum == expected
    for rank in range(2):
        manifest.check_sizes(out, found, rank)
        shard = out / manifest.shard_path(rank, 2, 0, 1)
        manifest.check_shard(shard, rank, 2, layout_sha256(plan))
    size = (llama_dir / "model.safetensors").stat().st_size
    assert found.source == manifest.Source("llama", files=(manifest.SourceFile("model.safetensors", size),))
    assert found.tools.keys() == {"shardconv", "torch", "transformers", "safetensors"}


def test_trusted_code_goes_along(llama_dir: Path, tmp_path: Path) -> None:
    make_custom(llama_dir)
    shardconv.convert(llama_dir, tmp_path / "out", 1, trust_remote_code=True)
    assert {"modeling_mine.py", "configuration_mine.py"} <= files_in(tmp_path / "out")


def test_files_are_split_at_the_limit(llama_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardconv.convert(llama_dir, out, 2, writing=Writing(max_file_size="10kB"))
    shards = sorted((out / "rank-00000-of-00002").iterdir())
    assert len(shards) > 1
    names: list[str] = []
    for shard in shards:
        _, tensors = read_header(shard)
        num_bytes = sum(stop - start for start, stop in (t.offsets for t in tensors.values()))
        assert num_bytes <= 10_000 or len(tensors) == 1
        start = ShardFile(shard, shard.stat().st_size, tensors).start
        assert start % 64 == 0, "mapped matrices begin with a cache line"
        names += tensors
    assert len(names) == len(set(names)) == 16
    assert [shard.name for shard in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]


def test_the_same_input_gives_the_same_bytes(llama_dir: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shardconv.convert(llama_dir, tmp_path / name, 2)
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b")
    for file in files_in(tmp_path / "a"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_a_plan_of_other_shapes_is_refused(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = hand_plan(small_config(vocab_size=103), 2)
    solve_as(monkeypatch, wrong)
    with pytest.raises(ShardconvError, match=r"is \[101, 32\] in the checkpoint and \[103, 32\] in the plan"):
        shardconv.convert(llama_dir, tmp_path / "new" / "out", 2)
    assert {p.name for p in tmp_path.iterdir()} == {"llama"}


class TestOutput:
    """OUT appears complete or not at all, and replaces only what shardconv wrote."""

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    def test_a_failure_leaves_what_can_be_continued(
        self, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        with monkeypatch.context() as patch:
            fail_on_write(patch, error)
            with pytest.raises((ShardconvError, KeyboardInterrupt)) as caught:
                shardconv.convert(llama_dir, tmp_path / "new" / "out", 2)
        if isinstance(error, OSError):
            assert "No space left on device; correct that and run the same command again" in str(caught.value)
        assert {p.name for p in (tmp_path / "new" / "out").iterdir()} == {".partial"}
        shardconv.convert(llama_dir, tmp_path / "new" / "out", 2)
        shardconv.convert(llama_dir, tmp_path / "other", 2)
        assert contents(tmp_path / "new" / "out") == contents(tmp_path / "other")

    def test_a_failure_keeps_the_directory_that_was_to_be_replaced(
        self, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        shardconv.convert(llama_dir, out, 2)
        before = contents(out)
        with monkeypatch.context() as patch:
            fail_on_write(patch, OSError(28, "No space left on device"))
            with pytest.raises(ShardconvError, match="No space"):
                shardconv.convert(llama_dir, out, 4, writing=Writing(overwrite=True))
        assert {path: data for path, data in contents(out).items() if ".partial" not in path} == before
        shardconv.convert(llama_dir, out, 4, writing=Writing(overwrite=True))
        assert manifest.read(out).tp == 4
        assert not [path for path in contents(out) if ".partial" in path or "of-00002" in path]

    def test_an_empty_directory_is_used(self, llama_dir: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        shardconv.convert(llama_dir, out, 2)
        assert manifest.read(out).tp == 2

    def test_overwrite_replaces_a_converted_directory(self, llama_dir: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        shardconv.convert(llama_dir, out, 4)
        with pytest.raises(ShardconvError, match=r"\(tp was 4, is now 2\); name another directory"):
            shardconv.convert(llama_dir, out, 2)
        shardconv.convert(llama_dir, out, 2, writing=Writing(overwrite=True))
        assert manifest.read(out).tp == 2
        assert not (out / "rank-00000-of-00004").exists()
        assert {p.name for p in tmp_path.iterdir()} == {"llama", "out"}
        assert not (out / ".partial").exists()

    def test_overwrite_spares_everything_else(self, llama_dir: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")
        with pytest.raises(ShardconvError, match="was not written by shardconv"):
            Output.prepare(out, overwrite=True, source=llama_dir)
        (out / "thesis.txt").unlink()
        shardconv.convert(llama_dir, out, 1)
        (out / "common" / "thesis.txt").write_text("years of work")
        with pytest.raises(ShardconvError, match=r"holds common/thesis\.txt, which shardconv did not write"):
            shardconv.convert(llama_dir, out, 1, writing=Writing(overwrite=True))
        assert (out / "common" / "thesis.txt").exists()

    def test_the_model_s_own_directory_is_refused(self, llama_dir: Path) -> None:
        for out in (llama_dir, llama_dir.parent):
            with pytest.raises(ShardconvError, match="holds the model to convert"):
                Output.prepare(out, overwrite=True, source=llama_dir)

    def test_a_file_is_refused(self, llama_dir: Path) -> None:
        with pytest.raises(ShardconvError, match="is a file"):
            Output.prepare(llama_dir / "config.json", overwrite=True, source=llama_dir)


class TestLayoutHash:
    """The hash tells layouts apart, and nothing else."""

    def test_it_ignores_what_the_files_do_not_hold(self) -> None:
        plan = hand_plan(small_config(), 2)
        other = dataclasses.replace(
            plan,
            modules=(),
            logits=None,
            notes=("other",),
            code=dataclasses.replace(plan.code, torch="9.9"),
            parameters=tuple(reversed(plan.parameters)),
        )
        assert layout_sha256(other) == layout_sha256(plan)

    def test_it_ignores_how_the_same_positions_are_written(self) -> None:
        plan = hand_plan(small_config(), 4)
        same = dataclasses.replace(
            plan,
            mesh=(2, 2),
            parameters=tuple(
                dataclasses.replace(p, dims=tuple(map(on_two_axes, p.dims))) for p in plan.parameters
            ),
        )
        assert layout_sha256(same) == layout_sha256(plan)

    def test_it_sees_every_change_of_the_files(self) -> None:
        plan = hand_plan(small_config(), 2)
        first, *rest = plan.parameters
        changed = (
            dataclasses.replace(first, dims=(Leaf(101), Leaf(32, (0,)))),
            dataclasses.replace(first, dims=(Leaf(101), Leaf(32))),
            dataclasses.replace(first, dims=(Leaf(101), Leaf(32)), partial=(0,)),
            dataclasses.replace(first, dtype="float16"),
            dataclasses.replace(first, names=("model.other.weight",)),
        )
        plans = [plan, *(dataclasses.replace(plan, parameters=(entry, *rest)) for entry in changed)]
        plans.append(dataclasses.replace(plan, tied=(("a", "lm_head.weight"),)))
        assert len({layout_sha256(p) for p in plans}) == len(plans)


def on_two_axes(dim: Dim) -> Dim:
    """Axis 0 of a mesh (4,) as axes 0 and 1 of a mesh (2, 2)."""
    if isinstance(dim, Leaf):
        return Leaf(dim.size, (0, 1) if dim.axes else ())
    assert isinstance(dim, Product)
    return Product(tuple(map(on_two_axes, dim.factors)))


class TestReplan:
    """The plan is replaced; the shards are kept where their slices are the same."""

    def test_the_shards_are_kept(
        self, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        old = shardconv.convert(llama_dir, out, 2)
        before = {f: (out / f).read_bytes() for f in files_in(out) - {"plan.json", "manifest.json"}}
        new = dataclasses.replace(old, notes=("solved again",))
        solve_as(monkeypatch, new)
        assert shardconv.replan(out) == new
        assert plan_json.read(out / "plan.json") == new
        found = manifest.read(out)
        for rank in range(2):
            manifest.check_sizes(out, found, rank)
        assert {f: (out / f).read_bytes() for f in files_in(out) - {"plan.json", "manifest.json"}} == before

    def test_a_run_that_died_halfway_is_repaired(
        self, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        old = shardconv.convert(llama_dir, out, 2)
        new = dataclasses.replace(old, notes=("solved again",))
        solve_as(monkeypatch, new)
        plan_json.write(new, out / "plan.json")
        with pytest.raises(ShardconvError, match="not the plan that the files were written for"):
            manifest.check_sizes(out, manifest.read(out), 0)
        shardconv.replan(out)
        manifest.check_sizes(out, manifest.read(out), 0)

    def test_another_layout_needs_a_conversion(
        self, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        old = shardconv.convert(llama_dir, out, 2)
        before = {file: (out / file).read_bytes() for file in files_in(out)}
        first, *rest = old.parameters
        moved = dataclasses.replace(first, dims=(Leaf(101), Leaf(32, (0,))))
        new: Plan = dataclasses.replace(old, parameters=(moved, *rest))
        solve_as(monkeypatch, new)
        message = r"embed_tokens\.weight is laid out as \[101, 32@0\] now, and was as \[101@0, 32\], so the"
        with pytest.raises(ShardconvError, match=message):
            shardconv.replan(out)
        assert {file: (out / file).read_bytes() for file in files_in(out)} == before

    def test_swapped_shards_are_noticed(self, llama_dir: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        shardconv.convert(llama_dir, out, 2)
        a, b = (out / manifest.shard_path(rank, 2, 0, 1) for rank in (0, 1))
        a.rename(out / "kept"), b.rename(a), (out / "kept").rename(b)
        with pytest.raises(ShardconvError, match="swapped"):
            shardconv.replan(out)

    def test_custom_code_must_be_trusted_again(self, llama_dir: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        plan = shardconv.convert(llama_dir, out, 1)
        custom = dataclasses.replace(plan, model=dataclasses.replace(plan.model, trust_remote_code=True))
        plan_json.write(custom, out / "plan.json")
        with pytest.raises(ShardconvError, match=r"runs custom code; read its .* pass --trust-remote-code"):
            shardconv.replan(out)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("2GiB", 2**31), ("1.5kb", 1500), ("7", 7), (123, 123)],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("ranks", "found"),
    [(None, None), ("0-1,3", (0, 1, 3)), ("3, 0", (0, 3)), ((2, 0, 2), (0, 2)), (range(4), (0, 1, 2, 3))],
)
def test_ranks(ranks: Collection[int] | str | None, found: tuple[int, ...] | None) -> None:
    assert parse_ranks(ranks, 4) == found


@pytest.mark.parametrize("ranks", ["4", "2-1", "", "one", (4,), (-1, 0)])
def test_ranks_that_are_none(ranks: Collection[int] | str) -> None:
    with pytest.raises(ShardconvError, match="rank"):
        parse_ranks(ranks, 4)


@pytest.mark.parametrize("text", ["", "big", "-5GB", "0", 0, "5 GB GB"])
def test_sizes_that_are_none(text: str | int, llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardconvError, match="size"):
        shardconv.convert(llama_dir, tmp_path / "out", 2, writing=Writing(max_file_size=text))


@pytest.mark.parametrize("tp", [0, -1, 2.0, True, "2"])
def test_tp_must_be_a_positive_int(tp: int, llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardconvError, match="tp must be a whole number from 1 to 4,096"):
        shardconv.convert(llama_dir, tmp_path / "out", tp)
    with pytest.raises(ShardconvError, match="tp must be a whole number from 1 to 4,096"):
        shardconv.plan(llama_dir, tp)


def test_progress_is_told_all_bytes(llama_dir: Path, tmp_path: Path) -> None:
    done: list[int] = []
    totals: list[int] = []

    class Counting(Silent):
        def bar(self, label: str, total_bytes: int, done_bytes: int = 0) -> AbstractContextManager[Advance]:
            assert done_bytes == 0
            totals.append(total_bytes)
            return nullcontext(done.append)

    shardconv.convert(llama_dir, tmp_path / "out", 1, progress=Counting())
    shards = (tmp_path / "out").rglob("*.safetensors")
    assert [sum(done)] == totals == [sum(shard.stat().st_size for shard in shards)]
