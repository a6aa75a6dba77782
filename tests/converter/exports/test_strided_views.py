"""What a view holds after writes to other views is what torch's memory holds after the same writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, LazyTensor, from_leaf
from shardconv_runtime.checkpoint.recording_tensors import Constant

from shardconv.exports.strided_views import UnknownContentError, View, Write, content_of

Change = Callable[[torch.Tensor], torch.Tensor]


def lazy(tensor: torch.Tensor) -> LazyTensor:
    leaf = ComputedLeaf("values", Constant(tensor), "float32", tensor.numel())
    return from_leaf(leaf, tensor.shape)


def written(storage: torch.Tensor, views: list[torch.Tensor]) -> list[Write]:
    """Write other numbers to each view, in memory too."""
    found = []
    for number, view in enumerate(views, 1):
        values = torch.arange(view.numel(), dtype=torch.float32).reshape(view.shape) + 1000 * number
        view.copy_(values)
        found.append(Write(View.of(view), lazy(values)))
    return found


def check(storage: torch.Tensor, views: list[torch.Tensor], read: torch.Tensor) -> None:
    writes = written(storage, views)
    found = read_tensor(content_of(View.of(read), "float32", writes))
    assert torch.equal(found, read)


EXPERTS = 4


@pytest.mark.parametrize(
    "change",
    [
        lambda x: [x],
        lambda x: [x[:3], x[3:]],
        lambda x: [x[:, :2], x[:, 2:]],
        lambda x: [x, x[1:2], x[:, 1]],
        lambda x: [x.view(-1), x.view(2, 2, 6)[:, 1]],
        lambda x: [x.t()],
        lambda x: [x.view(4, 3, 2)[:, :, 0], x.view(4, 3, 2)[:, :, 1]],
        lambda x: [x.view(-1), x.view(-1)[6:12]],
        lambda x: [x, x[2:2], x[::2]],
    ],
    ids=["all", "rows", "columns", "over", "halves", "transposed", "interleaved", "flat", "every-other"],
)
def test_views_of_a_matrix(change: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    storage = torch.zeros(4, 6)
    check(storage, change(storage), storage)


def test_stacked_matrices_written_one_by_one() -> None:
    storage = torch.zeros(EXPERTS, 6, 4)
    views = [storage[e][part : part + 3] for e in range(EXPERTS) for part in (0, 3)]
    check(storage, views, storage)
    assert len(content_of(View.of(storage), "float32", written(storage, views)).pieces) == len(views)


def test_a_part_is_read() -> None:
    storage = torch.zeros(4, 6)
    check(storage, [storage[:2], storage[2:]], storage[1:3, 2:4])
    check(storage, [storage], storage.t()[2])


def test_a_parameter_inside_of_a_shared_storage() -> None:
    flat = torch.zeros(40)
    check(flat, [flat[10:16], flat[16:22]], flat[10:22].view(3, 4))
    check(flat, [flat], flat[12:36].view(4, 6))


def test_what_is_not_written_is_unknown() -> None:
    storage = torch.zeros(4, 6)
    with pytest.raises(UnknownContentError, match="6 of its 24 elements were not written"):
        content_of(View.of(storage), "float32", written(storage, [storage[:3]]))


def test_a_reason_counts_where_it_is_not_hidden() -> None:
    storage = torch.zeros(4, 6)
    late = written(storage, [storage[:2]])
    unknown = Write(View.of(storage), "it is drawn")
    with pytest.raises(UnknownContentError, match="it is drawn"):
        content_of(View.of(storage), "float32", [unknown, *late])
    assert content_of(View.of(storage[:2]), "float32", [unknown, *late]).shape == (2, 6)
    with pytest.raises(UnknownContentError, match="it is drawn"):
        content_of(View.of(storage[:2]), "float32", [*late, unknown])


def test_an_uneven_stretch_is_refused() -> None:
    storage = torch.zeros(4, 6)
    writes = written(storage, [storage[:, :2], storage.view(-1)[3:10]])
    with pytest.raises(UnknownContentError, match="not boxes"):
        content_of(View.of(storage), "float32", writes)


def test_an_empty_view() -> None:
    assert content_of(View(0, (0, 3), (3, 1)), "float32", []).pieces == ()


@st.composite
def windows(draw: st.DrawFn) -> tuple[slice, ...]:
    def window(size: int) -> slice:
        start = draw(st.integers(0, size - 1))
        return slice(start, draw(st.integers(start + 1, size)))

    return tuple(window(size) for size in (4, 6, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(windows(), max_size=6), windows())
def test_any_windows(parts: list[tuple[slice, ...]], read: tuple[slice, ...]) -> None:
    storage = torch.zeros(4, 6, 2)
    check(storage, [storage, *(storage[part] for part in parts)], storage[read])
