"""The command that plans an adapter of a converted directory."""

from __future__ import annotations

from typing import Any

import click

from ..converted.adapt import adapt
from .opening import require_local
from .options import loudness_options, trust_option
from .working import working


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


COMMANDS = (adapt_command,)
