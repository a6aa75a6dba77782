"""Models at the sizes of releases: the table is true to transformers, and one is measured."""

from __future__ import annotations

from . import full_size_page
from .full_size import FAMILIES, models
from .full_size_run import in_fork
from .releases import RELEASES

TYPES = {(m.type, m.release.name): m for f in FAMILIES for m in models(f) if m.release}


def test_every_release_is_of_a_type_that_is_planned() -> None:
    assert TYPES.keys() == {(t, r.name) for t, releases in RELEASES.items() for r in releases}


def test_every_class_is_in_one_family() -> None:
    names = {f: {m.class_name for m in models(f)} for f in FAMILIES}
    assert sum(map(len, names.values())) == len(set().union(*names.values()))


def test_the_page_has_every_family() -> None:
    assert (*FAMILIES,) == full_size_page.FAMILIES


def test_a_release_is_planned_in_a_process_of_its_own() -> None:
    row = in_fork(TYPES["gpt2", "GPT-2 XL"], 2, check=False)
    assert (row["status"], row["layers"], row["rounds"]) == ("planned", 48, 1)
    assert 1.5e9 < row["parameters"] < 1.7e9
    assert row["replicated"] < 0.01
    assert 0 < row["cpu_s"] < 60
    assert not row["is_verified"]
