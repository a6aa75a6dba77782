"""Proves a plan for embeddings that are given in place of ids, which were traced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.parallel.boundary import forward_signature
from torch import Tensor, nn

from .simulate import Case, simulate

_IN_PLACE_OF = {"inputs_embeds": "input_ids", "decoder_inputs_embeds": "decoder_input_ids"}
"""Argument of transformers' models -> the ids that it replaces."""


def proven_arguments(case: Case) -> tuple[str, ...]:
    """The arguments for embeddings with which the ranks compute the same as the unsharded model.

    The embeddings are random numbers, as those of a trained prompt are. Where the unsharded model itself does
    not run on them, nothing is proven.

    Args:
        case: proven for ids.
    """
    taken = forward_signature(case.model).parameters
    ids = {name: ids for name, ids in _IN_PLACE_OF.items() if name in taken and ids in case.inputs.tensors}
    return tuple(name for name in ids if any(map(_holds, _with_embeddings(case, name, ids[name]))))


def _with_embeddings(case: Case, name: str, ids: str) -> Iterator[Case]:
    """The case with embeddings in place of ids: beside the other inputs, and beside ids and masks alone."""
    width = _width(case.model, name)
    if width is None:
        return
    rng = torch.Generator().manual_seed(0)
    shape = (*case.inputs.tensors[ids].shape, width)
    embeds = torch.randn(shape, generator=rng, dtype=_dtype(case.model))
    others = {n: t for n, t in case.inputs.tensors.items() if n != ids}
    alone = {n: t for n, t in others.items() if not t.is_floating_point()}
    plan = replace(case.plan, proven_arguments=(name,))
    for beside in (others,) if len(alone) == len(others) else (others, alone):
        tensors: dict[str, Tensor] = {**beside, name: embeds}
        yield replace(case, plan=plan, inputs=replace(case.inputs, tensors=tensors))


def _holds(case: Case) -> bool:
    try:
        outcome = simulate(case, gradients=case.plan.training is not None)
    except ShardconvError:
        return False
    return not outcome.gradients


def _width(model: nn.Module, name: str) -> int | None:
    """The last dim of what the model embeds ids as; None where it does not say."""
    try:
        part = model.get_decoder() if name.startswith("decoder") else model  # type: ignore[operator]
        return int(part.get_input_embeddings().weight.shape[-1])  # type: ignore[operator, union-attr]
    except (AttributeError, NotImplementedError):
        return None


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
