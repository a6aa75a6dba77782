"""The commands that work on a converted directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from shardconv_runtime.errors import SourceError

from ..arguments import parse_ranks
from ..converted.adapt import adapt
from ..converted.merge import merge
from ..converted.replan import replan
from ..converted.reshard import reshard
from ..converted.verify import DamagedError, describe, verify
from ..engines.state_files import is_engine_state, verify_state
from ..reporting.human_numbers import human_bytes
from ..reporting.report import files_report
from ..reporting.summary import summarize
from .opening import adapter_plan, opened, require_local
from .options import (
    hub_options,
    loudness_options,
    part_options,
    print_plan,
    printable,
    sequence_option,
    size_options,
    stage_options,
    tokens_option,
    tp_option,
    trust_option,
    where_options,
    working,
)

# The command that plans an adapter of a converted directory.


@click.command("adapt")
@click.argument("out", type=click.Path())
@click.argument("directories", metavar="[ADAPTER] OUT-ADAPTER", nargs=-1, required=True, type=click.Path())
@click.option(
    "--lora",
    "config",
    metavar="CONFIG",
    type=click.Path(),
    help="Make a new adapter by this config, which is like peft's adapter_config.json, instead of ADAPTER.",
)
@click.option("--seed", type=int, help="Of the initial weights of a new adapter (default 0).")
@click.option("--overwrite", is_flag=True, help="Replace OUT-ADAPTER if it is one of an adapter.")
@click.option("--no-check", is_flag=True, help="Skip the numerical check of the plan.")
@trust_option("OUT")
@loudness_options
def adapt_command(
    out: str,
    directories: tuple[str, ...],
    config: str | None,
    seed: int | None,
    no_check: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Plan the converted directory OUT with an adapter that peft saved to ADAPTER.

    OUT-ADAPTER gets the adapter's files, which peft loads as before, and the plan of the model with it. The
    shards of OUT stay as they are. With --lora, the adapter is a new one, to be trained.

    \b
    Examples:
      shardconv adapt out/ my-lora/ out-lora/
      shardconv adapt out/ out-lora/ --lora lora.json --seed 1
    Then:
      model = shardconv_runtime.load("out/", adapter="out-lora/")
    """
    require_local(out)
    wanted = 1 if config is not None else 2
    if len(directories) != wanted:
        names = "OUT-ADAPTER" if config is not None else "ADAPTER and OUT-ADAPTER"
        raise click.UsageError(f"after OUT, give {names}: {wanted} and not {len(directories)}")
    if seed is not None and config is None:
        raise click.UsageError("--seed is of the weights of a new adapter; add --lora, or leave it out")
    source = config if config is not None else directories[0]
    with working(quiet, verbose) as progress:
        plan = adapt(
            out, source, directories[-1], seed=seed or 0, check=not no_check, progress=progress, **options
        )
    if not quiet:
        if plan.inference_only:
            click.echo(f"{directories[-1]}: for inference only: {plan.inference_only}")
        click.echo(f'{directories[-1]}: load it with shardconv_runtime.load("{out}", adapter=...)')


