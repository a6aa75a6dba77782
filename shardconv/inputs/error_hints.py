"""Read from the errors of a traced forward pass which inputs the model needs."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping

import torch
from torch import Tensor

_LONGEST = 4096
"""Larger numbers in errors are not tried as sizes."""
_WHERE = re.compile(r"^[\w.]*: ")
"""The module in which a trace failed, at the start of the message."""
_MASK = re.compile(r"shape of the mask \[([\d, ]+)\] at index \d+ does not match .* tensor \[([\d, ]+)\]")
_MULTIPLE = re.compile(r"multiple of (\d+)")
_PRODUCT = re.compile(r"shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x\d+\)")


def release(error: BaseException | None) -> None:
    """Free the objects in the frames of an error: tapes, and copies of modules with parameters."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None  # a cleared frame still holds its function and the closure
        error = error.__cause__ or error.__context__


def numbers(error: Exception) -> list[int]:
    """Return the numbers in an error that may be sizes, each once."""
    found = map(int, re.findall(r"\b\d+\b", str(error)))
    return [n for n in dict.fromkeys(found) if 0 < n < _LONGEST]


def is_about_tokens(error: Exception) -> bool:
    """Return whether an error is about the number of tokens."""
    said = _WHERE.sub("", str(error))
    return "token" in said and "has no attribute" not in said


def needed_count(error: Exception, count: int) -> int | None:
    """Return the number of features from an error that compares it with a number of tokens.

    Args:
        error: error of a call.
        count: number of tokens of the call.

    Returns:
        None if the error is another one, or does not name exactly these two numbers.
    """
    said = {int(n) for n in re.findall(r"\b\d+\b", str(error))}
    if not is_about_tokens(error) or count not in said or len(said) != 2:
        return None
    return next(n for n in said if n != count)


def needed_multiple(error: Exception, tensors: Mapping[str, Tensor]) -> tuple[list[str], int] | None:
    """Return the inputs whose last dim must be a multiple of a number in the error, and this number.

    None if the error is another one, or the inputs are such multiples.
    """
    found = _MULTIPLE.search(str(error))
    multiple = int(found[1]) if found else 1
    lengths = {n for n in numbers(error) if n % multiple}
    names = [name for name, t in tensors.items() if t.dim() > 1 and t.shape[-1] in lengths]
    return (names, multiple) if names else None


def needed_mask(error: Exception, tensors: Mapping[str, Tensor]) -> tuple[str, int] | None:
    """Return the mask ``[B, N]`` that does not fit the tensor that it indexes, and the right N.

    None if the error is another one, or none of the tensors is that mask.
    """
    found = _MASK.search(str(error))
    if found is None:
        return None
    mask, indexed = ([int(n) for n in text.split(",")] for text in found.groups())
    names = (n for n, t in tensors.items() if t.dtype == torch.bool and list(t.shape) == mask)
    name = next(names, None)
    if name is None or len(mask) != 2 or len(indexed) < 2 or mask[0] != indexed[0]:
        return None
    return name, indexed[1]


def needed_width(error: Exception, tensors: Mapping[str, Tensor]) -> tuple[str, int] | None:
    """Return the input whose last dim a linear layer could not take, and the size that it needs.

    None if the error is another one, or its product is not of an unchanged input.
    """
    found = _PRODUCT.search(str(error))
    if found is None:
        return None
    rows, width, needed = map(int, found.groups())
    names = (
        name
        for name, t in tensors.items()
        if t.is_floating_point() and t.dim() and t.shape[-1] == width and t.numel() == rows * width
    )
    name = next(names, None)
    return None if name is None else (name, needed)
