"""Gets the state of each rank of vLLM's model as lazy tensors, from a process that records its loader.

Nothing here imports torch: the process imports this module before vLLM, and the program that exports starts
the process before it imports torch.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor, Shape
from shardconv_runtime.errors import SourceError

# The messages between the program that exports for vLLM and its process that records vLLM's loader. They are
# pickled into files of one folder.


REQUEST, FAILURE, LOG = "request", "failure", "log"


@dataclass(frozen=True, slots=True)
class Request:
    """The model to load, and the ranks to record."""

    directory: Path
    """The directory with the model's config."""
    tensors: Mapping[str, LazyTensor]
    """The checkpoint: global tensors by its names."""
    tp: int
    ranks: tuple[int, ...]
    """The ranks whose loading is recorded. The other ranks only declare their tensors."""
    dtype: str
    """The dtype of the parameters, or ``"auto"``: vLLM chooses."""
    trust_remote_code: bool


Declared = Mapping[str, tuple[str, Shape]]
"""dtype (torch's name) and local shape of tensors, by vLLM's names."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The state of a rank's model after loading, before vLLM processes it for a device."""

    tensors: Mapping[str, LazyTensor]
    """Local tensors by vLLM's names."""
    refused: Mapping[str, str]
    """Names of tensors whose content is not known, and why."""
    is_as_declared: bool
    """Whether the model had the same tensors before anything was loaded."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The tensors of vLLM's model of a rank."""

    declared: Declared
    recorded: Recorded | None
    """The state; None if it was not asked for."""
    dtype: str
    """The dtype that the parameters have by default."""
    platform: str
    """The platform for which vLLM chose its parameters."""
    model_class: str
    """The name of vLLM's class of the model, for reports."""


@dataclass(frozen=True, slots=True)
class Failure:
    """vLLM cannot load the model."""

    reason: str


def answer_name(rank: int) -> str:
    """Return the name of the file with the answer of a rank."""
    return f"answer-{rank}"


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")


SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # A pool of threads does not survive a fork; nothing large is computed.
    "OMP_NUM_THREADS": "1",
    # torch looks for GPUs without initializing CUDA, which cannot be used after a fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The environment of vLLM: it starts no process, asks no server, and plans for a small cache."""


RECORDER = f"{__package__}.vllm_recorder"
"""The program that imports vLLM; it imports this module."""

SHOWN = 3
"""How many refused parameters an error names."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """The tensors of an engine's ranks after loading, before the engine changes them for a device."""

    declared: tuple[Declared, ...]
    """dtype and local shape of tensors by the engine's names, for each rank."""
    ranks: Mapping[int, Mapping[str, LazyTensor]]
    """The tensors of the ranks that were asked for."""
    dtype: str
    platform: str
    model_class: str


@dataclass(frozen=True, slots=True)
class StateRecorder:
    """A process that imports vLLM, and then records its loader once."""

    process: subprocess.Popen[bytes]
    folder: Path

    def recorded_state(
        self,
        name: str,
        directory: Path,
        tensors: Mapping[str, LazyTensor],
        tp: int,
        *,
        ranks: Collection[int] | None = None,
        dtype: str | None = None,
        trust_remote_code: bool = False,
    ) -> EngineState:
        """Record vLLM's loader.

        Args:
            tensors: the global tensors of the checkpoint, by its names.
            dtype: the dtype of the parameters; None: vLLM chooses it.
        """
        asked_ranks = tuple(range(tp)) if ranks is None else tuple(sorted(ranks))
        request = Request(directory, tensors, tp, asked_ranks, dtype or "auto", trust_remote_code)
        answers = self._answers(name, request)
        states = {rank: recorded for rank, each in enumerate(answers) if (recorded := each.recorded)}
        for rank, recorded in states.items():
            if recorded.refused:
                texts = [f"{parameter}: {reason}" for parameter, reason in recorded.refused.items()]
                more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
                raise SourceError(
                    f"writes of vLLM to parameters of {name} cannot be recorded (rank {rank}): "
                    f"{'; '.join(texts[:SHOWN])}{more}; save the state from vLLM itself"
                )
            if len(states) < tp and not recorded.is_as_declared:
                raise SourceError(
                    f"vLLM changes which parameters {name} has while it loads, so a part of the ranks cannot "
                    "know the parameters of the others; write all ranks in one run, without --ranks"
                )
        first = answers[0]
        return EngineState(
            tuple(answer.declared for answer in answers),
            {rank: recorded.tensors for rank, recorded in states.items()},
            first.dtype,
            first.platform,
            first.model_class,
        )

    def _answers(self, name: str, request: Request) -> list[Answer]:
        try:
            pickled = pickle.dumps(request)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise SourceError(
                f"{name} holds tensors that only this process can compute, as of a PyTorch file older than "
                "torch 1.6; save it as safetensors"
            ) from error
        (self.folder / REQUEST).write_bytes(pickled)
        with suppress(BrokenPipeError):  # it has died
            self.process.communicate(b"record\n")
        ended = self.process.wait()
        if isinstance(failure := self._read(FAILURE), Failure):
            raise SourceError(f"vLLM cannot load {name}: {failure.reason}")
        answers = []
        for rank in range(request.tp):
            answer: Answer | Failure | None = self._read(answer_name(rank))
            where = f"vLLM cannot load {name} on rank {rank} of {request.tp}"
            if answer is None:
                raise SourceError(f"{where}: its process ended with {ended}: {last_line(self.folder / LOG)}")
            if isinstance(answer, Failure):
                raise SourceError(f"{where}: {answer.reason}")
            answers.append(answer)
        return answers

    def _read(self, name: str) -> Any:
        path = self.folder / name
        return pickle.loads(path.read_bytes()) if path.is_file() else None


@contextmanager
def started() -> Iterator[StateRecorder]:
    """Start a process that imports vLLM from now on; at the end it is killed if it still runs."""
    with TemporaryDirectory(prefix="shardconv-") as folder:
        paths = os.pathsep.join(path for path in sys.path if path)
        with (Path(folder) / LOG).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", RECORDER, folder],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | SETTINGS | {"PYTHONPATH": paths},
                start_new_session=True,  # one group with its forks
            )
        try:
            yield StateRecorder(process, Path(folder))
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
