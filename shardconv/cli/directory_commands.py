"""The commands that work on a converted directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from shardconv_runtime.errors import DamagedError, OptionError, OutputExistsError
from shardconv_runtime.files.manifest import MANIFEST_NAME
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.typed_json import write_text

from ..arguments import parse_ranks
from ..converted.adapt import adapt
from ..converted.replan import replan, reshard
from ..converted.verify import Verified, describe, verify
from ..exports.state_files import is_engine_state, verify_state
from ..reporting import records
from ..reporting.picture import picture
from ..reporting.plan_records import (
    directory_record,
    errors_record,
    files_record,
    numerics_record,
    plan_record,
)
from ..reporting.report import files_report
from ..reporting.summary import human_bytes, summarize
from .options import (
    Opened,
    RenamedOptions,
    adapter_plan,
    hub_from,
    hub_options,
    json_option,
    loudness_options,
    opened,
    part_options,
    print_complete,
    print_errors,
    print_plan,
    print_report,
    print_written,
    printable,
    require_no_repository,
    sequence_option,
    size_options,
    stage_options,
    tokens_option,
    tp_option,
    trust_option,
    was_complete,
    where_options,
    working,
    writing_from,
    written_manifests,
)


@click.command("inspect")
@click.argument("src", type=click.Path())
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write a web page with a picture to FILE, or to standard output for -. It needs no network.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE even if it is not such a page.")
@json_option
@tokens_option
@where_options
@loudness_options
def inspect_command(
    src: str,
    html: str | None,
    overwrite: bool,
    as_json: bool,
    tokens: int,
    tp: int | None,
    quiet: bool,
    verbose: bool,
    **hub: Any,
) -> None:
    """Show a converted directory, a plan file or a Hub repository.

    SRC is a converted directory, a plan.json, a directory that adapt wrote, or the id of a repository on the
    Hub, of which the command downloads only the plan and the manifest. It checks the sizes of all files. For
    a directory with stages it shows all of them.

    \b
    Examples:
      shardconv inspect out/
      shardconv inspect out/ --html out.html
      shardconv inspect user/model-tp --tp 8
    """
    path, parts = Path(src), list[Opened]()
    plan = adapter_plan(src)
    if plan is None and path.is_file():
        plan = plan_json.read(path)
    elif plan is None:
        with working(quiet, verbose):
            parts = opened(src, tp, hub)
            for part in parts:
                part.check_sizes()
        plan = parts[0].plan
    if html is not None:
        about = parts[0].directory if len(parts) == 1 else path
        write_page(html, about, plan, parts, tokens, overwrite=overwrite)
        if html == "-":
            return
    if as_json:
        directories = (directory_record(part.name, part.manifest) for part in parts)
        print_report(records.InspectReport(plan_record(plan, tokens), tuple(directories)))
        return
    if html is not None:
        if not quiet:
            click.echo(f"{html}: open it in a browser")
        return
    print_plan(plan, tokens)
    for part in parts:
        title = f"{part.directory.name}\n" if len(parts) > 1 else ""
        click.echo(printable("\n" + title + files_report(part.manifest)), nl=False)
    print_errors([part.manifest for part in parts], plan)


def write_page(
    html: str, about: Path, plan: Plan, parts: Sequence[Opened], tokens: int, *, overwrite: bool
) -> None:
    """Write the web page of a plan to a file, or to standard output for ``-``."""
    from ..reporting.html_report import MARK, html_report  # the other commands need no Jinja

    target = None if html == "-" else Path(html)
    if target is not None:
        _require_replaceable(target, about, MARK, overwrite=overwrite)
    page = html_report(plan, picture(plan), manifest=parts[0].manifest if parts else None, num_tokens=tokens)
    if target is None:
        click.echo(page, nl=False)
    else:
        write_text(target, page)


def directory_of(path: Path) -> Path | None:
    """Return the converted directory that a path is, or whose plan it is."""
    if path.is_dir():
        return path
    return path.parent if (path.parent / MANIFEST_NAME).exists() else None


def _require_replaceable(target: Path, src: Path, mark: str, *, overwrite: bool) -> None:
    """Refuse to write into a converted directory, or to replace a file that is not a page."""
    directory = directory_of(src)
    if directory is not None and target.resolve().is_relative_to(directory.resolve()):
        raise OptionError(
            f"{target} is in the converted directory {directory}, which may only hold the files in its "
            "manifest; give another FILE"
        )
    if target.resolve() == src.resolve():
        raise OptionError(f"{target} is the plan itself; give another FILE")
    if not target.parent.is_dir():
        raise OptionError(f"there is no directory {target.parent} to write {target.name} to; create it first")
    if target.exists() and not overwrite:
        with target.open("rb") as file:
            beginning = file.read(4096)
        if mark.encode() not in beginning:
            raise OutputExistsError(f"{target} exists and is not a report; give another FILE, or --overwrite")


@click.command("verify")
@click.argument("src", type=click.Path())
@click.option(
    "--against", metavar="MODEL", help="Compare every byte with this model (a directory or a Hub id)."
)
@click.option(
    "--numerics",
    is_flag=True,
    help="Run all ranks in this process and compare them with the unsharded model.",
)
@hub_options("MODEL")
@trust_option("SRC and in MODEL")
@json_option
@loudness_options
def verify_command(src: str, as_json: bool, quiet: bool, verbose: bool, **options: Any) -> int:
    """Check every byte of a converted directory.

    The command compares sizes, checksums and headers in SRC with the manifest and the plan. With --against,
    it also compares the tensors of each rank with the weights of MODEL. With --numerics, it runs all ranks in
    float64 on their real weights and compares them with the unsharded model. This needs about the memory of
    the largest weight. The result is written to the manifest. If there are problems, all are listed and the
    exit code is 3.

    \b
    Examples:
      shardconv verify out/
      shardconv verify out/ --against org/name --revision v1.0 --numerics
    """
    require_no_repository(src)
    if adapter_plan(src) is not None:
        raise OptionError(
            f"{src} holds an adapter, without shards; load compares its plan and its file with the model"
        )
    of_engine = is_engine_state(src)
    if of_engine and any(options.values()):
        raise click.UsageError(f"{src} holds files of an inference engine; verify them without options")
    try:
        with working(quiet, verbose) as progress:
            if of_engine:
                state = verify_state(src, progress=progress)
                verified = Verified(state.num_files, state.num_bytes, state.remarks)
            else:
                verified = verify(src, hub=hub_from(options), progress=progress, **options)
    except DamagedError as error:
        if as_json:
            print_report(
                records.VerifyReport(src, False, error.problems, error.remarks, None, None, None, None)
            )
        for line in (*error.problems, *(f"remark: {remark}" for remark in error.remarks)):
            click.echo(line, err=True)
        raise
    if as_json:
        report = records.VerifyReport(
            src,
            True,
            (),
            tuple(verified.remarks),
            verified.num_files,
            verified.num_bytes,
            verified.num_tensors,
            numerics_record(verified.numerics),
        )
        print_report(report)
    elif not quiet:
        for line in describe(src, verified, options["against"]):
            click.echo(line)
    return 0


@click.command("reshard", cls=RenamedOptions)
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path(), required=False)
@click.option("--in-place", is_flag=True, help="Solve SRC again for the same ranks, and keep its shards.")
@tp_option(required=False)
@stage_options
@sequence_option
@trust_option("SRC")
@size_options
@part_options("DST")
@click.option("--no-check", is_flag=True, help="Skip the numerical check of the new plan.")
@json_option
@loudness_options
def reshard_command(
    src: str,
    dst: str | None,
    in_place: bool,
    tp: int | None,
    no_check: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Convert a converted directory for another number of ranks.

    The weights come from SRC and are not cast. Converting the original model for N ranks would give the same
    files. SRC and DST may have stages. To continue an interrupted run, run the same command again.

    With --in-place, the command solves SRC again for the installed torch and transformers, and keeps its
    shards. A plan is valid only for the model code that it was solved for. After an upgrade that changes the
    code, the runtime tells you to run this. It takes seconds. If the new plan shards a tensor in another way,
    SRC does not change, and you must convert the model again.

    \b
    Examples:
      shardconv reshard out/ out-4/ --tp 4
      shardconv reshard out/ --in-place
    """
    sequence_parallel = options["sequence_parallel"]
    if in_place:
        options_of_target = {"DST": dst, "--tp": tp, "--pp": options["pp"] > 1, "--stages": options["stages"]}
        options_of_target |= {"--ranks": options["ranks"], "--overwrite": options["overwrite"]}
        for name in (name for name, value in options_of_target.items() if value):
            raise click.UsageError(f"--in-place keeps the ranks and the files of SRC; leave out {name}")
        with working(quiet, verbose) as progress:
            solved = replan(
                src,
                sequence_parallel=sequence_parallel,
                check=not no_check,
                trust_remote_code=options["trust_remote_code"],
                progress=progress,
            )
        if as_json:
            print_report(written_record(src, solved, was_complete=False))
        elif not quiet:
            code = solved.code
            click.echo(
                f"{src}: solved for torch {code.torch}, transformers {code.transformers}; the shards are kept"
            )
        return
    if dst is None or tp is None:
        raise click.UsageError("give DST and --tp; or --in-place, to solve SRC again for the same ranks")
    if sequence_parallel:
        raise click.UsageError("--sequence-parallel is for --in-place; a plan that has the form keeps it")
    if options["stages"] and options["stages"].count(",") + 1 != options["pp"]:
        raise click.UsageError(f"--stages {options['stages']} are not {options['pp']} stages, as --pp says")
    parse_ranks(options["ranks"], tp * options["pp"])  # here too, before the libraries are imported
    is_complete = was_complete(dst, overwrite=options["overwrite"])
    with working(quiet, verbose) as progress:
        solved = reshard(
            src,
            dst,
            tp,
            stages=options["stages"] or options["pp"],
            writing=writing_from(options),
            trust_remote_code=options["trust_remote_code"],
            check=not no_check,
            progress=progress,
        )
    if as_json:
        print_report(written_record(dst, solved, was_complete=is_complete))
    elif is_complete and not quiet:
        print_complete(dst)
    elif not quiet and written_manifests(dst):
        most = human_bytes(max(summarize(solved).rank_bytes))
        print_written(dst, f"at most {most}", f"{tp} ranks")


