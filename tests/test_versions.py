"""The scripts that try other versions: what they run is there, and what they found is shown as it is."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from places import ROOT
from zoo.new_types import page, types_of_wheel, verdict


def script(name: str) -> ModuleType:
    """A script without an ending, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class TestVersions:
    def test_the_files_of_tests_are_there(self) -> None:
        files = [file for each in script("versions").FEATURES.values() for file in each]
        assert len(files) == len(set(files))
        assert all((ROOT / file).is_file() for file in files)

    def test_the_oldest_versions_are_the_lower_bounds(self) -> None:
        versions = script("versions")
        wanted = versions.requirements("oldest")
        assert {r.partition("==")[0] for r in wanted if "==" in r} == set(versions.LIBRARIES)
        bounds = dict(re.findall(r'"(\w+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
        assert f"torch=={bounds['torch']}.*" in wanted

    def test_a_failure_is_named(self) -> None:
        versions = script("versions")
        libraries = dict.fromkeys(versions.LIBRARIES, "1.0")
        row = {"environment": "newest", "feature": "generate", "versions": libraries, "passed": 3}
        shown = versions.page([row | {"failed": ["tests/e2e/test_generate.py::test_x"]}])
        assert "| **generate** | 1 failed |" in shown
        assert "- newest: `tests/e2e/test_generate.py::test_x`" in shown
        assert "| **generate** | 3 passed |" in versions.page([row | {"failed": []}])


def row(**changes: Any) -> dict[str, Any]:
    """A type that comes out right."""
    result = {"variant": "", "tp": 2, "status": "equal", "message": "", "sharded": 1.0}
    right = {
        "release": "9.1.0", "type": "kind", "family": "causal", "class": "Kind", "results": [result],
        "generate": {"dynamic": "same"}, "theirs": "same", "full size": {},
    }  # fmt: skip
    return right | changes


class TestNewArchitectures:
    def test_the_types_of_a_release(self, tmp_path: Path) -> None:
        entries = '    [\n        ("a", "AConfig"),\n        ("b-2", "B2Config"),\n    ]\n'
        text = f"CONFIG_MAPPING_NAMES = OrderedDict(\n{entries})\n"
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
            wheel.writestr("transformers/models/auto/configuration_auto.py", text)
        assert types_of_wheel(tmp_path / "x.whl") == {"a", "b-2"}

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, "right"),
            ({"status": "not built", "results": []}, "not built"),
            ({"results": [{"status": "equal"}, {"status": "refused"}]}, "refused"),
            ({"results": [{"status": "refused"}, {"status": "wrong"}]}, "wrong"),
            ({"generate": {"static": "different: at 3"}}, "wrong"),
        ],
    )
    def test_the_worst_result_counts(self, changes: dict[str, Any], expected: str) -> None:
        assert verdict(row(**changes)) == expected

    def test_the_page(self) -> None:
        wrong = row(type="other", results=[row()["results"][0] | {"status": "wrong", "message": "why"}])
        shown = page([row(), wrong], "version 9")
        assert "| 9.1.0 | 2 | 1 | 0 | 1 | 0 |" in shown
        assert "- other: tp 2 : wrong. why" in shown
