"""Files on the disk and in the page cache, for ``convert.py``."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def sync_files(directory: Path) -> float:
    """Seconds until every file below is on the disk; next to nothing for a tool that saw to that itself."""
    start = time.perf_counter()
    for path in (*files_of(directory), directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


def weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.safetensors"))


def read_all(files: Iterable[Path]) -> None:
    """Bring files into the page cache."""
    block = bytearray(1 << 23)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def evict(files: Iterable[Path]) -> None:
    """Ask the kernel to drop files, all of whose pages are on disk, from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(files: Sequence[Path]) -> float:
    """The part of the files' pages that is in the page cache, by mincore(2); of no files, 0."""
    counts = [_resident_pages(path) for path in files]
    return sum(resident for resident, _ in counts) / max(1, sum(total for _, total in counts))


def _resident_pages(path: Path) -> tuple[int, int]:
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        anchor = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), pages)
        del anchor  # or the map cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return bytes(pages).count(1), len(pages)


def require_room(directory: Path, num_bytes: float) -> None:
    """Raises ``SystemExit`` unless the disk has so much room."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise SystemExit(
            f"error: {num_bytes / 1e9:.1f} GB needed in {directory}, {free / 1e9:.1f} GB free; "
            "ask for less, or give a --directory on another disk"
        )


def machine(directory: Path) -> str:
    """What the numbers depend on."""

    def output(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]

    file_system = output("stat", "-f", "-c", "%T", str(directory))
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores, file system {file_system}, Linux {os.uname().release}, {output('cp', '--version')}"
    )
