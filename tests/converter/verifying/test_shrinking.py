"""The smaller model on which plans of large models are proven."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import transformers
from kept_checks import keeping_checks
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import PlanError, SolveError
from shardconv_runtime.format.dims import parse, to_text
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.slices import ranges
from torch import Tensor, nn
from zoo.models import build
from zoo.tasks import specification

from shardconv import passes
from shardconv.arguments import SolveOptions
from shardconv.dim_analysis.analysis import Analysis
from shardconv.dim_analysis.dim_trees import Node, concatenation, leaf, product
from shardconv.dim_analysis.rules import RULES
from shardconv.numeric_check import TOO_LARGE, NumericCheck
from shardconv.tracing.tape import Tape, TensorInfo
from shardconv.tracing.trace import trace
from shardconv.verifying.leaf_groups import LeafGroup
from shardconv.verifying.proof_case import simulate
from shardconv.verifying.small_model import single_rows
from shardconv.verifying.small_plan import Misfit, resized
from shardconv.verifying.small_shapes import SmallShapes, choose_sizes
from shardconv.verifying.token_tables import beyond_tables, fewer_tokens, hashed_tables, token_use


def proven(config: transformers.PreTrainedConfig, tp: int, **options: object) -> tuple[Plan, NumericCheck]:
    """The plan of a causal model, and what proved it."""
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    with keeping_checks() as checks:
        spec = ModelSpec("large", config, model_class, "bfloat16")
        plan = passes.solve_plan(spec, SolveOptions(tp, **options))  # type: ignore[arg-type]
    return plan, checks[-1]


def num_elements(model: nn.Module) -> int:
    """Of all parameters."""
    return sum(p.numel() for p in model.parameters())


@pytest.fixture(scope="module")
def large() -> tuple[Plan, NumericCheck]:
    """A dense model of 80 billion parameters in wide layers, for eight ranks."""
    config = transformers.LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=24,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        pad_token_id=128004,
    )
    return proven(config, 8)


def test_a_large_model_is_proven_on_a_small_one(large: tuple[Plan, NumericCheck]) -> None:
    plan, check = large
    case = check.case(plan)
    assert plan.training is not None
    assert plan.training.parallel_loss
    assert not plan.notes
    assert num_elements(check.full.model) > 7e10
    assert num_elements(case.model) < 1e7
    layers = case.model.get_submodule("model.layers")
    assert sum(num_elements(layer) > 0 for layer in layers.children()) == 2
    embedding = case.model.get_submodule("model.embed_tokens")
    assert isinstance(embedding, nn.Embedding)
    assert embedding.padding_idx is not None
    assert embedding.padding_idx < embedding.weight.shape[0] < 1000
    assert int(case.inputs.tensors["input_ids"].max()) < embedding.weight.shape[0]


def test_a_wrong_plan_of_a_large_model_is_wrong_on_the_small_one(large: tuple[Plan, NumericCheck]) -> None:
    """A sum is left out in one layer of many: the shapes are right."""
    plan, check = large
    entry = next(m for m in plan.modules if m.category == "row" and "down_proj" in m.names[0])
    wrong = replace(entry, outputs=())
    with pytest.raises((SolveError, PlanError)):
        simulate(check.case(replace(plan, modules=tuple(wrong if m is entry else m for m in plan.modules))))


def test_uneven_shares_stay_uneven() -> None:
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14337,
        num_hidden_layers=2,
        num_attention_heads=32,
        vocab_size=32003,
    )
    plan, check = proven(config, 3)
    case = check.case(plan)
    sizes = {p.shape[0] % 3 for n, p in case.model.named_parameters() if "gate_proj" in n or "lm_head" in n}
    assert sizes == {14337 % 3, 32003 % 3}
    assert num_elements(case.model) < num_elements(check.full.model) / 10


def test_norms_that_change_their_weights_before_they_are_called_shrink() -> None:
    config = transformers.NemotronConfig(
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=16,
        vocab_size=32000,
    )
    plan, check = proven(config, 2)
    assert num_elements(check.case(plan).model) < num_elements(check.full.model) / 100


def test_layers_that_share_a_module_are_left_out() -> None:
    """It is called less often in the smaller model: its activation is one module of all layers."""
    plan, check = proven(transformers.OpenAIGPTConfig(n_head=12), 8)
    model = check.full.model
    assert model.get_submodule("transformer.h.0.mlp.act") is model.get_submodule("transformer.h.5.mlp.act")
    assert num_elements(check.case(plan).model) < num_elements(model) / 50


class Sums(nn.Module):
    """Of hidden states."""

    def forward(self, states: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(states).sum(0)


class Collecting(transformers.LlamaForCausalLM):
    """A module is given what some layers return."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__(config)
        self.sums = Sums()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        found = self.model(input_ids, attention_mask, output_hidden_states=True, use_cache=False)
        logits: torch.Tensor = self.lm_head(self.sums([found.hidden_states[i] for i in (1, 2, 4, 6)]))
        return logits


