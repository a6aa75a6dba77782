"""How xdist hands out the tests: files, those that take longest first, so that none is left for the end.

The seconds of processor time that a file takes were measured (``tests/seconds.json``); one that is not there
counts by its number of tests. Tests of the files in ``SPLIT`` share nothing that takes long to make, and are
handed out one by one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

SECONDS = Path(__file__).resolve().parents[1] / "seconds.json"
SECONDS_PER_TEST = 0.2
LEAST_S = 1.5
"""Files that take less are not listed."""
SPLIT = ("tests/zoo/test_planned.py",)


def seconds() -> dict[str, float]:
    """Of files that take long, as they were recorded."""
    found: dict[str, float] = json.loads(SECONDS.read_text())
    return found


class LongestFirst(LoadFileScheduling):
    """See above."""

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        self._seconds = seconds()

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if file in SPLIT else file

    def _assign_work_unit(self, node: Any) -> None:
        longest = max(self.workqueue, key=self._expected_s)
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)

    def _expected_s(self, scope: str) -> float:
        return self._seconds.get(scope, SECONDS_PER_TEST * len(self.workqueue[scope]))


def record(rows: list[dict[str, Any]]) -> None:
    """Write what the files of a run took."""
    found: dict[str, float] = {}
    for row in rows:
        file = row["test"].partition("::")[0]
        found[file] = found.get(file, 0.0) + row["cpu_s"]
    lines = [f"  {json.dumps(file)}: {s:.0f}" for file, s in sorted(found.items()) if s >= LEAST_S]
    SECONDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
