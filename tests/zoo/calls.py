"""Ways of calling a loaded model, as a table: each a small function that gives what is to be compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import shardconv_runtime
import torch
from shardconv_runtime.errors import PlanError, ShardconvError
from shardconv_runtime.loaded import loaded
from shardconv_runtime.parallel.boundary import forward_signature
from torch import Tensor
from torch.utils import _pytree
from transformers.modeling_outputs import BaseModelOutput

from shardconv.tracing.trace import results

NEW_TOKENS = 4
DECODER_IDS = "decoder_input_ids"


class NotApplicable(Exception):
    """The unsharded model has no such call."""


@dataclass(frozen=True)
class Given:
    """What a model is called with; the same tensors for the unsharded one and for all ranks."""

    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]
    embeds: Tensor | None = None
    """Random, in place of ``input_ids``: ``[B, S, H]``."""
    decoder_embeds: Tensor | None = None
    """The same in place of ``decoder_input_ids``."""
    encoded: Tensor | None = None
    """What the unsharded encoder makes of the ids."""

    @property
    def ids(self) -> Tensor:
        """Ids ``[B, S]``."""
        return self.tensors["input_ids"]

    @property
    def mask(self) -> Tensor:
        """Mask ``[B, S]`` of the tokens, all ones where the model is called without."""
        given = self.tensors.get("attention_mask")
        return torch.ones(self.ids.shape[:2], dtype=torch.long) if given is None else given

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the decoder has ids of its own."""
        return DECODER_IDS in self.tensors


Form = Callable[[Any, Given], list[Tensor]]
"""A call of a model, unsharded or of one rank -> the tensors that a user sees."""


