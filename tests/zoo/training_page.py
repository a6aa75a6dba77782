"""The pages of ``scripts/coverage training``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from .kept_rows import KeptRows, Row, cell, origin

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
TRAINERS = "trainers"
EQUAL = "equal"
NOT_JUDGED = "not judged"


def _trim(row: Row) -> Row:
    """The outcome of each form: its status, its message unless it is equal, and the error if there is one."""
    forms: dict[str, list[Any]] = {}
    for form, found in row["forms"].items():
        message = "" if found["status"] == EQUAL else found["message"]
        error = [found["error"]] if math.isfinite(found["error"]) else []
        forms[form] = [found["status"], *([message] if message or error else []), *error]
    return {"forms": forms}


ROWS = KeptRows("training", ("type", "variant", "tp"), {"forms": {}}, _trim)


def is_of_trainers(row: Row) -> bool:
    """Whether a row is of the page about trainers."""
    return bool(row["variant"] == TRAINERS)


def is_of_adapters(row: Row) -> bool:
    """Whether a row is of the page about adapters."""
    return str(row["variant"]).startswith("adapter")


def is_of_training(row: Row) -> bool:
    """Whether a row is of the page about training."""
    return not is_of_trainers(row) and not is_of_adapters(row)


def _outcomes(rows: Sequence[Row]) -> list[Row]:
    """A row for each form."""
    found = []
    for row in rows:
        for form, short in row["forms"].items():
            status, message, error = (*short, *("", "", 0.0)[len(short) :])
            # Of a variant that the unsharded model does not support, there is no plan.
            if status == "refused" and message.startswith("SolveError") and row["variant"]:
                status = "not converted"
            about = {"type": row["type"], "variant": row["variant"], "tp": row["tp"], "form": form}
            found.append({**about, "status": status, "message": message, "error": error})
    return found


# In the repository -----------------------------------------------------------------------------------


def summary(rows: Sequence[Row], table: str) -> Iterator[str]:
    """The lines of the page about training; ``table`` says where the table is."""
    yield from ("# Coverage of training", "")
    yield from _summary(rows, table)


def summary_of_adapters(rows: Sequence[Row], table: str) -> Iterator[str]:
    """The lines of the page about adapters."""
    yield from ("# Coverage of training with adapters", "")
    yield (
        "The adapter is a LoRA adapter for all linear layers that peft supports. The plan of the model is "
        "fixed."
    )
    yield ""
    yield from _summary(rows, table)


def _summary(rows: Sequence[Row], table: str) -> Iterator[str]:
    outcomes = _outcomes(rows)
    yield (
        "`scripts/coverage training` writes this page. A small model of every causal type of transformers, "
        "if one can be built, trains for one step on simulated ranks in float64 (casts to float32 keep "
        "float64). The gradient of each parameter is compared with the unsharded model. *Equal* means a "
        "difference of at most 1e-9 of the largest element. The sequence length is not a multiple of the "
        "number of ranks. "
        f"{origin(rows)} {table}"
    )
    yield ""
    yield "| tp | variant | form | equal | max error | wrong | form unavailable | refused |"
    yield "|---|---|---|---|---|---|---|---|"
    for tp, variant in sorted({(row["tp"], row["variant"]) for row in outcomes}):
        here = [row for row in outcomes if (row["tp"], row["variant"]) == (tp, variant)]
        refused = sum(row["status"] == "refused" for row in here)
        for form in dict.fromkeys(row["form"] for row in here if row["form"]):
            mine = [row for row in here if row["form"] == form]
            counts = Counter(row["status"] for row in mine)
            worst = max((row["error"] for row in mine if row["status"] == EQUAL), default=0.0)
            none = sum(counts[f"no {what}"] for what in ("sequence form", "loss form", "checkpointing"))
            wrong = counts["wrong"]
            cells = (tp, VARIANTS[variant], form, counts[EQUAL], f"{worst:.0e}", wrong, none, refused)
            yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    yield (
        "Forms: `sequence` is sequence parallelism, `loss` computes the loss from sharded logits, and "
        "`checkpointing` is activation checkpointing. Variants: `shared heads` has two key/value heads, "
        "fewer than ranks. `outputs of routers` adds the router losses; here the sequence length is a "
        "multiple of the number of ranks. `adapter` trains a LoRA adapter for all linear layers with the "
        "plan of the model. Real processes are two replicas of two ranks over gloo, and each process "
        "loads and holds a quarter of each weight (FSDP2)."
    )
    yield ""
    for status, title in (
        ("not converted", "Not converted: the unsharded model cannot run in the variant"),
        ("refused", "For inference only"),
        ("wrong", "Errors and wrong results"),
        (NOT_JUDGED, "Not compared here: no gradients in float64 (the converter compares them in float32)"),
        ("no sequence form", "Without sequence parallelism"),
        ("no loss form", "With gathered logits for the loss"),
        ("no checkpointing", "Without activation checkpointing, which their code does not support"),
    ):
        why = {row["type"]: row["message"] for row in reversed(outcomes) if row["status"] == status}
        names: dict[str, set[str]] = {}
        for model_type, message in sorted(why.items()):
            names.setdefault(message.split(": ", 2)[-1], set()).add(model_type)
        yield from (f"## {title}", "")
        yield from [
            f"- {', '.join(sorted(types))}{': ' + why if why else ''}" for why, types in names.items()
        ] or ["None."]
        yield ""


def summary_of_trainers(rows: Sequence[Row], table: str) -> Iterator[str]:
    """The lines of the page about trainers."""
    outcomes = _outcomes([{**row, "variant": ""} for row in rows])
    yield "# Coverage of trainers"
    yield ""
    yield (
        "`scripts/coverage training --variants trainers` writes this page. Two processes over gloo train a "
        "small model of every causal type of transformers, if one can be built, with sequence parallelism if "
        "possible. They test four things that trainers do: a hook that adds noise to the embeddings, a loss "
        "computed from the output of the last norm, two samples packed into one row, and a gradient scaler "
        "step after an overflow on one rank. The gradients of all parameters must equal those of one process "
        "(to 1e-9 of their largest element, in float64), or both ranks must raise an error. "
        f"{origin(rows)} {table}"
    )
    yield ""
    statuses = (EQUAL, "refused", "wrong", NOT_JUDGED)
    counts = Counter((row["form"].partition(" over ")[0], row["status"]) for row in outcomes if row["form"])
    yield f"| | {' | '.join(statuses)} |"
    yield "|---" * (len(statuses) + 1) + "|"
    for form in dict.fromkeys(form for form, _ in counts):
        yield f"| {form} | {' | '.join(str(counts[form, status]) for status in statuses)} |"
    titles = ("Refused", "Wrong", "Not judged: the unsharded model does not support it")
    for status, title in zip(statuses[1:], titles, strict=True):
        why: dict[str, dict[str, None]] = {}
        for row in outcomes:
            if row["status"] == status:
                why.setdefault(row["message"], {})[row["type"]] = None
        yield from ("", f"## {title}", "")
        yield from [f"- {', '.join(names)}: {message}" for message, names in why.items()] or ["None."]


# In the site -----------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines that the site has below: a line for each type, variant and number of ranks."""
    yield from ("## All types", "")
    yield from (
        "| type | variant | tp | equal forms | max error | other forms |",
        "|---|---|---|---|---|---|",
    )
    for row in rows:
        found = _outcomes([row])
        equal = [each for each in found if each["status"] == EQUAL]
        worst = f"{max(each['error'] for each in equal):.0e}" if equal else ""
        others = "; ".join(
            f"{each['form']}: {each['status']}".removeprefix(": ")
            for each in found
            if each["status"] != EQUAL
        )
        variant = VARIANTS[row["variant"]]
        yield f"| {row['type']} | {variant} | {row['tp']} | {len(equal)} | {worst} | {cell(others)} |"
