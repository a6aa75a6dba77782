"""A plan that knows the links between hosts sends less over them, and is as exact as others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.plan import Plan, parameter_plans
from small_models import small_config
from torch import nn

from shardconv.arguments import HostLinks, SolveOptions
from shardconv.hardware.rank_work import hosts_bytes, rank_work, without_fused
from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.passes import solve_plan
from shardconv.simulation.layer_bypass import Bypass

# Reading half of a layer's attention costs less than a collective between hosts, and half of its MLP more.
LINKS = HostLinks(
    hosts=2, bandwidth=1e12, latency_s=1.0, memory_bandwidth=3e4, flops=1e12, tokens=1, weight_bytes=10**9
)


def planned(links: HostLinks | None, tp: int, *, check: bool = False) -> tuple[Plan, float]:
    """A plan, and the bytes that a token sends between two hosts."""
    sent: list[float] = []

    def inspect(plan: Plan, model: nn.Module, inputs: TraceInputs, bypassed: Mapping[str, Bypass]) -> None:
        work = rank_work(without_fused(plan), model, inputs, bypassed, 1, 8)
        sent.append(hosts_bytes(work.token, lambda rank: rank // (tp // 2)))

    config = small_config(
        hidden_size=64, intermediate_size=512, num_attention_heads=16, num_key_value_heads=2, head_dim=4,
        num_hidden_layers=3, vocab_size=96,
    )  # fmt: skip
    spec = ModelSpec("a model", config, transformers.LlamaForCausalLM, "float32")
    plan = solve_plan(spec, SolveOptions(tp, check=check, links=links), inspect=inspect)
    return plan, sent[0]


def axes(plan: Plan, suffix: str) -> set[int]:
    """The mesh axes that shard a parameter of the first layer."""
    entry = parameter_plans(plan)[f"model.layers.0.{suffix}.weight"]
    return {axis for dim in entry.dims for axis in axes_of(dim)}


@pytest.mark.usefixtures("solved_anew")
def test_ranks_of_two_hosts_send_fewer_bytes_between_them() -> None:
    plain, plain_bytes = planned(None, 16)
    # A rank of 16 reads a quarter as much as one of 4.
    linked, linked_bytes = planned(replace(LINKS, memory_bandwidth=LINKS.memory_bandwidth / 4), 16)
    assert plain.mesh[0] * plain.mesh[1] == 16
    assert axes(plain, "self_attn.q_proj") == {0, 1}
    assert linked.mesh[0] == 2
    assert 0 in axes(linked, "mlp.up_proj")
    assert 0 not in axes(linked, "self_attn.q_proj")
    assert 0 < linked_bytes < 0.7 * plain_bytes


@pytest.mark.usefixtures("solved_anew")
def test_the_plan_of_two_hosts_is_proven() -> None:
    plan, _ = planned(LINKS, 4, check=True)
    assert plan.mesh == (2, 2)
    assert axes(plan, "self_attn.q_proj") == {1}
    assert axes(plan, "mlp.up_proj") == {0, 1}
    assert plan.proven_arguments


@pytest.mark.usefixtures("solved_anew")
def test_weights_that_do_not_fit_are_sharded_over_hosts() -> None:
    few = replace(LINKS, weight_bytes=1)
    assert axes(planned(few, 4)[0], "self_attn.q_proj") == axes(planned(None, 4)[0], "self_attn.q_proj")


@pytest.mark.usefixtures("solved_anew")
def test_links_of_one_host_change_nothing() -> None:
    assert planned(replace(LINKS, hosts=1), 4) == planned(None, 4)
