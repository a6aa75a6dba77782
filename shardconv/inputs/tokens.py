"""Make token ids to call a model with, and the masks and boxes that belong to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config_sizes import first_int, nodes
from .input_forms import IMAGES, SOUNDS, STATES, VIDEOS, InputForm

_TYPE_IDS = {"image": 1, "video": 2, "audio": 3}
"""Type id of the placeholders of an image, a video or a sound."""
_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids")
"""Names of the parameter with the type of each token."""
_POSITION_MASKS = {"image": "image_embeds_position_mask"}
"""Names of the parameter with the positions of an image's features, if no token id marks them."""
_GLOBAL_ATTENTION_MASK = "global_attention_mask"
"""Name of the parameter with the tokens that see all others, while most see only their neighbors."""
_PAGE = 1000
"""Largest coordinate of boxes."""
_FIRST_PLACEHOLDER = 3
"""Position of the first placeholder: behind the padding and one token."""


def token_parameter(model: nn.Module, parameters: Collection[str]) -> str:
    """Return the parameter of a model's forward method that takes token ids; empty if there is none."""
    if "input_ids" in parameters:
        return "input_ids"
    main: str = getattr(model, "main_input_name", "input_ids")
    takes_others = main in STATES or any(name in parameters for name in (*IMAGES, *VIDEOS, *SOUNDS))
    has_words = first_int(getattr(model, "config", None), ("vocab_size",)) > 0
    return main if main in parameters and not takes_others and has_words else ""


