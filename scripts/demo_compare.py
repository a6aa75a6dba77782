"""Compare a converted model with its original: torchrun ... demo_compare.py MODEL OUT."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
import transformers

QUESTION = "What is the capital of France?"
TOLERANCE = 1e-4
"""Largest allowed difference of two logits in float32, relative to the largest logit."""


def main(source: str, converted: str) -> None:
    """Load both on each rank; rank 0 prints. Exits with 1 where they differ."""
    transformers.utils.logging.disable_progress_bar()
    model = shardconv_runtime.load(converted, dtype=torch.float32)
    original = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = None
    if Path(source, "tokenizer.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        chat = [{"role": "user", "content": QUESTION}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt").input_ids
    else:
        ids = torch.randint(model.config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = original(ids).logits
        difference = ((model(ids).logits - expected).abs().max() / expected.abs().max()).item()
    tokens, expected_tokens = (greedy(m, ids) for m in (model, original))
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, count(model))
    if dist.get_rank() == 0:
        of_ranks = ", ".join(f"{number:,} on rank {rank}" for rank, number in enumerate(counts))
        print(f"parameters  {count(original):,} in the original; {of_ranks}")
        print(f"logits      differ by {difference:.1e} of the largest one")
        if tokenizer is not None:
            print(f"question    {QUESTION}")
        for name, found in (("original", expected_tokens), ("sharded", tokens)):
            print(f"{name:11} {tokenizer.decode(found, skip_special_tokens=True) if tokenizer else found}")
    dist.barrier()
    dist.destroy_process_group()
    if difference > TOLERANCE or tokens != expected_tokens:
        sys.exit("error: the sharded model differs from the original")


def count(model: Any) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def greedy(model: Any, ids: torch.Tensor) -> list[int]:
    """The tokens that follow, with a KV cache; at most 16."""
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    return [int(token) for token in out[0, ids.shape[1] :]]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
