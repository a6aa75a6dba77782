"""What is done to a recorded tensor gives what it gives on the tensor itself, to the bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from lazy_cases import DTYPES, Draw, Files, factorise, name_of, random_tensor, same, shapes
from shardconv_runtime.checkpoint import lazy_tensor
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, LazyTensor
from shardconv_runtime.checkpoint.recording_tensors import (
    LARGE,
    RecordedTensor,
    lazy_of,
    recording,
)
from shardconv_runtime.errors import SourceError
from torch import Tensor

FLOAT8 = tuple(getattr(torch, name) for name in DTYPES if name.startswith("float8"))
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")

Operation = Callable[[Draw, "Both"], list["Both"]]


class Both:
    """A tensor and its recording."""

    def __init__(self, real: Tensor, recorded: Tensor) -> None:
        self.real, self.recorded = real, recorded

    def each(self, do: Callable[[Tensor], object]) -> list[Both]:
        """Do the same to both; the results."""
        try:
            expected = do(self.real)
        except NotImplementedError:  # as of float8 on the CPU
            reject()
        found = [expected, do(self.recorded)]
        results = [list(f) if isinstance(f, (tuple, list)) else [f] for f in found]
        assert len(results[0]) == len(results[1])
        return [Both(*pair) for pair in zip(*results, strict=True)]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """One directory for all examples."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def a_dim(draw: Draw, both: Both) -> int:
    """Counted from either end."""
    return draw(st.integers(-both.real.dim(), both.real.dim() - 1))


def bounds(draw: Draw, both: Both) -> slice:
    """As code writes them: open, from the end, past the end."""
    place = st.one_of(st.none(), st.integers(-10, 10), st.just(2**63 - 1))
    return slice(draw(place), draw(place), draw(st.sampled_from((None, 1, 1, 2))))


def index(draw: Draw, both: Both) -> list[Both]:
    """``x[...]`` with what conversions put there."""
    item: object = bounds(draw, both)
    kind = draw(st.sampled_from(("slice", "last", "int", "none")))
    if kind == "last":
        item = (..., item)
    elif kind == "none":
        item = (None, item)
    elif kind == "int" and both.real.shape[0]:
        item = draw(st.integers(-both.real.shape[0], both.real.shape[0] - 1))
    return both.each(lambda x: x[item])  # type: ignore[index]


def cut(draw: Draw, both: Both) -> list[Both]:
    """``chunk``, ``split``, ``unbind`` and what else gives several."""
    dim = a_dim(draw, both)
    size = both.real.shape[dim]
    first = draw(st.integers(0, size))
    ways: list[Callable[[Tensor], object]] = [
        lambda x: x.chunk(draw_count, dim),
        lambda x: x.split(draw_count, dim),
        lambda x: torch.split(x, [first, size - first], dim),
        lambda x: x.unbind(dim),
        lambda x: x.tensor_split(draw_count, dim),
        lambda x: x.narrow(dim, first, size - first),
    ]
    draw_count = draw(st.integers(1, 4))
    return both.each(draw(st.sampled_from(ways)))


def join(draw: Draw, both: Both) -> list[Both]:
    """``cat`` and ``stack`` of parts and of other dtypes, and of tensors that are not of the checkpoint."""
    dim = a_dim(draw, both)
    other = both.each(lambda x: x[:])[0]
    if draw(st.booleans()):
        constant = random_tensor(name_of(both.real), both.real.shape, 3)
        other = Both(constant, constant)
    parts = draw(st.permutations([both, other, both]))
    real, recorded = [p.real for p in parts], [p.recorded for p in parts]
    if draw(st.booleans()):
        return [Both(torch.cat(real, dim), torch.cat(recorded, dim))]
    return [Both(torch.stack(real, dim), torch.stack(recorded, dim))]


def move(draw: Draw, both: Both) -> list[Both]:
    """Dims in another order, more of them, fewer."""
    a, b = a_dim(draw, both), a_dim(draw, both)
    order = draw(st.permutations(range(both.real.dim())))
    shape = factorise(draw, both.real.numel())
    numbers = list(shape)
    if numbers and both.real.numel():
        numbers[draw(st.integers(0, len(numbers) - 1))] = -1
    ways: list[Callable[[Tensor], object]] = [
        lambda x: x.transpose(a, b),
        lambda x: x.swapaxes(a, b),
        lambda x: x.movedim(a, b),
        lambda x: x.permute(*order),
        lambda x: x.t() if x.dim() <= 2 else x.mT,
        lambda x: x.reshape(shape),
        lambda x: x.reshape(numbers),
        lambda x: x.contiguous().view(shape),
        lambda x: x.contiguous().view(numbers),
        lambda x: x.flatten(),
        lambda x: x.unsqueeze(a),
        lambda x: x.squeeze(),
        lambda x: x.squeeze(a),
        lambda x: x.squeeze((a,)),
        lambda x: x.clone(),
        lambda x: x.detach(),
        lambda x: x.contiguous(),
        lambda x: x.to("cpu"),
    ]
    return both.each(draw(st.sampled_from(ways)))


