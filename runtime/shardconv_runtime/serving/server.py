"""The server: each rank loads its part, and rank 0 listens until it is told to end or a rank fails."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from transformers import AutoProcessor, AutoTokenizer, ContinuousBatchingConfig

from ..comm.agreement import exchange
from ..comm.launchers import WATCH_S, end_with_launcher, env_int
from ..errors import OptionError, ShardconvError, brief
from ..hub_options import Hub
from ..loaded import loaded
from ..loading.load import load
from ..openai_api.call_syntax import call_syntax, content_marks
from ..openai_api.response_templates import ResponseTemplate, template_of_file, template_of_tokenizer
from ..openai_api.schemas import Sampling
from .answers import AnswerOptions, Served, answer, end_tokens
from .bounded_calls import BoundedCalls, ForkServer
from .embedding_endpoints import ServedEmbeddings, embedding_application
from .embedding_ranks import EmbeddingRanks
from .endpoints import application
from .grammars import COMPILE_AT_A_TIME, COMPILE_S, PACKAGE, Grammars, prepare_calls
from .media import Images
from .outside_batch import OutsideBatch
from .prompts import PROMPT_S, PROMPTS_AT_A_TIME
from .request_sampling import default_sampling, processor_of, serving_config

V = TypeVar("V")
CPU_BLOCKS = 128
"""Blocks of the cache on a CPU by default: if all ranks took the free memory, each would take all."""
DRAIN_S = 15
"""How long requests may take that are answered when the server is told to end."""
END_S = 24
"""How long a process may live then: orchestrators kill after 30 s, and the launcher ends after its ranks."""


def serve_rank(arguments: argparse.Namespace) -> None:
    """Load this rank's part, and answer requests together with the others."""
    template = None
    if env_int("RANK", 0) == 0:
        require_free_port(arguments.host, arguments.port)
        template = template_of_file(arguments.response_template) if arguments.response_template else None
    with ExitStack() as stack:
        # Before threads and CUDA's state exist, which a forked process must not have.
        fork_server = stack.enter_context(closing(ForkServer())) if env_int("RANK", 0) == 0 else None
        _run_rank(arguments, fork_server, template)


