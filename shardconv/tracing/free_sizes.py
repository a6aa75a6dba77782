"""A batch and a length that coincide with no size in a model."""

from __future__ import annotations

import itertools

from torch import nn

_LENGTHS = (24, 26, 22, 21, 27, 19, 17, 23, 29, 15, 13, 11, 14, 10, 9)
"""Of the sequence, the best first."""


_SHORTER = 5
"""Positions that a decoder has fewer."""


def free_sizes(model: nn.Module, multiple: int, tokens: int = 0) -> tuple[int, int]:
    """Batch and sequence length: neither their product nor one of them is the size of a parameter's dim.

    If possible, the length is a multiple of a number, and no number in the model's code either: not twice the
    size of a buffer (rotary frequencies), and no int attribute.

    Args:
        model: with parameters and buffers.
        multiple: of which the length is one.
        tokens: of which a batch has at least as many, as has that of a decoder.
    """
    taken = {n for p in model.parameters() for n in p.shape}
    others = _numbers_of(model)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int) or longest <= 0:
        longest = 1 << 20
    multiples = [n for n in (*_LENGTHS, *range(multiple, 10 * multiple, multiple)) if not n % multiple]
    for candidates, avoided in itertools.product((multiples, _LENGTHS), (others, set[int]())):
        for length in (n for n in candidates if n >= min(_LENGTHS)):
            lengths = {length, length - _SHORTER}
            fewest = -(-tokens // (length - _SHORTER))
            for batch in (max(n, fewest + n - 3) for n in (3, 5, 7)):
                if length < longest and not taken & {*lengths, batch, length * batch} | avoided & lengths:
                    return batch, length
    return 3, min(24, int(longest) - 1)


def _numbers_of(model: nn.Module) -> set[int]:
    """Sizes that tensors may get in the forward pass, beside those of parameters.

    Attributes that differ between modules of a class count layers, or are sizes of parameters.
    """
    sizes = {n for b in model.buffers() for n in b.shape}
    values: dict[tuple[type, str], set[int]] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is int:
                values.setdefault((type(module), name), set()).add(value)
    attributes = {n for found in values.values() if len(found) == 1 for n in found}
    return sizes | {2 * n for n in sizes} | attributes