def compute(draw: Draw, both: Both) -> list[Both]:
    """What is more than moving elements."""
    dim = a_dim(draw, both)
    numbers = torch.tensor(draw(st.lists(st.integers(0, max(both.real.shape[dim] - 1, 0)), max_size=4)))
    ways: list[Callable[[Tensor], object]] = [
        # torch flips float8 in some memory layouts only, and a recording may be laid out otherwise
        lambda x: x.flip(dim) if x.dtype not in FLOAT8 else x,
        lambda x: x.roll(1, dim),
        lambda x: x.repeat_interleave(2, dim),
        lambda x: x.expand(2, *x.shape),
        lambda x: x.view(torch.uint8) if x.dtype == torch.int8 else x,
        lambda x: x.index_select(dim, numbers.long()) if x.shape[dim] else x,
        lambda x: x.diagonal() if x.dim() > 1 else x,
    ]
    if both.real.dtype in (torch.float32, torch.float64):
        ways += [lambda x: x + 1, lambda x: -x * 0.5, lambda x: torch.where(x > 0, x, x.new_zeros(()))]
    return both.each(draw(st.sampled_from(ways)))


def cast(draw: Draw, both: Both) -> list[Both]:
    """Another dtype."""
    dtype = getattr(torch, draw(st.sampled_from(FLOATS)))
    return both.each(draw(st.sampled_from((lambda x: x.to(dtype), lambda x: x.type(dtype)))))


