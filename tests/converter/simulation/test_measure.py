"""The formulas of the cache are exact: they give the bytes of the cache of a rank's model on real tensors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.format.measured import MemoryPlan, cache_bytes, prefill_bytes
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import owner_of, parallelize, retie, stored_tensors
from torch import Tensor, nn
from zoo.models import build

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan
from shardconv.reporting.plan_lines import weight_bytes
from shardconv.simulation.live_memory import LiveMemory, OperatorMemo
from shardconv.simulation.memory_run import tensors_of

pytestmark = pytest.mark.usefixtures("measured")

BATCH = 3


class Unconnected(Communicator):
    """A rank that hears of no other: the shapes of its collectives are right, their values are not."""

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x.clone()

    def _sum_in_place(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return torch.cat([x] * len(self.group(axes)))


def spec_of(config: Any, cls: type[nn.Module]) -> ModelSpec:
    return ModelSpec(name="a model", config=config, model_class=cls, dtype="float32")


def local_model(spec: ModelSpec, plan: Plan) -> nn.Module:
    """The model of rank 0, on real tensors."""
    model = build_model(spec.model_class, spec.config, torch.float32)
    local = parallelize(copy.deepcopy(model), plan, Unconnected(0, plan.mesh))
    for name, tensor in list(stored_tensors(local)):
        owner, attribute = owner_of(local, name)
        if attribute in owner._parameters:
            owner._parameters[attribute] = nn.Parameter(torch.full(tensor.shape, 0.01), requires_grad=False)
        else:
            owner._buffers[attribute] = torch.zeros(tensor.shape, dtype=tensor.dtype)
    retie(local, plan)
    return local


def num_bytes(tensors: list[Tensor]) -> int:
    """Of the memory under tensors."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def decoded_cache(model: nn.Module, length: int, source_length: int) -> Any:
    """The cache of ``BATCH`` sequences after a prompt and two decoding steps."""
    source = {"input_ids": torch.full((BATCH, source_length), 5)} if source_length else {}
    name = "decoder_input_ids" if source else "input_ids"
    cache: dict[str, Any] = {}
    with torch.inference_mode():
        for width in (length - 2, 1, 1):
            ids = {name: torch.full((BATCH, width), 5)}
            outputs = model(**source, **ids, **cache, use_cache=True)
            kept = "past_key_values" if "past_key_values" in outputs else "cache_params"
            cache = {kept: outputs[kept]}
    return cache


MODELS = (
    ("causal", "llama", 8),  # 4 key/value heads
    ("causal", "mixtral", 2),
    ("causal", "gpt_oss", 4),  # windows and full attention
    ("causal", "deepseek_v3", 2),
    ("causal", "bamba", 2),
    ("causal", "mamba2", 2),
    ("seq2seq", "t5", 4),
)


@pytest.mark.parametrize(("family", "model_type", "tp"), MODELS)
def test_the_cache_and_the_weights_are_those_of_a_rank(family: str, model_type: str, tp: int) -> None:
    made = build(family, model_type)
    spec = spec_of(made.config, made.model_class)
    plan = solve_plan(spec, SolveOptions(tp, check=False, measure=True))
    assert plan.memory is not None
    model = local_model(spec, plan)
    assert weight_bytes(plan) == num_bytes([*model.parameters(), *model.buffers()])
    for length in (9, 40):
        source_length = 13 if family == "seq2seq" else 0
        cache = decoded_cache(model, length, source_length)
        held = num_bytes([tensor for _, tensor in tensors_of(cache)])
        assert cache_bytes(plan.memory, BATCH, length, source_length) == held


def llama(num_layers: int, **changes: Any) -> ModelSpec:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "vocab_size": 101}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=num_layers, num_key_value_heads=4, tie_word_embeddings=False, **changes
    )
    return spec_of(config, transformers.LlamaForCausalLM)


def memory_of(spec: ModelSpec, tp: int = 2) -> MemoryPlan:
    memory = solve_plan(spec, SolveOptions(tp, check=False, measure=True)).memory
    assert memory is not None
    return memory


def test_layers_that_are_left_out_count() -> None:
    two, nine = memory_of(llama(2)), memory_of(llama(9))
    (term,) = two.cache
    assert term.token_bytes == 2 * 2 * (4 // 2 * 8) * 4
    assert nine.cache == (replace(term, token_bytes=term.token_bytes // 2 * 9),)
    assert nine.prefill == two.prefill


def test_a_prefill_is_measured_to_the_byte() -> None:
    """Unfused attention, whose scores the trace shows, against the storages of a run on real tensors."""
    config = llama(2).config
    config._attn_implementation = "eager"
    memory = memory_of(spec_of(config, transformers.LlamaForCausalLM), tp=1)
    model = transformers.LlamaForCausalLM(config).to("meta").eval()
    ids = torch.empty((BATCH, 50), dtype=torch.long, device="meta")
    mode = LiveMemory(10_000, str, [*model.parameters(), *model.buffers()], OperatorMemo())
    with torch.inference_mode(), mode:
        outputs = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    live, most = 0, 0
    for index, is_made in mode.lives:
        live += mode.sizes[index] if is_made else -mode.sizes[index]
        most = max(most, live)
    assert outputs.logits.shape == (BATCH, 1, 101)
    assert prefill_bytes(memory, BATCH, 50) + cache_bytes(memory, BATCH, 50) == most
    assert max(moment.sequence[2] for moment in memory.prefill) >= 8 * 4  # float32 scores of 8 heads


class Asking(transformers.LlamaForCausalLM):
    """Its code asks for a number that parameters decide."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        assert isinstance(self.lm_head, nn.Linear)
        if self.lm_head(self.model.embed_tokens(input_ids)).sum().item() > 1e9:
            raise ValueError
        return super().forward(input_ids, **kwargs)


def test_what_cannot_be_measured_is_a_note() -> None:
    plan = solve_plan(spec_of(llama(1).config, Asking), SolveOptions(1, check=False, measure=True))
    assert plan.memory is None
    (note,) = (note for note in plan.notes if "could not be measured" in note)
    assert "asks for values that depend on its parameters" in note
