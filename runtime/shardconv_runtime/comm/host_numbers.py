"""Random numbers that a model's code draws with numpy or with Python, not with torch."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

HostStates = tuple[dict[str, Any], tuple[Any, ...]]
"""States of the global generators of numpy and of Python."""


def host_states() -> HostStates:
    """Return the states of both generators."""
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict), "legacy=False"
    return state, random.getstate()


def set_host_states(states: HostStates) -> None:
    """Set the states of both generators."""
    np.random.set_state(states[0])
    random.setstate(states[1])


def digests(states: HostStates) -> tuple[bytes, bytes]:
    """Return the states as bytes, which are equal for equal states: numpy's and Python's."""
    return pickle.dumps(states[0]), pickle.dumps(states[1])


@contextmanager
def host_seed(seed: int) -> Iterator[None]:
    """Seed both generators; the caller's states are set back afterwards."""
    before = host_states()
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        set_host_states(before)