def test_layers_that_are_left_out_may_hand_their_results_to_a_module() -> None:
    """Those of several are one tensor in the smaller model."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=6,
        num_attention_heads=32,
        vocab_size=32000,
    )
    with keeping_checks() as checks:
        plan = passes.solve_plan(ModelSpec("collecting", config, Collecting, "bfloat16"), SolveOptions(2))
    case = checks[-1].case(plan)
    assert num_elements(case.model) < 1e7
    assert sum(num_elements(layer) > 0 for layer in case.model.get_submodule("model.layers").children()) < 6


def test_a_model_that_cannot_be_made_smaller_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardconv.numeric_check.MOST_BYTES", 1000)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    plan, _ = proven(config, 2)
    assert plan.notes == (TOO_LARGE,)
    assert plan.training is not None
    assert not plan.training.parallel_loss


# Dims ------------------------------------------------------------------------------------------------


def shapes(sizes: dict[Node, int]) -> SmallShapes:
    return SmallShapes(Analysis(Tape()), sizes)


@pytest.mark.parametrize(
    ("said", "smaller"),
    [
        ("32@0*128 + 4096", "32@0*128 + 24"),
        ("32*128@0 + 4096@0", "32*128@0 + 24@0"),
        ("8192@0", "4120@0"),
        ("4096 + 4096@1", "4096 + 24@1"),
        ("16@0*256 + 4096", "16@0*256 + 24"),
    ],
)
def test_dims_take_the_smaller_sizes_of_their_parts(said: str, smaller: str) -> None:
    heads, head_dim, wide = leaf(32), leaf(128), leaf(4096)
    tree = concatenation([product([heads, head_dim]), wide])
    assert to_text(resized(parse(said), tree, shapes({wide: 24}))) == smaller


@pytest.mark.parametrize("said", ["4095", "32*128 + 2048@0 + 2048", "64*128"])
def test_a_dim_that_divides_a_part_that_shrinks_is_refused(said: str) -> None:
    heads, head_dim, wide = leaf(32), leaf(128), leaf(4096)
    tree = concatenation([product([heads, head_dim]), wide])
    with pytest.raises(Misfit):
        resized(parse(said), tree, shapes({wide: 24}))


def test_positions_follow_the_parts() -> None:
    a, b, inner = leaf(100), leaf(50), leaf(8)
    tree = product([concatenation([a, b]), inner])
    small = shapes({a: 10})
    assert [small._position(tree, n) for n in (0, 800, 808, 1200, 400)] == [0, 80, 88, 480, None]
    assert small.held(tree) == [*range(80), *range(800, 1200)]


# Tokens ----------------------------------------------------------------------------------------------


def test_tokens_stay_on_their_rank() -> None:
    size, small, parts = 1003, 43, 4
    used = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:30].tolist()
    tokens = fewer_tokens([*used, -100, 5000], size, small, parts)
    assert tokens is not None
    assert len(set(tokens.ids.values())) == len(used)
    for token, other in tokens.ids.items():
        assert owner(size, parts, token) == owner(small, parts, other)
    ids = torch.tensor([[used[0], -100], [used[1], used[0]]])
    mapped = tokens.tensor(ids)
    assert mapped.tolist() == [[tokens.ids[used[0]], -100], [tokens.ids[used[1]], tokens.ids[used[0]]]]


@pytest.mark.parametrize(("size", "small"), [(1003, 43), (1000, 1000)])
def test_no_id_becomes_larger(size: int, small: int) -> None:
    """An id that is an attribute can be replaced by a smaller one only."""
    alone = (9, 2, size - 1)
    tokens = fewer_tokens([2, 9, 82, 363, 719, size - 64, size - 1], size, small, 4, alone=alone)
    assert tokens is not None
    assert all(other <= token for token, other in tokens.ids.items())
    assert small < size or all(other == token for token, other in tokens.ids.items())


def owner(size: int, parts: int, row: int) -> int:
    """The rank that holds a row."""
    held = [ranges(parse(f"{size}@0"), (parts,), rank) for rank in range(parts)]
    return next(rank for rank in range(parts) if any(a <= row < b for a, b in held[rank]))


def test_tokens_share_rows_where_a_rank_has_too_few() -> None:
    tokens = fewer_tokens(range(40), 1000, 64, 4, alone=(7, 3))
    assert tokens is not None
    assert set(tokens.ids) == set(range(40))
    assert set(tokens.ids.values()) == set(range(16))
    for one in (3, 7):
        assert [i for i, other in tokens.ids.items() if other == tokens.ids[one]] == [one]


def test_too_many_tokens_that_share_with_none() -> None:
    assert fewer_tokens(range(40), 1000, 64, 4, alone=range(16)) is None
    assert fewer_tokens(range(16), 1000, 64, 4, alone=range(16)) is not None


def test_ids_that_stay() -> None:
    tokens = fewer_tokens([1, 2, 700], 1000, 64, 4, fixed=(1,))
    assert tokens is not None
    assert tokens.ids[1] == 1
    assert fewer_tokens([1, 2, 700], 1000, 64, 4, fixed=(700,)) is None


# Sizes -----------------------------------------------------------------------------------------------


def test_heads_and_halves_of_heads_shrink_together() -> None:
    """Rotary halves of 64 make a head of 128, which the values have as one leaf."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=512,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardconv.verifying.small_shapes.ENOUGH", 1 << 16)
        plan, check = proven(config, 2)
    attention = check.case(plan).model.get_submodule("model.layers.0.self_attn")
    assert attention.q_proj.weight.shape[0] == attention.v_proj.weight.shape[0] < 1024


