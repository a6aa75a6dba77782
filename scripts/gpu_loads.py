"""The section ``load`` of ``gpu_sections.py``: from the disk to the device, in GB/s."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
from disk import evict, read_all, resident_share
from gpu_section import TINY, Section
from synthetic import Shape

BLOCK_BYTES = 64 << 20


def load(section: Section) -> None:
    """From the disk to the device."""
    shape = TINY if section.small else Shape(4096, 14336, 32, 8, 32000, 12)
    source = section.checkpoint("large", shape, torch.bfloat16)
    converted = section.converted(source, 1)
    if not section.small:
        shutil.rmtree(source)  # frees its space on the disk and in the page cache
    section.free()
    os.sync()
    files = sorted(converted.rglob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    tiny = (
        converted if section.small else section.converted(section.checkpoint("tiny", TINY, torch.float32), 1)
    )
    shardconv_runtime.load(tiny, device=section.device)  # before the timing: imports, the device's context
    section.tell("size of the rank", num_bytes / 1e9, "GB")
    with section.attempt("pinned copy"):
        copy_s = _pinned_copy_s(section, num_bytes)
        section.tell("pinned memory to the device", num_bytes / copy_s / 1e9, "GB/s")
    with section.attempt("peak device memory of a load"):
        _peak(section, converted)
    for cache in ("cold", "warm"):
        with section.attempt(f"loading, {cache}"):
            _tell_loads(section, converted, files, num_bytes, cache)


def _peak(section: Section, converted: Path) -> None:
    """Device memory at its highest during a load, beside the bytes of the weights."""
    what = "peak device memory of a load"
    if not section.is_cuda:
        shardconv_runtime.load(converted, device=section.device)
        section.skip(what, "no CUDA")
        return
    torch.cuda.reset_peak_memory_stats(section.device)
    before = torch.cuda.memory_allocated(section.device)
    model = shardconv_runtime.load(converted, device=section.device)
    peak = torch.cuda.max_memory_allocated(section.device) - before
    own = sum(parameter.nbytes for parameter in model.parameters())
    section.tell(what, peak / 1e9, "GB", ratio=peak / own, of="the rank's bytes", ok=peak <= 1.05 * own)


def _tell_loads(section: Section, converted: Path, files: list[Path], num_bytes: int, cache: str) -> None:
    from safetensors.torch import load_file

    device = str(section.device)
    calls: dict[str, Callable[[], Any]] = {
        "read into memory": lambda: read_all(files),
        "safetensors load_file": lambda: _touched([load_file(path, device=device) for path in files]),
        "load": lambda: _touched(shardconv_runtime.load(converted, device=device)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    why = ""
    for number in range(2):
        for name in sorted(calls, reverse=number % 2 == 1):
            (evict if cache == "cold" else read_all)(files)
            why = why or _unexpected_cache(files, cache)
            seconds[name].append(section.seconds(calls[name]))
            section.free()
    plain = min(seconds["safetensors load_file"])
    for name, found in seconds.items():
        rate = num_bytes / min(found) / 1e9
        section.tell(
            f"{name}, {cache}", rate, "GB/s", ratio=min(found) / plain, of="the time of load_file", why=why
        )


def _unexpected_cache(files: list[Path], cache: str) -> str:
    """The reason why the page cache is not cold or warm as wanted; empty if it is."""
    try:
        share = resident_share(files)
    except OSError as error:
        return f"the contents of the page cache are unknown: {error.strerror}"
    is_well = share <= 0.01 if cache == "cold" else share >= 0.99
    return "" if is_well else f"{share:.0%} of the files were in the page cache"


def _touched(loaded: Any) -> None:
    """Read each page of tensors on the CPU, whose files are only mapped so far."""
    found = [loaded.parameters()] if hasattr(loaded, "parameters") else [part.values() for part in loaded]
    for tensor in (tensor for part in found for tensor in part):
        if tensor.device.type == "cpu":
            tensor.detach().view(torch.uint8).reshape(-1)[::4096].sum()


def _pinned_copy_s(section: Section, num_bytes: int) -> float:
    """Seconds of the bus alone: repeated copies of one pinned buffer."""
    size = min(BLOCK_BYTES, num_bytes)
    source = torch.empty(size, dtype=torch.uint8, pin_memory=section.is_cuda)
    target = torch.empty(size, dtype=torch.uint8, device=section.device)

    def copy() -> None:
        for _ in range(max(1, num_bytes // size)):
            target.copy_(source, non_blocking=True)

    section.seconds(copy)
    return section.seconds(copy) * num_bytes / (max(1, num_bytes // size) * size)
