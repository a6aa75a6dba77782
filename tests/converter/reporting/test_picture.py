"""Pictures of plans: what is in them, that nothing of a plan is markup, and that they are always the same."""

from __future__ import annotations

import contextlib
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
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, size
from shardconv_runtime.format.plan import PackedDim, PackedTensor, Packing, ParameterPlan, Plan, global_shape
from shardconv_runtime.format.slices import ranges, validate
from shardconv_runtime.format.stored_layout import is_common
from shown_plans import EVIL, ZOO, evil_plan, unchecked, wide_plan, zoo_plan
from small_models import hand_plan, small_config

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan
from shardconv.reporting.blocks import Bar, Block, Cell, outline
from shardconv.reporting.picture import picture
from shardconv.reporting.summary import human_bytes, stage_bytes, summarize
from shardconv.reporting.svg import WIDTH, fitted, text_width
from shardconv.reporting.weights import faces, stretches

SVG = "{http://www.w3.org/2000/svg}"


def parsed(plan: Plan) -> ElementTree.Element:
    """The picture as a tree."""
    return ElementTree.fromstring(picture(plan))


def texts(root: ElementTree.Element) -> list[str]:
    """All that is written in the picture."""
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def blocks_of(plan: Plan) -> list[Block]:
    """The blocks of the picture."""
    return outline(plan, summarize(plan))


def cells(block: Block) -> list[Cell]:
    """Weights of a block."""
    return [item for item in block.items if isinstance(item, Cell)]


def bars(block: Block) -> list[Bar]:
    """The collectives of a block."""
    return [item for item in block.items if isinstance(item, Bar)]


def order(block: Block) -> list[str]:
    """Names of weights and collectives in the order of the picture."""
    items = [item for lane in block.lanes() for item in lane.items]
    return [item.op if isinstance(item, Bar) else item.path for item in items]


@pytest.mark.parametrize("case", ZOO, ids=lambda case: "-".join(map(str, case)))
def test_every_weight_and_every_byte_of_a_plan_is_in_its_outline(case: tuple[str, str, int, str]) -> None:
    plan = zoo_plan(*case)
    blocks, summary = blocks_of(plan), summarize(plan)
    assert sum(block.rank_bytes for block in blocks) == pytest.approx(max(summary.rank_bytes), rel=1e-3)
    counted = sum(bar.token_bytes * len(bar.layers) for block in blocks for bar in bars(block))
    assert counted == sum(c.token_bytes for c in summary.collectives)
    drawn = {dataclasses.replace(t.plan, names=()) for b in blocks for cell in cells(b) for t in cell.tensors}
    assert drawn >= {dataclasses.replace(e, names=()) for e in plan.parameters if not is_common(e)}
    written = "\n".join(text for block in blocks for text in block.replicated)
    shapes = [
        {f"[{', '.join(map(str, global_shape(entry)))}]" for entry in entries}
        for entries in (filter(is_common, plan.parameters), drawn)
    ]
    assert all(text in written for text in shapes[0] - shapes[1])
    for block in blocks:
        lanes = block.lanes()
        assert Counter(map(id, block.items)) == Counter(id(item) for lane in lanes for item in lane.items)


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
    first, layer, last = blocks_of(zoo_plan("causal", "llama", 4))
    assert order(first) == ["model.embed_tokens", "all_reduce"]
    assert layer.layers == {"model.layers.0", "model.layers.1"}
    assert [lane.part for lane in layer.lanes()] == ["self_attn", "mlp"]
    assert [name.rpartition(".")[2] for name in order(layer)] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "all_reduce"),
        *("gate_proj", "up_proj", "down_proj", "all_reduce"),
    ]
    assert list(layer.replicated) == ["input_layernorm [64]", "post_attention_layernorm [64]"]
    assert order(last) == ["lm_head", "all_gather"]
    assert list(last.replicated) == ["model.norm [64]"]


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


def test_layers_of_several_kinds_are_one_block() -> None:
    """A part that only some layers have says which; parts that take the same place are neighbors."""
    plan = zoo_plan("causal", "qwen3_next", 8)
    (block,) = (block for block in blocks_of(plan) if block.stack)
    lanes = [(lane.part, sorted(lane.layers)) for lane in block.lanes()]
    first, second = "model.layers.0", "model.layers.1"
    assert lanes == [("linear_attn", [first]), ("self_attn", [second]), ("mlp", [first, second])]
    assert "linear_attn of model.layers.0" in texts(parsed(plan))


def test_a_layer_with_a_few_more_parts_is_drawn_as_the_others() -> None:
    plan = zoo_plan("seq2seq", "t5", 4)
    blocks = [block for block in blocks_of(plan) if block.stack]
    assert [block.stack for block in blocks] == ["encoder.block", "decoder.block"]
    (bias,) = (cell for cell in cells(blocks[0]) if cell.path.endswith("relative_attention_bias"))
    assert bias.layers == {"encoder.block.0"}
    assert "in 1 of 2 layers" in texts(parsed(plan))


def test_tied_weights_are_drawn_where_they_are_used() -> None:
    plan = zoo_plan("causal", "gpt2", 4)
    assert [cell.tied_to for cell in cells(blocks_of(plan)[-1])] == ["transformer.wte.weight"]
    assert "is transformer.wte" in texts(parsed(plan))


def test_experts_that_are_not_sharded_are_sheets_of_one_color() -> None:
    sharded, distributed = (zoo_plan("causal", "mixtral", 4, experts) for experts in ("tp", "ep"))

    def experts(plan: Plan) -> Cell:
        return next(c for block in blocks_of(plan) for c in cells(block) if c.path.endswith("experts"))

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
    with contextlib.suppress(PlanError):
        validate(dim, (2, 3))
        cover(dim)


def cover(dim: Dim) -> None:
    """Check the edges of the stretches."""
    parts = stretches(dim, (2, 3))
    assert parts[0][0] == 0.0
    assert parts[-1][1] == pytest.approx(1.0)
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(parts))
    assert len(parts) <= 64
    assert all(set(ranks) <= set(range(6)) for _, _, ranks in parts)


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
    for rank in range(math.prod(mesh)):
        own = [(start, stop) for start, stop, ranks in stretches(dim, mesh) if rank in ranks]
        spans = [(round(start * size(dim)), round(stop * size(dim))) for start, stop in own]
        flat = [position for start, stop in spans for position in range(start, stop)]
        assert flat == [p for start, stop in ranges(dim, mesh, rank) for p in range(start, stop)]


def test_many_stretches_are_few() -> None:
    assert [ranks for _, _, ranks in stretches(Leaf(1000, (0,)), (64,))] == [(0,), (1,), (2,), (), (63,)]
    repeated = stretches(Product((Leaf(1000), Leaf(4, (0,)))), (4,))
    assert [ranks for _, _, ranks in repeated] == [(0,), (1,), (2,), (), (3,)]
    fused = stretches(Sum((Leaf(640, (0,)), Leaf(64, (0,)))), (64,))
    assert len(fused) == 10


def test_a_dim_of_very_many_stretches_is_a_gap() -> None:
    assert stretches(Product((Leaf(10**6), Leaf(2, (0,)))), (2,)) == ((0.0, 1.0, ()),)


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
