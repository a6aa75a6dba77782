"""JSON schemas that answers have to follow: compiled by xgrammar, followed token by token on every rank.

A schema is compiled once, in a process of its own: some crash the compiler or keep it busy. The ranks get the
compiled grammar with the request, so that all of them follow the same one.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..openai_api.schema_keywords import ignored_part
from ..openai_api.schemas import BadRequest, Constraint
from ..openai_api.structural_tags import MOST_SPACES, schemas_of_tag
from .bounded_calls import MEMORY_BYTES, BoundedCalls, CallEndedError, ForkServer, printed

PACKAGE = "xgrammar"
MOST_CHARACTERS = 65_536
"""Most characters of a schema."""
MOST_LEVELS = 100
"""Most levels of lists and objects in a schema."""
MOST_GRAMMAR_BYTES = 16 * 2**20
"""Most bytes of a compiled grammar, which each rank reads in its loop, in a tenth of a second or two."""
COMPILE_S = 3.0
"""Most processor time of compiling a schema."""
COMPILE_AT_A_TIME = 4
NUM_TRIED, TRIED_TOKENS = 3, 40
"""Answers that are tried after compiling, and the most tokens of each."""
TRIED_TOKENS_EACH = 5
"""Tokens that are tried for one that does not complete the answer."""
MOST_KEPT_BYTES = 16 * 2**20
"""Most bytes of compiled schemas that rank 0 keeps for other requests."""
NUM_READ_GRAMMARS = 8
"""Grammars that each rank keeps as it read them."""
FIRST_S, NEXT_S = 0.25, 0.02
"""Time that a schema may take in the loop of all requests: at first, and for each token."""

NO_TOKEN = (
    "the answer cannot follow the schema: no token may come next; the schema may have an end that cannot be "
    "reached, or a character that no token has"
)
SLOW = "the answer cannot follow the schema: it takes too long for each token, and other requests wait"
"""Why an answer failed."""


@dataclass
class FollowedSchema:
    """The schema of one answer, as far as the answer has come.

    Attributes:
        matcher: xgrammar's.
        num_tokens: number of tokens that were limited.
        seconds: processor time that this took on this rank.
    """

    matcher: Any
    num_tokens: int = 0
    seconds: float = 0.0

    def accept(self, token: int) -> bool:
        """Go on with a token; return whether the schema allows it."""
        begin = time.thread_time()
        try:
            is_allowed = bool(self.matcher.is_terminated() or self.matcher.accept_token(token))
        except RuntimeError:  # a failed assertion; on all ranks
            is_allowed = False
        self.seconds += time.thread_time() - begin
        return is_allowed

    @property
    def is_slow(self) -> bool:
        """Return whether other requests have waited too long for this one."""
        return self.seconds > FIRST_S + NEXT_S * self.num_tokens


class Grammars:
    """The grammars of one model's tokens.

    Attributes:
        tokens: number of logits, and the tokens that end an answer.
        failures: name of a request -> why its answer cannot follow its schema; on rank 0.
    """

    def __init__(
        self, tokenizer: Any, vocabulary_size: int, ends: Iterable[int], calls: BoundedCalls | None = None
    ) -> None:
        import xgrammar  # an extra

        self.failures: dict[str, str] = {}
        self._library = xgrammar
        self.tokens = vocabulary_size, tuple(sorted(ends))
        self._tokenizer = tokenizer
        self._info = prepare_calls(tokenizer, *self.tokens).info
        self._calls = calls
        self._kept: dict[bytes, bytes | BadRequest] = {}
        self._lock = threading.Lock()
        self._mask = xgrammar.allocate_token_bitmask(1, vocabulary_size)
        self._read = lru_cache(NUM_READ_GRAMMARS)(self._read_grammar)

    def require(self, constraint: Constraint) -> bytes:
        """Return the compiled grammar of a constraint."""
        if len(constraint.text) > MOST_CHARACTERS:
            raise BadRequest(f"the schema has more than {MOST_CHARACTERS} characters", constraint.parameter)
        key = _digest(constraint)
        with self._lock:
            grammar = self._kept.pop(key, None)
        if grammar is None:
            grammar = self._compiled(constraint)
        with self._lock:
            self._kept[key] = grammar  # the last ones are those that were used last
            while sum(map(_size, self._kept.values())) > MOST_KEPT_BYTES:
                self._kept.pop(next(iter(self._kept)))
        if isinstance(grammar, BadRequest):
            raise grammar
        return grammar

    def follow(self, constraint: Constraint, grammar: bytes | None, answer: Iterable[int]) -> FollowedSchema:
        """Return the object that follows a constraint after the tokens of an answer so far."""
        compiled = self._read(grammar or self.require(constraint))
        followed = FollowedSchema(self._library.GrammarMatcher(compiled))
        for token in answer:
            followed.accept(token)
        return followed

    def refuse(self, constraint: Constraint, reason: str) -> None:
        """Refuse a constraint from now on."""
        with self._lock:
            self._kept[_digest(constraint)] = BadRequest(reason, constraint.parameter)

    def allowed(self, scores: Tensor, followed: FollowedSchema) -> Tensor:
        """Return the scores ``[V]`` of the tokens that may come next; others, maybe all, have none."""
        begin = time.thread_time()
        matcher = followed.matcher
        try:
            is_free = matcher.is_terminated() or not matcher.fill_next_token_bitmask(self._mask)
        except RuntimeError:  # a failed assertion; on all ranks
            return torch.full_like(scores, -torch.inf)
        followed.seconds += time.thread_time() - begin
        followed.num_tokens += 1
        if is_free:
            return scores
        limited = scores[None].clone()
        self._library.apply_token_bitmask_inplace(limited, self._mask.to(scores.device))
        return limited[0]

    def _compiled(self, constraint: Constraint) -> bytes | BadRequest:
        if self._calls is None:
            server = ForkServer()
            server.prepare(prepare_calls, self._tokenizer, *self.tokens)
            self._calls = BoundedCalls(server, COMPILE_S, COMPILE_AT_A_TIME, keeps_processes=False)
        try:
            return self._calls.call(compiled_grammar, constraint)
        except BadRequest as error:
            return error
        except CallEndedError:
            return BadRequest(
                f"the schema cannot be followed: it takes more than {self._calls.cpu_s:g} s or "
                f"{MEMORY_BYTES / 2**30:g} GiB to compile, or a pattern in it has too many levels",
                constraint.parameter,
            )

    def _read_grammar(self, grammar: bytes) -> Any:
        return self._library.CompiledGrammar.deserialize_json(zlib.decompress(grammar).decode(), self._info)


def _digest(constraint: Constraint) -> bytes:
    """Return the key of a constraint; the texts of many would fill the memory."""
    kind = f"{constraint.parameter} {constraint.is_tag} "
    return hashlib.sha256((kind + constraint.text).encode()).digest()


def _size(grammar: bytes | BadRequest) -> int:
    """Return about how many bytes a kept schema takes."""
    return 1024 + (len(grammar) if isinstance(grammar, bytes) else 0)


# In the process of a call.


@dataclass(frozen=True)
class Prepared:
    """Values that every call has in memory.

    Attributes:
        tokenizer: a tokenizer of transformers.
        info: its tokens as xgrammar knows them; None if no schemas are compiled.
        processor: the model's processor for images; None if it takes none.
    """

    tokenizer: Any
    info: Any = None
    processor: Any = None


def prepare_calls(
    tokenizer: Any, vocabulary_size: int, ends: Iterable[int] | None, processor: Any = None
) -> Prepared:
    """Return the values that the calls have in memory."""
    if processor is not None:
        import PIL.Image  # noqa: F401 (an extra, which the calls then have in memory)
    if ends is None:
        return Prepared(tokenizer, processor=processor)
    import xgrammar  # an extra

    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocabulary_size, stop_token_ids=list(ends)
    )
    return Prepared(tokenizer, info, processor)


def compiled_grammar(prepared: Prepared, constraint: Constraint) -> bytes:
    """Return the compiled grammar of a constraint as ``Grammars.follow`` reads it."""
    import xgrammar  # an extra

    def refuse(reason: str) -> BadRequest:
        return BadRequest(f"the schema cannot be followed: {reason}", constraint.parameter)

    value = json.loads(constraint.text)
    if num_levels(value) > MOST_LEVELS:
        raise refuse(f"it has more than {MOST_LEVELS} levels")
    for schema in schemas_of_tag(value) if constraint.is_tag else [value]:
        if (ignored := ignored_part(schema)) is not None:
            raise refuse(f"xgrammar does not support a part of it: {ignored}")
    # One thread: the limit is of processor time, and the process was forked.
    compiler = xgrammar.GrammarCompiler(prepared.info, max_threads=1, cache_enabled=False)
    try:
        if constraint.is_tag:
            grammar = compiler.compile_structural_tag(constraint.text)
        else:
            grammar = compiler.compile_json_schema(constraint.text, max_whitespace_cnt=MOST_SPACES)
        content = grammar.serialize_json()
    except RuntimeError as error:
        if "bad_alloc" in str(error):
            raise MemoryError from error
        raise refuse(_reason(str(error)) or "xgrammar does not support it") from error
    # What xgrammar does not know it leaves out: the answer would be another one than the schema says.
    if warnings := [_reason(line) for line in printed().splitlines() if "Warning: " in line]:
        raise refuse(f"xgrammar does not support a part of it: {warnings[0]}")
    if len(content) > MOST_GRAMMAR_BYTES:
        raise refuse(
            f"it is too large: compiled, it takes {len(content) / 2**20:.0f} MiB of the "
            f"{MOST_GRAMMAR_BYTES // 2**20} MiB that are allowed; fewer optional properties or shorter "
            "lengths take less"
        )
    # Some answers, from what the ranks will read, with less stack than they have.
    matcher = xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json(content, prepared.info))
    mask = xgrammar.allocate_token_bitmask(1, prepared.info.vocab_size)
    if matcher.fill_next_token_bitmask(mask) and not mask.any():
        raise refuse("no token can begin the answer")
    num_tokens = prepared.info.vocab_size
    try:
        tried = [
            _draw_answer(matcher.fork(), mask, num_tokens, random.Random(seed)) for seed in range(NUM_TRIED)
        ]
    except RuntimeError as error:
        raise refuse(_reason(str(error)) or "xgrammar does not support it") from error
    if any(each.is_slow for each in tried):
        raise refuse("it takes too long for each token, as nested repetitions do")
    return zlib.compress(content.encode(), 1)


def _draw_answer(matcher: Any, mask: Tensor, num_tokens: int, draw: random.Random) -> FollowedSchema:
    """Return a schema after a long answer of tokens that it allows, or as far as that was not slow."""
    followed = FollowedSchema(matcher)
    while followed.num_tokens < TRIED_TOKENS and not (followed.is_slow or matcher.is_terminated()):
        begin = time.thread_time()
        mask.fill_(-1)
        followed.matcher.fill_next_token_bitmask(mask)
        followed.seconds += time.thread_time() - begin
        followed.num_tokens += 1
        bits = (mask[0, :, None] >> torch.arange(32)) & 1
        allowed = bits.flatten()[:num_tokens].nonzero().flatten().tolist()
        for _ in range(TRIED_TOKENS_EACH):
            if not allowed or not followed.accept(draw.choice(allowed)):
                return followed
            if not (matcher.is_completed() or matcher.is_terminated()):
                break  # the answer goes on
            matcher.rollback(1)
        else:
            return followed
    return followed


def _reason(message: str) -> str:
    """Return the message of xgrammar without time and line of its code; nothing for an assertion."""
    text = message.strip().rpartition("Warning: ")[2]
    lines = re.sub(r"^(\[[^]]*\] )?(\S+:\d+: )?", "", text).splitlines()
    return "" if not lines or "Check failed" in lines[0] else lines[0][:200]


def num_levels(value: Any) -> int:
    """Return how many lists and objects of a JSON value are inside of each other."""
    level, levels = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        levels += 1
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
    return levels
