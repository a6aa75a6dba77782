"""The state of each rank of vLLM's model as lazy tensors: a process for each rank records its loader."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from shardconv_runtime.errors import SourceError
from shardconv_runtime.tensors.lazy_tensor import LazyTensor

from . import vllm_rank
from .vllm_rank import Answer, Failure, Request

SHOWN = 3
"""How many refused parameters an error names."""

MAX_PROCESSES = 4
"""At a time; each takes about a gigabyte."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the ranks of an engine hold after loading, before it changes them for a device."""

    ranks: tuple[Mapping[str, LazyTensor], ...]
    """For each rank, local tensors by the engine's names."""
    dtype: str
    platform: str
    model_class: str


def recorded_state(
    name: str,
    directory: Path,
    tensors: Mapping[str, LazyTensor],
    tp: int,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> EngineState:
    """Record vLLM's loader for all ranks.

    Args:
        name: of the model, for messages.
        directory: with its config.
        tensors: of the checkpoint: global, by its names.
        tp: number of ranks.
        dtype: of the parameters; None: as vLLM chooses.
        trust_remote_code: let vLLM import the Python code in ``directory``.

    Raises:
        SourceError: vLLM cannot load the model, or writes something that cannot be recorded.
    """

    def of_rank(rank: int) -> Answer:
        request = Request(directory, tensors, rank, tp, dtype or "auto", trust_remote_code)
        return _answer(name, request)

    with ThreadPoolExecutor(min(tp, MAX_PROCESSES, len(os.sched_getaffinity(0)))) as pool:
        answers = list(pool.map(of_rank, range(tp)))
    for rank, answer in enumerate(answers):
        if answer.refused:
            texts = [f"{parameter}: {reason}" for parameter, reason in answer.refused.items()]
            more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
            raise SourceError(
                f"what vLLM writes to parameters of {name} cannot be recorded (rank {rank}): "
                f"{'; '.join(texts[:SHOWN])}{more}; save the state from vLLM itself"
            )
    first = answers[0]
    return EngineState(
        tuple(answer.tensors for answer in answers), first.dtype, first.platform, first.model_class
    )


def _answer(name: str, request: Request) -> Answer:
    """What the process of a rank answers."""
    with TemporaryDirectory(prefix="shardconv-") as folder:
        asked, answered, log = (Path(folder) / part for part in ("request", "answer", "log"))
        asked.write_bytes(_pickled(name, request))
        command = [sys.executable, "-m", vllm_rank.__name__, str(asked), str(answered)]
        with log.open("wb") as output:
            paths = os.pathsep.join(path for path in sys.path if path)
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | vllm_rank.SETTINGS | {"PYTHONPATH": paths},
            )
        where = f"vLLM cannot load {name} on rank {request.rank} of {request.tp}"
        if not answered.is_file():
            last = log.read_text(errors="replace").split("\n")
            raise SourceError(f"{where}: its process ended with {ended.returncode}: {_last(last)}")
        found: Answer | Failure = pickle.loads(answered.read_bytes())
    if isinstance(found, Failure):
        raise SourceError(f"{where}: {found.reason}")
    return found


def _pickled(name: str, request: Request) -> bytes:
    try:
        return pickle.dumps(request)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise SourceError(
            f"{name} holds tensors that only this process can compute, as of a PyTorch file older than torch "
            "1.6; save it as safetensors"
        ) from error


def _last(lines: Sequence[str]) -> str:
    """The last line that says something."""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")
