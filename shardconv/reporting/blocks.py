"""The rows of a report as blocks for a picture: each stack of layers, and the modules before and after it."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from shardconv_runtime.format.names import compress, expand
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.format.stored_layout import tensor_name

from .summary import Summary, TensorLine

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
    port: str
    token_bytes: int
    """Bytes of the global tensor for each token, in one layer."""
    layers: frozenset[str]

    @property
    def look(self) -> Hashable:
        """Everything that a picture shows but the layers."""
        return self.path, self.op, self.port, self.token_bytes


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
    replicated: dict[str, frozenset[str]] = field(default_factory=dict)
    """Name and shape of other replicated tensors -> the layers that have them."""
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
    matches = (_LAYER.fullmatch(name) for kind in summary.kinds for name in kind.names)
    outlined = _Outline({match[1] for match in matches if match and match[3]})
    tied = {alias.rpartition(".")[0]: name for alias, name in plan.tied}
    parameters = parameter_plans(plan)
    packed: dict[str, list[TensorLine]] = {}
    for name, entry in parameters.items():
        if entry.packing is not None:
            module, _, leaf = name.rpartition(".")
            packed.setdefault(module, []).append(TensorLine(leaf, entry))
    results: list[tuple[Block, Bar]] = []
    for kind in summary.kinds:
        for pattern in kind.names:
            block, layers, path = outlined.place(pattern, "next" if kind.category else "first")
            names = expand(pattern)
            block.rank_bytes += kind.rank_bytes * len(names) // kind.count
            tensors, source = _with_packed(kind.tensors, names[0], packed), ""
            if not tensors and tied.get(pattern) in parameters:
                source = tied[pattern]
                tensors = (TensorLine("weight", parameters[source]),)
            bars = [Bar(path, *collective, layers) for collective in kind.collectives]
            for bar in bars:
                if bar.port.startswith("input"):
                    block.add(bar)
            for cell in _cells(path, tensors, layers, len(names) // len(layers), source):
                block.add(cell)
            results += [(block, bar) for bar in bars if not bar.port.startswith("input")]
    for block, bar in results:  # the result of a module comes after everything in it
        inside = [n for n, item in enumerate(block.items, 1) if _is_in(item.path, bar.path)]
        block.add(bar, max(inside, default=len(block.items)))
    for patterns, shape, num_bytes in (line for group in summary.replicated for line in group.tensors):
        counts = {pattern: len(expand(pattern)) for pattern in patterns.split(", ")}
        for pattern, count in counts.items():
            module, _, leaf = pattern.rpartition(".")
            block, layers, path = outlined.place(module, "last")
            if not any(_is_drawn(item, path, leaf) for item in block.items):
                text = f"{path}{'' if leaf == 'weight' else f' {leaf}'} [{', '.join(map(str, shape))}]"
                block.replicated[text] = block.replicated.get(text, frozenset()) | layers
                block.rank_bytes += num_bytes * count // sum(counts.values())
    return [block for block in outlined.blocks if block.items or block.replicated]


@dataclass(slots=True)
class _Outline:
    """The blocks so far, in the order in which they run."""

    stacks: set[str]
    blocks: list[Block] = field(default_factory=list)

    def place(
        self, pattern: str, where: Literal["next", "first", "last"]
    ) -> tuple[Block, frozenset[str], str]:
        """Return the block of modules, the names of their layers, and their path in a layer.

        Modules in running order are next. Others outside of stacks belong to a block with names like theirs,
        or to the first or last one.
        """
        match = _LAYER.fullmatch(pattern)
        if match is not None and match[1] in self.stacks:
            layers, path = frozenset(expand(f"{match[1]}.{match[2]}")), match[3] or ""
            alike = [block for block in self.blocks if block.stack == match[1]]
        else:
            match, layers, path = None, frozenset({""}), pattern
            outside = [block for block in self.blocks if not block.stack]
            near = [block for block in outside if any(_is_near(path, item.path) for item in block.items)]
            alike = near or (outside[:1] if where == "first" else outside[-1:])
            if where == "next":
                alike = [block for block in self.blocks[-1:] if not block.stack]
        if not alike:
            alike = [Block("" if match is None else match[1])]
            self.blocks += alike
        return alike[0], layers, path


def _is_near(path: str, other: str) -> bool:
    """Return whether two modules have the first two components in common."""
    return path.count(".") > 0 and path.split(".")[:2] == other.split(".")[:2]


def _with_packed(
    tensors: tuple[TensorLine, ...], module: str, packed: Mapping[str, list[TensorLine]]
) -> tuple[TensorLine, ...]:
    """Replace the stored tensors of packed parameters of a module by these parameters."""
    lines = packed.get(module, [])
    packings = [(f"{module}.{line.name}", line.plan.packing) for line in lines]
    stored = {tensor_name(name, t.name) for name, packing in packings if packing for t in packing.tensors}
    return (*lines, *(line for line in tensors if f"{module}.{line.name}" not in stored))


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


def _is_drawn(item: Cell | Bar, path: str, leaf: str) -> bool:
    return isinstance(item, Cell) and item.path == path and any(t.name == leaf for t in item.tensors)


def layer_names(layers: frozenset[str]) -> str:
    """Return the names of layers as patterns."""
    return ", ".join(compress(layers))