@dataclass(frozen=True, slots=True)
class TokenMaker:
    """Make the token inputs of one model for one seed.

    Placeholders are tokens whose embeddings are replaced by the features of an image or a sound.
    """

    model: nn.Module
    parameters: Collection[str]
    """Names of the forward method's parameters."""
    name: str
    """Name of the parameter that takes token ids; empty if there is none."""
    batch: int
    seed: int

    @property
    def config(self) -> Any:
        """The model's config, or None."""
        return getattr(self.model, "config", None)

    def tensors(self, placeholders: Sequence[tuple[str, int]], length: int) -> dict[str, Tensor]:
        """Return ids, and the masks, types and boxes that the model takes with them.

        Returns:
            int64 tensors ``[B, S]`` by parameter, ``bbox`` ``[B, S, 4]``; S counts the placeholders too.
        """
        ids = self.ids(length + sum(count for _, count in placeholders), self.seed)
        types = torch.zeros_like(ids)
        start = _FIRST_PLACEHOLDER
        for kind, count in placeholders:
            placeholder = self.placeholder_id(kind)
            if placeholder is not None:
                ids[:, start : start + count] = placeholder
            types[:, start : start + count] = _TYPE_IDS[kind]
            start += count
        tensors = {self.name: ids}
        if "attention_mask" in self.parameters:
            mask = torch.ones(self.batch, ids.shape[1], dtype=torch.long)
            mask[0, :2] = 0
            tensors["attention_mask"] = mask
        if _GLOBAL_ATTENTION_MASK in self.parameters:
            mask = torch.zeros_like(ids)  # one token of each row sees all, and one more of the last row
            mask[:, _FIRST_PLACEHOLDER - 1] = 1
            mask[-1, -1] = 1
            tensors[_GLOBAL_ATTENTION_MASK] = mask
        tensors |= {name: types for name in _TYPES if name in self.parameters}
        for kind, name in _POSITION_MASKS.items():
            if name in self.parameters:
                tensors[name] = types == _TYPE_IDS[kind]
        if "bbox" in self.parameters:
            pages = first_int(self.config, ("max_2d_position_embeddings",)) or _PAGE
            generator = torch.Generator().manual_seed(self.seed)
            shape = self.batch, ids.shape[1], 2, 2
            corners = torch.randint(0, min(pages, _PAGE), shape, generator=generator)
            tensors["bbox"] = corners.sort(dim=2).values.flatten(2)  # left, top, right, bottom
        return tensors

    def ids(self, length: int, seed: int) -> Tensor:
        """Return random ids, int64 ``[B * streams, S]``, without ids that have a meaning in the config."""
        rows, streams = self._vocabulary()
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(min(3, rows - 1), rows, (self.batch * streams, length), generator=generator)
        special_ids = (  # placeholders, and other ids that code may look for
            value
            for node in nodes(self.config)
            for name, value in getattr(node, "__dict__", {}).items()
            if name.endswith(("_token_id", "_token_index"))
        )
        lists = (value if isinstance(value, (list, tuple)) else [value] for value in special_ids)
        special = {i for each in lists for i in each if isinstance(i, int)}
        plain = next((i for i in range(min(3, rows - 1), rows) if i not in special), rows - 1)
        return ids.masked_fill(torch.isin(ids, torch.tensor(sorted(special), dtype=torch.long)), plain)

    def within_decoder(self, ids: Tensor) -> Tensor:
        """Return the ids; those beyond the table of the decoder, which may be smaller, are replaced."""
        try:
            rows = _num_rows(self.model.get_decoder().get_input_embeddings())  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            rows = self._smallest_vocabulary()
        first = 3  # lower ids begin, pad or end a text
        return ids if rows <= first else torch.where(ids < rows, ids, first + ids % (rows - first))

    def ids_of_part(self, name: str, length: int) -> Tensor:
        """Return random ids, int64 ``[B, S]``, for the part of the model that ``name`` begins with."""
        part = getattr(self.config, f"{name.removesuffix('_input_ids')}_config", None)
        rows = first_int(part, ("vocab_size",)) or self._smallest_vocabulary()
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(min(3, rows - 1), rows, (self.batch, length), generator=generator)

    def seen(self, form: InputForm, ids: Tensor) -> dict[str, Tensor]:
        """Return which images of a form each token of ``ids`` ``[B, S]`` sees: all, except for the first
        token.

        Returns:
            int64 tensors ``[B, S, *dims of the images]`` by parameter.
        """
        masks = {name: torch.ones(*ids.shape, *dims, dtype=torch.long) for name, dims in form.seen.items()}
        for mask in masks.values():
            mask[:, 0] = 0
        return masks

    def codes(self, length: int, streams: int, seed: int) -> Tensor:
        """Return random ids of several streams, int64 ``[B, S, streams]``, valid in each of the
        vocabularies."""
        rows = self._smallest_vocabulary()
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(min(3, rows - 1), rows, (self.batch, length, streams), generator=generator)

    def end(self, ids: Tensor) -> None:
        """Put an end of text at the end of each row of ``ids`` ``[B, S]``, and nowhere else, in place."""
        end = getattr(self.config, "eos_token_id", None)
        if isinstance(end, int):
            ids[ids == end] = end + 1
            ids[:, -1] = end

    def placeholder_id(self, kind: str) -> int | None:
        """Return the id of a kind's placeholders; None if the config names none."""
        kinds = (kind, "video") if kind == "image" else (kind,)  # frames may be passed like images
        names = [f"{k}_{name}" for k in kinds for name in ("token_id", "token_index")]
        ids = (getattr(n, name, None) for name in names for n in nodes(self.config))
        return next((i for i in ids if isinstance(i, int)), None)

    def has_placeholders(self, kind: str) -> bool:
        """Return whether tokens are placeholders of a kind."""
        return self.placeholder_id(kind) is not None or _POSITION_MASKS.get(kind) in self.parameters

    def _smallest_vocabulary(self) -> int:
        sizes = [n for node in nodes(self.config) for k, n in vars(node).items() if k.endswith("vocab_size")]
        return min([n for n in sizes if isinstance(n, int) and n > 3] or [self._vocabulary()[0]])

    def _vocabulary(self) -> tuple[int, int]:
        """Return the rows of the embedding, and the number of streams of ids that are stacked in the
        batch."""
        try:
            table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            table = None  # a model with several towers does not have one embedding
        if isinstance(table, (nn.ModuleList, list, tuple)) and len(table):
            return _num_rows(table[0]), len(table)
        rows = _num_rows(table) if self.name in ("", "input_ids") else 0
        return rows or first_int(self.config, ("vocab_size",)), 1


def _num_rows(table: Any) -> int:
    weight = getattr(table, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else 0
