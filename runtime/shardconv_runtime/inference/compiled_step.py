"""A compiled function that is called again and again with the same objects, whose guards hold meanwhile.

Dynamo evaluates the guards of a graph before each call: of a deep model, most of what a token costs the
host. ``torch.compiler.set_stance(skip_guard_eval_unsafe=True)`` would leave them out, but for all threads of
the process, and where a function has several graphs it may then take the wrong one. Here the graph whose
guards hold is looked up once, and its code is called.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from torch._dynamo.eval_frame import _debug_get_cache_entry_list


class CompiledStep:
    """A compiled function.

    Args:
        function: of positional arguments, without a closure.
        compile: makes one graph of a function.
    """

    def __init__(self, function: Callable[..., None], compile: Callable[[Any], Any]) -> None:
        assert isinstance(function, FunctionType)
        # Dynamo keeps graphs by code object: with one of its own, there are none of other models among them.
        self._function = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        self._compiled = compile(self._function)

    def __call__(self, *args: Any) -> None:
        """Evaluates the guards; captures a graph if those of no other one hold."""
        self._compiled(*args)

    def captured(self, *args: Any) -> CapturedStep | None:
        """The graph whose guards hold for these arguments now; None if there is none."""
        # Private, but nothing public tells which graph a call would run.
        for entry in _debug_get_cache_entry_list(self._function.__code__):
            found = CapturedStep(self._function, entry.code, entry.guard_manager)
            if not entry.code.co_freevars and found.holds(*args):
                return found
        return None


class CapturedStep:
    """One graph of a compiled function; calls evaluate no guards.

    Guards look at what is Python: modules, shapes, types, modes of torch. Values of tensors are free.
    """

    def __init__(self, function: FunctionType, code: CodeType, guards: Any) -> None:
        # The names of the graph are among the globals; in a copy they outlive torch._dynamo.reset().
        self._function = FunctionType(code, {**function.__globals__})
        self._names = function.__code__.co_varnames
        self._guards = guards

    def holds(self, *args: Any) -> bool:
        """Whether the guards hold."""
        return bool(self._guards.check(dict(zip(self._names, args, strict=False))))

    def __call__(self, *args: Any) -> None:
        """Run the graph."""
        self._function(*args)