def make_given(model: Any, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> Given:
    """Complete the inputs of an unsharded model by embeddings and by what its encoder returns."""
    given = Given(tensors, options)
    rng = torch.Generator().manual_seed(5)

    def noise(part: Any, ids: Tensor) -> Tensor:
        made: Tensor = part.get_input_embeddings()(ids)
        return torch.randn(made.shape, generator=rng, dtype=torch.float64).to(made.dtype)

    def attempt(make: Callable[[], Tensor]) -> Tensor | None:
        try:
            return make().detach()
        except Exception:  # models without one say so in ways of their own
            return None

    if "input_ids" not in tensors:
        return given
    given = replace(given, embeds=attempt(lambda: noise(model, given.ids)))
    if not given.is_encoder_decoder:
        return given
    return replace(
        given,
        decoder_embeds=attempt(lambda: noise(model.get_decoder(), tensors[DECODER_IDS])),
        encoded=attempt(lambda: _encode(model, given)),
    )


# Calls -------------------------------------------------------------------------------------------


def call(model: Any, given: Given, **changes: Any) -> list[Tensor]:
    """Call the model with its inputs, of which those in ``changes`` are others, or left out (None)."""
    arguments = {**given.tensors, **given.options, **changes}
    return results(model, model(**{n: v for n, v in arguments.items() if v is not None}))


def _takes(model: Any, *names: str) -> None:
    missing = set(names) - forward_signature(model).parameters.keys()
    if missing:
        raise NotApplicable(f"forward has no {', '.join(sorted(missing))}")


def _has(value: Tensor | None, what: str) -> Tensor:
    if value is None:
        raise NotApplicable(f"no {what}")
    return value.clone()


def _ids(given: Given) -> Tensor:
    return _has(given.tensors.get("input_ids"), "ids")


def _inputs_embeds(model: Any, given: Given) -> list[Tensor]:
    _takes(model, "inputs_embeds")
    return call(model, given, input_ids=None, inputs_embeds=_has(given.embeds, "embedding"))


def _own_embeds(model: Any, given: Given) -> list[Tensor]:
    _takes(model, "inputs_embeds")
    return call(model, given, input_ids=None, inputs_embeds=model.get_input_embeddings()(_ids(given)))


def _decoder_inputs_embeds(model: Any, given: Given) -> list[Tensor]:
    _takes(model, "decoder_inputs_embeds")
    embeds = _has(given.decoder_embeds, "embedding of the decoder")
    return call(model, given, **{DECODER_IDS: None, "decoder_inputs_embeds": embeds})


def _encoder_outputs(model: Any, given: Given) -> list[Tensor]:
    _takes(model, "encoder_outputs")
    encoded = BaseModelOutput(last_hidden_state=_has(given.encoded, "encoder"))
    return call(model, given, input_ids=None, encoder_outputs=encoded)


def _encode(model: Any, given: Given) -> Tensor:
    encoded: Tensor = model.get_encoder()(input_ids=given.ids, attention_mask=given.mask)[0]
    return encoded


def _encoder(model: Any, given: Given) -> list[Tensor]:
    _has(given.encoded, "encoder")
    return [_encode(model, given)]


def _hidden_states(model: Any, given: Given) -> list[Tensor]:
    return call(model, given, output_hidden_states=True, return_dict=True)


def _attentions(model: Any, given: Given) -> list[Tensor]:
    return _attention("eager")(model, replace(given, options={**given.options, "output_attentions": True}))


def _embedding(model: Any, given: Given) -> list[Tensor]:
    _has(given.embeds, "embedding")
    return [model.get_input_embeddings()(_ids(given))]


def _base_model(model: Any, given: Given) -> list[Tensor]:
    base = model.base_model
    if base is model:
        raise NotApplicable("the model is its own base model")
    return call(base, replace(given, options={}))


def _tuple(model: Any, given: Given) -> list[Tensor]:
    options = {"use_cache": False} if "use_cache" in given.options else {}
    found = model(**given.tensors, **{**given.options, **options}, return_dict=False)
    return [t for t in _pytree.tree_leaves(found) if isinstance(t, Tensor)]


def _positional(model: Any, given: Given) -> list[Tensor]:
    if next(iter(forward_signature(model).parameters)) != "input_ids":
        raise NotApplicable("ids are not the first argument")
    rest = {n: v for n, v in {**given.tensors, **given.options}.items() if n != "input_ids"}
    return results(model, model(_ids(given), **rest))


def _mask_4d(model: Any, given: Given) -> list[Tensor]:
    _takes(model, "attention_mask")
    batch, length = _ids(given).shape[:2]
    rng = torch.Generator().manual_seed(3)
    seen = torch.rand(batch, 1, length, length, generator=rng) < 0.7
    seen = (seen | torch.eye(length, dtype=torch.bool)).tril()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return call(model, given, attention_mask=mask)


def _position_ids(model: Any, given: Given) -> list[Tensor]:
    _takes(model, "position_ids")
    ids = _ids(given)
    positions = torch.arange(2, 2 + ids.shape[1]).expand(ids.shape[:2]).clone()
    positions[-1] += 1
    return call(model, given, position_ids=positions)


def _padded(side: slice) -> Form:
    def padded(model: Any, given: Given) -> list[Tensor]:
        _takes(model, "attention_mask")
        mask = torch.ones(_ids(given).shape[:2], dtype=torch.long)
        mask[-1, side] = 0
        return call(model, given, attention_mask=mask)

    return padded


def _no_mask(model: Any, given: Given) -> list[Tensor]:
    return call(model, given, attention_mask=None)


def _one_row(model: Any, given: Given) -> list[Tensor]:
    tensors = {n: t[-1:] for n, t in given.tensors.items()}
    return call(model, replace(given, tensors=tensors))


def _labels(model: Any, given: Given) -> list[Tensor]:
    _takes(model, "labels")
    labels = given.tensors.get(DECODER_IDS, given.tensors.get("input_ids"))
    labels = _has(labels, "ids")
    labels[:, ::5] = -100
    return call(model, given, labels=labels)


def _last_logits(model: Any, given: Given) -> list[Tensor]:
    _takes(model, "logits_to_keep")
    return call(model, given, logits_to_keep=1)


def _attention(name: str) -> Form:
    """Another implementation of attention, chosen after the model was loaded: in a copy, since a model whose
    parts do not all support it is left between two."""

    def other(model: Any, given: Given) -> list[Tensor]:
        changed = copy.deepcopy(model)
        changed.set_attn_implementation(name)
        if changed.config._attn_implementation != name:
            raise NotApplicable(f"attention cannot be {name}")
        with torch.compiler.set_stance("force_eager"):  # flex attention compiles itself
            return call(changed, given)

    return other


def _cast(dtype: torch.dtype) -> Form:
    def cast(model: Any, given: Given) -> list[Tensor]:
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in given.tensors.items()}
        return call(copy.deepcopy(model).to(dtype), replace(given, tensors=tensors))

    return cast


