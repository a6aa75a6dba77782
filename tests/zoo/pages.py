"""The pages of coverage: how each is written from the rows of its sweep, in the repository and in the site.

The page in the repository has what a reader must not miss: what the sweep does, counts, refusals, wrong
results. The site, which ``scripts/docs`` builds, has the tables with a line for each type below it. Nothing
here imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import (
    calls_page,
    full_size_page,
    heads_page,
    models_page,
    mutations_page,
    peers_page,
    quantized_page,
    stages_page,
    training_page,
)
from .kept_rows import KeptRows, Row

DOCS = Path(__file__).resolve().parents[2] / "docs"


@dataclass(frozen=True)
class CoveragePage:
    """A page of a sweep, and how it is written."""

    rows: KeptRows
    summary: Callable[[Sequence[Row], str], Iterable[str]]
    """Rows, and a sentence that says where the tables are -> the lines of the page in the repository."""
    tables: Callable[[Sequence[Row]], Iterable[str]] | None = None
    """The lines that the site has below."""
    owns: Callable[[Row], bool] = lambda row: True
    """Which rows of the sweep belong to this page."""

    def own_rows(self) -> list[Row]:
        """The kept rows of this page.

        Empty if nobody has run the sweep since rows are kept: then the page stays as it is in the repository.
        """
        return [row for row in self.rows.read() if self.owns(row)]

    @property
    def pointer(self) -> str:
        """The sentence that says where the tables are."""
        return (
            "The tables with a line for each model are in the site, which `scripts/docs` builds; their rows "
            f"are in `tests/zoo/rows/{self.rows.path.name}`."
        )


PAGES: Mapping[str, CoveragePage] = {
    "coverage.md": CoveragePage(models_page.ROWS, models_page.summary, models_page.tables),
    "coverage-calls.md": CoveragePage(calls_page.ROWS, calls_page.summary, calls_page.tables),
    "coverage-full-size.md": CoveragePage(full_size_page.ROWS, full_size_page.summary, full_size_page.tables),
    "coverage-heads.md": CoveragePage(heads_page.ROWS, heads_page.summary, heads_page.tables),
    "coverage-mutations.md": CoveragePage(mutations_page.ROWS, mutations_page.summary, mutations_page.tables),
    "coverage-peers.md": CoveragePage(peers_page.ROWS, peers_page.summary, peers_page.tables),
    "coverage-quantized.md": CoveragePage(quantized_page.ROWS, quantized_page.summary),
    "coverage-stages.md": CoveragePage(stages_page.ROWS, stages_page.summary, stages_page.tables),
    "coverage-training.md": CoveragePage(
        training_page.ROWS, training_page.summary, training_page.tables, training_page.is_of_training
    ),
    "coverage-adapters.md": CoveragePage(
        training_page.ROWS,
        training_page.summary_of_adapters,
        training_page.tables,
        training_page.is_of_adapters,
    ),
    "coverage-trainers.md": CoveragePage(
        training_page.ROWS,
        training_page.summary_of_trainers,
        training_page.tables,
        training_page.is_of_trainers,
    ),
}
"""Name of a page in docs/ -> how it is written."""


def pages_of(rows: KeptRows) -> dict[str, CoveragePage]:
    """The pages that a sweep writes."""
    return {name: page for name, page in PAGES.items() if page.rows is rows}


def in_repository(page: CoveragePage) -> str | None:
    """The text of a page; None if it has no rows."""
    rows = page.own_rows()
    return "\n".join(page.summary(rows, page.pointer)).rstrip() + "\n" if rows else None


def write(pages: Mapping[str, CoveragePage]) -> list[str]:
    """Write the pages that have rows; the names of the others, which stay as they are."""
    without_rows = []
    for name, page in pages.items():
        text = in_repository(page)
        if text is None:
            without_rows.append(name)
        else:
            (DOCS / name).write_text(text)
    return without_rows


def in_site(name: str, text: str) -> str:
    """The text of a page of docs/ as the site has it: with its tables, if it is one of these pages."""
    page = PAGES.get(name)
    rows = page.own_rows() if page and page.tables else []
    if not page or not page.tables or not rows:
        return text
    tables = list(page.tables(rows))
    title = next(line for line in tables if line.startswith("## ")).removeprefix("## ")
    link = f"[{title}](#{title.lower().replace(' ', '-')}) has a line for each model."
    return "\n".join([text.replace(page.pointer, link), *tables, ""])
