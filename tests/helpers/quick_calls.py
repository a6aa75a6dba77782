"""Calls that take most of a tiny conversion, and whose outcome no test can see, are made short.

A test cannot crash the machine: what a process wrote is there when it is killed, synced or not. Processes
that start a new interpreter sync as always. The calls are replaced when this module is imported.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.metadata
import os
from collections import OrderedDict
from typing import Any

real_fsync = os.fsync
real_unfreeze = gc.unfreeze


def _check(handle: int) -> None:
    """Refuse what ``os.fsync`` would refuse."""
    os.fstat(handle)


os.fsync = os.fdatasync = _check
# The metadata of a distribution is parsed anew each time, and does not change while tests run.
importlib.metadata.version = functools.cache(importlib.metadata.version)


def _stay_frozen() -> None:
    """Leave frozen what the solver has frozen; ``conftest.py`` thaws it when garbage has piled up.

    Else the million objects that were imported are in every search for garbage, which then takes a quarter of
    a second, and simulated ranks ask for dozens.
    """


gc.unfreeze = _stay_frozen


def _copied(given: OrderedDict[Any, Any], memo: dict[int, Any]) -> OrderedDict[Any, Any]:
    """What ``copy.deepcopy`` makes, in a tenth of the time where it is empty: a module has a dozen for its
    hooks, and each simulated rank gets a copy of the model."""
    made: OrderedDict[Any, Any] = OrderedDict()
    memo[id(given)] = made
    for key, value in given.items():
        made[copy.deepcopy(key, memo)] = copy.deepcopy(value, memo)
    if vars(given):
        vars(made).update(copy.deepcopy(vars(given), memo))
    return made


copy._deepcopy_dispatch[OrderedDict] = _copied  # type: ignore[attr-defined]