OPERATIONS: tuple[Operation, ...] = (index, cut, join, move, move, move, compute, cast)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.sampled_from(DTYPES), shapes(), st.integers(0, 2**20), st.data())
def test_random_sequences(
    directory: Path, dtype: str, shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    real = random_tensor(dtype, shape, seed)
    both = Both(real, RecordedTensor(Files(directory).add(real)))
    for _ in range(data.draw(st.integers(1, 6))):
        if not both.real.dim() or both.real.numel() > 3000 or both.real.dim() > 6:
            break
        found = data.draw(st.sampled_from(OPERATIONS))(data.draw, both)
        if not found:
            break
        both = data.draw(st.sampled_from(found))
    check(both)


def check(both: Both) -> None:
    """The recording is of the same shape and dtype, and reads the same."""
    assert (both.recorded.shape, both.recorded.dtype) == (both.real.shape, both.real.dtype)
    tensor = lazy_of(both.recorded)
    assert tensor is not None
    assert same(read_tensor(tensor), both.real)


def recorded(directory: Path, *shape: int, dtype: str = "float32") -> Both:
    """A tensor of the checkpoint."""
    real = random_tensor(dtype, shape, 1)
    return Both(real, RecordedTensor(Files(directory).add(real)))


def is_computed(tensor: Tensor) -> bool:
    """Whether some of it is held in memory when it is read."""
    found = lazy_of(tensor)
    assert found is not None
    return any(isinstance(piece.leaf, ComputedLeaf) for piece in found.pieces)


STRUCTURAL: dict[str, Callable[[Tensor], Tensor]] = {
    "stacked experts": lambda x: torch.stack(x.unbind(0), 0),
    "gate and up": lambda x: torch.cat([x[:2], x[2:]], dim=1),
    "transposed experts": lambda x: x.transpose(1, 2).contiguous(),
    "query, key and value": lambda x: torch.cat(x.chunk(2, 0), 0)[1:3].squeeze(),
    "expert by expert": lambda x: torch.stack([e.squeeze(0) for e in torch.chunk(x, 4, dim=0)]),
    "heads": lambda x: x.reshape(4, 2, 3, 4).transpose(1, 2).reshape(4, 3, 2, 4)[:, :, 0],
    "three dims as two": lambda x: x.view(24, 4),
    "kernel": lambda x: x.reshape(4, 6, 2, 2).reshape(4, -1),
    "dtype": lambda x: x.to(torch.bfloat16).clone().detach(),
    "a part cast": lambda x: x[1:3].half().unsqueeze(0).flatten(0, 1),
}


@pytest.mark.parametrize("case", STRUCTURAL)
def test_what_only_moves_elements_is_not_computed(tmp_path: Path, case: str) -> None:
    both = recorded(tmp_path, 4, 6, 4)
    found = both.each(STRUCTURAL[case])[0]
    check(found)
    assert not is_computed(found.recorded)


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "interleaved rows": lambda x: x.reshape(2, 2, 6, 4).transpose(0, 1).reshape(4, 6, 4),
    "arithmetic": lambda x: x + 1,
    "every other": lambda x: x[::2],
    "backwards": lambda x: x.flip(0),
    "chosen": lambda x: x[torch.tensor([2, 0])],
    "repeated": lambda x: x.repeat(2, 1, 1),
    "other bits": lambda x: x.view(torch.int32),
    "cast twice": lambda x: x.to(torch.bfloat16).to(torch.float32),
    "mixed dtypes": lambda x: torch.cat([x, x.double()]),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_what_does_more_is_computed_when_it_is_read(tmp_path: Path, case: str) -> None:
    both = recorded(tmp_path, 4, 6, 4)
    found = both.each(COMPUTED[case])[0]
    check(found)
    assert is_computed(found.recorded)


def test_computations_of_computations(tmp_path: Path) -> None:
    both = recorded(tmp_path, 4, 6)
    check(both.each(lambda x: torch.stack([(x + 1).flip(0)[1:], x[1:] * 2]).transpose(0, 1) + 1)[0])


def test_each_of_several_computed_results(tmp_path: Path) -> None:
    both = recorded(tmp_path, 4, 6)
    for do in (lambda x: torch.sort(x, 0), lambda x: torch.unsafe_split(x, 3), torch.aminmax):
        for found in both.each(do):
            check(found)


MUTATIONS: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda x: x.add_(1),
    "fill_": lambda x: x.fill_(0),
    "assignment": lambda x: x.__setitem__(0, 1.0),
    "copy_ to": lambda x: x.copy_(torch.zeros(x.shape)),
    "copy_ from": lambda x: torch.zeros(x.shape).copy_(x),
    "assignment from": lambda x: torch.zeros(8, 4).__setitem__(slice(0, 4), x),
    "zero_": lambda x: x.zero_(),
    "out": lambda x: torch.add(x, 1, out=torch.zeros(x.shape)),
    "a view's": lambda x: x[0].mul_(2),
    "transpose_": lambda x: x.t_(),
}


@pytest.mark.parametrize("case", MUTATIONS)
def test_changes_in_place_are_refused(tmp_path: Path, case: str) -> None:
    both = recorded(tmp_path, 4, 4)
    with pytest.raises(NotImplementedError, match="changes a tensor of the checkpoint in place"):
        MUTATIONS[case](both.recorded)
    check(both)


