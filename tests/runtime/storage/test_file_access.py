"""A file on this machine and one on a network give the same answers, and other stamps once they change."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from shardconv_runtime.storage.file_access import (
    header,
    identity,
    is_local,
    known_sha256,
    name_in,
    num_bytes,
    read_bytes,
    stamp,
)
from test_file_rows import MemoryFile


def test_local_and_remote_files_give_the_same_answers(tmp_path: Path) -> None:
    local = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(6.0)}, local, {"format": "pt"})
    data = local.read_bytes()
    remote = MemoryFile(data, [])
    assert is_local(local)
    assert not is_local(remote)
    assert num_bytes(local) == num_bytes(remote) == len(data)
    assert header(local) == header(remote)
    assert header(local)[0] == {"format": "pt"}
    assert read_bytes(local) == read_bytes(remote) == data
    assert read_bytes(local, 8) == read_bytes(remote, 8) == data[:8]
    assert name_in(tmp_path, local) == name_in(tmp_path, remote) == "model.safetensors"


def test_the_cache_of_the_hub_names_a_file_by_its_hash(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("a1" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert known_sha256(link) == identity(link) == "a1" * 32
    assert known_sha256(MemoryFile(b"", [])) == ""


def test_a_file_in_the_place_of_another_has_another_stamp(tmp_path: Path) -> None:
    """Even with the size and the time of the first, which is all that ``identity`` has."""
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.write_bytes(b"1234")
        os.utime(path, ns=(0, 1_500_000_000))
    before = stamp(first)
    assert identity(first) == identity(second) == "4 bytes of 1970-01-01 00:00:01.500000000"
    second.replace(first)
    assert stamp(first) != before
