"""The command that describes this machine, for reports of problems."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import click
from shardconv_runtime.format.typed_json import write_text
from shardconv_runtime.versions import __version__

from ..hardware.machines import devices_text, num_cores
from ..reporting.records import EnvReport, GpuReport
from ..reporting.summary import human_bytes
from .options import json_option, loudness_options, print_report, working

PACKAGES = (
    "torch",
    "transformers",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
    "numpy",
    "peft",
    "accelerate",
    "trl",
    "vllm",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "xgrammar",
    "bitsandbytes",
    "compressed-tensors",
    "gptqmodel",
    "torchao",
    "click",
)
"""Packages whose versions matter."""

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "SHARDCONV_CACHE",
    "MASTER_ADDR",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "SLURM_NTASKS",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""Environment variables that matter; none of them is secret."""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str:
    import torch  # see below

    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def environment() -> EnvReport:
    """Return the versions of the libraries, and the hardware of this machine."""
    import torch  # it takes seconds, and the help does not need it
    import torch.distributed as dist

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(GpuReport(properties.name, properties.total_memory))
    backends = ("gloo", "nccl", "mpi", "xccl")
    packages: Mapping[str, str | None] = {"shardconv": __version__} | {
        name: _version(name) for name in PACKAGES
    }
    return EnvReport(
        python=platform.python_version(),
        platform=platform.platform(),
        num_cpus=num_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        packages=packages,
        backends=tuple(name for name in backends if dist.is_backend_available(name)),
        cuda=torch.version.cuda,
        nccl=_nccl_version() if gpus else None,
        gpus=tuple(gpus),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


@click.command("env")
@click.option(
    "--measure",
    type=click.Path(dir_okay=False, writable=True),
    metavar="FILE",
    help="Measure the devices of this machine in about a minute, and write FILE for plan --hardware.",
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    metavar="N",
    help="Processes that --measure starts.  [default: one for each GPU, or for each core]",
)
@json_option
@loudness_options
def env_command(
    measure: str | None, processes: int | None, as_json: bool, quiet: bool, verbose: bool
) -> None:
    """Show versions, GPUs and settings, for a report of a problem.

    With --measure, it also measures memory, products, operators and collectives on all GPUs, or on the cores
    of a machine without any. Do this while nothing else runs.

    \b
    Examples:
      shardconv env
      shardconv env --measure machine.json
      shardconv plan org/name --tp 2 --hardware machine.json --on 2xCPU
    """
    if processes is not None and measure is None:
        raise click.UsageError("--processes is for --measure; add --measure FILE, or leave it out")
    with working(quiet, verbose) as progress:
        environment_rows = environment()
        if measure is not None:
            from ..hardware.measuring import measured_device  # it imports torch

            progress.stage("measuring this machine")
            text = devices_text([measured_device(processes)])
            write_text(Path(measure), text)
    if as_json:
        print_report(environment_rows)
        return
    gpus = [f"{gpu.name}, {human_bytes(gpu.num_bytes)}" for gpu in environment_rows.gpus]
    rows = [
        ("python", environment_rows.python),
        ("platform", environment_rows.platform),
        ("cpus", f"{environment_rows.num_cpus}, {human_bytes(environment_rows.memory_bytes)} of memory"),
        *((name, version) for name, version in environment_rows.packages.items() if version is not None),
        ("backends", ", ".join(environment_rows.backends)),
        ("cuda", environment_rows.cuda or "torch is built without it"),
        *((f"gpu {index}", gpu) for index, gpu in enumerate(gpus)),
        *environment_rows.variables.items(),
    ]
    for name, value in rows:
        click.echo(f"{name:<20}{value}")
    missing = [name for name, version in environment_rows.packages.items() if version is None]
    click.echo(f"{'not installed':<20}{', '.join(missing)}")


COMMANDS = (env_command,)
