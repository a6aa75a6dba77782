"""The commands of earlier versions. They are not in the help, and say which command to call now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from shardconv_runtime.format import plan_json

from .directory_commands import directory_of, reshard_command, write_page
from .export_command import export_command
from .options import (
    RenamedOptions,
    is_on_hub,
    loudness_options,
    opened,
    sequence_option,
    size_options,
    tokens_option,
    trust_option,
    where_options,
)


def say_instead(new: str) -> None:
    """Print how a command is called now."""
    click.echo(f"this command is now called: shardconv {new}", err=True)


@click.command("merge", hidden=True, cls=RenamedOptions)
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@trust_option("SRC")
@size_options
@loudness_options
@click.pass_context
def merge_command(context: click.Context, /, src: str, dst: str, **options: Any) -> Any:
    """Write an ordinary checkpoint; see export --format hf."""
    say_instead(f"export {src} {dst} --format hf")
    return context.invoke(export_command, src=src, dst=dst, chosen="hf", **options)


@click.command("replan", hidden=True)
@click.argument("src", type=click.Path())
@sequence_option
@click.option("--no-check", is_flag=True, help="Skip the numerical check of the new plan.")
@trust_option("SRC")
@loudness_options
@click.pass_context
def replan_command(context: click.Context, /, src: str, **options: Any) -> Any:
    """Solve a directory again; see reshard --in-place."""
    say_instead(f"reshard {src} --in-place")
    return context.invoke(reshard_command, src=src, in_place=True, **options)


@click.command("report", hidden=True)
@click.argument("src", type=click.Path())
@click.option("-o", "--output", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--overwrite", is_flag=True)
@tokens_option
@where_options
def report_command(
    src: str, output: str | None, overwrite: bool, tokens: int, tp: int | None, **hub: Any
) -> None:
    """Write a web page; see inspect --html."""
    path = Path(src)
    parts = opened(src, tp, hub) if path.is_dir() or is_on_hub(src) else []
    about = parts[0].directory if len(parts) == 1 else path
    if output is None and parts and parts[0].repository is not None:
        output = f"{path.name}-{parts[0].manifest.tp}-report.html"
    output = output or str(_beside(about))
    say_instead(f"inspect {src} --html {output}")
    plan = parts[0].plan if parts else plan_json.read(path)
    write_page(output, about, plan, parts, tokens, overwrite=overwrite)
    if output != "-":
        click.echo(f"{output}: open it in a browser")


def _beside(src: Path) -> Path:
    """Return the default target."""
    about = directory_of(src) or src
    resolved = about.resolve()
    target = resolved.parent / f"{resolved.name if about.is_dir() else resolved.stem}-report.html"
    near = target.is_relative_to(Path.cwd()) and not src.is_absolute()
    return target.relative_to(Path.cwd()) if near else target


COMMANDS = (merge_command, replan_command, report_command)
