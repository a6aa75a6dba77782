"""The replicas of a model with optional parts must run the same parts.

FSDP2 gathers the parameters of a module when it runs, with all replicas that shard it. If one replica has
an image and another has none, the first one gathers parts of a vision tower while the other gathers layers
of the text: the gathers pair up by their order, which ends the processes or hangs them. The inputs decide
which parts run, so replicas compare those before the first gather.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.agreement import exchange
from ..comm.call_agreement import CALL_TIMEOUT_S
from ..comm.mesh import Launch
from ..errors import InputsDifferError, RanksTimeoutError
from ..loaded import loaded
from ..parallel.boundary import forward_signature
from .random_streams import not_compiled

COMPARISON = "_shardconv_replicas"
"""Attribute of a model that is sharded over replicas and has optional parts: its ``ReplicaComparison``."""


def compare_replicas(model: nn.Module, all_ranks: Launch) -> None:
    """Have the replicas of a model with optional parts compare which parts a call runs, in place."""
    modalities = getattr(model, "input_modalities", "text")
    is_plain = modalities in ("text", ["text"], ("text",)) and _num_stacks(model) < 2
    if is_plain or all_ranks.control is None:
        return
    comparison = ReplicaComparison(model, all_ranks)
    vars(model)[COMPARISON] = comparison
    model.register_forward_pre_hook(comparison.before, prepend=True, with_kwargs=True)


class ReplicaComparison:
    """Compares the inputs of calls: one small message between all processes for each call."""

    def __init__(self, model: nn.Module, all_ranks: Launch) -> None:
        stage = loaded(model).stage
        self._is_scheduled = (lambda: False) if stage is None else stage.link.is_scheduled
        self._names = list(forward_signature(model).parameters)
        self._all_ranks = all_ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaComparison:
        """Return this object: a copy of a model has the same replicas."""
        return self

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the inputs; a forward pre-hook. A schedule compares all of its microbatches beforehand."""
        if not self._is_scheduled():
            self.require_same(dict(zip(self._names, args, strict=False)) | kwargs)

    @not_compiled("replicas compare their inputs")
    def require_same(self, given: Mapping[str, Any]) -> None:
        """Check that all replicas are given the same kinds of inputs."""
        start = self._all_ranks
        # Numbers, such as images, sounds and embeddings, may decide which parts of the model run.
        names = []
        for name, value in sorted(given.items()):
            has_numbers = any(x.is_floating_point() or x.dtype == torch.uint8 for x in _tensors(value))
            if "mask" not in name and has_numbers:
                names.append(name)
        number = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:7], "big")
        extremes = torch.tensor([number, -number])
        try:
            work = dist.all_reduce(extremes, dist.ReduceOp.MAX, start.control, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=start.timeout_s or CALL_TIMEOUT_S))
        except RuntimeError as failure:
            raise RanksTimeoutError(
                f"process {start.rank}: another replica did not call the model, or ended; its own "
                f"output says why ({str(failure).splitlines()[0]})"
            ) from failure
        if int(extremes[0]) == -int(extremes[1]):
            return
        calls = exchange(start, names)
        other = next(rank for rank, call in enumerate(calls) if call != calls[0])
        raise InputsDifferError(
            f"process 0 called the model with {_listed(calls[0])}, and process {other}, of another replica, "
            f"with {_listed(calls[other])}: they would run other parts of it, and wait for each other "
            "forever. Give each replica's batch the same kinds of inputs, for example a small image whose "
            "tokens have the labels -100, or none in any of them"
        )


def _num_stacks(module: nn.Module) -> int:
    """Return the number of outermost lists of modules: an encoder and a decoder have one each."""
    return sum(1 if isinstance(m, nn.ModuleList) and len(m) else _num_stacks(m) for m in module.children())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "ids alone"
