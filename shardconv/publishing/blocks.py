"""The rows of a report as blocks for a picture: each stack of layers, and the modules before and after it."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile, zip_longest

from shardconv_runtime.format.names import compress, expand
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.format.stored_layout import tensor_name

from ..reporting.summary import LayerKind, Summary, TensorLine

_LAYER = re.compile(r"(.+?)\.(\d+|\{[^}]*\})(?:\.(.+))?")
"""Stack, numbers and rest of a name or pattern, at the first number."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A weight, and the vectors that belong to it."""

    path: str
    """The path of the module, relative to the layer."""
    tensors: tuple[TensorLine, ...]
    layers: frozenset[str]
    copies: int
    """Number of such modules in each layer."""
    tied_to: str = ""
    """The parameter that it is tied to; empty if it is not tied."""

    @property
    def look(self) -> Hashable:
        """Everything that a picture shows but the layers."""
        looks = ((t.name, t.plan.dims, t.plan.dtype, t.plan.partial, t.plan.packing) for t in self.tensors)
        return self.path, self.copies, self.tied_to, tuple(looks)


@dataclass(frozen=True, slots=True)
class Bar:
    """A collective at an input or output of a module."""

    path: str
    op: str
    slot: str
    token_bytes: int
    """Bytes of the global tensor for each token, in one layer."""
    layers: frozenset[str]

    @property
    def look(self) -> Hashable:
        """Everything that a picture shows but the layers."""
        return self.path, self.op, self.slot, self.token_bytes


@dataclass(eq=False, slots=True)
class Lane:
    """A part of some layers: cells and bars in running order."""

    part: str
    layers: frozenset[str]
    items: list[Cell | Bar] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Block:
    """The layers of a stack, or the modules before, between and after stacks."""

    stack: str
    """Empty outside of stacks."""
    items: list[Cell | Bar] = field(default_factory=list)
    replicated: list[str] = field(default_factory=list)
    """Names and shapes of other replicated tensors."""
    rank_bytes: int = 0

    @property
    def layers(self) -> frozenset[str]:
        """Names of the layers; one empty name outside of stacks."""
        return frozenset().union(*(item.layers for item in self.items))

    def add(self, item: Cell | Bar, at: int | None = None) -> None:
        """Add an item, at the end by default; one that looks like another gives it its layers."""
        for index, other in enumerate(self.items):
            if other.look == item.look:
                self.items[index] = replace(other, layers=other.layers | item.layers)
                return
        self.items.insert(len(self.items) if at is None else at, item)

    def lanes(self) -> list[Lane]:
        """Return the parts of the layers; parts of layers that have different ones are next to each other."""
        lanes: list[Lane] = []
        for item in self.items:
            part = self._part(item.path)
            alike = [lane for lane in lanes if lane.part == part]
            if not part:  # modules without parts share a lane if they are neighbors
                alike = [lane for lane in lanes[-1:] if not lane.part or not item.path]
            lane = next((a for a in alike if a.layers <= item.layers or a.layers >= item.layers), None)
            if lane is None:
                lane = Lane(part, item.layers)
                instead = (n for n, other in enumerate(lanes, 1) if not other.layers & item.layers)
                lanes.insert(next(instead, len(lanes)), lane)
            lane.layers |= item.layers
            lane.items.append(item)
        return lanes

    def _part(self, path: str) -> str:
        """Return the first component of a path, with a number after it, if there are others in it."""
        if not self.stack:
            return ""
        part = re.match(r"[^.]*(\.(\d+|\{[^}]*\})(?=\.))?", path)
        assert part is not None
        has_parts = any(item.path.startswith(f"{part[0]}.") for item in self.items)
        return part[0] if has_parts else ""


