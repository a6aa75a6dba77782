"""The commands that work on a converted directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from shardconv_runtime.errors import CheckpointError, DamagedError, SourceError
from shardconv_runtime.files.manifest import MANIFEST_NAME
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.typed_json import write_text

from ..arguments import parse_ranks
from ..converted.adapt import adapt
from ..converted.replan import replan, reshard
from ..converted.verify import describe, verify
from ..exports.merge import merge
from ..exports.state_files import is_engine_state, verify_state
from ..reporting.picture import picture
from ..reporting.report import files_report
from ..reporting.summary import human_bytes, summarize
from .options import (
    adapter_plan,
    hub_options,
    is_on_hub,
    loudness_options,
    opened,
    part_options,
    print_complete,
    print_plan,
    print_written,
    printable,
    require_local,
    sequence_option,
    size_options,
    stage_options,
    tokens_option,
    tp_option,
    trust_option,
    was_complete,
    where_options,
    working,
)


@click.command("adapt")
@click.argument("out", type=click.Path())
@click.argument("directories", metavar="[ADAPTER] OUT-ADAPTER", nargs=-1, required=True, type=click.Path())
@click.option(
    "--lora",
    "config",
    metavar="CONFIG",
    type=click.Path(),
    help="Make a new adapter with this config, in the format of peft's adapter_config.json.",
)
@click.option("--seed", type=int, help="Seed of the weights of a new adapter.  [default: 0]")
@click.option("--overwrite", is_flag=True, help="Replace OUT-ADAPTER if it holds an adapter.")
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

    OUT-ADAPTER gets the files of the adapter and the plan of the model with it. The shards of OUT do not
    change. With --lora, the command makes a new adapter for training.

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
        raise click.UsageError(f"after OUT, give {names}; got {len(directories)}, expected {wanted}")
    if seed is not None and config is None:
        raise click.UsageError("--seed is for the weights of a new adapter; add --lora, or leave it out")
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

    OUT may also be the id of a repository on the Hub. The command then downloads only the plan and the
    manifest, and checks the sizes of all files. For a directory with stages it shows all of them. For an
    adapter it shows the plan of the model with the adapter.

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
    """Solve OUT again for the installed torch and transformers, and keep its shards.

    A plan is valid only for the model code that it was solved for. After an upgrade that changes the code,
    the runtime tells you to run this command. It takes seconds. If the new plan shards a tensor in another
    way, OUT does not change, and you must convert the model again.

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
    "--against", metavar="MODEL", help="Compare every byte with this model (a directory or a Hub id)."
)
@click.option(
    "--numerics",
    is_flag=True,
    help="Run all ranks in this process and compare them with the unsharded model.",
)
@hub_options("MODEL")
@trust_option("OUT and in MODEL")
@loudness_options
def verify_command(out: str, quiet: bool, verbose: bool, **options: Any) -> None:
    """Check every byte of the converted directory OUT.

    The command compares sizes, checksums and headers with the manifest and the plan. With --against, it also
    compares the tensors of each rank with the weights of MODEL. With --numerics, it runs all ranks in float64
    on their real weights and compares them with the unsharded model. This needs about the memory of the
    largest weight. The result is written to the manifest. If there are problems, all are listed and the exit
    code is 2.

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
        raise click.UsageError(f"{out} holds files of an inference engine; verify them without options")
    try:
        with working(quiet, verbose) as progress:
            found = verify_state(out, progress=progress)
    except DamagedError as error:
        for line in error.problems:
            click.echo(line, err=True)
        raise
    if not quiet:
        size = human_bytes(found.num_bytes)
        click.echo(f"{out}: {found.num_files} files, {size}: all checksums match")
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

    The files have the layout of transformers and the bytes of OUT. The model is not loaded into memory.
    Before the command writes anything, it checks that transformers would load the files to the same
    parameters. config.json is written last. To continue an interrupted run, run the same command again.

    \b
    Example:
      shardconv merge out/ my-model/
    """
    with working(quiet, verbose) as progress:
        merged = merge(out, hf_dir, progress=progress, **options)
    if merged.was_complete and not quiet:
        print_complete(hf_dir)
    elif not quiet:
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

    The weights come from OUT and are not cast. Converting the original model for N ranks would give the same
    files. OUT and OUT2 may have stages. To continue an interrupted run, run the same command again.

    \b
    Example:
      shardconv reshard out/ out-4/ --tp 4
    """
    parse_ranks(options["ranks"], tp * options["pp"])  # here too, before the libraries are imported
    is_complete = was_complete(out2, overwrite=options["overwrite"])
    with working(quiet, verbose) as progress:
        solved = reshard(out, out2, tp, check=not no_check, progress=progress, **options)
    if not quiet and is_complete:
        print_complete(out2)
    elif not quiet and (Path(out2) / "manifest.json").is_file():
        most = human_bytes(max(summarize(solved).rank_bytes))
        print_written(out2, f"at most {most}", f"{tp} ranks")


COMMANDS = (
    inspect_command,
    replan_command,
    verify_command,
    merge_command,
    reshard_command,
)
"""The commands in the order of the help."""


@click.command("report")
@click.argument("out", type=click.Path())
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write to FILE, or to standard output for -.  [default: OUT-report.html next to OUT, or here if OUT "
    "is on the Hub]",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE even if it is not a report.")
@tokens_option
@where_options
def report_command(
    out: str, output: str | None, overwrite: bool, tokens: int, tp: int | None, **hub: Any
) -> None:
    """Write the output of inspect and a picture as an HTML page.

    OUT is a converted directory, the id of a Hub repository that has one, or a plan.json. The page needs no
    network and no scripts. The command replaces an earlier report in FILE, but no other file.

    \b
    Examples:
      shardconv report out/                      # writes out-report.html
      shardconv report user/model-tp --tp 8      # writes model-tp-8-report.html
      shardconv report plan.json -o page.html
    """
    from ..reporting.html_report import MARK, html_report  # the other commands need no Jinja

    path = Path(out)
    parts = opened(out, tp, hub) if path.is_dir() or is_on_hub(out) else []
    found = parts[0] if parts else None
    about = found.directory if found is not None and len(parts) == 1 else path
    if output is not None:
        target = None if output == "-" else Path(output)
    elif found is not None and found.repository is not None:
        target = Path(f"{path.name}-{found.manifest.tp}-report.html")
    else:
        target = _beside(about)
    if target is not None:
        _require_replaceable(target, about, MARK, overwrite=overwrite)
    plan = plan_json.read(path) if found is None else found.plan
    files = None if found is None else found.manifest
    page = html_report(plan, picture(plan), manifest=files, num_tokens=tokens)
    if target is None:
        click.echo(page, nl=False)
    else:
        write_text(target, page)
        click.echo(f"{target}: open it in a browser")


def _beside(out: Path) -> Path:
    """Return the default target."""
    about = _directory(out) or out
    resolved = about.resolve()
    target = resolved.parent / f"{resolved.name if about.is_dir() else resolved.stem}-report.html"
    near = target.is_relative_to(Path.cwd()) and not out.is_absolute()
    return target.relative_to(Path.cwd()) if near else target


def _directory(out: Path) -> Path | None:
    """Return the converted directory that OUT is, or whose plan it is."""
    if out.is_dir():
        return out
    return out.parent if (out.parent / MANIFEST_NAME).exists() else None


def _require_replaceable(target: Path, out: Path, mark: str, *, overwrite: bool) -> None:
    """Refuse to write into OUT, or to replace a file that is not a report."""
    directory = _directory(out)
    if directory is not None and target.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(
            f"{target} is in the converted directory {directory}, which may only hold the files in its "
            "manifest; give another FILE"
        )
    if target.resolve() == out.resolve():
        raise CheckpointError(f"{target} is the plan itself; give another FILE")
    if not target.parent.is_dir():
        raise CheckpointError(
            f"there is no directory {target.parent} to write {target.name} to; create it first"
        )
    if target.exists() and not overwrite:
        with target.open("rb") as file:
            beginning = file.read(4096)
        if mark.encode() not in beginning:
            raise CheckpointError(f"{target} exists and is not a report; give another FILE, or --overwrite")
