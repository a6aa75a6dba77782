"""Find inputs for one traced forward pass: real values, with sizes that coincide with no other size.

The inputs of a model are derived from its forward method and its config. A model that takes only tokens gets
tokens. For images or sounds, several forms are possible. They are tried, richest first, and the first form
with which the forward pass runs is used. The plan names the inputs that are left out.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..arguments import ExampleInputs
from ..tracing.tape import Tape, tensors_read
from ..tracing.trace import trace
from .example_inputs import example_call_of
from .input_forms import FORMED, NAMES, PATCH_MASK, STATES, Once, is_about_tokens, release
from .input_maker import DECODER_IDS, CallForm, InputChoice, InputMaker, NotReadError


def left_out_experts(model: nn.Module, tape: Tape) -> int:
    """Return how many tokens are needed so that each expert gets one; 0 if all experts got some.

    Experts that code chose by a guess are modules whose names differ only in a number. Parameters of some of
    them were read.
    """
    if not tape.guesses:
        return 0
    read = {tape.tensors[tid].name for tid in tensors_read(tape) if tape.tensors[tid].kind == "parameter"}
    groups: dict[str, list[bool]] = {}
    for name, _ in model.named_parameters():
        # The last number may be the number of a layer inside of an expert, so the number before is tried as
        # well.
        for number in list(re.finditer(r"\d+", name))[-2:]:
            starred = f"{name[: number.start()]}*{name[number.end() :]}"
            groups.setdefault(starred, []).append(name in read)
    return max((len(group) for group in groups.values() if any(group) and not all(group)), default=0)


_MOST_STEPS = 16
"""Most errors in a row whose hints are followed."""


@dataclass(frozen=True, slots=True)
class TraceInputs:
    """The keyword arguments of a call of the model."""

    tensors: dict[str, Tensor]
    """Real CPU tensors; ids and masks ``[B, S]``."""
    options: dict[str, Any]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Inputs that are left out, since the call fails with all their forms -> the reason."""
    few_chosen: bool = False
    """Whether a trace chooses few of many experts, since all of them run the same code."""

    def with_labels(self) -> TraceInputs:
        """Return the inputs with labels: the tokens themselves, some of which no loss counts."""
        name = "decoder_input_ids" if "decoder_input_ids" in self.tensors else "input_ids"
        tokens = self.tensors[name].clone()
        tokens[:, ::5] = -100
        return replace(self, tensors={**self.tensors, "labels": tokens})

    def without_patch_mask(self) -> TraceInputs | None:
        """Return the inputs of a call that masks no patches; None if this one masks none."""
        if PATCH_MASK not in self.tensors:
            return None
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n != PATCH_MASK})

    def to(self, dtype: torch.dtype) -> TraceInputs:
        """Return the inputs with this dtype for floating point tensors."""

        def cast(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if is_float else value

        # A cache among the options is one leaf, and stays.
        return replace(self, tensors=tree_map(cast, self.tensors), options=tree_map(cast, self.options))


def trace_inputs(
    model: nn.Module,
    keep: Collection[str],
    seed: int = 0,
    multiple: int = 1,
    example: ExampleInputs | None = None,
) -> tuple[TraceInputs, Tape]:
    """Find inputs of a model: token ids with a left-padded attention mask, and other inputs that its forward
    takes.

    The inputs of an example are used as they are.

    Args:
        model: the model on meta; floating point inputs get the dtype of its parameters.

    Returns:
        The first inputs with which the forward pass can be traced, and the tape.
    """
    if example is not None:
        return _traced_example(model, keep, example)
    traced = _traced(model, keep, seed, multiple)
    # A call that left weights unread may need the states of an encoder.
    parameters, (inputs, tape) = inspect.signature(model.forward).parameters, traced
    can_take = not set(STATES).isdisjoint(parameters) and DECODER_IDS not in parameters
    offers_states = False
    if can_take and set(STATES).isdisjoint(inputs.tensors):
        read = {tape.tensors[tid].name for tid in tensors_read(tape)}
        offers_states = any(p.dim() > 1 and name not in read for name, p in model.named_parameters())
    if offers_states:
        offered = _traced(model, keep, seed, multiple, offers_states=True)
        traced = offered if not set(STATES).isdisjoint(offered[0].tensors) else traced
        offers_states = traced is offered
    experts = left_out_experts(model, traced[1])
    if not experts:
        return traced
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
    """Trace the model with the first inputs that it accepts."""
    call_form = CallForm(keep, seed, multiple, experts=experts, offers_states=offers_states)
    maker = InputMaker(model, call_form)
    makers = Once(_with_other_options(maker, call_form))
    problems: list[tuple[InputChoice, Exception]] = []

    def widened() -> Iterator[InputChoice]:
        """Yield the choices with a width that a layer asked for, once all forms have failed."""
        for choice, error in {str(error): (choice, error) for choice, error in reversed(problems)}.values():
            wider = maker.widened(choice, error, of_forms=True)
            if wider is not None:
                yield wider

    def of_one_row() -> Iterator[tuple[InputChoice, list[InputMaker]]]:
        lone = InputMaker(model, CallForm(keep, seed, multiple, batch=1, cache=False, extras=()))
        yield from ((choice, [lone]) for choice in lone.plain_choices()[:1] if maker.tokens)

    attempts = itertools.chain(
        ((choice, makers) for choice in maker.choices()),
        ((choice, makers) for choice in widened()),
        ((choice, makers) for choice in maker.plain_choices()),
        of_one_row(),
    )
    seen = _Seen()
    for choice, each in attempts:
        attempt = _attempt(each, choice, seen, problems)
        if attempt is not None:
            inputs, tape = attempt
            kinds = {form.kind for form in choice.forms}
            out: dict[str, str] = {}
            for other, error in problems:
                for form in other.forms:
                    names = (next(iter(form.tensors)), *NAMES.get(form.kind, ()))
                    for name in names if form.kind not in kinds else ():
                        if name in maker.parameters:
                            out.setdefault(name, _told(error))
            return _with_patch_mask(maker, replace(inputs, left_out=out), tape)
    # Nothing is known of an input, or the model's first error with the fewest inputs.
    plain = [(choice, error) for choice, error in problems if not choice.forms]
    for choice, error in plain or problems:
        unknown = maker.unknown(choice)
        raise maker.refusal(unknown) if unknown else error
    raise maker.refusal(maker.parameters)


def _with_patch_mask(maker: InputMaker, inputs: TraceInputs, tape: Tape) -> tuple[TraceInputs, Tape]:
    """Return the inputs of a call that also masks patches, if the model takes a mask and runs with it."""
    mask = maker.patch_mask(inputs.tensors)
    if not mask:
        return inputs, tape
    tensors = inputs.tensors | mask
    try:
        traced = trace(maker.model, tensors, maker.keep, inputs.options, None, False, inputs.few_chosen)
    except SolveError as error:
        release(error)
        return replace(inputs, left_out={**inputs.left_out, PATCH_MASK: _told(error)}), tape
    return replace(inputs, tensors=tensors), traced


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _with_other_options(maker: InputMaker, form: CallForm) -> Iterator[InputMaker]:
    """Yield makers with fewer options: all of them, without a cache, without further outputs, without
    both."""
    for extras in dict.fromkeys((maker.extras, ())):
        for cache in dict.fromkeys((maker.cache, False)):
            yield InputMaker(maker.model, replace(form, cache=cache, extras=extras), maker.example)


def _traced_example(
    model: nn.Module, keep: Collection[str], example: ExampleInputs
) -> tuple[TraceInputs, Tape]:
    """Return the example, and the tape of a call with it."""
    call = example_call_of(example, model)
    missing = 0
    for all_experts in (False, True):
        form = CallForm(keep, experts=int(all_experts))
        maker = InputMaker(model, form, call)
        makers = list(_with_other_options(maker, form))
        problems: list[tuple[InputChoice, Exception]] = []
        attempt = _attempt(makers, InputChoice(), _Seen(), problems)
        if attempt is None:
            raise SolveError(f"a call with {example.source} fails: {problems[0][1]}") from problems[0][1]
        inputs, tape = attempt
        missing = left_out_experts(model, tape)
        if not missing:
            optional = *FORMED, PATCH_MASK
            not_given = [name for name in optional if name in maker.parameters and name not in call[0]]
            return replace(inputs, left_out=dict.fromkeys(not_given, "it is not in the example inputs")), tape
    raise SolveError(
        f"{example.source} has too few tokens: it leaves out some of {missing} experts, of which nothing "
        f"would be known; give at least {missing} tokens"
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """Errors of earlier attempts."""

    on_numbers: set[str] = field(default_factory=set)
    """Errors that are also raised on numbers."""
    with_all_options: set[str] = field(default_factory=set)
    """Errors that are raised with any options."""


def _attempt(
    makers: Iterable[InputMaker],
    choice: InputChoice,
    seen: _Seen,
    problems: list[tuple[InputChoice, Exception]],
) -> tuple[TraceInputs, Tape] | None:
    """Return the inputs of the first maker with which the model runs. Makers differ in options.

    Modules that fail are run on numbers if the model runs with no size otherwise, since this takes time and
    memory. Numbers do not help if there are too many or too few tokens for the features of an image.
    """
    texts: list[set[str]] = []
    for maker in makers:
        failed: list[tuple[InputChoice, Exception]] = []
        first = _first(maker, [choice], (), failed, on_numbers=False)
        texts.append({str(e) for _, e in failed})
        again = [
            c
            for c, e in failed
            if str(e) not in seen.on_numbers
            and not isinstance(e, NotReadError)
            and not (c.forms and is_about_tokens(e))
        ]
        if first is None and again:
            on_numbers: list[tuple[InputChoice, Exception]] = []
            first = _first(maker, again, texts[-1], on_numbers, on_numbers=True)
            seen.on_numbers.update(texts[-1] & {str(e) for _, e in on_numbers})
            failed += on_numbers
        problems += failed
        if first is not None:
            return first
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
    """Return the first choice with which the model runs.

    If an error names the width of an input, a divisor of it, or the number of tokens, this is tried next. If
    the error of the first choice is new and names numbers, they are tried as sizes.
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
                return None  # another size did not change the error
            before = str(error)
    return None


def not_in_training(
    tape: Tape, model: nn.Module, inputs: TraceInputs, shown_by: Callable[[str], str] = str
) -> frozenset[str]:
    """Return the FQNs of modules that are only called in evaluation, so that steps at their boundaries miss
    in training.

    Code that bypasses a module in training reads its parameters itself. The result is empty if the forward
    pass cannot be traced in training mode.
    """
    was_training = model.training
    model.train()
    try:
        other = trace(model, inputs.tensors, (), inputs.options, few_chosen=inputs.few_chosen)
    except SolveError:
        return frozenset()
    finally:
        model.train(was_training)
    called = {shown_by(call.fqn) for call in other.calls}
    return frozenset(call.fqn for call in tape.calls if shown_by(call.fqn) not in called)


def returns_its_loss_function(model: nn.Module, inputs: TraceInputs) -> bool:
    """Return whether the model returns the result of its ``loss_function``, and calls it once.

    Some models have the function and compute another loss. The result is False if the model cannot be traced
    with labels.
    """
    made: list[Tensor] = []
    returned: list[Any] = []

    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        made.append(torch.zeros((), device="meta"))
        return made[-1]

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        returned.append(getattr(output, "loss", None))

    model.loss_function = stand_in  # type: ignore[assignment]
    model.register_forward_hook(keep)
    try:
        trace(model, inputs.with_labels().tensors, (), inputs.options, few_chosen=inputs.few_chosen)
    except SolveError:
        return False
    return len(made) == 1 and len(returned) == 1 and returned[0] is made[0]
