"""Training on two hosts: two agents of torchrun on this one, which find each other over the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from distributed import free_port
from training_runs import adamw, load_whole, save_model, train_whole

import shardconv

NUM_STEPS = 4
SCRIPT = Path(__file__).parents[1] / "helpers" / "train_on_hosts.py"


def start_agent(port: int, *arguments: str) -> subprocess.Popen[str]:
    """What one types on each host."""
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    place = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    here = [str(SCRIPT.parent), str(SCRIPT.parent.parent)]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *place, str(SCRIPT), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*here, *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_hosts_train_as_one_process(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 2, sequence_parallel=True)
    port = free_port()
    result = tmp_path / "result.json"
    agents = [start_agent(port, str(tmp_path / "out"), str(result), str(NUM_STEPS)) for _ in range(2)]
    try:
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    found = json.loads(result.read_text())
    assert len(found["hosts_of_tp"]) == 1, "the ranks of a model are on one host"
    whole = load_whole(tmp_path / "model")
    want = train_whole(whole, adamw(whole), 0, NUM_STEPS)
    for have, expected in ((found["losses"], want.losses), (found["norms"], want.norms)):
        assert max(abs(a - b) for a, b in zip(have, expected, strict=True)) < 1e-9