ILLEGAL: dict[str, Callable[[Tensor], object]] = {
    "select past the end": lambda x: x[4],
    "select before the start": lambda x: x.select(1, -7),
    "sizes that are too few": lambda x: x.split([1, 2]),
    "sizes that are too many": lambda x: x.split([3, 2]),
    "negative sizes": lambda x: x.split([5, -1]),
    "another number of elements": lambda x: x.view(5, 5),
    "no divisor": lambda x: x.reshape(5, -1),
    "two unknowns": lambda x: x.reshape(-1, -1),
    "no such dim": lambda x: x.transpose(0, 2),
    "no such dim to select from": lambda x: x.select(2, 0),
    "no such dim to cut": lambda x: torch.chunk(x, 2, 2),
    "dims twice": lambda x: x.permute(0, 0),
    "dims left out": lambda x: x.permute(1),
    "no matrix": lambda x: x.unsqueeze(0).t(),
    "shapes to join": lambda x: torch.cat([x, x[:, :3]]),
    "shapes to stack": lambda x: torch.stack([x, x[:3]]),
    "ranks to join": lambda x: torch.cat([x, x[0]]),
    "no such place for a dim": lambda x: x.unsqueeze(4),
    "no such dim to squeeze": lambda x: x.squeeze(3),
    "nothing to join": lambda x: torch.cat([]),
    "a step of nothing": lambda x: x[:: x.dim() - 2],
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_what_torch_refuses_is_refused(tmp_path: Path, case: str) -> None:
    both = recorded(tmp_path, 4, 6)
    for tensor in (both.real, both.recorded):
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            ILLEGAL[case](tensor)


ANSWERS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "masked": lambda x: x[x > 0],
    "numpy": lambda x: x.numpy(),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_questions_about_values_are_not_guessed(tmp_path: Path, case: str) -> None:
    """The weights are not read yet."""
    both = recorded(tmp_path, 4, 6)
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        ANSWERS[case](both.recorded)


def test_tensors_are_compared_by_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bands; transformers asks so whether weights that are stored twice may be tied."""
    both = recorded(tmp_path, 5, 6)
    x, real = both.recorded, both.real
    for large in (1, 7, 1 << 20):
        monkeypatch.setattr("shardconv_runtime.checkpoint.recording_tensors.LARGE", large)
        assert torch.equal(x, x)
        assert torch.equal(x, real)
        assert torch.equal(x * 1, x.clone())
        assert not torch.equal(x, x + 1)
        assert not torch.equal(x, x.t())
        assert not torch.equal(x, x.half())


def test_a_tensor_without_dims(tmp_path: Path) -> None:
    both = recorded(tmp_path)
    for do in (
        lambda x: x.squeeze(),
        lambda x: x.squeeze(0),
        lambda x: x.transpose(0, -1),
        lambda x: x.t(),
        lambda x: x.permute(()),
        lambda x: x.unsqueeze(-1),
        lambda x: x.reshape(1, 1),
        lambda x: x.reshape(()),
        lambda x: torch.stack([x, x]),
        lambda x: x.to(torch.float16),
    ):
        check(both.each(do)[0])


def test_empty_tensors_are_left_out_of_a_join(tmp_path: Path) -> None:
    both = recorded(tmp_path, 4, 6)
    check(both.each(lambda x: torch.cat([torch.empty(0), x, x[0, :0]]))[0])
    check(both.each(lambda x: torch.cat([x[0, :0], x[0, :0]]))[0])
    check(both.each(lambda x: torch.cat([x[:0], x]))[0])


class TestAbsent:
    """Large parameters that the checkpoint lacks are not made, and are known as that."""

    def absent(self) -> Tensor:
        """As transformers makes a missing one."""
        with recording({}):
            return torch.empty_like(torch.empty(LARGE, device="meta"), device="cpu")

    def test_it_is_not_made(self) -> None:
        made = self.absent()
        assert isinstance(made, RecordedTensor)
        assert made.absent
        assert lazy_of(made) is None
        with recording({}):
            small = torch.empty_like(torch.empty(LARGE - 1, device="meta"), device="cpu")
            assert not isinstance(small, RecordedTensor)
            assert torch.empty_like(torch.empty(LARGE, device="meta")).is_meta

    def test_what_is_made_of_it_is_absent_too(self, tmp_path: Path) -> None:
        made, there = self.absent(), recorded(tmp_path, 2).recorded
        for found in (made * 2, made.view(2, -1)[0], torch.cat([made, there]), torch.cat([there, made])):
            assert lazy_of(found) is None
        made.normal_()
        made[:2].copy_(there)
        assert lazy_of(made) is None

    def test_what_is_there_is_not_changed_by_it(self, tmp_path: Path) -> None:
        both = recorded(tmp_path, 2)
        with pytest.raises(NotImplementedError, match="in place"):
            both.recorded.copy_(self.absent()[:2])
        check(both)


def test_a_constant_is_kept_as_it_is() -> None:
    constant = torch.arange(6).view(2, 3).t()
    tensor = lazy_of(constant)
    assert tensor is not None
    assert same(read_tensor(tensor), constant.contiguous())


def test_an_error_while_computing_names_the_file(tmp_path: Path) -> None:
    both = recorded(tmp_path, 4, 6)
    found = lazy_of(both.recorded + 1)
    for file in tmp_path.iterdir():
        file.write_bytes(b"")
    assert isinstance(found, LazyTensor)
    with pytest.raises(SourceError, match="cut off since its header was read"):
        read_tensor(lazy_tensor.take(found, 0, ((0, 1),)))


def test_a_product_may_be_filled_and_is_absent_then(tmp_path: Path) -> None:
    """So code initializes a weight that is made of a direction and a length; it is not read after that."""
    both = recorded(tmp_path, 4, 4)
    weight = both.recorded * both.recorded.norm(dim=0)
    torch.nn.init.normal_(weight)
    assert lazy_of(weight) is None
    with pytest.raises(NotImplementedError, match="in place"):
        (both.recorded * 2).add_(1)
    check(both)
