"""Hostile documents: what an attacker could write in place of the files of a converted directory."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from shardconv_runtime import ShardconvError
from shardconv_runtime.files.checksums import shard_checksum
from shardconv_runtime.files.manifest import sha256_checksum

FACTOR = float(os.environ.get("SHARDCONV_FUZZ", "0"))

LIMIT_S = 1.0
"""Of processor time for one call."""

MAX_MESSAGE = 5000
"""Most characters of an error."""

EXTREME_TEXTS = (
    "",
    "\0",
    "\ud800",
    "\ufeff",
    "\x1b[2J",
    "\u202e",
    "..",
    "../../../etc/passwd",
    "/etc/passwd",
    "C:\\x",
    "con",
    "__class__",
    "__init__.__globals__",
    "{0..999999999}",
    "a.{0..524287}",
    ".".join(["{0..999999999}"] * 50),
    "99999999999999999*99999999999999999",
    "*".join(["999999999999999999"] * 300),
    "281474976710656",
    "140737488355328*2@0",
    "2*140737488355328@0",
    "2@0*140737488355328",
    "(" * 40 + "1" + ")" * 40,
    "?",
    "?@0",
    "?*?",
    "input.self",
    "output." + ".".join(["0"] * 5000),
    "os:system",
    "antigravity:x",
    "transformers.models.llama.modeling_llama:LlamaMLP",
    "transformers.models.llama.modeling_llama:LlamaModel",
    "int64",
    "float8_e4m3fn",
    "crc32-of-pieces:00000000",
    "a" * 100_000,
    "-" * 100_000,
)

EXTREME_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    4096,
    2**31,
    2**48,
    2**63 - 1,
    2**63,
    -(2**63),
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    [0] * 2000,
    [2**62] * 300,
    ["a"] * 2000,
    [None],
    {"": 0},
    {"a" * 1000: []},
    [[[[[[[[[]]]]]]]]],
)

Path_ = tuple[str | int, ...]


def values() -> st.SearchStrategy[Any]:
    """What may take the place of anything."""
    return st.one_of(
        st.sampled_from(EXTREME_VALUES).map(copy.deepcopy),
        st.sampled_from(EXTREME_TEXTS),
        st.text(max_size=20),
        st.integers(),
        st.from_regex(r"[0-9@.*+() ?]{1,20}", fullmatch=True),
        st.from_regex(r"[a-z_.{}0-9]{1,20}", fullmatch=True),
    )


def places(document: Any, here: Path_ = ()) -> Iterator[Path_]:
    """The path of each value of a JSON document."""
    yield here
    if not isinstance(document, dict | list):
        return
    for key, item in document.items() if isinstance(document, dict) else enumerate(document):
        yield from places(item, (*here, key))


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """A JSON document in which some values are replaced, removed, doubled, moved or added."""
    found = copy.deepcopy(document)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        path = draw(st.sampled_from([place for place in places(found) if place] or [()]))
        if not path:
            break
        owner = found
        for step in path[:-1]:
            owner = owner[step]
        _change(draw, owner, path[-1], found)
    return found


_ACTIONS = ("replace", "replace", "replace", "remove", "double", "move", "add", "near")


def _change(draw: st.DrawFn, owner: Any, key: Any, document: Any) -> None:
    action = draw(st.sampled_from(_ACTIONS))
    if action == "replace":
        owner[key] = draw(values())
    elif action == "remove":
        del owner[key]
    elif action == "double" and isinstance(owner, list):
        owner.insert(key, copy.deepcopy(owner[key]))
    elif action == "move":
        other = draw(st.sampled_from(list(places(document))))
        value = document
        for step in other:
            value = value[step]
        owner[key] = copy.deepcopy(value)
    elif action == "add" and isinstance(owner, dict):
        owner[draw(st.text(max_size=5))] = draw(values())
    elif action == "near" and type(owner[key]) is int:
        owner[key] += draw(st.sampled_from((-1, 1, 2, 2**40)))
    elif action == "near" and isinstance(owner[key], str):
        owner[key] = re.sub("[0-9]+", lambda _: str(draw(st.integers(0, 300))), owner[key])


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes that are flipped, cut off, repeated or put in."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(found)))
        action = draw(st.sampled_from(("flip", "cut", "insert", "repeat", "deep")))
        if action == "flip" and at < len(found):
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif action == "cut":
            del found[at : at + draw(st.sampled_from((1, 8, 10**6)))]
        elif action == "insert":
            found[at:at] = draw(st.sampled_from(_TOKENS))
        elif action == "repeat":
            found[at:at] = found[at : at + draw(st.integers(1, 200))]
        elif action == "deep":
            found[at:at] = b"[" * draw(st.sampled_from((10, 2000, 100_000)))
    return bytes(found)


_TOKENS = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b'"\\ud800"',
    b'"tp": 2,',
    b"{},",
    b",",
    b"\r\n",
)


def examples(count: float) -> settings:
    """How a fuzzing test runs; SHARDCONV_FUZZ=N makes N times as many examples, other ones each time."""
    return settings(
        max_examples=int(count * (FACTOR or 1)),
        derandomize=not FACTOR,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def soon(read: Callable[[], object]) -> None:
    """Read something hostile: it works, or one of the project's errors comes out, within ``LIMIT_S``.

    A call that took longer is repeated with twice the time: a collection of garbage, or a first import, falls
    into some call or other.
    """
    for limit_s in (LIMIT_S, 2 * LIMIT_S):
        begin, message = time.process_time(), "none"
        try:
            read()
        except ShardconvError as error:
            message = str(error)
        took = time.process_time() - begin
        assert 0 < len(message) < MAX_MESSAGE
        if took < limit_s:
            return
    raise AssertionError(f"{took:.2f} s of processor time")


class Directory:
    """A converted directory whose files are exchanged, with the checksums made to fit as an attacker would.

    Args:
        intact: the directory as it was written; it is copied.
        place: where to.
    """

    def __init__(self, intact: Path, place: Path) -> None:
        shutil.copytree(intact, place)
        self.intact, self.path = intact, place

    def restore(self, *names: str) -> None:
        """Bring back files, and manifest and plan."""
        for name in ("manifest.json", "plan.json", *names):
            shutil.copyfile(self.intact / name, self.path / name)

    def document(self, name: str) -> Any:
        """A JSON file of the intact directory."""
        return json.loads((self.intact / name).read_text("utf-8"))

    def put(self, name: str, data: bytes) -> None:
        """Exchange a file, and have the manifest say so."""
        (self.path / name).write_bytes(data)
        manifest = self.document("manifest.json")
        if name == "plan.json":
            manifest["plan_sha256"] = hashlib.sha256(data).hexdigest()
        for entry in manifest["files"]:
            if entry["path"] == name:
                is_shard = entry["checksum"].startswith("crc32")
                checksum = shard_checksum if is_shard else sha256_checksum
                entry["checksum"] = checksum(self.path / name)
                entry["num_bytes"] = len(data)
        self.put_manifest(manifest)

    def put_manifest(self, manifest: Any) -> None:
        """Exchange the manifest, its own checksum made to fit where it has one."""
        if isinstance(manifest, dict) and isinstance(manifest.get("sha256"), str):
            plain = {key: value for key, value in manifest.items() if key != "sha256"}
            manifest = {**plain, "sha256": hashlib.sha256(_document(plain)).hexdigest()}
        (self.path / "manifest.json").write_bytes(_document(manifest))


def _document(found: Any) -> bytes:
    """As the converter writes a document."""
    if not isinstance(found, dict):
        return to_bytes(found)
    lines = (f"  {json.dumps(key)}: {_field(value)}" for key, value in found.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("utf-8", "surrogatepass")


def _field(value: Any) -> str:
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return "[\n" + ",\n".join("    " + json.dumps(item, ensure_ascii=False) for item in value) + "\n  ]"
    return json.dumps(value, ensure_ascii=False)


def to_bytes(document: Any) -> bytes:
    """JSON, lone surrogates escaped."""
    return json.dumps(document).encode()


def with_header(data: bytes, header: bytes) -> bytes:
    """A safetensors file with another header."""
    (length,) = struct.unpack("<Q", data[:8])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def header_of(data: bytes) -> Any:
    """The header of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])