# Generating --------------------------------------------------------------------------------------


def _decode_loop(model: Any, given: Given) -> list[Tensor]:
    """A prefill and three steps, written by hand."""
    names = forward_signature(model).parameters
    _takes(model, "use_cache")
    mask, logits = given.mask, []
    arguments: dict[str, Any] = dict(given.tensors)
    if given.is_encoder_decoder:
        fixed = {"encoder_outputs": model.get_encoder()(input_ids=given.ids, attention_mask=mask)}
        arguments = {"attention_mask": mask, DECODER_IDS: given.tensors[DECODER_IDS][:, :1], **fixed}
    for _ in range(NEW_TOKENS):
        output = model(**arguments, use_cache=True, return_dict=True)
        logits.append(output.logits)
        token = output.logits[:, -1:].argmax(-1)
        state = {n: v for n, v in output.items() if n in names and v is not None}
        if not state:
            raise NotApplicable("no cache is returned")
        if given.is_encoder_decoder:
            arguments = {"attention_mask": mask, DECODER_IDS: token, **fixed, **state}
        else:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            arguments = {"input_ids": token, "attention_mask": mask, **state}
            arguments = {n: v for n, v in arguments.items() if n in names}
    return logits


def _generate(model: Any, given: Given, **options: Any) -> list[Tensor]:
    if not model.can_generate():
        raise NotApplicable("the class does not generate")
    inputs = {n: t for n, t in given.tensors.items() if n != DECODER_IDS} | options
    start = {"decoder_start_token_id": 1} if given.is_encoder_decoder else {}
    tokens = model.generate(
        **{n: v for n, v in inputs.items() if v is not None},
        **start,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        disable_compile=True,
        pad_token_id=0,
    )
    return [tokens]


def _generate_greedily(model: Any, given: Given) -> list[Tensor]:
    return _generate(model, given, do_sample=False)


def _generate_beams(model: Any, given: Given) -> list[Tensor]:
    return _generate(model, given, do_sample=False, num_beams=2)


def _sample(model: Any, given: Given) -> list[Tensor]:
    torch.manual_seed(11)
    return _generate(model, given, do_sample=True, top_k=20)


def _generate_from_embeds(model: Any, given: Given) -> list[Tensor]:
    embeds = _has(given.embeds, "embedding")
    return _generate(model, given, do_sample=False, input_ids=None, inputs_embeds=embeds)


# What a check of the unsharded model refuses, and what users and trainers add ------------------------


def _ids_are_refused(token: Callable[[int], int]) -> Form:
    """Ids that the table lacks: 1 for an error, of whatever kind, else 0."""

    def outside(model: Any, given: Given) -> list[Tensor]:
        ids = _ids(given)
        _has(given.embeds, "embedding")
        ids.view(-1)[-1] = token(model.get_input_embeddings().num_embeddings)
        try:
            call(model, given, input_ids=ids)
        except (IndexError, RuntimeError, ShardconvError):
            return [torch.ones(1)]
        return [torch.zeros(1)]

    return outside


