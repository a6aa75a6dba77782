"""Guards of a model that is one of several ranks: calls are right on all ranks, or refused."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import cache_utils

from ..comm.call_agreement import PAGED, require_same_inputs
from ..comm.collectives import Communicator
from ..comm.mesh import Launch
from ..errors import RefusedCallError
from ..format.plan import Plan, global_shape, module_plans, parameter_plans
from ..loaded import loaded
from ..parallel.refused_changes import refuse_changes
from ..parallel.user_hooks import hooks_with_messages, watch_hooks
from ..saving.save import save_pretrained
from ..saving.saved_parts import attach_saving_of_parts
from ..saving.stored_model import named_tensors
from ..training.clipping import look_for_infinities_over_ranks, take_norms_over_ranks
from ..training.dcp_refusals import refuse_distributed_checkpoints
from ..training.direct_use import refuse_direct_use
from ..training.fsdp import MODELS
from ..training.optimizer_guards import guard_optimizers
from ..training.shared_draws import compare_draws

# The ranks of a model must get the same inputs: with different ones they would compute nonsense.
#
# A comparison costs a message between the ranks, so only the calls 1, 2, 4, 8 ... are compared. This finds a
# data loader that deals samples out to all processes in the first call, and tokens that each process draws
# itself in the second or soon after. An option compares all calls.

VARIABLE = "SHARDCONV_CHECK_INPUTS"
"""Environment variable that makes every call compare its inputs."""


def compare_inputs(
    model: nn.Module, start: Launch, *, always: bool, unless: Callable[[], bool] | None = None
) -> None:
    """Compare the inputs of a model's calls between its ranks, in place.

    Calls that Dynamo traces compare nothing, except in a model of ``load(compile=True)``.
    """
    always = always or os.environ.get(VARIABLE, "0") not in ("", "0")
    _before_each_call(model, _Comparison(start, always, unless))


def _before_each_call(model: nn.Module, hook: Callable[..., None]) -> None:
    """Run a forward pre-hook for each call, which in a compiled model is not a part of the graph."""
    compiled = model._compiled_call_impl
    if compiled is None:
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        return

    def called(*args: Any, **kwargs: Any) -> Any:
        hook(model, args, kwargs)
        return compiled(*args, **kwargs)

    model._compiled_call_impl = called


class _Comparison:
    """Forward pre-hook of a model."""

    def __init__(self, start: Launch, always: bool, unless: Callable[[], bool] | None) -> None:
        self._start = start
        self._always = always
        self._unless = unless
        self._num_calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this hook: a copy of a model has the same ranks."""
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or PAGED.get() or (self._unless is not None and self._unless()):
            return
        self._num_calls += 1
        if self._always or self._num_calls & (self._num_calls - 1) == 0:
            arguments = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
            arguments["list of hooks on inner modules"] = hooks_with_messages(module)
            with _disable_current_modes():
                require_same_inputs(self._start, arguments)


def guard(
    model: nn.Module,
    start: Launch,
    stage: Launch,
    comm: Communicator,
    plan: Plan,
    *,
    training: bool,
    check_inputs: bool,
) -> None:
    """Guard a model, in place.

    Args:
        plan: the form of the plan that the model runs.
    """
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[assignment]
    if start.world_size == 1:
        return
    assert start.group is not None, "several ranks have one"
    if hasattr(model, "num_parameters"):
        model.num_parameters = MethodType(_num_parameters, model)  # type: ignore[assignment]
    source = loaded(model)
    names = module_plans(source.plan).keys()
    ranks = dist.get_process_group_ranks(start.group)
    refuse_changes(model, names, ranks, (start.rank, start.world_size))
    attach_saving_of_parts(model)
    scheduled = None if source.stage is None else source.stage.link.is_scheduled
    compare_inputs(model, start, always=check_inputs, unless=scheduled)
    _before_each_call(model, LocalCaches(has_all_heads=source.plan.tp == 1))
    if training:
        # The hook also registers copies of the model: torch's clipping must know whose gradients are parts.
        def known(model: nn.Module, args: object) -> None:
            if not torch.compiler.is_compiling():
                MODELS.add(model)

        MODELS.add(model)
        model.register_forward_pre_hook(known)
        take_norms_over_ranks()
        look_for_infinities_over_ranks()
        guard_optimizers()
        refuse_distributed_checkpoints()
        if stage.world_size > 1:
            is_known = source.plan.training is not None and source.plan.training.draws_on_host
            compare_draws(model, stage, draws_on_host=is_known)
        if source.stage is None:
            refuse_direct_use(model, source.plan, comm)
    watch_hooks(model, plan, comm, training=training)


