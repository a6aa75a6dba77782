"""The page of ``scripts/coverage heads``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .kept_rows import KeptRows, Row, cell, origin

ROWS = KeptRows(
    "heads",
    ("task", "type", "class_name", "num_labels", "tp"),
    {"status": "", "message": "", "forms": [], "sharded_head": False, "error": 0.0, "seconds": 0.0},
)

STATUSES = ("equal", "refused", "wrong", "not judged")


def summary(rows: Sequence[Row], table: str) -> Iterator[str]:
    """The lines of the page in the repository; ``table`` says where the table is."""
    yield "# Coverage of heads and their losses"
    yield ""
    yield (
        "`scripts/coverage heads` writes this page. It converts a tiny random model of every class of "
        "transformers' auto classes that computes a loss, for 2 and 3 ranks. Classifiers have 301 labels, "
        "and those of a whole input also 1, a regression; question answering has 2. The simulated ranks are "
        "given labels in every form that the model's code takes: classes, numbers, a number for each logit, "
        "positions, pixels, objects, tokens. Each rank's loss, and the gradients of the loss and the "
        "logits, must equal those of the unsharded model to 1e-9 of their largest element, in float64. "
        f"{origin(rows)} {table}"
    )
    yield ""
    yield from (f"| head | {' | '.join(STATUSES)} | sharded |", "|---" * (len(STATUSES) + 2) + "|")
    for task in sorted({row["task"] for row in rows}):
        yield _counts(task, [row for row in rows if row["task"] == task])
    yield _counts("**all**", rows)
    yield ""
    yield "*Sharded*: of those that are equal, how many gather their logits from shards."
    for status in ("refused", "wrong"):
        yield from ("", f"## {status.capitalize()}", "")
        yield from _listed([row for row in rows if row["status"] == status])
    yield from ("", "## Not judged: the unsharded model has no loss here", "")
    yield from _listed([row for row in rows if row["status"] == "not judged"])


def _counts(name: str, rows: Sequence[Row]) -> str:
    counted = Counter(row["status"] for row in rows)
    sharded = sum(row["sharded_head"] and row["status"] == "equal" for row in rows)
    return f"| {name} | {' | '.join(str(counted[status]) for status in STATUSES)} | {sharded} |"


def _listed(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each message, with the classes that have it."""
    by_message: dict[str, list[str]] = {}
    for row in rows:
        by_message.setdefault(row["message"], []).append(row["class_name"])
    for message, names in by_message.items():
        yield f"- {', '.join(dict.fromkeys(names))}: {cell(message)}"
    if not rows:
        yield "None."


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines that the site has below: a line for each class, number of labels and number of ranks."""
    yield from ("## All heads", "")
    yield from ("| class | head | labels | tp | result | forms of labels | sharded |", "|---" * 7 + "|")
    for row in rows:
        cells = (
            row["class_name"],
            row["task"],
            str(row["num_labels"] or ""),
            str(row["tp"]),
            row["status"],
            cell("; ".join(row["forms"])),
            "yes" if row["sharded_head"] else "no",
        )
        yield f"| {' | '.join(cells)} |"
