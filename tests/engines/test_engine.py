"""vLLM's engine on a CPU generates from our files what it generates from the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def tokens(directory: Path, load_format: str, tp: int = TP) -> list[list[int]]:
    """What the engine generates, two ranks in processes of their own."""
    program = ROOT / "tests" / "engines" / "engine_tokens.py"
    command = [sys.executable, str(program), str(directory), load_format, str(tp)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[[")]
    assert lines, ended.stdout[-2000:] + ended.stderr[-3000:]
    found: list[list[int]] = json.loads(lines[-1])
    return found


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
def test_the_engine_reads_a_model_that_was_quantized(tmp_path: Path) -> None:
    """Of the schemes of --quantize, vLLM has kernels for w4a16 and w8a8 on CPUs."""
    python, formats = ROOT / ".venv/bin/python", ROOT / ".venv/formats"
    if not (formats / "compressed_tensors").is_dir():
        pytest.skip("needs the libraries of quantized formats, which scripts/setup.sh installs")
    model = save("dense", tmp_path / "model", intermediate_size=256)
    # In the other environment, since vLLM pins a version of compressed-tensors that computes nothing on meta.
    paths = ":".join(map(str, (ROOT, ROOT / "runtime", formats)))
    for command in (
        ["convert", str(model), str(tmp_path / "out"), "--tp", str(TP), "--quantize", "w4a16", "--no-check"],
        ["export", str(tmp_path / "out"), str(tmp_path / "quantized"), "--format", "hf"],
    ):
        subprocess.run(
            [python, "-m", "shardconv", *command], check=True, env=os.environ | {"PYTHONPATH": paths}
        )
    quantized = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    expected = []
    for prompt in engine_tokens.PROMPTS:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": engine_tokens.NUM_TOKENS, "do_sample": False}
        answer = quantized.generate(ids, eos_token_id=None, **settings)
        expected.append(answer[0, len(prompt) :].tolist())
    assert len({token for ids in expected for token in ids}) > 3, "the tokens tell weights apart"
    generated = tokens(tmp_path / "quantized", "auto", 1)
    # Its kernels round in other places, so that the choice between two near tokens may differ after a while.
    assert [ids[:4] for ids in generated] == [ids[:4] for ids in expected], f"{generated}, {expected}"
