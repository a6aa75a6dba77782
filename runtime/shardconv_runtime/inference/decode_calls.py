"""A call of ``generate`` as transformers has prepared it, if one graph can decode it step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria

from ..parallel.boundary import CACHE_ARGUMENTS, given_cache
from .decode_state import MOST_STOP_TOKENS
from .sampling import SamplingMode, choice_of

OTHER_WAYS = (
    "custom_generate",
    "assistant_model",
    "assistant_tokenizer",
    "tokenizer",
    "synced_gpus",
    *CACHE_ARGUMENTS,
)
"""Arguments of ``generate`` with which it decodes in another way, or continues a cache of the caller's."""


NOT_OPTIONS = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "trust_remote_code",
    *OTHER_WAYS,
)
"""Arguments of ``generate`` that are not options of its config."""


def options_of(model: Any, arguments: dict[str, Any]) -> Any:
    """Return the generation config of a call of ``model.generate``."""
    arguments_given = {name: value for name, value in arguments.items() if name not in NOT_OPTIONS}
    # Private, but nothing public tells how the arguments and two configs go together.
    options, _ = model._prepare_generation_config(arguments.get("generation_config"), **arguments_given)
    return options


def may_take(arguments: dict[str, Any], options: Any) -> bool:
    """Return whether a call of ``generate`` may be decoded here; more is known once it is prepared."""
    return (
        all(arguments.get(name) is None for name in OTHER_WAYS)
        and options.get_generation_mode(None) in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        and not options.return_dict_in_generate
        and not options.stop_strings
    )


@dataclass(frozen=True)
class Call:
    """A call that can be decoded here.

    Attributes:
        ids: the prompt, int64 ``[rows, n]``; n is 0 if embeddings are given in its place.
        config: the config of the generation.
        arguments: the arguments of the model.
        cache_name: the argument that is the cache; it is empty.
        most_new: tokens to add at most.
        choice: how they are chosen.
        numbers: the numbers of the logits processors.
        pad: id of padding, and ``stop_ids`` that end a row; None if nothing does.
    """

    ids: Tensor
    config: Any
    arguments: dict[str, Any]
    cache_name: str
    most_new: int
    choice: SamplingMode
    numbers: dict[str, float]
    pad: int | Tensor | None
    stop_ids: Tensor | None


def prepared_call(
    ids: Tensor, processors: Any, criteria: Any, config: Any, arguments: dict[str, Any]
) -> Call | None:
    """Return a call as ``generate`` hands it to a decoding method; None if it is decoded in another way."""
    cache_name = given_cache(arguments)
    chosen = choice_of(processors, config.do_sample, ids.shape[-1])
    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    stops = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
    if cache_name is None or chosen is None or len(lengths) + len(stops) != len(criteria):
        return None
    if len(lengths) != 1 or len(stops) > 1 or not arguments.get("use_cache") or ids.dim() != 2:
        return None
    cache = arguments[cache_name]
    if type(cache) not in (DynamicCache, StaticCache) or getattr(cache, "offloading", False):
        return None
    stop_ids = torch.as_tensor(stops[0]).to(ids.device) if stops else None
    if stop_ids is not None and stop_ids.numel() > MOST_STOP_TOKENS:
        return None
    pad = config.pad_token_id
    if pad is None and stop_ids is not None:  # as transformers' own loops
        pad = stop_ids.reshape(-1)[0]
    most_new = lengths[0] - ids.shape[1]
    if most_new < 1:
        return None
    return Call(ids, config, arguments, cache_name, most_new, *chosen, pad, stop_ids)
