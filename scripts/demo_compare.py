"""Compare a converted model with its original: torchrun ... demo_compare.py MODEL OUT."""

from __future__ import annotations

import sys
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
import transformers

TOLERANCE = 1e-4
"""Largest allowed difference of two logits in float32, relative to the largest logit."""


def main(source: str, converted: str) -> None:
    """Load both on each rank; rank 0 prints. Exits with 1 where they differ."""
    transformers.utils.logging.disable_progress_bar()
    model = shardconv_runtime.load(converted)
    original = transformers.AutoModelForCausalLM.from_pretrained(source)
    ids = torch.randint(model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = original(ids).logits
        difference = ((model(ids).logits - expected).abs().max() / expected.abs().max()).item()
    tokens, expected_tokens = (greedy(m, ids[:1]) for m in (model, original))
    if dist.get_rank() == 0:
        print(f"parameters         {count(original):,} in the original, {count(model):,} on rank 0")
        print(f"logits             differ by {difference:.1e} of the largest one")
        print(f"tokens, original   {expected_tokens}")
        print(f"tokens, sharded    {tokens}")
    dist.barrier()
    dist.destroy_process_group()
    if difference > TOLERANCE or tokens != expected_tokens:
        sys.exit("error: the sharded model differs from the original")


def count(model: Any) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def greedy(model: Any, ids: torch.Tensor) -> list[int]:
    """The 16 tokens that follow, with a KV cache."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in out[0, ids.shape[1] :]]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
