"""The options that commands share, each in one place with its help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from shardconv_runtime.format.plan_checks import EXPERT_MODES

from ..arguments import parse_memory, parse_size, require_tp

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = ("float64", "float32", "bfloat16", "float16")


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order of the help."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _checked(check: Callable[[Any], object]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A value is refused here, before the libraries are imported, and passed on as it was given."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        check(value)
        return value

    return callback


tp_option = click.option(
    "--tp",
    type=int,
    required=True,
    metavar="N",
    callback=_checked(require_tp),
    help="Number of ranks to shard for.",
)

experts_option = click.option(
    "--experts",
    type=click.Choice(EXPERT_MODES),
    default="tp",
    show_default=True,
    help="Split mixture-of-experts layers inside of each expert, or keep experts whole (ep).",
)

sequence_option = click.option(
    "--sequence-parallel",
    is_flag=True,
    help="Solve for activations that are split over the sequence, too (for training).",
)

tokens_option = click.option(
    "--tokens", default=2048, show_default=True, metavar="N", help="Tokens of the reported pass."
)

loudness_options = together(
    click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
    click.option("-v", "--verbose", is_flag=True, help="Show what transformers logs, and tracebacks."),
)

size_options = together(
    click.option(
        "--max-file-size",
        default="5GB",
        show_default=True,
        metavar="SIZE",
        callback=_checked(parse_size),
        help="Begin a new file after so much; as 500MB or 5GB. A tensor is never split.",
    ),
    click.option(
        "--memory",
        default="512MiB",
        show_default=True,
        metavar="SIZE",
        callback=_checked(parse_memory),
        help="For the buffers that weights pass through.",
    ),
)

initial_options = together(
    click.option(
        "--random-init",
        is_flag=True,
        help="Write the weights of a new model, to train from scratch; MODEL needs a config only.",
    ),
    click.option(
        "--seed",
        type=int,
        metavar="N",
        help="Of --random-init: the same weights for any --tp.  [default: 0]",
    ),
)


def hub_options(what: str) -> Callable[[Command], Command]:
    """How the Hub is reached for what is named so in the help."""
    return together(
        click.option("--revision", help=f"Branch, tag or commit of {what} on the Hub.  [default: main]"),
        click.option("--cache-dir", type=click.Path(file_okay=False), help="Where Hub downloads are cached."),
        click.option(
            "--local-files-only", is_flag=True, help="Do not download; use the local Hub cache only."
        ),
        click.option(
            "--token", help="Hub token for private or gated models.  [default: that of the Hub login]"
        ),
    )


where_options = together(
    click.option(
        "--tp",
        type=int,
        metavar="N",
        callback=_checked(lambda tp: None if tp is None else require_tp(tp)),
        help="Where OUT holds several, in tp-N/: the one for N ranks.",
    ),
    hub_options("OUT"),
)
"""Which of the converted directories that are in OUT, and how it is read if it is a repository."""

stream_option = click.option(
    "--stream/--download",
    default=None,
    help="Read from the Hub only the bytes that are written, and keep none in the cache; or download whole "
    "files to the cache. What is in the cache is read there.  [default: stream with --ranks, else download]",
)

model_options = together(
    hub_options("MODEL"),
    click.option("--dtype", type=click.Choice(DTYPES), help="dtype of the parameters.  [default: as stored]"),
    click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Run the Python code in the model's repository. Off by default: read that code first.",
    ),
    loudness_options,
)
"""Which model, and how it is read."""


def trust_option(where: str) -> Callable[[Command], Command]:
    """``--trust-remote-code`` of a command on a converted directory."""
    return click.option("--trust-remote-code", is_flag=True, help=f"Run the Python code in {where}.")


def part_options(out: str) -> Callable[[Command], Command]:
    """Which part of the directory that is named ``out`` in the help is written, and over what."""
    return together(
        click.option(
            "--ranks",
            metavar="LIST",
            help="Write these ranks only, as 0-3 or 0,2,5; the part that comes last completes "
            f"{out}.  [default: all]",
        ),
        click.option(
            "--overwrite",
            is_flag=True,
            help=f"Replace {out} if it is a converted directory, and nothing else.",
        ),
    )
