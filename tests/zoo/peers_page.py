"""The page of ``scripts/test_peers``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .kept_rows import KeptRows, Row, cell, origin
from .peers_left_out import reasons

COUNTS = ("passed", "refused", "failed", "skipped", "left_out")

ROWS = KeptRows(
    "peers",
    ("type", "tp"),
    {**dict.fromkeys(COUNTS, 0), "refused_tests": {}, "failed_tests": {}, "seconds": 0},
)


def summary(rows: Sequence[Row], table: str) -> Iterator[str]:
    """The lines of the page in the repository; ``table`` says where the table is."""
    yield "# Coverage of transformers' own tests"
    yield ""
    yield (
        "`scripts/test_peers` writes this page. It downloads the source distribution of transformers and "
        "runs its shared test suites of models and of training (`ModelTesterMixin`, "
        "`TrainingTesterMixin`), which every model type of transformers must pass. Wherever a test makes "
        "a model, by its class or `from_pretrained`, the model is given to `shardconv_runtime.parallelize`, "
        "and the test goes on with this rank's part. All ranks are processes over gloo that run each test "
        f"together. {origin(rows)} {table}"
    )
    yield ""
    yield (
        "The source distribution lacks the tests of single types and the suite of `generate`. What a suite "
        "asks about a type, a tiny config and inputs, comes from the zoo of these tests. [Coverage of "
        "calls](coverage-calls.md) has `generate`."
    )
    yield ""
    yield (
        "A test *passes* if it passes on all ranks and each call of a model without dropout returns what it "
        "returns in a process without ranks: names, shapes, dtypes, and numbers (to 1e-3 of their size in "
        "float32). So must the norm of gradients after a backward pass. A test is *refused* if every rank "
        "raises a `ShardconvError`, also after loading for inference. It is *skipped* if the suite skips it, "
        "or if it fails on an unsharded model too, and *left out* if it is about something else, or a "
        "variant of another test."
    )
    yield ""
    yield "| ranks | types | passed | refused | failed | skipped | left out | refused of all that apply |"
    yield "|---|---|---|---|---|---|---|---|"
    for tp in sorted({row["tp"] for row in rows}):
        mine = [row for row in rows if row["tp"] == tp]
        counts = {name: sum(row[name] for row in mine) for name in COUNTS}
        share = counts["refused"] / sum(counts[name] for name in ("passed", "refused", "failed"))
        yield f"| {tp} | {len(mine)} | {' | '.join(map(str, counts.values()))} | {share:.1%} |"
    for status, about in (
        ("refused", "Tests that an error of ours ends, by its message."),
        ("failed", "Tests that fail on ranks and pass on unsharded models."),
    ):
        lines = list(_said(rows, f"{status}_tests"))
        if lines:
            yield from ("", f"## {status.capitalize()}", "", about, "", *lines)
    yield from ("", "## Left out", "", "| test | why |", "|---|---|")
    for tests, why in reasons():
        yield f"| {tests} | {why} |"


def _said(rows: Sequence[Row], field: str) -> Iterator[str]:
    """A line for each message: the tests that got it, and the types.

    Messages that differ in names, such as those of classes, are one: of one error, in the same tests.
    """
    tests: dict[str, Counter[str]] = {}
    types: dict[str, dict[str, None]] = {}
    for row in rows:
        for text, names in row[field].items():
            tests.setdefault(text, Counter()).update(names)
            types.setdefault(text, {})[row["type"]] = None
    alike: dict[tuple[str, ...], list[str]] = {}
    for text, names in tests.items():
        alike.setdefault((text.partition(":")[0], *sorted(names)), []).append(text)
    yield "| message, or an example | tests | types |"
    yield "|---|---|---|"
    for (_, *names), texts in sorted(
        alike.items(), key=lambda item: -sum(tests[text].total() for text in item[1])
    ):
        where = list(dict.fromkeys(name for text in texts for name in types[text]))
        yield f"| {cell(texts[0])} | {_few([f'`{name}`' for name in names])} | {_few(where)} |"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}"


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines that the site has below: a line for each type and number of ranks."""
    yield from ("## All types", "")
    yield "| type | tp | passed | refused | failed | skipped | left out | seconds |"
    yield "|---" * 8 + "|"
    for row in rows:
        counts = " | ".join(str(row[name]) for name in COUNTS)
        yield f"| `{row['type']}` | {row['tp']} | {counts} | {row['seconds']} |"
