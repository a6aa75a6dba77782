"""Which caches module calls are given, and what is written to them, while a model is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache

from .recorder import Recorder
from .tape import CacheUpdate, Ref

_UPDATES = tuple(name for name in vars(Cache) if name.startswith("update"))
"""Methods that write what one layer computed."""


def caches_in(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Cache]]:
    """(argument, attribute, cache) of each cache among arguments, or of each that such a one consists of."""
    for name, value in arguments.items():
        if isinstance(value, Cache):
            parts = [(key, part) for key, part in vars(value).items() if isinstance(part, Cache)]
            yield from ((name, key, part) for key, part in parts or [("", value)])


class GivenCaches:
    """The caches that the running module calls were given."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._given: dict[int, list[tuple[str, str, Cache]]] = {}

    def enter(self, call: int, arguments: Mapping[str, Any]) -> None:
        """A module is called."""
        self._given[call] = list(caches_in(arguments))
        if self._given[call]:
            self._recorder.tape.given_caches.add(call)

    def note(self, cache: Cache, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A cache is about to be written to."""
        recorder = self._recorder
        if recorder.is_paused:
            return
        givers = {
            call: (name, attribute)
            for call in recorder.stack
            for name, attribute, given in self._given.get(call, ())
            if given is cache
        }
        with torch._C.DisableTorchFunction():
            plain = tuple(self._plain(a) for a in args), {k: self._plain(v) for k, v in kwargs.items()}
        recorder.tape.cache_updates.append(CacheUpdate(recorder.call(), method, *plain, givers))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self._recorder.identities.tid(value))
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


@contextmanager
def watching_caches(given: GivenCaches) -> Iterator[None]:
    """Note every update of a cache of transformers' own kinds."""
    before = {name: vars(Cache)[name] for name in _UPDATES}
    for name, method in before.items():
        setattr(Cache, name, _noted(given, name, method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Cache, name, method)


def _noted(given: GivenCaches, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def update(self: Cache, *args: Any, **kwargs: Any) -> Any:
        given.note(self, name, args, kwargs)
        return method(self, *args, **kwargs)

    return update
