"""What torchrun starts on each host: a short training, whose losses the first process writes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import shardconv_runtime
import torch
import torch.distributed as dist
from training_runs import adamw, cpu_mesh, train_parts


def main(path: Path, result: Path, num_steps: int) -> None:
    """Train what lies at ``path``: tensor parallelism inside of a host, FSDP over the hosts."""
    torch.set_num_threads(1)
    hosts, processes = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("gloo")
    mesh = cpu_mesh(hosts, processes)
    places: list[tuple[int, int]] = [(-1, -1)] * processes
    dist.all_gather_object(places, (int(os.environ["GROUP_RANK"]), os.getppid()), mesh.get_group("tp"))
    model = shardconv_runtime.load(path, mesh=mesh, training=True, sequence_parallel=True).train()
    shardconv_runtime.data_parallel(model, mesh)
    curve = train_parts(model, adamw(model), mesh, 0, num_steps)
    if dist.get_rank() == 0:
        written = {"losses": curve.losses, "norms": curve.norms, "hosts_of_tp": sorted(set(places))}
        result.write_text(json.dumps(written))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
