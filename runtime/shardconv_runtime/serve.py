"""Serve a converted model: ``torchrun --nproc-per-node 2 -m shardconv_runtime.serve OUT --port 8000``."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import signal
import sys
from pathlib import Path
from typing import Any

from .errors import ShardconvError
from .serving.client_requests import Sampling

WATCH_S = 0.5
"""How often the server looks whether the ranks still answer."""


def parse_arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node TP -m shardconv_runtime.serve",
        description="Serves a converted model to clients of OpenAI's API.",
    )
    parser.add_argument("out", metavar="OUT", help="directory that `shardconv convert` wrote")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--name", help="name of the model for clients; default: that of the directory")
    parser.add_argument(
        "--num-blocks", type=int, metavar="N", help="of the cache, of 256 tokens each; default: as fit"
    )
    parser.add_argument("--max-batch-tokens", type=int, metavar="N", help="most tokens of a step")
    return parser.parse_args()


def main() -> int:
    """Serve until the process is interrupted; the exit code."""
    arguments = parse_arguments()
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            print(f"error: serving needs {package}: pip install 'shardconv[serve]'", file=sys.stderr)
            return 2
    try:
        run_rank(arguments)
    except ShardconvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run_rank(arguments: argparse.Namespace) -> None:
    """Load this rank's part, and answer requests together with the others.

    Raises:
        ShardconvError: the model cannot be loaded or served, or a rank ended.
    """
    from transformers import AutoTokenizer, ContinuousBatchingConfig

    from .loaded import loaded
    from .loading.load import load

    model = load(arguments.out)
    directory = loaded(model).directory
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
        leave_signals_to_rank_0()
        if manager.is_tp_driver:
            serve(manager, model, tokenizer, arguments)


def serving_config(own: Any) -> Any:
    """A generation config with which each request says how its tokens are drawn.

    The values are no one's: those that ask for nothing would leave out the step, for all requests.

    Args:
        own: the generation config of the model.
    """
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=True, temperature=0.5, top_k=1, top_p=0.5, eos_token_id=own.eos_token_id or -1
    )


def default_sampling(own: Any) -> Sampling:
    """What the generation config of a model says, or else the API: all tokens, as they are likely."""
    temperature = 1.0 if own.temperature is None else own.temperature
    return Sampling(temperature, 1.0 if own.top_p is None else own.top_p, own.top_k or 0)


def serve(manager: Any, model: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
    """Listen, on rank 0, until the process is interrupted or the ranks fail."""
    import uvicorn

    from .serving.answers import Served
    from .serving.endpoints import application

    text_config = model.config.get_text_config(decoder=True)
    own = model.generation_config
    served = Served(
        manager,
        tokenizer,
        arguments.name or Path(arguments.out).resolve().name,
        text_config.vocab_size,
        getattr(text_config, "max_position_embeddings", None),
        own.eos_token_id,
    )
    app = application(served, default_sampling(own))
    config = uvicorn.Config(app, arguments.host, arguments.port, log_level="warning")
    server = uvicorn.Server(config)

    async def run() -> None:
        watching = asyncio.create_task(watch(manager, server))
        await server.serve()
        watching.cancel()

    print(f"serving {served.name} at http://{arguments.host}:{arguments.port}/v1", flush=True)
    asyncio.run(run())


async def watch(manager: Any, server: Any) -> None:
    """End the server when its manager does not run."""
    while manager.is_running():
        await asyncio.sleep(WATCH_S)
    server.should_exit = True


def leave_signals_to_rank_0() -> None:
    """Have no process end by a signal that torchrun sends to all: rank 0 needs the others to finish.

    The server of rank 0 handles these signals while it runs, and sends them once more when it has ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)


if __name__ == "__main__":
    sys.exit(main())
