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
from shardconv_runtime.plan_checks import EXPERT_MODES

from .convert import convert, parse_size, plan, require_tp
from .replan import replan

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
        print("interrupted; nothing was left behind", file=sys.stderr)
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
    OUT appears when all is done, or not at all.

    \b
    Examples:
      shardconv convert ./my-model --tp 2 out/
      shardconv convert org/name --revision v1.0 --tp 8 --dtype bfloat16 out/
      shardconv convert org/mixture --tp 8 --experts ep out/
    """
    from .report import human_bytes
    from .summary import summarize

    require_tp(tp)  # here too, so that these answer before the libraries are imported
    parse_size(options["max_file_size"])
    with _working(quiet, verbose) as progress:
        solved = convert(model, out, tp, check=not no_check, progress=progress, **options)
    if not quiet:
        summary = summarize(solved)
        click.echo(
            f"{out}: {human_bytes(max(summary.rank_bytes))} on each of {tp} ranks, "
            f"of {human_bytes(summary.total_bytes)}; shardconv inspect {out} shows the plan"
        )


@cli.command("plan")
@click.argument("model")
@tp_option
@experts_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan itself, as in plan.json.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="Write the plan (JSON) to FILE."
)
@click.option("--check", is_flag=True, help="Prove the plan too, as convert does.")
@click.option("--tokens", default=2048, show_default=True, metavar="N", help="Tokens of the reported pass.")
@hub_options
def plan_command(
    model: str,
    tp: int,
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

    \b
    Examples:
      shardconv plan org/name --tp 8
      shardconv plan ./my-model --tp 4 --json -o plan.json
    """
    from shardconv_runtime import codec

    require_tp(tp)
    with _working(quiet, verbose) as progress:
        solved = plan(model, tp, progress=progress, **options)
    if output is not None:
        codec.write(solved, output)
    if not quiet or as_json:
        _print_plan(solved, as_json, tokens)


@cli.command("inspect")
@click.argument("out", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the plan itself.")
@click.option("--tokens", default=2048, show_default=True, metavar="N", help="Tokens of the reported pass.")
def inspect_command(out: str, as_json: bool, tokens: int) -> None:
    """Show the plan and the files of the converted directory OUT.

    \b
    Example:
      shardconv inspect out/
    """
    from shardconv_runtime import codec, manifest

    found = manifest.read(out)
    for rank in range(found.tp):
        manifest.check_sizes(out, found, rank)
    _print_plan(codec.read(Path(out) / manifest.PLAN_NAME), as_json, tokens)
    if not as_json:
        from .report import files_report

        click.echo("\n" + files_report(found), nl=False)


@cli.command("replan")
@click.argument("out", type=click.Path())
@click.option("--no-check", is_flag=True, help="Skip the proof of the new plan.")
@click.option("--trust-remote-code", is_flag=True, help="Run the Python code in OUT.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.option("-v", "--verbose", is_flag=True, help="Show what transformers logs, and tracebacks.")
def replan_command(out: str, no_check: bool, trust_remote_code: bool, quiet: bool, verbose: bool) -> None:
    """Solve OUT again for the installed torch and transformers, keeping its shards.

    A plan holds for the model code that it was solved for; after an upgrade the runtime refuses it
    and names this command. It takes seconds. If the new plan slices some tensor in another way, OUT is
    left as it is and has to be converted again.

    \b
    Example:
      shardconv replan out/
    """
    with _working(quiet, verbose) as progress:
        solved = replan(out, trust_remote_code=trust_remote_code, check=not no_check, progress=progress)
    if not quiet:
        code = solved.code
        click.echo(
            f"{out}: planned for torch {code.torch}, transformers {code.transformers}; the shards are kept"
        )


@contextmanager
def _working(quiet: bool, verbose: bool) -> Iterator[Any]:
    """Progress on standard error, and silence from the libraries unless ``verbose``."""
    gc.set_threshold(100_000, 50, 50)  # the libraries make many objects that stay: a quarter of the start
    from .chatter import quiet_libraries
    from .progress import for_terminal

    progress = for_terminal(quiet=quiet)
    if verbose:
        yield progress
        return
    with quiet_libraries():
        yield progress


def _print_plan(solved: Any, as_json: bool, tokens: int) -> None:
    from shardconv_runtime import codec

    from .report import report

    click.echo(codec.dumps(solved) if as_json else report(solved, num_tokens=tokens), nl=False)