def many_experts() -> transformers.PreTrainedConfig:
    """A layer with more experts than a proof needs."""
    return transformers.Qwen3MoeConfig(
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=64,
        vocab_size=512,
    )


def test_experts_keep_their_number_where_fewer_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardconv.verifying.small_shapes.ENOUGH", 1 << 17)
    monkeypatch.setattr("shardconv.numeric_check.runs", lambda case: False)
    plan, check = proven(many_experts(), 2)
    experts = check.case(plan).model.get_submodule("model.layers.0.mlp.experts")
    assert experts.gate_up_proj.shape[0] == 64


def test_experts_shrink_with_the_counts_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grouped product is given the ends of its rows, counted for a number that is an attribute."""
    monkeypatch.setattr("shardconv.verifying.small_shapes.ENOUGH", 1 << 17)
    plan, check = proven(many_experts(), 2)
    layer = check.case(plan).model.get_submodule("model.layers.0.mlp")
    assert layer.experts.gate_up_proj.shape[0] == layer.experts.num_experts < 64
    assert layer.gate.weight.shape[0] == layer.experts.num_experts


def test_experts_in_groups_shrink_by_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router picks groups of experts first: their number stays, the experts of one get fewer."""
    config = transformers.DeepseekV3Config(
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=128,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        vocab_size=512,
    )
    monkeypatch.setattr("shardconv.verifying.small_shapes.ENOUGH", 1 << 17)
    plan, check = proven(config, 2)
    layer = check.case(plan).model.get_submodule("model.layers.1.mlp")
    assert layer.gate.weight.shape[0] == layer.experts.gate_up_proj.shape[0] < 128
    assert layer.gate.num_group == 4


