"""The server's counts, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counts of one server."""

    def __init__(self) -> None:
        self.num_running = 0
        self._registry = CollectorRegistry()

        def made(kind: Any, name: str, about: str, **options: Any) -> Any:
            return kind(f"shardconv_{name}", about, registry=self._registry, **options)

        running = made(Gauge, "requests_running", "Requests that are answered or wait")
        running.set_function(lambda: self.num_running)
        self._requests = made(Counter, "requests", "Requests that were taken")
        self._prompt_tokens = made(Counter, "prompt_tokens", "Tokens of prompts")
        self._cached_tokens = made(
            Counter, "cached_prompt_tokens", "Tokens of prompts that were in the cache from other requests"
        )
        self._new_tokens = made(Counter, "new_tokens", "Tokens of answers")
        self._first = made(
            Histogram, "first_token_seconds", "From a request to its first token", buckets=_SECONDS
        )
        self._next = made(Histogram, "next_token_seconds", "From one token to the next", buckets=_SECONDS)

    def watch_cache(self, use: Callable[[], float | None]) -> None:
        """Tell the share of the cache that is in use, if the manager does."""
        if use() is not None:
            about = "Share of the cache that requests hold"
            Gauge("shardconv_cache_use", about, registry=self._registry).set_function(lambda: use() or 0.0)

    @contextmanager
    def running(self, num_prompt_tokens: int) -> Iterator[None]:
        """Count a request as running within this context."""
        self._requests.inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def prompt_was_cached(self, count: int) -> None:
        """Count tokens of a prompt that were in the cache."""
        self._cached_tokens.inc(count)

    def tokens_came(self, count: int, seconds: float, *, is_first: bool) -> None:
        """Count tokens of an answer, and the time since the tokens before them or since the request."""
        self._new_tokens.inc(count)
        if count:
            (self._first if is_first else self._next).observe(seconds / (1 if is_first else count))

    def text(self) -> bytes:
        """Return the text of all counts."""
        return generate_latest(self._registry)
