"""Experts to which a traced call sent no token, because it had fewer tokens than there are experts."""

from __future__ import annotations

import re

from torch import nn

from .tape import Tape, tensors_read


def left_out_experts(model: nn.Module, tape: Tape) -> int:
    """How many tokens it would take to give each expert one; 0 if none was left out.

    Experts that code chose by a guess are modules that are named alike but for a number, some of whose
    parameters were read.

    Args:
        model: that was traced.
        tape: of the call.
    """
    if not tape.guesses:
        return 0
    read = {tape.tensors[tid].name for tid in tensors_read(tape) if tape.tensors[tid].kind == "parameter"}
    groups: dict[str, list[bool]] = {}
    for name, _ in model.named_parameters():
        for alike in _alike(name):
            groups.setdefault(alike, []).append(name in read)
    return max((len(group) for group in groups.values() if any(group) and not all(group)), default=0)


def _alike(name: str) -> list[str]:
    """A parameter's name with a star for the last number in it, and with one for the number before.

    The last one may be that of a layer inside of an expert.
    """
    numbers = list(re.finditer(r"\d+", name))[-2:]
    return [f"{name[: number.start()]}*{name[number.end() :]}" for number in numbers]
