"""The commands that work on a converted directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..arguments import parse_ranks
from ..converted.export_dcp import FORMATS, export
from ..converted.merge import merge
from ..converted.replan import replan
from ..converted.reshard import reshard
from ..verifying.directories.verify import DamagedError, describe, verify
from .opening import opened, require_local
from .options import (
    hub_options,
    loudness_options,
    part_options,
    sequence_option,
    size_options,
    tokens_option,
    tp_option,
    trust_option,
    where_options,
)
from .working import print_plan, printable, working


@click.command("inspect")
@click.argument("out", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the plan itself.")
@tokens_option
@where_options
def inspect_command(out: str, as_json: bool, tokens: int, tp: int | None, **hub: Any) -> None:
    """Show the plan and the files of the converted directory OUT.

    OUT may be the id of a repository on the Hub, too: of it the plan and the manifest are downloaded, and the
    sizes of all files compared.

    \b
    Examples:
      shardconv inspect out/
      shardconv inspect user/model-tp --tp 8
    """
    found = opened(out, tp, hub)
    found.check_sizes()
    print_plan(found.plan, as_json, tokens)
    if not as_json:
        from ..reporting.report import files_report

        click.echo(printable("\n" + files_report(found.manifest)), nl=False)


@click.command("replan")
@click.argument("out", type=click.Path())
@sequence_option
@click.option("--no-check", is_flag=True, help="Skip the proof of the new plan.")
@trust_option("OUT")
@loudness_options
def replan_command(
    out: str, no_check: bool, sequence_parallel: bool, trust_remote_code: bool, quiet: bool, verbose: bool
) -> None:
    """Solve OUT again for the installed torch and transformers, keeping its shards.

    A plan holds for the model code that it was solved for; after an upgrade the runtime refuses it
    and names this command. It takes seconds. If the new plan slices some tensor in another way, OUT is
    left as it is and has to be converted again.

    \b
    Example:
      shardconv replan out/
    """
    with working(quiet, verbose) as progress:
        solved = replan(
            out,
            trust_remote_code=trust_remote_code,
            check=not no_check,
            sequence_parallel=sequence_parallel,
            progress=progress,
        )
    if not quiet:
        code = solved.code
        click.echo(
            f"{out}: planned for torch {code.torch}, transformers {code.transformers}; the shards are kept"
        )


@click.command("verify")
@click.argument("out", type=click.Path())
@click.option(
    "--against", metavar="MODEL", help="Compare every byte with this model, a directory or a Hub id."
)
@click.option("--numerics", is_flag=True, help="Run all ranks in this process, and the unsharded model.")
@hub_options("MODEL")
@trust_option("OUT and in MODEL")
@loudness_options
def verify_command(out: str, quiet: bool, verbose: bool, **options: Any) -> None:
    """Check every file of the converted directory OUT, to the byte.

    Sizes, checksums and headers are compared with the manifest and the plan. With --against, what each
    rank holds is compared with the weights of MODEL, cast as they were converted. With --numerics, the ranks
    run in float64 on their real weights and are compared with the unsharded model; layers that do not fit
    in memory are left out. All problems are listed; the exit code is then 2.

    \b
    Examples:
      shardconv verify out/
      shardconv verify out/ --against org/name --revision v1.0 --numerics
    """
    require_local(out)
    try:
        with working(quiet, verbose) as progress:
            found = verify(out, progress=progress, **options)
    except DamagedError as error:
        for line in (*error.problems, *(f"remark: {remark}" for remark in error.remarks)):
            click.echo(line, err=True)
        raise
    if not quiet:
        for line in describe(out, found, options["against"]):
            click.echo(line)


@click.command("merge")
@click.argument("out", type=click.Path())
@click.argument("hf_dir", type=click.Path())
@trust_option("OUT")
@size_options
@loudness_options
def merge_command(out: str, hf_dir: str, quiet: bool, verbose: bool, **options: Any) -> None:
    """Write the converted directory OUT as an ordinary checkpoint to the directory HF_DIR.

    The files are those that transformers would save, in its layout, with the bytes of OUT; no model is
    built in memory. That transformers loads them to the same parameters is checked before anything is
    written. Until all is done, HF_DIR has no config.json; the same command continues a run that was
    interrupted.

    \b
    Example:
      shardconv merge out/ my-model/
    """
    from ..reporting.report import human_bytes

    with working(quiet, verbose) as progress:
        merged = merge(out, hf_dir, progress=progress, **options)
    if not quiet:
        files = f"{merged.num_files} file{'s' if merged.num_files > 1 else ''}"
        click.echo(f"{hf_dir}: {merged.num_tensors} tensors in {files}, {human_bytes(merged.num_bytes)}")


@click.command("reshard")
@click.argument("out", type=click.Path())
@click.argument("out2", type=click.Path())
@tp_option
@trust_option("OUT")
@size_options
@part_options("OUT2")
@click.option("--no-check", is_flag=True, help="Skip the proof of the new plan.")
@loudness_options
def reshard_command(
    out: str, out2: str, tp: int, no_check: bool, quiet: bool, verbose: bool, **options: Any
) -> None:
    """Convert the converted directory OUT for N ranks, to the directory OUT2.

    The weights come from OUT alone and are not cast; the files are those that converting the original
    model for N ranks gives. The same command continues a run that was interrupted.

    \b
    Example:
      shardconv reshard out/ out-4/ --tp 4
    """
    from ..reporting.report import human_bytes
    from ..reporting.summary import summarize

    parse_ranks(options["ranks"], tp)  # here too, before the libraries are imported
    with working(quiet, verbose) as progress:
        solved = reshard(out, out2, tp, check=not no_check, progress=progress, **options)
    if not quiet and (Path(out2) / "manifest.json").is_file():
        most = human_bytes(max(summarize(solved).rank_bytes))
        click.echo(f"{out2}: {most} on each of {tp} ranks; shardconv inspect {out2} shows the plan")


@click.command("export")
@click.argument("out", type=click.Path())
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    show_default=True,
    help="What reads it: torch.distributed.checkpoint (dcp), and transformers.",
)
@size_options
@loudness_options
def export_command(out: str, directory: str, quiet: bool, verbose: bool, **options: Any) -> None:
    """Write the converted directory OUT to the directory DIR, in another sharded format.

    dcp is the sharded safetensors that torch.distributed.checkpoint reads with a HuggingFaceStorageReader,
    for any number of ranks, and from_pretrained of transformers. There are files for each rank of OUT, with
    names of tensors as in the model, and each element once. Until all is done, readers refuse DIR; the same
    command continues a run that was interrupted.

    \b
    Example:
      shardconv export out/ --format dcp sharded/
    """
    from ..reporting.report import human_bytes

    with working(quiet, verbose) as progress:
        found = export(out, directory, progress=progress, **options)
    if not quiet:
        files = f"{found.num_files} file{'s' if found.num_files > 1 else ''}"
        click.echo(f"{directory}: {found.num_tensors} tensors in {files}, {human_bytes(found.num_bytes)}")


COMMANDS = (
    inspect_command,
    replan_command,
    verify_command,
    merge_command,
    reshard_command,
    export_command,
)
"""In the order of the help."""
