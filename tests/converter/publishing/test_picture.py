"""Pictures of plans: what is in them, that nothing of a plan is markup, and that they are always the same."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise

import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, size
from shardconv_runtime.format.plan import PackedDim, PackedTensor, Packing, ParameterPlan, Plan
from shardconv_runtime.format.slices import ranges
from shown_plans import EVIL, ZOO, evil_plan, unchecked, wide_plan, zoo_plan
from small_models import hand_plan, small_config

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan
from shardconv.publishing.lane_picture import faces
from shardconv.publishing.lanes import Bar, Block, Cell, outline
from shardconv.publishing.picture import picture
from shardconv.publishing.stretches import MAX_STRETCHES, holders, stretches
from shardconv.publishing.svg import WIDTH, fitted, text_width
from shardconv.reporting.summary import human_bytes, stage_bytes, summarize

SVG = "{http://www.w3.org/2000/svg}"


def parsed(plan: Plan) -> ElementTree.Element:
    """The picture as a tree."""
    return ElementTree.fromstring(picture(plan))


def texts(root: ElementTree.Element) -> list[str]:
    """All that is written in the picture."""
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def cells(block: Block) -> list[Cell]:
    """Weights of a block."""
    return [item for lane in block.lanes for item in lane.items if isinstance(item, Cell)]


def bars(block: Block) -> list[Bar]:
    """The collectives of a block."""
    return [item for lane in block.lanes for item in lane.items if isinstance(item, Bar)]


def order(block: Block) -> list[str]:
    """Names of weights and collectives in the order of the picture."""
    items = [item for lane in block.lanes for item in lane.items]
    return [item.op if isinstance(item, Bar) else item.path for item in items]


@pytest.mark.parametrize("case", ZOO, ids=lambda case: "-".join(map(str, case)))
def test_every_weight_and_every_byte_of_a_plan_is_in_its_outline(case: tuple[str, str, int, str]) -> None:
    plan = zoo_plan(*case)
    blocks = outline(plan)
    summary = summarize(plan)
    assert sum(block.rank_bytes for block in blocks) == max(summary.rank_bytes)
    counted = sum(bar.token_bytes * bar.in_layers for block in blocks for bar in bars(block))
    assert counted == sum(c.token_bytes for c in summary.collectives)
    drawn = Counter(
        dataclasses.replace(tensor.plan, names=())
        for block in blocks
        for cell in (*cells(block), *block.replicated)
        for tensor in cell.tensors
    )
    assert set(drawn) == {dataclasses.replace(entry, names=()) for entry in plan.parameters}
    assert all(block.lanes or block.replicated for block in blocks)


@pytest.mark.parametrize("case", ZOO, ids=lambda case: "-".join(map(str, case)))
def test_pictures_are_well_formed_and_stand_alone(case: tuple[str, str, int, str]) -> None:
    plan = zoo_plan(*case)
    source = picture(plan)
    root = ElementTree.fromstring(source)
    assert (root.tag, root.get("width"), root.get("role")) == (f"{SVG}svg", str(WIDTH), "img")
    assert root.get("viewBox", "").startswith(f"0 0 {WIDTH} ")
    first, second = list(root)[:2]
    assert (first.tag, second.tag) == (f"{SVG}title", f"{SVG}desc")
    assert f"over {case[2]} ranks" in (first.text or "")
    assert "Each rank holds" in (second.text or "")
    assert not list(root.iter(f"{SVG}script"))
    assert not re.search(r"(href|src|@import|https?://(?!www\.w3\.org/2000/svg))", source)
    used, made = (
        set(re.findall(r"url\(#([^)]+)\)", source)),
        set(re.findall(r'<pattern id="([^"]+)"', source)),
    )
    assert used == made
    assert picture(dataclasses.replace(plan)) == source


def test_a_decoder_is_drawn_in_the_order_in_which_it_runs() -> None:
    first, layer, last = outline(zoo_plan("causal", "llama", 4))
    assert order(first) == ["model.embed_tokens", "all_reduce"]
    assert (layer.title, layer.count) == ("model.layers.{0,1}", 2)
    assert [lane.title for lane in layer.lanes] == ["self_attn", "mlp"]
    assert [name.rpartition(".")[2] for name in order(layer)] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "all_reduce"),
        *("gate_proj", "up_proj", "down_proj", "all_reduce"),
    ]
    assert [cell.path for cell in layer.replicated] == ["input_layernorm", "post_attention_layernorm"]
    assert order(last) == ["lm_head", "all_gather"]
    assert [cell.path for cell in last.replicated] == ["model.norm"]


def test_texts_of_a_picture() -> None:
    plan = zoo_plan("causal", "llama", 4)
    written = texts(parsed(plan))
    for expected in (
        "LlamaForCausalLM",
        "rank 3",
        "replicated",
        "self_attn",
        "q_proj",
        "all_reduce",
    ):
        assert expected in written
    assert "\N{MULTIPLICATION SIGN} 2" in written
    assert "→ 16 \N{MULTIPLICATION SIGN} 64" in written
    assert "rank 4" not in written


def test_kinds_of_layers_are_drawn_once() -> None:
    blocks = [block for block in outline(zoo_plan("causal", "qwen3_next", 8)) if block.title]
    assert len(blocks) == 2
    assert {frozenset(lane.title for lane in block.lanes) for block in blocks} == {
        frozenset({"linear_attn", "mlp"}),
        frozenset({"self_attn", "mlp"}),
    }
    for block in blocks:
        assert block.lanes[-1].title == "mlp", "attention runs first in every layer"


def test_a_layer_with_a_few_more_parts_is_drawn_as_the_others() -> None:
    blocks = [block for block in outline(zoo_plan("seq2seq", "t5", 4)) if block.title]
    assert [block.title for block in blocks] == ["encoder.block.{0,1}", "decoder.block.{0,1}"]
    (bias,) = (cell for cell in cells(blocks[0]) if cell.path.endswith("relative_attention_bias"))
    assert bias.in_layers == 1
    assert "in 1 of 2 layers" in texts(parsed(zoo_plan("seq2seq", "t5", 4)))


def test_tied_weights_are_drawn_where_they_are_used() -> None:
    last = outline(zoo_plan("causal", "gpt2", 4))[-1]
    assert [cell.tied_to for cell in cells(last)] == ["transformer.wte.weight"]
    assert "is transformer.wte" in texts(parsed(zoo_plan("causal", "gpt2", 4)))


def test_experts_that_are_not_sharded_are_sheets_of_one_color() -> None:
    sharded, distributed = (zoo_plan("causal", "mixtral", 4, experts) for experts in ("tp", "ep"))

    def experts(plan: Plan) -> Cell:
        return next(c for block in outline(plan) for c in cells(block) if c.path.endswith("experts"))

    found = [faces(experts(plan).tensors[0].plan) for plan in (sharded, distributed)]
    assert [len(dims) for dims in found] == [3, 3]
    assert picture(sharded) != picture(distributed)


def test_nothing_in_a_plan_is_markup() -> None:
    source = picture(evil_plan())
    root = ElementTree.fromstring(source)
    assert "<script" not in source
    assert "<b " not in source
    assert {node.tag.removeprefix(SVG) for node in root.iter()} <= {
        *("svg", "title", "desc", "style", "defs", "pattern", "g", "rect", "text", "line", "path", "circle")
    }
    assert EVIL in texts(root)
    assert any(EVIL in (node.text or "") for node in root.iter(f"{SVG}title"))


def test_characters_that_xml_cannot_hold_are_replaced() -> None:
    plan = hand_plan(small_config(), 2)
    plan = dataclasses.replace(plan, model=unchecked(plan.model, class_name="m:A\x00B\ud800"))
    assert "A\N{REPLACEMENT CHARACTER}B\N{REPLACEMENT CHARACTER}" in texts(parsed(plan))


def test_large_plans_make_bounded_pictures() -> None:
    root = parsed(wide_plan())
    written = texts(root)
    assert any(re.fullmatch(r"… \d+ more kinds of layers …", text) for text in written)
    assert any(re.fullmatch(r"… and \d+ more", text) for text in written)
    assert any(re.fullmatch(r"and \d+ more", text) for text in written)
    assert float(root.get("height", "")) < 12_000
    assert "rank 63" in written


@pytest.mark.parametrize("tp", [1, 2, 3, 8, 9, 64])
def test_any_number_of_ranks(tp: int) -> None:
    plan = hand_plan(small_config(), tp)
    root = parsed(plan)
    assert ("rank 0" in texts(root)) == (tp > 1)
    for node in root.iter(f"{SVG}rect"):
        numbers = [float(node.get(key, "0")) for key in ("x", "y", "width", "height")]
        assert all(map(math.isfinite, numbers))
        assert min(numbers[2:]) >= 0


def test_float8_and_partial_parameters() -> None:
    plan = hand_plan(small_config(), 2)
    blocks = ParameterPlan(
        ("extra.weight",),
        (Leaf(256, (0,)), Leaf(128)),
        "bfloat16",
        packing=Packing("fp8", (PackedTensor("*", "float8_e4m3fn", (PackedDim(0, 1), PackedDim(1, 1))),)),
    )
    term = ParameterPlan(("extra.bias",), (Leaf(256),), "float32", partial=(0,))
    root = parsed(dataclasses.replace(plan, parameters=(*plan.parameters, blocks, term)))
    assert "packed (fp8, 1 tensors)" in texts(root)
    assert "partial: full on one rank, zero on the others" in texts(root)
    assert any(node.get("id") == "sc-hatch" for node in root.iter(f"{SVG}pattern"))


DIMS = st.recursive(
    st.builds(Leaf, st.integers(1, 12), st.sampled_from([(), (0,), (1,), (0, 1)])),
    lambda inner: st.one_of(
        st.builds(lambda *d: Sum(d), inner, inner), st.builds(lambda a, b: Product((a, b)), inner, inner)
    ),
    max_leaves=5,
)


@given(dim=DIMS)
@settings(deadline=None)
def test_stretches_cover_the_dim(dim: Dim) -> None:
    found = stretches(dim, (2, 3))
    assert found[0].start == 0.0
    assert found[-1].stop == pytest.approx(1.0)
    assert all(a.stop == b.start for a, b in pairwise(found))
    assert len(found) <= MAX_STRETCHES + 1
    for stretch in found:
        if stretch.coordinates is not None:
            held = holders(stretch.coordinates, (2, 3))
            assert 0 <= held.first <= held.last < 6
            assert held.count in (1, 2, 3, 6)


@pytest.mark.parametrize(
    ("dim", "mesh"),
    [
        (Leaf(10, (0,)), (4,)),
        (Product((Leaf(4, (0,)), Leaf(8))), (4,)),
        (Sum((Product((Leaf(4, (0,)), Leaf(8))), Leaf(6, (0,)))), (2,)),
        (Product((Leaf(3), Leaf(6, (0,)))), (2,)),
        (Product((Leaf(2, (0,)), Leaf(6, (1,)))), (2, 3)),
        (Leaf(3, (0,)), (5,)),
    ],
)
def test_few_stretches_are_the_positions_that_ranks_hold(dim: Dim, mesh: tuple[int, ...]) -> None:
    held: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(math.prod(mesh))}
    for stretch in stretches(dim, mesh):
        assert stretch.coordinates is not None
        start, stop = (round(edge * size(dim)) for edge in (stretch.start, stretch.stop))
        held[holders(stretch.coordinates, mesh).first].append((start, stop))
    for rank, found in held.items():
        flat = [position for start, stop in found for position in range(start, stop)]
        assert flat == [p for start, stop in ranges(dim, mesh, rank) for p in range(start, stop)]


def test_many_stretches_are_few() -> None:
    found = stretches(Leaf(1000, (0,)), (64,))
    assert [stretch.coordinates for stretch in found] == [{0: 0}, {0: 1}, {0: 2}, None, {0: 63}]
    repeated = stretches(Product((Leaf(1000), Leaf(4, (0,)))), (4,))
    assert len(repeated) == 12
    fused = stretches(Sum((Leaf(640, (0,)), Leaf(64, (0,)))), (64,))
    assert len(fused) == 10


@given(text=st.text(max_size=80), width=st.floats(20, 400))
@example(text="⺁⺁", width=20.0)
@settings(deadline=None)
def test_text_is_shortened_to_its_width(text: str, width: float) -> None:
    shown = fitted(text, 11.0, width)
    assert shown == text or len(shown) < len(text) + 1
    assert text_width(shown, 11.0) <= max(width, text_width(shown[:3], 11.0))


@pytest.mark.parametrize(
    ("count", "shown"), [(2, ["stage 0", "stage 1"]), (9, ["stage 2", "… 5 more …", "stage 8"])]
)
def test_stages(count: int, shown: list[str]) -> None:
    config = small_config(num_hidden_layers=9)
    model = ModelSpec("small", config, transformers.LlamaForCausalLM, dtype="float32")
    plan = solve_plan(model, SolveOptions(2, pp=count, check=False))
    found = texts(parsed(plan))
    assert f"{count} stages of 2 ranks" in " ".join(found)
    assert set(shown) <= set(found)
    held = [max(ranks) for ranks in stage_bytes(plan)]
    assert f"{human_bytes(held[0])} per rank" in found
    assert max(held) == max(summarize(plan).rank_bytes)
    assert not any(
        text.startswith("stage ") for text in texts(parsed(dataclasses.replace(plan, stages=None)))
    )
