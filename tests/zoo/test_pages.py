"""The pages of coverage say what the rows of the sweeps say, in the repository and in the site."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from . import (
    calls_page,
    full_size_page,
    heads_page,
    kept_rows,
    models_page,
    quantized_page,
    stages_page,
    training_page,
)
from .kept_rows import KeptRows, Row, rows_in
from .pages import DOCS, PAGES, CoveragePage, in_repository, in_site

STAMP = {"transformers": "5.1.0", "torch": "2.9.0", "date": "2026-01-02"}


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_of_the_repository_are_those_of_the_rows(name: str) -> None:
    """If this fails, `scripts/coverage SWEEP --render` writes the page."""
    text = in_repository(PAGES[name])
    assert text is None or (DOCS / name).read_text() == text


def test_pages_are_written_without_torch_and_transformers() -> None:
    """The environment of the site has neither."""
    code = "import sys, zoo.pages; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env={"PYTHONPATH": str(ROOT / "tests")}, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("[]\n", "")


@pytest.mark.parametrize("name", PAGES)
def test_the_site_has_a_line_for_each_row(name: str) -> None:
    page = PAGES[name]
    text = in_repository(page)
    if text is None or page.tables is None:
        assert in_site(name, "as it is") == "as it is"
        return
    shown = in_site(name, text)
    assert page.pointer not in shown
    assert shown.count("\n|") - text.count("\n|") >= len({row[page.rows.key[1]] for row in page.own_rows()})


def test_other_pages_of_the_site_stay_as_they_are() -> None:
    assert in_site("limits.md", "as it is") == "as it is"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the rows of the test are kept."""
    monkeypatch.setattr(kept_rows, "FOLDER", tmp_path)
    return tmp_path


def page_of(rows: KeptRows, measured: list[Row], name: str) -> tuple[str, str]:
    """The page in the repository and its tables, of rows as a sweep appends them."""
    rows.keep([{**row, **STAMP} for row in measured], lambda row: True)
    page = PAGES[name]
    text = in_repository(page)
    assert text is not None
    assert "Measured with transformers 5.1.0 and torch 2.9.0, 2026-01-02." in text
    return text, "\n".join(page.tables(page.own_rows())) if page.tables else ""


def test_a_row_takes_the_place_of_an_earlier_one(folder: Path) -> None:
    rows = KeptRows("some", ("type", "tp"), {"error": 0.0, "message": ""})
    about = {"not needed": [1], "error": 1 / 3, "message": "", **STAMP}
    rows.keep([{**about, "type": "b", "tp": 10}, {**about, "type": "b", "tp": 2}], lambda row: True)
    later = STAMP | {"date": "2026-01-09"}
    new = [{"type": "b", "tp": 2, "error": math.inf, "message": "x" * 1000, **later}]
    rows.keep([*new, {"type": "a", "tp": 2, "error": 0.0, "message": "", **STAMP}], lambda row: True)
    assert rows_in(folder / "some.jsonl") == [
        {"type": "a", "tp": 2, **STAMP},
        {"type": "b", "tp": 2, "message": "x" * kept_rows.MAX_TEXT, **later},
        {"type": "b", "tp": 10, "error": 0.3333, **STAMP},
    ]
    assert rows.read()[0] == {"type": "a", "tp": 2, "error": 0.0, "message": "", **STAMP}
    found = "Measured with transformers 5.1.0 and torch 2.9.0, 2026-01-02 to 2026-01-09."
    assert kept_rows.origin(rows.read()) == found
    rows.keep([], lambda row: row["type"] == "a")
    assert [row["type"] for row in rows.read()] == ["a"]


def test_a_page_without_rows_stays(folder: Path) -> None:
    assert in_repository(PAGES["coverage.md"]) is None


def run_of_model(**changes: Any) -> Row:
    """A run as the sweep over all models measures it."""
    about = {"variant": "", "tp": 2, "status": "equal", "message": "", "error": 1e-15, "sharded": 1.0}
    facts = {
        "overrides": 3,
        "collectives": {"all_reduce": 5},
        "per_layer": 2.0,
        "replicated": {},
        "notes": [],
    }
    return {**about, **facts, "plan_seconds": 1.0, "unused": 0.0, **changes}


