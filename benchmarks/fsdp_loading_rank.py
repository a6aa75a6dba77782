"""One process of ``fsdp_loading.py``; it writes a JSON file.

fsdp_loading_rank.py WAY DIRECTORY RESULT --tp N [--through-buffers] [--untouched] [--one-of NUM_PROCESSES]
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inference_rank import IMPORTS, counters, model_class, tensors_of, touch
from measured import Phase
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

IN_PARTS, SPLIT, THEIRS = "in parts", "split", "transformers"
MORE_IMPORTS = ("shardconv_runtime.loading.data_sharding", "shardconv_runtime.storage.pinned_reading")
Load = Callable[[Path, int], Any]


def in_parts(directory: Path, tp: int) -> Any:
    """Each process reads its part."""
    import shardconv_runtime

    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    return shardconv_runtime.load(directory, mesh=mesh, training=True, data_parallel=True)


def split(directory: Path, tp: int) -> Any:
    """Each process loads its rank's shard, which FSDP2 then splits."""
    import shardconv_runtime

    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    model = shardconv_runtime.load(directory, mesh=mesh, training=True)
    return shardconv_runtime.data_parallel(model, mesh)


def theirs(directory: Path, tp: int) -> Any:
    """Each process loads the unsharded model, which FSDP2 then splits over all processes."""
    from shardconv_runtime.training.checkpointing import repeated_layers
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = model_class(directory).from_pretrained(directory, dtype="auto")
    for unit in (*repeated_layers(model), model):
        fully_shard(unit, mesh=mesh)
    return model


WAYS: dict[str, Load] = {IN_PARTS: in_parts, SPLIT: split, THEIRS: theirs}


class Done:
    """The event of a copy that was made at once."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class HostMemory:
    """Memory of the host in the place of that of a GPU."""

    def enter_thread(self) -> None:
        """A thread needs nothing."""

    def buffer(self, num_bytes: int) -> Tensor:
        """A staging buffer."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """What would be on the device."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Done:
        """Copy at once."""
        target.copy_(source)
        return Done()

    def publish(self, event: Done) -> None:
        """There is one stream."""

    def finish(self) -> None:
        """All copies are done."""


def read_through_buffers() -> None:
    """Let ``load`` read as it does for a GPU, and nothing ahead: all calls of read are the model's."""
    from shardconv_runtime.loading import rank_files
    from shardconv_runtime.storage import reading
    from shardconv_runtime.storage.pinned_reading import staged

    def tensors(shards: Any, device: object, adjacent: Any = ()) -> Iterator[tuple[str, Tensor]]:
        yield from staged(shards, HostMemory(), adjacent)  # type: ignore[arg-type]

    rank_files.tensors = tensors  # type: ignore[assignment]
    reading._budget_bytes = lambda: 0


def join_nobody(num_processes: int) -> None:
    """Be one process, the last one, of many that are not there: collectives do nothing, all agree with it."""
    from shardconv_runtime.comm import agreement, mesh, process_groups
    from shardconv_runtime.loading import load
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def exchange(start: Any, value: Any, timeout_s: float | None = None) -> list[Any]:
        return [value] * start.world_size

    def control_group(group: Any, ranks: Any = None) -> Any:
        return group

    for module in (process_groups, mesh):
        module.control_group = control_group  # type: ignore[attr-defined]
    for module in (agreement, load):
        module.exchange = exchange  # type: ignore[attr-defined]
    dist.init_process_group("fake", rank=num_processes - 1, world_size=num_processes, store=FakeStore())


def measure(load: Load, directory: Path, tp: int, is_touched: bool) -> dict[str, Any]:
    """Seconds, bytes that were read, and the peak of the memory above that before."""
    dist.barrier()
    before, phase = counters(), Phase.begin()
    model = load(directory, tp)
    returned_s = time.perf_counter() - phase.start
    held = [tensor for tensor in tensors_of(model) if tensor.numel()]
    if is_touched:
        touch(held)
    after = phase.end()
    return {
        "returned_s": returned_s,
        "touched_s": after["phase_s"],
        "held_bytes": sum(tensor.nbytes for tensor in held),
        "peak_above": after["peak_above"],
        **{name: value - before[name] for name, value in counters().items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--through-buffers", action="store_true")
    parser.add_argument("--untouched", action="store_true", help="no page of the parameters is read")
    parser.add_argument("--one-of", type=int, metavar="NUM_PROCESSES", help="the others are not there")
    options = parser.parse_args()
    for name in (*IMPORTS, *MORE_IMPORTS):
        importlib.import_module(name)
    with torch.device("meta"):  # imports the modules for building a model
        model_class(options.directory)(model_class(options.directory).config_class(num_hidden_layers=1))
    if options.through_buffers:
        read_through_buffers()
    if options.one_of:
        join_nobody(options.one_of)
    else:
        dist.init_process_group("gloo")
    found = measure(WAYS[options.way], options.directory, options.tp, not options.untouched)
    path: Path = options.result / f"{dist.get_rank()}.json"
    path.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
