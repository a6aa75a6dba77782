"""Serve a converted model: ``torchrun --nproc-per-node 2 -m shardconv_runtime.serve OUT --port 8000``."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from functools import partial

from .comm.launchers import run_program
from .errors import MissingPackageError

_log = logging.getLogger("shardconv_runtime.serve")  # the module is run as __main__

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
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="directory for files that are downloaded",
    )
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
        "--response-template",
        metavar="FILE",
        help="JSON file with the template that parses answers; default: the one in the tokenizer's config",
    )
    parser.add_argument(
        "--allow-media-domains",
        nargs="+",
        default=[],
        metavar="HOST",
        help="hosts from which images are fetched; default: only data URLs are taken",
    )
    parser.add_argument(
        "--pooling",
        choices=("mean", "first", "last"),
        default="mean",
        help="tokens whose states are an embedding, for models that generate no text; default: %(default)s",
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="FIELD",
        help="unsupported fields of generation_config.json to ignore",
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="print only the address, and errors")
    return parser


def require_packages() -> None:
    """Raise ``MissingPackageError`` if a package that serving needs is not installed."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(f"serving needs {package}: {INSTALL}")


def run_rank(arguments: argparse.Namespace) -> None:
    """Serve until the process is interrupted."""
    require_packages()
    _log.info("loading %s", arguments.out)

    from .serving.server import serve_rank  # imports those packages

    serve_rank(arguments)


def main() -> int:
    """Serve; return the exit code."""
    arguments = argument_parser().parse_args()
    return run_program(partial(run_rank, arguments), quiet=arguments.quiet)


if __name__ == "__main__":
    sys.exit(main())
