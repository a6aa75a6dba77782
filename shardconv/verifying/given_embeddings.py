"""Calls with embeddings in place of ids."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.parallel.boundary import forward_signature
from torch import Tensor, nn

from ..inputs.trace_inputs import TraceInputs
from .proof_case import Case, simulate

IN_PLACE_OF = {"inputs_embeds": "input_ids", "decoder_inputs_embeds": "decoder_input_ids"}
"""Argument of transformers' models -> the ids that it replaces."""


def embedding_arguments(model: nn.Module, inputs: TraceInputs) -> tuple[str, ...]:
    """Return the arguments of a model that may replace the ids that it is given."""
    taken = forward_signature(model).parameters
    return tuple(
        name
        for name, ids in IN_PLACE_OF.items()
        if name in taken and ids in inputs.tensors and _width(model, name) is not None
    )


def proven_arguments(case: Case, *, gradients: bool) -> tuple[str, ...]:
    """Return the arguments for embeddings with which the ranks compute the same, tested one at a time.

    Arguments with which the unsharded model fails are not proven.
    """
    return tuple(
        name
        for name in embedding_arguments(case.model, case.inputs)
        if any(_holds(case, inputs, gradients) for inputs in with_embeddings(case, [name]))
    )


def with_embeddings(case: Case, names: Collection[str]) -> Iterator[TraceInputs]:
    """Yield the inputs with random embeddings (for example of a trained prompt) in place of ids.

    The other inputs are kept first. If there are images or sounds, the second inputs keep only integers.
    """
    rng = torch.Generator().manual_seed(0)
    dtype = next((p.dtype for p in case.model.parameters() if p.is_floating_point()), torch.float32)
    tensors = dict(case.inputs.tensors)
    embeds: dict[str, Tensor] = {}
    for name in names:
        width = _width(case.model, name)
        assert width is not None
        shape = (*tensors.pop(IN_PLACE_OF[name]).shape, width)
        embeds[name] = torch.randn(shape, generator=rng, dtype=dtype)
    alone = {n: t for n, t in tensors.items() if not t.is_floating_point()}
    for beside in (tensors,) if len(alone) == len(tensors) else (tensors, alone):
        yield replace(case.inputs, tensors={**beside, **embeds})


def _holds(case: Case, inputs: TraceInputs, gradients: bool) -> bool:
    try:
        return not simulate(case, inputs, gradients=gradients).gradients
    except ShardconvError:
        return False


def _width(model: nn.Module, name: str) -> int | None:
    """Return the width of a model's embeddings of ids; None if the model does not say."""
    try:
        part = model.get_decoder() if name.startswith("decoder") else model  # type: ignore[operator]
        return int(part.get_input_embeddings().weight.shape[-1])  # type: ignore[operator, union-attr]
    except (AttributeError, NotImplementedError):
        return None
