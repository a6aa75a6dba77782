"""Training on two hosts: two agents of torchrun on this one, which find each other over the network.

``torchrun`` itself is one of the slow tests. What it does after it has read its arguments is to launch ranks
that join a rendezvous: processes that are forked, and need not import torch again, do the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_agents
import pytest
import train_on_hosts
from forked import Forked
from ports import free_port
from training_runs import adamw, load_unsharded, save_model, train_unsharded

import shardconv

NUM_STEPS = 4
SCRIPT = Path(__file__).parents[1] / "helpers" / "train_on_hosts.py"


def fork_agent(port: int, out: Path, result: Path) -> Forked:
    """An agent as torchrun starts it on each host, and its ranks, which are forked."""
    return host_agents.fork_agent(train_on_hosts.main, port, out, result, NUM_STEPS)


def start_torchrun(port: int, out: Path, result: Path) -> subprocess.Popen[str]:
    """What one types on each host."""
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    place = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    here = [str(SCRIPT.parent), str(SCRIPT.parent.parent)]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", *options, *place),
            *(str(SCRIPT), str(out), str(result), str(NUM_STEPS)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*here, *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("start", [fork_agent, pytest.param(start_torchrun, marks=pytest.mark.slow)])
def test_two_hosts_train_as_one_process(start: Callable[[int, Path, Path], Any], tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 2, sequence_parallel=True)
    port = free_port()
    result = tmp_path / "result.json"
    agents = [start(port, tmp_path / "out", result) for _ in range(2)]
    try:
        outputs = ["".join(text or "" for text in agent.communicate(timeout=240)) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    found = json.loads(result.read_text())
    assert len(found["hosts_of_tp"]) == 1, "the ranks of a model are on one host"
    unsharded = load_unsharded(tmp_path / "model")
    want = train_unsharded(unsharded, adamw(unsharded), 0, NUM_STEPS)
    for have, expected in ((found["losses"], want.losses), (found["norms"], want.norms)):
        assert max(abs(a - b) for a, b in zip(have, expected, strict=True)) < 1e-9
