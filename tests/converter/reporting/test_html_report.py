"""The HTML report: what is in it, that nothing of a plan is markup, and how the command treats files."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from shardconv_runtime.files import manifest
from shardconv_runtime.files.manifest import MANIFEST_NAME, FileEntry, Manifest, Source, SourceFile
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import ParameterPlan, Plan
from shown_plans import EVIL, ZOO, evil_plan, unchecked, wide_plan, zoo_plan
from small_conversion import Model
from small_models import hand_plan, small_config

from shardconv.cli.entry import run
from shardconv.reporting.html_report import MARK, html_report
from shardconv.reporting.picture import picture
from shardconv.reporting.summary import human_bytes, summarize

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """A page as its elements and its text, and whether every element is closed in its place."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep."""
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep."""
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep."""
        if self.open and self.open[-1] != "style":
            self.text += data
            if self.rows and self.rows[-1] and {"td", "th"} & set(self.open):
                self.rows[-1][-1] += data


def parsed(plan: Plan, found: Manifest | None = None) -> Page:
    """The page of a plan."""
    page = Page(html_report(plan, picture(plan), manifest=found))
    assert not page.open
    return page


def a_manifest(name: str = "org/base", tp: int = 2) -> Manifest:
    """A manifest of two files."""
    files = (
        FileEntry("common/x.safetensors", 1234567, "crc32-of-pieces:0a0b0c0d"),
        FileEntry("config.json", 700, "sha256:" + "2" * 64),
    )
    source = Source(name, "abc123", (SourceFile("model.safetensors", 99, "3" * 64),))
    return Manifest(tp, "4" * 64, source, {"shardconv": "0.1.0"}, files)


@pytest.mark.parametrize("case", ZOO, ids=lambda case: "-".join(map(str, case)))
def test_pages_have_every_layer_and_collective(case: tuple[str, str, int, str]) -> None:
    plan = zoo_plan(*case)
    page, summary = parsed(plan), summarize(plan)
    cells = {cell for row in page.rows for cell in row}
    for kind in summary.kinds:
        assert any(all(name in cell for name in kind.names) for cell in cells)
    for collective in summary.collectives:
        wanted = [collective.op, str(collective.count), human_bytes(collective.token_bytes)]
        assert any(set(wanted) <= set(row) for row in page.rows)
    for group in summary.replicated:
        assert group.reason in page.text
        assert {name for name, _, _ in group.tensors} <= cells
    for note in plan.notes:
        assert note in page.text
    assert human_bytes(summary.total_bytes) in page.text
    assert page.tags.count("svg") > 2


def test_the_page_is_alone() -> None:
    source = html_report(evil_plan(), picture(evil_plan()), manifest=a_manifest(EVIL))
    page = Page(source)
    assert not {"script", "link", "img", "iframe", "object", "form", "base"} & set(page.tags)
    assert not [key for key, _ in page.attributes if key.startswith("on") or key in ("style", "src")]
    assert all(value.startswith("#") for key, value in page.attributes if key == "href")
    (policy,) = (value for key, value in page.attributes if key == "content" and "default-src" in value)
    styles = re.findall(r"<style>(.*?)</style>", source, flags=re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() for style in styles}
    assert len(styles) == 2
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    assert "unsafe" not in policy


def test_nothing_in_a_plan_or_a_manifest_is_markup() -> None:
    found = unchecked(a_manifest(EVIL), tools={EVIL: EVIL})
    found = unchecked(found, source=Source(EVIL, EVIL, (SourceFile(EVIL, 1, EVIL),)))
    entry = unchecked(FileEntry("a", 1, "crc32-of-pieces:00000000"), path=f"{EVIL}/{EVIL}", checksum=EVIL)
    found = unchecked(found, files=(entry,))
    page = parsed(evil_plan(), found)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert page.text.count(EVIL) > 20


def test_no_character_of_a_plan_leaves_its_place() -> None:
    plan = hand_plan(small_config(), 2)
    plan = dataclasses.replace(plan, notes=("a\x00b\x1b[31mc\u202ed\ud800",))
    text = parsed(plan).text
    assert "a\ufffdb\ufffd[31mc\ufffdd\ufffd" in text


