"""Outputs that the pages quote are those of the commands.

A comment in front of each block of text says what it is. ``<!-- output: COMMAND -->``: the command runs here,
in the root of the repository. ``<!-- quoted: REASON -->``: it cannot. ``<!-- no output -->``: none.
"""

from __future__ import annotations

import contextlib
import re
import shlex

import pytest
from places import ROOT

from shardconv.cli import run

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
MADE = {"architecture.md", "commands.md", "benchmarks.md", "plan-format.md"}
"""Pages whose blocks of text are no outputs."""
BLOCK = re.compile(
    r"(?:<!-- (?P<kind>output|quoted|no output)(?:: (?P<text>[^>]+))? -->\n)?^```text\n(?P<body>.*?)^```$",
    re.M | re.S,
)
QUOTED = [
    pytest.param(found["text"], found["body"], id=f"{page.name}: {found['text']}")
    for page in PAGES
    if page.name not in MADE
    for found in BLOCK.finditer(page.read_text())
    if found["kind"] == "output"
]


def without_versions(text: str) -> str:
    """A text whose versions of libraries are left out."""
    return re.sub(r"\b(torch|transformers) [0-9][\w.+]*", r"\1 X", text)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("command", "quoted"), QUOTED)
def test_a_quoted_output_is_that_of_its_command(
    command: str, quoted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, *arguments = shlex.split(command)
    capsys.readouterr()
    with contextlib.chdir(ROOT):
        assert run([*arguments, "-q"]) == 0
    assert without_versions(capsys.readouterr().out) == without_versions(quoted)


def test_every_block_of_text_says_what_it_is() -> None:
    unmarked = [
        f"{page.name}: {found['body'].splitlines()[0]}"
        for page in PAGES
        if page.name not in MADE
        for found in BLOCK.finditer(page.read_text())
        if found["kind"] is None
    ]
    assert not unmarked
    assert len(QUOTED) >= 2
