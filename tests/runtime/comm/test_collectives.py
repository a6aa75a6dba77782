"""Collectives over mesh axes: any layout, any dtype, threads and processes alike."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from distributed import run_processes
from hypothesis import given, settings
from hypothesis import strategies as st
from shardconv_runtime.comm.collectives import CPU, Communicator, ProcessCommunicator
from shardconv_runtime.comm.dim_parts import KnownParts, Select
from shardconv_runtime.comm.mesh import Launch
from shardconv_runtime.comm.process_groups import axes_group
from shardconv_runtime.comm.steps import Gather, Inner, Reduce, Slice
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, parse, size
from shardconv_runtime.format.slices import Mesh, group_of, ranges
from shardconv_runtime.parallel.row_ids import RowIds
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from warm_compiler import warm_up

from shardconv.simulation.rank_threads import RanksDisagree, run_ranks

LAYOUTS = [
    ((2,), "8@0"),
    ((2,), "7@0"),
    ((3,), "10@0"),
    ((4,), "3@0"),
    ((2,), "4@0*3"),
    ((2,), "3*4@0"),
    ((3,), "6@0*2 + 3@0*2 + 3@0*2"),
    ((2, 2), "2@0*3@1*2"),
    ((2, 2), "2@0*4@1*2 + 2@0*2"),
    ((2, 2), "5@0.1"),
    ((2, 2), "6@1"),
    ((2, 2), "9"),
    ((1, 3), "7@0.1"),
]


def local_part(x: Tensor, dim: int, layout: Dim, mesh: Mesh, rank: int) -> Tensor:
    positions = [i for start, stop in ranges(layout, mesh, rank) for i in range(start, stop)]
    return x.index_select(dim, torch.tensor(positions, dtype=torch.int64))


def a_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(("mesh", "text"), LAYOUTS)
def test_gather_undoes_slice(mesh: Mesh, text: str, dim: int) -> None:
    layout = parse(text)
    shape = [3, 2, 4]
    shape[dim] = size(layout)
    full = a_tensor(tuple(shape))

    def rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        local = Slice(comm, dim, layout)(full)
        return local, Gather(comm, dim, layout)(local)

    for index, (local, gathered) in enumerate(run_ranks(mesh, rank)):
        assert torch.equal(local, local_part(full, dim, layout, mesh, index))
        assert torch.equal(gathered, full)
        assert gathered.is_contiguous()
        assert local.is_contiguous()


@st.composite
def layouts(draw: st.DrawFn) -> Dim:
    axes = draw(st.sampled_from([(), (0,), (1,), (0, 1), (1, 0)]))
    sharded = Leaf(draw(st.integers(4, 9)), axes)
    segments = [Product((Leaf(draw(st.integers(1, 3))), sharded, Leaf(draw(st.integers(1, 3)))))]
    if draw(st.booleans()):
        segments.append(Product((Leaf(draw(st.integers(4, 6)), axes), Leaf(2))))
    return Sum(tuple(segments))


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_any_layout_is_gathered_in_global_order(layout: Dim) -> None:
    mesh = (2, 2)
    full = a_tensor((2, size(layout)))

    def rank(comm: Communicator) -> Tensor:
        return Gather(comm, 1, layout)(local_part(full, 1, layout, mesh, comm.rank))

    assert all(torch.equal(gathered, full) for gathered in run_ranks(mesh, rank))


@pytest.mark.parametrize(
    ("axes", "expected"), [((0,), [4, 6, 4, 6]), ((1,), [3, 3, 7, 7]), ((0, 1), [10] * 4)]
)
def test_all_reduce_sums_over_the_named_axes_only(axes: tuple[int, ...], expected: list[int]) -> None:
    sums = run_ranks((2, 2), lambda comm: comm.all_reduce(torch.tensor([comm.rank + 1]), axes))
    assert [int(s) for s in sums] == expected


@pytest.mark.parametrize(("outer", "inner"), [("2", "6@0*2"), ("5@0", "3"), ("4@0*2", "2")])
def test_a_dim_with_an_open_factor(outer: str, inner: str) -> None:
    parts = parse(outer), parse(inner)
    axis = 0 if "@" in outer else 2
    full = a_tensor((2, size(parts[0]), 7, size(parts[1]), 3))

    def rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        local = Inner(Slice, comm, 1, *parts)(full.flatten(1, 3))
        gather = Inner(Gather, comm, 1, *parts)
        assert torch.equal(gather.forward(local), gather(local))
        return local, gather(local)

    for index, (local, gathered) in enumerate(run_ranks((2,), rank)):
        expected = local_part(full, axis + 1, parts[axis // 2], (2,), index)
        assert torch.equal(local, expected.flatten(1, 3))
        assert torch.equal(gathered, full.flatten(1, 3))


def test_many_ranges_are_selected_by_index() -> None:
    parts = tuple((i, i + 1) for i in range(0, 400, 2))
    x = a_tensor((2, 400))
    assert torch.equal(Select(parts, CPU)(x, 1), x[:, ::2])


def test_steps_have_their_indices_on_the_device_before_they_are_called() -> None:
    """Memory that a call allocates may belong to a CUDA graph."""
    meta = torch.device("meta")
    many = Product((Leaf(200), Leaf(2, (0,))))
    comm = ProcessCommunicator(1, (2,), {}, device=meta)
    parts = Gather(comm, 0, many).parts
    assert isinstance(parts, KnownParts)
    selects = [parts._select, parts._join, *parts._members]
    assert [select._index.device for select in selects if select and select._index is not None] == [meta] * 4
    rows = RowIds(comm, many)
    assert rows._table is not None
    assert rows._table.device == meta
    assert [rows.local(row) for row in range(6)] == [None, 0, None, 1, None, 2]


def test_without_axes_nothing_is_communicated() -> None:
    class Silent(Communicator):
        def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
            raise AssertionError("a collective ran")

        _concatenate = _sum

    comm = Silent(0, (1, 1))
    x = torch.randn(3)
    assert Reduce(comm, (0, 1))(x) is x
    assert comm.all_reduce(x, (0,)) is x
    assert Gather(comm, 0, Leaf(3, (0,)))(x) is x


def test_a_wrong_extent_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"dim 1 laid out as 8@0: expected 4 .* shape \(2, 3\)"):
        run_ranks((2,), lambda comm: Gather(comm, -1, Leaf(8, (0,)))(torch.zeros(2, 3)))


@pytest.mark.parametrize("kind", ["reduce", "gather", "slice"])
def test_gradients_are_refused(kind: str) -> None:
    def rank(comm: Communicator) -> Tensor:
        layout = Leaf(4, (0,))
        steps = {
            "reduce": Reduce(comm, (0,)),
            "gather": Gather(comm, 0, layout),
            "slice": Slice(comm, 0, layout),
        }
        x = torch.zeros(4 if kind == "slice" else 2, requires_grad=True)
        with torch.no_grad():
            steps[kind](x)
        return steps[kind](x)

    with pytest.raises(PlanError, match="loaded for inference"):
        run_ranks((2,), rank)


def test_a_communicator_is_not_copied_with_the_model() -> None:
    comm = ProcessCommunicator(0, (2,), {})
    assert copy.deepcopy(Reduce(comm, (0,))).comm is comm


# --- threads


def test_an_error_in_one_thread_stops_all() -> None:
    def rank(comm: Communicator) -> Tensor:
        if comm.rank == 1:
            raise KeyError("only here")
        return comm.all_reduce(torch.zeros(1), (0,))

    with pytest.raises(KeyError, match="only here"):
        run_ranks((3,), rank)


def test_a_rank_that_ends_early_does_not_hang_the_others() -> None:
    with pytest.raises(RanksDisagree, match="of which one has ended"):
        run_ranks((2,), lambda comm: comm.rank and comm.all_reduce(torch.zeros(1), (0,)))


def test_ranks_in_different_collectives_are_told() -> None:
    with pytest.raises(RanksDisagree, match="different collectives"):
        run_ranks((2,), lambda comm: comm.all_reduce(torch.zeros(1 + comm.rank), (0,)))


def test_threads_have_the_modes_of_their_caller() -> None:
    def modes(comm: Communicator) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    assert run_ranks((2,), modes) == [(True, False)] * 2
    with torch.no_grad():
        assert run_ranks((2,), modes) == [(False, False)] * 2
    with torch.inference_mode():
        assert run_ranks((2,), modes) == [(False, True)] * 2


def test_a_result_is_the_ranks_own() -> None:
    def rank(comm: Communicator) -> Tensor:
        return comm.all_reduce(torch.ones(2), (0,)).add_(comm.rank)

    assert [r.tolist() for r in run_ranks((2,), rank)] == [[2, 2], [3, 3]]


# --- processes

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool]


def process_communicator(mesh: Mesh) -> ProcessCommunicator:
    """Groups for each set of axes of the mesh over the started default group."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    assert Launch(rank, dist.get_world_size(), torch.device("cpu"), group).rank == rank
    subsets = [(0,)] if len(mesh) == 1 else [(0,), (0, 1), (1,)]
    groups = {axes: axes_group(group, group_of(mesh, axes, rank)) for axes in subsets}
    return ProcessCommunicator(rank, mesh, groups)