def _num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Count the parameters of the full model, with the arguments of transformers' method."""
    if loaded(model).plan.stages is not None:
        if only_trainable or exclude_embeddings:
            raise RefusedCallError(
                "num_parameters of a model with stages counts all parameters; call it without options"
            )
        return sum(math.prod(global_shape(e)) for e in parameter_plans(loaded(model).plan).values())
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    entries = parameter_plans(loaded(model).plan)
    shapes = {name: global_shape(entry) for name, entry in entries.items()}
    stays = loaded(model).packed
    packed = [shapes.pop(name) for name, entry in entries.items() if stays and entry.packing is not None]
    return sum(map(math.prod, () if only_trainable else packed)) + sum(
        math.prod(shapes[name])
        for name, parameter in named_tensors(model).items()
        if name in shapes
        and isinstance(parameter, nn.Parameter)
        and (parameter.requires_grad or not only_trainable)
        and (parameter not in tables or not exclude_embeddings)
    )


_QUANTIZED = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)
"""The layers of quantized caches; since transformers 5.23 they have another base."""


class LocalCaches:
    """Forward pre-hook of a model that looks at the caches among the arguments.

    A cache that was allocated from the config, as in transformers' documentation and in its prefill in
    chunks, has the heads of the full model. While it is empty, it is allocated again when the rank fills it.
    A cache that another model has filled is refused.
    """

    def __init__(self, *, has_all_heads: bool) -> None:
        self._has_all_heads = has_all_heads
        self._seen: WeakSet[Any] = WeakSet()
        """Caches are looked at once: to ask how long one is may wait for the device."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalCaches:
        """Return a hook that has seen nothing."""
        return LocalCaches(has_all_heads=self._has_all_heads)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        for argument in (*args, *kwargs.values()):
            for cache in _parts(argument):
                if cache not in self._seen:
                    self._seen.add(cache)
                    for layer in cache.layers:
                        if isinstance(layer, _QUANTIZED) and not self._has_all_heads:
                            layer.update = MethodType(_first_quantized, layer)
                        keys = getattr(layer, "keys", None)
                        has_keys = isinstance(keys, Tensor) and keys.dim() == 4
                        if not has_keys or not getattr(layer, "is_initialized", False):
                            continue
                        if int(layer.get_seq_length()):
                            layer.update = MethodType(_first_update, layer)
                        else:  # empty, so its memory can be allocated again
                            layer.keys = layer.values = None
                            layer.is_initialized = False


def _first_quantized(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return ``update`` of a quantized layer with keys ``[B, local heads, S, head dim]``."""
    vars(self).pop("update", None)
    if not self.get_seq_length():
        require_scales_within_heads(self, key_states.shape[-1])
    return self.update(key_states, value_states, *args, **kwargs)


def require_scales_within_heads(layer: Any, width: int) -> None:
    """Check that an empty layer of a cache quantizes each head as it would if the others were not there."""
    # Two heads ``[1, 2, S, head dim]`` of unlike sizes, in a prompt of 3 tokens and 2 more.
    sizes = torch.tensor([1.0, 7.3])[:, None, None]
    states = torch.linspace(-1, 1, 10 * width).reshape(1, 2, 5, width) * sizes

    def kept(given: Tensor) -> Tensor:
        layer_copy = copy.deepcopy(layer)
        for tokens in torch.split(given, [3, 2], 2):
            keys, values = layer_copy.update(tokens, tokens)
        return torch.stack((keys, values))

    try:
        both = kept(states)
    except Exception:  # it does not work on one process either, and will say so
        return
    try:
        apart = torch.cat([kept(states[:, [0]]), kept(states[:, [1]])], 2)
    except Exception:
        apart = None
    if apart is None or not torch.equal(both, apart):
        raise RefusedCallError(
            f"the quantized cache ({type(layer).__name__}) quantizes several heads of keys and values "
            "together, and each rank has some of them: its scales would be others than those of the full "
            "model; use a cache that is not quantized, or a backend with groups within a head (quanto or hqq "
            f"with a q_group_size that divides {width})"
        )


def _parts(given: Any) -> Iterator[Any]:
    """Yield the caches in an argument; the cache of an encoder and a decoder consists of two."""
    if isinstance(getattr(given, "layers", None), list) and hasattr(given, "get_seq_length"):
        yield given
    elif hasattr(given, "get_seq_length"):
        for part in vars(given).values():
            yield from _parts(part)


def _first_update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return ``update`` of a layer with keys ``[B, local heads, S, head dim]``."""
    vars(self).pop("update", None)
    if self.keys.shape[1] != key_states.shape[1]:
        raise RefusedCallError(
            f"past_key_values has {self.keys.shape[1]} heads of keys and values in a layer, and this rank "
            f"has {key_states.shape[1]} of them: another model filled the cache, and each rank needs only "
            "its own heads; give the model the tokens, or a cache that it filled itself"
        )
    return self.update(key_states, value_states, *args, **kwargs)
