"""Placeholders replace modules of a model, and return results from elsewhere.

For a unit of another pipeline stage these were sent by the stage, or are zeros. In the proof of a plan, a
layer that another one represents returns its arguments, or tensors of the same form as the other one.
A placeholder has no parameters. Otherwise it looks to the code around it like the module that it replaces.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

_M = TypeVar("_M", bound=nn.Module)


Results = Callable[..., Any]
"""A function from the arguments of a module to the results in its place."""


def swap_for_placeholder(model: nn.Module, fqn: str, results: Results) -> Placeholder:
    """Put a placeholder in the place of a module of a model, in place.

    Returns:
        The placeholder.
    """
    parent, _, name = fqn.rpartition(".")
    made = placeholder_for(model.get_submodule(fqn), results)
    model.get_submodule(parent)._modules[name] = made
    return made


def placeholder_for(
    module: nn.Module, results: Results, note: Callable[[Any], None] | None = None
) -> Placeholder:
    """Return a module that can take the place of another one.

    Args:
        note: is called with each attribute of the module that is read.
    """
    made: Placeholder = object.__new__(_class_for(type(module)))  # type: ignore[arg-type]
    nn.Module.__init__(made)
    made.__dict__.update(_replaced=module, _has_own=False, _results=results, _note=note)
    made.train(module.training)
    return made


class Placeholder(nn.Module):
    """Takes the place of a module: has its class, its signature and its attributes, none of its parameters.

    Code that changes the module, as some models do when they are first called, changes a copy.
    """

    _results: Results
    _replaced: nn.Module
    _has_own: bool
    _note: Callable[[Any], None] | None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_replaced" not in self.__dict__:  # its class was called, which derives from the module's
                raise
            if not self._has_own and hasattr(self._replaced, name):  # a failed search copies nothing
                self.__dict__.update(_replaced=_with_own_attributes(self._replaced), _has_own=True)
            value = getattr(self._replaced, name)
            if self._note is not None:
                self._note(value)
            return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        """Return a placeholder of the same module, which is not copied, with the same results."""
        other = _with_own_dicts(self)
        other.__dict__["_has_own"] = False
        return other


@functools.cache
def _class_for(kind: type[nn.Module]) -> type[Placeholder]:
    """Return a class of placeholders derived from a module's class, since models look for classes."""
    if issubclass(kind, Placeholder):
        return kind

    @functools.wraps(kind.forward)  # code asks for the names of its arguments
    def forward(self: Placeholder, *args: Any, **kwargs: Any) -> Any:
        return self._results(*args, **kwargs)

    return type(kind.__name__, (Placeholder, kind), {"forward": forward})


def _with_own_attributes(module: _M) -> _M:
    """Return a copy of a module and those in it, which have the same values and tensors as attributes."""
    made = _with_own_dicts(module)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _with_own_attributes(child)
    return made


def _with_own_dicts(module: _M) -> _M:
    """Return a copy of a module with the same values, of which hooks and tensors can be replaced."""
    made: _M = object.__new__(type(module))
    # A module has ten dicts of hooks, and a deep model has a hundred placeholders, which are copied for each
    # rank. ``copy.copy`` of an ordered dict takes 11 us, its method 0.2.
    made.__dict__ = {
        name: _copied(value) if isinstance(value, dict) else value for name, value in module.__dict__.items()
    }
    return made


def _copied(value: dict[Any, Any]) -> dict[Any, Any]:
    return value.copy() if type(value) in (dict, OrderedDict) else copy.copy(value)
