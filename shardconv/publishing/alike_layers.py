"""The layers of a plan, grouped into kinds that are drawn once.

Plans list modules in the order in which they run; an *order* is an index in that list, or lies between two.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from shardconv_runtime.format.plan import ModulePlan, ParameterPlan, Plan, by_name, module_plans

from ..reporting.summary import collective_steps

NO_LAYER = ("", -1)
"""The key of parameters and modules that are in no layer."""

MOSTLY_ALIKE = 3
"""A layer that lacks at most this many parts of another layer is drawn as that layer."""

MAX_COMPARED = 128
"""Kinds of layers, the largest, with which others are compared."""


@dataclass(slots=True)
class LayerParts:
    """The parts of one layer: names relative to the layer, in the order of the plan."""

    tensors: dict[str, ParameterPlan]
    modules: dict[str, tuple[float, ModulePlan]]
    """With the order in which they run."""
    tied: dict[str, str]
    """Tensor -> FQN of the parameter that it is tied to."""
    after: dict[str, str] = field(default_factory=dict)
    """Outside of layers: tensor -> the stack of layers that the plan lists before it."""


@dataclass(slots=True)
class AlikeLayers:
    """Layers of one stack that are drawn as one block."""

    stack: str
    """FQN of the layers without their number."""
    numbers: list[int]
    layer: LayerParts
    """The layer that has most parts."""
    frequency: Mapping[str, int] | None = None
    """Tensor or module -> number of layers that have it; None: all have everything."""


def layers_of(plan: Plan) -> dict[tuple[str, int], LayerParts]:
    """(stack, number) -> the parts of that layer; ``NO_LAYER`` -> the parts outside of layers."""
    layers: dict[tuple[str, int], LayerParts] = {}

    def at(name: str, depth: int) -> tuple[LayerParts, str]:
        stack, number, rest = _split(name, depth)
        return layers.setdefault((stack, number), LayerParts({}, {}, {})), rest

    parameters = by_name("parameters", plan.parameters)
    stack = ""
    for name, entry in parameters.items():
        layer, rest = at(name, 2)
        layer.tensors[rest] = entry
        if rest == name:
            layer.after[name] = stack
        else:
            stack = _split(name, 2)[0]
    orders = {module: index for index, module in enumerate(plan.modules)}
    modules = module_plans(plan)
    for alias, name in plan.tied:
        if alias.rpartition(".")[0] in modules and name in parameters:
            layer, rest = at(alias, 2)
            layer.tensors[rest] = parameters[name]
            layer.tied[rest] = name
            layer.after.setdefault(rest, "")
    for name, module in modules.items():
        stack, number, _ = _split(name, 1)
        layer, rest = at(name, 1) if (stack, number) in layers else at(name, 10**6)
        layer.modules[rest] = orders[module], module
    return layers


def _split(name: str, depth: int) -> tuple[str, int, str]:
    """(stack, number, rest) at the first number with at least ``depth`` - 1 components after it."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal() and index and len(parts) - index > depth:
            return ".".join(parts[:index]), int(part), ".".join(parts[index + 1 :])
        if part.isdecimal() and index and depth == 1 and index == len(parts) - 1:
            return ".".join(parts[:index]), int(part), ""
    return "", -1, name


def kinds_of(layers: Mapping[tuple[str, int], LayerParts]) -> list[AlikeLayers]:
    """Group the layers of each stack that look alike, or lack only a few parts of others."""
    # Give modules that only later kinds of a stack have the order of those that they lack.
    # A plan lists a module of all layers where the first layer runs it, so a module that only later layers
    # have is listed after all modules of the first layer.
    kinds = list(_kinds(layers))
    first: dict[str, AlikeLayers] = {}
    for kind in sorted(kinds, key=lambda kind: min(kind.numbers)):
        earlier = first.setdefault(kind.stack, kind).layer.modules
        known = {order for order, _ in earlier.values()}
        other = min((o for name, (o, _) in earlier.items() if name not in kind.layer.modules), default=None)
        own = sorted({order for order, _ in kind.layer.modules.values()} - known)
        if other is not None and own:
            moved = {order: other + index / (len(own) + 1) for index, order in enumerate(own)}
            modules = kind.layer.modules.items()
            kind.layer.modules = {name: (moved.get(order, order), m) for name, (order, m) in modules}
    return kinds


def _kinds(layers: Mapping[tuple[str, int], LayerParts]) -> Iterator[AlikeLayers]:
    alike: dict[tuple[str, frozenset[Hashable]], list[int]] = {}
    for (stack, number), layer in layers.items():
        alike.setdefault((stack, frozenset(_looks(layer))), []).append(number)
    largest = sorted(alike, key=lambda key: (-len(key[1]), min(alike[key])))
    taken: dict[tuple[str, frozenset[Hashable]], list[tuple[str, frozenset[Hashable]]]] = {}
    for key in largest:
        known = islice(taken, MAX_COMPARED)
        over = (k for k in known if k[0] == key[0] and key[1] < k[1] and len(k[1] - key[1]) <= MOSTLY_ALIKE)
        taken.setdefault(next(over, key), []).append(key)
    for (stack, _), members in taken.items():
        numbers = sorted(number for member in members for number in alike[member])
        fullest = layers[stack, min(alike[members[0]])]
        having = [(len(alike[m]), layers[stack, alike[m][0]]) for m in members]
        yield AlikeLayers(stack, numbers, fullest, _frequency(fullest, having) if len(members) > 1 else None)


def _frequency(fullest: LayerParts, having: list[tuple[int, LayerParts]]) -> dict[str, int]:
    """Part -> number of layers that have it, of (number of layers, their parts)."""
    return {
        name: sum(count for count, layer in having if name in layer.tensors or name in layer.modules)
        for name in (*fullest.tensors, *fullest.modules)
    }


def _looks(layer: LayerParts) -> Iterator[Hashable]:
    for name, entry in layer.tensors.items():
        yield name, layout_of(entry)
    for name, (_, module) in layer.modules.items():
        if steps := tuple(collective_steps(module, "uint8")):
            yield name, steps


def layout_of(entry: ParameterPlan) -> Hashable:
    """Everything about a tensor that a picture shows."""
    return entry.dims, entry.dtype, entry.partial, entry.packing
