"""Stages on two hosts: two agents of torchrun on this one, one stage each."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import host_agents
import pytest
import stages_on_hosts
import torch
import transformers
from checkpoints import save_causal
from forked import Forked
from ports import free_port

import shardconv

SOON_S = 60
"""Agents ask each other now and then whether they are there."""


def fork_agent(port: int, out: Path, result: Path, *, dies: bool) -> Forked:
    """An agent as torchrun starts it on each host, and its ranks, which are forked."""
    return host_agents.fork_agent(stages_on_hosts.main, port, out, result, dies, max_restarts=0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and beside it two stages of two ranks."""
    root = tmp_path_factory.mktemp("hosts")
    source = save_causal("llama", root / "llama")
    shardconv.convert(source, root / "out", 2, pp=2, dtype="float32", check=False)
    return source


def test_two_hosts_generate_as_one_process(source: Path, tmp_path: Path) -> None:
    result, port = tmp_path / "result.json", free_port()
    agents = [fork_agent(port, source.parent / "out", result, dies=False) for _ in range(2)]
    outputs = ["".join(text or "" for text in agent.communicate(timeout=240)) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    found = json.loads(result.read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.tensor([[11, 245, 3, 77]])
    want = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert found["tokens"] == want.tolist()
    hosts = [host for host, _ in found["places"]]
    assert hosts in ([0, 0, 1, 1], [1, 1, 0, 0]), "a stage is on one host"
    assert "model.embed_tokens.weight" in found["places"][0][1]
    assert "model.embed_tokens.weight" not in found["places"][2][1]


def test_a_host_that_dies_ends_the_job_everywhere(source: Path, tmp_path: Path) -> None:
    port = free_port()
    agents = [fork_agent(port, source.parent / "out", tmp_path / "result.json", dies=True) for _ in range(2)]
    begin = time.monotonic()
    try:
        while any(agent.poll() is None for agent in agents) and time.monotonic() - begin < 240:
            time.sleep(0.1)
        took = time.monotonic() - begin
        codes = [agent.poll() for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
    assert None not in codes, "an agent waits for the other host"
    assert -signal.SIGKILL in codes
    assert 0 not in codes
    assert took < SOON_S
