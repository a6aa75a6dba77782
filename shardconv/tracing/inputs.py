"""Inputs for one traced forward pass: real values, of sizes that coincide with nothing else.

What a model takes is read off its forward method and its config. A model that takes tokens alone is given
tokens. For one that takes images or sounds as well, several forms are possible: they are tried, richest
first, and the first with which the forward pass runs is taken. The plan says what had to be left out.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from shardconv_runtime.training.sequence import FLAT_OUTPUTS
from torch import Tensor, nn

from .modalities import IMAGES, SOUNDS, STATES, Form, Maker, first_int, nodes
from .tape import Mark, Tape
from .trace import trace

EXTRA_OUTPUTS = FLAT_OUTPUTS
"""Arguments that ask for outputs which losses are made of, beside what a model returns without them."""
_TYPE_IDS = {"image": 1, "audio": 3}
"""What ``mm_token_type_ids`` says of tokens that stand for an image or a sound."""
_LONGEST = 4096
"""Numbers in errors above this are no sizes to try."""
_FIRST_PLACE = 3
"""Where the tokens that stand for an image begin: behind the padding and one token."""


@dataclass(frozen=True, slots=True)
class TraceInputs:
    """What the model is called with, all by keyword."""

    tensors: dict[str, Tensor]
    """Real CPU tensors; ids and masks ``[B, S]``."""
    options: dict[str, Any]
    notes: tuple[str, ...] = ()
    """What was left out, for the plan."""

    def with_labels(self) -> TraceInputs:
        """The same with labels: the tokens themselves, but for a few that no loss counts."""
        tokens = self.tensors["input_ids"].clone()
        tokens[:, ::5] = -100
        return replace(self, tensors={**self.tensors, "labels": tokens})

    def to(self, dtype: torch.dtype) -> TraceInputs:
        """The same in which floating point tensors have this dtype."""
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in self.tensors.items()}
        return replace(self, tensors=tensors)


def trace_inputs(model: nn.Module, keep: Collection[str], seed: int = 0) -> tuple[TraceInputs, Tape]:
    """Token ids with a left-padded attention mask, and what else the model's forward asks for.

    Args:
        model: on meta; floating point inputs get the dtype of its parameters.
        keep: operators that are recorded whole even if they are composite.
        seed: other values, and other sizes than those of seed 0, for a second run on numbers.

    Returns:
        The first inputs with which the forward pass can be traced, and the tape.

    Raises:
        SolveError: it cannot be traced with anything that is known how to make.
    """
    maker = _InputMaker(model, keep, seed)
    makers = [
        _InputMaker(model, keep, seed, cache=cache, extras=extras)
        for extras in dict.fromkeys((maker.extras, ()))
        for cache in dict.fromkeys((maker.cache, False))
    ]
    attempts = [(each, choice) for choice in maker.choices() for each in makers]
    if maker.tokens:
        attempts.append((_InputMaker(model, keep, seed, batch=1, cache=False, extras=()), _Choice()))
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
    """What to call the model with."""

    forms: tuple[Form, ...] = ()
    places: tuple[tuple[str, int], ...] | None = None
    """Kind of input -> tokens of each row that stand for it; None: as many as there are features."""
    length: int | None = None
    """Of the text; None: any."""
    repeats: bool = False
    """The decoder is given the same ids, which end as texts do: some heads look for the end."""


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
        self.tokens = self._token_parameter()
        self.batch, self.length = _sizes(model)
        if seed:
            self.batch, self.length = self.batch - 1, self.length - 3
        self.batch = batch or self.batch

    def choices(self) -> Iterator[_Choice]:
        """Combinations of the forms of what the model takes beside tokens: all kinds, one, none."""
        maker = Maker(list(self.parameters), self.config, _dtype(self.model), self.batch, self.seed)
        kinds = maker.kinds()
        subsets = [kinds, *([k] for k in kinds if len(kinds) > 1)]
        for subset in subsets if kinds else ():
            combinations = itertools.product(*(list(maker.forms(kind)) for kind in subset))
            yield from (_Choice(forms) for forms in combinations)
        if self.tokens:
            yield _Choice()
        if self.tokens and "decoder_input_ids" in self.parameters:
            yield _Choice(repeats=True)

    def resized(self, choice: _Choice, error: Exception) -> Iterator[_Choice]:
        """The same with other sizes: of features to stand for, or of the text.

        They are those that the model's error names and, if it complains of tokens, the rows of the forms
        and quotients of their longest dim.
        """
        numbers = _numbers(error)
        if choice.forms and _is_about_tokens(error):
            shapes = [next(iter(form.tensors.values())).shape for form in choice.forms]
            numbers += [math.prod(shape[:-1]) for shape in shapes]
            numbers += [max(map(max, shapes)) >> k for k in range(6)]
        placed = [form.kind for form in choice.forms if self._place_id(form.kind) is not None]
        for n in numbers if choice.forms and self.tokens else ():
            for kind in placed:
                counted = dict(self._places(choice))
                yield from (
                    replace(choice, places=tuple((counted | {kind: m}).items()))
                    for m in dict.fromkeys((n // self.batch, n))
                    if m and m * self.batch % n == 0
                )
            if not placed and n != self.length:
                yield replace(choice, length=n)

    def inputs(self, choice: _Choice) -> TraceInputs:
        """Tokens and the chosen forms; tokens that stand for what a form gives are put among the others."""
        tensors = {name: t for form in choice.forms for name, t in form.tensors.items()}
        if self.tokens:
            tensors = {**self._token_tensors(self._places(choice), choice.length or self.length), **tensors}
        if choice.repeats:
            self._end(tensors[self.tokens])
            tensors["decoder_input_ids"] = tensors[self.tokens].clone()
        elif "decoder_input_ids" in self.parameters:
            tensors["decoder_input_ids"] = self._ids(self.length - 5, self.seed + 1)
        missing = [
            n
            for n, p in self.parameters.items()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and n not in tensors
        ]
        if missing or not tensors:
            raise self.refusal(missing or self.parameters)
        return TraceInputs(tensors, self._options())

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
            SolveError: it fails, or does not read what a form gives.
        """
        tape = trace(self.model, inputs.tensors, self.keep, inputs.options)
        for form in forms:
            name = next(iter(form.tensors))
            if not _is_read(tape, tape.inputs[list(inputs.tensors).index(name)]):
                raise SolveError(f"{name} is not read")
        return tape

    def _token_parameter(self) -> str:
        """The parameter that takes token ids; empty if there is none."""
        if "input_ids" in self.parameters:
            return "input_ids"
        main: str = getattr(self.model, "main_input_name", "input_ids")
        known = main in (*IMAGES, *SOUNDS, *STATES)
        has_words = first_int(self.config, ("vocab_size",)) > 0
        return main if main in self.parameters and not known and has_words else ""

    # Tokens -----------------------------------------------------------------------------------

    def _token_tensors(self, places: Sequence[tuple[str, int]], length: int) -> dict[str, Tensor]:
        """Ids and what belongs to them: ``length`` of text, and in every row the places of each kind."""
        ids = self._ids(length + sum(count for _, count in places), self.seed)
        types = torch.zeros_like(ids)
        start = _FIRST_PLACE
        for kind, count in places:
            ids[:, start : start + count] = self._place_id(kind) or 0
            types[:, start : start + count] = _TYPE_IDS[kind]
            start += count
        tensors = {self.tokens: ids}
        if "attention_mask" in self.parameters:
            mask = torch.ones(self.batch, ids.shape[1], dtype=torch.long)
            mask[0, :2] = 0
            tensors["attention_mask"] = mask
        if "mm_token_type_ids" in self.parameters:
            tensors["mm_token_type_ids"] = types
        pages = first_int(self.config, ("max_2d_position_embeddings",))
        if "bbox" in self.parameters and pages:
            tensors["bbox"] = self._boxes(ids.shape[1], pages)
        return tensors

    def _ids(self, length: int, seed: int) -> Tensor:
        rows, streams = self._vocabulary()
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(min(3, rows - 1), rows, (self.batch * streams, length), generator=generator)
        for special in self._place_ids():
            ids[ids == special] = min(3, rows - 1)
        return ids

    def _end(self, ids: Tensor) -> None:
        """One end of text in each row, at its end."""
        end = getattr(self.config, "eos_token_id", None)
        if isinstance(end, int):
            ids[ids == end] = end + 1
            ids[:, -1] = end

    def _boxes(self, length: int, pages: int) -> Tensor:
        """Corners ``[B, S, 4]``: left and top, right and bottom."""
        generator = torch.Generator().manual_seed(self.seed)
        corners = torch.randint(0, min(pages, 1000), (self.batch, length, 2, 2), generator=generator)
        return corners.sort(dim=2).values.reshape(self.batch, length, 4)

    def _vocabulary(self) -> tuple[int, int]:
        """Rows of the embedding, and how many streams of ids are stacked in the batch."""
        try:
            table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            table = None  # a model with several towers has no one embedding
        if isinstance(table, (nn.ModuleList, list, tuple)) and len(table):
            return _num_rows(table[0]), len(table)
        rows = _num_rows(table) if self.tokens in ("", "input_ids") else 0
        return rows or first_int(self.config, ("vocab_size",)), 1

    # Places for images and sounds ----------------------------------------------------------------

    def _place_id(self, kind: str) -> int | None:
        names = (f"{kind}_token_id", f"{kind}_token_index")
        found = (getattr(n, name, None) for n in nodes(self.config) for name in names)
        return next((i for i in found if isinstance(i, int)), None)

    def _place_ids(self) -> list[int]:
        kinds = ("image", "video", "audio")
        return [i for kind in kinds if (i := self._place_id(kind)) is not None] if self.config else []

    def _places(self, choice: _Choice) -> tuple[tuple[str, int], ...]:
        """How many tokens of each row stand for what each form gives."""
        if choice.places is not None:
            return choice.places
        counts = ((form.kind, self._num_features(form) // self.batch) for form in choice.forms)
        return tuple((kind, n) for kind, n in counts if n)

    def _num_features(self, form: Form) -> int:
        """Number of features that the model makes of a form: what is in all dims but the last.

        0 if it does not say: it may have no such method, or want more than the form has.
        """
        method = f"get_{form.kind}_features"
        if self._place_id(form.kind) is None or not hasattr(self.model, method):
            return 0
        known = list(inspect.signature(getattr(self.model, method)).parameters)
        tensors = {n: t for n, t in form.tensors.items() if n in known}
        if next(iter(form.tensors)) not in tensors:
            tensors = form.tensors  # the signature is *args, **kwargs
        try:
            tape = trace(_Features(self.model, method), tensors, self.keep)
        except SolveError:
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


def _numbers(error: Exception) -> list[int]:
    """Those in the text of an error that may be sizes, once each."""
    found = map(int, re.findall(r"\b\d+\b", str(error)))
    return [n for n in dict.fromkeys(found) if 0 < n < _LONGEST]


def _is_about_tokens(error: Exception) -> bool:
    return "token" in str(error)


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


def _num_rows(table: Any) -> int:
    weight = getattr(table, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else 0


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Batch and sequence length: unlike each other's multiples and every size of a parameter."""
    taken = {n for p in model.parameters() for n in p.shape}
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int) or longest <= 0:
        longest = 1 << 20
    for length in (24, 26, 22, 21, 27, 19, 17, 23, 29, 15, 13, 11, 14, 10, 9):
        for batch in (3, 5, 7):
            if length < longest and not taken & {length, batch, length * batch, length - 5}:
                return batch, length
    return 3, min(24, int(longest) - 1)
