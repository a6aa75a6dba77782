"""A model that is run again and again."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class ReusedModel:
    """A model that begins each run as it was made, whatever a run leaves in attributes, hooks and buffers.

    Args:
        model: with numbers. Its buffers are never written to: each run gets copies.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._made = [(module, dict(vars(module)), _contents(module)) for module in model.modules()]

    def fresh(self) -> nn.Module:
        """The model, as it was made, without gradients."""
        copies: dict[int, Tensor] = {}
        for module, attributes, contents in self._made:
            vars(module).clear()
            vars(module).update(attributes)
            for changed, made in contents:  # in place: handles of hooks refer to these
                changed.clear()
                changed.update(made)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
        self._model.zero_grad(set_to_none=True)
        return self._model


def _contents(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The dicts among the attributes of a module, such as those of its hooks, and copies of them."""
    return [(value, dict(value)) for value in vars(module).values() if isinstance(value, dict)]
