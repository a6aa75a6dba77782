"""Modules of a loaded model that are called by themselves: full tensors in, full tensors out.

Each module gets what the unsharded model gives it. Whatever has the shape of the unsharded result is equal.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import RefusedCallError
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from shardconv_runtime.training.prepare import TrainingForm, parallelize_for_training
from torch import Tensor, nn
from torch.utils import _pytree
from zoo.measure import difference, random_weight
from zoo.models import build

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan
from shardconv.simulation.random_weights import fill, local_weights
from shardconv.simulation.rank_threads import run_ranks

Call = tuple[tuple[Any, ...], dict[str, Any]]


def is_plain(value: Any) -> bool:
    """Whether an argument has no state, as a cache has."""
    leaves = _pytree.tree_leaves(value)
    return all(each is None or isinstance(each, int | float | str | Tensor | torch.dtype) for each in leaves)


def calls_of(model: nn.Module, ids: Tensor) -> dict[str, Call]:
    """The first call of each module in a call of a model."""
    calls: dict[str, Call] = {}

    def note(name: str, module: nn.Module, *call: Any) -> None:
        if name not in calls:
            calls[name] = copy.deepcopy(call)

    modules = [(name, module) for name, module in model.named_modules() if name]
    handles = [m.register_forward_pre_hook(partial(note, n), with_kwargs=True) for n, m in modules]
    model(ids)
    for handle in handles:
        handle.remove()
    return {name: call for name, call in calls.items() if is_plain(call)}


def called(model: nn.Module, name: str, call: Call, *, training: bool) -> list[Tensor]:
    """The tensors that a module returns, and in training the gradients of its inputs and its parameters."""
    args, kwargs = copy.deepcopy(call)
    module = model.get_submodule(name)
    if not training:
        with torch.no_grad():
            return tensors(module(*args, **kwargs))
    inputs = [x.requires_grad_() for x in tensors((args, kwargs)) if x.is_floating_point()]
    results = tensors(module(*args, **kwargs))
    losses = [x.pow(3).sum() for x in results if x.requires_grad]
    if not losses:
        return results
    leaves = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True)
    return [*results, *(each for each in gradients if each is not None)]


def tensors(value: Any) -> list[Tensor]:
    """The tensors in containers."""
    return [each for each in _pytree.tree_leaves(value) if isinstance(each, Tensor)]


@dataclass(frozen=True)
class Setting:
    """A model of the zoo, planned for two ranks."""

    meta: nn.Module
    plan: Plan
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, family: str, model_type: str) -> Setting:
        """Return the model with random weights in float64."""
        model = build(family, model_type)
        spec = ModelSpec(model_type, model.config, model.model_class, "float32")
        plan = solve_plan(spec, SolveOptions(2, check=False))
        meta = build_model(model.model_class, copy.deepcopy(model.config), torch.float64)
        meta.set_experts_implementation("eager")
        rng = torch.Generator().manual_seed(3)
        stored = {name: tensor for name, tensor in stored_tensors(meta) if name in parameter_plans(plan)}
        return cls(meta, plan, {name: random_weight(tensor, rng) for name, tensor in stored.items()})

    def unsharded(self, *, training: bool) -> Any:
        """Return the unsharded model."""
        return fill(copy.deepcopy(self.meta), self.weights).eval().requires_grad_(training)

    def local(self, comm: Communicator, *, training: bool) -> Any:
        """Return the model of one rank."""
        model = copy.deepcopy(self.meta)
        if training:
            parallelize_for_training(model, self.plan, comm, TrainingForm(training=True))
        else:
            parallelize(model, self.plan, comm)
        parts = local_weights(self.weights, self.plan, comm.rank)
        return fill(model, parts, gradients=training).eval()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("model_type", ["cohere", "deepseek_v2", "falcon"])
def test_every_module_by_itself(model_type: str, training: bool) -> None:
    """Modules with terms at their inputs, at their outputs, and at outputs to which code writes later."""
    setting = Setting.of("causal", model_type)
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(4))

    def outcomes_of_rank(comm: Communicator) -> Counter[str]:
        local = setting.local(comm, training=training)
        outcomes = Counter[str]()
        for name, call in calls.items():
            try:
                got = called(local, name, call, training=training)
            except RuntimeError:  # the sizes of a sharded input
                outcomes["refused"] += 1
                continue
            # The gradients of sharded weights are the only parts of other shapes.
            pairs = [(x, y) for x, y in zip(got, want[name], strict=True) if x.shape == y.shape]
            if got[0].shape != want[name][0].shape:
                outcomes["parts"] += 1
            else:
                assert difference(*map(list, zip(*pairs, strict=True))) < 1e-6, name  # norms are in float32
                outcomes["right"] += 1
        assert difference([local(ids).logits.detach()], [logits]) < 1e-6
        return outcomes

    unsharded = setting.unsharded(training=training)
    with torch.no_grad():
        calls = calls_of(unsharded, ids)
        logits = unsharded(ids).logits
    want = {name: called(unsharded, name, call, training=training) for name, call in calls.items()}
    for outcomes in run_ranks(setting.plan.mesh, outcomes_of_rank):
        assert outcomes["right"] >= 11, outcomes


def encoded_first(model: Any) -> dict[str, Tensor]:
    """Gradients of the parameters if the encoder is called before the model."""
    encoded = model.get_encoder()(torch.arange(3, 17).reshape(2, 7))
    model(decoder_input_ids=torch.arange(5, 15).reshape(2, 5), encoder_outputs=encoded).logits.pow(
        2
    ).sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("model_type", ["fsmt", "mvp"])
def test_an_encoder_is_trained_through_its_outputs(model_type: str) -> None:
    setting = Setting.of("seq2seq", model_type)
    gradients = encoded_first(setting.unsharded(training=True))
    largest = max(float(each.abs().max()) for each in gradients.values())

    def error(comm: Communicator) -> float:
        parts = local_weights(gradients, setting.plan, comm.rank)
        got = encoded_first(setting.local(comm, training=True))
        return max(float((got[name] - part).abs().max()) for name, part in parts.items())

    assert max(run_ranks(setting.plan.mesh, error)) < 1e-9 * largest


def test_gradients_of_inputs_are_refused() -> None:
    """The results of another model's encoder: each rank would have a term of their gradient."""
    setting = Setting.of("causal", "bart")
    states = torch.randn(2, 5, setting.meta.config.d_model, dtype=torch.float64)

    def call(comm: Communicator) -> None:
        model = setting.local(comm, training=True)
        ids = torch.arange(3, 17).reshape(2, 7)
        model(ids, encoder_hidden_states=states.clone())
        model(ids, encoder_hidden_states=states.clone().requires_grad_())

    with pytest.raises(RefusedCallError, match=r"encoder_hidden_states .* requires gradients"):
        run_ranks(setting.plan.mesh, call)
