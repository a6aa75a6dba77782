"""What a client may ask for: the JSON of requests, declared once for checks and for the API's description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

COMPLETION_TOKENS = 16
"""New tokens of a completion that names no number; the API's default."""

ALMOST_GREEDY = 1e-5
"""A temperature below this one is taken for 0: logits that are divided by it would overflow."""

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
}
"""Fields of the API that the server does not know, with the values that ask for nothing."""


class BadRequest(Exception):
    """A request that cannot be answered.

    Args:
        message: for the client.
        parameter: the field at fault.
        status: of HTTP.
    """

    def __init__(self, message: str, parameter: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.status = status


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are drawn."""

    temperature: float = 1.0
    """0: the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0

    def options(self, vocabulary_size: int) -> dict[str, Any]:
        """Arguments of ``add_request`` of a manager that samples, in the types that it wants."""
        if self.temperature < ALMOST_GREEDY:
            return {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
        top_k = self.top_k if self.top_k > 0 else vocabulary_size
        return {
            "temperature": float(self.temperature),
            "top_k": min(top_k, vocabulary_size),
            "top_p": float(self.top_p),
            "min_p": float(self.min_p),
        }


SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Fields):
    """What a stream has beside the pieces of an answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(_Fields):
    """Fields of completions and chats."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Token] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        for name, allowed in WITHOUT_EFFECT.items():
            if value.get(name) is not None and value[name] not in allowed:
                raise PydanticCustomError("unsupported", f"{name} is not supported", {"parameter": name})
        return {n: v for n, v in value.items() if v is not None and n not in WITHOUT_EFFECT}

    @property
    def limit(self) -> int | None:
        """The most new tokens."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts before which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, defaults: Sampling) -> Sampling:
        """How tokens are drawn; what is not said is as in ``defaults``."""
        said = {n: v for n in SAMPLING_FIELDS if (v := getattr(self, n)) is not None}
        return replace(defaults, **said)


class CompletionRequest(GenerationRequest):
    """Of ``/v1/completions``."""

    prompt: str | list[Token] | list[str] | list[list[Token]]

    def token_ids(self, tokenizer: Any) -> list[int]:
        """Of the prompt: a text, or ids themselves."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return list(tokenizer(prompt)["input_ids"])
        if all(isinstance(token, int) for token in prompt):
            return list(prompt)  # type: ignore[arg-type]
        raise BadRequest("prompt should be one text or one list of token ids", "prompt")


class TextPart(_Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a chat. The chat template gets all of it, other fields too (calls of tools)."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[TextPart] | None = None


class ChatRequest(GenerationRequest):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    """For the template; what the model says of them is text."""
    chat_template_kwargs: dict[str, Any] = {}

    def token_ids(self, tokenizer: Any) -> list[int]:
        """Of the messages, by the tokenizer's chat template."""
        if tokenizer.chat_template is None:
            raise BadRequest("the model's tokenizer has no chat template; use completions", "messages", 404)
        messages = [
            message.model_dump(exclude_unset=True)
            | (
                {"content": "".join(p.text for p in message.content)}
                if isinstance(message.content, list)
                else {}
            )
            for message in self.messages
        ]
        options = {**self.chat_template_kwargs, "add_generation_prompt": True, "return_dict": True}
        try:
            encoded = tokenizer.apply_chat_template(
                messages, tools=self.tools or None, tokenize=True, **options
            )
        except Exception as error:  # a template may raise on roles that it does not expect
            raise BadRequest(
                f"the chat template does not take these messages: {error}", "messages"
            ) from error
        return list(encoded["input_ids"])


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The form of every error."""

    error: ErrorBody
