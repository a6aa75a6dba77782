"""The errors of collectives when another rank has ended, in our words."""

from __future__ import annotations

import torch.distributed as dist

from ..comm.mesh import Launch
from ..errors import LaunchError

_SIGNS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Socket Timeout", "Broken pipe")
"""In messages of gloo, which raises a RuntimeError."""


def raise_lost_rank(error: RuntimeError, start: Launch) -> None:
    """Raises ``LaunchError`` if a collective failed because of another rank; returns for other errors."""
    if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _SIGNS):
        return
    first = next(iter(str(error).splitlines()), type(error).__name__)
    raise LaunchError(
        f"rank {start.rank}: another rank ended, or did not answer, during generate; its own output says why "
        f"({first})"
    ) from error
