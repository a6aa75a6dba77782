"""The command that publishes a converted directory."""

from __future__ import annotations

from typing import Any

import click

from ..publishing.push import describe, push
from ..verifying.directories.verify import DamagedError
from .options import loudness_options, working


@click.command("push")
@click.argument("out", type=click.Path())
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="Make the repository private.")
@click.option(
    "--revision", metavar="BRANCH", help="Branch to push to, created if it does not exist.  [default: main]"
)
@click.option("--token", help="Hub token with write access.  [default: that of the Hub login]")
@click.option("--dry-run", is_flag=True, help="Change nothing; list the files that would be sent or deleted.")
@loudness_options
def push_command(out: str, repo_id: str, quiet: bool, verbose: bool, **options: Any) -> None:
    """Publish the converted directory OUT in the repository REPO_ID of the Hugging Face Hub.

    OUT is verified first. Its files go to tp-N/ (with stages to pp-P-tp-N/), so that one repository can hold
    the model for several numbers of ranks; equal files are stored and sent once. The model card lists them,
    with a picture of each plan; text that you wrote in it is kept. The same command continues an interrupted
    push.

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


"""In the order of the help."""