def test_page_of_models(folder: Path) -> None:
    names = [f"layers.*.w{n}" for n in range(5)]
    runs = [
        run_of_model(sharded=0.9, replicated=dict.fromkeys(names, "small"), notes=["random numbers"]),
        run_of_model(tp=3, status="wrong", error=0.5, collectives={}),
        run_of_model(tp=4, status="refused", message="SolveError: none", plan_seconds=12.0),
        run_of_model(variant="2 key/value heads", tp=4, status="float32"),
        run_of_model(variant="generate, dynamic cache", status="different", message="other tokens"),
        run_of_model(variant="generate, static cache", status="unsupported", message="TypeError: no"),
    ]
    row = {"family": "causal", "type": "one", "runs": runs, "seconds": 60.0}
    text, tables = page_of(models_page.ROWS, [row], "coverage.md")
    assert "| Causal language models | 2 | 1 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "- one (tp 3): wrong: the outputs differ by 5e-01 of the largest" in text
    assert "- one (tp 4): refused: SolveError: none" in text
    assert "- one (tp 2, generate, dynamic cache): different: other tokens" in text
    assert "- one: 90% / wrong / refused" in text
    assert "    - `layers.*.w0`, `layers.*.w1`, `layers.*.w2` and 2 more: small (tp 2)" in text
    assert "More than 10 s: one (12 s at tp 4)." in text
    line = "| one | 90% / wrong / refused | 3 | 5 + 0 | 2.0 | 1e-15 | 1 equal | "
    assert line + "dynamic: different, static: unsupported | 1.0 |" in tables
    assert "| one | causal | tp 2 | random numbers |" in tables


def test_page_of_calls(folder: Path) -> None:
    """It says of every form how many types are right."""
    refused, absent = ["refused", "PlanError: no"], ["absent", "forward has no labels"]
    calls = {form: ["right", ""] for form in calls_page.ABOUT}
    calls |= {"output_attentions": refused, "labels": absent, "flex": ["wrong", "differs by 2"]}
    rows = [
        {"family": "causal", "type": "one", "calls": calls, "seconds": 1.0},
        {"family": "masked", "type": "two", "error": "SolveError: none", "seconds": 1.0},
    ]
    text, tables = page_of(calls_page.ROWS, rows, "coverage-calls.md")
    assert f"| eager | {calls_page.ABOUT['eager']} | 1 | 0 | 0 | 0 | 0 | 100.0% |" in text
    assert "- refused, one (output_attentions): PlanError: no" in text
    assert "- wrong, one (flex): differs by 2" in text
    assert "- two: SolveError: none" in text
    assert "| one | + | + |" in tables
    assert "| two |" not in tables
    rows[0]["calls"] = {"float64": ["right", ""]}
    with pytest.raises(ValueError, match=r"the row of causal one .* has other forms"):
        page_of(calls_page.ROWS, rows, "coverage-calls.md")


def test_page_at_full_size(folder: Path) -> None:
    row = dict(full_size_page.FIELDS) | {
        "family": "causal",
        "type": "gpt2",
        "release": "XL",
        "class_name": "GPT2",
        "tp": 8,
        "checked": False,
        "status": "planned",
        "parameters": 1_600_000_000,
        "per_layer": 3.0,
        "collectives": {"layers.*.mlp (all_reduce)": 48},
        "replicated": 0.02,
        "kept": {"wte": "small"},
    }
    refused = row | {"tp": 16, "status": "timeout", "message": "took too long", "kept": {}}
    proof = ["for inference only: so it is"]
    checked = row | {"checked": True, "cpu_s": 21.0, "proof": proof, "is_verified": True}
    text, tables = page_of(full_size_page.ROWS, [row, refused, checked], "coverage-full-size.md")
    assert "| causal | 8 | 1 | 1 | 1 | 0 | 21.0 |" in text
    assert "- GPT2 XL: took too long" in text
    assert "- GPT2 XL: for inference only: so it is" in text
    assert "| GPT2 | XL | 1.6 B | 0.0 / timeout |" in tables
    assert "| GPT2 XL | 8 | `wte` | small |" in tables
    assert "| GPT2 XL | `layers.*.mlp (all_reduce)` x 48 |" in tables


