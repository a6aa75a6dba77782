"""The docs name files, headings, commands, options and functions that exist."""

from __future__ import annotations
import __future__

import ast
import inspect
import re
import runpy
import shlex
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import rule_cases
import shardconv_runtime
from rule_oracle import MODES, Wrong, body_dims, check
from test_import_order import CONVERTER_ORDER, RUNTIME_ORDER

import shardconv
from shardconv.cli.entry import cli
from shardconv.dim_analysis import selection_rules
from shardconv.dim_analysis.rules import RULES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
TEXT = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
ON_EACH_PAGE = pytest.mark.parametrize("page", TEXT)

ROOTS = ("", "shardconv", "runtime", "runtime/shardconv_runtime")
"""Folders from which the docs name files."""
OF_USERS = {"ask.py", "my_script.py"}
"""Files of a user's own that the docs speak of."""


def without_code(text: str) -> str:
    """A page without its fenced and indented code."""
    return re.sub(r"^ {4}(?! *[-*]).*$", "", FENCE.sub("", text), flags=re.MULTILINE)


def code_lines(text: str) -> list[str]:
    """Lines of fenced and indented code that is not Python; continued lines are joined."""
    blocks = [body for language, body in FENCE.findall(text) if language != "python"]
    indented = re.findall(r"^ {4,}(.+)$", FENCE.sub("", text), re.MULTILINE)
    return [*"\n".join(blocks).replace("\\\n", " ").splitlines(), *indented]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return {a if not found[:i].count(a) else f"{a}-{found[:i].count(a)}" for i, a in enumerate(found)}


# Links and paths -------------------------------------------------------------------------------------


@ON_EACH_PAGE
def test_links_lead_to_files_and_headings(page: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(TEXT[page])):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    assert not broken


SCRIPTS = "benchmarks|examples|scripts"
TOPS = "|".join(p.name for p in ROOT.iterdir() if p.is_dir() and p.name[0] != "." and p.name != "build")


def named_paths(text: str) -> Iterator[str]:
    """Paths of this project and Python files, in backticks and in the commands of code."""
    for token in re.findall(r"`([\w./-]+)`", without_code(text)):
        if re.match(rf"(?:{TOPS})/", token) or token.endswith(".py"):
            yield token
    for line in code_lines(text):
        yield from re.findall(rf"(?<!\S)((?:{TOPS})/[\w./-]+)(?!\S)", line)


@cache
def names_of_files() -> set[str]:
    """Of all Python files of the project."""
    return {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}


@ON_EACH_PAGE
def test_paths_exist(page: str) -> None:
    def exists(path: str) -> bool:
        if "/" not in path:
            return path in names_of_files() | OF_USERS
        return any((ROOT / root / path).exists() for root in ROOTS)

    assert not [path for path in named_paths(TEXT[page]) if not exists(path)]


MODULES = {
    path.name
    for package in ("shardconv", "runtime/shardconv_runtime")
    for path in (ROOT / package).rglob("*.py")
}


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_modules_exist(page: str) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", without_code(TEXT[page])))
    assert named
    without_folder = {name for name in named if "/" not in name}
    assert without_folder <= MODULES
    assert not [n for n in named - without_folder if not any((ROOT / root / n).is_file() for root in ROOTS)]


def test_the_walks_name_functions_of_their_files() -> None:
    section = TEXT["CONTRIBUTING.md"].partition("## Four walks\n")[2].partition("\n## ")[0]
    walks = re.split(r"^\*\*.*\*\*$", section, flags=re.MULTILINE)[1:]
    assert len(walks) == 4
    for walk in walks:
        files = [ROOT / path for path in re.findall(r"`([\w/]+/\w+\.py)`", walk)]
        code = "\n".join(other.read_text() for file in files for other in file.parent.glob("*.py"))
        named = re.findall(r"`(\w+)`", walk)
        assert named
        assert not [n for n in named if not re.search(rf"^\s*(?:def |class )?{n}\b", code, re.MULTILINE)]


