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
    "# Coverage of training with adapters",
    "",
    "The adapter is a LoRA adapter for all linear layers that peft supports. The plan of the model is fixed.",
)


TRAINERS_PAGE = (
    "# Coverage of trainers",
    "",
    "`scripts/coverage training --variants trainers` writes this page from",
    "`tests/zoo/trainers_rows.jsonl`. Two processes over gloo train a small model of every causal type",
    "of transformers, if one can be built, with sequence parallelism if possible. They test four things",
    "that trainers do: a hook that adds noise to the embeddings, a loss computed from the output of the",
    "last norm, two samples packed into one row, and a gradient scaler step after an overflow on one",
    "rank. The gradients of all parameters must equal those of one process (to 1e-9 of their largest",
    "element, in float64), or both ranks must raise an error.",
)
ROWS = Path(__file__).with_name("trainers_rows.jsonl")


def page(rows: list[Row], title: tuple[str, ...] = ("# Coverage of training",)) -> str:
    """The results as Markdown."""
    rows = [{**row, "status": _status(row)} for row in rows]
    lines = [
        *title,
        "",
        "`scripts/coverage training` writes this page. A small model of every causal type of",
        "transformers, if one can be built, trains for one step on simulated ranks in float64 (casts to",
        "float32 keep float64). The gradient of each parameter is compared with the unsharded model.",
        "*Equal* means a difference of at most 1e-9 of the largest element. The sequence length is not a",
        "multiple of the number of ranks.",
        "",
        "| tp | variant | form | equal | max error | wrong | form unavailable | refused |",
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
        "Forms: `sequence` is sequence parallelism, `loss` computes the loss from sharded logits, and",
        "`checkpointing` is activation checkpointing. Variants: `shared heads` has two key/value heads,",
        "fewer than ranks. `outputs of routers` adds the router losses; here the sequence length is a",
        "multiple of the number of ranks. `adapter` trains a LoRA adapter for all linear layers with the",
        "plan of the model. Real processes are two replicas of two ranks over gloo, and each process",
        "loads and holds a quarter of each weight (FSDP2).",
        "",
    ]
    for status, title in (
        ("not converted", "Not converted: the unsharded model cannot run in the variant"),
        ("refused", "For inference only"),
        ("wrong", "Errors and wrong results"),
        ("not judged", "Not compared here: no gradients in float64 (the converter compares them in float32)"),
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
    titles = ("Refused", "Wrong", "Not judged: the unsharded model does not support it")
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
