"""Find parameters that are stacks of matrices, outside of the modules that are known as sums over experts."""

from __future__ import annotations

from dataclasses import dataclass

from ..tracing.tape import Op, Tape
from .composite_modules import EXPERTS
from .rules import traits_of


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter of stacked matrices that is in no site."""

    parameter: int
    is_picked: bool
    """Whether single matrices are taken out of it; otherwise it is only a factor of batched products."""


def find_stacks(tape: Tape) -> list[Stack]:
    """Return parameters of three or more dims that are read as a stack of matrices, outside of the sites."""
    parameters = ((t, i.shape) for t, i in enumerate(tape.tensors) if i.kind == "parameter")
    owner = {t: t for t, shape in parameters if len(shape) > 2 and shape[0] > 1}
    picked: dict[int, bool] = {}
    for event in tape.events:
        if not isinstance(event, Op) or not event.inputs or event.name == f"{EXPERTS}.default":
            continue
        traits = traits_of(event.name)
        for tid in event.inputs:
            if tid not in owner:
                continue
            if traits.passes:
                owner.update(dict.fromkeys(event.outputs, owner[tid]))
            elif traits.picks:
                dim = 0
                if not traits.is_grouped and event.base != "aten.index":
                    dim = event.kwargs.get("dim", event.args[1] if len(event.args) > 1 else 0)
                if dim == 0:
                    picked[owner[tid]] = True
            elif traits.is_product:
                picked.setdefault(owner[tid], False)
    return [Stack(tid, is_picked) for tid, is_picked in picked.items()]
