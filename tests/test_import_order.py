"""Imports point one way: from a room to those before it, and never in a circle."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import shardconv_runtime
from places import ROOT

import shardconv

CONVERTER_ORDER = (
    "arguments",
    "reporting",
    "tracing",
    "inputs",
    "dim_analysis",
    "simulation",
    "planning",
    "pp",
    "verifying",
    "writing",
    "training_code",
    "plan_forms",
    "numeric_check",
    "adapted_plan",
    "passes",
    "quantized_weights",
    "quantizing",
    "conversion",
    "hardware",
    "convert",
    "fitting",
    "launching",
    "converted",
    "hub",
    "exports",
    "old_names",
    "__init__",
    "cli",
    "__main__",
)
"""Folders and files of the converter; each may import those before it."""

RUNTIME_ORDER = (
    "errors",
    "versions",
    "keywords",
    "hub_options",
    "option_values",
    "default_modes",
    "library_logging",
    "format",
    "packed",
    "comm",
    "storage",
    "files",
    "pp.stage_link",
    "pp.stage_processes",
    "loaded",
    "meta",
    "parallel",
    "pp.placeholders",
    "pp.stage_guards",
    "pp.stage_units",
    "pp.stage_model",
    "adapters",
    "checkpoint",
    "saving",
    "training",
    "pp",
    "inference",
    "loading",
    "openai_api",
    "serving",
    "serve",
    "generate",
    "integrations",
    "__init__",
)
"""The same for the runtime."""


def modules(package: Path) -> dict[str, Path]:
    """All modules of a package by their full names."""
    parts = {file: file.relative_to(package.parent).with_suffix("").parts for file in package.rglob("*.py")}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): file for file, p in parts.items()}


@cache  # several tests ask for those of all modules
def imports(name: str, file: Path) -> tuple[str, ...]:
    """Full names of what a module imports, in functions, for annotations and by a function's call too."""
    return tuple(_imports(name, file))


def _imports(name: str, file: Path) -> Iterator[str]:
    package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORTING:
            yield from (
                each.value
                for argument in node.args[:1]
                for each in ast.walk(argument)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


IMPORTING = ("import_module", "__import__", "find_spec", "resolve_name")


FILES = modules(Path(shardconv.__path__[0]))
RUNTIME = modules(Path(shardconv_runtime.__path__[0]))


def imported_modules(name: str, files: dict[str, Path]) -> set[str]:
    """The modules of ``files`` that one of them imports: ``a.b.c`` is one, or a name in ``a.b``."""
    found = {full if full in files else full.rpartition(".")[0] for full in imports(name, files[name])}
    return {module for module in found if module in files} - {name}


def place(name: str, order: tuple[str, ...]) -> int:
    """Where the room of a module, or the module itself, is in the order."""
    inside = name.partition(".")[2] or "__init__"
    rooms = [room for room in order if inside == room or inside.startswith(f"{room}.")]
    assert rooms, f"{name} is in no room of the order"
    return order.index(max(rooms, key=len))


@pytest.mark.parametrize(("files", "order"), [(FILES, CONVERTER_ORDER), (RUNTIME, RUNTIME_ORDER)])
def test_modules_import_only_what_comes_before_their_rooms(
    files: dict[str, Path], order: tuple[str, ...]
) -> None:
    for name in files:  # not a test each: there are hundreds
        own = place(name, order)
        later = {other for other in imported_modules(name, files) if place(other, order) > own}
        assert not later, name


@pytest.mark.parametrize(("files", "order"), [(FILES, CONVERTER_ORDER), (RUNTIME, RUNTIME_ORDER)])
def test_every_room_of_the_order_is_there(files: dict[str, Path], order: tuple[str, ...]) -> None:
    assert {place(name, order) for name in files} == set(range(len(order)))


@pytest.mark.parametrize("files", [FILES, RUNTIME], ids=["converter", "runtime"])
def test_modules_do_not_import_each_other_in_a_circle(files: dict[str, Path]) -> None:
    packages = {name for name, file in files.items() if file.stem == "__init__"}
    graph = {name: imported_modules(name, files) - packages for name in files}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(files) - len(packages)


def test_no_two_modules_share_a_name() -> None:
    files = {**FILES, **RUNTIME}
    names = [name.rpartition(".")[2] for name, file in files.items() if file.stem != "__init__"]
    assert not {name for name in names if names.count(name) > 1}


def test_no_two_public_classes_share_a_name() -> None:
    names = [
        node.name
        for file in (*FILES.values(), *RUNTIME.values())
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not {name for name in names if names.count(name) > 1}


def test_the_runtime_imports_nothing_of_the_converter() -> None:
    names = {full.split(".")[0] for name, file in RUNTIME.items() for full in imports(name, file)}
    assert "torch" in names
    assert not names & {"shardconv", "click", "tqdm", "jinja2"}


def test_imports_by_a_call_are_seen(tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text(
        "import importlib\nimportlib.import_module('a.b')\n__import__(f'c.{1}')\n"
    )
    assert list(imports("it", tmp_path / "it.py")) == ["importlib", "a.b", "c."]


def programs() -> list[Path]:
    """The Python files of the folders of programs, with or without a suffix."""
    found = [
        f for name in ("benchmarks", "examples", "scripts") for f in (ROOT / name).iterdir() if f.is_file()
    ]
    return sorted(
        f for f in found if f.suffix == ".py" or f.read_bytes().startswith(b"#!/usr/bin/env python")
    )


def test_programs_import_what_is_there() -> None:
    for full in {full for file in programs() for full in imports(file.stem, file)}:
        is_ours = full.split(".")[0] in ("shardconv", "shardconv_runtime") and not full.endswith(".")
        if not is_ours or full in FILES or full in RUNTIME:
            continue
        module, _, name = full.rpartition(".")
        found = importlib.import_module(module)
        assert name in getattr(found, "__all__", ()) or hasattr(found, name), full


def test_the_stages_that_a_benchmark_times_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    start = importlib.import_module("start")
    for module, name in start.STAGES:
        assert hasattr(importlib.import_module(f"shardconv_runtime.{module}"), name), (module, name)


def test_the_format_imports_no_torch() -> None:
    rooms = [name for name in RUNTIME if name.startswith("shardconv_runtime.format.")]
    code = f"import {', '.join(rooms)}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
