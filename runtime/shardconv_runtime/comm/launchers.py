"""Launchers: their environment variables, and how a rank ends with its launcher or with an error."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from ..errors import LaunchError, ShardconvError


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


REPORTED = "SHARDCONV_REPORTED"
"""An environment variable with the path of a file that rank 0 makes when it has printed its error."""


def report_error(error: ShardconvError) -> int:
    """Print the error of a program of which each rank is a process; return its exit code.

    The launcher then need not show the same error of other ranks.
    """
    print(f"error: {error}", file=sys.stderr, flush=True)
    path = os.environ.get(REPORTED)
    if path is not None and os.environ.get("RANK") == "0":
        Path(path).touch()
    return error.exit_code
