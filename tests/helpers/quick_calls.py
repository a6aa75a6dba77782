"""Calls that take most of a tiny conversion, and whose outcome no test can see, are made short.

A test cannot crash the machine: what a process wrote is there when it is killed, synced or not. Processes
that start a new interpreter sync as always. The calls are replaced when this module is imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os

real_fsync = os.fsync


def _check(handle: int) -> None:
    """Refuse what ``os.fsync`` would refuse."""
    os.fstat(handle)


os.fsync = os.fdatasync = _check
# The metadata of a distribution is parsed anew each time, and does not change while tests run.
importlib.metadata.version = functools.cache(importlib.metadata.version)
