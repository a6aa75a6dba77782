"""Serve a converted model: ``torchrun --nproc-per-node 2 -m shardconv_runtime.serve OUT --port 8000``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from .comm.launchers import report_error
from .errors import MissingPackageError, ShardconvError

PACKAGES = ("fastapi", "prometheus_client", "uvicorn")
INSTALL = "pip install fastapi prometheus-client uvicorn"
"""The remedy if one of them is missing."""


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; the command of shardconv has the same options."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node TP -m shardconv_runtime.serve",
        description="Serves a converted model to clients of OpenAI's API.",
    )
    parser.add_argument("out", metavar="OUT", help="directory that `shardconv convert` wrote")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--name", help="name of the model for clients; default: the name of the directory")
    parser.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help="cache size in blocks of 256 tokens; default: all free memory of a GPU, or 128 on a CPU",
    )
    parser.add_argument("--max-batch-tokens", type=int, metavar="N", help="maximum tokens of one step")
    parser.add_argument(
        "--max-requests",
        type=int,
        default=256,
        metavar="N",
        help="maximum number of running and waiting requests; more get status 429; default: %(default)s",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("SHARDCONV_API_KEY"),
        metavar="KEY",
        help="key that clients must send; default: the environment variable SHARDCONV_API_KEY, or none",
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="FIELD",
        help="unsupported fields of generation_config.json to ignore",
    )
    return parser


def main() -> int:
    """Serve until the process is interrupted; return the exit code."""
    arguments = argument_parser().parse_args()
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            print(f"error: serving needs {package}: {INSTALL}", file=sys.stderr)
            return MissingPackageError.exit_code
    from .serving.server import run_rank  # imports those packages

    try:
        run_rank(arguments)
    except ShardconvError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
