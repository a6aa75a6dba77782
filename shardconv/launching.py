"""Start the ranks of a model on this machine, with torch's own launcher.

A cluster starts them with ``torchrun -m shardconv_runtime.serve`` itself. This is for one machine and one
person at a terminal: only rank 0 prints, Control-C ends all ranks, and an error is one line.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from shardconv_runtime.comm.launchers import REPORTS, RankReport, read_reports
from shardconv_runtime.errors import LaunchError
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

LAST_LINES = 20
"""Lines that are shown of a rank that failed alone."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program of which each rank is a process."""

    module: str
    """The module that Python runs."""
    arguments: Sequence[str]
    environment: Mapping[str, str]
    """Variables to add to the environment of this process."""


def num_gpus() -> int:
    """Return the number of GPUs of this machine that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def require_gpus(num_ranks: int) -> None:
    """Raise ``LaunchError`` for fewer GPUs than ranks; without any, the ranks use the CPU."""
    if 0 < num_gpus() < num_ranks:
        raise LaunchError(
            f"there are {num_ranks} ranks for {num_gpus()} GPUs; make fewer ranks with shardconv reshard, or "
            "hide the GPUs to use the CPU: CUDA_VISIBLE_DEVICES="
        )


def launch(program: Program, num_ranks: int) -> int:
    """Run a program as ranks of one job, and wait for its end.

    Rank 0 has the terminal. The other ranks print to files. If ranks fail, one error is printed, of the
    rank that did not fail because of another; or the end of the output of a rank that wrote no error.

    Returns:
        The exit code of that rank; or 128 and the number of the signal that ended the job.
    """
    with tempfile.TemporaryDirectory(prefix="shardconv-ranks-") as logs, _interruptible() as received:
        reports = Path(logs) / "reports"
        reports.mkdir()
        # Files in the user's directory may have the names of modules, or come from somebody else.
        fixed = {REPORTS: str(reports), "PYTHONSAFEPATH": "1"}
        before = dict(os.environ)
        os.environ.update(_defaults(num_ranks) | dict(program.environment) | fixed)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(logs, redirects=dict.fromkeys(range(1, num_ranks), Std.ALL)),
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        )
        logging.disable(logging.CRITICAL)  # the launcher tells of each signal, and of each rank that ends
        try:
            elastic_launch(config, sys.executable)("-u", "-m", program.module, *program.arguments)
        except SignalException as error:
            return 128 + (received[0] if received else error.sigval)
        except ChildFailedError as error:
            return explained(error, Path(logs), read_reports(reports))
        finally:
            logging.disable(logging.NOTSET)
            os.environ.clear()
            os.environ.update(before)
    return 128 + received[0] if received else 0


def _defaults(num_ranks: int) -> dict[str, str]:
    """Return variables for ranks that share the cores and print only text and errors."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return {name: value for name, value in defaults.items() if name not in os.environ}


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """End the ranks with SIGTERM on the first Control-C, as Python would print where SIGINT came.

    Ranks are in sessions of their own and do not hear the terminal. While they end, Control-C does nothing.
    """
    received: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise SignalException("interrupted", sigval=signal.SIGTERM)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def explained(error: ChildFailedError, logs: Path, reports: Sequence[RankReport]) -> int:
    """Print why a job ended, if its ranks have not; return its exit code."""
    told = {report.rank for report in reports}
    # The launcher ends the other ranks with SIGTERM. Its times are whole seconds.
    silent = {rank: failure.exitcode for rank, failure in error.failures.items() if rank not in told}
    crashed = sorted((code, rank) for rank, code in silent.items() if code != -signal.SIGTERM)
    if reports and not (reports[0].is_consequence and crashed):
        print(reports[0].line(), file=sys.stderr)
        return reports[0].exit_code
    code, rank = crashed[0] if crashed else (1, error.get_first_failure()[0])
    if rank:  # what rank 0 printed stands on the terminal
        for path in sorted(logs.rglob(f"{rank}/stderr.log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in lines[-LAST_LINES:]:
                print(f"rank {rank}: {line}", file=sys.stderr)
    if code < 0:
        print(f"error: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return max(code, 1)