def _hook_on_embedding(model: Any, given: Given) -> list[Tensor]:
    """Noise that is added by a hook, as trainers install it; all outputs are compared."""
    _has(given.embeds, "embedding")
    with noisy_embeddings(model):
        return call(model, given)


@contextmanager
def noisy_embeddings(model: Any) -> Iterator[None]:
    """With a hook that adds noise to the embeddings, as NEFTune; the same noise in each call."""

    def add_noise(module: Any, args: Any, output: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(9)
        return output + torch.randn(output.shape, generator=rng, dtype=torch.float64).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


def _packed_positions(model: Any, given: Given) -> list[Tensor]:
    """Samples behind each other in a row, told by their positions."""
    _takes(model, "position_ids", "use_cache")
    ids = _ids(given)
    half = ids.shape[1] // 2
    positions = torch.cat([torch.arange(half), torch.arange(ids.shape[1] - half)]).expand(ids.shape[:2])
    return call(model, given, position_ids=positions.clone(), attention_mask=None, use_cache=False)


class _Kept:
    """A streamer that keeps the tokens, and whether they ended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def _streamer(model: Any, given: Given) -> list[Tensor]:
    streamer = _Kept()
    first = replace(given, tensors={n: t[:1] for n, t in given.tensors.items()})
    _generate(model, first, do_sample=False, streamer=streamer)
    return [torch.tensor(streamer.tokens)]


def _kept_dtypes(model: Any, given: Given) -> list[Tensor]:
    """The dtype of each parameter of the same model, loaded in bfloat16."""
    try:
        directory = loaded(model).directory
    except PlanError:  # the unsharded model
        other = type(model).from_pretrained(model.config._name_or_path, dtype=torch.bfloat16)
    else:
        other = shardconv_runtime.load(directory, dtype=torch.bfloat16, device="cpu")
    found = sorted((name, parameter.dtype.itemsize) for name, parameter in other.named_parameters())
    return [torch.tensor([size for _, size in found])]


CASTS: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Forms that are compared with a tolerance of their dtype."""

PLAIN = ("kept dtypes",)
"""Forms in which another model is loaded, in its own dtypes."""

FORMS: Mapping[str, Form] = {
    "float64": call,
    "float32": _cast(torch.float32),
    "bfloat16": _cast(torch.bfloat16),
    "positional": _positional,
    "return_dict=False": _tuple,
    "inputs_embeds": _inputs_embeds,
    "own inputs_embeds": _own_embeds,
    "decoder_inputs_embeds": _decoder_inputs_embeds,
    "encoder": _encoder,
    "encoder_outputs": _encoder_outputs,
    "output_hidden_states": _hidden_states,
    "output_attentions": _attentions,
    "embedding": _embedding,
    "base_model": _base_model,
    "no mask": _no_mask,
    "padding left": _padded(slice(None, 3)),
    "padding right": _padded(slice(-3, None)),
    "4-D mask": _mask_4d,
    "position_ids": _position_ids,
    "one row": _one_row,
    "labels": _labels,
    "logits_to_keep": _last_logits,
    "eager": _attention("eager"),
    "sdpa": _attention("sdpa"),
    "flex": _attention("flex_attention"),
    "decode loop": _decode_loop,
    "generate": _generate_greedily,
    "generate, sampled": _sample,
    "generate, beams": _generate_beams,
    "generate, inputs_embeds": _generate_from_embeds,
    "ids beyond the table": _ids_are_refused(lambda rows: rows),
    "negative ids": _ids_are_refused(lambda rows: -1),
    "hook on embedding": _hook_on_embedding,
    "packed positions": _packed_positions,
    "streamer": _streamer,
    "kept dtypes": _kept_dtypes,
    "float64 again": call,
}
"""What the page calls a form -> the form. The first and the last are the same: no call may leave anything."""
