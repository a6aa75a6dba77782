"""Inputs for one traced forward pass: real values, of sizes that coincide with nothing else.

The inputs of a model are read off its forward method and its config. A model that takes tokens alone is given
tokens. For one that takes images or sounds as well, several forms are possible: they are tried, richest
first, and the first with which the forward pass runs is taken. The plan names the inputs that are left out.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from shardconv_runtime.training.sequence import FLAT_OUTPUTS
from torch import Tensor, nn

from .modalities import Form, FormMaker, nodes
from .tape import Mark, Tape
from .tokens import TokenMaker, token_parameter
from .trace import trace

EXTRA_OUTPUTS = FLAT_OUTPUTS
"""Arguments that ask for further outputs, of which losses are made."""
DECODER_IDS = "decoder_input_ids"
_LONGEST = 4096
"""Larger numbers in errors are not tried as sizes."""


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
    maker = _InputMaker(model, keep, seed, multiple)
    makers = [
        _InputMaker(model, keep, seed, multiple, cache=cache, extras=extras)
        for extras in dict.fromkeys((maker.extras, ()))
        for cache in dict.fromkeys((maker.cache, False))
    ]
    lone = _InputMaker(model, keep, seed, multiple, batch=1, cache=False, extras=())
    attempts = itertools.chain(
        ((each, choice) for choice in maker.choices() for each in makers),
        [(lone, _Choice())] if maker.tokens else [],
    )
    problems: list[tuple[_Choice, Exception]] = []
    for each, choice in attempts:
        found = _attempt(each, choice, problems)
        if found is not None:
            inputs, tape = found
            return replace(inputs, notes=_left_out(choice, problems)), tape
    plain = [error for choice, error in problems if not choice.forms]
    raise (plain or [error for _, error in problems] or [maker.refusal(maker.parameters)])[0]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which inputs to call the model with."""

    forms: tuple[Form, ...] = ()
    placeholders: tuple[tuple[str, int], ...] = ()
    """(kind of input, placeholders in each row)."""
    length: int | None = None
    """Of the text; None: any."""
    repeats: bool = False
    """The decoder is given the same ids, which end as texts do: some heads look for the end."""
    streams: int = 0
    """Ids at each position of what is generated, as codes of a sound have; 0: one, and no dim for it."""


def _attempt(
    maker: _InputMaker, choice: _Choice, problems: list[tuple[_Choice, Exception]]
) -> tuple[TraceInputs, Tape] | None:
    """Inputs with which the model runs; where its error names numbers, they are tried as sizes."""
    todo = [choice]
    while todo:
        current = todo.pop(0)
        try:
            inputs = maker.inputs(current)
            tape = maker.run(inputs, current.forms)
        except Exception as error:
            _release(error)
            problems.append((current, error))
            if current is choice:
                todo = list(maker.resized(choice, error))
            elif str(error) == str(problems[-2][1]) and not _is_about_tokens(error):
                return None  # sizes do not matter
        else:
            return inputs, tape
    return None


