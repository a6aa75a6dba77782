"""Lets ``torch.compile`` capture graphs as always, and run them as they are, without generating code."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._dynamo


@dataclass
class Captured:
    """The number of graphs so far."""

    count: int = 0

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        """Runs what it is given as it is."""
        self.count += 1
        return graph.forward


@contextmanager
def capturing(found: Any = None) -> Iterator[Any]:
    """A context in which each ``torch.compile`` captures only: what ``found`` keeps, or ``Captured``."""
    found = Captured() if found is None else found
    compile_ = torch.compile

    @functools.wraps(compile_)
    def without_code(function: Any, *, mode: Any = None, options: Any = None, **others: Any) -> Any:
        return compile_(function, **others | {"backend": found.backend})

    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", without_code):
        yield found
