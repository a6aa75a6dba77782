"""The command line: parse, call, print, exit codes.

0: done; 2: what was asked for cannot be done, said in one line; 130: interrupted; 1: a fault of
shardconv itself.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.manifest import MANIFEST_NAME
from shardconv_runtime.plan_checks import EXPERT_MODES

from ..convert import convert, parse_memory, parse_ranks, parse_size, plan, require_tp

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = ("float64", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code, every error having been printed in one line."""
    try:
        result = cli.main(args=argv, prog_name="shardconv", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        return _fail(_usage_message(error))
    except ShardconvError as error:
        return _fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        print("interrupted; the same command continues what it was writing", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains on exit
        return 1
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        return _fail(
            f"{error.strerror or error}{where}; free space or correct the permissions, then try again"
        )
    except Exception as error:
        if "-v" in (argv or sys.argv) or "--verbose" in (argv or sys.argv):
            traceback.print_exc()
        return _fail(
            f"internal error ({type(error).__name__}: {error}); please report it, with the output of -v",
            code=1,
        )


def _fail(message: str, code: int = 2) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


def _usage_message(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    hint = f"; see {context.command_path} --help" if context else ""
    return error.format_message().rstrip(".") + hint


def hub_options(command: Command) -> Command:
    """The options that say which model, and how it is read."""
    for decorate in (
        click.option("-v", "--verbose", is_flag=True, help="Show what transformers logs, and tracebacks."),
        click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
        click.option(
            "--trust-remote-code",
            is_flag=True,
            help="Run the Python code in the model's repository. Off by default: read that code first.",
        ),
        click.option(
            "--dtype", type=click.Choice(DTYPES), help="dtype of the parameters.  [default: as stored]"
        ),
        click.option(
            "--token", help="Hub token for private or gated models.  [default: that of the Hub login]"
        ),
        click.option(
            "--local-files-only", is_flag=True, help="Do not download; use the local Hub cache only."
        ),
        click.option("--cache-dir", type=click.Path(file_okay=False), help="Where Hub downloads are cached."),
        click.option("--revision", help="Branch, tag or commit of a Hub model.  [default: main]"),
    ):
        command = decorate(command)
    return command


tp_option = click.option("--tp", type=int, required=True, metavar="N", help="Number of ranks to shard for.")

experts_option = click.option(
    "--experts",
    type=click.Choice(EXPERT_MODES),
    default="tp",
    show_default=True,
    help="Split mixture-of-experts layers inside of each expert, or keep experts whole (ep).",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="shardconv", message="shardconv %(version)s")
def cli() -> None:
    """Ahead-of-time tensor parallelism for transformers models.

    A model is converted once, on any machine without a GPU, to a plan and one set of weights for each
    rank. Under torchrun each rank then reads only its own bytes.

    \b
      shardconv plan MODEL --tp 8           what a conversion would do, from the config alone
      shardconv convert MODEL --tp 8 out/   do it
      shardconv inspect out/                what a converted directory holds
      shardconv verify out/                 that every byte of it is right
      shardconv reshard out/ --tp 4 out-4/  the same model for another number of ranks
      shardconv merge out/ hf/              back to an ordinary checkpoint
      shardconv export out/ --format dcp d/ for torch's distributed checkpoint
      shardconv replan out/                 solve it again after an upgrade of transformers

    \b
    Then, in a script that torchrun starts with 8 processes:
      import shardconv_runtime
      model = shardconv_runtime.load("out/")
    """


@cli.command("convert")
@click.argument("model")
@click.argument("out", type=click.Path())
@tp_option
@experts_option
@click.option(
    "--max-file-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Begin a new file after so much; as 500MB or 5GB. A tensor is never split.",
)
@click.option(
    "--memory",
    default="512MiB",
    show_default=True,
    metavar="SIZE",
    help="For the buffers that weights pass through.",
)
@click.option(
    "--ranks",
    metavar="LIST",
    help="Write these ranks only, as 0-3 or 0,2,5; the part that comes last completes OUT.  [default: all]",
)
@click.option(
    "--overwrite", is_flag=True, help="Replace OUT if it is a converted directory, and nothing else."
)
@click.option("--no-check", is_flag=True, help="Skip the proof of the plan (retrace and simulated ranks).")
@hub_options
def convert_command(
    model: str, out: str, tp: int, no_check: bool, quiet: bool, verbose: bool, **options: Any
) -> None:
    """Convert MODEL to the directory OUT for N ranks.

    MODEL is a directory with config.json and weights, or the id of a Hub repository. The plan is proven
    before anything is written: every rank is simulated in float64 and compared with the unsharded model.
    Until all is done, OUT has no manifest.json and holds a directory .partial only; the same command
    continues a run that was interrupted.

    \b
    Examples:
      shardconv convert ./my-model --tp 2 out/
      shardconv convert org/name --revision v1.0 --tp 8 --dtype bfloat16 out/
      shardconv convert org/mixture --tp 8 --experts ep out/
      shardconv convert org/large --tp 8 --ranks 0-3 out/    # and 4-7 on another machine
    """
    from ..reporting.report import human_bytes
    from ..reporting.summary import summarize

    require_tp(tp)  # here too, so that these answer before the libraries are imported
    parse_size(options["max_file_size"])
    parse_memory(options["memory"])
    if options["ranks"] is not None:
        parse_ranks(options["ranks"], tp)
    with working(quiet, verbose) as progress:
        solved = convert(model, out, tp, check=not no_check, progress=progress, **options)
    if not quiet and (Path(out) / MANIFEST_NAME).is_file():
        summary = summarize(solved)
        click.echo(
            f"{out}: {human_bytes(max(summary.rank_bytes))} on each of {tp} ranks, "
            f"of {human_bytes(summary.total_bytes)}; shardconv inspect {out} shows the plan"
        )


@cli.command("plan")
@click.argument("model")
@tp_option
@experts_option
@click.option(
    "--format",
    "chosen",
    type=click.Choice(("report", "json", "tp_plan")),
    help="A report, the plan itself as in plan.json, or a tp_plan of transformers.  "
    "[default: report; json in FILE]",
)
@click.option("--json", "as_json", is_flag=True, help="Short for --format json.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="Write it to FILE, too."
)
@click.option("--check", is_flag=True, help="Prove the plan too, as convert does.")
@click.option("--tokens", default=2048, show_default=True, metavar="N", help="Tokens of the reported pass.")
@hub_options
def plan_command(
    model: str,
    tp: int,
    chosen: str | None,
    as_json: bool,
    output: str | None,
    tokens: int,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Show how MODEL would be converted for N ranks; needs its config only, no weights.

    Prints each kind of layer with its category, local shapes and bytes per rank, what stays replicated
    and why, and the collectives of one forward pass with the bytes of their tensors.

    A tp_plan makes transformers' own tensor parallelism do the same, if it can express the plan:
    from_pretrained(MODEL, distributed_config=DistributedConfig(tp_size=N, tp_plan=...)).

    \b
    Examples:
      shardconv plan org/name --tp 8
      shardconv plan ./my-model --tp 4 --json -o plan.json
      shardconv plan ./my-model --tp 4 --format tp_plan -o tp_plan.json
    """
    from shardconv_runtime.typed_json import write_text

    require_tp(tp)
    if as_json and chosen not in (None, "json"):
        raise click.UsageError(f"--json and --format {chosen} are two formats; give one")
    chosen = "json" if as_json else chosen
    with working(quiet, verbose) as progress:
        solved = plan(model, tp, progress=progress, **options)
        shown = _plan_text(solved, chosen or "report", tokens, model, options)
        if output is not None:
            write_text(Path(output), shown if chosen else _plan_text(solved, "json", tokens, model, options))
    if not quiet or chosen not in (None, "report"):
        click.echo(shown, nl=False)


def _plan_text(solved: Any, chosen: str, tokens: int, model: str, options: dict[str, Any]) -> str:
    """The plan in one of the formats; ``options`` are those of ``plan``."""
    if chosen == "tp_plan":
        from ..writing.tp_plan import skeleton, to_json, tp_plan

        how_to_read = {name: value for name, value in options.items() if name not in ("experts", "check")}
        return to_json(tp_plan(solved, skeleton(model, **how_to_read)))
    if chosen == "json":
        from shardconv_runtime import codec

        return codec.dumps(solved)
    from ..reporting.report import report

    return report(solved, num_tokens=tokens)


@contextmanager
def working(quiet: bool, verbose: bool) -> Iterator[Any]:
    """Progress on standard error, and silence from the libraries unless ``verbose``."""
    gc.set_threshold(100_000, 50, 50)  # the libraries make many objects that stay: a quarter of the start
    from ..reporting.chatter import quiet_libraries
    from ..reporting.progress import for_terminal

    progress = for_terminal(quiet=quiet)
    if verbose:
        yield progress
        return
    with quiet_libraries():
        yield progress


def print_plan(solved: Any, as_json: bool, tokens: int) -> None:
    from shardconv_runtime import codec

    from ..reporting.report import report

    click.echo(codec.dumps(solved) if as_json else report(solved, num_tokens=tokens), nl=False)


def _add_commands() -> None:
    from .converted import COMMANDS

    for command in COMMANDS:
        cli.add_command(command)


_add_commands()
