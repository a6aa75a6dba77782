#!/usr/bin/env python3
"""Which calls of a model reach code that no proof of its plan has run.

Of each type, the lines of the model's own file are recorded that run inside of ``forward`` while it is
converted: by its traces, and by the models of the proof. Then the unsharded model is called in every way of
the sweep of calls (``tests/zoo/calls.py``). A check of lines would refuse a call that reaches others.

    python benchmarks/unseen_lines.py [--only llama,t5] [--results FILE]
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests")]

Lines = set[tuple[str, int]]


class Recorder:
    """Records the lines of some files that run inside of a ``forward`` of theirs."""

    def __init__(self, files: set[str]) -> None:
        self.files = files
        self.lines: Lines = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        threading.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)  # type: ignore[arg-type]

    def _called(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in self.files or not self._is_inside(frame):
            return None
        return self._line

    def _line(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def _is_inside(self, frame: types.FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "forward" and frame.f_code.co_filename in self.files:
                return True
            frame = frame.f_back
        return False


def own_files(model: Any) -> set[str]:
    """The files of the model's classes: those of its own package, not of torch or of what models share."""
    return {file for m in model.modules() if "/models/" in (file := inspect.getsourcefile(type(m)) or "")}


def measure(family: str, model_type: str) -> dict[str, Any]:
    """The forms of a type, and the lines that each reaches beside those that were seen."""
    import torch
    from made_inputs import make_inputs
    from zoo.calls import FORMS, NotApplicable, make_given
    from zoo.calls_run import _call, _prepared
    from zoo.saved import save_random

    import shardconv

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        model = save_random(family, model_type, path / "in", torch.float32)
        seen = Recorder(own_files(model))
        begun = time.perf_counter()
        with seen.recording():
            shardconv.convert(path / "in", path / "out", tp=2)
        seconds = time.perf_counter() - begun
    made = make_inputs(model, seed=7).to(torch.float64)
    unsharded = _prepared(model, torch.float64)
    with torch.no_grad():
        given = make_given(unsharded, made.tensors, made.options)
    row: dict[str, Any] = {"family": family, "type": model_type, "seconds": seconds, "seen": len(seen.lines)}
    forms = row["forms"] = {}
    for form in FORMS:
        found = Recorder(seen.files)
        try:
            with found.recording():
                _call(unsharded, given, form, False)
        except NotApplicable:
            continue
        except Exception as error:
            forms[form] = f"{type(error).__name__}"
            continue
        new = sorted({(Path(file).name, line) for file, line in found.lines - seen.lines})
        forms[form] = [f"{file}:{line}" for file, line in new]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "unseen_lines.jsonl")
    options = parser.parse_args()
    from forked import Forked
    from zoo.calls_page import FAMILIES
    from zoo.models import types as types_of

    wanted = set(filter(None, options.only.split(",")))
    options.results.parent.mkdir(parents=True, exist_ok=True)

    def one(family: str, name: str) -> None:
        row = measure(family, name)
        with options.results.open("a") as file:
            file.write(json.dumps(row) + "\n")

    for family in FAMILIES:
        for name in types_of(family):
            if not wanted or name in wanted:
                Forked(one, family, name).communicate(600)
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for row in map(json.loads, options.results.read_text().splitlines()):
        for form, new in row["forms"].items():
            if isinstance(new, list):
                totals[form] += 1
                counts[form] += bool(new)
    for form, total in totals.items():
        print(f"{form:24} {total:4} calls, {counts[form]:4} reach unseen lines")


if __name__ == "__main__":
    main()
