"""Prints the tokens that vLLM's engine generates on a CPU: ``engine_tokens.py DIRECTORY LOAD_FORMAT TP``.

With a fourth argument, a file with lists of ids as JSON, it prints the log probabilities of these ids, each
after those before it, from the second one on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two ranks on one node of memory are refused
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",  # of a build for GPUs too
}

PROMPTS = [[5, 17, 99, 3], [200, 11, 42, 42, 7, 80], [1, 2, 3]]
NUM_TOKENS = 12


def main(directory: str, load_format: str, tp: str, texts: str | None = None) -> None:
    """Generate greedily, and print the ids, or read texts, and print numbers, as JSON in the last line."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        directory,
        load_format=load_format,
        tensor_parallel_size=int(tp),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        disable_log_stats=True,
    )
    if texts is not None:
        rows = json.loads(Path(texts).read_text())
        settings = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
        found = engine.generate([{"prompt_token_ids": ids} for ids in rows], settings, use_tqdm=False)
        numbers = [
            [place[token].logprob for token, place in zip(ids[1:], result.prompt_logprobs[1:], strict=True)]
            for ids, result in zip(rows, found, strict=True)
        ]
        print(json.dumps(numbers), flush=True)
        return
    settings = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    found = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], settings, use_tqdm=False)
    print(json.dumps([list(result.outputs[0].token_ids) for result in found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
