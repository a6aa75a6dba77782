"""The commands that take a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from shardconv_runtime.files.manifest import MANIFEST_NAME
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.typed_json import write_text
from shardconv_runtime.hub_options import Hub

from ..arguments import RandomInit, parse_ranks, parse_size
from ..convert import convert, plan
from ..fitting import smallest_tp, table
from ..reporting.plan_lines import RESERVE, Workload, aligned
from ..reporting.report import report
from ..reporting.summary import human_bytes, summarize
from .options import (
    auto_tp_option,
    device_options,
    example_option,
    experts_option,
    hub_from,
    initial_options,
    model_options,
    part_options,
    print_written,
    sequence_option,
    size_options,
    stage_options,
    stream_option,
    tokens_option,
    tp_option,
    working,
    writing_from,
)


@click.command("convert")
@click.argument("model")
@click.argument("out", type=click.Path())
@tp_option
@stage_options
@experts_option
@sequence_option
@size_options
@part_options("OUT")
@stream_option
@initial_options
@example_option
@click.option("--no-check", is_flag=True, help="Skip the numerical check.")
@model_options
def convert_command(
    model: str, out: str, tp: int, no_check: bool, quiet: bool, verbose: bool, **options: Any
) -> None:
    """Convert MODEL to the directory OUT for N ranks.

    MODEL is a directory with config.json and weights, or the id of a Hub repository. Before the command
    writes anything, it checks the plan: it simulates all ranks in float64 and compares them with the
    unsharded model. Until the conversion is complete, OUT contains only .partial. To continue an interrupted
    run, run the same command again.

    \b
    Examples:
      shardconv convert ./my-model --tp 2 out/
      shardconv convert org/name --revision v1.0 --tp 8 --dtype bfloat16 out/
      shardconv convert org/mixture --tp 8 --experts ep out/
      shardconv convert org/name --tp 8 --sequence-parallel out/
      shardconv convert org/large --tp 8 --pp 2 out/         # two hosts of 8
      shardconv convert org/large --tp 8 --pp 2 --ranks 8-15 out/  # on the second one
      shardconv convert org/large --tp 8 --ranks 0-3 out/    # 4-7 on another machine
      shardconv convert ./my-robot --trust-remote-code --example-inputs call.py --tp 2 out/
      shardconv convert --random-init --seed 7 my-config/ --tp 8 out/
    """
    parse_ranks(options["ranks"], tp * options["pp"])  # here too, before the libraries are imported
    seed, random_init = options.pop("seed"), options.pop("random_init")
    if seed is not None and not random_init:
        raise click.UsageError("--seed is for the weights of a new model; add --random-init, or leave it out")
    initial = RandomInit(seed=seed or 0) if random_init else None
    values: dict[str, Any] = {
        "hub": hub_from(options),
        "writing": writing_from(options),
        "random_init": initial or False,
    }
    with working(quiet, verbose) as progress:
        solved = convert(model, out, tp, check=not no_check, progress=progress, **values, **options)
    if not quiet and solved.stages is not None:
        most = human_bytes(max(summarize(solved).rank_bytes))
        print_written(out, f"at most {most}", f"{tp} ranks of {solved.stages.count} stages")
    elif not quiet and (Path(out) / MANIFEST_NAME).is_file():
        summary = summarize(solved)
        held = human_bytes(max(summary.rank_bytes))
        if held != human_bytes(min(summary.rank_bytes)):
            held = f"at most {held}"
        drawn = ""
        if initial:
            drawn = f", initialized at random with seed {initial.seed}"
        print_written(out, f"{held} of {human_bytes(summary.total_bytes)}", f"{tp} ranks{drawn}")


@click.command("plan")
@click.argument("model")
@auto_tp_option
@stage_options
@experts_option
@sequence_option
@click.option(
    "--format",
    "chosen",
    type=click.Choice(("report", "json", "tp_plan", "shards")),
    help="A report, the plan as JSON, a tp_plan for transformers, or the parts of each parameter that each "
    "rank holds.  [default: report; json in FILE]",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="Also write it to FILE."
)
@click.option(
    "--check/--no-check",
    default=None,
    help="Check the plan numerically.  [default: only for json]",
)
@example_option
@tokens_option
@device_options
@model_options
def plan_command(
    model: str,
    tp: int | str,
    chosen: str | None,
    as_json: bool,
    output: str | None,
    check: bool | None,
    tokens: int,
    **options: Any,
) -> None:
    """Show how MODEL would be converted for N ranks. Needs only its config.

    The report lists each kind of layer with its category, local shapes and bytes per rank, the replicated
    parameters and the reason, the collectives of one forward pass, and the memory for weights, cache and
    activations.

    With a plan in JSON you can load a model without converting it: load("org/name", plan="plan.json").
    A tp_plan is for the tensor parallelism of transformers, if it can express the plan:
    from_pretrained(MODEL, distributed_config=DistributedConfig(tp_size=N, tp_plan=...)).
    Shards are for programs that move weights between processes with different sharding.

    \b
    Examples:
      shardconv plan org/name --tp 8
      shardconv plan org/name --tp 8 --device-memory 80GB
      shardconv plan org/name --tp auto --device-memory 80GB --context 32768
      shardconv plan org/large --tp 8 --pp 2
      shardconv plan ./my-model --tp 4 --json -o plan.json
      shardconv plan ./my-model --tp 4 --format tp_plan -o tp_plan.json
    """
    if as_json and chosen not in (None, "json"):
        raise click.UsageError(f"--json and --format {chosen} contradict each other; give one")
    chosen = "json" if as_json else chosen
    if check is None:
        check = chosen == "json" or (chosen is None and output is not None)
    if options["pp"] > 1 and chosen == "tp_plan":
        raise click.UsageError("--format tp_plan does not support stages; leave out --pp or --format")
    load = _load(tp, *(options.pop(name) for name in ("device_memory", "reserve", "context", "batch")))
    quiet, verbose = options.pop("quiet"), options.pop("verbose")
    options["hub"] = hub_from(options)
    if output is not None and not os.access(Path(output).parent, os.W_OK):
        raise click.UsageError(f"-o {output}: its directory does not exist, or cannot be written")
    with working(quiet, verbose) as progress:
        if isinstance(tp, str):
            solved, choice = _smallest(model, load, check, progress, options)
        else:
            solved, choice = plan(model, tp, check=check, progress=progress, **options), ""
        shown = _plan_text(solved, chosen or "report", tokens, load, model, options)
        if output is not None:
            text = shown if chosen else _plan_text(solved, "json", tokens, load, model, options)
            write_text(Path(output), text)
    if not quiet or chosen not in (None, "report"):
        click.echo((choice if chosen in (None, "report") else "") + shown, nl=False)


def _load(
    tp: int | str, device_memory: str | None, reserve: str | None, context: int | None, batch: int | None
) -> Workload | None:
    """Return the workload and the device that the options describe; None if no device was named."""
    if device_memory is None:
        given = {"--tp auto": tp == "auto", "--reserve": reserve, "--context": context, "--batch": batch}
        for option in (name for name, value in given.items() if value):
            raise click.UsageError(f"{option} needs --device-memory, for example --device-memory 80GB")
        return None
    if batch is not None and context is None:
        raise click.UsageError("--batch needs --context: the tokens of each sequence")
    kept = RESERVE if reserve is None else parse_size(reserve)
    size = parse_size(device_memory)
    if kept >= size:
        raise click.UsageError(f"--reserve {kept:,} bytes leaves nothing of --device-memory {size:,} bytes")
    return Workload(size, kept, context, batch or 1)


def _smallest(
    model: str, load: Workload | None, check: bool, progress: Any, options: dict[str, Any]
) -> tuple[Plan, str]:
    """Return the plan for the fewest ranks that fit, and a table of their neighbors as text."""
    assert load is not None

    def solve(tp: int) -> Plan:
        progress.stage(f"tp {tp}")
        return plan(model, tp, check=False, progress=progress, **options)

    choice = smallest_tp(solve, load)
    lines = [f"CHOICE  tp {choice.chosen.tp} is the smallest power of two that fits", *aligned(table(choice))]
    lines += [f"  tp {each.tp}: {each.problem}" for each in choice.candidates if each.problem]
    solved = choice.plan
    if check:
        solved = plan(model, choice.chosen.tp, check=True, progress=progress, **options)
    return solved, "\n".join(lines) + "\n\n"


def _plan_text(
    solved: Plan, chosen: str, tokens: int, load: Workload | None, model: str, options: dict[str, Any]
) -> str:
    """Return the plan in one of the formats; ``options`` are the options of the command ``plan``."""
    if chosen in ("tp_plan", "shards"):
        # It imports torch and transformers, which the help and wrong arguments do not need.
        from ..exports.tp_plan import dumps, skeleton, to_json, tp_plan

        if chosen == "shards":
            return dumps(solved)
        hub: Hub = options["hub"]
        read = {name: options[name] for name in ("dtype", "trust_remote_code")}
        return to_json(tp_plan(solved, skeleton(model, hub, **read, tied=dict(solved.tied))))
    if chosen == "json":
        return plan_json.dumps(solved)

    return report(solved, num_tokens=tokens, load=load)


COMMANDS = (convert_command, plan_command)
