"""Parameters that are read when an operator needs them: the numbers are those of ordinary ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from shardconv_runtime.checkpoint import lazy_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, LazyTensor
from shardconv_runtime.errors import ShardconvError
from torch import Tensor, nn

from shardconv.simulation.model_runs import Float64
from shardconv.simulation.streamed_weights import (
    RecentReads,
    StreamedTensor,
    TooLargeToRead,
    computed_rows,
    computing,
    fill_streamed,
    largest_read,
)


class Stored:
    """A stack of parts in memory as a lazy tensor that counts how often each is read."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self.tensor = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
        self.num_reads = [0] * shape[0]
        text = str(dtype).removeprefix("torch.")
        parts = [
            lazy_tensor.from_leaf(
                ComputedLeaf("part", lambda i=i: self._read(i), text, self.tensor[i].numel()), (1, *shape[1:])
            )
            for i in range(shape[0])
        ]
        self.lazy: LazyTensor = lazy_tensor.concatenate(parts, 0)

    def _read(self, index: int) -> Tensor:
        self.num_reads[index] += 1
        return self.tensor[index]


class Tower(nn.Module):
    """Reads parameters in every way: its own, those of others, one twice, one by choice, one in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.experts = nn.Parameter(torch.empty(3, 4, 4))
        self.conv = nn.Conv1d(4, 4, 2, groups=4, bias=False)
        self.linear = nn.Linear(4, 4)
        self.cell = nn.GRUCell(4, 4)
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("count", torch.empty(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index in (0, torch.tensor(2)):
            x = x + F.linear(x, self.experts[index])
        x = F.conv1d(x.mT, self.conv.weight, padding=1, groups=4).mT
        x = self.linear(self.linear(x)) * -torch.exp(self.scale.float())
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = self.cell(step, state)
        self.count += 1
        return F.linear(x + state[:, None], self.embed.weight.data) * self.count


def streamed(stored: Stored, kept_bytes: int = 1 << 20, max_bytes: int = 1 << 20) -> StreamedTensor:
    """One parameter."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(stored.tensor.shape, device="meta"))
    fill_streamed(module, {"weight": stored.lazy}, torch.float64, RecentReads(kept_bytes, max_bytes))
    found = module.weight
    assert isinstance(found, StreamedTensor)
    assert isinstance(found, nn.Parameter)
    return found


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_a_model_computes_the_same(inference: bool, kept_bytes: int) -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.device("meta"):
        model = Tower()
    stored = {name: Stored(*tensor.shape) for name, tensor in model.state_dict().items()}
    real = Tower().double()
    real.load_state_dict({name: s.tensor.double() for name, s in stored.items()})
    fill_streamed(
        model, {n: s.lazy for n, s in stored.items()}, torch.float64, RecentReads(kept_bytes, 1 << 20)
    )
    with torch.inference_mode(inference), torch.no_grad(), Float64():
        assert torch.allclose(model(ids), real(ids), rtol=1e-12)
        assert stored["experts"].num_reads == [1, 0, 1]
        assert torch.allclose(model(ids), real(ids), rtol=1e-12), "the buffer that counts calls was changed"


def test_tied_parameters_are_one() -> None:
    model = nn.Module()
    model.a, model.b = nn.Embedding(5, 3, device="meta"), nn.Linear(3, 5, bias=False, device="meta")
    model.b.weight = model.a.weight
    fill_streamed(model, {"a.weight": Stored(5, 3).lazy}, torch.float64, RecentReads(1 << 20, 1 << 20))
    assert model.a.weight is model.b.weight