def require_free_port(host: str, port: int) -> None:
    """Check, before a model is loaded, that a server can listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OptionError(
                f"the server cannot listen at {host}:{port} ({error.strerror}); give another --port or --host"
            ) from error


def _run_rank(
    arguments: argparse.Namespace, fork_server: ForkServer | None, template: ResponseTemplate | None
) -> None:
    end_with_launcher()
    # transformers would set it itself, too late for NCCL, and warn.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    model = load(arguments.out, hub=Hub(cache_dir=arguments.cache_dir))
    directory = loaded(model).directory
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ShardconvError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
    if not hasattr(model, "generate"):
        _embed(model, tokenizer, arguments, fork_server)
        return
    # On all ranks, before they wait: a config that cannot be granted ends each of them.
    defaults = default_sampling(model.generation_config, frozenset(arguments.ignore))
    compiler_calls = prompt_calls = None
    if fork_server is not None:
        compiler_calls = BoundedCalls(fork_server, COMPILE_S, COMPILE_AT_A_TIME, keeps_processes=False)
        prompt_calls = BoundedCalls(fork_server, PROMPT_S, PROMPTS_AT_A_TIME, keeps_processes=True)
    grammars = grammars_of(model, tokenizer, compiler_calls)
    require_same_grammars(model, grammars)
    if fork_server is not None:
        image_processor = _image_processor(directory)
        tokens = grammars.tokens if grammars else (0, None)
        ready = None if isinstance(image_processor, str) else image_processor
        fork_server.prepare(prepare_calls, tokenizer, *tokens, ready)
    pages = ContinuousBatchingConfig(
        num_blocks=arguments.num_blocks or (CPU_BLOCKS if model.device.type == "cpu" else None),
        max_batch_tokens=arguments.max_batch_tokens,
        per_request_processors=True,
    )
    managing = model.continuous_batching_context_manager(
        serving_config(model.generation_config), continuous_batching_config=pages
    )
    with ExitStack() as stack, managing as manager:
        told = leave_signals_to_rank_0()
        processor = processor_of(manager)  # on all ranks: another one would choose other tokens
        processor.is_with_rank_0 = loaded(model).plan.stages is None
        processor.grammars = grammars
        if not processor.is_with_rank_0:
            processor.failed_rows = {}
            manager.failures = processor
        outside = None
        if processor.is_with_rank_0 and hasattr(manager, "pause"):  # not in transformers 5.17
            outside = OutsideBatch(model, manager, processor.of_other_requests())
            outside.start()
            stack.callback(outside.close)
        if fork_server is not None:
            text_config = model.config.get_text_config(decoder=True)
            template = template or template_of_tokenizer(tokenizer)
            written: dict[str, Any] = {}
            if template is not None:
                ends = sorted(end_tokens(model.generation_config.eos_token_id))
                about = template, tokenizer, tuple(filter(None, tokenizer.convert_ids_to_tokens(ends)))
                written["call_syntax"] = _or_reason(call_syntax, *about)
                written["content_marks"] = _or_reason(content_marks, *about)
            served = Served(
                manager,
                tokenizer,
                arguments.name or Path(arguments.out).resolve().name,
                text_config.vocab_size,
                getattr(text_config, "max_position_embeddings", None),
                model.generation_config.eos_token_id,
                arguments.max_requests,
                processor,
                grammars,
                processor.is_with_rank_0,
                compiler_calls,
                prompt_calls,
                response_template=template,
                **written,
                cached_tokens=manager.count_cached_tokens(),
                images=_images(image_processor, outside, prompt_calls, arguments.allow_media_domains),
                outside=outside,
            )
            serve(served, defaults, arguments, told, fork_server)


def _image_processor(directory: Path) -> Any:
    """Return the model's processor for images, or why there is none."""
    if not any((directory / name).exists() for name in ("processor_config.json", "preprocessor_config.json")):
        return Served.images
    if importlib.util.find_spec("PIL") is None:
        return "pillow is not installed there (pip install pillow)"
    try:
        image_processor = AutoProcessor.from_pretrained(str(directory), local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        return f"the model's processor cannot be loaded: {brief(error)}"
    return image_processor if hasattr(image_processor, "image_processor") else Served.images


def _images(
    image_processor: Any, outside: OutsideBatch | None, calls: BoundedCalls | None, domains: list[str]
) -> Images | str:
    """Return the object that makes inputs of images, or why there is none."""
    if isinstance(image_processor, str):
        return image_processor
    if outside is None or calls is None:
        return "the model has pipeline stages, or its transformers is 5.17, whose batches cannot pause"
    return Images(calls, frozenset(domains))


def _or_reason(make: Callable[..., V], *args: Any) -> V | str:
    """Return the value of a function, or why there is none."""
    try:
        return make(*args)
    except ValueError as error:
        return str(error)


def _embed(model: Any, tokenizer: Any, arguments: argparse.Namespace, fork_server: ForkServer | None) -> None:
    """Answer requests for embeddings together with the other ranks."""
    ranks = EmbeddingRanks(model, arguments.pooling, tokenizer.pad_token_id or 0, loaded(model).launch)
    ranks.require_hidden_states()
    if fork_server is not None:
        fork_server.prepare(prepare_calls, tokenizer, 0, None)
    told = leave_signals_to_rank_0()
    if fork_server is None:
        ranks.follow()
        return
    text_config = model.config.get_text_config()
    served = ServedEmbeddings(
        ranks,
        tokenizer,
        arguments.name or Path(arguments.out).resolve().name,
        text_config.vocab_size,
        min(tokenizer.model_max_length, getattr(text_config, "max_position_embeddings", 2**31)),
        arguments.max_requests,
        BoundedCalls(fork_server, PROMPT_S, PROMPTS_AT_A_TIME, keeps_processes=True),
    )
    ranks.start()
    with closing(ranks):
        app = embedding_application(served, arguments.api_key)
        _listen(app, served.name, arguments, told, ranks, fork_server)


def serve(
    served: Served,
    defaults: Sampling,
    arguments: argparse.Namespace,
    told: list[int],
    fork_server: ForkServer,
) -> None:
    """Listen, on rank 0, until the process is interrupted or the ranks fail."""
    manager = served.manager
    served.metrics.watch_cache(lambda: manager.cache_use)
    app = application(served, defaults, arguments.api_key)
    _listen(app, served.name, arguments, told, manager, fork_server, lambda: warm_up(served))
    if any_left := served.metrics.num_running:
        print(f"{any_left} requests were not answered in {DRAIN_S} s", file=sys.stderr)


def _listen(
    app: Any,
    name: str,
    arguments: argparse.Namespace,
    told: list[int],
    ranks: Any,
    fork_server: ForkServer,
    begin: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve an application until the process is interrupted, or ``ranks`` do not run."""
    config = uvicorn.Config(
        app, arguments.host, arguments.port, log_level="warning", timeout_graceful_shutdown=DRAIN_S, ws="none"
    )
    server = _Server(config)
    server.address = f"http://{arguments.host}:{arguments.port}/v1, as {name}"

    async def run() -> None:
        if begin is not None:
            await begin()
        if told:
            return
        watching = asyncio.create_task(watch(ranks, server, fork_server))
        await server.serve()
        watching.cancel()

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING, force=True)
    asyncio.run(run())


class _Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's server, which says when it is ready, and ends in time."""

    address = ""
    """Where clients reach it, as text."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; it does not return an error but ends if the port is in use."""
        await super().startup(sockets)
        if not self.should_exit:
            print(f"ready at {self.address}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn."""
        end_in_time()
        super().handle_exit(sig, frame)


def grammars_of(model: Any, tokenizer: Any, calls: BoundedCalls | None = None) -> Grammars | None:
    """Return the grammars for JSON schemas in answers; None if ``response_format`` must be refused.

    That takes xgrammar, a token that ends an answer, and a tokenizer that xgrammar knows.
    """
    ends = end_tokens(model.generation_config.eos_token_id)
    if not ends or importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        return Grammars(tokenizer, model.config.get_text_config(decoder=True).vocab_size, ends, calls)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        logging.getLogger(__name__).warning("answers cannot follow JSON schemas: xgrammar: %s", brief(error))
        return None


def require_same_grammars(model: Any, grammars: Grammars | None) -> None:
    """Check that all ranks follow schemas alike: they get the compiled ones from rank 0."""
    versions = exchange(loaded(model).launch, None if grammars is None else version(PACKAGE))
    if len(set(versions)) > 1:
        raise ShardconvError(
            f"the ranks have different versions of {PACKAGE}: {', '.join(str(each) for each in versions)}; "
            "install the same one on all hosts, or none"
        )


async def warm_up(served: Any) -> None:
    """Answer a request, so that the first client does not wait for one-time work."""
    async for _ in answer(served, [0], AnswerOptions(1, Sampling(temperature=0.0))):
        pass


async def watch(manager: Any, server: Any, fork_server: ForkServer) -> None:
    """End the server when its manager does not run, or the process that forks others for calls."""
    while manager.is_running() and fork_server.is_running():
        await asyncio.sleep(WATCH_S)
    server.should_exit = True


def leave_signals_to_rank_0() -> list[int]:
    """Have no process end by a signal that torchrun sends to all: rank 0 needs the others to finish.

    The server of rank 0 handles these signals while it runs, and sends them once more when it has ended.

    Returns:
        The signals that come, as they do.
    """
    told: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        told.append(number)
        end_in_time()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hear)
    return told


def end_in_time() -> None:
    """End this process if it does not end itself in ``END_S``."""

    def end() -> None:
        print(f"error: the rank did not end in {END_S} s", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(END_S, end)
    timer.daemon = True
    timer.start()
