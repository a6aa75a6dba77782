"""How much memory this process may still take."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_CGROUP_2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Names of the limit, of the memory in use, and, in ``memory.stat``, of its part that is cached files."""
_OUT_OF_MEMORY = re.compile("can't allocate memory|not enough memory|can't start new thread")
"""In errors of torch's allocators, and of threads that get no stack."""


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that is free or can be freed, of the machine and within the limits of schedulers and containers.

    Args:
        root: of the file system in which the kernel's files are.
    """
    return min([_of_machine(root), *_of_cgroups(root)])


GARBAGE_BYTES = 2**27
"""How much larger than ever this process becomes before garbage is searched for."""


def collect_garbage() -> None:
    """Free what only cycles refer to, if this process has become larger than it ever was.

    Solving runs without the garbage collector. A search passes each object of all simulated ranks to find
    some dozens, and took most of a proof where it followed each run. What was frozen before (``gc.freeze``)
    is not searched.
    """
    if most_bytes() >= _Searched.at_bytes + GARBAGE_BYTES:
        gc.collect()
        return_freed_memory()
        _Searched.at_bytes = most_bytes()


class _Searched:
    at_bytes = 0
    """The most memory that this process had had when garbage was last searched for."""


def most_bytes() -> int:
    """The most memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def return_freed_memory() -> None:
    """Give the system back what the C library keeps of freed tensors, where it can: ranks that were threads
    leave much of it."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library


def require_memory(error: Exception) -> None:
    """Raise a ``MemoryError`` for an error that says that memory ran out: no fault of any model.

    Args:
        error: any; others are left to the caller.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _OUT_OF_MEMORY.search(str(error)):
        raise MemoryError(str(error)) from error


def _of_machine(root: Path) -> int:
    """With caches that can be dropped, where the system tells; else free memory."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_cgroups(root: Path) -> Iterator[int]:
    """What is left in each control group that this process is in, and that has a limit.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            yield from _left(directory, *(_CGROUP_1 if controllers else _CGROUP_2))
            if directory == top:
                break


def _left(directory: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    try:
        allowed = int((directory / limit).read_text())
        used = int((directory / usage).read_text())
        stats = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        yield max(0, allowed - used + int(stats[cached]))
    except (OSError, ValueError, KeyError):
        return  # no limit ("max"), or none that can be read


# Activations that ranks keep for their backward pass: those that are the same on several are kept once.
#
# The ranks of a plan run in one process, and what is replicated on them is equal to the bit: the same
# operators ran on the same numbers. Without this, a proof of gradients would hold such activations once for
# each rank.


_LEAST = 1 << 12
"""Smaller tensors are not compared, in elements."""


class _Kept:
    """A tensor that some ranks need, and how often it had been written to."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # the tensor itself would refer to the graph that refers to this
        self.version = tensor._version

    def unpacked(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a tensor that is needed for gradients was modified by an inplace operation")
        return self.tensor


class SharedActivations:
    """What the ranks of one run keep. They run in turns, and save tensors in one order."""

    def __init__(self) -> None:
        self._kept: dict[int, weakref.WeakSet[_Kept]] = {}
        """Number of a tensor in the order of a rank -> those that ranks keep under it."""

    @contextmanager
    def of_a_rank(self) -> Iterator[None]:
        """Context of the forward pass of one rank, in its thread."""
        count = 0

        def pack(tensor: Tensor) -> _Kept:
            nonlocal count
            count += 1
            if tensor.numel() < _LEAST or tensor.is_leaf:
                return _Kept(tensor)
            others = self._kept.setdefault(count, weakref.WeakSet())
            for other in others:
                if _is_equal(tensor, other):
                    return other
            kept = _Kept(tensor)
            others.add(kept)
            return kept

        with saved_tensors_hooks(pack, _Kept.unpacked):
            yield


def _is_equal(tensor: Tensor, kept: _Kept) -> bool:
    other = kept.tensor
    if (tensor.shape, tensor.dtype, tensor.stride()) != (other.shape, other.dtype, other.stride()):
        return False
    return other._version == kept.version and torch.equal(tensor, other)
