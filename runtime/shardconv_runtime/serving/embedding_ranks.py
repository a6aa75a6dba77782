"""Embeddings of texts by a model without generation: rank 0 has the texts, and all ranks compute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ..comm.agreement import exchange
from ..comm.mesh import Launch
from ..comm.rank_0 import from_rank_0
from ..errors import LaunchError, UnsupportedError, brief

V = TypeVar("V")
Pooling = Literal["mean", "first", "last"]
MOST_ROWS = 64
MOST_BATCH_TOKENS = 16_384
"""Most tokens of a batch, padding included."""
Waiting = tuple[list[int], "Future[list[float]]"]


@dataclass
class EmbeddingRanks:
    """One rank of a model that gives hidden states.

    Attributes:
        pooling: an embedding is the mean of all hidden states, or the state of the first or last token.
        launch: the ranks.
        failure: the error with which rank 0 has ended.
    """

    model: Any
    pooling: Pooling
    pad_token: int
    launch: Launch
    failure: BaseException | None = None
    _waiting: queue.Queue[Waiting | None] = field(default_factory=queue.Queue)
    _thread: threading.Thread | None = None

    def require_hidden_states(self) -> None:
        """Check on all ranks that the model has the outputs that become embeddings; also the first call."""
        outputs = self._outputs([[self.pad_token]])
        if getattr(outputs, "last_hidden_state", None) is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} neither generates text nor returns last_hidden_state, of which "
                "embeddings are made; serve a checkpoint whose architecture has no head"
            )

    def follow(self) -> None:
        """Compute with rank 0 on another rank, until rank 0 ends."""
        while (rows := from_rank_0(lambda: None, self.launch.group)) is not None:
            self._attempt(rows)

    def start(self) -> None:
        """Begin to compute on rank 0."""
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End on all ranks."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()

    def is_running(self) -> bool:
        """Return whether rank 0 computes."""
        return self.failure is None and self._thread is not None and self._thread.is_alive()

    def add(self, tokens: list[int]) -> Future[list[float]]:
        """Return the embedding of a text as soon as it is computed."""
        future: Future[list[float]] = Future()
        self._waiting.put((tokens, future))
        return future

    def _compute(self) -> None:
        batch: list[Waiting] = []
        try:
            while (first := self._waiting.get()) is not None:
                batch = self._batch(first)
                embeddings = self._attempt(self._shared([tokens for tokens, _ in batch]))
                for index, (_, future) in enumerate(batch):
                    if isinstance(embeddings, Tensor):
                        future.set_result(embeddings[index].tolist())
                    else:
                        future.set_exception(embeddings)
            self._shared(None)
        except BaseException as error:  # the server ends with it
            self.failure = error
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)

    def _shared(self, rows: V) -> V:
        """Send a batch to the other ranks, or None at the end."""
        return from_rank_0(lambda: rows, self.launch.group)

    def _attempt(self, rows: Sequence[Sequence[int]]) -> Tensor | Exception:
        """Return the embeddings of texts, or the error that all ranks have."""
        result: Tensor | Exception
        try:
            result = self._embeddings(rows)
        except Exception as error:
            result = error
        errors = exchange(self.launch, brief(result) if isinstance(result, Exception) else None)
        if any(each is None for each in errors) and any(errors):
            raise LaunchError(f"some ranks only have an error: {next(filter(None, errors))}")
        return result

    def _batch(self, first: Waiting) -> list[Waiting]:
        """Return the first text and others that wait, as many as are computed at a time."""
        batch, longest = [first], len(first[0])
        while len(batch) < MOST_ROWS:
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                break
            if item is None or max(longest, len(item[0])) * (len(batch) + 1) > MOST_BATCH_TOKENS:
                self._waiting.put(item)
                break
            batch.append(item)
            longest = max(longest, len(item[0]))
        return batch

    def _outputs(self, rows: Sequence[Sequence[int]]) -> Any:
        longest = max(map(len, rows))
        ids = [[*row, *[self.pad_token] * (longest - len(row))] for row in rows]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        with torch.inference_mode():
            return self.model(
                input_ids=torch.tensor(ids, device=self.model.device),
                attention_mask=torch.tensor(mask, device=self.model.device),
            )

    def _embeddings(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the embeddings of texts, ``[B, H]``."""
        if self.model.device.type == "cuda":  # which each thread has of its own
            torch.cuda.set_device(self.model.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.model.device)
        return pooled(self._outputs(rows).last_hidden_state, lengths, self.pooling)


def pooled(hidden: Tensor, lengths: Tensor, pooling: Pooling) -> Tensor:
    """Return embeddings of length 1, ``[B, H]``.

    Args:
        hidden: hidden states ``[B, S, H]``.
        lengths: numbers of tokens ``[B]``; padding is behind them.
    """
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if pooling == "first":
        chosen = hidden[:, 0]
    elif pooling == "last":
        chosen = hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1]
    else:
        mask = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
        chosen = torch.where(mask[:, :, None], hidden, 0).sum(1) / lengths[:, None]
    return torch.nn.functional.normalize(chosen, dim=-1)
