"""Tables of the styles of a transformers ``tp_plan``, and the choice of a module's style.

A style determines how each parameter of a module is sharded, and which steps run on the module's input and
output. Each style is a row of a table, in terms of a plan, for inference. A module gets the style whose row
equals its entry in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardconv_runtime.format.plan import ModulePlan
from torch import nn


class Inexpressible(Exception):
    """No style does the same as the plan. The message says why."""


@dataclass(frozen=True)
class EvenShards:
    """Each rank holds an equal block of one dim, in the order of the ranks, or of each half of the dim."""

    from_end: int
    """Number of the dim from the end; 1 for the last dim."""
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
    """The effect of a style of transformers on a module, at inference."""

    name: str
    owner: type[nn.Module]
    """Class of the modules that it is for."""
    sharding: Sharding
    """Sharding of the module's own parameters."""
    inputs: tuple[str, ...] = ()
    """Ops (of ``ModuleStep``) on the first input."""
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
"""Styles of modules with sharded parameters; all their parameters are sharded as the style says."""

OWN_CODE_STYLES = (
    Style("moe_tp_experts", nn.Module, _nothing, outputs=("all_reduce",)),
    Style("local_params", nn.Module, _nothing),
)
"""Styles of modules with sharded parameters whose own code gets local parameters. Each parameter has a
separate rule."""

REPLICATED_STYLES = (Style("all_reduce", nn.Module, _nothing, outputs=("all_reduce",)),)
"""Styles of modules without sharded parameters."""

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
    """Sharding of each parameter of the module itself."""

    def styles(self) -> tuple[str | None, dict[str, str | None]]:
        """Return the rule of the module and the rules of its parameters; None if no rule is needed."""
        if not any(self.shardings.values()):
            if self.entry.category != "boundary":
                raise Inexpressible("it computes with a sharded parameter of another module")
            if not self.entry.inputs and not self.entry.outputs:
                return None, {}
            for style in REPLICATED_STYLES:
                if self._matches(style):
                    return style.name, {}
            raise self._unmatched()
        if (
            self.entry.category == "boundary"
        ):  # other code may read the parameters, but styles act only in this module
            raise self._unmatched()
        for style in STYLES:
            if self._matches(style) and all(self._is_sharded_by(style.sharding, n) for n in self.shardings):
                return style.name, {}
        # The runtime adds the replicated bias of a row-parallel layer after the reduction; the layer's own
        # code would add it on each rank.
        is_row = type(self.module) is nn.Linear and self.entry.category == "row"
        if not (is_row and "bias" in self.shardings):
            for style in OWN_CODE_STYLES:
                if self._matches(style):
                    return style.name, {name: self._parameter_style(name) for name in self.shardings}
        raise self._unmatched()

    def _matches(self, style: Style) -> bool:
        """Return whether a style is for the module's class and has its steps."""
        steps = tuple(tuple(step.op for step in side) for side in (self.entry.inputs, self.entry.outputs))
        return isinstance(self.module, style.owner) and steps == (style.inputs, style.outputs)

    def _is_sharded_by(self, sharding: Sharding, name: str) -> bool:
        """Return whether a style shards a parameter in the same way."""
        return sharding(name, self.module.get_parameter(name).dim()) == self.shardings[name]

    def _parameter_style(self, name: str) -> str | None:
        if self.shardings[name] is None:
            return None
        for style, sharding in PARAMETER_STYLES.items():
            if self._is_sharded_by(sharding, name):
                return style
        raise self._unmatched()

    def _unmatched(self) -> Inexpressible:
        steps = [f"{step.op} at {step.port}" for step in (*self.entry.inputs, *self.entry.outputs)]
        sharded = ", ".join(
            f"{name} sharded in {'halves of ' if shards.of_halves else ''}dim {-shards.from_end}"
            for name, shards in self.shardings.items()
            if shards
        )
        does = "; ".join(filter(None, (sharded, ", ".join(steps))))
        return Inexpressible(f"no style is for a {type(self.module).__name__} with {does}")
