"""The endpoint of OpenAI's API that returns embeddings."""

from __future__ import annotations

import asyncio
import base64
import logging
import struct
import time
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from ..openai_api.schemas import BadRequest, Fields, Text, Token, prompt_token_ids
from .answers import AnswerFailed
from .bounded_calls import BoundedCalls
from .endpoints import new_application, require_model
from .metrics import Metrics
from .prompts import token_ids

LOG = logging.getLogger(__name__)
MOST_INPUTS = 2048
"""Most texts of one request, as in OpenAI's API."""


class EmbeddingRequest(Fields):
    """A request to ``/v1/embeddings``."""

    model: str | None = None
    input: (
        Text
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS)]
        | Annotated[list[list[Token]], Field(min_length=1, max_length=MOST_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_dimensions(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("dimensions") is not None:
            raise PydanticCustomError(
                "unsupported",
                "dimensions is not supported: an embedding has the model's",
                {"parameter": "dimensions"},
            )
        return value if not isinstance(value, dict) else {n: v for n, v in value.items() if v is not None}

    @property
    def has_text(self) -> bool:
        """Return whether an input is a text."""
        return isinstance(self.input, str) or any(isinstance(each, str) for each in self.input)

    def token_ids(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each input."""
        return prompt_token_ids(self.input, tokenizer)


@dataclass(frozen=True)
class ServedEmbeddings:
    """The objects that answer requests for embeddings.

    Attributes:
        ranks: the ``EmbeddingRanks`` of rank 0.
        context: most tokens of a text.
        max_requests: texts that are computed or wait at a time.
    """

    ranks: Any
    tokenizer: Any
    name: str
    vocabulary_size: int
    context: int
    max_requests: int
    prompt_calls: BoundedCalls | None = None
    metrics: Metrics = field(default_factory=Metrics)


def embedding_application(served: ServedEmbeddings, api_key: str | None = None) -> FastAPI:
    """Return the web application of rank 0."""
    about = {"id": served.name, "object": "model", "owned_by": "shardconv", "pooling": served.ranks.pooling}

    def failure() -> str | None:
        return None if served.ranks.is_running() else str(served.ranks.failure or "stopped")

    app, guarded = new_application(about, api_key, failure, served.metrics)

    @app.post("/v1/embeddings", dependencies=guarded)
    async def embeddings(body: EmbeddingRequest) -> Response:
        return await _respond(served, body)

    return app


async def _respond(served: ServedEmbeddings, body: EmbeddingRequest) -> Response:
    require_model(served.name, body.model)
    begin = time.perf_counter()
    rows = await token_ids(body, served.tokenizer, served.prompt_calls)
    for row in rows:
        _require_fits(served, row)
    num_tokens, name = sum(map(len, rows)), f"embd-{uuid.uuid4().hex}"
    if served.metrics.num_running >= served.max_requests:
        raise BadRequest(f"{served.max_requests} requests are answered or wait; try again later", status=429)
    with served.metrics.running(num_tokens):
        futures = [asyncio.wrap_future(served.ranks.add(row)) for row in rows]
        try:
            values = await asyncio.gather(*futures)
        except Exception as error:
            if served.ranks.is_running():
                raise BadRequest(f"the model cannot take this: {error}", "input", 500) from error
            raise AnswerFailed(str(error)) from error
    seconds = time.perf_counter() - begin
    LOG.info("%s embeddings: %d texts, %d tokens, %.2f s", name, len(rows), num_tokens, seconds)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(each, body.encoding_format)}
        for index, each in enumerate(values)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    content = {"object": "list", "data": data, "model": served.name, "usage": usage}
    return JSONResponse(content, headers={"x-request-id": name})


def _require_fits(served: ServedEmbeddings, row: list[int]) -> None:
    if not row:
        raise BadRequest("a text without tokens has no embedding", "input")
    if len(row) > served.context:
        raise BadRequest(f"a text has {len(row)} tokens; the model takes {served.context}", "input")
    if outside := [token for token in row if not 0 <= token < served.vocabulary_size]:
        raise BadRequest(
            f"the model has {served.vocabulary_size} tokens, and the input has the id {outside[0]}", "input"
        )


def _encoded(values: list[float], encoding: str) -> Any:
    if encoding == "float":
        return values
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
