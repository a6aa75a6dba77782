"""The measured processes of ``convert.py``; each prints one line of JSON.

python measured.py convert ARGUMENTS     of ``shardconv convert``
python measured.py naive MODEL OUT TP    slice with safe_open, save with save_file, rank by rank
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk import resident_share
from synthetic import sharded_dim

from shardconv.reporting import progress
from shardconv.reporting.progress import Advance, Silent

WRITE_BAR = "writing"
"""Label of the bar with which the converter's write phase begins."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Begun where the measured part of this process begins; memory in bytes."""

    start: float
    rss: int
    peak_before: int
    children_before: int
    peak_was_reset: bool

    @classmethod
    def begin(cls) -> Phase:
        """Time and memory now; the peak of the memory starts again from here."""
        peak, children = _max_rss(resource.RUSAGE_SELF), _max_rss(resource.RUSAGE_CHILDREN)
        was_reset = _reset_peak()
        return cls(time.perf_counter(), status_bytes("VmRSS"), peak, children, was_reset)

    def end(self) -> dict[str, Any]:
        """Seconds and memory since ``begin``; where the peak could not be reset it is that of the process."""
        seconds = time.perf_counter() - self.start
        peak = status_bytes("VmHWM")
        return {
            "phase_s": seconds,
            "rss_before": self.rss,
            "peak": peak,
            "peak_above": peak - self.rss,
            "peak_was_reset": self.peak_was_reset,
            "process_peak": max(self.peak_before, _max_rss(resource.RUSAGE_SELF)),
            "has_children": _max_rss(resource.RUSAGE_CHILDREN) > self.children_before,
        }


def _max_rss(who: int) -> int:
    return resource.getrusage(who).ru_maxrss * 1024


def status_bytes(field: str) -> int:
    """Memory of this process, as the kernel counts it: VmRSS now, VmHWM at its peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].removesuffix("kB")) * 1024


def _reset_peak() -> bool:
    """Let VmHWM start again from VmRSS, see proc_pid_clear_refs(5); False where that is not permitted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class Recorder(Silent):
    """Begins the phase when the bar of the write phase is entered; records the cached share of ``files``."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.phase: Phase | None = None
        self.cached_share = 0.0
        self.stages: list[tuple[str, float]] = []

    def stage(self, text: str) -> None:
        """Note when it began."""
        self.stages.append((text, time.perf_counter()))

    @contextmanager
    def bar(self, label: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Advance]:
        """Note when it was entered and left."""
        self.stage(label)
        if self.phase is None and label == WRITE_BAR:
            self.cached_share = resident_share(self.files)
            self.phase = Phase.begin()
        yield lambda num_bytes: None
        self.stage(f"after {label}")


def convert(arguments: list[str]) -> dict[str, Any]:
    """Run ``shardconv convert`` in this process, measured from the entry of its write bar to its end."""
    start = time.perf_counter()
    tell_cached = arguments[0] == "--cached"
    arguments = arguments[tell_cached:]
    recorder = Recorder(sorted(Path(arguments[0]).glob("*.safetensors")) if tell_cached else ())
    progress.for_terminal = lambda *, quiet: recorder
    from shardconv import cli  # only now, or it may hold the original for_terminal

    if code := cli.run(["convert", *arguments, "--quiet"]):
        sys.exit(code)
    if recorder.phase is None:
        sys.exit(f"error: the converter showed no bar {WRITE_BAR!r}: no write phase to measure")
    result = recorder.phase.end()
    marks = [("imports", start), *recorder.stages, ("", time.perf_counter())]
    stages = [(name, following[1] - at) for (name, at), following in itertools.pairwise(marks)]
    return {**result, "cached_share": recorder.cached_share, "stages": stages}


def naive(model: Path, out: Path, tp: int) -> dict[str, Any]:
    """Slice and save a checkpoint of ``synthetic.py``, all tensors of a rank in memory; without imports."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    phase = Phase.begin()
    out.mkdir()
    for rank in range(tp):
        tensors = {}
        for file in sorted(model.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118, not a mapping
                    tensors[name] = _local(opened.get_slice(name), sharded_dim(name), rank, tp)
        save_file(tensors, out / f"rank-{rank:05}-of-{tp:05}.safetensors", {"format": "pt"})
    return phase.end()


def _local(tensor: Any, dim: int | None, rank: int, tp: int) -> Any:
    """The local part of a global tensor sharded evenly over ``dim``, or replicated if that is None."""
    if dim is None:
        return tensor[:]
    size, remainder = divmod(tensor.get_shape()[dim], tp)
    assert remainder == 0, "the shapes here divide"
    own = slice(rank * size, (rank + 1) * size)
    return (tensor[own] if dim == 0 else tensor[:, own]).contiguous()  # save_file takes no others


def main() -> None:
    kind, *arguments = sys.argv[1:]
    if kind == "convert":
        result = convert(arguments)
    else:
        result = naive(Path(arguments[0]), Path(arguments[1]), int(arguments[2]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
