"""The commands that start the ranks of a model on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from shardconv_runtime.checkpoint.model_directory import model_directory
from shardconv_runtime.errors import NotConvertedError
from shardconv_runtime.files.manifest import MANIFEST_NAME, PARTIAL
from shardconv_runtime.generate import MAX_NEW_TOKENS
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.serve import require_packages

from ..arguments import require_tp
from .options import checked, is_on_hub, opened, optional, together

DEFAULT_CPU_RANKS = 2
"""Ranks of a model that was not converted, on a machine without GPUs."""

SIGNALED = 128
"""The exit code of a job that a signal ended is larger by the number of the signal."""

ranks_option = click.option(
    "--tp",
    type=int,
    metavar="N",
    callback=checked(optional(require_tp)),
    help="Number of ranks of a model that is not converted, or the directory tp-N/ in SRC.  [default: the "
    f"number of GPUs, or {DEFAULT_CPU_RANKS} without]",
)

quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Print only the answer or the address, and errors."
)


def num_ranks(source: str, tp: int | None) -> tuple[int, str]:
    """Return the number of ranks of a model, and why it is that many.

    Args:
        source: a converted directory, a repository with one, or a model that is not converted.
        tp: the number that the user gives, if any.
    """
    if _may_be_converted(source):
        try:
            parts = opened(source, tp, {})
            stages = f" and {len(parts)} stages" if len(parts) > 1 else ""
            tp = parts[0].manifest.tp
            return tp * len(parts), f"{source} is converted for tp {tp}{stages}"
        except NotConvertedError:
            if Path(source).is_dir():
                raise
    _require_model(source)
    # Counting GPUs imports torch, which a converted directory does not need here.
    from ..launching import num_gpus

    if tp is not None:
        return tp, f"{source} is not converted"
    if gpus := num_gpus():
        return gpus, f"{source} is not converted, and this machine has so many GPUs; choose with --tp"
    return DEFAULT_CPU_RANKS, f"{source} is not converted, and this machine has no GPU; choose with --tp"


def _require_model(source: str) -> None:
    """Refuse what is no model, before any rank is started."""
    if model_directory(source, need_weights=True) is None:
        # The Hub client is slow to import. The ranks find the small files of the model in its cache.
        from shardconv_runtime.checkpoint.model_location import locate

        locate(source, Hub(), code=False, need_weights=False)


def _may_be_converted(source: str) -> bool:
    """Return whether a source is on the Hub, or has a manifest on this machine, or should get one."""
    path = Path(source)
    if is_on_hub(source) or not path.is_dir():
        return True  # or nowhere, which is an error
    traces = (MANIFEST_NAME, PARTIAL, f"*/{MANIFEST_NAME}", f"*/*/{MANIFEST_NAME}")
    return any(any(path.glob(each)) for each in traces)


def start(
    module: str,
    source: str,
    arguments: Mapping[str, Any],
    tp: int | None,
    quiet: bool,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Start a program of the runtime on the ranks of a model; return its exit code.

    Args:
        module: the name of the program's module in the runtime.
        source: the model.
        arguments: the program's options by name, None for those that were not given, and the prompt.
        tp: number of ranks of a model that is not converted.
        quiet: print only results and errors.
        environment: variables for the ranks.
    """
    count, why = num_ranks(source, tp)

    # It imports torch, which help and wrong arguments do not need.
    from ..launching import Program, launch, require_gpus

    require_gpus(count)
    if not quiet:
        click.echo(f"starting {count} rank{'s' * (count > 1)}: {why}", err=True)
    text = _as_text(source, {**arguments, "quiet": quiet})
    code = launch(Program(f"shardconv_runtime.{module}", text, environment or {}), count)
    if code > SIGNALED and not quiet:
        click.echo("stopped", err=True)
    return code


