"""Requests of continuous batching that a model cannot answer, or not beside others: refused at once.

Some rotary embeddings change with the largest position of a call. In a packed call that is the position of
another request, or of a part of a prompt, so that a request would get other angles than alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..errors import ShardconvError
from ..parallel.id_checks import require_in_table


def length_limit(config: Any) -> int | None:
    """Most tokens of a sequence for which no rotary embedding of a model changes; None if none ever does.

    Args:
        config: of transformers.
    """
    text = config.get_text_config(decoder=True)
    given = getattr(text, "rope_parameters", None) or {}
    kinds = [each for each in given.values() if isinstance(each, Mapping)] or [given]
    limits = []
    for parameters in kinds:
        kind = str(parameters.get("rope_type"))
        if kind == "longrope":
            trained = getattr(text, "original_max_position_embeddings", None)
            trained = parameters.get("original_max_position_embeddings") or trained
            limits.append(trained or text.max_position_embeddings)
        elif "dynamic" in kind:
            limits.append(text.max_position_embeddings)
    return min(limits, default=None)


@dataclass(frozen=True)
class RequestCheck:
    """What the requests of a model may be; made once, since requests are added while others are answered."""

    rows: int | None
    """Of the input embedding, global; None if it has none."""
    limit: int | None
    """See ``length_limit``."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """That of a loaded model."""
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
        return cls(rows, length_limit(model.config))

    def require(self, prompt: Sequence[int], max_new_tokens: int | None) -> None:
        """Check a request.

        Args:
            prompt: token ids.
            max_new_tokens: None: as many as there is room for.

        Raises:
            ShardconvError: the prompt is empty, has ids that the model has not (with which other requests
                would fail), or is so long that a rotary embedding changes.
        """
        if not len(prompt):
            raise ShardconvError("a prompt without tokens cannot be continued")
        if self.rows is not None:
            require_in_table(int(min(prompt)), int(max(prompt)), self.rows, "the model")
        num_new = 1 if max_new_tokens is None else max_new_tokens
        # The last new token is not computed with.
        if self.limit is not None and len(prompt) + num_new - 1 > self.limit:
            raise ShardconvError(
                f"a request for {len(prompt)} tokens and {num_new} new ones exceeds {self.limit} tokens, "
                "from where on the model's rotary embedding changes for all tokens of a call, those of "
                "other requests too; ask for fewer, or use generate"
            )
