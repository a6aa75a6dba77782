#!/usr/bin/env python3
"""Predictions of ``shardconv plan --on`` next to measured and published times.

Three tables for ``docs/hardware.md``. **GPU**: the rows of ``docs/gpu.md``. **CPU**: this machine, measured
with ``env --measure`` and predicted for 1, 2 and 4 ranks over gloo, three sizes and two batches; rounds of
both take turns, and the shortest times count. **Published**: collectives and engines of others.

    python benchmarks/predictions.py --rounds 2 --cpu cpu.json     measure the CPU rows, and write the page
    python benchmarks/predictions.py --cpu cpu.json --rounds 0     write the page from an earlier run
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ports import free_port
from shardconv_runtime.hub_options import Hub
from synthetic import LLAMA_8B, Shape

from shardconv.arguments import SolveOptions
from shardconv.conversion import ModelPlanner, ModelSource
from shardconv.hardware.cost_model import collective_seconds, eager_seconds, graph_seconds
from shardconv.hardware.machines import (
    Cluster,
    Device,
    Link,
    ProductRate,
    devices_text,
    parse_cluster,
    read_devices,
)
from shardconv.hardware.measuring import measured_device, num_devices
from shardconv.hardware.predictions import StageWork, predict
from shardconv.hardware.rank_work import CallWork, CollectiveWork, rank_work, without_fused
from shardconv.reporting.plan_lines import Workload
from shardconv.reporting.progress import Silent

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hardware.md"
RANK = Path(__file__).with_name("predictions_rank.py")
SHAPES = {
    "small": Shape(hidden=512, intermediate=1536, heads=8, kv_heads=4, vocab=16000, layers=8),
    "middle": Shape(hidden=1024, intermediate=3072, heads=16, kv_heads=8, vocab=16000, layers=8),
    "large": Shape(hidden=1536, intermediate=4608, heads=16, kv_heads=8, vocab=16000, layers=6),
}
BATCHES = (1, 4)
PROMPT = 64
DTYPE = torch.bfloat16
TPS = (2, 1, 4)
"""Numbers of ranks; with more than the cores, ranks take turns."""
TIME_LIMIT_S = 900
DEVICE_ROUNDS = 2
"""Rounds in which the machine is measured; rows are measured in all of them."""
ONE_B = Shape(hidden=2048, intermediate=7168, heads=16, kv_heads=8, vocab=32000, layers=16)


# ------------------------------------------------------------------------------------------------- work


def works_of(
    config: dict[str, Any], tp: int, batch: int, context: int, experts: str = "tp"
) -> tuple[Any, StageWork]:
    """The plan of a model from its config, and the work of its rank 0."""
    works: list[StageWork] = []

    def inspect(plan: Any, model: Any, inputs: Any, bypassed: Any) -> None:
        plain = rank_work(without_fused(plan), model, inputs, bypassed, batch, context)
        works.append(StageWork(plain, rank_work(plan, model, inputs, bypassed, batch, context)))

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        source = ModelSource(directory, Hub(), None, False)
        options = SolveOptions(tp, experts, check=False, measure=True)
        plan = ModelPlanner(source, None, Silent()).plan(options, inspect)
    return plan, works[0]


def config_of(shape: Shape) -> dict[str, Any]:
    """The config of a llama in bfloat16."""
    return {**shape.config(), "max_position_embeddings": 131072}


def alone(work: CallWork) -> CallWork:
    """The same without collectives, as on a machine with one device."""
    return CallWork(tuple(each for each in work.events if not isinstance(each[0], CollectiveWork)))


@dataclass(frozen=True)
class Row:
    """A predicted and a measured number."""

    label: str
    predicted: float
    measured: float
    unit: str
    remark: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def table(rows: Sequence[Row], measured: str = "measured") -> str:
    """The rows in Markdown."""
    lines = [f"| row | predicted | {measured} | ratio | remark |", "|---|--:|--:|--:|---|"]
    for row in rows:
        numbers = f"{row.predicted:,.4g} {row.unit} | {row.measured:,.4g} {row.unit} | {row.ratio:.2f}"
        lines.append(f"| {row.label} | {numbers} | {row.remark} |")
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------- GPU

SHARED = "other sections ran on the machine: an upper bound"


def gpu_rows() -> Iterator[Row]:
    """The rows of ``docs/gpu.md`` that are times."""
    on = parse_cluster("8xH200")
    _, rank = works_of(config_of(replace(LLAMA_8B, layers=32)), 8, 1, 512)
    plain, fused = rank.plain, rank.fused

    def ms(seconds: Any) -> float:
        return 1e3 * seconds.total_s

    yield Row("8B, rank 0 of 8, token, eager", ms(eager_seconds(alone(plain.token), on)), 23.99, "ms")
    yield Row(
        "8B, rank 0 of 8, prefill of 512, eager", ms(eager_seconds(alone(plain.prefill), on)), 21.87, "ms"
    )
    yield Row("8B, rank 0 of 8, token, graphs", ms(graph_seconds(alone(fused.token), on)), 1.709, "ms")
    near = replace(on.device, inside=Link(1e15, 0.0, on.device.kernel_s))
    here = replace(on, device=near)
    of_one = "NCCL in a group of one process"
    yield Row(
        "8B, rank 0 of 8, token, eager, NCCL", ms(eager_seconds(plain.token, here)), 30.75, "ms", of_one
    )
    yield Row(
        "8B, rank 0 of 8, token, graphs, NCCL", ms(graph_seconds(fused.token, here)), 1.827, "ms", of_one
    )
    _, few = works_of(config_of(replace(LLAMA_8B, layers=4)), 8, 1, 512)
    yield Row(
        "8B of 4 layers, rank 0 of 8, token, graphs", ms(graph_seconds(few.fused.token, here)), 0.336, "ms",
        f"symmetric sums; {SHARED}",
    )  # fmt: skip
    _, whole = works_of(config_of(replace(LLAMA_8B, layers=32)), 1, 1, 512)
    yield Row(
        "8B, tp 1, kernels of a token, graphs", ms(graph_seconds(whole.fused.token, on)), 4.65, "ms", SHARED
    )
    yield Row("8B, tp 1, token, graphs", ms(graph_seconds(whole.fused.token, on)), 4.95, "ms", SHARED)
    _, one = works_of(config_of(ONE_B), 1, 1, 512)
    yield Row(
        "1B, tp 1, prefill of 512, eager", ms(eager_seconds(one.plain.prefill, on)), 16.72, "ms", SHARED
    )
    yield Row("1B, tp 1, token, eager", ms(eager_seconds(one.plain.token, on)), 12.92, "ms", SHARED)
    yield Row("1B, tp 1, token, graphs", ms(graph_seconds(one.fused.token, on)), 1.475, "ms", SHARED)
    plan, trained = works_of(config_of(ONE_B), 1, 1, 2048)
    step = predict(plan, [trained], on, Workload(on.device.memory_bytes, 0, 2048, 1))
    assert step.step_s is not None
    assert step.recomputed_step_s is not None
    yield Row("1B, tp 1, training step of 2,048 tokens", 1e3 * step.step_s, 2048 / 34.86, "ms", SHARED)
    yield Row("1B, tp 1, training step, recomputed", 1e3 * step.recomputed_step_s, 2048 / 19.77, "ms", SHARED)
    cold = 5.759e9 / on.device.disk_bandwidth
    yield Row(
        "load of 5.76 GB, cold", cold, 5.759 / 1.449, "s", "the disk's rate in the table is from this row"
    )
    yield Row(
        "load of 5.76 GB, warm", 5.759e9 / on.device.host_bandwidth, 5.759 / 15.48, "s", "from the page cache"
    )


# -------------------------------------------------------------------------------------------------- CPU


def measure_cpu(rounds: int, path: Path) -> None:
    """Measure the machine and the rows in turns, and keep the shortest times."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for number in range(rounds):
        for tp in TPS:
            entry = kept.setdefault(str(tp), {"devices": [], "rows": []})
            os.environ["OMP_NUM_THREADS"] = "1"  # a rank has one thread when it is measured, too
            if len(entry["devices"]) < DEVICE_ROUNDS:
                entry["devices"].append(devices_text([measured_device(tp)]))
            entry["rows"].append(measured_rows(tp))
            path.write_text(json.dumps(kept))
            print(f"round {number + 1}, tp {tp}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)


def measured_rows(tp: int) -> dict[str, tuple[float, float]]:
    """Seconds and seconds of a thread, of all sizes and batches, in processes."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "rows.json")
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(RANK), str(tp), str(result)], env={**os.environ, **place, "RANK": str(n)}
            )
            for n in range(tp)
        ]
        if any(rank.wait(TIME_LIMIT_S) for rank in ranks):
            raise SystemExit("error: a rank failed")
        rows: dict[str, tuple[float, float]] = json.loads(result.read_text())
        return rows


def best_device(texts: Sequence[str]) -> Device:
    """The shortest times of several measurements."""
    with tempfile.TemporaryDirectory() as directory:
        devices = []
        for index, text in enumerate(texts):
            path = Path(directory, f"{index}.json")
            path.write_text(text)
            devices += read_devices(path)
    curves: dict[str, tuple[ProductRate, ...]] = {}
    for dtype in devices[0].products or {}:
        points = zip(*((d.products or {})[dtype] for d in devices), strict=True)
        curves[dtype] = tuple(min(each, key=lambda point: point.element_s) for each in points)
    inside = Link(
        max(d.inside.bandwidth for d in devices),
        min(d.inside.latency_s for d in devices),
        min(d.inside.call_s for d in devices),
    )
    return replace(
        devices[0],
        bandwidth=max(d.bandwidth for d in devices),
        flops={dtype: max(d.flops[dtype] for d in devices) for dtype in devices[0].flops},
        operator_s=min(d.operator_s for d in devices),
        inside=inside,
        between=inside,
        products=curves,
        other_bandwidth=max(d.other_bandwidth or 0.0 for d in devices) or None,
        attention_flops=max(d.attention_flops or 0.0 for d in devices) or None,
    )


def cpu_text(path: Path) -> str:
    """The rows of this machine, and how often they and the order of two choices are right."""
    kept = json.loads(path.read_text())
    lines = [
        "| row | predicted, ms | measured, ms | ratio | a thread, predicted, ms | measured, ms | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    rows: list[Row] = []
    threads: list[Row] = []
    by_case: dict[str, list[Row]] = {}
    for tp, entry in kept.items():
        cluster = Cluster(1, int(tp), best_device(entry["devices"]))
        for name, shape in SHAPES.items():
            for batch in BATCHES:
                _, work = works_of(config_of(shape), int(tp), batch, PROMPT)
                for kind, call in (("forward", work.plain.forward), ("token", work.plain.token)):
                    times = [each[f"{name} {batch} {kind}"] for each in entry["rows"]]
                    measured, alone = (1e3 * min(each) for each in zip(*times, strict=True))
                    assert call is not None
                    predicted = eager_seconds(call, cluster)
                    label = f"{name}, tp {tp}, batch {batch}, {kind}"
                    label += " (two ranks share a core)" if int(tp) > 2 else ""
                    thread = Row(label, 1e3 * (predicted.compute_s + predicted.host_s), alone, "ms")
                    turns = max(1.0, int(tp) / num_devices())
                    row = Row(label, turns * thread.predicted + 1e3 * predicted.collective_s, measured, "ms")
                    cells = (
                        row.predicted,
                        row.measured,
                        row.ratio,
                        thread.predicted,
                        thread.measured,
                        thread.ratio,
                    )
                    numbers = (
                        f"{cell:.2f}" if index % 3 == 2 else f"{cell:,.1f}"
                        for index, cell in enumerate(cells)
                    )
                    lines.append(f"| {label} | {' | '.join(numbers)} |")
                    rows.append(row)
                    threads.append(thread)
                    by_case.setdefault(f"{batch} {kind}", []).append(row)
    pairs = [pair for case in by_case.values() for pair in itertools.combinations(case, 2)]
    right = sum((a.predicted < b.predicted) == (a.measured < b.measured) for a, b in pairs)
    near, near_threads = (sum(0.75 <= row.ratio <= 1.25 for row in each) for each in (rows, threads))
    text = (
        f"{near} of {len(rows)} rows are within 25%, and {near_threads} of the times of a thread. The order "
        f"of two choices (sizes and numbers of ranks, for one batch and kind) is right in {right} of "
        f"{len(pairs)} pairs, {right / len(pairs):.0%}.\n"
    )
    return text + "\n" + "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------- published

GPT_FAST = "[gpt-fast](https://github.com/pytorch-labs/gpt-fast)"
TENSORRT = "[TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM/blob/138f96d45f90b9667426f7c47297d8c06bafac73/docs/source/performance.md)"
LLAMA2_7B = Shape(4096, 11008, 32, 32, 32000, 32)
LLAMA2_70B = Shape(8192, 28672, 64, 8, 32000, 80)
MIXTRAL = {
    **Shape(4096, 14336, 32, 8, 32000, 32).config(),
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
CONTEXT = 128
"""Tokens of the cache of a published token: a prompt of five, and an answer of 200."""
FIRST = ((LLAMA2_7B, "Llama 2 7B", 1, 128, 16), (LLAMA2_7B, "Llama 2 7B", 1, 2048, 133),
         (LLAMA2_70B, "Llama 2 70B", 4, 128, 47), (LLAMA2_70B, "Llama 2 70B", 4, 2048, 377))  # fmt: skip
"""(shape, name, ranks, tokens, milliseconds) of first tokens on A100s."""
ANSWERS = ((384, 128, 128, 5586), (60, 128, 2048, 1928), (52, 2048, 128, 591))
"""(sequences, tokens of a prompt, of an answer, tokens per second) of Llama 2 7B on an A100."""


def published_rows() -> Iterator[Row]:
    """Collectives and engines of others, in ``float16`` or ``bfloat16``."""
    yield from _published_collectives()
    power = "power limited to 330 W, without a full mesh of links"
    a100 = parse_cluster("8xA100-80GB")
    configs = {
        "Llama 2 7B": config_of(LLAMA2_7B),
        "Llama 2 70B": config_of(LLAMA2_70B),
        "Mixtral 8x7B": MIXTRAL,
    }
    tokens_per_s = {
        "Llama 2 7B": {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43},
        "Llama 2 70B": {2: 21.32, 4: 38.01, 8: 62.5},
        "Mixtral 8x7B": {2: 78.75, 4: 118.23, 8: 203.69},
    }
    for name, by_tp in tokens_per_s.items():
        for tp, published in by_tp.items():
            _, work = works_of(configs[name], tp, 1, CONTEXT)
            rate = 1 / graph_seconds(work.fused.token, a100).total_s
            remark = f"{GPT_FAST}: {power}; its own all_reduce" if tp > 1 else f"{GPT_FAST}: {power}"
            yield Row(f"{name}, A100, tp {tp}, batch 1", rate, published, "tokens/s", remark)
    for shape, name, tp, length, published in FIRST:
        _, work = works_of(config_of(shape), tp, 1, length)
        seconds = graph_seconds(work.fused.prefill, a100).total_s
        remark = f"{TENSORRT}: an engine without Python, so predicted as in a graph"
        yield Row(f"{name}, A100, tp {tp}, first token of {length:,}", 1e3 * seconds, published, "ms", remark)
    for batch, prompt, answer, published in ANSWERS:
        _, first = works_of(config_of(LLAMA2_7B), 1, batch, prompt)
        _, middle = works_of(config_of(LLAMA2_7B), 1, batch, prompt + answer // 2)
        seconds = graph_seconds(first.fused.prefill, a100).total_s
        seconds += answer * graph_seconds(middle.fused.token, a100).total_s
        label = f"Llama 2 7B, A100, tp 1, batch {batch}, {prompt:,} + {answer:,} tokens"
        yield Row(label, batch * answer / seconds, published, "tokens/s", f"{TENSORRT}: a static batch")


def _published_collectives() -> Iterator[Row]:
    """Bandwidths of nccl-tests ("busbw") for large tensors."""

    def busbw(text: str, ranks: int, between: float | None = None) -> float:
        cluster = parse_cluster(text)
        if between is not None:
            link = replace(cluster.device.between, bandwidth=between)
            cluster = replace(cluster, device=replace(cluster.device, between=link))
        work = CollectiveWork("all_reduce", tuple(range(ranks)), 1 << 33)
        return 2 * (ranks - 1) / ranks * work.num_bytes / collective_seconds(work, cluster) / 1e9

    tests = "https://github.com/NVIDIA/nccl-tests/issues"
    yield Row(
        "all_reduce, 8 H100", busbw("8xH100", 8), 476, "GB/s",
        f"[nccl-tests]({tests}/290): the switch adds (NVLink SHARP), which a ring does not",
    )  # fmt: skip
    yield Row(
        "all_reduce, 8 A100", busbw("8xA100-80GB", 8), 240, "GB/s",
        "[230 to 250](https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests)",
    )  # fmt: skip
    yield Row(
        "all_reduce, 3 hosts of 8 A100, 4 adapters of 200 Gb/s each", busbw("3x8xA100-40GB", 24, 12.5e9), 96,
        "GB/s", f"[nccl-tests]({tests}/119): adapters reach 96% of their rate, here 80% are assumed",
    )  # fmt: skip


def write_page(page: Path, cpu: Path, names: Sequence[str]) -> None:
    """Write these tables between their marks in the page."""
    tables = {
        "gpu": lambda: table(list(gpu_rows())),
        "cpu": lambda: cpu_text(cpu),
        "published": lambda: table(list(published_rows()), "published"),
    }
    for name in names:
        body = tables[name]()
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        content, count = marks.subn(lambda match, body=body: f"{match[1]}{body}{match[2]}", page.read_text())
        assert count == 1, f"{page} has no marks for {name}"
        page.write_text(content)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="Rounds of measurements of this machine.")
    parser.add_argument(
        "--cpu", type=Path, required=True, help="File of measured times, which rounds add to."
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--tables", nargs="*", default=("gpu", "cpu", "published"), help="Tables to write.")
    options = parser.parse_args()
    if options.rounds:
        measure_cpu(options.rounds, options.cpu)
    write_page(options.page, options.cpu, options.tables)


if __name__ == "__main__":
    main()
