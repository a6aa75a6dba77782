"""Random weights for simulations: drawn, sliced, and put into models on meta."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from shardconv_runtime.format.header import dtype_name
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.parallel.build import owner_of, stored_tensors
from shardconv_runtime.parallel.fused_products import refresh_fused
from shardconv_runtime.parallel.local_modules import local_tensor
from torch import Tensor, nn


class SimulatedWeights(Protocol):
    """SimulatedWeights of the unsharded model and of its ranks."""

    own_copies: bool
    """Whether each model gets copies, since the model's code writes to them."""

    def put_into(
        self, model: nn.Module, rank: int | None, dtype: torch.dtype, *, gradients: bool
    ) -> nn.Module:
        """Give a model on meta the weights of a rank, or all weights without one, and return it."""

    def were_written_to(self) -> bool:
        """Return whether the code of a model has changed them, so that they are made again."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A choice of random numbers to draw."""

    seed: int = 0
    scale: float = 1.0
    """Factor of matrices; with 1, activations keep their range."""
    vectors: float = 1.0
    """Approximate size of the values of 1-D parameters."""

    def __str__(self) -> str:
        matrices = f", matrices times {self.scale}" if self.scale != 1 else ""
        vectors = f", vectors times {self.vectors}" if self.vectors != 1 else ""
        return f"seed {self.seed}{matrices}{vectors}"


USUAL = Draw()


class RandomWeights:
    """The same random weights for the unsharded model and the ranks, drawn and sliced once for each dtype.

    Models share these weights, unless ``own_copies`` is set. Then each model gets a copy.
    """

    def __init__(self, plan: Plan, draw: Draw = USUAL) -> None:
        self.own_copies = False
        self._plan = plan
        self._draw = draw
        self._made: dict[torch.dtype, Mapping[str, Tensor]] = {}
        self._local: dict[tuple[torch.dtype, int], Mapping[str, Tensor]] = {}
        self._versions: dict[torch.dtype, list[int]] = {}

    def were_written_to(self) -> bool:
        """Return whether a model's code changed its weights. If it did, they are drawn again, and models get
        copies."""
        if self.own_copies or all(_versions(made) == self._versions[d] for d, made in self._made.items()):
            return False
        self.own_copies = True
        self._made.clear()
        self._local.clear()
        return True

    def put_into(
        self, model: nn.Module, rank: int | None, dtype: torch.dtype, *, gradients: bool
    ) -> nn.Module:
        """See ``SimulatedWeights``; ranks get parts of the weights that an unsharded model got before."""
        if rank is not None:
            fill(model, self.local(rank, dtype), gradients)
            refresh_fused(model)
            return model
        if dtype not in self._made:
            names = parameter_plans(self._plan)
            self._made[dtype] = {
                name: _random(name, t, self._draw) for name, t in stored_tensors(model) if name in names
            }
            self._versions[dtype] = _versions(self._made[dtype])
        return fill(model, self._given(self._made[dtype]), gradients)

    def local(self, rank: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return the local weights of one rank, with the same names and dtypes."""
        if (dtype, rank) not in self._local:
            self._local[dtype, rank] = local_weights(self._made[dtype], self._plan, rank)
        return self._given(self._local[dtype, rank])

    def _given(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {n: w.clone() for n, w in weights.items()} if self.own_copies else weights


def _versions(weights: Mapping[str, Tensor]) -> list[int]:
    return [weight._version for weight in weights.values()]


def _random(name: str, tensor: Tensor, draw: Draw) -> Tensor:
    """Draw weights in a range that keeps activations in range; norms and biases are random as well."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 31 + len(name) + draw.seed * 1_000_003)
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dim() < 2:
        return (torch.rand(tensor.shape, generator=generator).to(tensor.dtype) + 0.5) * draw.vectors
    inputs = tensor.shape[1:] if tensor.dim() > 3 else tensor.shape[-1:]  # convolutions; products
    size = math.sqrt(math.prod(inputs)) / draw.scale
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype).div_(size)


def local_weights(weights: Mapping[str, Tensor], plan: Plan, rank: int) -> dict[str, Tensor]:
    """Return a rank's shard of every weight (global shapes to local ones), without casting."""
    entries = parameter_plans(plan)
    parts = {}
    for name, weight in weights.items():
        entry = replace(entries[name], dtype=dtype_name(weight.dtype))
        parts[name] = local_tensor(entry, weight, plan.mesh, rank)
    return parts


def fill(model: nn.Module, tensors: Mapping[str, Tensor], gradients: bool = False) -> nn.Module:
    """Set parameters (under all tied names) and buffers, and return ``model``."""
    aliases: dict[nn.Parameter | None, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            aliases.setdefault(parameter, []).append((module, attribute))
    for name, tensor in tensors.items():
        owner, attribute = owner_of(model, name)
        if attribute in owner._parameters:
            replaced = owner._parameters[attribute]
            real = nn.Parameter(tensor, gradients and replaced is not None and replaced.requires_grad)
            for module, alias in aliases[replaced]:
                module._parameters[alias] = real
        else:
            owner._buffers[attribute] = tensor
    return model
