"""The commands that take a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from shardconv_runtime.checkpoint.model_directory import model_directory
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.typed_json import write_text
from shardconv_runtime.hub_options import Hub

from ..arguments import RandomInit, SolveOptions, parse_ranks, parse_size
from ..convert import convert, plan
from ..fitting import FewestRanks, require_fit, smallest_tp, table
from ..hardware.machines import Cluster, parse_cluster
from ..hardware.predicted_lines import choices_text, predicted_lines, predicted_record
from ..reporting.plan_lines import RESERVE, Workload, aligned
from ..reporting.plan_records import plan_record
from ..reporting.records import CandidateReport, PredictedReport
from ..reporting.report import report
from ..reporting.summary import human_bytes, summarize
from .directory_commands import written_record
from .export_command import plan_text
from .options import (
    RenamedOptions,
    auto_tp_option,
    cluster_options,
    device_options,
    example_option,
    experts_option,
    hub_from,
    initial_options,
    json_option,
    model_options,
    on_cluster_from,
    part_options,
    print_complete,
    print_errors,
    print_report,
    print_written,
    quantize_options,
    quantizing_from,
    sequence_option,
    size_options,
    stage_options,
    stream_option,
    tokens_option,
    tp_option,
    was_complete,
    working,
    writing_from,
    written_manifests,
)

OLD_FORMATS = {"json": "plan", "tp_plan": "tp_plan", "shards": "shards"}
"""Formats of ``plan`` in earlier versions, and of ``export`` now."""


@click.command("convert", cls=RenamedOptions)
@click.argument("model", type=click.Path())
@click.argument("dst", type=click.Path())
@tp_option()
@stage_options
@experts_option
@sequence_option
@size_options
@part_options("DST")
@stream_option
@initial_options
@quantize_options
@example_option
@cluster_options
@click.option("--no-check", is_flag=True, help="Skip the numerical check.")
@json_option
@model_options
def convert_command(
    model: str, dst: str, tp: int, no_check: bool, as_json: bool, quiet: bool, verbose: bool, **options: Any
) -> None:
    """Convert a model to shards for N ranks.

    MODEL is a directory with config.json and weights, the id of a Hub repository, or a URL such as
    s3://bucket/model. DST is the directory to create, or its URL. Before the command writes anything, it
    checks the plan: it simulates all ranks in float64 and compares them with the unsharded model. Until the
    conversion is complete, a directory contains only .partial, and a URL no manifest.json. To continue an
    interrupted run, run the same command again.

    \b
    Examples:
      shardconv convert ./my-model out/ --tp 2
      shardconv convert org/name --revision v1.0 --tp 8 --dtype bfloat16 out/
      shardconv convert org/mixture --tp 8 --experts ep out/
      shardconv convert org/name --tp 8 --sequence-parallel out/
      shardconv convert org/large --tp 8 --pp 2 out/         # two hosts of 8
      shardconv convert org/large --tp 8 --pp 2 --ranks 8-15 out/  # on the second one
      shardconv convert org/large --tp 8 --ranks 0-3 out/    # 4-7 on another machine
      shardconv convert ./my-robot --trust-remote-code --example-inputs call.py out/ --tp 2
      shardconv convert org/large --tp 8 --quantize fp8 out/
      shardconv convert org/large --tp 16 --on 2x8xH100 --batch 32 --context 8192 out/
      shardconv convert --random-init --seed 7 my-config/ out/ --tp 8
      shardconv convert s3://bucket/model --tp 8 s3://bucket/model-tp8
    """
    parse_ranks(options["ranks"], tp * options["pp"])  # here too, before the libraries are imported
    options["on"] = on_cluster_from(options)
    seed, random_init = options.pop("seed"), options.pop("random_init")
    if seed is not None and not random_init:
        raise click.UsageError("--seed is for the weights of a new model; add --random-init, or leave it out")
    initial = RandomInit(seed=seed or 0) if random_init else None
    is_complete = was_complete(dst, overwrite=options["overwrite"])
    values: dict[str, Any] = {
        "hub": hub_from(options),
        "writing": writing_from(options),
        "random_init": initial or False,
        "quantize": quantizing_from(options),
    }
    with working(quiet, verbose) as progress:
        solved = convert(model, dst, tp, check=not no_check, progress=progress, **values, **options)
    if as_json:
        print_report(written_record(dst, solved, was_complete=is_complete))
    elif quiet:
        return
    elif is_complete:
        print_complete(dst)
    elif solved.stages is not None:
        most = human_bytes(max(summarize(solved).rank_bytes))
        print_written(dst, f"at most {most}", f"{tp} ranks of {solved.stages.count} stages")
        print_errors(written_manifests(dst), solved)
    elif manifests := written_manifests(dst):
        summary = summarize(solved)
        largest_rank = human_bytes(max(summary.rank_bytes))
        if largest_rank != human_bytes(min(summary.rank_bytes)):
            largest_rank = f"at most {largest_rank}"
        drawn = ""
        if initial:
            drawn = f", initialized at random with seed {initial.seed}"
        print_written(dst, f"{largest_rank} of {human_bytes(summary.total_bytes)}", f"{tp} ranks{drawn}")
        print_errors(manifests, solved)


@click.command("plan")
@click.argument("model", type=click.Path())
@auto_tp_option
@stage_options
@experts_option
@sequence_option
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="Write the plan to FILE."
)
@quantize_options
@click.option("--check/--no-check", default=None, help="Check the plan numerically.  [default: only with -o]")
@example_option
@tokens_option
@device_options
@json_option
@click.option("--format", "chosen", type=click.Choice(("report", *OLD_FORMATS)), hidden=True)
@model_options
def plan_command(
    model: str,
    tp: int | str,
    output: str | None,
    check: bool | None,
    tokens: int,
    as_json: bool,
    chosen: str | None,
    **options: Any,
) -> None:
    """Show how a model would be sharded. Needs only its config.

    The report lists each kind of layer of MODEL with its category, local shapes and bytes per rank, the
    replicated parameters and the reason, the collectives of one forward pass, and the memory for weights,
    cache and activations.

    With --device-memory, the exit code is 5 if the model does not fit.

    With --on, the report predicts the times of a prefill, a token, a training step and a start on these
    devices. Predictions are not measurements; docs/hardware.md compares them. With --tp auto, --batch is
    shared by the copies of the model.

    With a plan in a file you can load a model without converting it: load("org/name", plan="plan.json").
    The command export prints a plan in other formats.

    \b
    Examples:
      shardconv plan org/name --tp 8
      shardconv plan org/name --tp 8 --device-memory 80GB
      shardconv plan org/name --tp auto --device-memory 80GB --context 32768
      shardconv plan org/large --tp 8 --pp 2
      shardconv plan org/name --tp 8 --on 8xH100 --batch 32 --context 8192
      shardconv plan org/large --tp auto --on 2x8xH100 --batch 32 --context 8192
      shardconv plan ./my-model --tp 4 -o plan.json
    """
    old = None if chosen in (None, "report") else str(chosen)
    if old is not None:
        format_now = OLD_FORMATS[old]
        target = f" {output}" if output else ""
        click.echo(
            f"plan --format {old} is now called: shardconv export {model}{target} --format {format_now} "
            f"--tp {tp}",
            err=True,
        )
    if check is None:
        check = old == "json" or (old is None and output is not None)
    cluster = _cluster(options.pop("on"), options.pop("hardware"), tp, options)
    device = [options.pop(name) for name in ("device_memory", "reserve", "context", "batch")]
    if cluster is not None:
        device[0] = device[0] or str(cluster.device.memory_bytes)
        device[2] = device[2] or tokens
    load = _load(tp, *device)
    quiet, verbose = options.pop("quiet"), options.pop("verbose")
    options["hub"] = hub = hub_from(options)
    options["quantize"] = quantizing_from(options)
    if output is not None and not os.access(Path(output).parent, os.W_OK):
        raise click.UsageError(f"-o {output}: its directory does not exist, or cannot be written")
    with working(quiet, verbose) as progress:
        choice, prediction = None, None
        if cluster is not None and load is not None:
            prediction = _predicted(model, tp, cluster, load, check, progress, options)
            solved = prediction.plan
        elif isinstance(tp, str):
            solved, choice = _smallest(model, load, check, progress, options)
        else:
            solved = plan(model, tp, check=check, progress=progress, **options)
        text = ""
        if old is not None or output is not None:
            read = {name: options[name] for name in ("dtype", "trust_remote_code")}
            text = plan_text(solved, OLD_FORMATS[old or "json"], model, hub, **read)
        if output is not None:
            write_text(Path(output), text)
        is_default = click.get_current_context().get_parameter_source("tokens") == ParameterSource.DEFAULT
        lengths = {"--tokens": None if is_default else tokens, "--context": load.context if load else None}
        remarks = _about_positions(lengths, model, hub, trust_remote_code=options["trust_remote_code"])
    if old is not None:
        click.echo(text, nl=False)
    elif as_json:
        candidates = () if choice is None else _candidates(choice)
        predictions = () if prediction is None else prediction.records
        print_report(plan_record(solved, tokens, load, candidates, predictions))
    elif not (quiet and output is not None):
        click.echo("" if choice is None else _choice_text(choice), nl=False)
        click.echo("" if prediction is None else prediction.table, nl=False)
        click.echo(report(solved, num_tokens=tokens, load=load), nl=False)
        click.echo("" if prediction is None else prediction.section, nl=False)
    for remark in remarks if not quiet else ():
        click.echo(remark, err=True)
    if load is not None:
        require_fit(solved, load)


def _about_positions(
    lengths: Mapping[str, int | None], model: str, hub: Hub, *, trust_remote_code: bool
) -> list[str]:
    """Return a remark for each length that is more than the positions of the model's config.

    Args:
        lengths: options and their values, None for those that were not given.
    """
    if not any(lengths.values()):
        return []
    from shardconv_runtime.checkpoint.resolve import resolve  # it imports torch, as planning has

    config = resolve(
        model, replace(hub, local_files_only=True), need_weights=False, trust_remote_code=trust_remote_code
    ).config
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return [
        f"remark: {option} {length:,} is more than the {positions:,} positions in the model's config "
        "(max_position_embeddings)"
        for option, length in lengths.items()
        if length is not None and isinstance(positions, int) and length > positions > 0
    ]


def _candidates(choice: FewestRanks) -> list[CandidateReport]:
    """Return the numbers of ranks that were tried, for a report."""
    candidates = []
    for each in choice.candidates:
        needed = each.needs
        sizes: tuple[int | None, ...] = (None,) * 4
        if needed is not None:
            sizes = (needed.weights, needed.cache, needed.activations, needed.total)
        candidates.append(
            CandidateReport(each.tp, each is choice.chosen, each.is_enough, each.problem, *sizes)
        )
    return candidates


def _choice_text(choice: FewestRanks) -> str:
    """Return a table of the chosen number of ranks and its neighbors."""
    lines = [f"CHOICE  tp {choice.chosen.tp} is the smallest power of two that fits", *aligned(table(choice))]
    lines += [f"  tp {each.tp}: {each.problem}" for each in choice.candidates if each.problem]
    return "\n".join(lines) + "\n\n"


def _load(
    tp: int | str, device_memory: str | None, reserve: str | None, context: int | None, batch: int | None
) -> Workload | None:
    """Return the workload and the device that the options describe; None if no device was named."""
    if device_memory is None:
        options = {"--tp auto": tp == "auto", "--reserve": reserve, "--context": context, "--batch": batch}
        for option in (name for name, value in options.items() if value):
            raise click.UsageError(f"{option} needs --device-memory, for example --device-memory 80GB")
        return None
    if batch is not None and context is None:
        raise click.UsageError("--batch needs --context: the tokens of each sequence")
    reserved = RESERVE if reserve is None else parse_size(reserve)
    size = parse_size(device_memory)
    if reserved >= size:
        raise click.UsageError(
            f"--reserve {reserved:,} bytes leaves nothing of --device-memory {size:,} bytes"
        )
    return Workload(size, reserved, context, batch or 1)


def _cluster(
    on: str | None, hardware: str | None, tp: int | str, options: Mapping[str, Any]
) -> Cluster | None:
    """Return the cluster of ``--on``; None without it."""
    if on is None:
        if hardware is not None:
            raise click.UsageError("--hardware is for --on; add that, for example --on 2xCPU")
        return None
    cluster = parse_cluster(on, hardware)
    if options["quantize"] is not None:
        raise click.UsageError("--on predicts no times of packed weights; leave out --quantize or --on")
    cluster.require(1 if isinstance(tp, str) else tp * options["pp"])
    if isinstance(tp, str) and options["stages"]:
        raise click.UsageError("--stages is for a number of stages; leave it out with --tp auto --on")
    return cluster


@dataclass(frozen=True, slots=True)
class _Prediction:
    """A plan with predictions, as text and as records."""

    plan: Plan
    table: str
    """The choices for a cluster; empty if the number of ranks was given."""
    section: str
    """The section about the plan."""
    records: tuple[PredictedReport, ...]


def _predicted(
    model: str,
    tp: int | str,
    cluster: Cluster,
    load: Workload,
    check: bool,
    progress: Any,
    options: Mapping[str, Any],
) -> _Prediction:
    """Plan a model, and predict its times on a cluster."""
    # They import torch.
    from ..conversion import ModelPlanner, ModelSource
    from ..hardware.priced_plans import Choice, PricedPlan, all_choices, priced_plan

    model_directory(model, need_weights=False)
    source = ModelSource(model, options["hub"], options["dtype"], options["trust_remote_code"])
    planner = ModelPlanner(source, options["example_inputs"], progress)

    def solve(ranks: int, pp: int, experts: str, share: Workload, replicas: int) -> PricedPlan:
        progress.stage(f"tp {ranks}, pp {pp}, experts {experts}")
        solved_for = SolveOptions(
            ranks,
            experts,
            options["sequence_parallel"],
            check and not isinstance(tp, str),
            measure=True,
            pp=pp,
            stages=options["stages"],
        )
        return priced_plan(planner, solved_for, cluster, share, replicas=replicas)

    if isinstance(tp, str):
        modes = tuple(dict.fromkeys((options["experts"], "tp", "ep")))
        choices = all_choices(solve, cluster, load, modes)
        chosen = choices.fastest
        assert chosen.priced is not None
        best = (choices.fastest, choices.most)
        rows = tuple(predicted_record(each, cluster, load, best) for each in choices.choices)
        table = choices_text(choices, cluster, load)
    else:
        priced = solve(tp, options["pp"], options["experts"], load, 1)
        chosen = Choice(tp, options["pp"], 1, options["experts"], priced, priced.problem)
        rows, table = (predicted_record(chosen, cluster, load),), ""
    assert chosen.priced is not None
    solved = chosen.priced.plan
    if check and isinstance(tp, str):  # of all choices, only this one
        solved = planner.plan(replace(chosen.priced.options, check=True))
    if chosen.predicted is None:
        section = f"\nPREDICTED  nothing: {chosen.problem}\n"
    else:
        share = replace(load, batch=chosen.predicted.batch)
        lines = predicted_lines(chosen.predicted, cluster, share, chosen.priced.usual)
        section = "\n" + "\n".join(lines) + "\n"
    return _Prediction(solved, table, section, rows)


def _smallest(
    model: str, load: Workload | None, check: bool, progress: Any, options: dict[str, Any]
) -> tuple[Plan, FewestRanks]:
    """Return the plan for the fewest ranks that fit, and their neighbors."""
    assert load is not None

    def solve(tp: int) -> Plan:
        progress.stage(f"tp {tp}")
        return plan(model, tp, check=False, progress=progress, **options)

    choice = smallest_tp(solve, load)
    solved = choice.plan
    if check:
        solved = plan(model, choice.chosen.tp, check=True, progress=progress, **options)
    return solved, choice


COMMANDS = (plan_command, convert_command)
