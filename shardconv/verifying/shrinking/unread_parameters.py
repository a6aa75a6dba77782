"""Dims of the parameters and buffers that the traced call does not read, so that they shrink as well.

Code that reads them in another call (an expert that got no token, a second head, what takes the place of
masked states in training) finds sizes that go with the others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ...dim_analysis.analysis import Analysis
from ...dim_analysis.dim_trees import Node, find, leaf
from ...planning.solution import stand_in
from ...tracing.tape import Tape, tensors_read

_STORED = ("parameter", "buffer")


def unread_parameters(tape: Tape) -> set[int]:
    """The parameters and buffers that no event reads."""
    read = tensors_read(tape)
    return {t for t, i in enumerate(tape.tensors) if i.kind in _STORED and t not in read}


def with_unread_parameters(analysis: Analysis, stand_ins: Mapping[str, str]) -> Analysis:
    """The analysis with dims for these: those of a parameter that is named alike but for numbers, or else for
    each size the dim in which most elements of parameters are.

    Args:
        analysis: of the folded tape.
        stand_ins: layer -> the layer that stands for it; the parameters of the first are left out.
    """
    tensors = analysis.tape.tensors
    alike: dict[tuple[str, tuple[int, ...]], tuple[Node, ...]] = {}
    for tid, dims in analysis.dims.items():
        if tensors[tid].kind in _STORED:
            alike.setdefault((_starred(tensors[tid].name), tensors[tid].shape), dims)
    wide = _by_size(analysis)
    out = dict(analysis.dims)
    for tid in sorted(unread_parameters(analysis.tape) - out.keys()):
        name, shape = tensors[tid].name, tensors[tid].shape
        if stand_in(name, stand_ins) == name:
            known = alike.get((_starred(name), shape))
            out[tid] = known or tuple(wide[n] if n in wide else leaf(n) for n in shape)
    return replace(analysis, dims=out)


def _by_size(analysis: Analysis) -> dict[int, Node]:
    """Size -> the dim of parameters in which most elements are."""
    inside: Counter[Node] = Counter()
    for tid, dims in analysis.dims.items():
        info = analysis.tape.tensors[tid]
        for dim in dims if info.kind == "parameter" else ():
            inside[find(dim)] += math.prod(info.shape)
    return {dim.size: dim for dim, _ in reversed(inside.most_common())}


def _starred(name: str) -> str:
    """A name with a star for every number, also within words."""
    return re.sub(r"\d+", "*", name)
