"""Make the inputs of a model that its forward method takes, from names and sizes."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from shardconv_runtime.training.sequence import FLAT_OUTPUTS
from torch import Tensor, nn

from ..tracing.tape import Mark, Tape
from ..tracing.trace import trace
from .config_sizes import ImageSizes, first_int, nodes
from .example_inputs import required_arguments
from .input_forms import (
    FORMED,
    IMAGES,
    PATCH_MASK,
    Asked,
    InputForm,
    Once,
    combined,
    free_sizes,
    is_about_tokens,
    needed_count,
    needed_mask,
    needed_multiple,
    needed_width,
    numbers,
    release,
)
from .modalities import FormMaker
from .tokens import TokenMaker, token_parameter

EXTRA_OUTPUTS = FLAT_OUTPUTS
"""Arguments that ask for further outputs, which losses are computed from."""
DECODER_IDS = "decoder_input_ids"
_NUM_PLACEHOLDERS = (
    "num_query_tokens",
    "latent_query_num",
    "mm_tokens_per_image",
    "num_image_tokens",
    "image_seq_length",
    "image_seq_len",
)
"""Names of the number of tokens of an image in configs."""
_UNKNOWN_WIDTH = 37
"""Width of an unknown input, until the first matrix product shows which one it needs."""


class NotReadError(SolveError):
    """The forward pass runs without reading an input."""


@dataclass(frozen=True, slots=True)
class InputChoice:
    """A choice of inputs."""

    forms: tuple[InputForm, ...] = ()
    placeholders: tuple[tuple[str, int], ...] = ()
    """(kind of input, placeholders in each row)."""
    length: int | None = None
    """Length of the text; None for any."""
    repeats: bool = False
    """Give the decoder the same ids, with an end of text. Some heads look for it."""
    alternatives: int = 0
    """Number of texts in each row among which the model chooses; 0 for one text and no dim for it."""
    streams: int = 0
    """Ids at each generated position, such as the codes of a sound; 0 for one id and no dim for it."""
    widths: tuple[tuple[str, int], ...] = ()
    """(parameter, size of its last dim), if the model's layers showed it."""


@dataclass(frozen=True)
class CallForm:
    """How a model is called, whatever its inputs."""

    keep: Collection[str]
    """Operators that a trace does not decompose."""
    seed: int = 0
    multiple: int = 1
    """A number that divides the length."""
    batch: int = 0
    """The batch size; 0 for one that is no other size of the model."""
    cache: bool = True
    extras: Collection[str] = EXTRA_OUTPUTS
    """Outputs to ask for besides the usual ones, if the model knows them."""
    experts: int = 0
    """Number of experts that a call must reach; 0 for few."""
    offers_states: bool = False
    """Give states of an encoder to a model that can do without."""


