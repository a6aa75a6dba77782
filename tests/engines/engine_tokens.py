"""Prints the tokens that vLLM's engine generates on a CPU: ``engine_tokens.py DIRECTORY LOAD_FORMAT TP``."""

from __future__ import annotations

import json
import os
import sys

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


def main(directory: str, load_format: str, tp: str) -> None:
    """Generate greedily, and print the ids as JSON in the last line."""
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
    settings = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    found = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], settings, use_tqdm=False)
    print(json.dumps([list(result.outputs[0].token_ids) for result in found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
