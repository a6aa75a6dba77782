"""The fingerprint of model code: by source, without importing it."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from places import GOLDEN_PLAN
from shardconv_runtime.errors import CodeMismatchError
from shardconv_runtime.files.fingerprint import check_code, code_info, fingerprint
from shardconv_runtime.format import plan_json

PLAN = plan_json.read(GOLDEN_PLAN)
NAMES = ("some_package.inner.modeling", "some_package.cache")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path which cannot be imported."""
    root = tmp_path / "some_package"
    (root / "inner").mkdir(parents=True)
    for path in ("__init__.py", "inner/__init__.py"):
        (root / path).write_text("raise RuntimeError('imported')\n")
    (root / "inner" / "modeling.py").write_text("raise RuntimeError('imported')\nclass Model: ...\n")
    (root / "cache.py").write_text("# größe\nclass Cache: ...\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return root


def test_nothing_is_imported_and_order_does_not_matter(package: Path) -> None:
    found = fingerprint(NAMES)
    assert re.fullmatch("[0-9a-f]{64}", found)
    assert found == fingerprint([*reversed(NAMES), NAMES[0]])
    assert not [name for name in sys.modules if name.startswith("some_package")]


def test_source_decides_and_line_endings_do_not(package: Path) -> None:
    before = fingerprint(NAMES)
    path = package / "cache.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert fingerprint(NAMES) == before
    path.write_text(path.read_text("utf-8") + "# more\n", "utf-8")
    assert fingerprint(NAMES) != before


def test_names_count(package: Path) -> None:
    (package / "copy.py").write_bytes((package / "cache.py").read_bytes())
    assert fingerprint(["some_package.cache"]) != fingerprint(["some_package.copy"])


def test_missing_modules_have_a_fingerprint_too(package: Path) -> None:
    present = fingerprint(NAMES)
    (package / "cache.py").unlink()
    importlib.invalidate_caches()
    missing = fingerprint(NAMES)
    assert missing != present
    assert missing == fingerprint(NAMES)
    for name in ("nowhere_at_all", "nowhere.at.all", "some_package.cache.deeper", "math", "sys", "a..b", ""):
        assert re.fullmatch("[0-9a-f]{64}", fingerprint([name]))


def test_loaded_modules_are_found_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "dynamic.py"
    path.write_text("VALUE = 1\n")
    spec = importlib.util.spec_from_file_location("dynamic_module_of_a_test", path)
    assert spec is not None
    absent = fingerprint([spec.name])
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        assert fingerprint([spec.name]) != absent
    finally:
        del sys.modules[spec.name]
    assert fingerprint([spec.name]) == absent


def test_matching_code_passes(package: Path) -> None:
    info = code_info(NAMES)
    assert info.sources == tuple(sorted(NAMES))
    assert info.transformers == metadata.version("transformers")
    check_code(replace(PLAN, code=info))
    check_code(replace(PLAN, code=replace(info, torch="0.0.1")))


def test_other_code_is_refused_with_both_versions_and_the_remedy(package: Path) -> None:
    plan = replace(PLAN, code=replace(code_info(NAMES), transformers="5.0.7", torch="2.0.9"))
    (package / "cache.py").write_text("changed = True\n")
    with pytest.raises(CodeMismatchError) as caught:
        check_code(plan)
    message = str(caught.value)
    assert "transformers 5.0.7 with torch 2.0.9" in message
    assert f"transformers {metadata.version('transformers')} and torch {metadata.version('torch')}" in message
    assert "`shardconv reshard SRC --in-place`" in message
    assert "\n" not in message


def test_missing_code_is_named() -> None:
    with pytest.raises(CodeMismatchError, match=r"\(package\.cache is not installed\)"):
        check_code(PLAN)


def test_needs_neither_torch_nor_transformers_nor_the_converter() -> None:
    program = (
        "import sys\n"
        "from shardconv_runtime import errors\n"
        "from shardconv_runtime.files import fingerprint, manifest\n"
        "from shardconv_runtime.format import header, names, plan, plan_json, slices\n"
        "fingerprint.fingerprint(['transformers.cache_utils', 'torch.nn.modules.linear'])\n"
        "print(sorted({'torch', 'transformers', 'shardconv', 'numpy', 'click', 'tqdm'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
