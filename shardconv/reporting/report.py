"""Describes a plan as text, at most 100 columns wide."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardconv_runtime.files.manifest import Manifest
from shardconv_runtime.format.dims import to_text
from shardconv_runtime.format.measured import Numerics
from shardconv_runtime.format.names import natural_key
from shardconv_runtime.format.plan import Plan, global_shape, local_shape

from .plan_lines import Workload, device_lines, fused_lines, memory_lines, stage_lines
from .summary import (
    Collective,
    LayerKind,
    Summary,
    TensorLine,
    all_notes,
    folders,
    human_bytes,
    human_count,
    percent,
    summarize,
    summed_gradients,
    weights_text,
)

WIDTH = 100
TOKENS = 2048
"""Default length of the forward pass whose bytes are shown."""


def report(plan: Plan, *, num_tokens: int = TOKENS, load: Workload | None = None) -> str:
    """Describe a plan: its layers, its replicated weights and the reasons, its collectives and its totals.

    Args:
        plan: any plan; it is all that is read.
        num_tokens: length of the forward pass whose bytes are shown.
        load: a device, and a workload: the report says whether it fits.
    """
    summary = summarize(plan)
    sections = (
        _header(plan),
        _layers(plan, summary.kinds),
        _replicated(plan, summary),
        _collectives(summary.collectives, num_tokens),
        _bulleted("FUSED       layers with the same input (inference only)", "  ", fused_lines(plan)),
        _totals(plan, summary),
        stage_lines(plan),
        memory_lines(plan, num_tokens),
        device_lines(plan, load) if load else (),
        _training(plan),
        _bulleted("NOTES", "  - ", all_notes(plan)),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines) + "\n"


def _header(plan: Plan) -> Iterator[str]:
    model = plan.model
    mesh = " x ".join(map(str, plan.mesh)) or "1"
    pp = f"pp {plan.stages.count}, " if plan.stages else ""
    yield model.class_name.partition(":")[2]
    yield (
        f"  {human_count(model.num_parameters)} parameters, {weights_text(plan)}"
        f" · {pp}tp {plan.tp}, mesh {mesh}"
        f" · torch {plan.code.torch}, transformers {plan.code.transformers}"
    )


def _layers(plan: Plan, kinds: Sequence[LayerKind]) -> Iterator[str]:
    if not kinds:
        return
    yield _row("LAYERS", "", "count", "bytes per rank")
    for kind in kinds:
        size = human_bytes(kind.rank_bytes) if kind.tensors else ""
        first, *rest = [name or "(the model)" for name in kind.names]
        yield _row(kind.category or unplanned(kind), first, str(kind.count), size)
        for name in rest:
            yield _row("", name, "", "")
        if plan.experts == "ep" and kind.category == "experts":
            yield f"{'':<12}expert parallel: experts are distributed, not sharded"
        yield from _aligned([tensor_cells(plan, line) for line in kind.tensors])
        overrides = []
        for override in kind.overrides:
            local = str(override.local[0])
            if len(set(override.local)) > 1:
                local = f"{local} … {override.local[-1]}"
            overrides.append(f"{override.attribute} {override.value} → {local}")
        if overrides:
            yield from _wrapped("overrides  ", ", ".join(overrides))


def unplanned(kind: LayerKind) -> str:
    """Return the label of a module without a category: how its parameters are laid out."""
    return "partial" if any(line.plan.partial for line in kind.tensors) else "shard"


def _row(left: str, name: str, count: str, size: str) -> str:
    return f"{left:<10}{name:<64} {count:>8}{size:>16}".rstrip()


def tensor_cells(plan: Plan, line: TensorLine) -> tuple[str, str, str]:
    """Return name, global and local shape, and the layout of the dims."""
    shape, entry = global_shape(line.plan), line.plan
    first, last = (local_shape(entry, plan.mesh, rank) for rank in (0, plan.tp - 1))
    shapes = _shape(shape)
    if first != shape:
        shapes += f" → {_shape(first)}" + (f" … {_shape(last)}" if last != first else "")
    layout = "[" + ", ".join(map(to_text, entry.dims)) + "]" if first != shape else ""
    if entry.partial:
        layout = f"{layout} partial over mesh axis {', '.join(map(str, entry.partial))}".strip()
    return line.name, shapes, layout


def _shape(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _aligned(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    for name, shapes, layout in rows:
        start = f"{'':<12}{name:<{widths[0]}}  {shapes:<{widths[1]}}"
        if len(start) + 2 + len(layout) <= WIDTH:
            yield f"{start}  {layout}".rstrip()
        else:
            yield start.rstrip()
            yield from _wrapped("  ", layout)


def _replicated(plan: Plan, summary: Summary) -> Iterator[str]:
    if not summary.replicated:
        return
    total_bytes = sum(group.num_bytes for group in summary.replicated)
    share = percent(total_bytes, summary.total_bytes)
    yield f"REPLICATED  {human_bytes(total_bytes)} on every rank, {share} of the model"
    for group in summary.replicated:
        yield from textwrap.wrap(
            group.reason or "reason not recorded", WIDTH, initial_indent="  ", subsequent_indent="  "
        )
        for name, shape, num_bytes in group.tensors:
            rest = f"{_shape(shape):>16}{human_bytes(num_bytes):>12}"
            if len(name) <= WIDTH - 4 - len(rest):
                yield f"    {name:<{WIDTH - 4 - len(rest)}}{rest}"
            else:
                yield from textwrap.wrap(name, WIDTH - 4, initial_indent="    ", subsequent_indent="      ")
                yield f"{rest:>{WIDTH}}"


def _collectives(collectives: Sequence[Collective], num_tokens: int) -> Iterator[str]:
    if not collectives:
        return
    columns = "{:<13}{:<53}{:>7}{:>11}{:>16}"
    yield columns.format("COLLECTIVES", "in one forward pass", "count", "per token", f"{num_tokens:,} tokens")
    for item in collectives:
        ports = [f"{name or '(the model)'} {item.port}".strip() for name in item.names]
        numbers = _collective_numbers(item.count, item.token_bytes, num_tokens)
        if len(ports[0]) > 53:
            yield f"  {item.op:<11}{ports[0]}"
            yield columns.format("", "", *numbers)
        else:
            yield columns.format("  " + item.op, ports[0], *numbers)
        yield from (f"{'':<13}{port}" for port in ports[1:])
    count, token_bytes = sum(c.count for c in collectives), sum(c.token_bytes for c in collectives)
    yield columns.format("  total", "", *_collective_numbers(count, token_bytes, num_tokens))


def _collective_numbers(count: int, token_bytes: int, num_tokens: int) -> tuple[str, str, str]:
    return str(count), human_bytes(token_bytes), human_bytes(token_bytes * num_tokens)


def _totals(plan: Plan, summary: Summary) -> Iterator[str]:
    smallest, largest = min(summary.rank_bytes), max(summary.rank_bytes)
    per_rank = human_bytes(largest)
    if human_bytes(smallest) != per_rank:
        per_rank = f"{human_bytes(smallest)} to {per_rank}"
    yield "TOTAL"
    yield f"  model          {human_bytes(summary.total_bytes)}"
    yield f"  each rank      {per_rank} ({percent(largest, summary.total_bytes)} of the model)"
    yield f"  sharded        {percent(summary.sharded_bytes, summary.total_bytes)} of the bytes"


def _training(plan: Plan) -> Iterator[str]:
    if plan.tp == 1:
        return
    yield "TRAINING"
    if plan.training is None:
        yield "  not supported: this plan is for inference only"
        return
    summed = summed_gradients(plan)
    logits = "shards of the logits" if plan.training.parallel_loss else "gathered logits"
    sequence = "replicated (see --sequence-parallel)"
    if plan.training.sequence:
        padding = "" if plan.training.sequence.may_pad else f", if {plan.tp} divides its length"
        sequence = f"may be sharded{padding}"
    yield f"  loss           from {logits}"
    yield f"  sequence       {sequence}"
    yield f"  gradients      {'summed over the ranks:' if summed else 'none are summed over the ranks'}"
    for name in summed:
        yield f"    {name}"


def _bulleted(head: str, bullet: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield head
    for text in texts:
        yield from textwrap.wrap(text, WIDTH, initial_indent=bullet, subsequent_indent="    ")


def _wrapped(label: str, text: str) -> Iterator[str]:
    indent = " " * (12 + len(label))
    yield from textwrap.wrap(text, WIDTH, initial_indent=f"{'':<12}{label}", subsequent_indent=indent)


def files_report(manifest: Manifest) -> str:
    """Return the source, the tools and the files of a converted directory as text."""
    revision = f" at {manifest.source.revision}" if manifest.source.revision else ""
    tools = ", ".join(f"{name} {version}" for name, version in manifest.tools.items())
    lines = [
        "FILES",
        f"  from           {manifest.source.name}{revision}",
        f"  written by     {tools}",
    ]
    lines += textwrap.wrap(
        numerics_text(manifest.numerics),
        WIDTH,
        initial_indent=f"  {'numerics':<15}",
        subsequent_indent=" " * 17,
    )
    for folder, entries in folders(manifest):
        num_bytes = human_bytes(sum(entry.num_bytes for entry in entries))
        files = "file" if len(entries) == 1 else "files"
        lines.append(f"  {folder or '.':<28} {len(entries):>4} {files:<5} {num_bytes:>12}")
    return "\n".join(lines) + "\n"


WORST = 10
"""The most weights whose errors are listed in a text."""


def worst_first(errors: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the errors of weights by FQN, the largest first."""
    return sorted(errors.items(), key=lambda item: (-item[1], natural_key(item[0])))


