"""Values for options of ``load``, ``parallelize``, ``convert`` and ``plan`` that belong together.

They import no library, so that a script can make them before it needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ExampleInputs = str | os.PathLike[str] | Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
"""A call of a model: its keyword arguments, a function that returns them for a config, or a file of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained.

    Attributes:
        regather: keep, with sequence parallelism, only this rank's part of gathered activations, and gather
            them again in the backward pass. By default this applies to activations of 1 MiB and more.
        stages_per_process: number of pipeline stages that each process trains, for interleaved schedules of
            ``shardconv_runtime.Pipeline``.
    """

    regather: bool | None = None
    stages_per_process: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """How a model is compiled.

    Attributes:
        warm_up: sizes ``(batch, length in tokens)`` for which decoding is compiled and recorded before
            ``load`` returns, the largest first.
    """

    warm_up: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """How the ranks talk to each other.

    Attributes:
        timeout_s: how long a rank waits for the others in a collective, if ``load`` starts the process
            group; by default torch's timeout (10 minutes for nccl, 30 for gloo). With gloo it then raises
            an error; with nccl, torch's watchdog ends the process. It is also the time that a rank waits
            for ranks that do not call ``generate`` (by default 5 minutes).
        all_reduce: a function that sums a contiguous tensor over the process group of a name, in place of
            torch's. It must not write to its argument. For a compiled model, Dynamo must be able to trace
            it. ``"symmetric"`` sums small tensors in symmetric memory.
        check_inputs: compare the inputs of every call between the ranks, as with
            ``SHARDCONV_CHECK_INPUTS=1``. By default the calls 1, 2, 4, 8 ... are compared.
    """

    timeout_s: float | None = None
    all_reduce: Callable[..., Any] | str | None = None
    check_inputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How a model that was not converted is planned when it is loaded; ``shardconv plan`` shows the plan.

    Attributes:
        experts: how mixture-of-experts layers are sharded: ``"tp"`` shards each expert, ``"ep"`` gives
            complete experts to each rank.
        pp: number of pipeline stages. Each is sharded over the number of processes divided by it.
        stages: first and last layer of each stage, for example ``"0-39,40-79"``; by default bytes and work
            are balanced.
        check: simulate the ranks in float64 and compare them with the unsharded model, as ``convert`` does.
        example_inputs: a call of the model to trace: its keyword arguments, a function that returns them
            for a config, or a file as for ``shardconv convert --example-inputs``.
    """

    experts: str = "tp"
    pp: int = 1
    stages: str = ""
    check: bool = False
    example_inputs: ExampleInputs | None = None