class Hashing(nn.Module):
    """Looks rows up by hashes of its input."""

    def __init__(self, buckets: int, parts: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.parts = parts
        self.table = nn.Embedding(buckets * parts, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = [
            self.table((ids * 7919 + part) % self.buckets + part * self.buckets) for part in range(self.parts)
        ]
        return torch.stack(found).sum(0)


def test_a_table_that_is_looked_up_by_hashes_is_found() -> None:
    with torch.device("meta"):
        model = Hashing(1001, 3)
    tape = trace(model, {"ids": torch.arange(10).reshape(2, 5)}, RULES)
    (how,) = hashed_tables(tape).values()
    assert (how.attribute, how.value) == ("buckets", 1001)


def test_a_table_that_tokens_look_up_too_is_not() -> None:
    class Both(Hashing):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + self.table(ids)

    with torch.device("meta"):
        model = Both(1001, 3)
    assert not hashed_tables(trace(model, {"ids": torch.arange(10).reshape(2, 5)}, RULES))


class Comparing(nn.Module):
    """Looks tokens up, and compares them with an id of its config."""

    def __init__(self, image_token: int) -> None:
        super().__init__()
        self.image_token = image_token
        self.table = nn.Embedding(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(input_ids)
        return found.masked_fill((input_ids == self.image_token).unsqueeze(-1), 0.0)


@pytest.mark.parametrize(
    ("image_token", "last", "says"),
    [
        (7, 7, ""),
        (8, 8, "image_token=8 lies beyond the vocabulary"),
        (7, 9, "input_ids 9 lies beyond"),
    ],
)
def test_ids_beyond_the_vocabulary_are_named(image_token: int, last: int, says: str) -> None:
    inputs = {"input_ids": torch.tensor([[0, 3, last]])}
    with torch.device("meta"):
        model = Comparing(image_token)
    found = beyond_tables(trace(model, inputs, RULES), list(inputs), inputs)
    assert found.startswith(says)
    assert bool(found) == bool(says)


class Routing(nn.Module):
    """Looks up the states of tokens, and the numbers of their experts in a table of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.states = nn.Embedding(64, 4)
        self.register_buffer("experts", torch.zeros(64, 2, dtype=torch.long))

    def forward(self, input_ids: torch.Tensor, doubled: bool = False) -> torch.Tensor:
        chosen = self.experts[input_ids.flatten() * 2 if doubled else input_ids.flatten()]
        found: torch.Tensor = self.states(input_ids).flatten(0, 1) + chosen.sum(-1, keepdim=True)
        return found


@pytest.mark.parametrize("doubled", [False, True])
def test_a_table_that_is_indexed_by_tokens_alone_has_fewer_rows(doubled: bool) -> None:
    with torch.device("meta"):
        model = Routing()
    tape = trace(model, {"input_ids": torch.arange(10).reshape(2, 5)}, RULES, {"doubled": doubled})
    use = token_use(tape)
    names = {tape.tensors[table].name for table in use.tables}
    assert names == (set() if doubled else {"states.weight", "experts"})
    assert bool(use.inputs) is not doubled


@pytest.mark.parametrize("other", [0, 7])
def test_placeholders_may_become_token_zero(other: int) -> None:
    """Their rows are not looked up; the row of zero is the first one of a smaller table, too."""

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = 60
            self.states = nn.Embedding(64, 4)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            plain = input_ids.clone()
            plain[input_ids == self.place] = other
            found: torch.Tensor = self.states(plain)
            return found

    tape = trace(Filled().to("meta"), {"input_ids": torch.arange(10).reshape(2, 5)}, RULES)
    assert bool(token_use(tape).tables) is (other == 0)


class Asking(nn.Module):
    """Looks ids up in two tables, one of which has fewer rows, after it has asked whether it has them."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound = bound
        self.states = nn.Embedding(640, 4)
        self.others = nn.Embedding(630, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        is_known = (input_ids >= 0) & (input_ids < self.bound)
        known = torch.where(is_known, input_ids, torch.zeros_like(input_ids))
        found: torch.Tensor = self.states(nn.functional.pad(input_ids, (0, 3), value=2)).sum()
        return found + self.others(known)


@pytest.mark.parametrize("bound", [630, 5])
def test_ids_may_be_asked_whether_a_table_has_them(bound: int) -> None:
    tape = trace(Asking(bound).to("meta"), {"input_ids": torch.arange(10).reshape(2, 5)}, RULES)
    use = token_use(tape)
    names = {tape.tensors[table].name for table in use.tables}
    assert names == ({"states.weight", "others.weight"} if bound == 630 else set())
    if bound == 630:
        ((origin, tables),) = use.inputs.items()
        assert tables == use.tables
        assert use.fixed == {origin: {2}}


class Transposing(nn.Module):
    """Looks up ids whose rows are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.states = nn.Embedding(640, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.states(input_ids.transpose(0, 1).contiguous())
        return found


def test_ids_may_be_transposed() -> None:
    tape = trace(Transposing().to("meta"), {"input_ids": torch.arange(10).reshape(2, 5)}, RULES)
    assert {tape.tensors[table].name for table in token_use(tape).tables} == {"states.weight"}


def test_all_modules_of_a_tied_table_have_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder and the decoder have modules of their own, with the shared table's last id as padding."""
    monkeypatch.setattr("shardconv.verifying.small_shapes.ENOUGH", 0)
    spec = specification(
        build("seq2seq", "marian", vocab_size=5000, decoder_vocab_size=5000, pad_token_id=4999)
    )
    with keeping_checks() as checks:
        plan = passes.solve_plan(spec, SolveOptions(2))
    modules = [m for m in checks[-1].case(plan).model.modules() if isinstance(m, nn.Embedding)]
    tables = [m for m in modules if m.padding_idx is not None and len(m.weight) < 1000]
    assert len(tables) == 3
    assert len({m.padding_idx for m in tables}) == 1


def test_logits_that_are_cut_leave_as_many_rows_as_the_tokens_of_a_call_need() -> None:
    """A vocabulary is a sum where logits are cut to a part of it: the part has enough rows of its own."""
    ties = Analysis(Tape())
    rows, heads = leaf(50000), concatenation([leaf(49000), leaf(1000)])
    ties.dims.update({0: (rows, leaf(512)), 1: (heads, leaf(512))})
    tokens, most, padding = (
        LeafGroup(rows.size, frozenset([rows]), rows=True),
        *(LeafGroup(x.size, frozenset([x])) for x in heads.children),
    )
    ties.tape.tensors.extend(TensorInfo(shape, torch.float32, "parameter") for shape in ((50000, 512),) * 2)
    sizes = choose_sizes(ties, [tokens, most, padding], 2, {})
    assert sizes[tokens] == sizes[most] + sizes[padding]
    assert sizes[most] >= 256


def test_layers_that_cannot_be_left_out_count() -> None:
    """One matrix is small enough, thirty of them are not."""
    analysis = Analysis(Tape())
    wide = leaf(512)
    analysis.dims[0] = (wide, leaf(1024))
    analysis.tape.tensors.append(TensorInfo((512, 1024), torch.float32, "parameter"))
    group = LeafGroup(wide.size, frozenset([wide]))
    assert not choose_sizes(analysis, [group], 2, {})
    assert choose_sizes(analysis, [group], 2, {0: 30})[group] < 512


def test_one_row_is_as_large_a_part_of_each_input() -> None:
    """Of three images in 12 patches each, the patches of one."""
    inputs = {"ids": torch.zeros(3, 20), "patches": torch.arange(36), "sizes": torch.zeros(3, 2)}
    want = {"ids": (1, 20), "patches": (12,), "sizes": (1, 2)}
    assert [shapes_of(t) for t in single_rows(inputs)] == [want]
    for other in (torch.zeros(7), torch.zeros(0, 2), torch.tensor(1.0)):
        assert not list(single_rows({**inputs, "other": other}))


def test_what_has_a_single_row_may_hold_those_of_all_images() -> None:
    inputs = {"ids": torch.zeros(3, 20), "patches": torch.zeros(1, 4, 36), "positions": torch.zeros(1, 20)}
    want = {"ids": (1, 20), "patches": (1, 4, 12), "positions": (1, 20)}
    assert [shapes_of(t) for t in single_rows(inputs)] == [want, {**want, "patches": (1, 4, 36)}]
    assert not list(single_rows({"ids": torch.zeros(1, 20)}))


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
