"""Plans, manifests and headers of an attacker are read or refused, soon; nothing but our errors comes out.

SHARDCONV_FUZZ=N makes N times as many examples, other ones each time; for whole directories there is
tests/e2e/test_fuzz.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import damaged, examples, mutated, soon, to_bytes
from hypothesis import given
from hypothesis import strategies as st
from places import GOLDEN_PLAN
from shardconv_runtime import PlanError
from shardconv_runtime.files import manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.header import read_header
from shardconv_runtime.format.stored_layout import layout_sha256
from shardconv_runtime.format.typed_json import to_json

PLAN = GOLDEN_PLAN.read_bytes()
FILE = {"path": "rank-00001-of-00004/a", "num_bytes": 12, "checksum": "crc32-of-pieces:0123abcd", "rank": 1}
MANIFEST = {
    "format": manifest.FORMAT,
    "version": manifest.VERSION,
    "tp": 4,
    "plan_sha256": "b" * 64,
    "source": {"name": "name", "revision": "abc", "files": [{"path": "a", "num_bytes": 1}]},
    "tools": {"torch": "2"},
    "files": [{"path": "config.json", "num_bytes": 2, "checksum": "sha256:" + "a" * 64}, FILE],
}
HEADER = {
    "__metadata__": {"format": "pt"},
    "v": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "w": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
}


def read_plan(text: str) -> None:
    plan = plan_json.loads(text)
    layout_sha256(plan)
    assert to_json(plan)


def either(document: Any, count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Both kinds of damage: to the values and to the bytes."""
    data = to_bytes(document)
    strategy = st.one_of(mutated(document).map(to_bytes), damaged(data))
    return lambda function: examples(count)(given(strategy)(function))


@either(json.loads(PLAN), 600)
def test_plans(data: bytes) -> None:
    soon(lambda: read_plan(data.decode("utf-8", "replace")))


@either(MANIFEST, 400)
def test_manifests(data: bytes) -> None:
    soon(lambda: manifest.loads(data.decode("utf-8", "replace")))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("header") / "x.safetensors"


@either(HEADER, 400)
def test_headers(path: Path, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(data)) + data + b"x" * 16)
    soon(lambda: read_header(path))


def with_names(*patterns: str) -> bytes:
    document = json.loads(PLAN)
    document["parameters"][0]["names"] = list(patterns)
    return to_bytes(document)


def with_dim(text: str) -> bytes:
    document = json.loads(PLAN)
    document["parameters"][0]["dims"][0] = text
    return to_bytes(document)


@pytest.mark.parametrize(
    "data",
    [
        with_names(".".join(["{0..999999999}"] * 100_000)),
        with_names("a.{0..4999999}"),
        with_names("a" * 2000 + ".{0..499999}"),
        with_dim("*".join(["999999999999999999"] * 100_000)),
        with_dim("*".join(["999999999999999999"] * 300)),
        with_dim("281474976710655*2@0"),
        with_dim(" " * 200_000 + "x"),
        with_dim("(" * 100_000 + "1" + ")" * 100_000),
        to_bytes(json.loads(PLAN) | {"mesh": [2**62] * 100_000}),
        to_bytes(json.loads(PLAN) | {"tp": 2**62, "mesh": [2**62]}),
        to_bytes(json.loads(PLAN) | {"notes": ["-a" * 1_000_000]}),
        b"[" + b"[]," * 4_500_000 + b"[]]",
        b'{"a":' * 1_000_000,
        b"9" * 1_000_000,
        b" " * (plan_json.MAX_BYTES + 1),
    ],
    ids=range(15),
)
def test_absurd_plans_are_refused_at_once(data: bytes) -> None:
    def refused() -> None:
        with pytest.raises(PlanError):
            plan_json.loads(data.decode())

    soon(refused)
