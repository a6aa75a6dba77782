"""The styles of a transformers ``tp_plan`` as tables, and the style that a module needs.

A style says how each parameter of a module is sharded, and which steps run on the module's input and
output. Each is a row of a table here, in a plan's words, as transformers runs it at inference.
A module gets the style whose row equals its entry in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardconv_runtime.format.plan import ModulePlan
from torch import nn


class Inexpressible(Exception):
    """No style does the same as the plan; the message says why."""


@dataclass(frozen=True)
class EvenShards:
    """Each rank holds an equal block of one dim, in the order of the ranks; or one of each of its halves."""

    from_end: int
    """1 for the last dim."""
    of_halves: bool = False


Sharding = Callable[[str, int], EvenShards | None]
"""(name in its module, number of dims) -> how a parameter is sharded; None if it is replicated."""


def _rows(name: str, num_dims: int) -> EvenShards | None:
    return EvenShards(min(num_dims, 2))


def _columns(name: str, num_dims: int) -> EvenShards | None:
    return None if name == "bias" else EvenShards(1)


def _rows_of_halves(name: str, num_dims: int) -> EvenShards | None:
    return EvenShards(2, of_halves=True) if num_dims > 1 else EvenShards(1)


def _columns_of_halves(name: str, num_dims: int) -> EvenShards | None:
    return EvenShards(1, of_halves=True) if num_dims > 1 else None


def _nothing(name: str, num_dims: int) -> EvenShards | None:
    return None


@dataclass(frozen=True)
class Style:
    """What a style of transformers does to a module, at inference."""

    name: str
    owner: type[nn.Module]
    """The modules that it is for."""
    sharding: Sharding
    """Of the module's own parameters."""
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
    Style("embedding_rowwise", nn.Embedding, _rows, ("local_rows",), ("zero_out_of_shard", "all_reduce")),
)
"""Of modules with sharded parameters; all their parameters are sharded as the style says."""

OWN_CODE_STYLES = (
    Style("moe_tp_experts", nn.Module, _nothing, outputs=("all_reduce",)),
    Style("local_params", nn.Module, _nothing),
)
"""Of modules with sharded parameters, which have rules of their own: the module's code gets local ones."""

REPLICATED_STYLES = (Style("all_reduce", nn.Module, _nothing, outputs=("all_reduce",)),)
"""Of modules without sharded parameters."""

PARAMETER_STYLES: Mapping[str, Sharding] = {
    "colwise": _rows,
    "rowwise": _columns,
    "packed_colwise": _rows_of_halves,
    "packed_rowwise": _columns_of_halves,
}
"""Styles as the rule of one parameter: they shard it, and do nothing else."""

LEAVE_ALONE = ("replicate", "replicated_with_grad_allreduce")
"""Styles that do nothing at inference, best first; not every version has the first."""

IDENTITIES = (*LEAVE_ALONE, "mla_kv_a_proj")
"""Rules that concern gradients only."""


@dataclass(frozen=True)
class PlannedModule:
    """A module of the model, with its entry in the plan."""

    module: nn.Module
    entry: ModulePlan
    shardings: Mapping[str, EvenShards | None]
    """Of each of its own parameters."""

    def styles(self) -> tuple[str | None, dict[str, str | None]]:
        """The rule of the module, and the rules of its own parameters; None where it needs none.

        Raises:
            Inexpressible: if no style does the same as the plan.
        """
        if not any(self.shardings.values()):
            return self._replicated(), {}
        if self.entry.category == "boundary":  # other code may read them, and styles act in this module only
            raise self._unmatched()
        for style in STYLES:
            if self._matches(style) and all(self._is_sharded_by(style.sharding, n) for n in self.shardings):
                return style.name, {}
        if not self._adds_bias_once():
            for style in OWN_CODE_STYLES:
                if self._matches(style):
                    return style.name, {name: self._parameter_style(name) for name in self.shardings}
        raise self._unmatched()

    def _replicated(self) -> str | None:
        if self.entry.category != "boundary":
            raise Inexpressible("it computes with a sharded parameter of another module")
        if not self.entry.inputs and not self.entry.outputs:
            return None
        for style in REPLICATED_STYLES:
            if self._matches(style):
                return style.name
        raise self._unmatched()

    def _matches(self, style: Style) -> bool:
        """Whether a style is for its class and does its steps."""
        steps = tuple(tuple(step.op for step in side) for side in (self.entry.inputs, self.entry.outputs))
        return isinstance(self.module, style.owner) and steps == (style.inputs, style.outputs)

    def _is_sharded_by(self, sharding: Sharding, name: str) -> bool:
        """Whether a parameter is sharded as a style does."""
        return sharding(name, self.module.get_parameter(name).dim()) == self.shardings[name]

    def _adds_bias_once(self) -> bool:
        """Its bias is replicated, and the runtime adds it after the reduction; its own code would not."""
        return type(self.module) is nn.Linear and self.entry.category == "row" and "bias" in self.shardings

    def _parameter_style(self, name: str) -> str | None:
        if self.shardings[name] is None:
            return None
        for style, sharding in PARAMETER_STYLES.items():
            if self._is_sharded_by(sharding, name):
                return style
        raise self._unmatched()

    def _unmatched(self) -> Inexpressible:
        steps = [f"{step.op} at {step.slot}" for step in (*self.entry.inputs, *self.entry.outputs)]
        does = "; ".join(filter(None, (self._sharded(), ", ".join(steps))))
        return Inexpressible(f"no style is for a {type(self.module).__name__} with {does}")

    def _sharded(self) -> str:
        """Which of its parameters are sharded, and how."""
        sharded = {name: shards for name, shards in self.shardings.items() if shards}
        return ", ".join(f"{name} sharded in {_dim(shards)}" for name, shards in sharded.items())


def _dim(shards: EvenShards) -> str:
    return ("halves of " if shards.of_halves else "") + f"dim {-shards.from_end}"
