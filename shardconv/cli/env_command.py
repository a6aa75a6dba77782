"""The command that describes this machine, for reports of problems."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping

import click
from shardconv_runtime.versions import __version__

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
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        packages=packages,
        backends=tuple(name for name in backends if dist.is_backend_available(name)),
        cuda=torch.version.cuda,
        nccl=_nccl_version() if gpus else None,
        gpus=tuple(gpus),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


@click.command("env")
@json_option
@loudness_options
def env_command(as_json: bool, quiet: bool, verbose: bool) -> None:
    """Show versions, GPUs and settings, for a report of a problem.

    \b
    Example:
      shardconv env
    """
    with working(quiet, verbose):
        environment_rows = environment()
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
