"""Converted directories and ways to spoil them, so that `verify` has something to find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shardconv_runtime.files import manifest
from shardconv_runtime.files.checksums import shard_checksum
from shardconv_runtime.files.manifest import FileEntry
from shardconv_runtime.files.shard_files import sample_checksum
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.header import TORCH_NAME, ShardFile, read_header
from shardconv_runtime.format.plan import Plan
from torch import Tensor


def shard(rank: int | None, tp: int = 2) -> str:
    """The path of the only file of a rank, or of ``common/``."""
    return manifest.shard_path(rank, tp, 0, 1)


def flip(file: Path, position: int, mask: int = 1) -> None:
    """Change one byte."""
    data = bytearray(file.read_bytes())
    data[position] ^= mask
    file.write_bytes(data)


def describe_again(out: Path, path: str) -> None:
    """Make the manifest fit a file that was changed."""
    data = (out / path).read_bytes()
    found = manifest.read(out)

    def fitting(entry: FileEntry) -> FileEntry:
        if entry.path != path:
            return entry
        checksum, sample = shard_checksum(out / path), sample_checksum(out / path)
        return dataclasses.replace(entry, num_bytes=len(data), checksum=checksum, sample=sample)

    manifest.write(dataclasses.replace(found, files=tuple(map(fitting, found.files))), out)


def change_tensors(out: Path, path: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change what a shard holds, and the manifest with it."""
    with safe_open(out / path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(change(tensors), out / path, metadata)
    describe_again(out, path)


def set_element(out: Path, path: str, name: str, index: tuple[int, ...], value: float = 7.0) -> int:
    """Change one element, and the manifest with it; the first byte of the file that is another."""
    before = (out / path).read_bytes()
    _, tensors = read_header(out / path)
    start = ShardFile(out / path, len(before), tensors).start
    begin, end = (start + offset for offset in tensors[name].offsets)
    data = torch.frombuffer(
        bytearray(before[begin:end]), dtype=getattr(torch, TORCH_NAME[tensors[name].dtype])
    )
    data.view(tensors[name].shape)[index] = value
    after = before[:begin] + data.view(torch.uint8).numpy().tobytes() + before[end:]
    (out / path).write_bytes(after)
    describe_again(out, path)
    return next(at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)


def change_plan(out: Path, change: Callable[[Plan], Plan]) -> None:
    """Change the plan, and the manifest with it."""
    digest = plan_json.write(change(plan_json.read(out / "plan.json")), out / "plan.json")
    manifest.write(dataclasses.replace(manifest.read(out), plan_sha256=digest), out)
