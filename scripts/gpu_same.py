"""What ranks compute beside the unsharded model: checks of the section ``gpus``, called on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
from gpu_section import (
    NEW_TOKENS,
    TOLERANCE,
    Section,
    batched,
    difference,
    greedy,
    one_by_one,
    prompts,
    why_no_compiler,
)
from shardconv_runtime import Communication
from shardconv_runtime.inference.generation import DECODER
from torch import Tensor

Line = dict[str, Any]


def line(what: str, number: float, unit: str, **more: Any) -> Line:
    """A result."""
    return {"what": what, "number": number, "unit": unit, **more}


def load_rank(section: Section, converted: Path, timeout_s: float = 120, **options: Any) -> Any:
    """This rank's model: on a GPU, the one that the runtime finds."""
    device = None if section.is_cuda else section.device
    return shardconv_runtime.load(
        converted, device=device, communication=Communication(timeout_s=timeout_s), **options
    )


def can_compile(section: Section) -> bool:
    """Whether decoding is compiled: to CUDA graphs, or on a CPU to graphs that are run as captured."""
    return not section.is_cuda or not why_no_compiler(section)


def run_graphs_as_captured() -> None:
    """Let ``torch.compile`` generate no code in this process, which takes a CPU minutes."""
    compile_ = torch.compile

    def without_code(function: Any, *, mode: Any = None, options: Any = None, **others: Any) -> Any:
        return compile_(function, **{**others, "backend": "eager"})

    torch.compile = without_code  # type: ignore[assignment]


def tokens(model: Any, ids: Tensor, padded: bool = False, **options: Any) -> Tensor:
    """The text with its continuation; greedy unless an option says otherwise."""
    mask = torch.ones_like(ids)
    if padded:
        ids, mask = ids.repeat(3, 1), mask.repeat(3, 1)
        mask[1, :7] = 0
    fixed = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    found: Tensor = model.generate(ids, attention_mask=mask, **{"do_sample": False, **fixed, **options})
    return found


def _is_same_on_all(x: Tensor) -> bool:
    first = x.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, x)


def same(section: Section, source: Path, converted: Path) -> list[Line]:
    """Logits, and greedy, sampled, beam and compiled tokens."""
    model, unsharded = load_rank(section, converted), section.unsharded(source)
    ids = section.prompt(24, unsharded.config.vocab_size)
    found = difference(model(ids).logits, unsharded(ids).logits)
    is_well = found <= TOLERANCE[torch.float32]
    lines: list[Line] = [line("logits, float32", found, "of the largest", ok=is_well)]
    for what, options in (
        ("greedy", {}),
        ("beams", {"num_beams": 3}),
        ("greedy, a padded batch", {"padded": True}),
    ):
        alike = torch.equal(tokens(model, ids, **options), tokens(unsharded, ids, **options))
        lines.append({"what": f"{NEW_TOKENS} tokens, {what}", "ok": alike})
    lines.append({"what": f"{NEW_TOKENS} sampled tokens on all ranks", "ok": _samples(model, ids)})
    if can_compile(section):
        lines += _compiled(load_rank(section, converted, compile=True), unsharded, ids)
    return lines


def _compiled(model: Any, unsharded: Any, ids: Tensor) -> list[Line]:
    lines: list[Line] = [{"what": "compiled tokens", "ok": greedy(model, ids) == greedy(unsharded, ids)}]
    alike = torch.equal(tokens(model, ids, padded=True), tokens(unsharded, ids, padded=True))
    lines.append({"what": "compiled tokens, a padded batch", "ok": alike})
    lines.append({"what": "tokens sampled inside of a graph, on all ranks", "ok": _samples(model, ids)})
    lines.append({"what": "each step is recorded once", "ok": vars(model)[DECODER].num_recordings == 3})
    return lines


def _samples(model: Any, ids: Tensor) -> bool:
    """Whether ranks draw the same tokens, and others in the next call; they continue with rank 0's state."""
    torch.manual_seed(dist.get_rank())
    first, second = (tokens(model, ids, do_sample=True) for _ in range(2))
    return _is_same_on_all(first) and _is_same_on_all(second) and not torch.equal(first, second)


def same_in_bfloat16(section: Section, source: Path, converted: Path) -> list[Line]:
    """Logits of experts; where two scores are nearly equal, rounding may choose another expert than alone."""
    unsharded = section.unsharded(source)
    ids = section.prompt(24, unsharded.config.vocab_size)
    want = unsharded(ids).logits
    lines = []
    for label, options in (("eager", {}), ("compiled", {"compile": True})):
        if options and not can_compile(section):
            continue
        model = load_rank(section, converted, **options)
        logits = model(ids).logits
        found = float(_differences(logits, want).median())
        is_well = found <= TOLERANCE[torch.bfloat16] and bool(logits.isfinite().all())
        lines.append(line(f"logits of the median token, {label}", found, "of the largest", ok=is_well))
        alike = _is_same_on_all(logits) and _is_same_on_all(tokens(model, ids))
        lines.append({"what": f"logits and {NEW_TOKENS} tokens on all ranks, {label}", "ok": alike})
        del model
        section.free()
    return lines


def _differences(found: Tensor, expected: Tensor) -> Tensor:
    """Of each token, the largest, relative to its largest logit."""
    found, expected = found.float(), expected.float()
    return (found - expected).abs().amax(-1) / expected.abs().amax(-1)


def same_loss(section: Section, source: Path, converted: Path) -> list[Line]:
    """The loss from sharded logits, in which the host may not wait for the device."""
    unsharded = section.unsharded(source)
    ids = section.prompt(24, unsharded.config.vocab_size)
    labels = ids.clone()
    labels[:, :5] = -100
    model = load_rank(section, converted, training=True).train()
    loss = model.loss_function

    def without_waits(*args: Any, **kwargs: Any) -> Tensor:
        with _no_waits(section):
            found: Tensor = loss(*args, **kwargs)
        return found

    with torch.enable_grad():
        model(ids, labels=labels).loss.backward()  # allocates, and makes communicators ready
        model.loss_function = without_waits
        found = model(ids, labels=labels).loss
        found.backward()
    want = float(unsharded(ids, labels=labels).loss)
    error = abs(float(found.detach()) - want) / want
    return [line("loss from sharded logits, without waits", error, "of it", ok=error <= 1e-4)]


@contextmanager
def _no_waits(section: Section) -> Iterator[None]:
    """Waits of the host for the device are errors."""
    if not section.is_cuda:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same_in_batches(section: Section, source: Path, converted: Path) -> list[Line]:
    """Requests that are answered together have the tokens of ``generate``."""
    model = load_rank(section, converted)
    given = prompts(section, model.config.vocab_size)
    alike = batched(model, given) == one_by_one(model, given)
    return [{"what": "generate_batch has the tokens of generate", "ok": alike}]