class InputMaker:
    """Make the inputs of one model, or take those of an example."""

    def __init__(
        self,
        model: nn.Module,
        form: CallForm,
        example: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
    ) -> None:
        seed, multiple, experts = form.seed, form.multiple, form.experts
        self.model = model
        self.keep = form.keep
        self.config = getattr(model, "config", None)
        self.parameters = inspect.signature(model.forward).parameters
        self.example = example
        """Tensors and other arguments from the user. Nothing else is made then."""
        self.cache = form.cache and "use_cache" in self.parameters
        # The model must know an argument that asks for more outputs.
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        extras = form.extras if takes_any else [name for name in form.extras if name in self.parameters]
        self.extras = tuple(name for name in extras if any(hasattr(n, name) for n in nodes(self.config)))
        self.seed = seed
        self.few_chosen = not experts
        self.offers_states = form.offers_states
        self.tokens = token_parameter(model, self.parameters)
        self.multiple = multiple
        self.batch, self.length = free_sizes(model, multiple, experts)
        if seed:
            self.batch, self.length = self.batch - 1, self.length - 3
        self.batch = form.batch or self.batch
        self.token_maker = TokenMaker(model, self.parameters, self.tokens, self.batch, seed)

    def choices(self) -> Iterator[InputChoice]:
        """Yield combinations of the forms of inputs other than tokens: first of all kinds, then of one kind.

        The number of placeholders is the number of features that the model computes from a form.
        """
        if self.example is not None:
            yield InputChoice()
            return
        maker = self._form_maker
        kinds = maker.kinds()
        forms = {k: Once(_CountedForm(self, form) for form in maker.forms(k)) for k in kinds}
        subsets = [kinds, *([k] for k in kinds if len(kinds) > 1)]
        for subset in subsets if kinds else ():
            for counted in combined([forms[kind] for kind in subset]):
                placeholders = tuple((c.form.kind, c.placeholders) for c in counted if c.placeholders)
                yield InputChoice(tuple(c.form for c in counted), placeholders)

    @cached_property
    def _form_maker(self) -> FormMaker:
        sizes = {n for p in self.model.parameters() for n in p.shape}
        call = list(self.parameters), self.config, _dtype(self.model), self.batch, self.seed
        return FormMaker(Asked(*call, sizes, self.offers_states))

    def plain_choices(self) -> list[InputChoice]:
        """Return the choices without forms, if the model can be called without."""
        if self.example is not None:
            return []
        required = self._required(())
        needs_forms = any(name in required for name in FORMED)
        if needs_forms or not (self.tokens or required):
            return []
        has_decoder = self.tokens and DECODER_IDS in self.parameters
        repeated = [InputChoice(repeats=True)] if has_decoder else []
        return [InputChoice(), *repeated, *([InputChoice(alternatives=2)] if self.tokens else [])]

    def resized(self, choice: InputChoice, error: Exception) -> Iterator[InputChoice]:
        """Yield the choice with other sizes: numbers of placeholders, lengths of the text, ids at each
        position.

        The sizes are named by the model's error. If it is about tokens, the rows of the forms and quotients
        of their longest dim are tried as well. If it names one number twice, nothing is tried: there are as
        many tokens as features, and only the width is wrong. If it names the number of an image's patches,
        other images come first.
        """
        if self.example is not None:
            return
        sizes = numbers(error)
        for form in choice.forms if len(choice.forms) == 1 else ():
            for other in self._form_maker.resized(form, sizes):
                count = self.num_placeholders(other)
                yield replace(choice, forms=(other,), placeholders=((form.kind, count),) if count else ())
        if choice.forms and is_about_tokens(error) and len(sizes) == 1 < str(error).count(str(sizes[0])):
            return
        if any(needed_count(error, n * self.batch) is not None for _, n in choice.placeholders):
            return  # the error names the right number
        if self.tokens and not choice.forms and not choice.repeats and not choice.alternatives:
            own_shape = (1, self.batch, self.length)
            yield from (replace(choice, streams=n) for n in sizes if n not in own_shape)
        if choice.forms and is_about_tokens(error):
            shapes = [next(iter(form.tensors.values())).shape for form in choice.forms]
            sizes += [math.prod(shape[:-1]) for shape in shapes]
            sizes += [max(map(max, shapes)) >> k for k in range(6)]
        with_placeholders = [
            form.kind for form in choice.forms if self.token_maker.has_placeholders(form.kind)
        ]
        for n in sizes if choice.forms and self.tokens else ():
            for kind in with_placeholders:
                counted = dict(choice.placeholders)
                yield from (
                    replace(choice, placeholders=tuple((counted | {kind: m}).items()))
                    for m in dict.fromkeys((n // self.batch, n))
                    if m and m * self.batch % n == 0
                )
            if not with_placeholders and n != self.length:
                yield replace(choice, length=n)

    def widened(self, choice: InputChoice, error: Exception, of_forms: bool) -> InputChoice | None:
        """Return the choice with an input of the width that the model's error asks for, or None."""
        try:
            tensors = self.tensors(choice)
        except SolveError:
            return None  # there are no tensors for this choice
        formed = {name for form in choice.forms for name in form.tensors} - {n for n, _ in choice.widths}
        unknown = set(self.unknown(choice)) - {n for n, _ in choice.widths}
        names = formed if of_forms else unknown
        width = needed_width(error, {n: t for n, t in tensors.items() if n in names})
        return None if width is None else replace(choice, widths=(*choice.widths, width))

    def counted(self, choice: InputChoice, error: Exception) -> InputChoice | None:
        """Return the choice with the number of placeholders that the model's error asks for.

        Code may look for the first placeholder before it reads an input. Then it gets one.

        None if the error does not name the number, or not all rows can have the same number.
        """
        if isinstance(error, NotReadError):
            kinds = [form.kind for form in choice.forms if self.token_maker.has_placeholders(form.kind)]
            more = {kind: 1 for kind in kinds if self.tokens and not dict(choice.placeholders).get(kind)}
            return replace(choice, placeholders=(*choice.placeholders, *more.items())) if more else None
        for form in choice.forms if self.tokens else ():
            count = dict(choice.placeholders).get(form.kind, 0)
            needed = needed_count(error, count * self.batch)
            if needed and needed % self.batch == 0 and self.token_maker.has_placeholders(form.kind):
                counts = dict(choice.placeholders) | {form.kind: needed // self.batch}
                return replace(choice, placeholders=tuple(counts.items()))
        return None

    def lengthened(self, choice: InputChoice, error: Exception) -> InputChoice | None:
        """Return the choice with a form of the length that the model's error asks for, or None."""
        formed = {name: t for form in choice.forms for name, t in form.tensors.items()}
        free = {n: t for n, t in formed.items() if n not in dict(choice.widths)}
        mask = needed_mask(error, free)
        if mask is not None:
            return replace(choice, widths=(*choice.widths, mask))
        needed = needed_multiple(error, free)
        if needed is None:
            return None
        names, multiple = needed
        sizes = {n for p in self.model.parameters() for n in p.shape}
        shortest = max(2, *(-(-formed[name].shape[-1] // multiple) for name in names))
        length = multiple * next(n for n in itertools.count(shortest) if not {n, n * multiple} & sizes)
        return replace(choice, widths=(*choice.widths, *((name, length) for name in names)))

    def tensors(self, choice: InputChoice) -> dict[str, Tensor]:
        """Return tokens with placeholders for the chosen forms, the forms, and other required tensors."""
        tensors = self._known(choice)
        if PATCH_MASK in self._required(tensors):
            tensors |= self.patch_mask(tensors)
        for name in self._required(tensors):  # nothing is known of these except that they are tensors
            annotation = self.parameters[name].annotation
            is_tensor = annotation is inspect.Parameter.empty or "Tensor" in str(annotation)
            if name in FORMED or not is_tensor:
                raise self.refusal([name])
            tensors[name] = self._random(self.batch, _UNKNOWN_WIDTH)
        if not tensors:
            raise self.refusal(self.parameters)
        for name, width in choice.widths:  # cut the last dim, or add random numbers, or ones to a mask
            tensor = tensors[name]
            missing = *tensor.shape[:-1], max(0, width - tensor.shape[-1])
            more = self._random(*missing) if tensor.is_floating_point() else tensor.new_ones(missing)
            tensors[name] = torch.cat([tensor, more], dim=-1)[..., :width]
        return tensors

    def patch_mask(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a mask of patches of images ``[B, C, H, W]`` or of videos ``[B, T, C, H, W]``, if the model
        takes one that is not among the tensors.

        All rows mask the same number of patches, as code expects that takes the others apart.
        """
        pixels = next((tensors[name] for name in IMAGES if name in tensors), None)
        if PATCH_MASK not in self.parameters or PATCH_MASK in tensors or pixels is None:
            return {}
        if pixels.dim() not in (4, 5):
            return {}
        image = ImageSizes.of(self.config)
        count = math.prod(n // p for n, p in zip(pixels.shape[-2:], image.patch, strict=True))
        if pixels.dim() == 5:
            frames = first_int(self.config, ("tubelet_size",)) or image.patch_frames
            count *= pixels.shape[1] // frames
        generator = torch.Generator().manual_seed(self.seed)
        rows = [torch.randperm(count, generator=generator) < (count + 1) // 2 for _ in range(pixels.shape[0])]
        return {PATCH_MASK: torch.stack(rows)}

    def unknown(self, choice: InputChoice) -> list[str]:
        """Return the required parameters of which nothing is known except that they are tensors."""
        return self._required(self._known(choice))

    def _known(self, choice: InputChoice) -> dict[str, Tensor]:
        if self.example is not None:
            return dict(self.example[0])
        tensors = {name: t for form in choice.forms for name, t in form.tensors.items()}
        if self.tokens:
            # With the placeholders, the number of tokens is a multiple.
            num_placeholders = sum(count for _, count in choice.placeholders)
            length = choice.length or self.length + -(self.length + num_placeholders) % self.multiple
            tensors = {**self.token_maker.tensors(choice.placeholders, length), **tensors}
            for form in choice.forms:
                tensors |= self.token_maker.seen(form, tensors[self.tokens])
        if choice.alternatives:
            shifts = range(choice.alternatives)
            tensors = {n: torch.stack([t.roll(k, 0) for k in shifts], 1) for n, t in tensors.items()}
        if choice.repeats:
            self.token_maker.end(tensors[self.tokens])
            tensors[DECODER_IDS] = self.token_maker.within_decoder(tensors[self.tokens].clone())
        elif DECODER_IDS in self.parameters:
            ids = self.token_maker.ids(self._decoder_length(), self.seed + 1)
            tensors[DECODER_IDS] = self.token_maker.within_decoder(ids)
        if choice.streams:
            generated = DECODER_IDS if DECODER_IDS in self.parameters else self.tokens
            length = tensors[generated].shape[1]
            tensors[generated] = self.token_maker.codes(length, choice.streams, self.seed)
        return tensors | self._other_ids(self.parameters, tensors)

    def _required(self, given: Collection[str]) -> list[str]:
        """Return the parameters that the model cannot be called without, except the given ones."""
        return required_arguments(self.parameters, given)

    def _other_ids(
        self, parameters: Mapping[str, inspect.Parameter], given: Collection[str]
    ) -> dict[str, Tensor]:
        """Return ids for required parameters that are named as ids of a part of the model."""
        names = [n for n in required_arguments(parameters, given) if n.endswith("_input_ids")]
        return {n: self.token_maker.ids_of_part(n, self._decoder_length()) for n in names}

    def _random(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(shape, generator=generator).to(_dtype(self.model))

    def _decoder_length(self) -> int:
        """Return another length than the text's, which is also a multiple."""
        shorter = self.length - max(self.multiple, 5 - 5 % self.multiple)
        return shorter if shorter > 0 else self.length + self.multiple

    def options(self) -> dict[str, Any]:
        """Return the options. They ask for a cache, since its sizes may depend on attributes that no other
        code reads."""
        cache = {"use_cache": self.cache} if "use_cache" in self.parameters else {}
        example_options = self.example[1] if self.example is not None else {}
        return cache | dict.fromkeys(self.extras, True) | example_options

    def refusal(self, names: Iterable[str]) -> SolveError:
        """Return the error that nothing is known of these parameters, or that the model has no forward
        method."""
        name = type(self.model).__name__
        if type(self.model).forward is nn.Module.forward:
            parts = [f"{n} ({type(m).__name__})" for n, m in self.model.named_children()]
            return SolveError(
                f"{name} has no forward method; save one of the models in it with save_pretrained and "
                f"convert that: {', '.join(parts)}"
            )
        return SolveError(
            f"{name} takes {', '.join(names)}, which cannot be made up; give an example of a call with "
            "--example-inputs FILE (example_inputs=)"
        )

    def run(self, tensors: Mapping[str, Tensor], forms: Sequence[InputForm], on_numbers: bool) -> Tape:
        """Trace the forward pass."""
        tape = trace(self.model, tensors, self.keep, self.options(), None, on_numbers, self.few_chosen)
        for form in forms:
            name = next(iter(form.tensors))
            if not _is_read(tape, tape.inputs[list(tensors).index(name)]):
                raise NotReadError(f"{name} is not read")
        return tape

    def num_placeholders(self, form: InputForm) -> int:
        """Return the number in each row, from the model or its config; 0 if it is unknown."""
        if not self.token_maker.has_placeholders(form.kind):
            return 0
        features = self._num_features(form) // self.batch
        return features or (
            first_int(self.config, _NUM_PLACEHOLDERS) if form.kind in ("image", "video") else 0
        )

    def _num_features(self, form: InputForm) -> int:
        """Return the number of features that the model computes from a form: the product of all dims except
        the last.

        0 if it is unknown: the model may lack such a method, or need more than the form has.
        """
        kinds = (form.kind, "video") if form.kind == "image" else (form.kind,)
        methods = ((m, f"get_{k}_features") for k in kinds for m in self.model.modules())
        part, method = next(((m, name) for m, name in methods if hasattr(m, name)), (self.model, ""))
        if not method:
            return 0
        parameters = inspect.signature(getattr(part, method)).parameters
        tensors = {n: t for n, t in form.tensors.items() if n in parameters}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        first = [tensors] if next(iter(form.tensors)) in tensors else []
        for arguments in [*first, *([dict(form.tensors)] if takes_any and first != [form.tensors] else [])]:
            try:
                tape = trace(
                    _Features(part, method), arguments | self._other_ids(parameters, arguments), self.keep
                )
                return sum(math.prod(tape.tensors[t].shape[:-1]) for t in tape.outputs)
            except SolveError as error:
                release(error)
        return 0


@dataclass(frozen=True)
class _CountedForm:
    """A form, and the number of its placeholders in each row, which is computed on demand."""

    maker: InputMaker
    form: InputForm

    @cached_property
    def placeholders(self) -> int:
        """Return the number of placeholders; 0 if it is unknown."""
        return self.maker.num_placeholders(self.form)


class _Features(nn.Module):
    """A method that computes features from images or sounds, as a module."""

    def __init__(self, part: nn.Module, method: str) -> None:
        super().__init__()
        self.part = part
        self.method = method

    def forward(self, **tensors: Tensor) -> Any:
        result = getattr(self.part, self.method)(**tensors)
        features = getattr(result, "pooler_output", None)
        return result if features is None else features


def _is_read(tape: Tape, tid: int) -> bool:
    """Return whether any operator reads a tensor."""
    names = {tid}
    for event in tape.events:
        if isinstance(event, Mark):
            names |= {event.target} if event.source in names else set()
        elif names & set(event.inputs):
            return True
    return False


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