class TestReading:
    """What is read, and when."""

    @torch.inference_mode()
    def test_moving_elements_reads_nothing(self) -> None:
        stored = Stored(3, 4, 6)
        weight = streamed(stored)
        view = weight[1].T.reshape(2, 12).unsqueeze(0).permute(2, 0, 1).split(5)[0].detach()
        assert (weight.shape, weight.dtype, weight.device.type) == ((3, 4, 6), torch.float64, "cpu")
        assert stored.num_reads == [0, 0, 0]
        want = stored.tensor.double()[1].T.reshape(2, 12).unsqueeze(0).permute(2, 0, 1).split(5)[0]
        assert torch.equal(view + 0, want)
        assert stored.num_reads == [0, 1, 0]

    @torch.inference_mode()
    def test_only_the_groups_that_have_rows_are_read(self) -> None:
        stored = Stored(3, 4, 6)
        weight, x = streamed(stored), torch.randn(5, 6, dtype=torch.float64)
        with Float64():
            got = torch._grouped_mm(
                x, weight.transpose(-2, -1), offs=torch.tensor([0, 5, 5], dtype=torch.int32)
            )
        assert torch.allclose(got, x @ stored.tensor.double()[1].T)
        assert stored.num_reads == [0, 1, 0]

    @torch.inference_mode()
    def test_what_was_read_last_is_kept(self) -> None:
        first, second = Stored(1, 4), Stored(1, 8)
        reads = RecentReads(8 * 8, 8 * 8)
        model = nn.Module()
        model.a, model.b = (nn.Parameter(torch.empty(1, n, device="meta")) for n in (4, 8))
        fill_streamed(model, {"a": first.lazy, "b": second.lazy}, torch.float64, reads)
        for parameter in (model.a, model.a, model.b, model.b, model.a):
            parameter.sum()
        assert (first.num_reads, second.num_reads) == ([2], [1])

    def test_as_lists_and_arrays(self) -> None:
        stored = Stored(2, 3)
        assert streamed(stored).tolist() == stored.tensor.double().tolist()
        assert streamed(stored).numpy().tolist() == stored.tensor.tolist()
        assert repr(streamed(stored)) == "StreamedTensor(weight, torch.float64, [2, 3])"

    def test_too_large(self) -> None:
        weight = streamed(Stored(4, 8), max_bytes=8 * 31)
        weight[0].sum()
        with pytest.raises(
            TooLargeToRead, match="an operator takes 256 bytes of weight at once, and 248 may"
        ):
            weight.sum()


class TestWriting:
    """An operator on a parameter runs at each read; other writes would be lost, and are refused."""

    @torch.inference_mode()
    def test_a_parameter_is_written_to(self) -> None:
        stored = Stored(2, 3)
        weight = streamed(stored, kept_bytes=0)
        assert weight.div_(2) is weight
        weight.data.add_(torch.ones(3))
        assert torch.equal(weight + 0, stored.tensor.double() / 2 + 1)
        assert torch.equal(weight[1] + 0, stored.tensor.double()[1] / 2 + 1)

    @torch.inference_mode()
    def test_writes_that_would_be_lost(self) -> None:
        weight = streamed(Stored(2, 3))
        with pytest.raises(ShardconvError, match="writes to a part or a copy of the parameter weight"):
            weight[0].zero_()
        view = weight[0]
        weight.mul_(2)
        with pytest.raises(ShardconvError, match="writes to"):
            view.sum()
        with pytest.raises(ShardconvError, match="writes to"):
            weight.expand(4, 2, 3)[0].zero_()
        with pytest.raises(ShardconvError, match="writes to"):
            weight.diagonal().zero_()
        with pytest.raises(ShardconvError, match="writes to"):
            weight.mul_(weight)


class TestComputed:
    """Weights that are not stored as they are used."""

    def test_casts_of_casts(self) -> None:
        for shape in ((2, 3, 4), (3, 4), (4,)):
            stored = Stored(*shape)
            rounded = lazy_tensor.cast(stored.lazy, "bfloat16")
            assert rounded is not None
            found = streamed_lazy(computing("weight", rounded, torch.float64))
            assert torch.equal(found, stored.tensor.bfloat16().double())

    def test_integers_stay(self) -> None:
        lazy = lazy_tensor.zeros("int64", (2,))
        assert computing("weight", lazy, torch.float64) is lazy

    def test_a_stack_is_computed_row_by_row(self) -> None:
        asked: list[tuple[int, int]] = []

        def compute(span: tuple[int, int]) -> Tensor:
            asked.append(span)
            return torch.full((span[1] - span[0], 2, 2), float(span[0]))

        lazy = computed_rows("weight", "float32", (3, 2, 2), compute)
        assert streamed_lazy(lazy_tensor.take(lazy, 0, ((1, 3),))).tolist() == [
            [[1.0] * 2] * 2,
            [[2.0] * 2] * 2,
        ]
        assert sorted(asked) == [(1, 2), (2, 3)]

    def test_the_largest_read(self) -> None:
        assert largest_read(lazy_tensor.zeros("bfloat16", (5, 3)), torch.float64) == 120
        assert largest_read(lazy_tensor.zeros("bfloat16", (5, 3, 2)), torch.float32) == 24


def streamed_lazy(lazy: LazyTensor) -> Tensor:
    """The numbers of a lazy tensor."""
    return RecentReads(0, 1 << 20).read("weight", lazy)
