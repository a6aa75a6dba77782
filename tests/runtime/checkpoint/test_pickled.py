"""PyTorch files: the bytes of each tensor are found without reading them, or torch reads them."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lazy_cases import DTYPES, Draw, random_tensor, same, shapes
from safetensors.torch import load_file
from shardconv_runtime.checkpoint import pickled_files
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, FileLeaf
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.checkpoint.stored_leaves import lazy_tensors, stored_dtype
from shardconv_runtime.errors import SourceError
from small_models import save_random, small_config
from torch import Tensor

import shardconv

FORMATS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])

slow_to_draw = settings(
    max_examples=75,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def save(file: Path, tensors: Any, is_zip: bool = True) -> Path:
    """Save in one of the formats."""
    torch.save(tensors, file, _use_new_zipfile_serialization=is_zip)
    return file


def check(file: Path, tensors: dict[str, Tensor]) -> None:
    """The file gives these tensors, to the bit."""
    found = lazy_tensors([file])
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert same(read_tensor(found[name]), tensor.detach().resolve_conj().resolve_neg().contiguous()), name


def is_read_in_place(file: Path) -> set[str]:
    """The tensors that are read where they are."""
    return {
        name
        for name, tensor in lazy_tensors([file]).items()
        if all(isinstance(piece.leaf, FileLeaf) for piece in tensor.pieces)
    }


@st.composite
def views(draw: Draw, storage: Tensor) -> Tensor:
    """Any strided view of a storage, overlapping ones too."""
    shape = draw(shapes(3, 60))
    strides = [draw(st.integers(0, 12)) for _ in shape]
    last = sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    offset = draw(st.integers(0, max(storage.numel() - last - 1, 0)))
    if offset + last >= storage.numel():
        return storage[offset:]
    return storage.as_strided(shape, strides, offset)


@slow_to_draw
@given(st.data(), st.sampled_from(DTYPES), st.booleans())
def test_views_of_shared_storages(tmp_path: Path, data: st.DataObject, dtype: str, is_zip: bool) -> None:
    storages = [random_tensor(dtype, (200,), seed) for seed in range(2)]
    assume(is_zip or not dtype.startswith("float8"))  # torch does not read what it writes
    tensors = {
        str(index): data.draw(views(storages[index % 2])) for index in range(data.draw(st.integers(1, 5)))
    }
    check(save(tmp_path / "a.bin", tensors, is_zip), tensors)


BASE = torch.arange(100, dtype=torch.float32)

VIEWS: dict[str, tuple[Tensor, bool]] = {
    "whole": (BASE, True),
    "rows": (BASE.view(10, 10)[3:5], True),
    "columns": (BASE.view(10, 10)[:, 3:5], True),
    "transposed": (BASE.view(20, 5).t(), True),
    "every third": (BASE[1::3], True),
    "scalar": (BASE[7], True),
    "empty": (BASE[:0].view(0, 4), True),
    "one element of odd strides": (BASE.as_strided((1, 1), (70, 9)), True),
    "parameter": (torch.nn.Parameter(BASE.clone()), True),
    "expanded": (BASE[:1].expand(4, 5), False),
    "a window that slides": (BASE.as_strided((5, 5), (1, 1)), False),
    "dims that interleave": (BASE.as_strided((3, 2), (2, 3)), False),
    "conjugate": (torch.view_as_complex(BASE.view(50, 2)).clone().conj(), False),
    "negative": (torch.view_as_complex(BASE.view(50, 2).clone()).conj().imag, False),
}


@FORMATS
@pytest.mark.parametrize("case", VIEWS)
def test_views(tmp_path: Path, case: str, is_zip: bool) -> None:
    tensor, in_place = VIEWS[case]
    file = save(tmp_path / "a.bin", {"x": tensor}, is_zip)
    check(file, {"x": tensor})
    if tensor.numel():
        assert bool(is_read_in_place(file)) == (in_place and is_zip)


@pytest.mark.parametrize("make", [dict, OrderedDict])
@FORMATS
def test_names_and_their_order(tmp_path: Path, make: type, is_zip: bool) -> None:
    tensors = make({name: torch.tensor([float(len(name))]) for name in ("b.x", "a", "c.10.y", "c.9.y")})
    tensors_with_metadata = tensors
    if make is OrderedDict:
        tensors_with_metadata._metadata = {"": {"version": 1}}  # as state_dict() has it
    check(save(tmp_path / "a.bin", tensors_with_metadata, is_zip), dict(tensors))


def test_an_old_file_is_read_once_and_not_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(tmp_path / "a.bin", {"x": BASE, "y": BASE + 1}, is_zip=False)
    devices: list[str] = []
    load = pickled_files.load_pickled

    def counting(file: Path, device: str) -> dict[str, Tensor]:
        devices.append(device)
        return load(file, device)

    monkeypatch.setattr(pickled_files, "load_pickled", counting)
    found = lazy_tensors([file])
    assert devices == ["meta"]
    assert torch.equal(read_tensor(found["x"]), BASE)
    assert torch.equal(read_tensor(found["y"]), BASE + 1)
    assert devices == ["meta", "cpu"]
    save(file, {"x": BASE + 5}, is_zip=False)
    assert torch.equal(read_tensor(lazy_tensors([file])["x"]), BASE + 5), "of the file as it is now"


def rewrite(file: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Change records of a zip file; other tools lay them out in another way."""
    with zipfile.ZipFile(file) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(file, "w", compression) as new:
        for name, data in records.items():
            new.writestr(name, change(name, data))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_file_that_another_tool_zipped(tmp_path: Path, compression: int) -> None:
    tensors = {"x": BASE, "y": BASE.view(10, 10).t(), "z": torch.zeros(1000)}
    file = save(tmp_path / "a.bin", tensors)
    rewrite(file, lambda name, data: data, compression)
    check(file, tensors)


