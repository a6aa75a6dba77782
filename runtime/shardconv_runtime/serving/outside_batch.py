"""Requests that the batch cannot take, such as those with images: ``generate``, one at a time.

Rank 0 has the requests. For each, it pauses the loop of the batch, which all ranks do in the same step, and
sends the request. All ranks call ``generate`` and go on with the batch.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, StoppingCriteriaList

from ..errors import LaunchError, brief
from ..openai_api.schemas import Sampling
from .request_sampling import RequestProcessor

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A request, as all ranks get it.

    Attributes:
        inputs: arguments of ``generate``; ``input_ids`` are int64 ``[1, S]``.
    """

    name: str
    inputs: Mapping[str, Tensor]
    max_new_tokens: int
    ends: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class JobOutput:
    """The tokens of an answer so far, in the form of outputs of transformers' manager."""

    generated_tokens: list[int]
    is_last: bool = False
    error: str | None = None

    def is_finished(self) -> bool:
        """Return whether no more tokens come."""
        return self.is_last


@dataclass
class OutsideBatch:
    """Generates outside of the batch; made on all ranks, with requests on rank 0.

    Attributes:
        manager: the running manager of the batch.
        processor: chooses the tokens, with the notes that the answers of the batch have.
    """

    model: Any
    manager: Any
    processor: RequestProcessor
    _jobs: queue.Queue[tuple[Job, Callable[[JobOutput], None]] | None] = field(default_factory=queue.Queue)
    _canceled: set[str] = field(default_factory=set)
    _is_closed: bool = False

    def start(self) -> None:
        """Begin to answer requests on rank 0, and to follow it on other ranks."""
        if self.manager.is_tp_driver:
            threading.Thread(target=self._answer_requests, daemon=True).start()
        else:
            self.manager.follow_in_pauses(self._follow)

    def close(self) -> None:
        """Take no more requests, and end the one that is answered."""
        self._is_closed = True
        self._jobs.put(None)

    def add_request(self, job: Job, tell: Callable[[JobOutput], None]) -> None:
        """Add a request; its outputs are told in another thread."""
        self._jobs.put((job, tell))

    def cancel_request(self, name: str) -> None:
        """End a request."""
        self._canceled.add(name)

    def _answer_requests(self) -> None:
        while (item := self._jobs.get()) is not None and not self._is_closed:
            job, tell = item
            if job.name not in self._canceled:
                try:
                    with self.manager.pause():
                        self.manager.share_in_pause(job)
                        error, tokens = self._generate(job, tell)
                except Exception as fatal:  # the loop has ended, and the server ends with it
                    error, tokens = brief(fatal), []
                tell(JobOutput(tokens, is_last=True, error=error))
            self._canceled.discard(job.name)

    def _follow(self, job: Job) -> None:
        self._generate(job, lambda output: None)

    def _generate(self, job: Job, tell: Callable[[JobOutput], None]) -> tuple[str | None, list[int]]:
        """Return the tokens of an answer, or why there is none."""
        model = self.model
        if model.device.type == "cuda":  # which each thread has of its own
            torch.cuda.set_device(model.device)
        chooser = _Chooser(self.processor, job, tell)
        inputs = {
            name: value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
            for name, value in job.inputs.items()
        }
        # Instead of the model's, whose settings the chooser has already.
        config, model.generation_config = (
            model.generation_config,
            GenerationConfig(
                max_new_tokens=job.max_new_tokens,
                do_sample=False,
                eos_token_id=list(job.ends) or None,
                pad_token_id=job.ends[0] if job.ends else 0,
            ),
        )
        error = None
        try:
            with torch.inference_mode():
                model.generate(
                    **inputs,
                    logits_processor=[chooser],
                    stopping_criteria=StoppingCriteriaList([_Canceled(self, job.name)]),
                )
        except Exception as failure:
            LOG.exception("a request outside of the batch failed")
            error = brief(failure)
        finally:
            model.generation_config = config
        errors = self.manager.exchange_in_pause(error)
        if any(each is None for each in errors) and any(each is not None for each in errors):
            raise LaunchError(f"generate failed on some ranks only: {next(filter(None, errors))}")
        return error, chooser.tokens


class _Chooser(LogitsProcessor):  # type: ignore[misc]
    """Chooses the tokens of a job as those of the batch are chosen.

    Attributes:
        tokens: the answer so far.
    """

    def __init__(self, processor: RequestProcessor, job: Job, tell: Callable[[JobOutput], None]) -> None:
        self.tokens: list[int] = []
        self._processor = processor
        self._tell = tell
        prompt = job.inputs["input_ids"][0].tolist()
        self._state = SimpleNamespace(
            request_id=job.name,
            initial_tokens=prompt,
            generated_tokens=self.tokens,
            logit_processor_kwargs={"sampling": job.sampling, "num_prompt_tokens": len(prompt)},
        )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores ``[1, V]`` in which only the chosen token is left."""
        self._processor.prepare_tensor_args([SimpleNamespace(state=self._state)])
        left = self._processor(scores.float(), torch.zeros(1, dtype=torch.int32))
        self.tokens.append(int(left.argmax(-1)))
        self._tell(JobOutput(list(self.tokens)))
        return left


class _Canceled(StoppingCriteria):  # type: ignore[misc]
    """Whether nobody waits for an answer; rank 0 decides."""

    def __init__(self, outside: OutsideBatch, name: str) -> None:
        self._outside = outside
        self._name = name

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return whether to stop, bool ``[B]``."""
        is_over = self._outside._is_closed or self._name in self._outside._canceled
        return torch.full((input_ids.shape[0],), is_over, device=input_ids.device)
