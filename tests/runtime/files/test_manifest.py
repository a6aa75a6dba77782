"""The manifest, the checks of a directory against it, and the headers of its shards."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GOLDEN_PLAN, ROOT
from shardconv_runtime.errors import CheckpointError, PlanError
from shardconv_runtime.files import manifest
from shardconv_runtime.files.manifest import FileEntry, Manifest, Source
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.header import read_header
from shardconv_runtime.format.measured import Numerics

PLAN_TEXT = GOLDEN_PLAN.read_text("utf-8")
PLAN_SHA256 = plan_json.sha256(PLAN_TEXT)
DOCUMENT = ROOT / "docs" / "plan-format.md"
LAYOUT_SHA256 = "1" * 64
TP = 4


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def shard(rank: int | None) -> bytes:
    tensor = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}
    return safetensors_bytes(
        {"__metadata__": manifest.shard_metadata(rank, TP, LAYOUT_SHA256), "w": tensor}, b"\1" * 8
    )


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """A converted directory of four ranks."""
    directory = tmp_path / "out"
    contents = {"config.json": (b"{}", None), manifest.shard_path(None, TP, 0, 1): (shard(None), None)}
    contents |= {manifest.shard_path(rank, TP, 0, 1): (shard(rank), rank) for rank in range(TP)}
    for path, (data, _) in contents.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    (directory / "plan.json").write_text(PLAN_TEXT, "utf-8")
    entries = [
        FileEntry(path, len(data), manifest.sha256_checksum(directory / path), rank)
        for path, (data, rank) in sorted(contents.items())
    ]
    manifest.write(
        Manifest(TP, PLAN_SHA256, Source("org/model", "abc"), {"shardconv": "0.1.0"}, tuple(entries)),
        directory,
    )
    return directory


def test_names() -> None:
    assert manifest.rank_directory(3, 8) == "rank-00003-of-00008"
    assert manifest.shard_path(None, 8, 0, 2) == "common/model-00001-of-00002.safetensors"
    assert manifest.shard_path(7, 8, 1, 2) == "rank-00007-of-00008/model-00002-of-00002.safetensors"


def test_exact_bytes_and_round_trip() -> None:
    path = "rank-00001-of-00004/model-00001-of-00001.safetensors"
    entry = FileEntry(path, 12, "crc32-of-pieces:0123abcd", 1)
    value = Manifest(4, "b" * 64, Source("name"), {"torch": "2", "shardconv": "0.1.0"}, (entry,))
    plain = (
        '{\n  "format": "shardconv.manifest",\n  "version": 3,\n  "tp": 4,\n'
        f'  "plan_sha256": "{"b" * 64}",\n'
        '  "source": {"name": "name"},\n  "tools": {"shardconv": "0.1.0", "torch": "2"},\n  "files": [\n'
        '    {"path": "rank-00001-of-00004/model-00001-of-00001.safetensors", "num_bytes": 12, '
        '"checksum": "crc32-of-pieces:0123abcd", "rank": 1}\n  ]\n}\n'
    )
    digest = plan_json.sha256(plain)
    text = manifest.dumps(value)
    assert text == plain.removesuffix("\n}\n") + f',\n  "sha256": "{digest}"\n}}\n'
    assert manifest.loads(text) == replace(value, sha256=digest)
    assert manifest.is_intact(text)


def test_a_result_of_numerics_is_optional() -> None:
    value = Manifest(4, "b" * 64, Source("name"), {"torch": "2"}, ())
    assert "numerics" not in manifest.dumps(value)
    measured = replace(value, numerics=Numerics(2e-15, 1e-9, "float64", {"input_ids": (3, 24), "scale": ()}))
    text = manifest.dumps(measured)
    assert text.endswith(
        '\n  "numerics": {"worst": 2e-15, "tolerance": 1e-09, "dtype": "float64", '
        '"inputs": {"input_ids": [3, 24], "scale": []}}\n}\n'
    )
    assert manifest.loads(text).numerics == measured.numerics
    assert manifest.is_intact(text)
    assert not manifest.is_intact(text.replace("2e-15", "1e-15"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"worst": 2e-15', '"worst": 1e-3', "numerics.worst: must be from 0 to the tolerance"),
        ('"worst": 2e-15', '"worst": -1', "numerics.worst: must be from 0 to the tolerance"),
        ('"worst": 2e-15', '"worst": NaN', "NaN is not a JSON number"),
        ('"float64"', '"' + "x" * 1001 + '"', "numerics: a name has more than 1000 characters"),
        ("[3]", "[-3]", "numerics.inputs.input_ids: expected the sizes of a tensor's dims"),
        ("[3]", str([1] * 65), "numerics.inputs.input_ids: expected the sizes of a tensor's dims"),
        ("[3]", "[3.0]", r"numerics.inputs.input_ids\[0\]: expected an int"),
    ],
)
def test_results_that_are_refused(old: str, new: str, problem: str) -> None:
    value = Manifest(4, "b" * 64, Source("name"), {"torch": "2"}, ())
    value = replace(value, numerics=Numerics(2e-15, 1e-9, "float64", {"input_ids": (3,)}))
    text = manifest.dumps(value)
    assert old in text
    with pytest.raises(CheckpointError, match=problem):
        manifest.loads(text.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [("name", "nome"), ("2", "3"), ("\n  ", "\n\t "), ("0123", "0133")])
def test_a_changed_manifest_is_not_intact(old: str, new: str) -> None:
    entry = FileEntry("config.json", 12, "crc32-of-pieces:0123abcd")
    text = manifest.dumps(Manifest(4, "b" * 64, Source("org/name"), {"torch": "x2"}, (entry,)))
    at = text.rindex(old)
    assert not manifest.is_intact(text[:at] + new + text[at + len(old) :])


def test_example_in_the_documentation_is_a_manifest() -> None:
    (block,) = [part.split("```")[0] for part in DOCUMENT.read_text("utf-8").split("```json manifest\n")[1:]]
    assert manifest.dumps(manifest.loads(block)) == block


def test_an_intact_directory_passes(converted: Path) -> None:
    found = manifest.read(converted)
    assert found.source == Source("org/model", "abc")
    assert manifest.read_plan(converted, found) == plan_json.loads(PLAN_TEXT)
    for rank in range(TP):
        manifest.check_sizes(converted, found, rank)
        for entry in found.files_of(rank):
            if entry.path.endswith(".safetensors"):
                path = manifest.resolve(converted, entry.path)
                tensors = manifest.check_shard(path, entry.rank, TP, LAYOUT_SHA256)
                assert tensors == {"w": ("F32", (2, 1), (0, 8))}


def test_missing_and_truncated_files_are_named(converted: Path) -> None:
    found = manifest.read(converted)
    mine = converted / manifest.shard_path(2, TP, 0, 1)
    mine.write_bytes(mine.read_bytes()[:-1])
    size = mine.stat().st_size
    with pytest.raises(
        CheckpointError, match=rf"{mine.name} has {size} bytes and should have {size + 1}; copy"
    ):
        manifest.check_sizes(converted, found, 2)
    manifest.check_sizes(converted, found, 1)
    mine.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00002-of-00004/.* is missing \(rank 2 needs it\); copy"):
        manifest.check_sizes(converted, found, 2)
    (converted / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        manifest.check_sizes(converted, found, 1)


def test_no_such_rank(converted: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 4 is outside of the 4 ranks of the conversion"):
        manifest.check_sizes(converted, manifest.read(converted), 4)


def test_another_plan_is_refused(converted: Path) -> None:
    found = manifest.read(converted)
    (converted / "plan.json").write_text(PLAN_TEXT + "\n", "utf-8")
    with pytest.raises(CheckpointError, match="not the plan that the files were written for"):
        manifest.check_sizes(converted, found, 0)
    (converted / "plan.json").unlink()
    with pytest.raises(CheckpointError, match=r"plan\.json is missing"):
        manifest.check_sizes(converted, found, 0)


def test_plan_of_another_version_or_tp(converted: Path) -> None:
    newer = PLAN_TEXT.replace('"version": 6', '"version": 7')
    (converted / "plan.json").write_text(newer, "utf-8")
    found = replace(manifest.read(converted), plan_sha256=plan_json.sha256(newer))
    with pytest.raises(PlanError, match="reads version 6, the file has 7; convert the model again"):
        manifest.read_plan(converted, found)
    (converted / "plan.json").write_text(PLAN_TEXT, "utf-8")
    with pytest.raises(CheckpointError, match=r"tp is 4 in plan\.json and 2 in manifest\.json"):
        manifest.read_plan(converted, replace(found, plan_sha256=PLAN_SHA256, tp=2, files=()))


def test_directory_without_manifest(tmp_path: Path) -> None:
    messages = {
        tmp_path: "not a converted model; name the output",
        tmp_path / "nowhere": "no such directory",
    }
    for directory, message in messages.items():
        with pytest.raises(CheckpointError, match=message):
            manifest.read(directory)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json: not JSON"):
        manifest.read(tmp_path)


def test_swapped_rank_files_are_refused(converted: Path) -> None:
    first, second = (converted / manifest.shard_path(rank, TP, 0, 1) for rank in (0, 1))
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    manifest.check_sizes(converted, manifest.read(converted), 0)
    with pytest.raises(
        CheckpointError, match=r"shardconv\.rank is '1' and should be '0': the file is from another rank"
    ):
        manifest.check_shard(first, 0, TP, LAYOUT_SHA256)
    with pytest.raises(CheckpointError, match=r"shardconv\.tp is '4' and should be '2'"):
        manifest.check_shard(second, 0, 2, LAYOUT_SHA256)
    with pytest.raises(CheckpointError, match=r"shardconv\.layout"):
        manifest.check_shard(second, 0, TP, "0" * 64)


def test_links_out_of_the_directory_are_refused(converted: Path, tmp_path: Path) -> None:
    found = manifest.read(converted)
    outside = tmp_path / "outside"
    (converted / "config.json").rename(outside)
    (converted / "config.json").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"config\.json is a link out of the directory"):
        manifest.check_sizes(converted, found, 0)
    (converted / "config.json").unlink()
    (converted / "config.json").symlink_to(converted / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        manifest.check_sizes(converted, found, 0)


def test_links_inside_of_a_directory_and_to_it_are_fine(converted: Path, tmp_path: Path) -> None:
    (converted / "config.json").rename(converted / "real")
    (converted / "config.json").symlink_to("real")
    (tmp_path / "link").symlink_to(converted)
    manifest.check_sizes(tmp_path / "link", manifest.read(tmp_path / "link"), 0)


def test_snapshot_of_a_hub_cache_is_fine(converted: Path, tmp_path: Path) -> None:
    repository = tmp_path / "cache" / "models--org--model"
    (repository / "blobs").mkdir(parents=True)
    (tmp_path / "cache" / "blobs" / "ab").mkdir(parents=True)
    snapshot = repository / "snapshots" / "abc"
    snapshot.parent.mkdir()
    converted.rename(snapshot)
    for index, path in enumerate(p for p in sorted(snapshot.rglob("*")) if p.is_file()):
        shared, blob = tmp_path / "cache" / "blobs" / "ab" / str(index), repository / "blobs" / str(index)
        path.rename(shared)
        blob.symlink_to(shared)
        path.symlink_to(blob)
    manifest.check_sizes(snapshot, manifest.read(snapshot), 3)


def _overridden(**changes: Any) -> str:
    entry = {"path": "config.json", "num_bytes": 2, "checksum": "sha256:" + "a" * 64}
    document = {
        "format": "shardconv.manifest",
        "version": 3,
        "tp": 2,
        "plan_sha256": "b" * 64,
        "source": {"name": "x"},
        "tools": {},
        "files": [entry | changes.pop("file", {})],
    }
    return json.dumps(document | changes)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/./b",
        "./a",
        "a//b",
        "a/",
        "..",
        ".",
        "",
        "a\\b",
        "C:/x",
        "c:x",
        "a\0",
    ],
)
def test_unsafe_paths_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"files\[0\]\.path"):
        manifest.loads(_overridden(file={"path": path}))
    with pytest.raises(CheckpointError, match="path"):
        manifest.resolve(tmp_path, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "shardconv.plan"}, "another kind of file"),
        ({"version": 9}, "reads version 3, the file has 9"),
        ({"tp": 0}, "^tp: must be 1 or more"),
        ({"plan_sha256": "B" * 64}, "^plan_sha256: expected 64 hex"),
        ({"source": {}}, '^source: the key "name" is missing'),
        ({"source": {"name": "x", "revision": 3}}, r"^source\.revision: expected a string"),
        ({"tools": {"torch": 2}}, r"^tools\.torch: expected a string, got 2"),
        ({"tools": []}, "^tools: expected an object"),
        ({"files": None}, "^files: expected a list, got null"),
        ({"file": {"num_bytes": -1}}, r"^files\[0\]\.num_bytes: must not be negative"),
        ({"file": {"checksum": "a" * 64}}, r"^files\[0\]\.checksum"),
        ({"file": {"rank": 2}}, r"^files\[0\]\.rank: 2 is not one of 2 ranks"),
        ({"file": {"rank": 1}}, "not in the directory of the files that rank 1 reads"),
        (
            {"file": {"path": "rank-00000-of-00002/a", "rank": 1}},
            "not in the directory of the files that rank 1 reads",
        ),
        (
            {"file": {"path": "rank-00000-of-00004/a", "rank": 0}},
            "not in the directory of the files that rank 0 reads",
        ),
        (
            {"file": {"path": "rank-00000-of-00002/a"}},
            "not in the directory of the files that every rank reads",
        ),
        ({"file": {"path": "plan.json"}}, r"plan\.json is not listed"),
    ],
)
def test_malformed_manifests(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        manifest.loads(_overridden(**changes))


def test_files_are_sorted_and_unique() -> None:
    good = json.loads(_overridden())
    for second in ("config.json", "a.json"):
        document = good | {"files": [*good["files"], good["files"][0] | {"path": second}]}
        with pytest.raises(CheckpointError, match="sorted by path, each path once"):
            manifest.loads(json.dumps(document))


TENSOR = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "only 0 bytes"),
        (b"1234567", "only 7 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "header would have"),
        (struct.pack("<Q", 0), "header would have 0 bytes"),
        (struct.pack("<Q", 100) + b"{}", "header has 100 bytes, the file 10"),
        (safetensors_bytes(b"[]"), "not a JSON object"),
        (safetensors_bytes(b"  {}"), "not a JSON object"),
        (safetensors_bytes(b"{\xff"), "not UTF-8"),
        (safetensors_bytes(b"{..."), "not JSON"),
        (safetensors_bytes(b'{"a": 1, "a": 2}'), "is twice in one object"),
        (safetensors_bytes(b'{"a":' * 50_000), "nested too deeply"),
        (safetensors_bytes({"w": TENSOR}, b"x" * 11), "tensors have 12 bytes, the file holds 11"),
        (safetensors_bytes({"w": TENSOR}, b"x" * 13), "tensors have 12 bytes, the file holds 13"),
        (safetensors_bytes({}, b"x"), "tensors have 0 bytes, the file holds 1"),
        (safetensors_bytes({"w": TENSOR | {"dtype": "X9"}}), r"w\.dtype: unknown dtype 'X9'"),
        (safetensors_bytes({"w": TENSOR | {"shape": [2, 4]}}), "not the 16 bytes of BF16"),
        (safetensors_bytes({"w": TENSOR | {"shape": [-2, -3]}}), "extent is negative"),
        (safetensors_bytes({"w": TENSOR | {"shape": "2"}}), r"w\.shape: expected a list"),
        (safetensors_bytes({"w": TENSOR | {"data_offsets": [0]}}), r"w\.data_offsets: expected a list of 2"),
        (safetensors_bytes({"w": TENSOR | {"data_offsets": [-12, 0]}}), "w.data_offsets"),
        (safetensors_bytes({"w": TENSOR | {"more": 1}}), "unknown key"),
        (safetensors_bytes({"w": 3}), "w: expected an object"),
        (
            safetensors_bytes({"w": TENSOR | {"data_offsets": [1, 13]}}, b"x" * 13),
            "begin at 1 and should begin at 0",
        ),
        (safetensors_bytes({"v": TENSOR, "w": TENSOR}, b"x" * 12), "begin at 0 and should begin at 12"),
        (safetensors_bytes({"__metadata__": {"a": 1}}), r"__metadata__\.a: expected a string"),
    ],
)
def test_broken_safetensors_files(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_header_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "nowhere")


def test_header_that_the_library_wrote(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    path = tmp_path / "x.safetensors"
    arrays = {"b": numpy.zeros((3, 0)), "a": numpy.ones((2, 5), "int8"), "s": numpy.array(1, "float32")}
    save_file(arrays, path, metadata={"k": "v"})
    metadata, tensors = read_header(path)
    assert metadata == {"k": "v"}
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
        "a": ("I8", (2, 5)),
        "b": ("F64", (3, 0)),
        "s": ("F32", ()),
    }
    assert max(t.offsets[1] for t in tensors.values()) == 14


@settings(max_examples=100, deadline=None)
@given(
    cut=st.integers(0, 200), flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=3)
)
def test_damage_is_a_checkpoint_error_or_a_header(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flips: list[tuple[int, int]]
) -> None:
    data = bytearray(shard(0)[: -cut or None])
    for at, mask in flips:
        if data:
            data[at % len(data)] ^= mask
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(data)
    if cut:
        with pytest.raises(CheckpointError):
            read_header(path)
    else:
        try:
            read_header(path)
        except CheckpointError:
            return


@pytest.mark.parametrize(("sizes", "problem"), [({}, "is missing"), ({"a/x": 3}, "has 3 bytes")])
def test_files_that_were_listed_with_other_sizes(sizes: dict[str, int], problem: str) -> None:
    entries = [manifest.FileEntry("a/x", 4, "sha256:" + "0" * 64)]
    manifest.check_listed_sizes("there: ", {"a/x": 4}, entries, "copy it again")
    with pytest.raises(
        CheckpointError, match=f"^there: a/x {problem} and should have 4 bytes; copy it again$"
    ):
        manifest.check_listed_sizes("there: ", sizes, entries, "copy it again")
