"""The command that shows a plan as a web page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from shardconv_runtime.errors import CheckpointError
from shardconv_runtime.format import plan_json as codec
from shardconv_runtime.format.manifest import MANIFEST_NAME
from shardconv_runtime.format.typed_json import write_text

from ..publishing.picture import picture
from .opening import is_on_hub, opened
from .options import tokens_option, where_options


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
    from ..reporting.html_report import html_report  # the other commands need no Jinja

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
        _require_replaceable(target, about, overwrite=overwrite)
    plan = codec.read(path) if found is None else found.plan
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


def _require_replaceable(target: Path, out: Path, *, overwrite: bool) -> None:
    """Refuse to write into OUT, or to replace a file that is not a report.

    Raises:
        CheckpointError: if ``target`` may not be written.
    """
    from ..reporting.html_report import MARK

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
        if MARK.encode() not in beginning:
            raise CheckpointError(f"{target} exists and is not a report; give another FILE, or --overwrite")


COMMANDS = (report_command,)
"""The commands in the order of the help."""