def errors_text(errors: Mapping[str, float], num_quantized: int) -> str:
    """Return a sentence about the errors of quantized weights.

    Args:
        errors: the relative error of each weight by FQN, not empty.
        num_quantized: the number of quantized weights; those without an error are said to lack one.
    """
    lacking = num_quantized - len(errors)
    rest = f"; {lacking} others were not measured" if lacking > 0 else ""
    return (
        f"relative errors of {len(errors)} quantized weights (Frobenius norm): at most "
        f"{max(errors.values()):.2e}, median {statistics.median(errors.values()):.2e}{rest}"
    )


def errors_report(errors: Mapping[str, float], num_quantized: int) -> str:
    """Return the errors of quantized weights as text, worst first; see ``errors_text``."""
    lines = ["QUANTIZED"]
    lines += textwrap.wrap(
        errors_text(errors, num_quantized), WIDTH, initial_indent="  ", subsequent_indent="  "
    )
    lines += [f"  {error:.2e}  {name}" for name, error in worst_first(errors)[:WORST]]
    return "\n".join(lines) + "\n"


def numerics_text(found: Numerics | None) -> str:
    """Return the result of ``verify --numerics``, or that there is none, in one line."""
    if found is None:
        return "not measured; to compare all ranks with the unsharded model, run shardconv verify --numerics"
    inputs = ", ".join(f"{name} {_shape(shape)}" for name, shape in found.inputs.items())
    quantizing = ""
    if found.quantization is not None:
        quantizing = f"; quantizing changes an output by at most {found.quantization:.1e} of the largest one"
    return (
        f"the simulated ranks differ from the unsharded model by at most {found.worst:.1e} of its largest "
        f"output ({found.dtype}, tolerance {found.tolerance:.0e}; {inputs}){quantizing}"
    )
