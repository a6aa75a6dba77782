"""Activation checkpointing: layers that recompute their activations in the backward pass.

    checkpoint_activations(model)                  # keeps only the inputs of layers
    checkpoint_activations(model, save="matmul")   # also keeps the results of matrix products

A layer's ``forward`` is replaced on its instance, so that names in the model do not change, and hooks of
``fully_shard`` and collectives at the layer's boundary are not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..errors import OptionError, RefusedCallError
from ..loaded import loaded, unwrapped
from ..parallel.boundary import forward_signature, given_cache
from .random_streams import resumable


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the children of the outermost lists of modules, each once, in the order of the model.

    Children that are containers without a ``forward`` are replaced by their own children.
    """
    layers: dict[nn.Module, None] = {}
    _collect(model, layers)
    return list(layers)


def _collect(module: nn.Module, found: dict[nn.Module, None]) -> None:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            _collect(child, found)
            continue
        for layer in child:
            if type(layer).forward is nn.Module.forward:
                _collect(nn.ModuleList([layer]) if isinstance(layer, nn.ModuleList) else layer, found)
            else:
                found[layer] = None


_ATEN = torch.ops.aten

MATRIX_PRODUCTS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.linear.default,
        _ATEN._scaled_mm.default,
        _ATEN._grouped_mm.default,
    }
)
"""Operators whose results ``save="matmul"`` keeps."""

_MARK = "_shardconv_checkpointed"


def checkpoint_activations(
    model: nn.Module, *, save: str | Collection[torch._ops.OpOverload] | None = None
) -> nn.Module:
    """Recompute the activations of each layer in the backward pass; gradients stay bitwise equal.

    This applies only in training mode. It disables caches of keys and values, because recomputing would
    fill them twice. Recomputed dropout uses the same random numbers.

    Args:
        model: returned by ``load(..., training=True)``, before or after ``data_parallel``.
        save: operators whose results are kept (for example ``torch.ops.aten.mm.default``), or "matmul" for
            matrix products; none by default.

    Returns:
        ``model``. The names of its parameters do not change.

    Raises:
        PlanError: ``load`` did not return the model, it already recomputes activations, it has no list of
            layers, or ``save`` is invalid.

    Example:
        >>> model = shardconv_runtime.load("out/", mesh=mesh, training=True)
        >>> shardconv_runtime.checkpoint_activations(model, save="matmul")
    """
    loaded(model)
    inner: Any = unwrapped(model)
    if getattr(inner, _MARK, False) or getattr(inner, "is_gradient_checkpointing", False):
        raise RefusedCallError("the model recomputes its activations already; enable that only once")
    saved_operators: frozenset[Any] = frozenset()
    if save == "matmul":
        saved_operators = MATRIX_PRODUCTS
    elif save is not None:
        if isinstance(save, str) or not all(isinstance(op, torch._ops.OpOverload) for op in save):
            raise OptionError(
                f'save={save!r} should be "matmul" or operators like torch.ops.aten.mm.default '
                "(with overload)"
            )
        saved_operators = frozenset(save)
    run = _checkpoint(saved_operators)
    layers = repeated_layers(inner)
    if replaced := [layer for layer in layers if "forward" in vars(layer)]:
        raise RefusedCallError(
            f"the forward method of a {type(replaced[0]).__name__} was replaced on the instance, and would "
            "be lost; call checkpoint_activations first"
        )
    if not layers:
        raise RefusedCallError(
            f"a {type(inner).__name__} lacks a list of layers to recompute one by one; use "
            "torch.utils.checkpoint on modules of your choice"
        )
    for layer in layers:
        _wrap(layer, run)
    inner.register_forward_pre_hook(_WithoutCache(inner), with_kwargs=True)
    setattr(inner, _MARK, True)
    return model


def _checkpoint(kept: frozenset[Any]) -> Callable[..., Any]:
    if not kept:
        return partial(checkpoint, use_reentrant=False)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _wrap(layer: nn.Module, run: Callable[..., Any]) -> None:
    """Replace ``forward`` by a bound method, so that a deep copy of the layer runs with its own tensors."""
    forward: Callable[..., Any] = type(layer).forward

    @wraps(forward)
    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return forward(self, *args, **kwargs)
        return run(resumable(forward), self, *args, **kwargs)

    layer.__dict__["forward"] = MethodType(recomputed, layer)


FUNCTION = "_gradient_checkpointing_func"
"""Attribute of modules in which transformers keeps the function that recomputes a layer."""


def resume_in_layers(model: nn.Module) -> None:
    """Have layers that transformers' own methods recompute draw the same numbers again, in place."""
    for part in model.modules():
        for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
            if hasattr(part, name):
                setattr(part, name, MethodType(partial(_enable, name), part))


def _enable(name: str, model: nn.Module, *args: Any, **options: Any) -> None:
    """Call the method of transformers of this name."""
    getattr(type(model), name)(model, *args, **options)
    for module in model.modules():
        run = vars(module).get(FUNCTION)
        if run is not None and not isinstance(run, _Resuming):
            vars(module)[FUNCTION] = _Resuming(run)


@dataclass(frozen=True)
class _Resuming:
    """A function that recomputes a layer, in the random stream in which it ran first."""

    run: Callable[..., Any]

    def __call__(self, layer: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.run(resumable(layer), *args, **options)


class _WithoutCache:
    """Forward pre-hook of the model: disables caches, since layers are computed twice."""

    def __init__(self, model: nn.Module) -> None:
        self._names = list(forward_signature(model).parameters)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not (module.training and torch.is_grad_enabled()):
            return None
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if (name := given_cache(arguments)) is not None:
            raise RefusedCallError(
                f"{name} was passed to a model that recomputes its activations: the cache would be "
                "filled twice; pass full sequences"
            )
        return (), without_cache(module, self._names, arguments)


# Calls that would make a cache of keys and values, and must not.
#
# transformers treats positions that start again within a row as several packed samples, and masks these
# from each other, but only in calls without a mask and without a cache. So a call that would have had a cache
# gets a mask of ones, with which it attends to the same tokens.

MAKES_CACHE = "use_cache"
_MASK = "attention_mask"


def without_cache(model: nn.Module, names: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that makes no cache, and computes the same."""
    if MAKES_CACHE not in names:
        return dict(given)
    changed = {**given, MAKES_CACHE: False}
    positions, tokens = given.get("position_ids"), given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    is_plain = isinstance(positions, Tensor) and given.get(_MASK) is None and _MASK in names
    # Kernels of flash attention find packed samples by themselves, with a cache or without.
    is_flash = "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", None))
    if is_plain and isinstance(tokens, Tensor) and not is_flash and _makes_cache(model, given):
        changed[_MASK] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return changed


def _makes_cache(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether the call or the config asks for a cache, and layers do not recompute."""
    config: Any = getattr(model, "config", None)
    value = given.get(MAKES_CACHE)
    if value is None:
        value = getattr(config, MAKES_CACHE, None)
    if value is None and hasattr(config, "get_text_config"):
        value = getattr(config.get_text_config(decoder=True), MAKES_CACHE, None)
    recomputes = any(m.training and getattr(m, "gradient_checkpointing", False) for m in model.modules())
    return bool(value) and not recomputes