@pytest.mark.parametrize(("table", "order"), [("converter", CONVERTER_ORDER), ("runtime", RUNTIME_ORDER)])
def test_the_architecture_lists_the_rooms_in_the_order_of_imports(table: str, order: tuple[str, ...]) -> None:
    text = TEXT["docs/architecture.md"]
    rows = text.partition(f"| {table} | holds |\n|---|---|\n")[2].partition("\n\n")[0]
    listed = [path for row in rows.splitlines() for path in re.findall(r"`([^`]+)`", row.split("|")[1])]
    rooms = [path.removesuffix("/").removesuffix(".py").replace("/", ".") for path in listed]
    assert rooms == [room for room in order if "__" not in room]


def test_the_tests_that_security_names_exist() -> None:
    text = TEXT["docs/security.md"]
    files = {
        letter: [ROOT / path for path in re.findall(r"`([^`]+)`", paths)]
        for letter, paths in re.findall(r"^\| ([A-Z]) \| (.+) \|$", text, re.MULTILINE)
    }
    claims = re.findall(r"\b([A-Z]) `(test_\w+)`", text)
    assert len(claims) > 20
    for letter, test in claims:
        assert any(f"def {test}(" in file.read_text() for file in files[letter]), f"{letter} {test}"


# Commands --------------------------------------------------------------------------------------------


def shell_lines(text: str) -> Iterator[str]:
    """Lines of code, and code within lines, that call ``shardconv``."""
    for line in [*code_lines(text), *re.findall(r"`(shardconv [^`]+)`", text)]:
        call = re.match(r"\s*(?:\$ )?(shardconv [\w-].*)", line)
        if call:
            yield call[1]


def problem(line: str) -> str | None:
    """What is wrong with a call of the command line."""
    _, name, *arguments = shlex.split(line, comments=True)
    command = cli.commands.get(name)
    if command is None:
        return f"{line}: there is no command {name}"
    if command.hidden:
        return f"{line}: {name} is an earlier name"
    context = click.Context(command)
    try:
        given, _, _ = command.make_parser(context).parse_args(arguments)
        for parameter in command.params:
            if given.get(parameter.name or "") and isinstance(parameter.type, click.Choice):
                parameter.type_cast_value(context, given[parameter.name or ""])
    except click.UsageError as error:
        return f"{line}: {error.format_message()}"
    return None


@ON_EACH_PAGE
def test_commands_and_options_exist(page: str) -> None:
    # Sweeps have recorded the messages of their day.
    is_recorded = page.startswith("docs/coverage")
    found = [wrong for line in shell_lines(TEXT[page]) if (wrong := problem(line))]
    assert not [wrong for wrong in found if not (is_recorded and "earlier name" in wrong)]


@ON_EACH_PAGE
def test_options_of_scripts_exist(page: str) -> None:
    for line in code_lines(TEXT[page]):
        call = re.search(
            r"^\s*(?:python |torchrun .*?)?((?:examples|scripts|benchmarks)/[\w.]+)(\s.*)?$", line
        )
        if call and call[2]:
            text = (ROOT / call[1]).read_text()
            wrong = [o for o in re.findall(r"(?<=\s)--[\w-]+", call[2].split("#")[0]) if o not in text]
            assert not wrong, f"{line}: {wrong}"


def test_wrong_commands_are_found() -> None:
    assert problem("shardconv convert m/ --tp 2 out/  # --nothing") is None
    assert "there is no command" in (problem("shardconv conv m/") or "")
    assert "is an earlier name" in (problem("shardconv merge m/ n/") or "")
    assert "--nothing" in (problem("shardconv convert m/ out/ --nothing") or "")
    assert "ep" in (problem("shardconv convert m/ out/ --experts some") or "")


# Words -----------------------------------------------------------------------------------------------


@cache
def prose() -> dict[str, Any]:
    """The functions of ``scripts/prose``."""
    return runpy.run_path(str(ROOT / "scripts" / "prose"))


def test_the_prose_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    above_limit = prose()["main"]()
    assert not above_limit, capsys.readouterr().out


