"""Inputs for one traced forward pass: real values, of sizes that coincide with nothing else.

The inputs of a model are read off its forward method and its config. A model that takes tokens alone is given
tokens. For one that takes images or sounds as well, several forms are possible: they are tried, richest
first, and the first with which the forward pass runs is taken. The plan names the inputs that are left out.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from torch import Tensor, nn

from ..arguments import ExampleInputs
from ..tracing.tape import Tape, tensors_read
from .error_hints import is_about_tokens, release
from .example_inputs import example_call_of
from .input_forms import FORMED, NAMES, STATES
from .input_maker import DECODER_IDS, InputChoice, InputMaker, NotReadError

# Experts to which a traced call sent no token, because it had fewer tokens than there are experts.


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


_MOST_STEPS = 16
"""So often errors are followed that say what an input should be."""


@dataclass(frozen=True, slots=True)
class TraceInputs:
    """The arguments of a call of the model, all by keyword."""

    tensors: dict[str, Tensor]
    """Real CPU tensors; ids and masks ``[B, S]``."""
    options: dict[str, Any]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Inputs that the call is made without, since no form of them was found with which it runs: why."""
    few_chosen: bool = False
    """A trace chooses few of many experts, since all of them run the same code with the same parameters."""

    def with_labels(self) -> TraceInputs:
        """The same with labels: the tokens themselves, but for a few that no loss counts."""
        name = "decoder_input_ids" if "decoder_input_ids" in self.tensors else "input_ids"
        tokens = self.tensors[name].clone()
        tokens[:, ::5] = -100
        return replace(self, tensors={**self.tensors, "labels": tokens})

    def to(self, dtype: torch.dtype) -> TraceInputs:
        """The same in which floating point tensors have this dtype."""
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in self.tensors.items()}
        return replace(self, tensors=tensors)


def trace_inputs(
    model: nn.Module,
    keep: Collection[str],
    seed: int = 0,
    multiple: int = 1,
    example: ExampleInputs | None = None,
) -> tuple[TraceInputs, Tape]:
    """Token ids with a left-padded attention mask, and the other inputs that the model's forward asks for.

    Or the inputs of an example, as they are.

    Args:
        model: on meta; floating point inputs get the dtype of its parameters.
        keep: operators that are recorded as one even if they are composite.
        seed: other values, and other sizes than those of seed 0, for a second run on numbers.
        multiple: the length of the sequence is a multiple of it, if the model allows that.
        example: of a call; nothing is made up then but ``use_cache`` and arguments that ask for more outputs.

    Returns:
        The first inputs with which the forward pass can be traced, and the tape.

    Raises:
        SolveError: if it cannot be traced with any inputs that can be made up, or with the example.
        SourceError: if the example does not fit the model.
    """
    if example is not None:
        return _traced_example(model, keep, example)
    found = _traced(model, keep, seed, multiple)
    offers_states = _may_be_offered_states(model, *found)
    if offers_states:
        offered = _traced(model, keep, seed, multiple, offers_states=True)
        found = offered if not set(STATES).isdisjoint(offered[0].tensors) else found
        offers_states = found is offered
    experts = left_out_experts(model, found[1])
    if not experts:
        return found
    return _traced(model, keep, seed, multiple, experts=experts, offers_states=offers_states)


def _traced(
    model: nn.Module,
    keep: Collection[str],
    seed: int,
    multiple: int,
    *,
    experts: int = 0,
    offers_states: bool = False,
) -> tuple[TraceInputs, Tape]:
    """The same, with a token for each of so many experts (0: for few of those that have no modules).

    With states of an encoder if these are offered.
    """
    make = partial(InputMaker, model, keep, seed, multiple, experts=experts, offers_states=offers_states)
    maker = make()
    makers = _with_other_options(make, maker)
    lone = InputMaker(model, keep, seed, multiple, batch=1, cache=False, extras=())
    problems: list[tuple[InputChoice, Exception]] = []
    attempts = itertools.chain(
        ((choice, makers) for choice in maker.choices()),
        ((choice, makers) for choice in _widened(maker, problems)),
        ((choice, makers) for choice in maker.plain_choices()),
        ((choice, [lone]) for choice in lone.plain_choices()[:1] if maker.tokens),
    )
    seen = _Seen()
    for choice, each in attempts:
        found = _attempt(each, choice, seen, problems)
        if found is not None:
            inputs, tape = found
            return replace(inputs, left_out=_left_out(maker, choice, problems)), tape
    raise _why(maker, problems)


def _with_other_options(make: Callable[..., InputMaker], maker: InputMaker) -> list[InputMaker]:
    """The options of a maker, then fewer: without a cache, without further outputs, without both."""
    return [
        make(cache=cache, extras=extras)
        for extras in dict.fromkeys((maker.extras, ()))
        for cache in dict.fromkeys((maker.cache, False))
    ]


def _traced_example(
    model: nn.Module, keep: Collection[str], example: ExampleInputs
) -> tuple[TraceInputs, Tape]:
    """The example, and the tape of a call with it.

    Raises:
        SolveError: if the model cannot be traced with it, or it leaves out experts.
        SourceError: if it does not fit the model.
    """
    call = example_call_of(example, model)
    missing = 0
    for all_experts in (False, True):
        make = partial(InputMaker, model, keep, 0, 1, example=call, experts=int(all_experts))
        maker = make()
        makers = _with_other_options(make, maker)
        problems: list[tuple[InputChoice, Exception]] = []
        found = _attempt(makers, InputChoice(), _Seen(), problems)
        if found is None:
            raise SolveError(f"a call with {example.source} fails: {problems[0][1]}") from problems[0][1]
        inputs, tape = found
        missing = left_out_experts(model, tape)
        if not missing:
            not_given = [name for name in FORMED if name in maker.parameters and name not in call[0]]
            return replace(inputs, left_out=dict.fromkeys(not_given, "it is not in the example inputs")), tape
    raise SolveError(
        f"{example.source} has too few tokens: it leaves out some of {missing} experts, of which nothing "
        f"would be known; give at least {missing} tokens"
    )


