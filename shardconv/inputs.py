"""Inputs for one traced forward pass: real values, of sizes that coincide with nothing else.

What a model takes is read off its forward method and its config. A model that takes tokens alone is given
tokens. For one that takes images or sounds as well, several forms are possible: they are tried, richest
first, and the first with which the forward pass runs is taken. The plan says what had to be left out.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .modalities import IMAGES, SOUNDS, STATES, Form, Maker, first_int, nodes
from .rules import RULES
from .trace import trace

_TYPE_IDS = {"image": 1, "audio": 3}
"""What ``mm_token_type_ids`` says of tokens that stand for an image or a sound."""
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

    def to(self, dtype: torch.dtype) -> TraceInputs:
        """The same in which floating point tensors have this dtype."""
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in self.tensors.items()}
        return replace(self, tensors=tensors)


def make_inputs(model: nn.Module, seed: int = 0) -> TraceInputs:
    """Token ids with a left-padded attention mask, and what else the model's forward asks for.

    Args:
        model: on any device; floating point inputs get the dtype of its parameters.
        seed: other values, and other sizes than those of seed 0, for a second run on numbers.

    Raises:
        SolveError: with nothing that is known how to make does the forward pass run.
    """
    maker = _InputMaker(model, seed)
    choices = list(maker.choices())
    if len(choices) == 1:
        return maker.inputs(choices[0])
    problems: list[tuple[Sequence[Form], Exception]] = []
    for choice in choices:
        try:
            inputs = maker.inputs(choice)
            _run(model, inputs)
        except Exception as error:
            problems.append((choice, error))
        else:
            return replace(inputs, notes=_left_out(choice, problems))
    names = ", ".join(maker.parameters)
    raise SolveError(
        f"{type(model).__name__} could not be called with any inputs that could be made up for its forward "
        f"method ({names}); the last attempt: {problems[-1][1]}"
    ) from problems[-1][1]


class _InputMaker:
    """Makes the inputs of one model for one seed."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model = model
        self.config = getattr(model, "config", None)
        self.parameters = inspect.signature(model.forward).parameters
        self.seed = seed
        self.tokens = self._token_parameter()
        self.batch, self.length = _sizes(model)
        if seed:
            self.batch, self.length = self.batch - 1, self.length - 3

    def choices(self) -> Iterator[tuple[Form, ...]]:
        """Combinations of the forms of what the model takes beside tokens: all kinds, one, none."""
        maker = Maker(list(self.parameters), self.config, self._dtype(), self.batch, self.seed)
        kinds = maker.kinds()
        subsets = [kinds, *([k] for k in kinds if len(kinds) > 1)]
        for subset in subsets if kinds else ():
            yield from itertools.product(*(list(maker.forms(kind)) for kind in subset))
        if self.tokens:
            yield ()

    def inputs(self, forms: Sequence[Form]) -> TraceInputs:
        """Tokens and these forms; tokens that stand for what a form gives are put among the others."""
        tensors = {name: t for form in forms for name, t in form.tensors.items()}
        counts = {form.kind: n for form in forms if (n := self._num_places(form))}
        if self.tokens:
            tensors = {**self._token_tensors(counts), **tensors}
        if "decoder_input_ids" in self.parameters:
            tensors["decoder_input_ids"] = self._ids(self.length - 5, self.seed + 1)
        missing = [
            n
            for n, p in self.parameters.items()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and n not in tensors
        ]
        if missing or not tensors:
            raise SolveError(
                f"{type(self.model).__name__} takes {', '.join(missing or self.parameters)}, which cannot be "
                "made up; models that are called with token ids, images or sounds can be converted so far"
            )
        return TraceInputs(tensors, {"use_cache": False} if "use_cache" in self.parameters else {})

    def _token_parameter(self) -> str:
        """The parameter that takes token ids; empty if there is none."""
        if "input_ids" in self.parameters:
            return "input_ids"
        main: str = getattr(self.model, "main_input_name", "input_ids")
        known = main in (*IMAGES, *SOUNDS, *STATES)
        has_words = first_int(self.config, ("vocab_size",)) > 0
        return main if main in self.parameters and not known and has_words else ""

    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    # Tokens -----------------------------------------------------------------------------------

    def _token_tensors(self, counts: dict[str, int]) -> dict[str, Tensor]:
        """Ids and what belongs to them, with ``counts`` places for each kind in every row."""
        ids = self._ids(self.length + sum(counts.values()), self.seed)
        types = torch.zeros_like(ids)
        start = _FIRST_PLACE
        for kind, count in counts.items():
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

    def _num_places(self, form: Form) -> int:
        """How many tokens of each row stand for what this form gives: as many as there are features."""
        method = f"get_{form.kind}_features"
        if self._place_id(form.kind) is None or not hasattr(self.model, method):
            return 0
        rows = _num_features(self.model, method, form.tensors)
        if rows % self.batch:
            raise SolveError(f"{method} gives {rows} features for {self.batch} rows")
        return rows // self.batch


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


def _num_features(model: nn.Module, method: str, tensors: dict[str, Tensor]) -> int:
    """Number of features: what is in all dims but the last."""
    parameters = inspect.signature(getattr(model, method)).parameters
    known = {n: t for n, t in tensors.items() if n in parameters}
    shapes = _output_shapes(_Features(model, method), TraceInputs(known, {}))
    return sum(math.prod(shape[:-1]) for shape in shapes)


def _run(model: nn.Module, inputs: TraceInputs) -> None:
    """Run the forward pass, for its errors."""
    _output_shapes(model, inputs)


def _output_shapes(model: nn.Module, inputs: TraceInputs) -> list[tuple[int, ...]]:
    if any(p.is_meta for p in model.parameters()):
        tape = trace(model, inputs.tensors, RULES, inputs.options)
        return [tape.tensors[t].shape for t in tape.outputs]
    with torch.no_grad():
        outputs = model(**inputs.tensors, **inputs.options)
    return [tuple(t.shape) for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]


def _left_out(
    choice: Sequence[Form], problems: Sequence[tuple[Sequence[Form], Exception]]
) -> tuple[str, ...]:
    """Which inputs others than the chosen ones would have been given."""
    given = {name for form in choice for name in form.tensors}
    kinds = {form.kind for form in choice}
    out: dict[str, Exception] = {}
    for forms, error in problems:
        for form in forms:
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
