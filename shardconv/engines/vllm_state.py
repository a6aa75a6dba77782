"""Gets the state of each rank of vLLM's model as lazy tensors, from a process that records its loader."""

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

from shardconv_runtime.errors import SourceError
from shardconv_runtime.tensors.lazy_tensor import LazyTensor

from . import vllm_recorder
from .vllm_protocol import FAILURE, LOG, REQUEST, Answer, Declared, Failure, Request, answer_name, last_line

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
            name: the name of the model, for messages.
            directory: the directory with the model's config.
            tensors: the global tensors of the checkpoint, by its names.
            tp: number of ranks.
            ranks: the ranks whose loading is recorded; None: all.
            dtype: the dtype of the parameters; None: vLLM chooses it.
            trust_remote_code: let vLLM import the Python code in ``directory``.

        Raises:
            SourceError: if vLLM cannot load the model, or writes something that cannot be recorded.
        """
        own = tuple(range(tp)) if ranks is None else tuple(sorted(ranks))
        request = Request(directory, tensors, tp, own, dtype or "auto", trust_remote_code)
        answers = self._answers(name, request)
        found = {rank: recorded for rank, each in enumerate(answers) if (recorded := each.recorded)}
        for rank, recorded in found.items():
            if recorded.refused:
                texts = [f"{parameter}: {reason}" for parameter, reason in recorded.refused.items()]
                more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
                raise SourceError(
                    f"writes of vLLM to parameters of {name} cannot be recorded (rank {rank}): "
                    f"{'; '.join(texts[:SHOWN])}{more}; save the state from vLLM itself"
                )
            if len(found) < tp and not recorded.is_as_declared:
                raise SourceError(
                    f"vLLM changes which parameters {name} has while it loads, so a part of the ranks cannot "
                    "know the parameters of the others; write all ranks in one run, without --ranks"
                )
        first = answers[0]
        return EngineState(
            tuple(answer.declared for answer in answers),
            {rank: recorded.tensors for rank, recorded in found.items()},
            first.dtype,
            first.platform,
            first.model_class,
        )

    def _answers(self, name: str, request: Request) -> list[Answer]:
        (self.folder / REQUEST).write_bytes(_pickled(name, request))
        with suppress(BrokenPipeError):  # it has died
            self.process.communicate(b"record\n")
        ended = self.process.wait()
        if isinstance(failure := self._read(FAILURE), Failure):
            raise SourceError(f"vLLM cannot load {name}: {failure.reason}")
        answers = []
        for rank in range(request.tp):
            found: Answer | Failure | None = self._read(answer_name(rank))
            where = f"vLLM cannot load {name} on rank {rank} of {request.tp}"
            if found is None:
                raise SourceError(f"{where}: its process ended with {ended}: {last_line(self.folder / LOG)}")
            if isinstance(found, Failure):
                raise SourceError(f"{where}: {found.reason}")
            answers.append(found)
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
                [sys.executable, "-m", vllm_recorder.__name__, folder],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | vllm_recorder.SETTINGS | {"PYTHONPATH": paths},
                start_new_session=True,  # one group with its forks
            )
        try:
            yield StateRecorder(process, Path(folder))
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _pickled(name: str, request: Request) -> bytes:
    try:
        return pickle.dumps(request)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise SourceError(
            f"{name} holds tensors that only this process can compute, as of a PyTorch file older than torch "
            "1.6; save it as safetensors"
        ) from error
