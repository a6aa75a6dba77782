"""The command that writes a model in another program's sharded format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from shardconv_runtime.errors import DamagedError

from ..arguments import parse_ranks, require_tp
from ..converted.push import describe, push
from ..exports.export_dcp import FORMATS as OF_DIRECTORIES
from ..exports.export_dcp import export
from ..exports.export_vllm import export_vllm
from ..exports.vllm_calls import TESTED, is_tested
from ..reporting.summary import human_bytes
from .options import (
    DTYPES,
    hub_options,
    loudness_options,
    print_complete,
    size_options,
    stream_option,
    trust_option,
    working,
)

VLLM = "vllm"
FORMATS = (*OF_DIRECTORIES, VLLM)

_OF_SIZES = ("max_file_size", "memory")
"""Options of every format."""


@click.command("export")
@click.argument("model", metavar="MODEL_OR_OUT")
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option(
    "--format",
    "chosen",
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    show_default=True,
    help="dcp: for torch.distributed.checkpoint and transformers; vllm: for --load-format sharded_state.",
)
@click.option("--tp", type=int, metavar="N", help="Number of vLLM ranks.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="dtype of vLLM's parameters.  [default: vLLM chooses]"
)
@click.option(
    "--ranks",
    metavar="LIST",
    help="Write only these ranks, for example 0-3 or 0,2,5. The last part completes DIR.  [default: all]",
)
@stream_option
@size_options
@hub_options("MODEL")
@trust_option("MODEL_OR_OUT")
@loudness_options
def export_command(
    model: str, directory: str, chosen: str, quiet: bool, verbose: bool, **options: Any
) -> None:
    """Write a model to the directory DIR, in another sharded format.

    dcp takes a converted directory and writes sharded safetensors. torch.distributed.checkpoint reads them
    with a HuggingFaceStorageReader for any number of ranks, and transformers reads them with from_pretrained.
    Each element is stored once, with the tensor names of the model.

    vllm takes a model, or a converted directory for any number of ranks, and writes the files from which
    vLLM's N ranks start. It runs the loader of the installed vLLM on tensors without memory and needs no GPU.
    To continue an interrupted run, run the same command again.

    \b
    Examples:
      shardconv export out/ --format dcp sharded/
      shardconv export org/name --format vllm --tp 4 state/
    """
    if chosen == VLLM:
        _export_vllm(model, directory, quiet, verbose, options)
        return
    given = [name for name, value in options.items() if name not in _OF_SIZES and value not in (None, False)]
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} is for --format {VLLM}")

    sizes = {name: options[name] for name in _OF_SIZES}
    with working(quiet, verbose) as progress:
        found = export(model, directory, chosen, progress=progress, **sizes)
    if found.was_complete and not quiet:
        print_complete(directory)
    elif not quiet:
        files = _files(found.num_files)
        click.echo(f"{directory}: {found.num_tensors} tensors in {files}, {human_bytes(found.num_bytes)}")


def _export_vllm(model: str, directory: str, quiet: bool, verbose: bool, options: dict[str, Any]) -> None:
    tp = options.pop("tp")
    if tp is None:
        raise click.UsageError(f"--format {VLLM} needs --tp: the number of ranks of vLLM")
    require_tp(tp)
    parse_ranks(options["ranks"], tp)
    with working(quiet, verbose) as progress:
        found = export_vllm(model, directory, tp, progress=progress, **options)
    if found.was_complete and not quiet:
        print_complete(directory)
    elif not quiet and found.is_complete:
        click.echo(
            f"{directory}: {found.num_tensors} tensors on each of {tp} ranks in {_files(found.num_files)}, "
            f"{human_bytes(found.rank_bytes)} per rank"
        )
        click.echo(
            f"vllm serve {Path(directory)} --load-format sharded_state --tensor-parallel-size {tp} "
            f"--dtype {found.dtype}"
        )
        click.echo(
            f"note: vLLM {found.version} chose these parameters for the platform {found.platform!r}. On "
            "another platform it may choose other parameters, and then it does not start from these files"
        )
        if not is_tested(found.version):
            click.echo(f"note: vLLM {found.version} is not tested; tested are {', '.join(TESTED)}")


def _files(count: int) -> str:
    return f"{count} file{'s' if count > 1 else ''}"


COMMANDS = (export_command,)


@click.command("push")
@click.argument("out", type=click.Path())
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="Make the repository private.")
@click.option(
    "--revision", metavar="BRANCH", help="Branch to push to. It is created if necessary.  [default: main]"
)
@click.option("--token", help="Hub token with write access.  [default: the Hub login]")
@click.option("--dry-run", is_flag=True, help="Only list the files that would be sent or deleted.")
@loudness_options
def push_command(out: str, repo_id: str, quiet: bool, verbose: bool, **options: Any) -> None:
    """Publish the converted directory OUT in the repository REPO_ID of the Hugging Face Hub.

    The command verifies OUT first. The files go to tp-N/ (with stages to pp-P-tp-N/), so one repository can
    hold the model for several numbers of ranks. Identical files are stored and sent once. The model card has
    a picture of each plan, and text that you add to it is kept. To continue an interrupted push, run the same
    command again.

    \b
    Examples:
      shardconv push out/ user/model-tp
      shardconv push out/ user/model-tp --dry-run
    """
    try:
        with working(quiet, verbose) as progress:
            pushed = push(out, repo_id, progress=progress, **options)
    except DamagedError as error:
        for line in error.problems:
            click.echo(line, err=True)
        raise
    if not quiet:
        for line in describe(pushed, options["dry_run"]):
            click.echo(line)
