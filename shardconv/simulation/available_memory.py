"""Measure how much memory this process may still use."""

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
"""Files with the limit and the memory in use, and the key of cached files in ``memory.stat``."""
_OUT_OF_MEMORY = re.compile("can't allocate memory|not enough memory|can't start new thread")
"""Messages of torch's allocators, and of threads that get no stack."""


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that is free or can be freed, within the limits of schedulers and containers."""
    try:  # MemAvailable includes caches that can be dropped
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *_left_in_cgroups(root)])


GARBAGE_BYTES = 2**27
"""Growth of this process's peak memory before garbage is collected again."""


def collect_garbage() -> None:
    """Collect garbage, if the peak memory of this process has grown.

    Solving runs without the garbage collector. A collection visits every object of all simulated ranks to
    find a few dozen, and took most of a proof's time when it followed each run. Objects frozen with
    ``gc.freeze`` are not visited.
    """
    if most_bytes() >= _Searched.at_bytes + GARBAGE_BYTES:
        gc.collect()
        return_freed_memory()
        _Searched.at_bytes = most_bytes()


class _Searched:
    at_bytes = 0
    """Peak memory at the last collection."""


def most_bytes() -> int:
    """Return the peak memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def return_freed_memory() -> None:
    """Return memory of freed tensors, which the C library keeps, to the system.

    Threads of simulated ranks leave a lot of it, since glibc has an arena for each thread.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # not glibc


def require_memory(error: Exception) -> None:
    """Raise a ``MemoryError`` if an error says that memory ran out, which is not the model's fault."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _OUT_OF_MEMORY.search(str(error)):
        raise MemoryError(str(error)) from error


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yield the memory left in each control group of this process that has a limit.

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
            limit, usage, cached = _CGROUP_1 if controllers else _CGROUP_2
            try:
                allowed = int((directory / limit).read_text())
                used = int((directory / usage).read_text())
                stats = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
                yield max(0, allowed - used + int(stats[cached]))
            except (OSError, ValueError, KeyError):
                pass  # no limit ("max"), or not readable
            if directory == top:
                break


# Ranks share equal activations that they keep for the backward pass.
#
# The ranks of a plan run in one process, and replicated activations have the same bits on all of them, since
# the same operators ran on the same numbers. Without sharing, a proof of gradients would hold a copy for each
# rank.


_LEAST = 1 << 12
"""Tensors with fewer elements are not compared."""


class _Kept:
    """A tensor that some ranks need, and its version when it was saved."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # the tensor itself would refer to the graph that refers to this
        self.version = tensor._version

    def unpacked(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a tensor that is needed for gradients was modified by an inplace operation")
        return self.tensor


class SharedActivations:
    """The activations that the ranks of one run keep. Ranks run in turns, and save tensors in the same
    order."""

    def __init__(self) -> None:
        self._kept: dict[int, weakref.WeakSet[_Kept]] = {}
        """Index of a tensor in the order of a rank -> tensors that ranks keep with this index."""

    @contextmanager
    def of_a_rank(self) -> Iterator[None]:
        """Share activations in the forward pass of one rank, in its thread."""
        count = 0

        def pack(tensor: Tensor) -> _Kept:
            nonlocal count
            count += 1
            if tensor.numel() < _LEAST or tensor.is_leaf:
                return _Kept(tensor)
            alike = self._kept.setdefault(count, weakref.WeakSet())
            for other in alike:
                if _is_equal(tensor, other):
                    return other
            activation = _Kept(tensor)
            alike.add(activation)
            return activation

        with saved_tensors_hooks(pack, _Kept.unpacked):
            yield


def _is_equal(tensor: Tensor, kept: _Kept) -> bool:
    other = kept.tensor
    if (tensor.shape, tensor.dtype, tensor.stride()) != (other.shape, other.dtype, other.stride()):
        return False
    return other._version == kept.version and torch.equal(tensor, other)
