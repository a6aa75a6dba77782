"""The section ``packed`` of ``gpu_sections.py``: quantized checkpoints beside transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shardconv_runtime
import transformers
from gpu_section import NEW_TOKENS, Section, difference, greedy, run_ranks
from library_checkpoints import dense_model, save_bnb, save_fp8, save_gptq

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
TOLERANCE = 2**-5
"""Of the largest logit, in bfloat16."""


@dataclass(frozen=True)
class Format:
    """A quantized format.

    Attributes:
        save: makes a checkpoint.
        libraries: what computing needs, and where that comes from: wheels of this size can be carried along.
        options: of ``load``, and of transformers' config of the format.
    """

    save: Callable[[Path], Any]
    libraries: dict[str, str] = field(default_factory=dict)
    options: tuple[dict[str, Any], dict[str, Any]] = ({}, {})


def _fp8(path: Path) -> Any:
    return save_fp8(path, dense_model(**SIZES), (128, 128))


BNB = {"bitsandbytes": "a wheel of 43 MB", "accelerate": "a wheel of 0.4 MB"}
FORMATS = {
    "FP8 in blocks, dequantized": Format(_fp8, options=({"dequantize": True}, {"dequantize": True})),
    "FP8 in blocks": Format(_fp8, {"kernels": "a wheel of 2 MB, which downloads kernels from the Hub"}),
    "bitsandbytes nf4": Format(lambda p: save_bnb(p, load_in_4bit=True, bnb_4bit_quant_type="nf4"), BNB),
    "bitsandbytes int8": Format(lambda p: save_bnb(p, load_in_8bit=True), BNB),
    "GPTQ, 4 bits": Format(
        lambda p: save_gptq(p, 4, 64, act_order=False),
        {"gptqmodel": "built from source", "optimum": "a wheel of 0.4 MB"},
    ),
}


def packed(section: Section) -> None:
    """Each format at tp 1 on the device; packed ones also at tp 2, with ranks that share it."""
    for name, form in FORMATS.items():
        missing = [f"{library} ({source})" for library, source in form.libraries.items() if not _has(library)]
        if missing:
            section.skip(name, f"cannot be imported: {', '.join(missing)}")
            continue
        path = section.scratch / name.replace(" ", "-").replace(",", "")
        with section.attempt(name):
            form.save(path)
            _tell(section, name, path, *form.options)
        if not any(form.options) and section.has_time(f"{name}, tp 2", 15):
            with section.attempt(f"{name}, tp 2"):
                found = run_ranks(section, path, section.converted(path, 2), 2)
                worst = max(result["difference"] for result in found)
                section.tell(f"logits, {name}, tp 2", worst, "of the largest", ok=worst <= TOLERANCE)


def _tell(section: Section, name: str, path: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Logits and tokens at tp 1 beside transformers, and the bytes that the parameters take."""
    model = shardconv_runtime.load(section.converted(path, 1), device=section.device, **ours)
    if theirs:
        theirs = {"quantization_config": transformers.FineGrainedFP8Config(**theirs)}
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", **theirs)
    unsharded = unsharded.to(section.device).eval()
    ids = section.prompt(24, unsharded.config.vocab_size)
    found = difference(model(ids).logits, unsharded(ids).logits)
    section.tell(f"logits, {name}", found, "of the largest", ok=found <= TOLERANCE)
    alike = greedy(model, ids) == greedy(unsharded, ids)
    section.tell(f"{NEW_TOKENS} greedy tokens, {name}", float(alike), "", why="1: those of transformers")
    held, plain = (sum(x.nbytes for x in (*m.parameters(), *m.buffers())) for m in (model, unsharded))
    section.tell(f"bytes of parameters, {name}", held / 1e6, "MB", ratio=held / plain, of="transformers'")


def _has(library: str) -> bool:
    """Whether a library can be imported; some fail for other reasons than that they are missing."""
    try:
        __import__(library)
    except Exception:
        return False
    return True
