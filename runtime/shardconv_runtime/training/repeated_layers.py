"""The layers of a model: what is wrapped one by one for data parallelism and for recomputation."""

from __future__ import annotations

from torch import nn


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The children of the outermost lists of modules, each once, in the order of the model.

    Children that are containers, which nobody calls, stand for their own.
    """
    found: dict[int, nn.Module] = {}
    _collect(model, found)
    return list(found.values())


def _collect(module: nn.Module, found: dict[int, nn.Module]) -> None:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            _collect(child, found)
            continue
        for layer in child:
            if type(layer).forward is nn.Module.forward:
                _collect(nn.ModuleList([layer]) if isinstance(layer, nn.ModuleList) else layer, found)
            else:
                found.setdefault(id(layer), layer)
