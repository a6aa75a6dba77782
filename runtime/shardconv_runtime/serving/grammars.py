"""JSON schemas that answers have to follow: compiled by xgrammar, followed token by token on every rank."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .schemas import BadRequest

PACKAGE = "xgrammar"
MOST_CHARACTERS = 65_536
"""Of a schema."""
MOST_SPACES = 8
"""Between two parts of an answer."""


class Grammars:
    """The grammars of one model's tokens.

    Args:
        tokenizer: of transformers.
        vocabulary_size: number of logits.
        ends: tokens that end an answer, which are all that is left when it is complete.

    Raises:
        ImportError: xgrammar is not installed.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int, ends: Iterable[int]) -> None:
        import xgrammar  # an extra

        self._library = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary_size, stop_token_ids=sorted(ends)
        )
        self._compiler = xgrammar.GrammarCompiler(info)
        self._lock = threading.Lock()  # the server's thread checks schemas, the loop's follows them
        self._mask = xgrammar.allocate_token_bitmask(1, vocabulary_size)

    def require(self, schema: str) -> None:
        """Compile a schema, as JSON; it is kept.

        Raises:
            BadRequest: it cannot be followed.
        """
        if len(schema) > MOST_CHARACTERS:
            raise BadRequest(f"the schema has more than {MOST_CHARACTERS} characters", "response_format")
        try:
            self._compiled(schema)
        except RuntimeError as error:
            reason = str(error).strip().rpartition(": ")[2][:200]
            raise BadRequest(f"the schema cannot be followed: {reason}", "response_format") from error

    def matcher(self, schema: str, answer: Iterable[int]) -> Any:
        """What follows a schema, after the tokens of an answer so far."""
        matcher = self._library.GrammarMatcher(self._compiled(schema))
        for token in answer:
            matcher.accept_token(token)
        return matcher

    def allowed(self, scores: Tensor, matcher: Any) -> Tensor:
        """Scores ``[V]`` of the tokens that may come next; others have none."""
        if matcher.is_terminated() or not matcher.fill_next_token_bitmask(self._mask, 0):
            return scores
        found = scores[None].clone()
        self._library.apply_token_bitmask_inplace(found, self._mask.to(scores.device))
        return found[0]

    def _compiled(self, schema: str) -> Any:
        with self._lock:
            # Some models would go on with spaces forever.
            return self._compiler.compile_json_schema(schema, max_whitespace_cnt=MOST_SPACES)