def gather_and_reduce(mesh: Mesh, text: str) -> None:
    comm, layout = process_communicator(mesh), parse(text)
    for dtype in DTYPES:
        full = (a_tensor((2, size(layout)), torch.float32) % 7).to(dtype)
        local = Slice(comm, 1, layout)(full)
        assert torch.equal(Gather(comm, 1, layout)(local), full)
        total = comm.all_reduce(full, (0,))
        assert total.dtype == dtype
        assert torch.equal(total, (full.to(torch.float32) * mesh[0]).to(dtype))
        assert torch.equal(comm.all_reduce(full.mT, (0,)), total.mT)


@pytest.mark.parametrize(("mesh", "text"), [((3,), "10@0"), ((2, 2), "2@0*4@1*2 + 2@0*2")])
def test_gloo_processes(mesh: Mesh, text: str) -> None:
    run_processes(math.prod(mesh), gather_and_reduce, mesh, text, start_group=True)


def compiled_without_breaks() -> tuple[int, bool]:
    comm = process_communicator((2,))
    layout = parse("3@0*2 + 5@0")
    steps = Slice(comm, -1, layout), Gather(comm, -1, layout), Reduce(comm, (0,))

    def run(x: Tensor) -> Tensor:
        return steps[2](steps[1](steps[0](x) * 2))

    x = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    with CommDebugMode() as counter:
        expected = run(x)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)
        assert torch.equal(compiled(x), x * 4)
    return counter.get_total_counts(), torch.equal(expected, x * 4)


def test_collectives_compile_into_one_graph_and_are_counted() -> None:
    warm_up()
    assert run_processes(2, compiled_without_breaks, start_group=True) == [(2, True)] * 2


def test_ranks_draw_the_same_numbers_as_one_that_was_seeded_alike() -> None:
    def rank(comm: Communicator) -> list[torch.Tensor]:
        drawn = [torch.randn(3)]
        comm.all_reduce(torch.zeros(1), (0,))
        return [*drawn, torch.randn(3)]

    torch.manual_seed(3)
    want = [torch.randn(3), torch.randn(3)]
    torch.manual_seed(3)
    for got in run_ranks((3,), rank):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