def test_files_and_source_are_listed() -> None:
    page = parsed(hand_plan(small_config(), 2), a_manifest())
    assert ["config.json", "700", "sha256:" + "2" * 64] in page.rows
    assert ["common/x.safetensors", "1,234,567", "crc32-of-pieces:0a0b0c0d"] in page.rows
    assert ["model.safetensors", "99 B", "3" * 64] in page.rows
    assert ["Revision", "abc123"] in page.rows
    assert ["Written by shardconv", "0.1.0"] in page.rows
    assert "Files" not in parsed(hand_plan(small_config(), 2)).text


def test_training() -> None:
    plan = zoo_plan("causal", "llama", 4)
    assert "The loss is computed from" in parsed(plan).text
    only = dataclasses.replace(plan, training=None, inference_only="it is so", notes=("other",))
    page = parsed(only)
    assert "This plan is for inference only." in page.text
    assert page.text.index("for inference only: it is so") < page.text.index("other")
    assert ("class", "warning") in page.attributes


@pytest.mark.parametrize("tp", [1, 2, 3, 16, 17, 64])
def test_bars_of_memory(tp: int) -> None:
    plan = hand_plan(small_config(), tp)
    page, summary = parsed(plan), summarize(plan)
    bars = [row for row in page.rows if re.fullmatch(r"ranks? [\d, -]+", row[0])]
    assert len(bars) == (tp if tp <= 16 else len(set(summary.rank_bytes)))
    assert {row[2] for row in bars} == set(map(human_bytes, summary.rank_bytes))
    for tensor in (Plan, ParameterPlan):
        assert tensor.__name__ not in page.text


def test_pages_are_deterministic_and_bounded() -> None:
    plan = wide_plan()
    source = html_report(plan, picture(plan))
    assert source == html_report(dataclasses.replace(plan), picture(plan))
    assert source.isprintable() or "\n" in source
    assert len(source) < 1_000_000


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """A converted directory."""
    out = tmp_path / "out"
    assert Model.save(tmp_path / "model").convert(out)
    return out


def test_the_command_writes_beside_the_directory(converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(converted.rglob("*"))
    assert run(["report", str(converted)]) == 0
    target = converted.parent / "out-report.html"
    assert capsys.readouterr().out == f"{target}: open it in a browser\n"
    found = manifest.read(converted)
    plan = plan_json.read(converted / "plan.json")
    assert target.read_text("utf-8") == html_report(plan, picture(plan), manifest=found)
    assert sorted(converted.rglob("*")) == before
    assert run(["report", str(converted)]) == 0, "a report replaces a report"


def test_the_command_names_files_as_the_user_does(
    converted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(converted.parent)
    assert run(["report", "out/"]) == 0
    assert run(["report", "out/plan.json", "-o", "page.html"]) == 0
    monkeypatch.chdir(converted)
    assert run(["report", "."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "out-report.html",
        "page.html",
        str(converted.parent / "out-report.html"),
    ]
    assert "Files" not in Page((converted.parent / "page.html").read_text("utf-8")).text


def test_the_page_on_standard_output(converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(converted), "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")
    assert not (converted.parent / "out-report.html").exists()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("out/page.html", "is in"),
        ("nowhere/page.html", "there is no directory"),
        ("mine.html", "is not a report"),
    ],
)
def test_files_that_are_not_written(
    converted: Path, where: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = converted.parent / "mine.html"
    mine.write_text("<p>mine")
    assert run(["inspect", str(converted), "--html", str(converted.parent / where)]) in (2, 5)
    assert message in capsys.readouterr().err
    assert mine.read_text() == "<p>mine"
    assert run(["inspect", str(converted), "--html", str(mine), "--overwrite"]) == 0
    assert MARK in mine.read_text("utf-8")


def test_a_plan_is_not_replaced_by_its_report(converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = converted / "plan.json"
    alone = converted.parent / "plan.json"
    alone.write_bytes(plan.read_bytes())
    assert run(["inspect", str(alone), "--html", str(alone), "--overwrite"]) == 2
    assert "is the plan itself" in capsys.readouterr().err
    assert alone.read_bytes() == plan.read_bytes()


def test_the_report_of_a_plan_in_a_directory_is_beside_the_directory(converted: Path) -> None:
    before = sorted(converted.rglob("*"))
    assert run(["report", str(converted / "plan.json")]) == 0
    assert (converted.parent / "out-report.html").exists()
    assert sorted(converted.rglob("*")) == before


def test_a_directory_that_is_not_complete_is_refused(
    converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (converted / MANIFEST_NAME).unlink()
    assert run(["report", str(converted)]) == 2
    assert MANIFEST_NAME in capsys.readouterr().err
    assert not (converted.parent / "out-report.html").exists()
