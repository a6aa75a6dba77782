"""Plans of block-scaled checkpoints: the plan of the unquantized model with the blocks of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..format.block_scales import VALUES_DTYPE, check_blocks
from ..format.name_patterns import compress
from ..format.names import expand_all
from ..format.plan import ParameterPlan, Plan, parameter_plans
from ..format.stored_layout import SUFFIX
from ..tensors.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    from .quantized import Scaled

StoredBlocks = Mapping[str, tuple[tuple[int, ...], str]]
"""(sizes of the blocks, dtype of the factors) of each block-scaled parameter."""


def flatten(plan: Plan, weights: Mapping[str, LazyTensor | Scaled]) -> tuple[Plan, dict[str, LazyTensor]]:
    """The plan with blocks, and all tensors to store by their names.

    Args:
        plan: of the unquantized model.
        weights: of the checkpoint, by FQN.

    Raises:
        PlanError: a rank's shard of a parameter would begin or end inside a block.
    """
    flat: dict[str, LazyTensor] = {}
    blocks = {}
    for name, weight in weights.items():
        if isinstance(weight, LazyTensor):
            flat[name] = weight
        else:
            flat[name], flat[name + SUFFIX] = weight.values, weight.factors
            blocks[name] = (weight.block, weight.factors.dtype)
    return with_blocks(plan, blocks), flat


def with_blocks(plan: Plan, blocks: StoredBlocks) -> Plan:
    """A plan whose parameters are stored with blocks.

    Raises:
        PlanError: a rank's shard of a parameter would begin or end inside a block.
    """
    if not blocks:
        return plan
    parameters = [part for entry in plan.parameters for part in _parts(entry, blocks)]
    try:
        for entry in parameters:
            if entry.block:
                check_blocks(entry, plan.mesh)
    except PlanError as error:
        raise PlanError(
            f"{error}; choose another tp than {plan.tp}, or pass --dtype to convert the model without blocks"
        ) from error
    return replace(plan, parameters=tuple(parameters))


def blocks_in(weights: Mapping[str, LazyTensor | Scaled]) -> dict[str, tuple[int, ...]]:
    """Sizes of the blocks of the block-scaled weights of a checkpoint."""
    return {name: w.block for name, w in weights.items() if not isinstance(w, LazyTensor)}


def block_sizes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Sizes of the blocks of a plan's parameters."""
    return {name: block for name, (block, _) in stored_blocks_of(plan).items()}


def stored_blocks_of(plan: Plan) -> StoredBlocks:
    """The blocks of a plan's parameters, to be used in another plan of the same model."""
    return {name: (e.block, e.block_dtype) for name, e in parameter_plans(plan).items() if e.block}


def _parts(entry: ParameterPlan, blocks: StoredBlocks) -> list[ParameterPlan]:
    """One entry for each kind of blocks among the names of an entry."""
    kinds: dict[tuple[tuple[int, ...], str] | None, list[str]] = {}
    for name in expand_all(entry.names):
        kinds.setdefault(blocks.get(name), []).append(name)
    if kinds.keys() == {None}:
        return [entry]
    return [_part(entry, compress(names), kind) for kind, names in kinds.items()]


def _part(
    entry: ParameterPlan, names: tuple[str, ...], kind: tuple[tuple[int, ...], str] | None
) -> ParameterPlan:
    if kind is None:
        return replace(entry, names=names)
    block, dtype = kind
    return replace(entry, names=names, dtype=VALUES_DTYPE, block=block, block_dtype=dtype)
