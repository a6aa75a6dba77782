"""The index of an optimizer's state: numbers come back to the bit, and nothing else is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardconv_runtime.errors import CheckpointError
from shardconv_runtime.saving.optimizer_index import (
    OptimizerIndex,
    ParameterGroup,
    ParameterState,
    StateFile,
    StoredValue,
    from_value,
    read_index,
    to_value,
    write_index,
)

NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
THINGS = st.recursive(NUMBERS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner)))


@given(THINGS)
def test_hyperparameters_come_back(thing: Any) -> None:
    value = to_value(thing)
    assert value is not None
    again = from_value(value)
    assert again == thing
    assert type(again) is type(thing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_scalar_tensors_come_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor(1 / 3, dtype=torch.float64).to(dtype)
    value = to_value(tensor)
    assert value is not None
    again = from_value(value)
    assert again.dtype == dtype
    assert torch.equal(again, tensor)


def test_not_a_number() -> None:
    value = to_value(math.nan)
    assert value is not None
    assert math.isnan(from_value(value))


@pytest.mark.parametrize(
    "thing", [object(), {"a": 1}, torch.zeros(2), torch.zeros((), dtype=torch.complex64), [{}]]
)
def test_what_cannot_be_written(thing: Any) -> None:
    assert to_value(thing) is None


@pytest.mark.parametrize(
    "value",
    [
        StoredValue("float", "a penny"),
        StoredValue("int", "__import__('os')"),
        StoredValue("os.system", "1"),
        StoredValue("load", "1"),
        StoredValue("tensor:load", "1"),
        StoredValue("bool", "("),
    ],
)
def test_what_is_not_read(value: StoredValue) -> None:
    with pytest.raises(CheckpointError, match="is not of kind "):
        from_value(value)


def index_of(directory: Path, **changes: Any) -> OptimizerIndex:
    (directory / "data").write_bytes(b"12345")
    scalars = {"step": StoredValue("tensor:float32", "3.0")}
    state = ParameterState("a.weight", (4, 6), {"exp_avg": "float32"}, scalars)
    groups = (
        ParameterGroup(
            ("a.weight",),
            {"lr": StoredValue("float", "0.1"), "betas": StoredValue("tuple", items=(StoredValue("none"),))},
        ),
    )
    return OptimizerIndex("AdamW", groups, (state,), (StateFile("data", 5),), **changes)


def test_the_file_comes_back(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    write_index(index, tmp_path)
    assert read_index(tmp_path) == index


def test_another_version(tmp_path: Path) -> None:
    write_index(index_of(tmp_path, version=2), tmp_path)
    with pytest.raises(CheckpointError, match="this reads version 1, the file has 2"):
        read_index(tmp_path)
