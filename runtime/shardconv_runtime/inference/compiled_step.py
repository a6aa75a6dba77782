"""A compiled function that is called again and again with the same objects, whose guards hold meanwhile.

Dynamo evaluates the guards of a graph before each call: of a deep model, most of what a token costs the
host. ``torch.compiler.set_stance(skip_guard_eval_unsafe=True)`` would leave them out, but for all threads of
the process, and where a function has several graphs it may then take the wrong one. Here the graph whose
guards hold is looked up once, and its code is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
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

    def without_guards(self, *args: Any) -> Callable[[], None] | None:
        """The function for these arguments, as long as nothing changes that guards look at.

        They look at what is Python: modules, shapes, types, modes of torch. Values of tensors are free.

        Returns:
            None if there is no graph whose guards hold now.
        """
        code = self._function.__code__
        given = dict(zip(code.co_varnames, args, strict=False))
        # Private, but nothing public tells which graph a call would run.
        for entry in _debug_get_cache_entry_list(code):
            if not entry.code.co_freevars and entry.guard_manager.check(given):
                # The names of the graph are among the globals; in a copy they outlive torch._dynamo.reset().
                return partial(FunctionType(entry.code, {**self._function.__globals__}), *args)
        return None
