"""Launchers: their environment variables, and the programs of which each rank is a process."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import LaunchError, RanksTimeoutError, ShardconvError


def env_int(name: str, default: int) -> int:
    """Return an environment variable that is a number."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise LaunchError(f"the environment variable {name} is {text!r}; it should be a number") from error


OTHER_LAUNCHERS = {"SLURM_NTASKS": "Slurm", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""Variables with a number of processes, of launchers that torch does not read, and their names."""


def other_launcher() -> str:
    """Return the remedy if a launcher other than torchrun started several processes; empty if none did.

    It is the end of a message about the number of processes. Without RANK each process believes to be the
    only one.
    """
    if "RANK" in os.environ:
        return ""
    for name, launcher in OTHER_LAUNCHERS.items():
        if env_int(name, 1) > 1:
            return (
                f" ({launcher} started {os.environ[name]}, but RANK is not set: start torchrun with it, or "
                "export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, see docs/deploying.md)"
            )
    return ""


WATCH_S = 0.5
"""How often a rank looks whether its launcher lives."""


def end_with_launcher() -> None:
    """End this process soon after torchrun, which otherwise would tell it to end."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # started by hand: it may outlive its shell
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        print("error: the launcher of this rank is gone; it ends", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


REPORTS = "SHARDCONV_REPORTS"
"""An environment variable with a directory where the ranks write their errors; the launcher prints one."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """The error of a rank."""

    rank: int
    exit_code: int
    text: str
    is_consequence: bool
    """It may only say that another rank failed."""

    def line(self) -> str:
        """Return the error in one line; rank 0 is not named, as all ranks may have its error."""
        return " ".join(f"error: {f'rank {self.rank}: ' if self.rank else ''}{self.text}".split())


def read_reports(directory: Path) -> list[RankReport]:
    """Return the errors that ranks have written; those that explain the end of the job come first."""
    reports = [RankReport(**json.loads(path.read_text("utf-8"))) for path in directory.glob("*.json")]
    return sorted(reports, key=lambda report: (report.is_consequence, report.rank))


def run_program(work: Callable[[], object], *, quiet: bool) -> int:
    """Run a program of which each rank is a process; return its exit code, with its error told to the user.

    Args:
        work: the program.
        quiet: print only results and errors. Otherwise rank 0 also says what it does.
    """
    logging.basicConfig(format="%(message)s")
    is_silent = quiet or env_int("RANK", 0) != 0
    logging.getLogger("shardconv_runtime").setLevel(logging.ERROR if is_silent else logging.INFO)
    try:
        work()
    except ShardconvError as error:
        _report(error)
        return error.exit_code
    return 0


def _report(error: ShardconvError) -> None:
    """Print an error, or hand it over to a launcher, which prints one error of all ranks."""
    report = RankReport(
        env_int("RANK", 0), error.exit_code, str(error), type(error) in (LaunchError, RanksTimeoutError)
    )
    if REPORTS not in os.environ:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return
    path = Path(os.environ[REPORTS]) / f"{report.rank}.json"
    unfinished = path.with_suffix(".unfinished")  # the launcher may end this process at any time
    unfinished.write_text(json.dumps(asdict(report)), "utf-8")
    unfinished.rename(path)
