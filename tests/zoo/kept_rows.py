"""Rows of the sweeps over all model types, which are kept in the repository for the pages of coverage.

A sweep has a file of JSON lines in ``rows/``, with one line for each of its tasks, so that one type can be
measured again. Nothing here imports torch or transformers: the site is built without them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FOLDER = Path(__file__).with_name("rows")
STAMP = ("transformers", "torch", "date")
"""Fields that say with which versions, and when, a row was measured."""
MAX_TEXT = 300
"""Longer messages are cut."""
DIGITS = 4
"""Significant digits of a number: more would change with each run."""


@dataclass(frozen=True)
class KeptRows:
    """The rows of one sweep."""

    name: str
    """The name of the sweep, and of the file."""
    key: tuple[str, ...]
    """Fields that identify a row; rows are sorted by them."""
    blanks: Mapping[str, Any]
    """The other fields that the page needs -> the value that is not written."""
    trim: Callable[[Row], Row] = dict
    """Drops what the page does not need from a row as the sweep measured it."""

    @property
    def path(self) -> Path:
        """The file of rows."""
        return FOLDER / f"{self.name}.jsonl"

    def key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """What identifies a row."""
        return tuple(row[name] for name in self.key)

    def read(self) -> list[Row]:
        """All rows, with the fields that the file leaves out."""
        return [{**self.blanks, **row} for row in rows_in(self.path)]

    def keep(self, measured: Iterable[Row], is_known: Callable[[Row], bool]) -> None:
        """Write measured rows in place of earlier ones of the same key.

        Args:
            measured: rows as the sweep appended them, with the fields of ``STAMP``.
            is_known: False for a row of a type that no longer exists: it is dropped.
        """
        rows = {self.key_of(row): row for row in rows_in(self.path)}
        rows |= {self.key_of(row): self._packed(row) for row in measured}
        FOLDER.mkdir(exist_ok=True)
        lines = [_line(row) for _, row in sorted(rows.items()) if is_known(row)]
        self.path.write_text("".join(lines))

    def _packed(self, row: Row) -> Row:
        """A row as the file has it."""
        return {
            **{name: row[name] for name in self.key},
            **without_blanks(self.trim(row), self.blanks),
            **{name: row[name] for name in STAMP},
        }


def without_blanks(row: Mapping[str, Any], blanks: Mapping[str, Any]) -> Row:
    """The fields of ``blanks`` that say something, with short numbers and texts."""
    short = {name: _short(row[name]) for name in blanks if name in row}
    return {name: value for name, value in short.items() if value is not None and value != blanks[name]}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None  # JSON has no infinity
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if isinstance(value, Mapping):
        return {name: _short(each) for name, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list | tuple) else value


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def rows_in(path: Path) -> list[Row]:
    """The rows of a file of JSON lines; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def origin(rows: Iterable[Mapping[str, Any]]) -> str:
    """A sentence that says with which versions, and when, rows were measured."""
    found = [sorted({row[name] for row in rows}) for name in STAMP]
    transformers, torch = (" and ".join(versions) for versions in found[:2])
    dates = " to ".join(dict.fromkeys((found[2][0], found[2][-1])))
    return f"Measured with transformers {transformers} and torch {torch}, {dates}."


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
