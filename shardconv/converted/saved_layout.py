"""What a converted directory holds, as the tensors of an ordinary checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardconv_runtime.checkpoint.model_spec import ModelSpec
from shardconv_runtime.checkpoint.quantized import PackedWeight
from shardconv_runtime.errors import SourceError
from shardconv_runtime.format.packed_layout import tensor_name
from shardconv_runtime.format.plan import global_shape, parameter_plans
from shardconv_runtime.tensors.gathered import gathered, is_interleaved
from shardconv_runtime.tensors.lazy_tensor import LazyTensor

from . import derived
from .saved import model_of, require_loadable, saved_tensors
from .saved_packed import positions, with_packed
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
    state = model.state_dict()
    tensors = derived.weights_of(found)
    packed = _packed(found, tensors)
    stored = {tensor_name(name, part) for name, weight in packed.items() for part in weight.tensors}
    weights = {name: tensor for name, tensor in tensors.items() if name not in stored}
    weights |= {name: _stand_in(name, weight, state) for name, weight in packed.items()}
    weights |= {alias: weights[name] for alias, name in found.plan.tied}
    _require_known(found, weights, state)
    require_loadable(spec, model, weights, dict(found.plan.tied))
    saved = with_packed(saved_tensors(model, weights), packed)
    return {name: _in_bands(name, tensor) for name, tensor in saved.items()}, model.num_parameters()


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


def _packed(found: Converted, weights: Mapping[str, LazyTensor]) -> dict[str, PackedWeight]:
    """The packed parameters."""
    return {
        name: PackedWeight(
            global_shape(entry),
            entry.packing,
            {tensor.name: weights[tensor_name(name, tensor.name)] for tensor in entry.packing.tensors},
        )
        for name, entry in parameter_plans(found.plan).items()
        if entry.packing is not None
    }


def _stand_in(name: str, weight: PackedWeight, state: Mapping[str, Any]) -> LazyTensor:
    dtype = str(state[name].dtype).removeprefix("torch.") if name in state else "float32"
    return positions(name, dtype, weight.shape)
