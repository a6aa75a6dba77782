"""Whether each rank has a GPU of its own, without which nccl does not communicate."""

from __future__ import annotations

import socket

import torch

from ..errors import LaunchError
from .agreement import exchange
from .mesh import Launch, can_capture


def require_own_gpus(start: Launch) -> None:
    """Compare the GPUs of ranks that communicate over nccl; every rank calls it.

    Raises:
        LaunchError: two of them are the same.
    """
    if start.world_size > 1 and can_capture(start):
        error = shared_gpu_error(exchange(start, describe_gpu(start.device)))
        if error is not None:
            raise error


def describe_gpu(device: torch.device) -> tuple[str, str]:
    """The host and the identity of a GPU, which does not depend on ``CUDA_VISIBLE_DEVICES``."""
    properties = torch.cuda.get_device_properties(device)
    return socket.gethostname(), str(properties.uuid)


def shared_gpu_error(gpus: list[tuple[str, str]]) -> LaunchError | None:
    """The error of two ranks that would use one GPU, None without such.

    Args:
        gpus: ``describe_gpu`` of each rank.
    """
    first: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gpus):
        if first.setdefault(gpu, rank) != rank:
            host, identity = gpu
            return LaunchError(
                f"ranks {first[gpu]} and {rank} use the same GPU ({identity} on {host}), and nccl needs one "
                "for each rank; let each process see or bind its own (CUDA_VISIBLE_DEVICES, "
                "torch.cuda.set_device, load(device=)), or start the group with gloo"
            )
    return None