def written_record(dst: str, solved: Plan, *, was_complete: bool) -> records.WrittenReport:
    """Return the report of a command that has written a converted directory, or a part of it."""
    manifests = written_manifests(dst)
    files = files_record(entry for each in manifests for entry in each.files)
    plan, errors = plan_record(solved), errors_record(manifests)
    return records.WrittenReport(dst, bool(manifests), was_complete, plan, files, errors)


@click.command("adapt", cls=RenamedOptions)
@click.argument("src", type=click.Path())
@click.argument("directories", metavar="[ADAPTER] DST", nargs=-1, required=True, type=click.Path())
@click.option(
    "--new",
    "config",
    metavar="CONFIG",
    type=click.Path(),
    help="Make a new adapter with this config, in the format of peft's adapter_config.json.",
)
@click.option("--seed", type=int, help="Seed of the weights of a new adapter.  [default: 0]")
@click.option("--overwrite", is_flag=True, help="Replace DST if it holds an adapter.")
@click.option("--no-check", is_flag=True, help="Skip the numerical check of the plan.")
@trust_option("SRC")
@json_option
@loudness_options
def adapt_command(
    src: str,
    directories: tuple[str, ...],
    config: str | None,
    seed: int | None,
    no_check: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Plan a converted directory with an adapter of the peft library.

    DST gets the files of ADAPTER, which peft saved, and the plan of the model in SRC with it. The shards of
    SRC do not change. With --new, the command makes a new adapter for training (LoRA, IA3).

    \b
    Examples:
      shardconv adapt out/ my-lora/ out-lora/
      shardconv adapt out/ out-lora/ --new lora.json --seed 1
    Then:
      model = shardconv_runtime.load("out/", adapter="out-lora/")
    """
    require_no_repository(src)
    expected = 1 if config is not None else 2
    if len(directories) != expected:
        names = "DST" if config is not None else "ADAPTER and DST"
        raise click.UsageError(f"after SRC, give {names}; got {len(directories)}, expected {expected}")
    if seed is not None and config is None:
        raise click.UsageError("--seed is for the weights of a new adapter; add --new, or leave it out")
    dst = directories[-1]
    source = config if config is not None else directories[0]
    with working(quiet, verbose) as progress:
        plan = adapt(src, source, dst, seed=seed or 0, check=not no_check, progress=progress, **options)
    if as_json:
        print_report(records.WrittenReport(dst, True, False, plan_record(plan), (), ()))
    elif not quiet:
        if plan.inference_only:
            click.echo(f"{dst}: for inference only: {plan.inference_only}")
        click.echo(f'{dst}: load it with shardconv_runtime.load("{src}", adapter="{dst}")')


COMMANDS = (inspect_command, verify_command, reshard_command, adapt_command)