@cache
def literals() -> str:
    """All strings of both packages, one a line."""
    found = {prose()["literal"](node) for _, tree in prose()["sources"]() for node in ast.walk(tree)}
    return "\n".join(sorted(found))


@pytest.mark.parametrize("page", ["docs/limits.md", "docs/troubleshooting.md"])
def test_messages_that_are_quoted_exist(page: str) -> None:
    rows = re.findall(r"^\|.*\|$", TEXT[page], re.MULTILINE)
    messages = [code for row in rows for code in row.split("`")[1::2] if "…" in code]
    assert len(messages) > 15
    pieces = {piece.strip(" ():;,") for message in messages for piece in message.split("…")}
    assert not [piece for piece in pieces if piece not in literals()]


# Python ----------------------------------------------------------------------------------------------


def snippets(text: str) -> Iterator[str]:
    """Python code: fenced, or indented and beginning with an import."""
    yield from (body for language, body in FENCE.findall(text) if language == "python")
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", FENCE.sub("", text), re.MULTILINE):
        code = textwrap.dedent(block).strip()
        if code.startswith("import "):
            yield code


def calls(code: str) -> Iterator[tuple[str, str, list[str]]]:
    """Package, function and keywords of each call of a public function."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in ("shardconv", "shardconv_runtime"):
                yield owner.id, node.func.attr, [k.arg for k in node.keywords if k.arg]


@ON_EACH_PAGE
def test_functions_and_keywords_exist(page: str) -> None:
    packages = {"shardconv": shardconv, "shardconv_runtime": shardconv_runtime}
    for code in snippets(TEXT[page]):
        for package, function, keywords in calls(code):
            parameters = inspect.signature(getattr(packages[package], function)).parameters
            assert set(keywords) <= set(parameters), f"{function}: {keywords}"


@pytest.mark.parametrize("page", ["docs/inference.md", "docs/hub.md", "docs/limits.md", "docs/training.md"])
def test_keywords_of_load_exist(page: str) -> None:
    named = re.findall(r"`load\((\w+)=", TEXT[page])
    assert set(named) <= set(inspect.signature(shardconv_runtime.load).parameters)


# The walk of CONTRIBUTING.md -------------------------------------------------------------------------


def _block(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```python\n(.*?)```", TEXT["CONTRIBUTING.md"], re.DOTALL)
    assert found
    return found[1]


def _rule(source: str) -> Any:
    names = dict(vars(selection_rules))
    flag = __future__.annotations.compiler_flag
    exec(compile(source, "CONTRIBUTING.md", "exec", flags=flag), names)
    return names["gated"]


@pytest.mark.parametrize("mode", MODES)
def test_the_rule_that_the_walk_adds_is_right(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    (case,) = eval(f"[{_block('the case of the walk')}]", vars(rule_cases))
    with monkeypatch.context() as patch:
        patch.delitem(RULES, "aten.glu")
        assert check(case.function, *case.operands, mode=mode).unknown
    monkeypatch.setitem(RULES, "aten.glu", _rule(_block("the rule of the walk")))
    analysis = check(case.function, *case.operands, mode=mode)
    assert not analysis.unknown
    assert body_dims(analysis)[0] == case.dims


def test_the_oracle_says_what_the_walk_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = eval(f"[{_block('the case of the walk')}]", vars(rule_cases))
    right = _block("the rule of the walk")
    alone = re.sub(r".*unify.*\n", "", right)
    linear = re.sub(r".*never_partial.*\n", "", right).replace("[0], dims)", "[0], dims, b.partial(source))")
    quoted = re.findall(r"rule_oracle\.Wrong: (.+)", TEXT["CONTRIBUTING.md"])
    for source, message in zip((alone, linear), quoted, strict=True):
        assert source != right
        monkeypatch.setitem(RULES, "aten.glu", _rule(source))
        with pytest.raises(Wrong, match=re.escape(message)):
            check(case.function, *case.operands, mode="summed")
