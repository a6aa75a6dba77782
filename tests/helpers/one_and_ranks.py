"""Some uses of a model, by one process that has all of it and by ranks that have parts: what each gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime import ShardconvError
from torch import Tensor

Use = Callable[[Any], Tensor]
"""What is done with a model, and what it gives; importable."""


@dataclass(frozen=True)
class Outcome:
    """Of one use in one process."""

    value: Tensor | None
    error: str = ""
    is_ours: bool = False


def outcome(use: Use, load: Callable[[], Any]) -> Outcome:
    """Use a model that is loaded for it alone."""
    torch.manual_seed(0)
    try:
        return Outcome(use(load()).detach())
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}", isinstance(error, ShardconvError))


def of_one(path: Path, uses: Sequence[Use], *, training: bool = False, dtype: Any = None) -> list[Outcome]:
    """The outcomes of the unsharded model."""
    found: list[Outcome] = run_processes(1, _of_one, path, tuple(uses), training, dtype or torch.float64)[0]
    return found


def _of_one(path: Path, uses: tuple[Use, ...], training: bool, dtype: Any) -> list[Outcome]:
    def load() -> Any:
        kind = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
        return kind.from_pretrained(path, dtype=dtype).train(training)

    return [outcome(use, load) for use in uses]


def of_ranks(out: Path, uses: Sequence[Use], num_ranks: int = 2, **options: Any) -> list[list[Outcome]]:
    """For each use its outcomes by rank; ``options`` are those of ``load``."""
    ranks = run_processes(
        num_ranks, _of_rank, out, tuple(uses), {"dtype": torch.float64, "timeout_s": 30} | options
    )
    return list(map(list, zip(*ranks, strict=True)))


def _of_rank(out: Path, uses: tuple[Use, ...], options: dict[str, Any]) -> list[Outcome]:
    def load() -> Any:
        return shardconv_runtime.load(out, **options).train(bool(options.get("training")))

    return [outcome(use, load) for use in uses]


def require_same(
    uses: Sequence[Use], one: Sequence[Outcome], ranks: Sequence[Sequence[Outcome]], tolerance: float = 1e-9
) -> None:
    """Each rank has the value of one process; where that has an error, each rank has one of ours."""
    for use, want, found in zip(uses, one, ranks, strict=True):
        for rank, got in enumerate(found):
            where = f"{use.__name__}, rank {rank}: {got}, one process: {want}"
            if want.value is None:
                assert got.is_ours, where
            else:
                assert got.value is not None, where
                assert got.value.shape == want.value.shape, where
                difference = (got.value.double() - want.value.double()).abs().max()
                scale = max(1.0, float(want.value.abs().max()))
                assert difference <= tolerance * scale, f"{use.__name__}, rank {rank}: {float(difference)}"


def require_refused(uses: Sequence[Use], ranks: Sequence[Sequence[Outcome]], words: str) -> None:
    """Each rank has an error of ours, with these words in it."""
    for use, found in zip(uses, ranks, strict=True):
        for rank, got in enumerate(found):
            assert got.is_ours, f"{use.__name__}, rank {rank}: {got}"
            assert words in got.error, f"{use.__name__}, rank {rank}"
