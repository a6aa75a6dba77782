"""The messages between the program that exports for vLLM and its process that records vLLM's loader.

They are pickled into files of one folder. This module does not import torch, since both programs import it
before they do anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardconv_runtime.tensors.lazy_tensor import LazyTensor, Shape

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
