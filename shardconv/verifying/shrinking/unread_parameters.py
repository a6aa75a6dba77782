"""Dims of the parameters and buffers that the traced call does not read, so that they shrink as well.

Code that reads them in another call (an expert that got no token, a second head) finds sizes that go with the
others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ...dim_analysis.analysis import Analysis
from ...dim_analysis.dim_trees import Node, leaf
from ...planning.solution import stand_in
from ...tracing.tape import Tape, tensors_read

_STORED = ("parameter", "buffer")


def unread_parameters(tape: Tape) -> set[int]:
    """The parameters and buffers that no event reads."""
    read = tensors_read(tape)
    return {t for t, i in enumerate(tape.tensors) if i.kind in _STORED and t not in read}


def with_unread_parameters(analysis: Analysis, stand_ins: Mapping[str, str]) -> Analysis:
    """The analysis with dims for these: those of a parameter that is named alike but for numbers, or its own.

    Args:
        analysis: of the folded tape.
        stand_ins: layer -> the layer that stands for it; the parameters of the first are left out.
    """
    tensors = analysis.tape.tensors
    alike: dict[tuple[str, tuple[int, ...]], tuple[Node, ...]] = {}
    for tid, dims in analysis.dims.items():
        if tensors[tid].kind in _STORED:
            alike.setdefault((_starred(tensors[tid].name), tensors[tid].shape), dims)
    out = dict(analysis.dims)
    for tid in sorted(unread_parameters(analysis.tape) - out.keys()):
        name, shape = tensors[tid].name, tensors[tid].shape
        if stand_in(name, stand_ins) == name:
            out[tid] = alike.get((_starred(name), shape)) or tuple(map(leaf, shape))
    return replace(analysis, dims=out)


def _starred(name: str) -> str:
    """A name with a star for every number, also within words."""
    return re.sub(r"\d+", "*", name)
