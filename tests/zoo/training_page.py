"""The pages of ``scripts/coverage training``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from .sweep import rows_in

Row = dict[str, Any]

VARIANTS = {
    "": "",
    "grouped": "shared heads",
    "routers": "outputs of routers",
    "adapter": "adapter",
    "adapter-grouped": "adapter, shared heads",
    "adapter-processes": "adapter, real processes",
    "trainers": "what trainers do, real processes",
}
"""What the page calls them."""

ADAPTERS = (
    "# Which models can be trained with adapters",
    "",
    "The adapter is a low-rank adapter of all linear layers that peft can adapt. The plan of the model is "
    "fixed.",
)


TRAINERS_PAGE = (
    "# Coverage of trainers",
    "",
    "Two processes over gloo train every causal type of transformers that can be built small, with",
    "sequence parallelism if possible. They try four habits of trainers: a hook that adds noise to",
    "the embeddings, a loss of the output of the last norm, two samples in a row, and a step with a",
    "gradient scaler after one that overflows on one rank. The gradients of all parameters must equal",
    "those of one process (to 1e-9 of their largest element, in float64), or both ranks must raise an",
    "error.",
    "",
    "Written by `scripts/coverage training --variants trainers`, from the rows in "
    "`tests/zoo/trainers_rows.jsonl`.",
)
ROWS = Path(__file__).with_name("trainers_rows.jsonl")


def page(rows: list[Row], title: tuple[str, ...] = ("# Which models can be trained",)) -> str:
    """The results as Markdown."""
    rows = [{**row, "status": _status(row)} for row in rows]
    lines = [
        *title,
        "",
        "Every causal type of transformers that can be built small trains one step on simulated ranks in",
        "float64 (casts to float32 keep float64). The gradient of every parameter is compared with the",
        "unsharded model, relative to its largest element. Equal means 1e-9. The ranks do not divide the",
        "length of the sequence.",
        "Written by `scripts/coverage training`.",
        "",
        "| tp | variant | form | equal | worst | wrong | no such form | refused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tp, variant in sorted({(row["tp"], row["variant"]) for row in rows}):
        here = [row for row in rows if (row["tp"], row["variant"]) == (tp, variant)]
        refused = sum(row["status"] == "refused" for row in here)
        for form in dict.fromkeys(row["form"] for row in here if row["form"]):
            mine = [row for row in here if row["form"] == form]
            counts = Counter(row["status"] for row in mine)
            worst = max((row["error"] for row in mine if row["status"] == "equal"), default=0.0)
            none = sum(counts[f"no {what}"] for what in ("sequence form", "loss form", "checkpointing"))
            wrong = counts["wrong"]
            cells = (tp, VARIANTS[variant], form, counts["equal"], f"{worst:.0e}", wrong, none, refused)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "Forms: `sequence` parallelism, `loss` from sharded logits, activation `checkpointing`. Variants:",
        "`shared heads` has two key/value heads, fewer than ranks. `outputs of routers` are part of the",
        "loss; the ranks then divide the length. `adapter` trains a low-rank adapter of all linear layers",
        "with the plan of the model. In real processes there are two replicas of two ranks over gloo,",
        "each of which loads and holds a quarter of each weight (FSDP2).",
        "",
    ]
    for status, title in (
        ("not converted", "Not converted: the unsharded model cannot run in the variant"),
        ("refused", "For inference only"),
        ("wrong", "An error, or wrong"),
        ("not judged", "Not judged here, but in float32 by the converter: no gradients in float64"),
        ("no sequence form", "Without sequence parallelism"),
        ("no loss form", "With gathered logits for the loss"),
        ("no checkpointing", "Without activation checkpointing, which their code does not support"),
    ):
        why = {row["type"]: row["message"] for row in reversed(rows) if row["status"] == status}
        names: dict[str, set[str]] = {}
        for model_type, message in sorted(why.items()):
            names.setdefault(message.split(": ", 2)[-1], set()).add(model_type)
        lines += [f"## {title}", ""]
        lines += [
            f"- {', '.join(sorted(types))}{': ' + why if why else ''}" for why, types in names.items()
        ] or ["None."]
        lines.append("")
    return "\n".join(lines)


def kept(rows: list[Row]) -> list[Row]:
    """The rows of the last run of each type, of this run or in the repository, where they are written."""
    old = rows_in(ROWS)
    new = {row["type"] for row in rows}
    kept = [row for row in old if row["type"] not in new] + rows
    kept.sort(key=lambda row: row["type"])
    names = ("type", "variant", "tp", "form", "status", "message")
    ROWS.write_text("".join(json.dumps({name: row[name] for name in names}) + "\n" for row in kept))
    return kept


def trainers_page(rows: list[Row]) -> str:
    """The results of what trainers do, as Markdown."""
    statuses = ("equal", "refused", "wrong", "not judged")
    counts = Counter((row["form"].partition(" over ")[0], row["status"]) for row in rows if row["form"])
    forms = dict.fromkeys(form for form, _ in counts)
    lines = [*TRAINERS_PAGE, "", f"| | {' | '.join(statuses)} |", "|---|---|---|---|---|"]
    lines += [
        f"| {form} | {' | '.join(str(counts[form, status]) for status in statuses)} |" for form in forms
    ]
    titles = ("Refused", "Wrong", "Not judged: the unsharded model does not run so")
    for status, title in zip(statuses[1:], titles, strict=True):
        why: dict[str, dict[str, None]] = {}
        for row in rows:
            if row["status"] == status:
                why.setdefault(row["message"], {})[row["type"]] = None
        lines += ["", f"## {title}", ""]
        lines += [f"- {', '.join(names)}: {message}" for message, names in why.items()] or ["None."]
    return "\n".join(lines) + "\n"


def _status(row: Row) -> str:
    """Of a variant that the unsharded model does not support, there is no plan."""
    is_plan_missing = row["status"] == "refused" and row["message"].startswith("SolveError")
    return "not converted" if is_plan_missing and row["variant"] else row["status"]
