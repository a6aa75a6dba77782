"""Models at the sizes of releases: the table is true to transformers, and one is measured."""

from __future__ import annotations

from pathlib import Path

from .full_size import FAMILIES, models
from .full_size_page import write_page
from .full_size_run import in_fork, read
from .releases import RELEASES

TYPES = {(m.type, m.release.name): m for f in FAMILIES for m in models(f) if m.release}


def test_every_release_is_of_a_type_that_is_planned() -> None:
    assert TYPES.keys() == {(t, r.name) for t, releases in RELEASES.items() for r in releases}


def test_every_class_is_in_one_family() -> None:
    names = {f: {m.class_name for m in models(f)} for f in FAMILIES}
    assert sum(map(len, names.values())) == len(set().union(*names.values()))


def test_a_release_is_planned_in_a_process_of_its_own(tmp_path: Path) -> None:
    row = in_fork(TYPES["gpt2", "GPT-2 XL"], 2, check=False)
    assert (row["status"], row["layers"], row["rounds"]) == ("planned", 48, 1)
    assert 1.5e9 < row["parameters"] < 1.7e9
    assert row["replicated"] < 0.01
    assert 0 < row["cpu_s"] < 60
    lost = row | {"tp": 4, "status": "timeout", "message": "took too long"}
    proven = row | {"checked": True, "tp": 8, "cpu_s": 21.0, "proof": ["for inference only: so it is"]}
    write_page([row, lost, proven], tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| GPT2LMHeadModel | GPT-2 XL | 1.6 B |" in page
    assert "- GPT2LMHeadModel GPT-2 XL: took too long" in page
    assert "| causal | 8 | 1 | 1 | 1 | 0 | 21.0 |" in page
    assert "- GPT2LMHeadModel GPT-2 XL: for inference only: so it is" in page
    assert read(tmp_path / "nothing") == []
