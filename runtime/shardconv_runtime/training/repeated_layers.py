"""The layers of a model, which data parallelism and recomputation wrap one by one."""

from __future__ import annotations

from torch import nn


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The children of the outermost lists of modules, each once, in the order of the model.

    Children that are containers without a ``forward`` are replaced by their own children.
    """
    found: dict[nn.Module, None] = {}
    _collect(model, found)
    return list(found)


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
