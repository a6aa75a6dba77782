"""Buffers for messages of calls that are not made yet: what comes is what was sent, and nothing is left."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import run_processes
from shardconv_runtime import ShardconvError
from shardconv_runtime.pp.stage_processes import ProcessTransport, StageMessage, Traffic

SHAPES = ((1, 5, 4), (1, 1, 4), (1, 20, 4))
"""Of three calls, of 5, 1 and 20 tokens; each sends a tensor of this shape and one number."""


def exchange() -> list[list[float]]:
    """What a stage has of three calls, and of one after them."""
    stage, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    transport = ProcessTransport(group, torch.device("cpu"))
    first = StageMessage(("unit", 0), 1 - stage, (1, 5, 4), torch.float32)
    messages = first, StageMessage(("unit", 1), 1 - stage, (), torch.int64)
    assert [message.num_bytes for message in messages] == [80, 8]
    seen = Traffic(*((messages, ()) if stage == 0 else ((), messages)))
    transport.receive_early(seen, num_tokens=5, most_tokens=20, num_calls=2)
    found = []
    for call, shape in enumerate((*SHAPES, (1, 50, 4))):
        if call == len(SHAPES):
            if stage == 0:
                with pytest.raises(ShardconvError, match="stop the manager first"):
                    transport.send(("unit", 0), torch.zeros(shape), [1])
            transport.stop_early()
        tensors = torch.full(shape, call + 0.5), torch.tensor(call)
        if stage == 0:
            for item, tensor in enumerate(tensors):
                transport.send(("unit", item), tensor, [1])
        else:
            got = [
                transport.receive(m.crossing, x.shape, x.dtype, 0)
                for m, x in zip(messages, tensors, strict=True)
            ]
            assert all(torch.equal(x, y) for x, y in zip(got, tensors, strict=True))
            found.append([x.float().sum().item() for x in got])
    return found


def test_messages_of_other_sizes_come_as_they_were_sent() -> None:
    _, found = run_processes(2, exchange, start_group=True)
    assert found == [[10.0, 0.0], [6.0, 1.0], [200.0, 2.0], [700.0, 3.0]]
