"""Imports point one way: from a folder to those before it, and never in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import shardconv_runtime

import shardconv

ORDER = (
    "arguments",
    "reporting",
    "initialising",
    "tracing",
    "analysing",
    "solving",
    "proving",
    "localizing",
    "checking",
    "writing",
    "pipeline",
    "convert",
    "converted",
    "verifying",
    "publishing",
    "__init__",
    "cli",
    "__main__",
)
"""Folders and files of the converter; each may import those before it."""


def modules(package: Path) -> dict[str, Path]:
    """All modules of a package by their full names."""
    parts = {file: file.relative_to(package.parent).with_suffix("").parts for file in package.rglob("*.py")}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): file for file, p in parts.items()}


def imports(name: str, file: Path) -> Iterator[str]:
    """Full names of what a module imports, in functions and for annotations too."""
    package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


FILES = modules(Path(shardconv.__path__[0]))
RUNTIME = modules(Path(shardconv_runtime.__path__[0]))


def imported_modules(name: str, files: dict[str, Path] = FILES) -> set[str]:
    """The modules of ``files`` that one of them imports: ``a.b.c`` is one, or a name in ``a.b``."""
    found = {full if full in files else full.rpartition(".")[0] for full in imports(name, files[name])}
    return {module for module in found if module in files} - {name}


def place(name: str) -> int:
    """Where the folder of a module, or the module itself, is in the order."""
    return ORDER.index(name.split(".")[1] if "." in name else "__init__")


def test_every_folder_has_its_place() -> None:
    assert {name.split(".")[1] for name in FILES if "." in name} == set(ORDER) - {"__init__"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_module_imports_only_what_comes_before_its_folder(name: str) -> None:
    assert not {other for other in imported_modules(name) if place(other) > place(name)}


@pytest.mark.parametrize("files", [FILES, RUNTIME], ids=["converter", "runtime"])
def test_modules_do_not_import_each_other_in_a_circle(files: dict[str, Path]) -> None:
    packages = {name for name, file in files.items() if file.stem == "__init__"}
    graph = {name: imported_modules(name, files) - packages for name in files}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(files) - len(packages)


def test_the_runtime_imports_nothing_of_the_converter() -> None:
    names = {full.split(".")[0] for name, file in RUNTIME.items() for full in imports(name, file)}
    assert "torch" in names
    assert not names & {"shardconv", "click", "tqdm"}
