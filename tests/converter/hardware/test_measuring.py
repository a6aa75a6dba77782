"""This machine as a device, measured in processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from distributed import run_processes
from torch.utils._python_dispatch import TorchDispatchMode

from shardconv.hardware import measuring
from shardconv.hardware.cost_model import FREE
from shardconv.hardware.machines import devices_text, parse_cluster
from shardconv.tracing.identities import tensors_in


def measure_here(count: int, scratch: str) -> str:
    """Measure with tiny tensors, once each, in a rank that a test has started."""
    measuring.REPEATS = measuring.ROUNDS = 1
    measuring.MIN_S, measuring.ROWS, measuring.MESSAGES = 1e-4, (1, 8), (1 << 10, 1 << 14)
    measuring.FILE_BYTES, measuring.LAYERS = 1 << 20, 2
    measuring._rank(
        int(os.environ["RANK"]),
        count,
        scratch,
        Path(scratch) / "device.json",
        measuring.Sizes(1 << 16, 64, 2),
    )
    return (Path(scratch) / "device.json").read_text() if os.environ["RANK"] == "0" else ""


def test_two_processes_measure_a_cpu(tmp_path: Path) -> None:
    text = run_processes(2, measure_here, 2, str(tmp_path))[0]
    path = tmp_path / "machine.json"
    path.write_text(text)
    device = parse_cluster("2xcpu", path).device
    assert devices_text([device]) == text
    assert (device.is_host, device.is_measured, device.kernel_s) == (True, True, 0.0)
    assert device.products is not None
    for dtype, curve in device.products.items():
        assert [point.rows for point in curve] == [1, 8]
        assert curve[0].element_s <= curve[1].element_s
        assert device.flops[dtype] == 2 * 8 / curve[1].element_s
    assert device.other_bandwidth is not None
    assert device.attention_flops is not None
    assert min(device.other_bandwidth, device.attention_flops) > 0
    assert device.inside == device.between
    assert device.inside.call_s + device.inside.latency_s > 0
    assert "2 processes" in device.sources[0]


class _Launches(TorchDispatchMode):
    """Count operators, of which views cost less."""

    number = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {x.untyped_storage().data_ptr() for x in tensors_in(args)}
        self.number += FREE if tensors_in((result,))[0].untyped_storage().data_ptr() in storages else 1
        return result


def test_the_operators_of_the_small_layer_are_counted() -> None:
    layer = measuring._SmallLayer(lambda: None).to(torch.bfloat16)
    x = torch.ones(1, 1, layer.WIDTH, dtype=torch.bfloat16)
    angles = x[..., : layer.WIDTH // layer.HEADS]
    with torch.no_grad(), _Launches() as launches:
        assert layer(x, angles, angles).shape == x.shape
    assert launches.number == layer.OPERATORS
