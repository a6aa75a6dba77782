"""Calls of a model on meta tensors: a prompt of any length and batch, and one more token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..tracing.identities import META
from ..tracing.inputs import TraceInputs
from ..tracing.tokens import token_parameter

DECODER = "decoder_input_ids"
_LAST_LOGITS = "logits_to_keep"
"""For how many tokens the model computes logits; ``generate`` asks for one."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a call."""

    batch: int
    length: int
    """Tokens of the prompt; of the decoder's, where there is an encoder too."""
    source_length: int = 0
    """Tokens that the encoder reads."""


class Calls:
    """Makes the arguments of calls of one model.

    Args:
        model: its forward method is looked at.
        inputs: with which it was traced.
        with_all: give it all kinds of inputs with which it was traced, not tokens alone.
    """

    def __init__(self, model: nn.Module, inputs: TraceInputs, *, with_all: bool) -> None:
        self.parameters = inspect.signature(model.forward).parameters
        self.tokens = token_parameter(model, self.parameters)
        self.has_decoder = DECODER in self.parameters
        self.has_source = self.has_decoder and bool(self.tokens)
        self._traced = inputs.tensors
        self._with_all = with_all or not self.tokens

    def prompt(self, size: Size) -> dict[str, Any]:
        """Arguments of a prefill as ``generate`` makes it, by keyword; tensors on meta."""
        tensors = self._others(size.batch) if self._with_all else {}
        if self.tokens:
            length = size.source_length if self.has_source else size.length
            tensors[self.tokens] = self._ids(self.tokens, size.batch, length)
        if self.has_decoder:
            tensors[DECODER] = self._ids(DECODER, size.batch, size.length)
        return tensors | self._options()

    def next_token(self, size: Size, cache: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the call that continues a cache by one token."""
        name = DECODER if self.has_decoder else self.tokens
        prompt = self.prompt(size)
        kept = prompt if self.has_decoder else self._options()
        return {**kept, name: self._ids(name, size.batch, 1), **cache}

    def handed_back(self, outputs: Any) -> dict[str, Any]:
        """The outputs that are arguments of the next call: a cache, states."""
        if not isinstance(outputs, Mapping):
            return {}
        return {name: value for name, value in outputs.items() if name in self.parameters}

    def _options(self) -> dict[str, Any]:
        cache = {"use_cache": True} if "use_cache" in self.parameters else {}
        return cache | ({_LAST_LOGITS: 1} if _LAST_LOGITS in self.parameters else {})

    def _ids(self, name: str, batch: int, length: int) -> Tensor:
        """Ids ``[B, S]``; several streams of ids may be stacked in the batch."""
        rows = batch * self._per_row(self._traced.get(name))
        return torch.empty(rows, length, dtype=torch.long, device=META)

    def _others(self, batch: int) -> dict[str, Any]:
        """The inputs of the trace that are not made of tokens, with another batch."""
        tokens = self._traced.get(self.tokens or DECODER)
        found: dict[str, Any] = {}
        for name, tensor in self._traced.items():
            is_like_tokens = tokens is not None and tensor.shape[:2] == tokens.shape[:2]
            if name in (self.tokens, DECODER) or is_like_tokens:
                continue
            rows = self._per_row(tensor) * batch
            found[name] = torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device=META)
        return found

    def _per_row(self, tensor: Tensor | None) -> int:
        """Entries of dim 0 for each sequence of the batch of the trace."""
        batch = next(iter(self._traced.values())).shape[0]
        return 1 if tensor is None or tensor.shape[0] % batch else tensor.shape[0] // batch
