"""torch's distributed checkpoints (DCP) are refused for parameters of which each rank has a part.

They take a tensor that is no DTensor for a full one, the same on all processes: one rank's part would be
written for all, and a full state would be one rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..errors import RefusedCallError
from ..format.dims import axes_of
from ..format.plan import parameter_plans
from ..loaded import loaded
from .fsdp import MODELS
from .optimizer_guards import TRIED

_REMEDY = (
    "use shardconv_runtime.save(model, DIR) and save_optimizer(model, optimizer, DIR), which write global "
    "tensors for any number of ranks, or model.save_pretrained(DIR)"
)


@cache
def refuse_distributed_checkpoints() -> None:
    """Refuse the parameters, and the optimizer states, of ``MODELS`` in torch's functions, from now on."""
    # The import takes a tenth of a second, which a model that only generates need not pay for.
    from torch.distributed.checkpoint import state_dict, state_dict_loader, state_dict_saver

    # All public functions of these modules call these private ones first.
    state_dict._verify_options = _before(state_dict._verify_options, _check_models)
    state_dict_saver._stateful_to_state_dict = _before(
        state_dict_saver._stateful_to_state_dict, _check_tensors
    )
    state_dict_loader._load_state_dict = _before(state_dict_loader._load_state_dict, _check_tensors)


def _before(function: Callable[..., Any], check: Callable[[Any, Any], None]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("state_dict", kwargs.get("model"))
        check(first, args[1] if len(args) > 1 else None)
        return function(*args, **kwargs)

    return checked


def _check_models(model: nn.Module, optimizers: Any) -> None:
    for part in model.modules():
        if part in MODELS and next(_sharded(part), None) is not None:
            raise RefusedCallError(
                "functions of torch.distributed.checkpoint.state_dict take this rank's part of a parameter "
                f"for the full one; {_REMEDY}"
            )


def _check_tensors(state: Mapping[str, Any], _: Any) -> None:
    sharded = {parameter for model in MODELS for parameter in _sharded(model)}
    states = [optimizer.state.get(parameter, {}) for optimizer in TRIED for parameter in sharded]
    local_tensors = [
        *sharded,
        *(x for each in states for x in each.values() if isinstance(x, Tensor) and x.dim()),
    ]
    parts = set(map(_memory, local_tensors)) - {_NOTHING}
    tensors_to_store: list[Any] = []
    for value in state.values():
        value = value.state_dict() if isinstance(value, (nn.Module, Optimizer)) else value
        tensors_to_store += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if parts & set(map(_memory, tensors_to_store)):
        raise RefusedCallError(
            "torch.distributed.checkpoint was given this rank's part of a parameter, which it takes for the "
            f"full one; {_REMEDY}"
        )


def _sharded(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a loaded model of which each rank has another part."""
    entries = parameter_plans(loaded(model).plan)
    for name, parameter in model.named_parameters():
        entry = entries.get(name)
        if entry is not None and (entry.partial or any(map(axes_of, entry.dims))):
            yield parameter


def _memory(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr() if local.numel() else _NOTHING


_NOTHING = 0
