"""Agents of torchrun, one for each host, whose ranks are forked: they need not import torch again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forked import Forked
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def fork_agent(main: Callable[..., Any], port: int, *args: Any, **options: Any) -> Forked:
    """An agent as torchrun starts it on each of two hosts, with two ranks that call ``main(*args)``.

    Args:
        main: what each rank runs.
        port: of the rendezvous, on this machine.
        args: of ``main``.
        options: more of ``LaunchConfig``.
    """
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        local_addr="127.0.0.1",
        start_method="fork",
        monitor_interval=0.1,
        **options,
    )
    return Forked(elastic_launch(config, main), *args)
