"""The section ``training`` of ``gpu_sections.py``: a step at tp 1 beside the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardconv_runtime
import torch
from gpu_section import MIDDLE, SMALL, TINY, Section
from torch import Tensor

LENGTH = 2048
REPEATS = 3


def training(section: Section) -> None:
    """Loss and gradients in float32, then seconds and memory of steps in bfloat16."""
    with section.attempt("loss and gradients, float32"), torch.enable_grad():
        _same_gradients(section)
    if not section.has_time("steps of 1B", 30):
        return
    source = section.checkpoint("middle", TINY if section.small else MIDDLE, torch.bfloat16)
    converted = section.converted(source, 1)
    plain: tuple[float, float] | None = None

    def sharded() -> Any:
        return shardconv_runtime.load(converted, device=section.device, training=True)

    def recomputed() -> Any:
        return shardconv_runtime.checkpoint_activations(sharded())

    def unsharded() -> Any:
        return section.unsharded(source).requires_grad_(True)

    def unsharded_recomputed() -> Any:
        model = unsharded()
        model.gradient_checkpointing_enable()
        return model

    for label, ours, theirs in (
        ("", sharded, unsharded),
        (", recomputed", recomputed, unsharded_recomputed),
    ):
        with section.attempt(f"step of 1B{label}"), torch.enable_grad():
            plain = _step(section, theirs)
            section.free()
            seconds, peak = _step(section, ours)
            rate = (64 if section.small else LENGTH) / seconds
            of = "transformers' time"
            section.tell(f"step of 1B, bfloat16{label}", rate, "tokens/s", ratio=seconds / plain[0], of=of)
            if section.is_cuda:
                of = "transformers'"
                section.tell(f"peak of a step{label}", peak / 1e9, "GB", ratio=peak / plain[1], of=of)


def _same_gradients(section: Section) -> None:
    """The loss, the norm of the gradients and each gradient, beside those of the unsharded model."""
    source = section.checkpoint("small", SMALL, torch.float32)
    unsharded = section.unsharded(source).requires_grad_(True).train()
    model = shardconv_runtime.load(section.converted(source, 1), device=section.device, training=True).train()
    ids = section.prompt(48, unsharded.config.vocab_size)
    labels = ids.clone()
    labels[:, :5] = -100
    want = unsharded(ids, labels=labels).loss
    want.backward()
    loss = model(ids, labels=labels).loss
    loss.backward()
    error = abs(float(loss.detach()) - float(want.detach())) / float(want.detach())
    section.tell("loss, float32", error, "of it", ok=error <= 1e-5)
    grads = [p.grad for p in unsharded.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(grads))
    error = abs(float(shardconv_runtime.grad_norm(model)) - norm) / norm
    section.tell("norm of gradients, float32", error, "of it", ok=error <= 1e-4)
    worst = 0.0
    for (name, found), (other, wanted) in zip(
        model.named_parameters(), unsharded.named_parameters(), strict=True
    ):
        assert name == other
        assert isinstance(found.grad, Tensor)
        assert isinstance(wanted.grad, Tensor)
        worst = max(worst, float((found.grad - wanted.grad).norm() / wanted.grad.norm()))
    section.tell("gradients, float32, the worst parameter", worst, "of its norm", ok=worst <= 1e-3)


def _step(section: Section, make: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a step of AdamW, and the peak of memory in bytes."""
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=section.is_cuda)
    ids = section.prompt(64 if section.small else LENGTH, model.config.vocab_size)

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    if section.is_cuda:
        torch.cuda.reset_peak_memory_stats(section.device)
    seconds = min(section.seconds(step) for _ in range(REPEATS))
    return seconds, float(torch.cuda.max_memory_allocated(section.device)) if section.is_cuda else 0.0