@click.command("inspect")
@click.argument("out", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@tokens_option
@where_options
def inspect_command(out: str, as_json: bool, tokens: int, tp: int | None, **hub: Any) -> None:
    """Show the plan and the files of the converted directory OUT.

    OUT may also be the id of a repository on the Hub: only its plan and manifest are downloaded, and the
    sizes of all files are checked. Of a directory that holds stages, all are shown; of one that adapt wrote,
    the plan of the model with the adapter.

    \b
    Examples:
      shardconv inspect out/
      shardconv inspect user/model-tp --tp 8
    """
    if (adapted := adapter_plan(out)) is not None:
        print_plan(adapted, as_json, tokens)
        return
    parts = opened(out, tp, hub)
    for found in parts:
        found.check_sizes()
    print_plan(parts[0].plan, as_json, tokens)
    if not as_json:
        for found in parts:
            title = f"{found.directory.name}\n" if len(parts) > 1 else ""
            click.echo(printable("\n" + title + files_report(found.manifest)), nl=False)


@click.command("replan")
@click.argument("out", type=click.Path())
@sequence_option
@click.option("--no-check", is_flag=True, help="Skip the numerical check of the new plan.")
@trust_option("OUT")
@loudness_options
def replan_command(
    out: str, no_check: bool, sequence_parallel: bool, trust_remote_code: bool, quiet: bool, verbose: bool
) -> None:
    """Solve OUT again for the installed torch and transformers, keeping its shards.

    A plan is valid for the model code that it was solved for; after an upgrade the runtime refuses it
    and names this command. It takes seconds. If the new plan shards some tensor in another way, OUT is
    not changed, and the model has to be converted again.

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
            f"{out}: solved for torch {code.torch}, transformers {code.transformers}; the shards are kept"
        )


@click.command("verify")
@click.argument("out", type=click.Path())
@click.option(
    "--against", metavar="MODEL", help="Compare every byte with this model, a directory or a Hub id."
)
@click.option(
    "--numerics", is_flag=True, help="Compare all ranks, run in this process, with the unsharded model."
)
@hub_options("MODEL")
@trust_option("OUT and in MODEL")
@loudness_options
def verify_command(out: str, quiet: bool, verbose: bool, **options: Any) -> None:
    """Check every byte of the converted directory OUT.

    Sizes, checksums and headers are compared with the manifest and the plan. With --against, the tensors of
    each rank are compared with the weights of MODEL, cast as in the conversion. With --numerics, the ranks
    run in float64 on their real weights and are compared with the unsharded model, in the memory of its
    largest weight; the result is written to the manifest, and inspect shows it. If there are problems, all
    are listed and the exit code is 2.

    \b
    Examples:
      shardconv verify out/
      shardconv verify out/ --against org/name --revision v1.0 --numerics
    """
    require_local(out)
    if adapter_plan(out) is not None:
        raise SourceError(
            f"{out} holds an adapter, without shards; load compares its plan and its file with the model"
        )
    if is_engine_state(out):
        _verify_engine_state(out, quiet, verbose, options)
        return
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


def _verify_engine_state(out: str, quiet: bool, verbose: bool, options: dict[str, Any]) -> None:
    """Check a directory that ``export --format vllm`` wrote."""
    if any(options.values()):
        raise click.UsageError(f"{out} holds an engine's files: they are checked without options")
    try:
        with working(quiet, verbose) as progress:
            found = verify_state(out, progress=progress)
    except DamagedError as error:
        for line in error.problems:
            click.echo(line, err=True)
        raise
    if not quiet:
        size = human_bytes(found.num_bytes)
        click.echo(f"{out}: {found.num_files} files, {size}: all checksums are right")
        for remark in found.remarks:
            click.echo(f"remark: {remark}")


@click.command("merge")
@click.argument("out", type=click.Path())
@click.argument("hf_dir", type=click.Path())
@trust_option("OUT")
@size_options
@loudness_options
def merge_command(out: str, hf_dir: str, quiet: bool, verbose: bool, **options: Any) -> None:
    """Write the converted directory OUT as an ordinary checkpoint to the directory HF_DIR.

    The files are those that transformers would save, in its layout, with the bytes of OUT; no model is
    built in memory. Before anything is written, shardconv checks that transformers loads them to the same
    parameters. HF_DIR gets its config.json last; the same command continues an interrupted run.

    \b
    Example:
      shardconv merge out/ my-model/
    """
    with working(quiet, verbose) as progress:
        merged = merge(out, hf_dir, progress=progress, **options)
    if not quiet:
        files = f"{merged.num_files} file{'s' if merged.num_files > 1 else ''}"
        click.echo(f"{hf_dir}: {merged.num_tensors} tensors in {files}, {human_bytes(merged.num_bytes)}")


@click.command("reshard")
@click.argument("out", type=click.Path())
@click.argument("out2", type=click.Path())
@tp_option
@stage_options
@trust_option("OUT")
@size_options
@part_options("OUT2")
@click.option("--no-check", is_flag=True, help="Skip the numerical check of the new plan.")
@loudness_options
def reshard_command(
    out: str, out2: str, tp: int, no_check: bool, quiet: bool, verbose: bool, **options: Any
) -> None:
    """Convert the converted directory OUT for N ranks, to the directory OUT2.

    The weights are read from OUT only and are not cast; the files equal those of a conversion of the
    original model for N ranks. OUT and OUT2 may have stages. The same command continues an interrupted run.

    \b
    Example:
      shardconv reshard out/ out-4/ --tp 4
    """
    parse_ranks(options["ranks"], tp * options["pp"])  # here too, before the libraries are imported
    with working(quiet, verbose) as progress:
        solved = reshard(out, out2, tp, check=not no_check, progress=progress, **options)
    if not quiet and (Path(out2) / "manifest.json").is_file():
        most = human_bytes(max(summarize(solved).rank_bytes))
        click.echo(f"{out2}: {most} on each of {tp} ranks; shardconv inspect {out2} shows the plan")


COMMANDS = (
    inspect_command,
    replan_command,
    verify_command,
    merge_command,
    reshard_command,
)
"""In the order of the help."""
