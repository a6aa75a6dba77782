"""Local values for attributes of modules."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..errors import PlanError
from ..format.plan import AttributeOverride


def apply_overrides(module: nn.Module, overrides: tuple[AttributeOverride, ...], rank: int) -> None:
    """Set int attributes of a module to their local values.

    A configuration on the way (``config.num_heads``) is copied first, once for this module.
    """
    copied: set[int] = set()
    for override in overrides:
        value = override.local[0] if len(override.local) == 1 else override.local[rank]
        _set_int(module, override.attribute.split("."), override, value, copied)


def raise_flags(module: nn.Module, flags: tuple[str, ...]) -> None:
    """Set bool attributes of a module."""
    for flag in flags:
        if flag == "training" or getattr(module, flag, None) is not False:
            raise PlanError(f"cannot set {flag}: it is {getattr(module, flag, 'missing')}, and was False")
        setattr(module, flag, True)


def _set_int(owner: Any, path: list[str], override: AttributeOverride, value: int, copied: set[int]) -> Any:
    """Set the int at ``path`` below ``owner``; return the new ``owner``, which may be a copy."""
    name = path[0]
    if isinstance(owner, (list, tuple)) and name.isdigit() and int(name) < len(owner):
        current = owner[int(name)]
    elif not isinstance(owner, (list, tuple)) and hasattr(owner, name):
        current = getattr(owner, name)
    else:
        raise PlanError(f"cannot override {override.attribute}: a {type(owner).__name__} has no {name!r}")
    if len(path) > 1:
        new = _set_int(_own_copy(current, override, copied), path[1:], override, value, copied)
    elif type(current) is not int:
        raise PlanError(f"cannot override {override.attribute}: it is a {type(current).__name__}, not an int")
    elif current != override.value:
        raise PlanError(
            f"cannot override {override.attribute}: it is {current}, and was {override.value} when planned"
        )
    else:
        new = value
    if isinstance(owner, (list, tuple)):
        index = int(name)
        return type(owner)([*owner[:index], new, *owner[index + 1 :]])
    class_attribute = getattr(type(owner), name, None)
    if not (isinstance(class_attribute, property) and class_attribute.fset is None):
        setattr(owner, name, new)
    elif id(owner) in copied:
        # The class of the config computes the value, so the copy gets its own class with the local one.
        kind = type(owner)
        object.__setattr__(owner, "__class__", type(kind.__name__, (kind,), {name: new}))
    else:
        raise PlanError(f"cannot override {override.attribute}: {type(owner).__name__} computes it")
    return owner


def _own_copy(value: Any, override: AttributeOverride, copied: set[int]) -> Any:
    if isinstance(value, (list, tuple)) or id(value) in copied:
        return value
    if not isinstance(value, PreTrainedConfig):
        raise PlanError(f"cannot override {override.attribute}: it leads through a {type(value).__name__}")
    config = copy.copy(value)
    # The copied config has the implementations of the original one, also when these change later.
    object.__setattr__(config, "_followed", _Followed(value))
    kind: Any = type(config)
    object.__setattr__(config, "__class__", _following(kind))
    copied.add(id(config))
    return config


IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
"""Attributes that a user may change in the config of a loaded model."""


class _Followed:
    """The config of which another one is a copy."""

    def __init__(self, config: Any) -> None:
        self.config = config


@cache
def _following(kind: type) -> type:
    """Return the class of such copies, which is made once: transformers' classes of configs take
    milliseconds.

    Code may make new configs of it, for their defaults: these follow no other one.
    """
    names = [f"{name}_internal" for name in IMPLEMENTATIONS if hasattr(kind, name)]
    members: dict[str, Any] = {name: _of_original(name) for name in names}
    return type(kind.__name__, (kind,), {**members, "to_dict": _to_dict})


def _of_original(name: str) -> property:
    """Return an attribute that is read from the original, and set there."""

    def get(own: Any) -> Any:
        if "_followed" in vars(own):
            return getattr(own._followed.config, name)
        if name not in vars(own):
            raise AttributeError(name)
        return vars(own)[name]

    def set_(own: Any, value: Any) -> None:
        if "_followed" in vars(own):
            setattr(own._followed.config, name, value)
        else:
            vars(own)[name] = value

    return property(get, set_)


def _to_dict(own: Any) -> dict[str, Any]:
    """Return the dict of the copy, without the config that it follows."""
    kind: Any = next(base for base in type(own).__mro__[1:] if vars(base).get("to_dict") is not _to_dict)
    entries: dict[str, Any] = kind.to_dict(own)
    entries.pop("_followed", None)
    return entries
