"""Try sizes for a smaller model until its code does the same as the large model's.

Groups of leaves that cause a failure keep their size, and the rest is tried again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardconv_runtime.errors import PlanError
from shardconv_runtime.parallel.build import stored_tensors
from torch import nn

from ..planning.conflict import Conflict
from ..planning.solution import stand_in
from ..simulation.layer_bypass import Bypass, bypassed_copy
from ..tracing.functions import TracedInt
from ..tracing.tape import Mark, Ref, Tape
from .leaf_groups import LeafGroup, leaf_groups, with_unread_parameters
from .small_model import Attempt, FullModel, Resized, SmallModel, num_rows
from .small_shapes import ENOUGH, SmallShapes, activation_elements, choose_sizes, stored_elements
from .token_tables import TokenUse, token_use

# A model for smaller images or sounds is built again from a config with smaller sizes.
#
# Widths shrink in the traced model itself. But the number of patches of an image is stored in many places,
# such as tables of positions. The new model is used if its trace equals the full model's, operator by
# operator, except for numbers and sizes.


def resized_tensors(full: nn.Module, fewer: nn.Module) -> Mapping[str, Resized] | None:
    """Return the stored tensors whose shapes differ; None if the models have different tensors."""
    before, after = (dict(stored_tensors(model)) for model in (full, fewer))
    if list(before) != list(after) or any(t.dim() != after[n].dim() for n, t in before.items()):
        return None
    return {
        name: Resized(tuple(tensor.shape), tuple(after[name].shape))
        for name, tensor in before.items()
        if tensor.shape != after[name].shape
    }


def is_same_code(full: Tape, fewer: Tape) -> bool:
    """Return whether two tapes have the same operators on the same tensors, apart from numbers and sizes."""
    if len(full.events) != len(fewer.events) or len(full.tensors) != len(fewer.tensors):
        return False
    if full.opaque.keys() != fewer.opaque.keys() or full.outputs != fewer.outputs:
        return False
    infos = zip(full.tensors, fewer.tensors, strict=True)
    if any(
        (a.kind, a.name, a.dtype, len(a.shape)) != (b.kind, b.name, b.dtype, len(b.shape)) for a, b in infos
    ):
        return False
    return all(_form(full, a) == _form(fewer, b) for a, b in zip(full.events, fewer.events, strict=True))


def _form(tape: Tape, event: Any) -> tuple[Any, ...]:
    """Return an event without numbers."""
    fqn = tape.calls[event.call].fqn
    if isinstance(event, Mark):
        return fqn, event.ports, event.source, event.target
    return fqn, event.name, event.inputs, event.outputs, _without_numbers((event.args, event.kwargs))


def _without_numbers(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_without_numbers, value))
    if isinstance(value, dict):
        return tuple((key, _without_numbers(item)) for key, item in value.items())
    if isinstance(value, (int, float, TracedInt)) and not isinstance(value, bool):
        return "number"
    return value.tid if isinstance(value, Ref) else str(value)


_LARGE = 1 << 29
"""Elements of a proof above which other sizes are tried."""
_MANY_ACTIVATIONS = 1 << 20
"""Most elements of all activations of a call."""


@dataclass(frozen=True)
class Shrinking:
    """A model without some layers, and the groups that may shrink."""

    full: FullModel
    """The full model, with dims for the parameters that the traced call does not read."""
    tp: int
    """Number of ranks. Sizes keep their remainders modulo this number."""
    skipped: Mapping[str, Bypass]
    """Layers to leave out."""
    tokens: TokenUse
    groups: Collection[LeafGroup]
    copies: Mapping[int, int]
    """Stored tensor of the tape -> number of tensors of the smaller model that it represents."""

    @classmethod
    def of(cls, full: FullModel, tp: int, skipped: Mapping[str, Bypass]) -> Shrinking:
        """Find the dims that may shrink in a model without the layers ``skipped``."""
        full = replace(full, analysis=with_unread_parameters(full.analysis, full.folded.representatives()))
        tokens = token_use(full.analysis.tape)
        groups = leaf_groups(full.analysis, full.folded.ties, tokens.tables)
        tids = {info.name: tid for tid, info in enumerate(full.analysis.tape.tensors) if info.name}
        stand_ins = full.folded.representatives()
        stand_in_names = (
            stand_in(name, stand_ins) for name, _ in stored_tensors(bypassed_copy(full.model, skipped))
        )
        copies = Counter(tids[name] for name in stand_in_names if name in tids)
        return cls(full, tp, skipped, tokens, groups, copies)

    @cached_property
    def _first_sizes(self) -> Mapping[LeafGroup, int]:
        """Return the sizes in which equal sizes stay equal, before anything is tried."""
        return choose_sizes(self.full.analysis, self.groups, self.tp, self.copies)

    @property
    def has_many_positions(self) -> bool:
        """Whether the ranks of a proof hold many activations even if everything shrinks."""
        return self.is_much(SmallShapes.of(self.full.analysis, self._first_sizes))

    def is_much(self, shapes: SmallShapes) -> bool:
        """Return whether one row has many activations with these shapes."""
        return activation_elements(shapes) // num_rows(self.full.inputs.tensors) > _MANY_ACTIVATIONS

    def run(self, fits: Callable[[SmallModel], object], runs: Callable[[SmallModel], bool]) -> SmallModel:
        """Return the smaller model on which plans are simulated. A small model is not changed.

        After a failure, one of the groups that may have caused it keeps its size, with the same groups of
        other layers. It is the group with the fewest elements. Equal sizes stay equal. If the result is
        large, equal
        sizes may differ until that fails, if this leaves less: a width may by chance equal a size that cannot
        shrink.
        """
        analysis, copies = self.full.analysis, self.copies
        left = stored_elements(analysis, self._first_sizes, copies)
        orders: list[set[int] | None] = [None, set()] if left <= 2 * ENOUGH else [set(), None]
        small = self._tried(orders[0], lambda sizes: True, fits, runs)
        assert small is not None
        most = 4 * num_elements(small.model) + self._activations(small.shapes, small)
        if num_elements(small.model) <= 2 * ENOUGH and most <= _LARGE:
            return small

        def is_worth(sizes: Mapping[LeafGroup, int]) -> bool:
            activations = self._activations(SmallShapes.of(analysis, sizes), small)
            return 4 * stored_elements(analysis, sizes, copies) + activations < most

        return self._tried(orders[1], is_worth, fits, runs) or small

    def _activations(self, shapes: SmallShapes, small: SmallModel) -> int:
        """Return the elements that the simulated call computes with these shapes. It may have fewer rows."""
        used, full_size = (sum(t.numel() for t in m.inputs.tensors.values()) for m in (small, self.full))
        return activation_elements(shapes) * used // max(1, full_size)

    def _tried(
        self,
        equal: set[int] | None,
        is_worth: Callable[[Mapping[LeafGroup, int]], bool],
        fits: Callable[[SmallModel], object],
        runs: Callable[[SmallModel], bool],
    ) -> SmallModel | None:
        """Try sizes. Sizes in ``equal`` are the same wherever they occur (None: all sizes).

        Sizes that fail are added to ``equal`` first. The result is None if the sizes are not worth a try.
        """
        unchanged: set[LeafGroup] = set()
        while True:
            sizes = choose_sizes(
                self.full.analysis, self.groups, self.tp, self.copies, kept=unchanged, equal=equal
            )
            if not is_worth(sizes):
                return None
            attempt = Attempt(self.full, self.tp, self.skipped, self.tokens, sizes).run()
            if isinstance(attempt, SmallModel):
                try:
                    fits(attempt)
                except PlanError:
                    if not sizes:
                        raise
                    attempt = Conflict((), "the plan")
                else:
                    computed = {group for group in sizes if group.experts or group.hashed}
                    if not computed or runs(attempt):
                        return attempt
                    unchanged |= computed
                    continue
            blamed = {g for g in sizes if not g.leaves.isdisjoint(attempt.nodes)}
            if equal is not None and (new := {g.size for g in blamed or sizes} - equal):
                equal |= new
                continue
            worst = next(g for g in reversed(sizes) if g in blamed or not blamed)
            unchanged |= {group for group in sizes if group.is_alike(worst)}


def num_elements(model: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
