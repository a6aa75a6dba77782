"""What one process of ``pipeline.py`` measures; rank 0 writes a JSON file.

pipeline_rank.py SHARDED STAGED RESULT OPTIONS

The place among the other ranks comes from the environment that torchrun sets.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import serving_rank
import shardconv_runtime
import torch
import torch.distributed as dist
from shardconv_runtime.inference.batching_manager import PAGE_SIZE
from slow_link import ADDRESSES
from transformers import ContinuousBatchingConfig

MICROBATCHES = (1, 2, 4)
PORT = 29713
WARM_UP_TOKENS = 128
"""So many show that pages give what other calls do; shorter prompts are not compared any more."""


def round_trip_ms(rank: int, world_size: int) -> float:
    """Of a packet between the hosts, as the first rank of each sees it; 0 on the others."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        endpoint.settimeout(10)
        if rank == world_size // 2:
            endpoint.bind((ADDRESSES[1], PORT))
        dist.barrier()
        for _ in range(21):
            if rank == 0:
                begin = time.perf_counter()
                endpoint.sendto(b"0", (ADDRESSES[1], PORT))
                endpoint.recv(1)
                found.append(time.perf_counter() - begin)
            elif rank == world_size // 2:
                endpoint.sendto(*endpoint.recvfrom(1))
    return 1000 * median(found) if found else 0.0


def read_bytes() -> int:
    """That this process had the kernel read from disks so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def loaded(path: Path) -> tuple[Any, dict[str, int]]:
    """A model of which every page was read, and the bytes that this took."""
    before = read_bytes()
    model = shardconv_runtime.load(path)
    total = sum(float(parameter.sum()) for parameter in model.parameters())
    assert total == total, "no number is missing"
    held = sum(parameter.nbytes for parameter in {*model.parameters()})
    return model, {"held": held, "read": read_bytes() - before}


def link_of(model: Any) -> Any:
    """To the other stages; it is reached through the hook that shares results."""
    (found,) = [hook.link for hook in model._forward_hooks.values() if hasattr(hook, "link")]
    return found


def wait_for_device(model: Any, link: Any, device_ms: float) -> None:
    """Have a model, or its half on one of two stages, sleep for each token where it would compute."""

    def sleep(num_tokens: int) -> None:
        time.sleep(device_ms * num_tokens / 1000)

    if link is None:
        model.register_forward_pre_hook(lambda m, a, k: sleep(k["input_ids"].numel()), with_kwargs=True)
        return
    send, receive = link.send, link.receive

    def sent(crossing: Any, x: torch.Tensor, stages: Any) -> None:
        sleep(x.shape[1])
        send(crossing, x, stages)

    def received(crossing: Any, shape: Any, *others: Any) -> torch.Tensor:
        found: torch.Tensor = receive(crossing, shape, *others)
        sleep(shape[1])
        return found

    link.send, link.receive = sent, received


def prompts(options: argparse.Namespace, vocab: int) -> list[list[int]]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(8, options.prompt + 1, (options.requests,), generator=generator).tolist()
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def batched(
    model: Any, inputs: list[list[int]], num_new: int, microbatches: int | None
) -> tuple[list[list[int]], float]:
    """The tokens of each request, and seconds from the first to the last; the manager has run before."""
    pages = ContinuousBatchingConfig(
        **{PAGE_SIZE: serving_rank.PAGE_TOKENS},
        num_blocks=256,
        max_batch_tokens=512,
        allow_block_sharing=False,
    )
    options = {} if microbatches is None else {"num_microbatches": microbatches}
    with model.continuous_batching_context_manager(
        serving_rank.config(num_new), continuous_batching_config=pages, **options
    ) as manager:
        manager.add_request([5] * WARM_UP_TOKENS, max_new_tokens=2)
        if not manager.is_tp_driver:
            return [], 0.0  # at the end of the block, it waits for rank 0
        serving_rank.next_answer(manager)
        begin = time.perf_counter()
        names = manager.add_requests(inputs)
        answers = dict(serving_rank.next_answer(manager) for _ in names)
        return [answers[name] for name in names], time.perf_counter() - begin


def measure(sharded: Path, staged: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each round for each way, and bytes of each process."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"round_trip_ms": round_trip_ms(rank, world_size), "seconds": {}}
    models, num_bytes = {}, {}
    for name, path in (("tp", sharded), ("pp", staged)):
        models[name], num_bytes[name] = loaded(path)
    inputs = prompts(options, models["tp"].config.vocab_size)
    ways: dict[str, tuple[str, int | None]] = {
        "tp": ("tp", None),
        **{f"pp {number}": ("pp", number) for number in MICROBATCHES},
    }
    link, tokens = link_of(models["pp"]), {}
    if options.device_ms:
        wait_for_device(models["tp"], None, options.device_ms)
        wait_for_device(models["pp"], link, options.device_ms)
    for number in range(options.rounds):
        for way in sorted(ways, reverse=number % 2 == 1):
            name, microbatches = ways[way]
            dist.barrier()
            tokens[way], seconds = batched(models[name], inputs, options.tokens, microbatches)
            found["seconds"].setdefault(way, []).append(seconds)
            if rank == 0:
                print(f"round {number + 1}, {way}: {seconds:.2f} s", file=sys.stderr, flush=True)
    found["same"] = {way: tokens[way] == tokens["tp"] for way in ways}
    link.transport.sent_bytes = 0
    with torch.inference_mode():
        models["pp"](torch.tensor([inputs[0]]))
    num_bytes["pp"]["sent"] = link.transport.sent_bytes / len(inputs[0])
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, num_bytes)
    return found | {"bytes": everyone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("sharded", "staged", "result"):
        parser.add_argument(name, type=Path)
    for name in ("requests", "prompt", "tokens", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device_ms", type=float, default=0.0)
    options = parser.parse_args()
    serving_rank.run(lambda: measure(options.sharded, options.staged, options), options.result)


if __name__ == "__main__":
    main()
