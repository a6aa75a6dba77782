"""The server: each rank loads its part, and rank 0 listens until it is told to end or a rank fails."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvicorn
from torch import Tensor
from transformers import AutoTokenizer, ContinuousBatchingConfig

from ..errors import ShardconvError, brief
from ..loaded import loaded
from ..loading.load import load
from .answers import AnswerOptions, Served, answer, end_tokens
from .endpoints import application
from .request_sampling import default_sampling, processor_of, serving_config
from .schemas import BadRequest, Sampling

# JSON schemas that answers have to follow: compiled by xgrammar, followed token by token on every rank.


PACKAGE = "xgrammar"
MOST_CHARACTERS = 65_536
"""Most characters of a schema."""
MOST_SPACES = 8
"""Most spaces between two parts of an answer."""


class Grammars:
    """The grammars of one model's tokens.

    Args:
        tokenizer: a tokenizer of transformers.
        vocabulary_size: number of logits.
        ends: tokens that end an answer, which are all that is left when it is complete.

    Raises:
        ImportError: xgrammar is not installed.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int, ends: Iterable[int]) -> None:
        import xgrammar  # an extra

        self._library = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary_size, stop_token_ids=sorted(ends)
        )
        self._compiler = xgrammar.GrammarCompiler(info)
        self._lock = threading.Lock()  # the server's thread checks schemas, the loop's follows them
        self._mask = xgrammar.allocate_token_bitmask(1, vocabulary_size)

    def require(self, schema: str) -> None:
        """Compile a schema, given as JSON, and keep it.

        Raises:
            BadRequest: it cannot be followed.
        """
        if len(schema) > MOST_CHARACTERS:
            raise BadRequest(f"the schema has more than {MOST_CHARACTERS} characters", "response_format")
        try:
            self._compiled(schema)
        except RuntimeError as error:
            reason = str(error).strip().rpartition(": ")[2][:200]
            raise BadRequest(f"the schema cannot be followed: {reason}", "response_format") from error

    def matcher(self, schema: str, answer: Iterable[int]) -> Any:
        """Return the object that follows a schema after the tokens of an answer so far."""
        matcher = self._library.GrammarMatcher(self._compiled(schema))
        for token in answer:
            matcher.accept_token(token)
        return matcher

    def allowed(self, scores: Tensor, matcher: Any) -> Tensor:
        """Return the scores ``[V]`` of the tokens that may come next; others have none."""
        if matcher.is_terminated() or not matcher.fill_next_token_bitmask(self._mask, 0):
            return scores
        found = scores[None].clone()
        self._library.apply_token_bitmask_inplace(found, self._mask.to(scores.device))
        return found[0]

    def _compiled(self, schema: str) -> Any:
        with self._lock:
            # Some models would go on with spaces forever.
            return self._compiler.compile_json_schema(schema, max_whitespace_cnt=MOST_SPACES)


WATCH_S = 0.5
"""How often the server looks whether the ranks still answer, and a rank whether its launcher lives."""
DRAIN_S = 20
"""How long requests may take that are answered when the server is told to end."""


def run_rank(arguments: argparse.Namespace) -> None:
    """Load this rank's part, and answer requests together with the others.

    Raises:
        ShardconvError: the model cannot be loaded or served, or a rank ended.
    """
    end_with_launcher()
    model = load(arguments.out)
    directory = loaded(model).directory
    # On all ranks, before they wait: a config that cannot be granted ends each of them.
    defaults = default_sampling(model.generation_config, frozenset(arguments.ignore))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ShardconvError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
    pages = ContinuousBatchingConfig(
        num_blocks=arguments.num_blocks,
        max_batch_tokens=arguments.max_batch_tokens,
        per_request_processors=True,
    )
    managing = model.continuous_batching_context_manager(
        serving_config(model.generation_config), continuous_batching_config=pages
    )
    with managing as manager:
        told = leave_signals_to_rank_0()
        processor = processor_of(manager)  # on all ranks: another one would choose other tokens
        processor.is_with_rank_0 = loaded(model).plan.stages is None
        processor.grammars = grammars_of(model, tokenizer)
        if manager.is_tp_driver:
            serve(manager, model, tokenizer, defaults, arguments, told)


def serve(
    manager: Any,
    model: Any,
    tokenizer: Any,
    defaults: Sampling,
    arguments: argparse.Namespace,
    told: list[int],
) -> None:
    """Listen, on rank 0, until the process is interrupted or the ranks fail.

    Args:
        told: signals that came before the server handled them.
    """
    processor = processor_of(manager)
    text_config = model.config.get_text_config(decoder=True)
    served = Served(
        manager,
        tokenizer,
        arguments.name or Path(arguments.out).resolve().name,
        text_config.vocab_size,
        getattr(text_config, "max_position_embeddings", None),
        model.generation_config.eos_token_id,
        arguments.max_requests,
        processor if processor.is_with_rank_0 else None,
        processor.grammars,
    )
    served.metrics.watch_cache(lambda: manager.cache_use)
    app = application(served, defaults, arguments.api_key)
    config = uvicorn.Config(
        app, arguments.host, arguments.port, log_level="warning", timeout_graceful_shutdown=DRAIN_S
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        await warm_up(served)
        if told:
            return
        print(f"serving {served.name} at http://{arguments.host}:{arguments.port}/v1", flush=True)
        watching = asyncio.create_task(watch(manager, server))
        await server.serve()
        watching.cancel()

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("shardconv_runtime.serving").setLevel(logging.INFO)
    asyncio.run(run())
    if any_left := served.metrics.num_running:
        print(f"{any_left} requests were not answered in {DRAIN_S} s", file=sys.stderr)


def grammars_of(model: Any, tokenizer: Any) -> Grammars | None:
    """Return the grammars for JSON schemas in answers; None if ``response_format`` must be refused.

    That takes xgrammar, a token that ends an answer, and a tokenizer that xgrammar knows.
    """
    ends = end_tokens(model.generation_config.eos_token_id)
    if not ends or importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        return Grammars(tokenizer, model.config.get_text_config(decoder=True).vocab_size, ends)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        logging.getLogger(__name__).warning("answers cannot follow JSON schemas: xgrammar: %s", brief(error))
        return None


async def warm_up(served: Any) -> None:
    """Answer a request, so that the first client does not wait for one-time work."""
    async for _ in answer(served, [0], AnswerOptions(1, Sampling(temperature=0.0))):
        pass


async def watch(manager: Any, server: Any) -> None:
    """End the server when its manager does not run."""
    while manager.is_running():
        await asyncio.sleep(WATCH_S)
    server.should_exit = True


def end_with_launcher() -> None:
    """End this process soon after torchrun, which otherwise would tell it to end."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # started by hand: it may outlive its shell
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        print("error: the launcher of this rank is gone; it ends", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def leave_signals_to_rank_0() -> list[int]:
    """Have no process end by a signal that torchrun sends to all: rank 0 needs the others to finish.

    The server of rank 0 handles these signals while it runs, and sends them once more when it has ended.

    Returns:
        The signals that come, as they do.
    """
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: told.append(number))
    return told
