"""The ranks of ``training.py``, started by torchrun; each writes its measurements to a JSON file.

training_rank.py unsharded SOURCE RESULTS OPTIONS    the unsharded model; its gradients are kept in RESULTS
training_rank.py ranks SOURCE RESULTS OPTIONS --converted A --gathered-logits B --variants ...
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from observing import COLLECTIVES, LiveStorages, Saved, Traffic
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

UNSHARDED = "unsharded model"
THEIRS = "transformers"
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loss from shards": {"parallel_loss": True},
    "sequence parallel": {"sequence_parallel": True, "regather": False},
    "sequence parallel, loss from shards": {
        "sequence_parallel": True,
        "regather": False,
        "parallel_loss": True,
    },
    "sequence parallel, loss from shards, gathered again": {
        "sequence_parallel": True,
        "regather": True,
        "parallel_loss": True,
    },
}
"""Options of ``load``; without ``parallel_loss``, the plan has no loss of sharded logits."""

GRADIENTS = "gradients.safetensors"
SEED = 1


class Subject:
    """A model, and the steps that it takes.

    Args:
        model: in training mode.
        ids: ``[B, S]``, tokens and labels.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model = model.train()
        self.ids = ids
        self.held = [*model.parameters(), *model.buffers(), ids]

    def recompute(self, wanted: bool) -> None:
        """Enable or disable recomputation of layers in the backward pass."""
        if wanted:
            self.model.gradient_checkpointing_enable()
        else:
            self.model.gradient_checkpointing_disable()

    def loss(self) -> Tensor:
        """The loss of a forward pass."""
        loss: Tensor = self.model(self.ids, labels=self.ids, use_cache=False).loss
        return loss

    def step(self) -> None:
        """Forward and backward; parameters have gradients afterwards."""
        self.loss().backward()  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Free the gradients."""
        self.model.zero_grad(set_to_none=True)


def observe(subject: Subject) -> dict[str, Any]:
    """Measure one step, except its time; its gradients stay.

    The peak is above the weights: as CUDA counts it, else of the results of operators.
    """
    traffic, saved, live = Traffic(), Saved(subject.held), LiveStorages(subject.held)
    is_cuda = subject.ids.is_cuda
    gc.collect()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if is_cuda else 0
    with traffic, live:
        traffic.phase = "forward"
        with saved.watching():
            loss = subject.loss()
        traffic.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
    return {
        "loss": float(loss.detach()),
        "saved_bytes": saved.num_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if is_cuda else live.peak_bytes,
        "sent": {
            phase: {kind: traffic.sizes(phase).get(kind, []) for kind in COLLECTIVES}
            for phase in ("forward", "backward")
        },
    }


def seconds(subject: Subject) -> float:
    """Seconds of one step, after a barrier of the ranks."""
    gc.collect()
    synchronize(subject.ids.device)
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    subject.step()
    synchronize(subject.ids.device)
    taken = time.perf_counter() - start
    subject.forget()
    return taken


def synchronize(device: torch.device) -> None:
    """Wait for the kernels of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


# ----------------------------------------------------------------------------------------------- gradients


def gradients(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The local gradient of each parameter; the full one of a distributed tensor."""
    for name, parameter in model.named_parameters():
        found = parameter.grad
        if isinstance(found, DTensor):
            found = found.full_tensor()
        yield name, torch.zeros_like(parameter) if found is None else found


def gradient_difference(model: Any, file: Path, rank: int) -> tuple[float, str]:
    """The largest, over parameters, of ``|g - h| / |h|``, where h is the unsharded model's, and its name."""
    worst = (0.0, "")
    with safe_open(file, "pt") as opened:
        for name, found in gradients(model):
            unsharded = opened.get_slice(name)
            own = _own(unsharded.get_shape(), list(found.shape), rank)
            wanted = unsharded[own].to(found.device)
            error = float((found.float() - wanted).norm() / wanted.norm())
            worst = max(worst, (math.inf if math.isnan(error) else error, name))
    return worst


def _own(full: list[int], local: list[int], rank: int) -> tuple[slice, ...]:
    """The slice of a rank in evenly sharded dims."""
    return tuple(
        slice(None) if n == size else slice(rank * n, (rank + 1) * n)
        for size, n in zip(full, local, strict=True)
    )


# -------------------------------------------------------------------------------------------------- models


def load(name: str, options: argparse.Namespace, device: torch.device) -> Any:
    """A model of the variant of this name."""
    if name not in OURS:
        return load_theirs(options, device, parallel=name == THEIRS)
    import shardconv_runtime

    chosen = dict(OURS[name])
    directory = options.converted if chosen.pop("parallel_loss", False) else options.gathered_logits
    return shardconv_runtime.load(directory, device=device, dtype=options.dtype, training=True, **chosen)


def load_theirs(options: argparse.Namespace, device: torch.device, *, parallel: bool) -> Any:
    """The model of transformers, unsharded or with its own tensor parallelism."""
    chosen: dict[str, Any] = {}
    if parallel:
        from transformers.distributed import DistributedConfig

        chosen["distributed_config"] = DistributedConfig(tp_plan="auto")
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(options.source, dtype=getattr(torch, options.dtype), **chosen)
    return model.to(device) if not parallel else model


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Memory, communication and time of each variant, with and without recomputation."""
    vocab = json.loads((options.source / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocab, (options.batch, options.tokens), generator=generator).to(device)
    names = [UNSHARDED] if options.kind == "unsharded" else options.variants
    subjects: dict[str, Subject] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        tell(f"{options.dtype}, {name}")
        try:
            subjects[name] = Subject(load(name, options, device), ids)
            found |= _described(name, subjects[name], options)
        except Exception as error:
            if name != THEIRS:
                raise
            found[name] = {"error": why(error)}
            subjects.pop(name, None)
    for number in range(options.rounds):
        for name in sorted(subjects, reverse=number % 2 == 1):
            for recompute in (False, True):
                subjects[name].recompute(recompute)
                found[key(name, recompute)]["seconds"].append(seconds(subjects[name]))
        tell(f"round {number + 1}")
    return found


def _described(name: str, subject: Subject, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    file = options.results / GRADIENTS
    found: dict[str, dict[str, Any]] = {}
    for recompute in (False, True):
        subject.recompute(recompute)
        seen = observe(subject)
        if options.kind == "unsharded" and not file.exists():
            save_file({n: g.float().cpu().contiguous() for n, g in gradients(subject.model)}, file)
        difference, where = gradient_difference(subject.model, file, int(os.environ["RANK"]))
        subject.forget()
        found[key(name, recompute)] = {
            **seen,
            "weight_bytes": sum(_local(p).nbytes for p in subject.model.parameters()),
            "gradient_difference": difference,
            "worst_gradient": where,
            "seconds": [],
        }
    return found


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def key(name: str, recompute: bool) -> str:
    """The key of a row."""
    return f"{name}, recomputed" if recompute else name


def why(error: BaseException) -> str:
    """The first two lines of an error, in one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".replace("|", "/")[:200]


def tell(text: str) -> None:
    """Print a line on rank 0."""
    if os.environ["RANK"] == "0":
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("unsharded", "ranks"))
    parser.add_argument("source", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--converted", type=Path)
    parser.add_argument("--gathered-logits", type=Path)
    parser.add_argument("--variants", nargs="+", default=[*OURS, THEIRS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    for name, default in (("batch", 2), ("tokens", 1024), ("rounds", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names, which older versions lack
    torch.set_num_threads(options.threads)
    rank = int(os.environ["RANK"])
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device(options.device)
    if options.kind == "ranks":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found = measure(options, device)
    (options.results / f"{options.kind}-{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
