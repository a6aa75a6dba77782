"""The command line: parse, call, print, exit codes.

docs/commands.md lists the exit codes.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import chain

import click
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.hub_options import of_commands
from shardconv_runtime.versions import __version__

from .directory_commands import COMMANDS as DIRECTORY_COMMANDS
from .env_command import COMMANDS as ENV_COMMANDS
from .export_command import COMMANDS as EXPORT_COMMANDS
from .launch_commands import COMMANDS as LAUNCH_COMMANDS
from .model_commands import COMMANDS as MODEL_COMMANDS
from .old_commands import COMMANDS as OLD_COMMANDS
from .options import printable

INTERNAL, USAGE, DAMAGE, NETWORK, REFUSED, INTERRUPTED = 1, 2, 3, 4, 5, 130
"""Exit codes; errors of the project have their own, see ``ShardconvError.exit_code``."""

EXIT_CODES = {
    0: "done",
    INTERNAL: "an internal error; please report it",
    USAGE: "wrong usage: an option, an argument or a path that does not exist",
    DAMAGE: "files are missing, or differ from those that were written",
    NETWORK: "the Hub cannot be reached or does not answer",
    REFUSED: "the request cannot be met: no plan, too little memory, an unsupported model, other code, an "
    "output that exists",
    INTERRUPTED: "interrupted; 128 and the number of another signal that ended run or serve",
}
"""The meaning of each exit code."""

CLOSE = 0.75
"""Similarity of the names of options, from 0 to 1, of which one may be a misspelling of the other."""

_REMEDIES = {
    errno.ENOENT: "name a directory that exists",
    errno.ENOTDIR: "name a directory that exists",
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space",
    errno.EACCES: "correct the permissions",
    errno.EPERM: "correct the permissions",
    errno.EROFS: "name a directory that can be written",
}
"""Remedies for errors of files."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and print any error in one line.

    Returns:
        The exit code.
    """
    try:
        with of_commands():
            result = cli.main(args=argv, prog_name="shardconv", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"; see {context.command_path} --help" if context else ""
        return _fail(_usage_text(error).rstrip(".") + hint)
    except ShardconvError as error:
        return _fail(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains on exit
        return 1
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        remedy = _REMEDIES.get(error.errno or 0, "free space or correct the permissions")
        return _fail(f"{error.strerror or error}{where}; {remedy}, then try again", REFUSED)
    except MemoryError as error:
        return _fail(f"out of memory; run the command on a machine with more free memory: {error}", REFUSED)
    except Exception as error:
        if "-v" in (argv or sys.argv) or "--verbose" in (argv or sys.argv):
            traceback.print_exc()
        return _fail(
            f"internal error ({type(error).__name__}: {error}); please report it, with the output of -v",
            INTERNAL,
        )


def _usage_text(error: click.ClickException) -> str:
    """Return the message of a wrong command line; an option that does not exist names one that is close.

    click names the nearest one in any case, such as ``--quiet`` for ``--quantize``.
    """
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    bare_names = {option.lstrip("-"): option for option in error.possibilities or ()}
    nearest = get_close_matches(error.option_name.lstrip("-"), bare_names, 1, CLOSE)
    return error.message + (f" Did you mean {bare_names[nearest[0]]}?" if nearest else "")


def _fail(message: str, code: int = USAGE) -> int:
    print("error: " + printable(" ".join(message.split())), file=sys.stderr)
    return code


class Groups(click.Group):
    """A group whose help lists its commands in sections."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        for title, commands in GROUPS.items():
            with formatter.section(title):
                rows = [(str(each.name), each.get_short_help_str(limit=100)) for each in commands]
                formatter.write_dl(rows)


GROUPS: Mapping[str, Sequence[click.Command]] = {
    "Convert": MODEL_COMMANDS,
    "Work with a converted directory": DIRECTORY_COMMANDS,
    "Use a model on this machine": LAUNCH_COMMANDS,
    "Publish and export": EXPORT_COMMANDS,
    "Report a problem": ENV_COMMANDS,
}
"""The commands, in the order of the help."""


@click.group(
    cls=Groups,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="shardconv %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Ahead-of-time tensor parallelism for transformers models.

    Convert a model once, on any machine and without a GPU, to a plan and one set of weights per rank. Under
    torchrun, each rank then reads only its own bytes.

    \b
    Examples:
      shardconv convert org/name out/ --tp 2
      shardconv run out/ "Name three rivers"

    \b
    In a script that torchrun starts:
      import shardconv_runtime
      model = shardconv_runtime.load("out/")

    Exit codes: 0 done, 1 internal error, 2 wrong usage, 3 missing or damaged files, 4 network, 5 the request
    cannot be met, 130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (*chain(*GROUPS.values()), *OLD_COMMANDS):
    cli.add_command(_command)
