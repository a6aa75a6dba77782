"""What a converted directory holds, as the tensors of an ordinary checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from shardconv_runtime.checkpoint.model_spec import ModelSpec
from shardconv_runtime.checkpoint.scaled import block_sizes
from shardconv_runtime.errors import SourceError
from shardconv_runtime.format.stored_layout import SUFFIX
from shardconv_runtime.tensors.gathered import gathered, is_interleaved
from shardconv_runtime.tensors.lazy_tensor import LazyTensor

from . import derived
from .saved import model_of, require_loadable, saved_tensors
from .saved_blocks import Factors, saved_factors
from .shards import Converted


def checkpoint_tensors(found: Converted, spec: ModelSpec) -> tuple[dict[str, LazyTensor], int]:
    """The tensors that transformers would save, in its order, and the number of parameters of the model.

    Args:
        found: the directory.
        spec: of its model.

    Raises:
        SourceError: a stored tensor would not be saved, or would be loaded as another one.
    """
    model = model_of(spec)
    weights = derived.weights_of(found)
    factors = _factors(found, weights)
    beside = {name + SUFFIX for name in factors}
    values = {name: tensor for name, tensor in weights.items() if name not in beside}
    _require_known(found, values, model.state_dict())
    tied = dict(found.plan.tied)
    require_loadable(spec, model, _plain(values, factors, model.state_dict(), tied), tied)
    tensors = saved_tensors(model, values)
    if factors:
        tensors = _beside(tensors, saved_factors(model, values, factors))
    return {name: _in_bands(name, tensor) for name, tensor in tensors.items()}, model.num_parameters()


def _in_bands(name: str, tensor: LazyTensor) -> LazyTensor:
    return gathered(name, tensor) if is_interleaved(tensor) else tensor


def _require_known(found: Converted, weights: Iterable[str], names: Iterable[str]) -> None:
    """Raises ``SourceError`` if some weights would be left out."""
    extra = sorted(set(weights) - set(names))
    if extra:
        raise SourceError(
            f"{found.directory} holds {extra[0]}, which the model lacks in this environment; "
            "use the version of transformers that it was planned for"
        )


def _factors(found: Converted, weights: Mapping[str, LazyTensor]) -> dict[str, Factors]:
    """Of the parameters that are stored with blocks, under each of their names."""
    blocks = block_sizes(found.plan)
    names = {name: name for name in blocks} | {
        alias: name for alias, name in found.plan.tied if name in blocks
    }
    return {
        alias: Factors(weights[name].shape, blocks[name], weights[name + SUFFIX])
        for alias, name in names.items()
    }


def _plain(
    values: Mapping[str, LazyTensor],
    factors: Iterable[str],
    state: Mapping[str, Any],
    tied: Mapping[str, str],
) -> dict[str, LazyTensor]:
    """The weights of the model without blocks, as far as their dtypes and shapes go."""
    plain = dict(values)
    made: dict[str, LazyTensor] = {}
    for name in factors:
        dtype = str(state[name].dtype).removeprefix("torch.")
        plain[name] = made.setdefault(tied.get(name, name), replace(values[name], dtype=dtype))
    return plain


def _beside(tensors: Mapping[str, LazyTensor], factors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Values, each followed by its factors."""
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor
        if name in factors:
            found[name + SUFFIX] = factors[name]
    return found