def test_a_file_of_the_other_byte_order(tmp_path: Path) -> None:
    file = save(tmp_path / "a.bin", {"x": BASE})

    def swap(name: str, data: bytes) -> bytes:
        if name.endswith("/byteorder"):
            return b"big"
        if "/data/" in name:
            return b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4))
        return data

    rewrite(file, swap)
    assert torch.equal(torch.load(file)["x"], BASE)
    for read in (lazy_tensors, lambda files: stored_dtype(files[0])):
        with pytest.raises(SourceError, match="of another byte order; load it with torch, then save it"):
            read([file])


def test_a_record_that_is_too_short(tmp_path: Path) -> None:
    """A pickle that says more than there is would read what belongs to others."""
    file = save(tmp_path / "a.bin", {"x": BASE, "y": BASE + 1})
    data = file.read_bytes()
    assert data.count(b"K\x64") >= 2, "100, as the pickle has it"
    file.write_bytes(data.replace(b"K\x64", b"K\x65"))
    with pytest.raises(SourceError, match=r"a\.bin: x needs more than the 400 bytes stored for it"):
        lazy_tensors([file])


class Stranger:
    """An object that is no tensor."""


class Attack:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch attacked",)


@FORMATS
@pytest.mark.parametrize("make", [Attack, Stranger])
def test_what_might_run_code_is_not_loaded(
    tmp_path: Path, make: type, is_zip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a.bin", {"x": BASE, "y": make()}, is_zip)
    with pytest.raises(SourceError, match=r"a\.bin holds \S+\.\w+, which might run code") as caught:
        lazy_tensors([tmp_path / "a.bin"])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "attacked").exists()
    torch.load(tmp_path / "a.bin", weights_only=False)
    assert (tmp_path / "attacked").exists() == (make is Attack), "it would have run"


def test_code_beside_a_model_is_not_run(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors: dict[str, Any] = load_file(llama_dir / "model.safetensors")
    save(llama_dir / "pytorch_model.bin", {**tensors, "y": Attack()})
    (llama_dir / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="might run code"):
        shardconv.convert(llama_dir, tmp_path / "out", 2, check=False)
    assert not (tmp_path / "attacked").exists()
    assert not (tmp_path / "out").exists()


@FORMATS
@pytest.mark.parametrize("held", [[BASE], {"x": 5}, {"model": {"x": BASE}}, {5: BASE}, BASE, None])
def test_other_contents_are_refused(tmp_path: Path, held: Any, is_zip: bool) -> None:
    with pytest.raises(SourceError, match="does not hold a dict of tensors; name a file of weights"):
        lazy_tensors([save(tmp_path / "a.bin", held, is_zip)])


def test_sparse_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"x is torch\.sparse_coo of dtype float32, which is not supported"):
        lazy_tensors([save(tmp_path / "a.bin", {"x": BASE.to_sparse()})])


@pytest.mark.parametrize("data", [b"", b"garbage", b"PK\x03\x04" + bytes(100), pickle.dumps({"x": 5}, 2)])
def test_files_that_are_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.bin cannot be read by torch\.load .*; download") as caught:
        lazy_tensors([tmp_path / "a.bin"])
    assert "\n" not in str(caught.value)


@FORMATS
def test_every_cut_is_an_error_or_harmless(tmp_path: Path, is_zip: bool) -> None:
    """Never other values."""
    file = save(tmp_path / "a.bin", {"x": BASE}, is_zip)
    data = file.read_bytes()
    for length in range(0, len(data), 37):
        file.write_bytes(data[:length])
        with pytest.raises(SourceError):
            check(file, {"x": BASE})


@FORMATS
def test_a_sharded_model_converts_as_its_safetensors(tmp_path: Path, is_zip: bool, hand_solver: None) -> None:
    safe, old = tmp_path / "safe", tmp_path / "old" / "safe"
    model = save_random(small_config(), transformers.LlamaForCausalLM, safe)
    model.config.save_pretrained(old)
    model.generation_config.save_pretrained(old)
    names = list(load_file(safe / "model.safetensors"))
    index = {name: f"pytorch_model-0000{1 + i % 3}-of-00003.bin" for i, name in enumerate(names)}
    for part in set(index.values()):
        held = {name: model.state_dict()[name] for name in names if index[name] == part}
        save(old / part, held, is_zip)
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert len(resolve(old).weight_files) == 3
    for path in (safe, old):
        shardconv.convert(path, path / "out", 2)
    files = sorted(p.relative_to(safe / "out") for p in (safe / "out").rglob("*.safetensors"))
    assert len(files) == 3
    for path in files:
        assert (safe / "out" / path).read_bytes() == (old / "out" / path).read_bytes()


def test_the_same_name_in_two_files_is_refused(tmp_path: Path) -> None:
    files = [save(tmp_path / name, {"x": BASE}) for name in ("a.bin", "b.bin")]
    with pytest.raises(
        SourceError, match=r"both .*a\.bin and .*b\.bin hold x; name one of them in an index of the files"
    ):
        lazy_tensors(files)


def test_a_tensor_of_an_old_file_is_computed(tmp_path: Path) -> None:
    found = lazy_tensors([save(tmp_path / "a.bin", {"x": BASE}, is_zip=False)])["x"]
    assert isinstance(found.pieces[0].leaf, ComputedLeaf)
    assert str(tmp_path / "a.bin") in found.pieces[0].leaf.name
