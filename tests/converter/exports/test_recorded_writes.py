"""Code that fills parameters is recorded to the same values as it computes on real tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, LazyTensor, from_leaf
from shardconv_runtime.checkpoint.recording_tensors import Constant, RecordedTensor
from torch import nn

from shardconv.exports import recorded_writes
from shardconv.exports.recorded_writes import RecordedWrites, RefusedRawReads
from shardconv.exports.strided_views import UnknownContentError

ROWS, COLUMNS = 6, 4
STORED = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) / 7

Loader = Callable[[torch.Tensor], torch.Tensor]


def recorded(tensor: torch.Tensor) -> RecordedTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return RecordedTensor(from_leaf(ComputedLeaf("x", Constant(tensor), dtype, tensor.numel()), tensor.shape))


def content(load: Loader) -> LazyTensor:
    """What the parameter that ``load`` returns holds; another process could be given it."""
    with RecordedWrites() as writes:  # type: ignore[no-untyped-call]
        parameter = load(recorded(STORED.clone()))
        found: LazyTensor = pickle.loads(pickle.dumps(writes.content(parameter)))
    return found


def sliced(x: torch.Tensor) -> torch.Tensor:
    made = nn.Parameter(torch.empty(2, COLUMNS))
    made.data.copy_(x.narrow(0, 2, 2))
    return made


def fused(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(ROWS, COLUMNS)
    made[3:].copy_(x[:3])
    made.narrow(0, 0, 3).copy_(x[3:])
    return made


def padded(x: torch.Tensor) -> torch.Tensor:
    made = nn.Parameter(torch.empty(ROWS + 2, COLUMNS), requires_grad=False)
    made[:ROWS].data.copy_(x)
    made[ROWS:].data.fill_(0)
    return made


def set_item(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(3, ROWS, COLUMNS)
    made[1] = x
    made[2, :, 1:3] = x[:, :2]
    return made


def cast(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16).copy_(x)


def broadcast(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(3, COLUMNS).copy_(x[1])


def computed(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(ROWS, COLUMNS)
    made.copy_(x)
    made.data.copy_(-torch.exp(made.float()))
    return made


def through_another(x: torch.Tensor) -> torch.Tensor:
    first, second = torch.empty(ROWS, COLUMNS), torch.empty(COLUMNS, ROWS)
    first.copy_(x)
    second.copy_(first.t())
    return second


def scalar(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(1)
    made.data.fill_(x[2, 1].item())
    return made


def cloned(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(ROWS, COLUMNS)
    made.copy_(x)
    return made.clone()


def constant(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(2.5) * 2


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.full((3, 2), 2.0).mul_(3)


def drawn_first(x: torch.Tensor) -> torch.Tensor:
    made = nn.Linear(COLUMNS, ROWS, bias=False).weight
    made.data.copy_(x)
    return made


def in_place(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(ROWS, COLUMNS)
    made.copy_(x)
    made[:2].mul_(2)
    return made.add_(x, alpha=0.5)


def zeroed_source(x: torch.Tensor) -> torch.Tensor:
    made, row = torch.empty(2, COLUMNS), x[1].clone() if type(x) is torch.Tensor else x[1]
    made[0] = row
    row.zero_()
    made[1] = row.view(2, 2).flatten()
    return made


def scaled_source(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(ROWS, COLUMNS).copy_((x + 0).mul_(2))


LOADERS = [
    in_place,
    zeroed_source,
    scaled_source,
    sliced,
    fused,
    padded,
    set_item,
    cast,
    broadcast,
    computed,
    through_another,
    scalar,
    cloned,
    constant,
    scaled,
    drawn_first,
]


@pytest.mark.parametrize("large", [1 << 16, 1], ids=["small", "large"])
@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__name__)
def test_a_parameter_is_what_the_code_makes(
    load: Loader, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_writes, "LARGE", large)
    found, wanted = read_tensor(content(load)), load(STORED.clone()).detach()
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def unwritten(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(ROWS, COLUMNS)
    made[:2].copy_(x[:2])
    return made


def drawn(x: torch.Tensor) -> torch.Tensor:
    return nn.Linear(COLUMNS, ROWS, bias=False).weight


def random(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(4)


def other_ways(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(ROWS, COLUMNS)
    made.copy_(x)
    torch.mul(made, 2, out=made)
    return made


def of_unknown(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(2)
    made.copy_(other_ways(x)[0, :2])
    return made


def other_dtype(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(ROWS, COLUMNS)
    made.copy_(x)
    return made.view(torch.int32)


def without_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(ROWS, COLUMNS, device="meta").copy_(x)


def changed_source(x: torch.Tensor) -> torch.Tensor:
    x[:2].mul_(2)
    return torch.empty(ROWS, COLUMNS).copy_(x)


def of_random(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(4).copy_(torch.rand(4) * 2)


def with_random(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(COLUMNS).copy_(x[0] + torch.bernoulli(torch.full((COLUMNS,), 0.5)))


def of_unwritten(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(4).contiguous().add(1)


def written_as_another_dtype(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(2 * ROWS, COLUMNS, dtype=torch.bfloat16)
    made.view(torch.float32).view(-1).copy_(x.flatten())
    return made


def drawn_source(x: torch.Tensor) -> torch.Tensor:
    return x.uniform_()


def arithmetic_before_loading(x: torch.Tensor) -> torch.Tensor:
    return unwritten(x).mul_(2)


@pytest.mark.parametrize("large", [1 << 16, 1], ids=["small", "large"])
@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (unwritten, "16 of its 24 elements were not written"),
        (drawn, "drawn at random"),
        (random, "drawn at random"),
        (other_ways, "changed in place by aten.mul"),
        (of_unknown, "changed in place by aten.mul"),
        (arithmetic_before_loading, "16 of its 24 elements were not written"),
        (other_dtype, "taken for torch.int32"),
        (without_memory, "no memory"),
        (changed_source, "a tensor that may share its bytes was changed in place"),
        (of_random, "drawn at random"),
        (with_random, "drawn at random"),
        (of_unwritten, "4 of its 4 elements were not written"),
        (written_as_another_dtype, "taken for torch.float32"),
        (drawn_source, "of a tensor of the checkpoint, it is drawn at random"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_known_is_refused(
    load: Loader, reason: str, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_writes, "LARGE", large)
    with pytest.raises(UnknownContentError, match=reason):
        content(load)


def test_a_constant_is_as_it_was_when_it_was_copied() -> None:
    with RecordedWrites() as writes:  # type: ignore[no-untyped-call]
        made, scale = torch.empty(ROWS, COLUMNS), torch.tensor(2.0)
        made.copy_(recorded(STORED) * scale)
        scale.fill_(3)
        assert torch.equal(read_tensor(writes.content(made)), STORED * 2)


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_memory_without_values_is_not_handed_out(read: Callable[[torch.Tensor], object]) -> None:
    with RecordedWrites() as writes, RefusedRawReads(writes):  # type: ignore[no-untyped-call]
        made = torch.ones(3)
        assert list(read(made)) == [1, 1, 1]  # type: ignore[call-overload]
        made.copy_(recorded(STORED[0, :3]))
        with pytest.raises(UnknownContentError, match="the memory of a parameter is read"):
            read(made)


def test_a_large_parameter_takes_no_memory() -> None:
    before = resident_bytes()
    with RecordedWrites() as writes:  # type: ignore[no-untyped-call]
        large = torch.zeros(1 << 30)
        large[: 1 << 29].fill_(2)
        torch.nn.init.normal_(torch.empty(1 << 30))
        assert len(writes.content(large).pieces) == 2
    assert resident_bytes() - before < 1 << 28


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_ranks_that_communicate_are_refused() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with RecordedWrites(), pytest.raises(UnknownContentError, match="communicate"):  # type: ignore[no-untyped-call]
            torch.distributed.all_reduce(torch.ones(2))
    finally:
        torch.distributed.destroy_process_group()
