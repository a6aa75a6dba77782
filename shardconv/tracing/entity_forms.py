"""Entities that a text mentions, to call a model with: their ids, and where in the text they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .config_sizes import first_int
from .input_forms import ENTITIES, Asked

_POSITIONS = "entity_position_ids"
_NUM_ENTITIES = 6
_LONGEST_MENTION = 5
"""Of which the config does not say it."""


def entities(asked: Asked) -> Iterator[dict[str, Tensor]]:
    """Ids ``[B, E]``, and the positions ``[B, E, M]`` of their mentions, which end with -1."""
    name = asked.first(ENTITIES)
    count = _NUM_ENTITIES - bool(asked.seed)
    generator = torch.Generator().manual_seed(asked.seed)
    rows = first_int(asked.config, ("entity_vocab_size",)) or min(asked.sizes)
    ids = torch.randint(min(3, rows - 1), rows, (asked.batch, count), generator=generator)
    length = first_int(asked.config, ("max_mention_length",)) or _LONGEST_MENTION
    mentions = torch.full((asked.batch, count, length), -1)
    mentions[..., :2] = torch.arange(2 * count).view(count, 2)[:, : mentions.shape[2]]
    yield {name: ids, _POSITIONS: mentions} if _POSITIONS in asked.parameters else {name: ids}
