"""Serve a converted model: ``torchrun --nproc-per-node 2 -m shardconv_runtime.serve OUT --port 8000``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from .errors import ShardconvError

PACKAGES = ("fastapi", "prometheus_client", "uvicorn")


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
    parser.add_argument(
        "--max-requests",
        type=int,
        default=256,
        metavar="N",
        help="answered or waiting at a time; more are told to come again (429); default: %(default)s",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("SHARDCONV_API_KEY"),
        metavar="KEY",
        help="what clients have to send; default: the environment's SHARDCONV_API_KEY, or nothing",
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="FIELD",
        help="fields of generation_config.json that the server cannot grant, to serve without",
    )
    return parser.parse_args()


def main() -> int:
    """Serve until the process is interrupted; the exit code."""
    arguments = parse_arguments()
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            print(f"error: serving needs {package}: pip install 'shardconv-runtime[serve]'", file=sys.stderr)
            return 2
    from .serving.server import run_rank  # imports those packages

    try:
        run_rank(arguments)
    except ShardconvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
