"""vLLM's engine on a CPU generates from our files what it generates from the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_tokens
import pytest
import torch
import transformers
from places import ROOT
from vllm_models import NEEDS_VLLM, save

import shardconv

pytestmark = [pytest.mark.vllm, pytest.mark.slow, NEEDS_VLLM]

TP = 2
TIMEOUT_S = 600
NEAR = 0.1
"""Of log probabilities. Kernels of vLLM round in bfloat16, and activations to 8 bits, in other places."""


def printed(directory: Path, load_format: str, tp: int, *texts: Path) -> list[list[Any]]:
    """What the engine prints, its ranks in processes of their own."""
    program = ROOT / "tests" / "engines" / "engine_tokens.py"
    command = [sys.executable, str(program), str(directory), load_format, str(tp), *map(str, texts)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[[")]
    assert lines, ended.stdout[-2000:] + ended.stderr[-3000:]
    found: list[list[Any]] = json.loads(lines[-1])
    return found


def tokens(directory: Path, load_format: str) -> list[list[int]]:
    """What the engine generates with two ranks."""
    return printed(directory, load_format, TP)


def swap_ranks(directory: Path) -> None:
    """Give each rank the other one's files."""
    for path in sorted(directory.glob("model-rank-0-*")):
        other = path.with_name(path.name.replace("rank-0", "rank-1"))
        kept = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(kept)


@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_the_engine_generates_the_same_tokens(kind: str, tmp_path: Path) -> None:
    model = save(kind, tmp_path / "model")
    shardconv.export_vllm(model, tmp_path / "state", TP)
    wanted = tokens(model, "auto")
    assert len({token for ids in wanted for token in ids}) > 3, "the tokens tell weights apart"
    assert tokens(tmp_path / "state", "sharded_state") == wanted
    swap_ranks(tmp_path / "state")
    assert tokens(tmp_path / "state", "sharded_state") != wanted


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("scheme", ["fp8_dynamic", "w4a16", "w8a8"])
def test_the_engine_says_what_transformers_says_of_a_model_that_was_quantized(
    scheme: str, tmp_path: Path
) -> None:
    """Of the schemes of --quantize, vLLM has kernels for these on CPUs.

    The best two tokens of a random model are often nearer than kernels round, and one that differs changes
    all that follow. So both read the words of transformers, and say how likely each is.
    """
    python, formats = ROOT / ".venv/bin/python", ROOT / ".venv/formats"
    if not (formats / "compressed_tensors").is_dir():
        pytest.skip("needs the libraries of quantized formats, which scripts/setup.sh installs")
    model = save("dense", tmp_path / "model", intermediate_size=256)
    # By the environment of the other tests, which has them.
    paths = ":".join(map(str, (ROOT, ROOT / "runtime", formats)))
    for command in (
        ["convert", str(model), str(tmp_path / "out"), "--tp", str(TP), "--quantize", scheme, "--no-check"],
        ["export", str(tmp_path / "out"), str(tmp_path / "quantized"), "--format", "hf"],
    ):
        subprocess.run(
            [python, "-m", "shardconv", *command], check=True, env=os.environ | {"PYTHONPATH": paths}
        )
    quantized = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    texts, expected = [], []
    for prompt in engine_tokens.PROMPTS:
        settings = {"max_new_tokens": engine_tokens.NUM_TOKENS, "do_sample": False}
        text = quantized.generate(torch.tensor([prompt]), eos_token_id=None, **settings)
        with torch.no_grad():
            numbers = quantized(text).logits[0].float().log_softmax(-1)
        texts.append(text[0].tolist())
        expected += numbers[:-1].gather(1, text[0, 1:, None])[:, 0].tolist()
    assert max(expected) - min(expected) > 10 * NEAR, "the numbers tell weights apart"
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    rows = printed(tmp_path / "quantized", "auto", 1, tmp_path / "texts.json")
    assert [number for row in rows for number in row] == pytest.approx(expected, rel=0, abs=NEAR)
