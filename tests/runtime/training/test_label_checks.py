"""Labels of a device that no call waits for: the next call raises, the same one on all ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from shardconv_runtime.parallel import row_ids
from shardconv_runtime.training.loss import LabelCheck, LossInputError

GOOD = torch.tensor([[0, 9, -100], [3, 4, 5]], dtype=torch.int32)
BAD = torch.tensor([[0, 9, -100], [3, 10, -1]], dtype=torch.int32)


def test_labels_on_the_cpu_are_checked_at_once() -> None:
    check = LabelCheck(10)
    check(GOOD, -100)
    check(GOOD[:, :0], -100)
    with pytest.raises(
        LossInputError, match=r"label 10 at position \(1, 1\) of labels of shape.* 2 labels are"
    ):
        check(BAD, -100)
    check(GOOD, -100)


def test_others_in_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_ids, "is_on_host", lambda x: False)
    check = LabelCheck(10)
    check(GOOD, -100)
    check(BAD, -100)
    with pytest.raises(LossInputError, match=r"label 10 at position \(1, 1\) of labels of the call before"):
        check(GOOD, -100)
    check(GOOD, -100)
    check(BAD, -100)
    copy.deepcopy(check)(GOOD, -100)
    with pytest.raises(LossInputError):
        check(GOOD[:0], -100)


def test_nothing_is_read_in_the_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading waits for the device."""
    read = []

    def watched(x: torch.Tensor) -> object:
        return lambda: (read.append(len(read)), x)[1]

    monkeypatch.setattr(row_ids, "is_on_host", lambda x: False)
    monkeypatch.setattr(row_ids, "to_host", watched)
    check = LabelCheck(10)
    check(GOOD, -100)
    assert not read
    check(GOOD, -100)
    assert read == [0]
