"""Inputs for one traced forward pass: real values, of sizes that coincide with nothing else.

The inputs of a model are read off its forward method and its config. A model that takes tokens alone is given
tokens. For one that takes images or sounds as well, several forms are possible: they are tried, richest
first, and the first with which the forward pass runs is taken. The plan names the inputs that are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .input_maker import Choice, InputMaker
from .tape import Tape
from .trace_errors import is_about_tokens, release


@dataclass(frozen=True, slots=True)
class TraceInputs:
    """The arguments of a call of the model, all by keyword."""

    tensors: dict[str, Tensor]
    """Real CPU tensors; ids and masks ``[B, S]``."""
    options: dict[str, Any]
    notes: tuple[str, ...] = ()
    """Inputs that were left out, for the plan."""

    def with_labels(self) -> TraceInputs:
        """The same with labels: the tokens themselves, but for a few that no loss counts."""
        tokens = self.tensors["input_ids"].clone()
        tokens[:, ::5] = -100
        return replace(self, tensors={**self.tensors, "labels": tokens})

    def to(self, dtype: torch.dtype) -> TraceInputs:
        """The same in which floating point tensors have this dtype."""
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in self.tensors.items()}
        return replace(self, tensors=tensors)


def trace_inputs(
    model: nn.Module, keep: Collection[str], seed: int = 0, multiple: int = 1
) -> tuple[TraceInputs, Tape]:
    """Token ids with a left-padded attention mask, and the other inputs that the model's forward asks for.

    Args:
        model: on meta; floating point inputs get the dtype of its parameters.
        keep: operators that are recorded as one even if they are composite.
        seed: other values, and other sizes than those of seed 0, for a second run on numbers.
        multiple: the length of the sequence is a multiple of it, if the model allows that.

    Returns:
        The first inputs with which the forward pass can be traced, and the tape.

    Raises:
        SolveError: it cannot be traced with any inputs that can be made up.
    """
    maker = InputMaker(model, keep, seed, multiple)
    makers = [
        InputMaker(model, keep, seed, multiple, cache=cache, extras=extras)
        for extras in dict.fromkeys((maker.extras, ()))
        for cache in dict.fromkeys((maker.cache, False))
    ]
    lone = InputMaker(model, keep, seed, multiple, batch=1, cache=False, extras=())
    problems: list[tuple[Choice, Exception]] = []
    attempts = itertools.chain(
        ((each, choice) for choice in maker.choices() for each in makers),
        ((each, choice) for choice in _widened(maker, problems) for each in makers),
        ((each, choice) for choice in maker.plain_choices() for each in makers),
        ((lone, choice) for choice in lone.plain_choices()[:1] if maker.tokens),
    )
    for each, choice in attempts:
        found = _attempt(each, choice, problems)
        if found is not None:
            inputs, tape = found
            return replace(inputs, notes=_left_out(choice, problems)), tape
    raise _why(maker, problems)


def _widened(maker: InputMaker, problems: Sequence[tuple[Choice, Exception]]) -> Iterator[Choice]:
    """Once all forms have failed: those of which a layer told a width that it could take."""
    for choice, error in {str(error): (choice, error) for choice, error in reversed(problems)}.values():
        wider = maker.widened(choice, error, of_forms=True)
        if wider is not None:
            yield wider


def _why(maker: InputMaker, problems: Sequence[tuple[Choice, Exception]]) -> Exception:
    """The error to raise: that nothing is known of an input, or what the model said first of the fewest."""
    plain = [(choice, error) for choice, error in problems if not choice.forms]
    for choice, error in plain or problems:
        unknown = maker.unknown(choice)
        return maker.refusal(unknown) if unknown else error
    return maker.refusal(maker.parameters)


def _attempt(
    maker: InputMaker, choice: Choice, problems: list[tuple[Choice, Exception]]
) -> tuple[TraceInputs, Tape] | None:
    """Inputs with which the model runs; where its error names numbers, they are tried as sizes."""
    first, todo = choice, [choice]
    while todo:
        current = todo.pop(0)
        try:
            tensors = maker.tensors(current)
            tape = maker.run(tensors, current.forms)
        except Exception as error:
            release(error)
            problems.append((current, error))
            wider = maker.widened(current, error, of_forms=False)
            if wider is not None:
                first, todo = (wider if current is first else first), [wider, *todo]
            elif current is first:
                todo = list(maker.resized(current, error))
            elif str(error) == str(problems[-2][1]) and not is_about_tokens(error):
                return None  # sizes do not matter
        else:
            return TraceInputs(tensors, maker.options()), tape
    return None


def _left_out(choice: Choice, problems: Sequence[tuple[Choice, Exception]]) -> tuple[str, ...]:
    """Which inputs others than the chosen ones would have been given."""
    given = {name for form in choice.forms for name in form.tensors}
    kinds = {form.kind for form in choice.forms}
    out: dict[str, Exception] = {}
    for other, error in problems:
        for form in other.forms:
            if form.kind not in kinds:
                out.setdefault(next(n for n in form.tensors if n not in given), error)
    return tuple(
        f"traced without {name} ({' '.join(str(error).split())[:200]}): parameters that only it reaches "
        "are replicated"
        for name, error in out.items()
    )
