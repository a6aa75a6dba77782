"""The commands that write a model in another program's format, and that publish it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from shardconv_runtime.errors import DamagedError, OptionError
from shardconv_runtime.files.manifest import MANIFEST_NAME
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.typed_json import write_text
from shardconv_runtime.hub_options import Hub, is_url

from ..arguments import parse_ranks, require_tp
from ..convert import plan
from ..exports.export import FORMATS as OF_FILES
from ..exports.export import export
from ..exports.export_vllm import StateExport
from ..exports.vllm_calls import TESTED, is_tested
from ..hub.push import Pushed, describe, push
from ..reporting import records
from ..reporting.summary import human_bytes
from .options import (
    DTYPES,
    RenamedOptions,
    experts_option,
    hub_from,
    hub_options,
    is_on_hub,
    json_option,
    loudness_options,
    opened,
    print_complete,
    print_report,
    size_options,
    stream_option,
    tp_option,
    trust_option,
    working,
    writing_from,
)

VLLM = "vllm"
OF_TEXT = ("plan", "tp_plan", "shards")
"""Formats that are one text, of a plan."""

_OPTIONS = {
    "hf": {"max_file_size", "memory", "trust_remote_code"},
    "dcp": {"max_file_size", "memory"},
    VLLM: {
        "tp",
        "dtype",
        "ranks",
        "stream",
        "max_file_size",
        "memory",
        "revision",
        "cache_dir",
        "local_files_only",
        "token",
        "trust_remote_code",
    },
}
"""The options of each format that has files."""


@click.command("export", cls=RenamedOptions)
@click.argument("src", type=click.Path())
@click.argument("dst", required=False, type=click.Path())
@click.option(
    "--format",
    "chosen",
    type=click.Choice((*OF_FILES, *OF_TEXT)),
    default="dcp",
    show_default=True,
    help="hf: an ordinary checkpoint; dcp: for torch.distributed.checkpoint and transformers; vllm: for "
    "--load-format sharded_state; plan, tp_plan, shards: a text.",
)
@tp_option(required=False)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="dtype of vLLM's parameters, or of a plan.  [default: as stored]",
)
@experts_option
@click.option(
    "--ranks",
    metavar="LIST",
    help="Write only these ranks of vLLM, for example 0-3 or 0,2,5. The last part completes DST.  "
    "[default: all]",
)
@stream_option
@size_options
@hub_options("SRC")
@trust_option("SRC")
@json_option
@loudness_options
def export_command(
    src: str, dst: str | None, chosen: str, as_json: bool, quiet: bool, verbose: bool, **options: Any
) -> None:
    """Write a model for transformers, DCP or vLLM, or its plan.

    \b
    hf       an ordinary checkpoint: the layout of transformers, with the bytes of the converted
             directory SRC. Before anything is written, the command checks that transformers would
             load the files to the same parameters. config.json is written last.
    dcp      sharded safetensors of the converted directory SRC. torch.distributed.checkpoint reads
             them with a HuggingFaceStorageReader for any number of ranks, and transformers with
             from_pretrained. An element that several ranks hold is stored once; a tied tensor is
             stored under each of its names.
    vllm     the files from which vLLM's N ranks start, of a model or of a converted directory for
             any number of ranks. The loader of the installed vLLM runs on tensors without memory.
    plan     the plan of SRC: of a converted directory, or of a model for N ranks.
    tp_plan  the plan for transformers' own tensor parallelism, if it can express it:
             from_pretrained(MODEL, distributed_config=DistributedConfig(tp_size=N, tp_plan=...)).
    shards   the boxes of each parameter that each rank holds.

    The last three are one text each, which goes to the file DST or to standard output. To continue an
    interrupted run of the others, run the same command again.

    \b
    Examples:
      shardconv export out/ my-model/ --format hf
      shardconv export out/ sharded/ --format dcp
      shardconv export org/name state/ --format vllm --tp 4
      shardconv export ./my-model tp_plan.json --format tp_plan --tp 4
    """
    experts = options.pop("experts")
    if chosen in OF_TEXT:
        _export_text(src, dst, chosen, experts, as_json, quiet, verbose, options)
        return
    if dst is None:
        raise click.UsageError(f"--format {chosen} writes a directory; give DST")
    if experts != "tp":
        raise click.UsageError("--experts is for the plan of a model that is not converted")
    set_options = {name for name, value in options.items() if value not in (None, False)}
    for name in sorted(set_options - _OPTIONS[chosen]):
        raise click.UsageError(f"--{name.replace('_', '-')} is not for --format {chosen}")
    if chosen == VLLM:
        if options["tp"] is None:
            raise click.UsageError(f"--format {VLLM} needs --tp: the number of ranks of vLLM")
        require_tp(options["tp"])
        parse_ranks(options["ranks"], options["tp"])
    with working(quiet, verbose) as progress:
        values = {name: value for name, value in options.items() if name in _OPTIONS[chosen]}
        if chosen == VLLM:
            values |= {"hub": hub_from(values), "writing": writing_from(values)}
        exported = export(src, dst, chosen, progress=progress, **values)
    if as_json:
        sizes = (exported.num_tensors, exported.num_files, exported.num_bytes)
        numbers = (*sizes, exported.is_complete, exported.was_complete)
        print_report(records.ExportReport(dst, chosen, *numbers))
    elif quiet:
        return
    elif exported.was_complete:
        print_complete(dst)
    elif isinstance(exported, StateExport):
        if exported.is_complete:
            _print_state(dst, exported, options["tp"])
    else:
        files = _files(exported.num_files)
        click.echo(f"{dst}: {exported.num_tensors} tensors in {files}, {human_bytes(exported.num_bytes)}")


def _export_text(
    src: str,
    dst: str | None,
    chosen: str,
    experts: str,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    options: dict[str, Any],
) -> None:
    """Write a plan in a format that is one text."""
    if as_json and dst is None:
        raise click.UsageError(f"--format {chosen} prints the text itself; give DST, or leave out --json")
    path, tp = Path(src), options["tp"]
    read = {name: options[name] for name in ("dtype", "trust_remote_code")}
    hub = hub_from(options)
    with working(quiet, verbose) as progress:
        if path.is_file():
            solved, where = plan_json.read(path), ""
        elif is_on_hub(src) or _holds_manifests(src):
            parts = opened(src, tp, vars_of(hub))
            solved, where = parts[0].plan, str(parts[0].directory)
        elif tp is None:
            raise OptionError(f"{src} is not converted; give --tp, the number of ranks of the plan")
        else:
            options_of_plan = {"experts": experts, "check": chosen == "plan", **read}
            solved, where = plan(src, tp, hub=hub, progress=progress, **options_of_plan), src
        text = plan_text(solved, chosen, where, hub, **read)
        if dst is not None:
            write_text(Path(dst), text)
    if as_json and dst is not None:
        num_bytes = len(text.encode())
        print_report(records.ExportReport(dst, chosen, None, 1, num_bytes, True, False))
    elif dst is None:
        click.echo(text, nl=False)
    elif not quiet:
        click.echo(f"{dst}: the {chosen} of {src} for tp {solved.tp}")


def _holds_manifests(src: str) -> bool:
    """Return whether a directory or a URL is a converted directory, or holds some."""
    if not is_url(src):
        return any(Path(src).glob(f"**/{MANIFEST_NAME}"))
    from shardconv_runtime.files.object_stores import listed  # it imports the client of the Hub

    return any(Path(name).name == MANIFEST_NAME for name in listed(src).objects)


def vars_of(hub: Hub) -> dict[str, Any]:
    """Return the fields of a value by name."""
    return {name: getattr(hub, name) for name in ("revision", "cache_dir", "local_files_only", "token")}


def plan_text(
    solved: Plan, chosen: str, model: str, hub: Hub, *, dtype: str | None, trust_remote_code: bool
) -> str:
    """Return a plan in one of the formats that are a text.

    Args:
        solved: the plan.
        chosen: the format.
        model: the model or directory whose classes a tp_plan needs; empty if only a plan was named.
        hub: how to reach the Hub.
        dtype: dtype of the parameters of a model that is not converted.
        trust_remote_code: whether the code of the model may be imported.
    """
    if chosen == "plan":
        return plan_json.dumps(solved)
    if chosen == "tp_plan" and not model:
        raise OptionError("a tp_plan needs the model, and a plan file has only the plan; name the model")
    if chosen == "tp_plan" and solved.stages is not None:
        raise OptionError("a tp_plan does not support stages; name a model or a directory without stages")

    # It imports torch and transformers, which the help and wrong arguments do not need.
    from ..exports.tp_plan import dumps, skeleton, to_json, tp_plan

    if chosen == "shards":
        return dumps(solved)
    tied = dict(solved.tied)
    module = skeleton(model, hub, dtype=dtype, trust_remote_code=trust_remote_code, tied=tied)
    return to_json(tp_plan(solved, module))


def _print_state(dst: str, found: StateExport, tp: int) -> None:
    """Print the numbers of vLLM's files, and how to start it."""
    click.echo(
        f"{dst}: {found.num_tensors} tensors on each of {tp} ranks in {_files(found.num_files)}, "
        f"{human_bytes(found.num_bytes)} per rank"
    )
    click.echo(
        f"vllm serve {Path(dst)} --load-format sharded_state --tensor-parallel-size {tp} "
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


@click.command("push")
@click.argument("src", type=click.Path())
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="Make the repository private.")
@click.option(
    "--revision", metavar="BRANCH", help="Branch to push to. It is created if necessary.  [default: main]"
)
@click.option("--token", help="Hub token with write access.  [default: the Hub login]")
@click.option("--dry-run", is_flag=True, help="Only list the files that would be sent or deleted.")
@json_option
@loudness_options
def push_command(src: str, repo_id: str, as_json: bool, quiet: bool, verbose: bool, **options: Any) -> None:
    """Publish a converted directory on the Hugging Face Hub.

    SRC may be a URL in an object store. The command verifies it first. The files go to tp-N/ (with stages to
    pp-P-tp-N/) of the repository REPO_ID, so one repository can hold the model for several numbers of ranks.
    Identical files are stored and sent once. The model card has a picture of each plan, and text that you add
    to it is kept. To continue an interrupted push, run the same command again.

    \b
    Examples:
      shardconv push out/ user/model-tp
      shardconv push out/ user/model-tp --dry-run
    """
    try:
        with working(quiet, verbose) as progress:
            pushed = push(src, repo_id, progress=progress, **options)
    except DamagedError as error:
        for line in error.problems:
            click.echo(line, err=True)
        raise
    if as_json:
        print_report(_push_record(pushed, options["dry_run"]))
    elif not quiet:
        for line in describe(pushed, options["dry_run"]):
            click.echo(line)


def _push_record(pushed: Pushed, is_dry_run: bool) -> records.PushReport:
    return records.PushReport(
        pushed.repo_id,
        pushed.path,
        pushed.url,
        pushed.commit,
        is_dry_run,
        tuple(records.SizedFileReport(path, size) for path, size in pushed.sent.items()),
        pushed.sent_bytes,
        tuple(records.SizedFileReport(path, size) for path, size in pushed.there.items()),
        tuple(pushed.deleted),
    )


COMMANDS = (export_command, push_command)
