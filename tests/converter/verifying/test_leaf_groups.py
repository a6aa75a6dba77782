"""Which sizes shrink: not those that the inputs decide; equal ones and those of several rows do alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardconv.dim_analysis.analysis import Analysis
from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.dim_trees import concatenation, leaf, leaves, product
from shardconv.dim_analysis.rules import RULES
from shardconv.tracing.fold import fold
from shardconv.tracing.tape import Tape, TensorInfo
from shardconv.tracing.trace import trace
from shardconv.verifying.leaf_groups import LeafGroup, leaf_groups, with_unread_parameters
from shardconv.verifying.retrace import compare_tapes
from shardconv.verifying.small_shapes import SmallShapes, choose_sizes
from shardconv.verifying.token_tables import token_use

QUERIES, WIDTH = 12, 40


class Fills(nn.Module):
    """Puts what it makes of its queries in the places of a mask."""

    def __init__(self, by_index: bool) -> None:
        super().__init__()
        self.by_index = by_index
        self.queries = nn.Parameter(torch.zeros(QUERIES, WIDTH))
        self.make = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        made = self.make(self.queries)
        if not self.by_index:
            return x.masked_scatter(places[..., None], made)
        x = x.clone()
        x[places] = made
        return x


@pytest.mark.parametrize("by_index", [False, True])
def test_rows_that_fill_the_places_of_a_mask_keep_their_number(by_index: bool) -> None:
    places = torch.arange(19) < QUERIES
    model = Fills(by_index).to("meta")
    _, groups = analyzed(model, {"x": torch.randn(19, WIDTH), "places": places})
    assert QUERIES not in {group.size for group in groups}


def test_what_is_as_long_as_the_ids_keeps_its_length() -> None:
    """The states of the tokens are put together anew, by a mask: nothing links their number to the ids."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, WIDTH)
            self.make = nn.Linear(WIDTH, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            return self.make(self.embed(ids).masked_scatter(ids[..., None] > 3, torch.ones(57, WIDTH)))

    model = Adds().to("meta")
    folded = fold(trace(model, {"ids": torch.arange(57).view(3, 19)}, RULES))
    groups = leaf_groups(analyze(folded.tape, folded.ties), folded.ties, ())
    assert {group.size for group in groups} >= {WIDTH}
    assert not {3, 19} & {group.size for group in groups}


def test_a_sum_whose_parts_keep_their_size_keeps_it_where_it_is_not_divided() -> None:
    """Halves of a head that are one dim elsewhere, with no link between the two."""
    half, head = leaf(64), leaf(128)
    analysis = Analysis(Tape())
    analysis.tape.tensors += [
        TensorInfo((4096, 128), torch.float32, "parameter", "a"),
        TensorInfo((4096, 128), torch.float32, "parameter", "b"),
    ]
    analysis.dims = {0: (leaf(4096), concatenation([half, half])), 1: (leaf(4096), head)}
    halves, heads = LeafGroup(64, frozenset([half])), LeafGroup(128, frozenset([head]))
    others = [LeafGroup(4096, frozenset([dims[0]])) for dims in analysis.dims.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardconv.verifying.small_shapes.ENOUGH", 0)
        assert choose_sizes(analysis, [halves, heads, *others], 4, {})[heads] == 40
        assert heads not in choose_sizes(analysis, [heads, *others], 4, {})


def test_a_result_that_nothing_reads_may_have_any_shape() -> None:
    """Code counts the numbers that a mask chooses: as many more as what it chooses from is wider."""

    class Counts(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.make = nn.Linear(WIDTH, width)

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            made = self.make(x)
            assert made[places[..., None].expand_as(made)].numel() == QUERIES * made.shape[1]
            return made

    given = {"x": torch.randn(19, WIDTH), "places": torch.arange(19) < QUERIES}
    tape, other = (trace(Counts(width).to("meta"), given, RULES) for width in (80, 24))
    analysis = analyze(tape, ())
    wide = [x for dims in analysis.dims.values() for dim in dims for x in leaves(dim) if x.size == 80]
    assert compare_tapes(SmallShapes(analysis, dict.fromkeys(wide, 24)), other, (), numbers=False) is None
    assert compare_tapes(SmallShapes(analysis, dict.fromkeys(wide, 25)), other, (), numbers=False)


def analyzed(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Analysis, list[LeafGroup]]:
    """The analysis of a model on meta, and its groups."""
    folded = fold(trace(model, inputs, RULES))
    analysis = analyze(folded.tape, folded.ties)
    return analysis, leaf_groups(analysis, folded.ties, ())


class Merges(nn.Module):
    """Takes four rows as one, which is as wide as an attribute says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = 4 * width
        self.make = nn.Linear(32, width)
        self.first = nn.Linear(self.width, self.width)
        self.second = nn.Linear(self.width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.make(x).view(-1, self.width)))


def test_dims_that_take_in_rows_shrink_as_these_do() -> None:
    analysis, groups = analyzed(Merges(3000).to("meta"), {"x": torch.randn(60, 32)})
    sizes = choose_sizes(analysis, groups, 8, {})
    smaller = {(group.size, size) for group, size in sizes.items()}
    (row,) = (small for size, small in smaller if size == 3000)
    assert {small for size, small in smaller if size == 12000} == {4 * row}


def test_rows_without_elements_are_no_part_of_a_dim() -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :0].reshape(0, 4)

    analysis, groups = analyzed(Empty().to("meta"), {"x": torch.randn(6, 32)})
    assert choose_sizes(analysis, groups, 8, {}) == {}


def test_halves_of_a_head_go_before_a_product_that_is_as_large() -> None:
    """A head of 128 is two halves of 64; a grid of 8*16 patches is none of it."""
    half, head, grid = leaf(64), leaf(128), product([leaf(8), leaf(16)])
    analysis = Analysis(Tape())
    shapes = {"a": (4096, 128), "b": (4096, 128), "c": (4096, 128)}
    analysis.tape.tensors += [TensorInfo(s, torch.float32, "parameter", n) for n, s in shapes.items()]
    analysis.dims = {
        0: (leaf(4096), grid),
        1: (leaf(4096), concatenation([half, half])),
        2: (leaf(4096), head),
    }
    halves, heads = LeafGroup(64, frozenset([half])), LeafGroup(128, frozenset([head]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardconv.verifying.small_shapes.ENOUGH", 0)
        sizes = choose_sizes(analysis, [heads, halves], 4, {})
    assert sizes[heads] == 2 * sizes[halves]


def test_what_the_traced_call_does_not_read_shrinks_with_what_is_as_large() -> None:
    """A table that nothing reads, and an expert that got no token."""

    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(2000, 32)
            self.other = nn.Embedding(2000, 96)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in "ab")

        def forward(self, ids: Tensor) -> Tensor:
            return self.experts[0](self.embed(ids))

    folded = fold(trace(Unread().to("meta"), {"ids": torch.arange(57).view(3, 19)}, RULES))
    analysis = with_unread_parameters(analyze(folded.tape, folded.ties), folded.representatives())
    tensors = {info.name: tid for tid, info in enumerate(folded.tape.tensors) if info.name}
    dims = {name: analysis.dims[tensors[name]] for name in tensors}
    assert dims["experts.1.weight"] == dims["experts.0.weight"]
    groups = leaf_groups(analysis, folded.ties, token_use(folded.tape).tables)
    (rows,) = (group for group in groups if group.rows)
    assert {*leaves(dims["embed.weight"][0]), *leaves(dims["other.weight"][0])} <= rows.leaves
    assert 96 in {group.size for group in groups}


def test_rows_that_a_mask_of_their_shape_picks_are_as_wide_as_what_they_are_picked_from() -> None:
    """One bool for each row, expanded along it: the result is flat, and as long as some full rows."""

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = WIDTH
            self.before = nn.Linear(96, WIDTH)
            self.make = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            x = self.before(x)
            chosen = places[:, None].expand(-1, self.width)
            out = torch.zeros_like(x)
            out[~chosen] = self.make(x[~chosen].view(-1, self.width)).flatten()
            return out

    places = torch.arange(19) < QUERIES
    _, groups = analyzed(Picks().to("meta"), {"x": torch.randn(19, 96), "places": places})
    (wide,) = (group for group in groups if group.size == WIDTH)
    assert wide.parameters == {"before.weight", "before.bias", "make.weight", "make.bias"}


def test_groups_of_layers_that_do_the_same_are_alike() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)) for _ in "ab"
            )
            self.other = nn.Sequential(nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers, self.other):
                x = x + layer(x)
            return x

    model = Layers().to("meta")
    analysis = analyze(trace(model, {"x": torch.randn(19, WIDTH)}, RULES))
    inner = [group for group in leaf_groups(analysis, (), ()) if group.size == 96]
    assert len(inner) == 3
    assert [group.is_alike(inner[0]) for group in inner].count(True) in (1, 2)
    assert sum(a.is_alike(b) for a in inner for b in inner) == 5


def test_sizes_of_layers_that_do_the_same_are_one_where_equal_ones_part() -> None:
    analysis = Analysis(Tape())
    names = {"layers.0.a": 3000, "layers.1.a": 3000, "b": 3000}
    analysis.tape.tensors += [TensorInfo((4096, n), torch.float32, "parameter", m) for m, n in names.items()]
    analysis.dims = {tid: (leaf(4096), leaf(3000)) for tid in range(3)}
    groups = [
        LeafGroup(3000, frozenset([analysis.dims[tid][1]]), parameters=frozenset([name]))
        for tid, name in enumerate(("layers.*.a", "layers.*.a", "b"))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardconv.verifying.small_shapes.ENOUGH", 0)
        sizes = choose_sizes(analysis, groups, 8, {}, equal=set())
    assert sizes[groups[0]] == sizes[groups[1]] != sizes[groups[2]]


def test_rows_that_fill_an_expanded_mask_are_as_wide() -> None:
    """Features in the places of tokens, by a mask that is one value for each token."""

    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, WIDTH)
            self.see = nn.Linear(96, WIDTH)

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            embedded = self.embed(ids)
            return embedded.masked_scatter((ids > 11)[:, None].expand_as(embedded), self.see(x))

    _, groups = analyzed(Fills().to("meta"), {"ids": torch.arange(19), "x": torch.randn(7, 96)})
    (wide,) = (group for group in groups if group.size == WIDTH)
    assert wide.parameters == {"embed.weight", "see.weight", "see.bias"}


def test_tokens_that_are_picked_row_by_row_are_tokens() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(500, WIDTH)
            self.special = 77

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            rows = [row[seen.bool()] for row, seen in zip(ids, mask, strict=True)]
            count = sum((row == self.special).sum() for row in rows)
            return self.embed(ids) * count

    inputs = {"ids": torch.arange(60).view(3, 20), "mask": torch.ones(3, 20, dtype=torch.long)}
    use = token_use(trace(Picks().to("meta"), inputs, RULES))
    assert len(use.tables) == 1
    assert {attribute: special.id for attribute, special in use.special.items()} == {("", "special"): 77}


def test_heads_are_one_group_where_their_insides_are_divided_in_other_ways() -> None:
    """Rotary positions halve a head behind a projection; its weight has the head as one leaf."""
    analysis = Analysis(Tape())
    heads = leaf(32), leaf(32)
    halved = concatenation([leaf(64), leaf(64)])
    shape = (4096,)
    analysis.tape.tensors += [TensorInfo(shape, torch.float32, "parameter", name) for name in "ab"]
    analysis.dims = {0: (product([heads[0], leaf(128)]),), 1: (product([heads[1], halved]),)}
    (group,) = (group for group in leaf_groups(analysis, [(0, 1)], ()) if group.size == 32)
    assert group.leaves == set(heads)


def test_rows_are_as_wide_as_what_they_are_put_into() -> None:
    """Code that lays tokens and features side by side in new memory, place by place."""

    class Merges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, WIDTH)
            self.hear = nn.Linear(8, WIDTH)

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            out = torch.zeros(len(ids) + len(x), WIDTH)
            out[torch.arange(len(ids))] = self.embed(ids)
            out[torch.arange(len(x)) + len(ids)] = self.hear(x)
            return out

    given = {"ids": torch.arange(19), "x": torch.randn(QUERIES, 8)}
    folded = fold(trace(Merges().to("meta"), given, RULES))
    groups = leaf_groups(analyze(folded.tape, folded.ties), folded.ties, ())
    assert len([group for group in groups if group.size == WIDTH]) == 1


@pytest.mark.parametrize("pass_on", [False, True])
def test_results_of_layers_that_pass_on_what_they_get_may_be_one_tensor(pass_on: bool) -> None:
    class States(nn.Module):
        def __init__(self, apart: bool) -> None:
            super().__init__()
            self.make = nn.Linear(WIDTH, WIDTH)
            self.apart = apart

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            first = self.make(x)
            second = first.view(19, WIDTH) if self.apart else first
            return first, second, second + 1

    tape, other = (
        trace(States(apart).to("meta"), {"x": torch.randn(19, WIDTH)}, RULES) for apart in (True, False)
    )
    shapes = SmallShapes(analyze(tape, ()), {})
    conflict = compare_tapes(shapes, other, (), pass_on=pass_on)
    assert (conflict is None) is pass_on
    assert compare_tapes(SmallShapes(analyze(other, ()), {}), tape, (), pass_on=pass_on), "not the other way"
