"""Modes of torch in which functions run, whatever their caller has set."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_default_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Call a function outside of inference mode, and with the CPU as the default device.

    A script that begins with ``torch.set_default_device("cuda")``, or that loads its model in inference mode,
    would have tensors made on the wrong device, or such that nothing may be written to them.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        torch = sys.modules.get("torch")  # as long as it is not imported, nothing can be set
        with ExitStack() as modes:
            if torch is not None and torch.is_inference_mode_enabled():
                modes.enter_context(torch.inference_mode(False))
            if torch is not None and torch.get_default_device().type != "cpu":
                modes.enter_context(torch.device("cpu"))
            return function(*args, **kwargs)

    return called


@contextmanager
def in_one_thread() -> Iterator[None]:
    """Compute in this thread alone: operators start no threads of their own, and wait for none."""
    torch = sys.modules["torch"]  # see above; who computes has imported it
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)
