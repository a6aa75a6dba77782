"""What the styles of a transformers ``tp_plan`` do, and which one a module needs.

A style says which part of each parameter of a module a rank holds, and what happens to the module's
input and output. Each is a row of a table here, in a plan's words, as transformers runs it at inference.
A module gets the style whose row equals what the plan says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardconv_runtime.format.plan import ModulePlan
from torch import nn


class Inexpressible(Exception):
    """Why no style does what the plan does."""


@dataclass(frozen=True)
class Part:
    """Each rank holds an equal block of one dim, in the order of the ranks; or one of each of its halves."""

    from_end: int
    """1 for the last dim."""
    of_halves: bool = False


Shard = Callable[[str, int], Part | None]
"""(name in its module, number of dims) -> the part of a parameter that a rank holds; None for all of it."""


def _rows(name: str, num_dims: int) -> Part | None:
    return Part(min(num_dims, 2))


def _columns(name: str, num_dims: int) -> Part | None:
    return None if name == "bias" else Part(1)


def _rows_of_halves(name: str, num_dims: int) -> Part | None:
    return Part(2, of_halves=True) if num_dims > 1 else Part(1)


def _columns_of_halves(name: str, num_dims: int) -> Part | None:
    return Part(1, of_halves=True) if num_dims > 1 else None


def _nothing(name: str, num_dims: int) -> Part | None:
    return None


@dataclass(frozen=True)
class Style:
    """What a style of transformers does to a module, at inference."""

    name: str
    owner: type[nn.Module]
    """The modules that it is for."""
    shard: Shard
    """How it splits the module's own parameters."""
    inputs: tuple[str, ...] = ()
    """Ops (of ``Boundary``) on the first input."""
    outputs: tuple[str, ...] = ()
    """Ops on the output."""


STYLES = (
    Style("colwise", nn.Linear, _rows),
    Style("colwise_gather_output", nn.Linear, _rows, outputs=("all_gather",)),
    Style("packed_colwise", nn.Linear, _rows_of_halves),
    Style("rowwise", nn.Linear, _columns, outputs=("all_reduce",)),
    Style("rowwise_split_input", nn.Linear, _columns, ("slice",), ("all_reduce",)),
    Style("embedding_rowwise", nn.Embedding, _rows, ("local_rows",), ("zero_foreign", "all_reduce")),
)
"""Of modules with split parameters; all their parameters are split as the style says."""

OWN_CODE_STYLES = (
    Style("moe_tp_experts", nn.Module, _nothing, outputs=("all_reduce",)),
    Style("local_params", nn.Module, _nothing),
)
"""Of modules with split parameters, which have rules of their own: the module's code gets the local ones."""

UNSPLIT_STYLES = (Style("all_reduce", nn.Module, _nothing, outputs=("all_reduce",)),)
"""Of modules without."""

PARAMETER_STYLES: Mapping[str, Shard] = {
    "colwise": _rows,
    "rowwise": _columns,
    "packed_colwise": _rows_of_halves,
    "packed_rowwise": _columns_of_halves,
}
"""Styles as the rule of one parameter: they split it, and do nothing else."""

LEAVE_ALONE = ("replicate", "replicated_with_grad_allreduce")
"""Styles that do nothing at inference, best first; not every version has the first."""

IDENTITIES = (*LEAVE_ALONE, "mla_kv_a_proj")
"""Rules that concern gradients only."""


@dataclass(frozen=True)
class PlannedModule:
    """A module of the model, and what the plan says of it."""

    module: nn.Module
    entry: ModulePlan
    parts: Mapping[str, Part | None]
    """Of each of its own parameters."""

    def styles(self) -> tuple[str | None, dict[str, str | None]]:
        """The rule of the module, and the rules of its own parameters; None where it needs none.

        Raises:
            Inexpressible: no style does what the plan does.
        """
        if not any(self.parts.values()):
            return self._unsplit(), {}
        if self.entry.category == "boundary":  # other code may read them, and styles act in this module only
            raise self._unmatched()
        for style in STYLES:
            if self._matches(style) and all(self._is_split_by(style.shard, name) for name in self.parts):
                return style.name, {}
        if not self._adds_bias_once():
            for style in OWN_CODE_STYLES:
                if self._matches(style):
                    return style.name, {name: self._parameter_style(name) for name in self.parts}
        raise self._unmatched()

    def _unsplit(self) -> str | None:
        if self.entry.category != "boundary":
            raise Inexpressible("it computes with a split parameter of another module")
        if not self.entry.inputs and not self.entry.outputs:
            return None
        for style in UNSPLIT_STYLES:
            if self._matches(style):
                return style.name
        raise self._unmatched()

    def _matches(self, style: Style) -> bool:
        """Whether a style is for its class and does its steps."""
        steps = tuple(tuple(step.op for step in side) for side in (self.entry.inputs, self.entry.outputs))
        return isinstance(self.module, style.owner) and steps == (style.inputs, style.outputs)

    def _is_split_by(self, shard: Shard, name: str) -> bool:
        """Whether a rank holds of a parameter what a style gives to it."""
        return shard(name, self.module.get_parameter(name).dim()) == self.parts[name]

    def _adds_bias_once(self) -> bool:
        """Its bias is whole, and the runtime adds it after the reduction: not what its own code does."""
        return type(self.module) is nn.Linear and self.entry.category == "row" and "bias" in self.parts

    def _parameter_style(self, name: str) -> str | None:
        if self.parts[name] is None:
            return None
        for style, shard in PARAMETER_STYLES.items():
            if self._is_split_by(shard, name):
                return style
        raise self._unmatched()

    def _unmatched(self) -> Inexpressible:
        steps = [f"{step.op} at {step.slot}" for step in (*self.entry.inputs, *self.entry.outputs)]
        does = "; ".join(filter(None, (self._split(), ", ".join(steps))))
        return Inexpressible(f"no style is for a {type(self.module).__name__} with {does}")

    def _split(self) -> str:
        """Which of its parameters are split, and how."""
        return ", ".join(f"{name} split in {_dim(part)}" for name, part in self.parts.items() if part)


def _dim(part: Part) -> str:
    return ("halves of " if part.of_halves else "") + f"dim {-part.from_end}"