class _InputMaker:
    """Makes the inputs of one model for one seed."""

    def __init__(
        self,
        model: nn.Module,
        keep: Collection[str],
        seed: int,
        multiple: int,
        batch: int = 0,
        cache: bool = True,
        extras: Collection[str] = EXTRA_OUTPUTS,
    ) -> None:
        self.model = model
        self.keep = keep
        self.config = getattr(model, "config", None)
        self.parameters = inspect.signature(model.forward).parameters
        self.cache = cache and "use_cache" in self.parameters
        self.extras = tuple(name for name in extras if self._can_return(name))
        self.seed = seed
        self.tokens = token_parameter(model, self.parameters)
        self.multiple = multiple
        self.batch, self.length = _sizes(model, multiple)
        if seed:
            self.batch, self.length = self.batch - 1, self.length - 3
        self.batch = batch or self.batch
        self.token_maker = TokenMaker(model, self.parameters, self.tokens, self.batch, seed)

    def choices(self) -> Iterator[_Choice]:
        """Combinations of the forms of the inputs beside tokens: all kinds, one, none.

        There are as many placeholders as the model makes features of a form.
        """
        sizes = {n for p in self.model.parameters() for n in p.shape}
        maker = FormMaker(
            list(self.parameters), self.config, _dtype(self.model), self.batch, self.seed, sizes
        )
        kinds = maker.kinds()
        subsets = [kinds, *([k] for k in kinds if len(kinds) > 1)]
        for subset in subsets if kinds else ():
            combinations = itertools.product(*(list(maker.forms(kind)) for kind in subset))
            yield from (_Choice(forms, self._placeholders(forms)) for forms in combinations)
        if self.tokens:
            yield _Choice()
        if self.tokens and DECODER_IDS in self.parameters:
            yield _Choice(repeats=True)

    def resized(self, choice: _Choice, error: Exception) -> Iterator[_Choice]:
        """The same with other sizes: numbers of placeholders, lengths of the text, ids at each position.

        They are those that the model's error names and, if it complains of tokens, the rows of the forms
        and quotients of their longest dim. None are tried where it names one number twice: as many tokens as
        features, which are of another width.
        """
        numbers = _numbers(error)
        if choice.forms and _is_about_tokens(error) and len(numbers) == 1 < str(error).count(str(numbers[0])):
            return
        if self.tokens and not choice.forms and not choice.repeats:
            yield from (replace(choice, streams=n) for n in numbers if n > 1)
        if choice.forms and _is_about_tokens(error):
            shapes = [next(iter(form.tensors.values())).shape for form in choice.forms]
            numbers += [math.prod(shape[:-1]) for shape in shapes]
            numbers += [max(map(max, shapes)) >> k for k in range(6)]
        with_placeholders = [
            form.kind for form in choice.forms if self.token_maker.placeholder_id(form.kind) is not None
        ]
        for n in numbers if choice.forms and self.tokens else ():
            for kind in with_placeholders:
                counted = dict(choice.placeholders)
                yield from (
                    replace(choice, placeholders=tuple((counted | {kind: m}).items()))
                    for m in dict.fromkeys((n // self.batch, n))
                    if m and m * self.batch % n == 0
                )
            if not with_placeholders and n != self.length:
                yield replace(choice, length=n)

    def inputs(self, choice: _Choice) -> TraceInputs:
        """Tokens and the chosen forms, whose placeholders are among the tokens."""
        tensors = {name: t for form in choice.forms for name, t in form.tensors.items()}
        if self.tokens:
            length = choice.length or self._text_length(choice)
            tensors = {**self.token_maker.tensors(choice.placeholders, length), **tensors}
        if choice.repeats:
            self.token_maker.end(tensors[self.tokens])
            tensors[DECODER_IDS] = tensors[self.tokens].clone()
        elif DECODER_IDS in self.parameters:
            tensors[DECODER_IDS] = self.token_maker.ids(self._decoder_length(), self.seed + 1)
        if choice.streams:
            generated = DECODER_IDS if DECODER_IDS in self.parameters else self.tokens
            length = tensors[generated].shape[1]
            tensors[generated] = self.token_maker.codes(length, choice.streams, self.seed)
        missing = [
            n
            for n, p in self.parameters.items()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and n not in tensors
        ]
        if missing or not tensors:
            raise self.refusal(missing or self.parameters)
        return TraceInputs(tensors, self._options())

    def _text_length(self, choice: _Choice) -> int:
        """So many tokens that there is a multiple of them, with the placeholders."""
        return self.length + -(self.length + sum(count for _, count in choice.placeholders)) % self.multiple

    def _decoder_length(self) -> int:
        """Another length than that of the text, and a multiple as well."""
        shorter = self.length - max(self.multiple, 5 - 5 % self.multiple)
        return shorter if shorter > 0 else self.length + self.multiple

    def _options(self) -> dict[str, Any]:
        """With a cache: its sizes may be read off attributes that no other code reads."""
        cache = {"use_cache": self.cache} if "use_cache" in self.parameters else {}
        return cache | dict.fromkeys(self.extras, True)

    def _can_return(self, name: str) -> bool:
        """Whether the model knows an argument that asks for more outputs."""
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        return (takes_any or name in self.parameters) and any(hasattr(n, name) for n in nodes(self.config))

    def refusal(self, names: Iterable[str]) -> SolveError:
        """Nothing is known of these parameters."""
        return SolveError(
            f"{type(self.model).__name__} takes {', '.join(names)}, which cannot be made up; models that are "
            "called with token ids, images or sounds can be converted so far"
        )

    def run(self, inputs: TraceInputs, forms: Sequence[Form]) -> Tape:
        """Trace the forward pass.

        Raises:
            SolveError: it fails, or does not read a form's tensor.
        """
        tape = trace(self.model, inputs.tensors, self.keep, inputs.options)
        for form in forms:
            name = next(iter(form.tensors))
            if not _is_read(tape, tape.inputs[list(inputs.tensors).index(name)]):
                raise SolveError(f"{name} is not read")
        return tape

    def _placeholders(self, forms: Sequence[Form]) -> tuple[tuple[str, int], ...]:
        """How many placeholders of each form every row has: as many as the model makes features."""
        counts = ((form.kind, self._num_features(form) // self.batch) for form in forms)
        return tuple((kind, n) for kind, n in counts if n)

    def _num_features(self, form: Form) -> int:
        """Number of features that the model makes of a form: the product of all dims but the last.

        0 if it is unknown: the model may lack such a method, or want more than the form has.
        """
        method = f"get_{form.kind}_features"
        if self.token_maker.placeholder_id(form.kind) is None or not hasattr(self.model, method):
            return 0
        known = list(inspect.signature(getattr(self.model, method)).parameters)
        tensors = {n: t for n, t in form.tensors.items() if n in known}
        if next(iter(form.tensors)) not in tensors:
            tensors = form.tensors  # the signature is *args, **kwargs
        try:
            tape = trace(_Features(self.model, method), tensors, self.keep)
        except SolveError as error:
            _release(error)
            return 0
        return sum(math.prod(tape.tensors[t].shape[:-1]) for t in tape.outputs)


class _Features(nn.Module):
    """A method of a model that turns images or sounds into features, as a module."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model = model
        self.method = method

    def forward(self, **tensors: Tensor) -> Any:
        result = getattr(self.model, self.method)(**tensors)
        features = getattr(result, "pooler_output", None)
        return result if features is None else features


def _is_read(tape: Tape, tid: int) -> bool:
    """Whether any operator reads a tensor."""
    names = {tid}
    for event in tape.events:
        if isinstance(event, Mark):
            names |= {event.target} if event.source in names else set()
        elif names & set(event.inputs):
            return True
    return False


def _release(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold: copies of modules with parameters, among others."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _numbers(error: Exception) -> list[int]:
    """Those in the text of an error that may be sizes, once each."""
    found = map(int, re.findall(r"\b\d+\b", str(error)))
    return [n for n in dict.fromkeys(found) if 0 < n < _LONGEST]


def _is_about_tokens(error: Exception) -> bool:
    return "token" in str(error) and "has no attribute" not in str(error)


def _left_out(choice: _Choice, problems: Sequence[tuple[_Choice, Exception]]) -> tuple[str, ...]:
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


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


_LENGTHS = (24, 26, 22, 21, 27, 19, 17, 23, 29, 15, 13, 11, 14, 10, 9)
"""Of the sequence, the best first."""


def _sizes(model: nn.Module, multiple: int) -> tuple[int, int]:
    """Batch and sequence length: neither their product nor one of them is the size of a parameter's dim.

    If possible, the length is a multiple of a number, and no number in the model's code either: not twice the
    size of a buffer (rotary frequencies), and no int attribute.
    """
    taken = {n for p in model.parameters() for n in p.shape}
    others = _numbers_of(model)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int) or longest <= 0:
        longest = 1 << 20
    multiples = [n for n in (*_LENGTHS, *range(multiple, 10 * multiple, multiple)) if not n % multiple]
    for candidates, avoided in itertools.product((multiples, _LENGTHS), (others, set[int]())):
        for length in (n for n in candidates if n >= min(_LENGTHS)):
            for batch in (3, 5, 7):
                lengths = {length, length - 5}
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