def _as_text(source: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return options of a program as a command line; the source and the prompt stand last, behind ``--``."""
    text, prompt = [], arguments.get("prompt")
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if name == "prompt" or value is None or value is False:
            continue
        if value is True:
            text.append(option)
        elif isinstance(value, tuple):
            text += [option, *value] if value else []
        else:
            text += [f"{option}={value}"]
    return [*text, "--", source, *([] if prompt is None else [prompt])]


sampling_options = together(
    click.option("--temperature", type=float, metavar="T", help="0 takes the most likely token."),
    click.option("--top-p", type=float, metavar="P", help="Sample from the likeliest tokens that sum to P."),
    click.option("--top-k", type=int, metavar="K", help="Sample from the K most likely tokens."),
    click.option("--repetition-penalty", type=float, metavar="X", help="Penalty for tokens of the text."),
    click.option("--seed", type=int, metavar="N", help="Seed of sampling.  [default: another each time]"),
)


@click.command("run")
@click.argument("source", metavar="SRC")
@click.argument("prompt", required=False)
@click.option(
    "--max-new-tokens",
    type=int,
    default=MAX_NEW_TOKENS,
    show_default=True,
    metavar="N",
    help="Maximum number of tokens of an answer.",
)
@sampling_options
@click.option("--system", metavar="TEXT", help="System message in front of the prompt.")
@click.option("--no-chat", is_flag=True, help="Continue the text, without the model's chat template.")
@click.option("--compile", is_flag=True, help="Compile the model: a slow start, then faster tokens.")
@ranks_option
@quiet_option
def run_command(source: str, tp: int | None, quiet: bool, **options: Any) -> int:
    """Answer a prompt.

    SRC is a converted directory, or a model, local or on the Hub, which is then planned for N ranks first.
    The command starts one process for each rank and prints the answer as it comes. PROMPT is a message if
    the tokenizer has a chat template; - reads it from the input. Without PROMPT, each line of the input is
    one. Settings of sampling that you leave out come from the model's generation_config.json.

    \b
    Examples:
      shardconv run out/ "Name three rivers"
      shardconv run out/ "Once upon a time" --no-chat --max-new-tokens 50 --temperature 0
      shardconv run org/name "Hello" --tp 2
    """
    if options["prompt"] == "-":
        options["prompt"] = sys.stdin.read()
    return start("generate", source, options, tp, quiet)


@click.command("serve")
@click.argument("source", metavar="SRC")
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False),
    help="Directory for files that are downloaded: the Hub's cache, or a copy of a URL.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen at.")
@click.option("--name", help="Name of the model for clients.  [default: the name of SRC]")
@click.option(
    "--num-blocks",
    type=int,
    metavar="N",
    help="Cache size in blocks of 256 tokens.  [default: all free memory of a GPU, or 128 on a CPU]",
)
@click.option("--max-batch-tokens", type=int, metavar="N", help="Maximum tokens of one step.")
@click.option(
    "--max-requests",
    type=int,
    default=256,
    show_default=True,
    metavar="N",
    help="Maximum number of running and waiting requests; more get status 429.",
)
@click.option(
    "--api-key",
    envvar="SHARDCONV_API_KEY",
    metavar="KEY",
    help="Key that clients must send.  [default: the variable SHARDCONV_API_KEY, or none]",
)
@click.option(
    "--response-template",
    metavar="FILE",
    help="JSON file with the template that parses answers.  [default: the one in the tokenizer's config]",
)
@click.option(
    "--allow-media-domains",
    multiple=True,
    metavar="HOST",
    help="Host from which images are fetched; may be given several times.  [default: only data URLs]",
)
@click.option(
    "--pooling",
    type=click.Choice(["mean", "first", "last"]),
    default="mean",
    show_default=True,
    help="Tokens whose states are an embedding, for models that generate no text.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="FIELD",
    help="Unsupported field of generation_config.json to ignore; may be given several times.",
)
@ranks_option
@quiet_option
def serve_command(source: str, tp: int | None, quiet: bool, api_key: str | None, **options: Any) -> int:
    """Serve a model to clients of OpenAI's API.

    SRC is a converted directory, or a model, local or on the Hub, which is then planned for N ranks first.
    The command starts one process for each rank, and prints a line when the server is ready. Control-C
    ends it. On several machines, start torchrun -m shardconv_runtime.serve, see docs/deploying.md.

    \b
    Examples:
      shardconv serve out/
      shardconv serve out/ --port 8080 --name my-model
    """
    require_packages()
    # Other users of the machine can see arguments of processes, but not their environment.
    environment = {} if api_key is None else {"SHARDCONV_API_KEY": api_key}
    return start("serve", source, options, tp, quiet, environment)


COMMANDS = (run_command, serve_command)
