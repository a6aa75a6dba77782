"""Checks of the fields of a plan or of a manifest.

The classes check their own fields with these functions when a value is made. An error names the field within
the value; ``typed_json`` puts the path of the value in a document in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from ..errors import PlanError
from .dims import Dim
from .header import STORED_NAME
from .names import MAX_NAME_LENGTH
from .slices import Mesh, validate_tensor
from .typed_json import MalformedError

MAX_TP = 4096
"""Most ranks."""

MAX_TENSOR_DIMS = 16

MAX_PATH_STEPS = 16
"""Most components of a port, or of the path of an attribute."""

MAX_STEP_LENGTH = 100
"""Most characters of such a component."""

MAX_TEXT_LENGTH = 10_000
"""Most characters of a note, a reason, a version."""

_IMPORTABLE = re.compile(r"[\w-]+(\.[\w-]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fail(where: str, problem: str) -> NoReturn:
    """Refuse a value for a problem with the field at the path ``where``."""
    raise MalformedError(where, problem)


def one_of(got: str, known: Iterable[str]) -> str:
    """Return the message for a text that is not among the known ones."""
    return f"expected one of {', '.join(known)}; got {got[:60]!r}"


def check_tp(tp: int) -> None:
    """Check a number of ranks."""
    if not 1 <= tp <= MAX_TP:
        fail("tp", f"must be 1 or more, and at most {MAX_TP}, got {tp}")


def check_dtype(where: str, dtype: str) -> None:
    """Check that a dtype is one that a shard can hold."""
    if dtype not in STORED_NAME:
        fail(where, one_of(dtype, STORED_NAME))


def check_text(where: str, text: str) -> None:
    """Check the length of a text for a person."""
    if len(text) > MAX_TEXT_LENGTH:
        fail(where, f"more than {MAX_TEXT_LENGTH} characters")


def check_port(where: str, port: str, side: str) -> None:
    """Check that a port is one of an input or of an output, as ``side`` says."""
    first, *path = port.split(".")
    if first != side or not is_path(path) or (side == "input" and not path):
        example = "input.hidden_states" if side == "input" else "output.0"
        fail(where, f'not a port of an {side}: {port!r}; one reads like "{example}"')


def check_axes(where: str, axes: Sequence[int], mesh: Mesh) -> None:
    """Check that mesh axes are of the mesh, each named once."""
    if outside := [a for a in axes if not 0 <= a < len(mesh)]:
        fail(where, f"mesh axis {outside[0]} is outside of the mesh {list(mesh)}")
    if len(set(axes)) < len(axes):
        fail(where, "a mesh axis is named twice")


def check_dims(where: str, dims: Sequence[Dim], mesh: Mesh) -> None:
    """Check the dims of a tensor."""
    try:
        validate_tensor(dims, mesh)
    except PlanError as error:
        raise MalformedError(where, str(error)) from error


def is_step(text: str) -> bool:
    """Return whether a text is one component of a path: an identifier without dunders, or an index."""
    is_index = text.isascii() and text.isdigit() and len(text) <= 9
    is_name = text.isidentifier() and not text.startswith("__") and len(text) <= MAX_STEP_LENGTH
    return is_index or is_name


def is_path(steps: Sequence[str]) -> bool:
    """Return whether a text is a path of few components."""
    return len(steps) <= MAX_PATH_STEPS and all(map(is_step, steps))


def is_importable(text: str) -> bool:
    """Return whether a text is the name of a module."""
    return len(text) <= MAX_NAME_LENGTH and _IMPORTABLE.fullmatch(text) is not None


def is_sha256(text: str) -> bool:
    """Return whether a text is a sha256 in lower-case hex."""
    return _SHA256.fullmatch(text) is not None
