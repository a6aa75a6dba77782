"""A plan applied to a model: overrides, replaced modules, shapes, ties."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from converted import fill, llama_plan, random_llama
from shardconv_runtime.comm.collectives import Communicator, ProcessCommunicator
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.plan import AttributeOverride, ModulePlan, Plan, local_shape, parameter_plans
from shardconv_runtime.format.slices import Mesh
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.attribute_overrides import apply_overrides
from shardconv_runtime.parallel.build import parallelize
from shardconv_runtime.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from small_models import small_config
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardconv.simulation.rank_threads import run_ranks

IDS = torch.tensor([[1, 5, 100, 7, 50], [3, 2, 99, 0, 51]])


def build(plan: Plan, comm: Communicator, config: Any = None, **options: Any) -> Any:
    model = build_model(transformers.LlamaForCausalLM, config or small_config(), torch.float64)
    return parallelize(model, plan, comm, **options)


def first_rank(mesh: Mesh = (2,)) -> Communicator:
    return ProcessCommunicator(0, mesh, {})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mesh", [(1,), (2,), (2, 2)])
def test_a_llama_gives_the_same_logits_and_tokens(mesh: Mesh, tied: bool) -> None:
    model = random_llama(tie_word_embeddings=tied)
    plan = llama_plan(model.config, mesh)
    state = model.state_dict()

    def rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        part = build(plan, comm, model.config)
        fill(part, plan, state, comm.rank)
        if tied:
            part.lm_head.weight = part.model.embed_tokens.weight
        part = copy.deepcopy(part)
        return part(IDS).logits, part.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)

    with torch.no_grad():
        logits = model(IDS).logits
        tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        for got, drawn in run_ranks(mesh, rank):
            torch.testing.assert_close(got, logits, rtol=0, atol=1e-9 * float(logits.abs().max()))
            assert torch.equal(drawn, tokens)


def test_modules_are_replaced_and_shapes_are_local() -> None:
    config = small_config(tie_word_embeddings=True)
    plan = llama_plan(config, (2,))
    model = build(plan, first_rank(), config)
    layer = model.model.layers[1]
    assert type(layer.self_attn.q_proj) is ColumnParallelLinear
    assert type(layer.mlp.down_proj) is RowParallelLinear
    assert type(model.model.embed_tokens) is VocabParallelEmbedding
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, entry in parameter_plans(plan).items():
        parameter = model.get_parameter(name)
        assert tuple(parameter.shape) == local_shape(entry, (2,), 0), name
        assert parameter.is_meta
        assert not parameter.requires_grad
    original = build_model(transformers.LlamaForCausalLM, config)
    assert list(model.state_dict()) == list(original.state_dict())
    assert not any(m.training for m in model.modules())


def test_a_module_with_two_names_is_replaced_under_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = self.a

    weight = dataclasses.replace(llama_plan(small_config(), (2,)).parameters[0], names=("a.weight",))
    plan = dataclasses.replace(
        llama_plan(small_config(), (2,)),
        parameters=(dataclasses.replace(weight, dims=(Leaf(4, (0,)), Leaf(4))),),
        modules=(ModulePlan(("a",), "column"),),
        tied=(("b.weight", "a.weight"),),
        logits=None,
    )
    model = parallelize(Twice(), plan, first_rank())
    assert type(model.a) is ColumnParallelLinear
    assert model.a is model.b
    assert model.b.weight.shape == (2, 4)


# --- logits that stay sharded


def test_logits_may_stay_sharded_and_labels_are_then_refused() -> None:
    model = random_llama()
    plan, state = llama_plan(model.config, (2,)), model.state_dict()

    def rank(comm: Communicator) -> Tensor:
        part = build(plan, comm, gather_logits=False)
        fill(part, plan, state, comm.rank)
        with pytest.raises(PlanError, match="gather_logits=True"):
            part(IDS, labels=IDS)
        return part(IDS, labels=None).logits

    with torch.no_grad():
        assert torch.allclose(torch.cat(run_ranks((2,), rank), -1), model(IDS).logits)


def test_attention_weights_of_one_rank_are_refused() -> None:
    model = random_llama()
    plan, state = llama_plan(model.config, (2,)), model.state_dict()

    def rank(comm: Communicator) -> None:
        part = build(plan, comm)
        fill(part, plan, state, comm.rank)
        with torch.no_grad():
            part(IDS, output_attentions=False)
            with pytest.raises(PlanError, match="heads are sharded"):
                part(IDS, output_attentions=True)

    run_ranks((2,), rank)


def test_a_plan_without_logits_gather_has_no_shard_to_return() -> None:
    plan = dataclasses.replace(llama_plan(small_config(), (2,)), logits=None)
    with pytest.raises(PlanError, match="does not shard the logits"):
        build(plan, first_rank(), gather_logits=False)


# --- overrides


def overridden(module: nn.Module, *overrides: AttributeOverride, rank: int = 0) -> nn.Module:
    apply_overrides(module, overrides, rank)
    return module


def editable() -> Any:
    module = nn.Module()
    module.heads, module.flag, module.rate, module.sizes = 8, True, 8.0, (8, 4, [2, 3])
    module.config = PreTrainedConfig(heads=8, inner=PreTrainedConfig(heads=8))
    module.kind, module.run = PreTrainedConfig, copy.copy
    module.child = nn.Module()
    module.child.heads = 8
    return module


def test_overrides_set_ints_and_copy_the_config_once() -> None:
    module = editable()
    shared = module.config
    overridden(
        module,
        AttributeOverride("heads", 8, (4,)),
        AttributeOverride("sizes.0", 8, (4,)),
        AttributeOverride("sizes.2.1", 3, (1,)),
        AttributeOverride("config.heads", 8, (3, 5)),
        AttributeOverride("config.inner.heads", 8, (2,)),
        rank=1,
    )
    assert (module.heads, module.sizes) == (4, (4, 4, [2, 1]))
    assert (module.config.heads, module.config.inner.heads) == (5, 2)
    assert (shared.heads, shared.inner.heads) == (8, 8)


def test_a_transformers_config_is_the_modules_own_after_an_edit() -> None:
    config = small_config()
    model = build_model(transformers.LlamaForCausalLM, config)
    first, second = (layer.self_attn for layer in model.model.layers)
    overridden(
        first,
        AttributeOverride("config.num_attention_heads", 4, (2,)),
        AttributeOverride("config.num_key_value_heads", 2, (1,)),
    )
    assert (first.config.num_attention_heads, first.config.num_key_value_heads) == (2, 1)
    assert second.config.num_attention_heads == model.config.num_attention_heads == 4
    for each in (model, copy.deepcopy(model)):
        own = each.model.layers[0].self_attn.config
        for name in ("eager", "sdpa"):
            each.set_attn_implementation(name)
            assert own._attn_implementation == each.config._attn_implementation == name
    model.set_attn_implementation("eager")
    assert each.model.layers[0].self_attn.config._attn_implementation == "sdpa"


def test_a_model_whose_own_config_was_overridden_can_be_printed_and_changed() -> None:
    model = build_model(transformers.LlamaForCausalLM, small_config())
    original = model.config
    overridden(model, AttributeOverride("config.vocab_size", original.vocab_size, (64,)))
    assert model.config is not original
    assert '"vocab_size": 64' in repr(model.config)
    assert "_followed" not in model.config.to_dict()
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == original._attn_implementation == "eager"
    model.config._attn_implementation = "sdpa"
    assert model.config._attn_implementation == original._attn_implementation == "sdpa"
    assert type(model.config)().vocab_size == transformers.LlamaConfig().vocab_size


class _Area(PreTrainedConfig):
    """Computes an int."""

    @property
    def area(self) -> int:
        return 12


class _Tile(nn.Module):
    """A module that computes one."""

    @property
    def area(self) -> int:
        return 12


def test_what_a_config_computes_is_another_number_in_its_copy() -> None:
    module = nn.Module()
    module.config = shared = _Area()
    overridden(module, AttributeOverride("config.area", 12, (6, 4)), rank=1)
    assert (module.config.area, shared.area) == (4, 12)
    assert isinstance(copy.deepcopy(module.config), _Area)
    assert copy.deepcopy(module.config).area == 4


def test_what_a_module_computes_is_not_overridden() -> None:
    with pytest.raises(PlanError, match="cannot override area: _Tile computes it"):
        overridden(_Tile(), AttributeOverride("area", 12, (6,)))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (AttributeOverride("missing", 8, (4,)), "a Module has no 'missing'"),
        (AttributeOverride("flag", 4, (4,)), "it is a bool, not an int"),
        (AttributeOverride("rate", 8, (4,)), "it is a float, not an int"),
        (AttributeOverride("heads", 16, (4,)), "it is 8, and was 16 when planned"),
        (AttributeOverride("sizes.7", 8, (4,)), "a tuple has no '7'"),
        (AttributeOverride("sizes.x", 8, (4,)), "a tuple has no 'x'"),
        (AttributeOverride("sizes", 8, (4,)), "it is a tuple, not an int"),
        (AttributeOverride("child.heads", 8, (4,)), "it leads through a Module"),
        (AttributeOverride("heads.real", 8, (4,)), "it leads through a int"),
        (AttributeOverride("config.nothing", 8, (4,)), "a PreTrainedConfig has no 'nothing'"),
        (AttributeOverride("kind.heads", 8, (4,)), "it leads through a type"),
        (AttributeOverride("run.heads", 8, (4,)), "it leads through a function"),
        (AttributeOverride("kind", 8, (4,)), "it is a type, not an int"),
        (AttributeOverride("forward", 8, (4,)), "not an int"),
        (AttributeOverride("training", 1, (1,)), "it is a bool, not an int"),
    ],
)
def test_only_existing_ints_are_overridden(override: AttributeOverride, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        overridden(editable(), override)


# --- plans that do not fit


def with_modules(plan: Plan, *entries: ModulePlan) -> Plan:
    return dataclasses.replace(plan, modules=plan.modules + entries)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            ModulePlan(("model.nothing",), "boundary"),
            "model.nothing: this module of the plan is missing from the model",
        ),
        (
            ModulePlan(
                ("model.layers.0.self_attn",), "boundary", overrides=(AttributeOverride("x", 1, (1,)),)
            ),
            r"model.layers.0.self_attn: cannot override x",
        ),
    ],
)
def test_a_module_that_does_not_fit_is_named(entry: ModulePlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        build(with_modules(llama_plan(small_config(), (2,)), entry), first_rank())


def test_parameters_that_do_not_fit_are_named() -> None:
    plan = llama_plan(small_config(), (2,))
    with pytest.raises(
        PlanError, match=r"1 parameter\(s\) of the model are missing from the plan, e.g. lm_head.weight"
    ):
        build(dataclasses.replace(plan, parameters=plan.parameters[:-1]), first_rank())
    extra = dataclasses.replace(plan.parameters[-1], names=("head.weight",))
    with pytest.raises(
        PlanError, match=r"1 parameter\(s\) of the plan are missing from the model, e.g. head.weight"
    ):
        build(dataclasses.replace(plan, parameters=(*plan.parameters, extra)), first_rank())
    with pytest.raises(PlanError, match=r"weight: the plan is for shape .* config.json is not the one"):
        build(plan, first_rank(), small_config(intermediate_size=50))


def test_the_mesh_must_be_the_plans() -> None:
    with pytest.raises(PlanError, match=r"a mesh \(2,\), the ranks form \(4,\)"):
        build(llama_plan(small_config(), (2,)), first_rank((4,)))