def outline(plan: Plan, summary: Summary) -> list[Block]:
    """Return the blocks of a plan in the order in which they run."""
    kinds = _in_running_order(summary.kinds)
    stacks = {m[1] for kind in kinds for m in map(_LAYER.fullmatch, kind.names) if m and m[3]}
    blocks: dict[tuple[str, int], Block] = {}
    tied = {alias.rpartition(".")[0]: name for alias, name in plan.tied}
    parameters = parameter_plans(plan)
    packed: dict[str, list[TensorLine]] = {}
    for name, entry in parameters.items():
        if entry.packing is not None:
            module, _, leaf = name.rpartition(".")
            packed.setdefault(module, []).append(TensorLine(leaf, entry))
    results: list[tuple[Block, Bar]] = []
    for kind in kinds:
        for pattern in kind.names:
            stack, layers, path = _split(pattern, stacks)
            num_stacks = len({name for name, _ in blocks if name})
            block = blocks.setdefault((stack, 0 if stack else num_stacks), Block(stack))
            count = len(expand(pattern))
            block.rank_bytes += kind.rank_bytes * count // kind.count
            tensors, source = _with_packed(kind.tensors, expand(pattern)[0], packed), ""
            if not tensors and tied.get(pattern) in parameters:
                source = tied[pattern]
                tensors = (TensorLine("weight", parameters[source]),)
            bars = [Bar(path, *collective, layers) for collective in kind.collectives]
            for bar in bars:
                if bar.slot.startswith("input"):
                    block.add(bar)
            for cell in _cells(path, tensors, layers, count // len(layers), source):
                block.add(cell)
            results += [(block, bar) for bar in bars if not bar.slot.startswith("input")]
    for block, bar in results:  # the result of a module comes after everything in it
        inside = [n for n, item in enumerate(block.items, 1) if _is_in(item.path, bar.path)]
        block.add(bar, max(inside, default=len(block.items)))
    drawn = [block for block in blocks.values() if block.items]
    _add_replicated(drawn, summary, stacks)
    return drawn


def _with_packed(
    tensors: tuple[TensorLine, ...], module: str, packed: Mapping[str, list[TensorLine]]
) -> tuple[TensorLine, ...]:
    """Replace the stored tensors of packed parameters of a module by these parameters."""
    lines = packed.get(module, [])
    packings = [(f"{module}.{line.name}", line.plan.packing) for line in lines]
    stored = {tensor_name(name, t.name) for name, packing in packings if packing for t in packing.tensors}
    return (*lines, *(line for line in tensors if f"{module}.{line.name}" not in stored))


def _in_running_order(kinds: Sequence[LayerKind]) -> list[LayerKind]:
    """Put modules without an entry in the plan, which are listed last, before the most alike name."""
    planned = [kind for kind in kinds if kind.category]
    before: list[list[LayerKind]] = [[] for _ in range(max(len(planned), 1))]
    for kind in (kind for kind in kinds if not kind.category):
        alike = [_num_common(kind.names[0], other.names[0]) for other in planned]
        before[alike.index(max(alike)) if alike else 0].append(kind)
    return [kind for pair in zip_longest(before, planned) for kind in (*pair[0], *filter(None, pair[1:]))]


def _num_common(name: str, other: str) -> int:
    """Return the number of first components that two names have in common, apart from numbers."""
    parts = [re.sub(r"\.(\d+|\{[^}]*\})(?=\.|$)", ".#", each).split(".") for each in (name, other)]
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*parts, strict=False)))


def _split(pattern: str, stacks: set[str]) -> tuple[str, frozenset[str], str]:
    """Return the stack, the names of the layers, and the path in a layer."""
    match = _LAYER.fullmatch(pattern)
    if match is None or match[1] not in stacks:
        return "", frozenset({""}), pattern
    return match[1], frozenset(expand(f"{match[1]}.{match[2]}")), match[3] or ""


def _cells(
    path: str, tensors: Sequence[TensorLine], layers: frozenset[str], copies: int, tied_to: str
) -> Iterator[Cell]:
    """Yield a cell for each matrix; the vectors belong to the first one."""
    vectors = [line for line in tensors if len(line.plan.dims) < 2]
    matrices = [line for line in tensors if len(line.plan.dims) >= 2]
    for shown in ((*matrices[:1], *vectors), *((matrix,) for matrix in matrices[1:])):
        if shown:
            yield Cell(path, shown, layers, copies, tied_to)


def _is_in(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def _add_replicated(blocks: Sequence[Block], summary: Summary, stacks: set[str]) -> None:
    """Name the replicated tensors that are not drawn."""
    outside = [block for block in blocks if not block.stack]
    layers: dict[tuple[Block, str], frozenset[str]] = {}
    for group in summary.replicated:
        for patterns, shape, num_bytes in group.tensors:
            counts = {pattern: len(expand(pattern)) for pattern in patterns.split(", ")}
            for pattern, count in counts.items():
                module, _, leaf = pattern.rpartition(".")
                stack, own_layers, path = _split(module, stacks)
                near = [b for b in outside if any(_is_near(path, item.path) for item in b.items)]
                places = [b for b in blocks if b.stack == stack] if stack else near or outside[-1:]
                if places and not any(_is_drawn(item, path, leaf) for item in places[0].items):
                    text = f"{path}{'' if leaf == 'weight' else f' {leaf}'} [{', '.join(map(str, shape))}]"
                    layers[places[0], text] = layers.get((places[0], text), frozenset()) | own_layers
                    places[0].rank_bytes += num_bytes * count // sum(counts.values())
    for (block, text), own_layers in layers.items():
        is_in_some = own_layers < block.layers
        block.replicated.append(
            f"{text}, in {len(own_layers)} of {len(block.layers)}" if is_in_some else text
        )


def _is_near(path: str, other: str) -> bool:
    """Return whether two modules have the first two components in common."""
    return path.count(".") > 0 and path.split(".")[:2] == other.split(".")[:2]


def _is_drawn(item: Cell | Bar, path: str, leaf: str) -> bool:
    return isinstance(item, Cell) and item.path == path and any(t.name == leaf for t in item.tensors)


def layer_names(layers: frozenset[str]) -> str:
    """Return the names of layers as patterns."""
    return ", ".join(compress(layers))
