"""What is larger than ``docs/security.md`` says is refused, and the message names the limit."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import GOLDEN_PLAN, ROOT
from shardconv_runtime import CheckpointError, PlanError
from shardconv_runtime.files import manifest
from shardconv_runtime.format import (
    dims,
    field_checks,
    header,
    names,
    plan_checks,
    plan_json,
    slices,
    typed_json,
)
from shardconv_runtime.format.plan import MAX_MESH_AXES

GOLDEN = json.loads(GOLDEN_PLAN.read_text())
PAGE = (ROOT / "docs" / "security.md").read_text()
TENSOR = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


def parameter(**changes: Any) -> dict[str, Any]:
    """A plan of one parameter."""
    return plan(parameters=[{"names": ["a.b"], "dims": ["1"], "dtype": "float32"} | changes])


def module(**changes: Any) -> dict[str, Any]:
    """A plan of one parameter and one module."""
    entry = {"names": ["a"], "category": "boundary"} | changes
    return parameter() | {"modules": [entry]}


def plan(**changes: Any) -> dict[str, Any]:
    """The head of the golden plan, for one rank."""
    kept = {key: GOLDEN[key] for key in ("format", "version", "model", "code")}
    return kept | {"tp": 1, "mesh": [], "parameters": [], "modules": []} | changes


def boundary(port: str) -> dict[str, Any]:
    """A plan with a step at a port."""
    step = {"port": port, "op": "all_reduce", "axes": [0]}
    return module(inputs=[step]) | {"tp": 2, "mesh": [2]}


def many(tp: int, dim: str, count: int) -> dict[str, Any]:
    """A plan of parameters with a dim that falls into many ranges."""
    entries = [{"names": [f"a.p{i}"], "dims": [dim], "dtype": "float32"} for i in range(count)]
    return plan(tp=tp, mesh=[tp], parameters=entries)


@pytest.mark.parametrize(
    ("within", "beyond", "says"),
    [
        (plan(tp=4096, mesh=[4096]), plan(tp=4097, mesh=[4097]), f"at most {field_checks.MAX_TP}"),
        (plan(mesh=[1] * 16), plan(mesh=[1] * 17), f"more than {MAX_MESH_AXES} axes"),
        (
            parameter(names=["a.{0..999}"]),
            parameter(names=["a.{0..524288}"]),
            f"524289 names, more than {names.MAX_NAMES}",
        ),
        (
            module(names=["a.{0..999}"]),
            module(names=["a.{0..524287}", "b"]),
            "expands to 1 names, more than 0",
        ),
        (
            plan(),
            plan(fused=[{"members": [["a.{0..99999}"]] * 6}]),
            "expands to 100000 names, more than 24288",
        ),
        (parameter(names=["a" * 256]), parameter(names=["a" * 257]), "more than 256 characters"),
        (
            parameter(names=["a" * 251 + ".{0..999}"]),
            parameter(names=["a" * 252 + ".{0..1000}"]),
            "more than 256",
        ),
        (
            parameter(dims=["+".join(["1"] * 4096)]),
            parameter(dims=["+".join(["1"] * 4097)]),
            f"more than {dims.MAX_LEAVES} leaves",
        ),
        (
            many(2, "1000*2@0", 1),
            many(2, "1048577*2@0", 1),
            f"more than {slices.MAX_RANGES} ranges",
        ),
        (
            many(2, "524288*2@0", 1),
            many(2, "524288*2@0", 4),
            f"more than {plan_checks.MAX_RANGES_IN_ALL} ranges",
        ),
        (boundary("input" + ".a" * 15), boundary("input" + ".a" * 17), "not a port"),
        (boundary("input." + "a" * 100), boundary("input." + "a" * 101), "not a port"),
        (parameter(), parameter(dims=["1" + "*1" * 4000] * 66), f"more than {plan_json.MAX_SIGNS} "),
        (plan(notes=["a" * 10_000]), plan(notes=["a" * 10_001]), f"more than {field_checks.MAX_TEXT_LENGTH}"),
        (
            parameter(dims=["1"] * 16),
            parameter(dims=["1"] * 17),
            f"more than {field_checks.MAX_TENSOR_DIMS} dims",
        ),
    ],
    ids=range(15),
)
def test_plans(within: Any, beyond: Any, says: str) -> None:
    plan_json.loads(json.dumps(within))
    with pytest.raises(PlanError, match=says):
        plan_json.loads(json.dumps(beyond))


@pytest.mark.parametrize("read", [plan_json.read, lambda path: manifest.read(path.parent)])
def test_documents(read: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate(plan_json.MAX_BYTES + 1)
    with pytest.raises((PlanError, CheckpointError), match=f"larger than {plan_json.MAX_BYTES} bytes"):
        read(path)


def test_lists_and_objects() -> None:
    text = "[" + "{}," * typed_json.MAX_CONTAINERS + "1]"
    with pytest.raises(typed_json.MalformedError, match=f"more than {typed_json.MAX_CONTAINERS} lists"):
        typed_json.decode(text)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"a" * 1000: TENSOR}, ""),
        ({"a" * 1001: TENSOR}, "more than 1000 characters"),
        ({"a": TENSOR | {"shape": [0] * 64}}, ""),
        ({"a": TENSOR | {"shape": [0] * 65}}, "more than 64 dims"),
    ],
    ids=range(4),
)
def test_headers(found: Any, says: str, tmp_path: Path) -> None:
    data = json.dumps(found).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(data)) + data)
    if not says:
        assert header.read_header(path)[1].keys() == found.keys()
        return
    with pytest.raises(CheckpointError, match=says):
        header.read_header(path)


def test_long_headers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", header.MAX_HEADER_BYTES + 1))
    with pytest.raises(CheckpointError, match="header would have 100000001 bytes"):
        header.read_header(path)


@pytest.mark.parametrize(
    "limit",
    [
        *(header.MAX_HEADER_BYTES, header.MAX_NAME_LENGTH, header.MAX_DIMS, typed_json.MAX_CONTAINERS),
        *(
            field_checks.MAX_TP,
            MAX_MESH_AXES,
            names.MAX_NAMES,
            names.MAX_NAME_LENGTH,
            plan_json.MAX_SIGNS,
        ),
        *(dims.MAX_LEAVES, slices.MAX_RANGES, plan_checks.MAX_RANGES_IN_ALL, field_checks.MAX_PATH_STEPS),
        *(field_checks.MAX_STEP_LENGTH, field_checks.MAX_TEXT_LENGTH),
    ],
)
def test_the_page_names_the_limits(limit: int) -> None:
    table = PAGE[PAGE.index("## Limits") : PAGE.index("## What is not protected")]
    assert f"{limit:,}" in table or str(limit) in table