def test_page_of_stages(folder: Path) -> None:
    about = {
        "family": "causal",
        "asked_pp": 3,
        "pp": 2,
        "tp": 1,
        "message": "",
        "untrained": "",
        "seconds": 2.0,
    }
    equal = {**about, "type": "one", "status": "equal", "sent": {"0-1": 1}, "generated": "same"}
    other = {**equal, "type": "two", "generated": "different: a | b"}
    refused = {
        **about,
        "type": "three",
        "status": "refused",
        "message": "Uncut: no",
        "sent": {},
        "generated": "",
    }
    text, tables = page_of(stages_page.ROWS, [equal, other, refused], "coverage-stages.md")
    assert "2 of 3 types can be divided into stages with equal outputs; 2 of them send one" in text
    assert "| `two` | different: a \\| b |" in text
    assert "| `three` | Uncut: no |" in text
    assert "| one | causal | 2 | 1 | equal | 0-1: 1 | same | yes | 2 |" in tables


def test_page_of_heads(folder: Path) -> None:
    about = {"task": "image classification", "type": "one", "num_labels": 301, "tp": 2, "error": 1e-12}
    equal = {
        **about, "class_name": "A", "status": "equal", "forms": ["labels: classes"], "sharded_head": True,
        "message": "", "seconds": 1.0,
    }  # fmt: skip
    refused = {**equal, "class_name": "B", "status": "refused", "message": "no | gradient", "forms": []}
    text, tables = page_of(heads_page.ROWS, [equal, refused], "coverage-heads.md")
    assert "| image classification | 1 | 1 | 0 | 0 | 1 |" in text
    assert "- B: no \\| gradient" in text
    assert "| A | image classification | 301 | 2 | equal | labels: classes | yes |" in tables


def test_pages_of_training(folder: Path) -> None:
    def form(status: str, message: str = "", error: float = math.nan) -> Row:
        return {"status": status, "message": message, "error": error, "seconds": 1.0}

    plain = {
        "plain": form("equal", "largest of a", 2e-12),
        "sequence": form("no sequence form", "no gain"),
    }
    wrong = {"plain": form("wrong", "a differs by 1e-3", 1e-3)}
    trainers = {
        "no hook": form("equal"),
        "GradScaler over a sharded sequence": form("refused", "PlanError: no"),
    }
    rows = [
        {"type": "one", "variant": "", "tp": 2, "forms": plain},
        {
            "type": "two",
            "variant": "grouped",
            "tp": 3,
            "forms": {"": form("refused", "SolveError: no trace")},
        },
        {"type": "one", "variant": "adapter", "tp": 2, "forms": wrong},
        {"type": "one", "variant": "trainers", "tp": 2, "forms": trainers},
    ]
    text, tables = page_of(training_page.ROWS, rows, "coverage-training.md")
    assert "| 2 |  | plain | 1 | 2e-12 | 0 | 0 | 0 |" in text
    assert "| 2 |  | sequence | 0 | 0e+00 | 0 | 1 | 0 |" in text
    assert "- two: no trace" in text.partition("## Not converted")[2].partition("## For")[0]
    assert "| one |  | 2 | 1 | 2e-12 | sequence: no sequence form |" in tables
    text, tables = page_of(training_page.ROWS, [], "coverage-adapters.md")
    assert "- one: a differs by 1e-3" in text.partition("## Errors and wrong results")[2]
    assert "| one | adapter | 2 | 0 |  | plain: wrong |" in tables
    text, _ = page_of(training_page.ROWS, [], "coverage-trainers.md")
    assert "| GradScaler | 0 | 1 | 0 | 0 |" in text
    assert "- one: PlanError: no" in text


def test_page_of_quantized_formats(folder: Path) -> None:
    about = {"name": "GPTQ", "model": "dense", "experts": "tp", "sharded": "7 of 7", "merged": True}
    good = {**about, "tp": 2, "rank_share": 0.5, "packed": "2e-07", "memory": 1.0, "dequantized": 3e-7}
    refused = {**good, "tp": 3, "packed": "LoadError: no kernel", "memory": 0.0}
    text, _ = page_of(quantized_page.ROWS, [good, refused], "coverage-quantized.md")
    line = "| GPTQ | dense | tp | 7 of 7 | 0.500 | yes | 2e-07 / refused | 1.000 / | 3e-07 |"
    assert line in text
    assert "- GPTQ: LoadError: no kernel" in text


def test_every_page_is_in_the_docs() -> None:
    assert {path.name for path in DOCS.glob("coverage*.md")} == PAGES.keys()
    assert all(isinstance(page, CoveragePage) for page in PAGES.values())
