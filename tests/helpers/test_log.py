"""A pytest plugin: what each test took, in a file, and the name of each failed test as soon as it failed.

The file that ``SHARDCONV_TEST_LOG`` names has a row for each test: its outcome, its seconds, and the time of
processors that it and the processes it waited for took. A run that is cut by a time limit leaves the rows of
the tests that ended, and has printed the names of those that failed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LOG = os.environ.get("SHARDCONV_TEST_LOG", "")
_TIMES = "seconds, processor seconds"


def _processor_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class TestLog:
    """Registered in every process; the one that hands out the tests, or runs them alone, writes."""

    __test__ = False

    def __init__(self, config: pytest.Config) -> None:
        self.is_writer = not hasattr(config, "workerinput")
        self.plugins = config.pluginmanager
        self.started = 0.0, 0.0
        self.outcomes: dict[str, str] = {}
        self.log = Path(LOG).resolve() if LOG else None
        if self.is_writer and self.log is not None:
            self.log.parent.mkdir(exist_ok=True)
            self.log.write_text("")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.started = time.perf_counter(), _processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[Any]:
        report = yield
        if report.when == "teardown":
            wall, used = self.started
            times = time.perf_counter() - wall, _processor_s() - used
            report.user_properties.append((_TIMES, [round(value, 3) for value in times]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.is_writer:
            return
        if report.failed:
            terminal: Any = self.plugins.get_plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
        if report.failed or report.nodeid not in self.outcomes or report.when == "call":
            self.outcomes[report.nodeid] = report.outcome
        times = dict(report.user_properties).get(_TIMES)
        if times is not None and self.log is not None:
            row = {
                "test": report.nodeid,
                "outcome": self.outcomes[report.nodeid],
                "s": times[0],
                "cpu_s": times[1],
            }
            with self.log.open("a") as file:
                file.write(json.dumps(row) + "\n")