def _may_be_offered_states(model: nn.Module, inputs: TraceInputs, tape: Tape) -> bool:
    """Whether a call that left weights unread could have been given the states of an encoder."""
    known = inspect.signature(model.forward).parameters
    if DECODER_IDS in known or not set(STATES).isdisjoint(inputs.tensors) or set(STATES).isdisjoint(known):
        return False
    read = {tape.tensors[tid].name for tid in tensors_read(tape)}
    return any(p.dim() > 1 and name not in read for name, p in model.named_parameters())


def _widened(maker: InputMaker, problems: Sequence[tuple[InputChoice, Exception]]) -> Iterator[InputChoice]:
    """Once all forms have failed: those of which a layer told a width that it could take."""
    for choice, error in {str(error): (choice, error) for choice, error in reversed(problems)}.values():
        wider = maker.widened(choice, error, of_forms=True)
        if wider is not None:
            yield wider


def _why(maker: InputMaker, problems: Sequence[tuple[InputChoice, Exception]]) -> Exception:
    """The error to raise: that nothing is known of an input, or what the model said first of the fewest."""
    plain = [(choice, error) for choice, error in problems if not choice.forms]
    for choice, error in plain or problems:
        unknown = maker.unknown(choice)
        return maker.refusal(unknown) if unknown else error
    return maker.refusal(maker.parameters)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What earlier attempts showed of errors."""

    on_numbers: set[str] = field(default_factory=set)
    """Those that are raised on numbers as well."""
    with_all_options: set[str] = field(default_factory=set)
    """Those that are raised whatever the options are."""


def _attempt(
    makers: Sequence[InputMaker],
    choice: InputChoice,
    seen: _Seen,
    problems: list[tuple[InputChoice, Exception]],
) -> tuple[TraceInputs, Tape] | None:
    """What the first of some makers, with other options each, can call the model with.

    Modules that fail are run on numbers where no size is right without: that takes time and memory. If there
    are too many or too few tokens for the features of an image, numbers do not help.
    """
    texts: list[set[str]] = []
    for maker in makers:
        failed: list[tuple[InputChoice, Exception]] = []
        found = _first(maker, [choice], (), failed, on_numbers=False)
        texts.append({str(e) for _, e in failed})
        again = [c for c, e in failed if str(e) not in seen.on_numbers and not _is_certain(c, e)]
        if found is None and again:
            on_numbers: list[tuple[InputChoice, Exception]] = []
            found = _first(maker, again, texts[-1], on_numbers, on_numbers=True)
            seen.on_numbers.update(texts[-1] & {str(e) for _, e in on_numbers})
            failed += on_numbers
        problems += failed
        if found is not None:
            return found
        if isinstance(failed[0][1], NotReadError) or texts[-1] <= seen.with_all_options:
            return None
    seen.with_all_options.update(set.intersection(*texts))
    return None


def _first(
    maker: InputMaker,
    choices: Sequence[InputChoice],
    known: Collection[str],
    failed: list[tuple[InputChoice, Exception]],
    *,
    on_numbers: bool,
) -> tuple[TraceInputs, Tape] | None:
    """The first choice with which the model runs.

    Where an error says the width of an input, a divisor of it, or how many tokens there should be, it is
    followed; where the error of the first choice names numbers, they are tried as sizes, unless it is a
    known one.

    Args:
        maker: of the inputs.
        choices: to be tried.
        known: errors.
        failed: gets the choices with which the model does not run, and its errors.
        on_numbers: modules that fail are run on numbers.
    """
    todo, before = list(choices), ""
    while todo:
        current = todo.pop(0)
        try:
            tensors = maker.tensors(current)
            tape = maker.run(tensors, current.forms, on_numbers)
            return TraceInputs(tensors, maker.options(), few_chosen=maker.few_chosen), tape
        except Exception as error:
            release(error)
            failed.append((current, error))
            better = maker.lengthened(current, error) or maker.widened(current, error, of_forms=False)
            better = better or maker.counted(current, error)
            if better is not None and len(failed) < _MOST_STEPS:
                todo = [better, *todo]
                continue
            if not before and str(error) not in known:
                todo = list(maker.resized(current, error)) or todo
            elif str(error) == before and not is_about_tokens(error):
                return None  # sizes do not matter
            before = str(error)
    return None


def _is_certain(choice: InputChoice, error: Exception) -> bool:
    """Whether the error would be the same on numbers: there are more or fewer tokens than features."""
    return isinstance(error, NotReadError) or (bool(choice.forms) and is_about_tokens(error))


def _left_out(
    maker: InputMaker, choice: InputChoice, problems: Sequence[tuple[InputChoice, Exception]]
) -> dict[str, str]:
    """The inputs of the kinds that others than the chosen inputs have, and how the model failed with them."""
    given = {form.kind for form in choice.forms}
    out: dict[str, str] = {}
    for other, error in problems:
        for form in other.forms:
            names = (next(iter(form.tensors)), *NAMES.get(form.kind, ()))
            for name in names if form.kind not in given else ():
                if name in maker.parameters:
                    out.setdefault(name, " ".join(str(error).split())[:200])
    return out
