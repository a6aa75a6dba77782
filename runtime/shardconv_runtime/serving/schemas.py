"""The JSON of requests, declared once for checks and for the API's description."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

COMPLETION_TOKENS = 16
"""New tokens of a completion that names no number; the API's default."""

MOST_TOOLS = 128
"""Tools of one request, as in OpenAI's API."""

MOST_CHOICES = 128
"""Answers to one request."""

ALMOST_GREEDY = 1e-5
"""A temperature below this one counts as 0: logits that are divided by it would overflow."""

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
}
"""Fields of the API that the server does not know, with the values that ask for nothing."""


class BadRequest(Exception):
    """A request that cannot be answered."""

    def __init__(self, message: str, parameter: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.status = status


@dataclass(frozen=True)
class Constraint:
    """The texts that an answer may have.

    Attributes:
        text: a JSON schema, or xgrammar's structural tag as JSON.
        parameter: the field of the request that asks for it.
    """

    text: str
    parameter: str = "response_format"
    is_tag: bool = False


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are drawn."""

    temperature: float = 1.0
    """0: the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or less: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and the biases of their logits."""
    seed: int | None = None
    """The seed of the request's own draws."""
    constraint: Constraint | None = None
    grammar: bytes | None = field(default=None, repr=False)
    """The constraint as it was compiled."""
    num_logprobs: int | None = None
    """Number of likely tokens to return with logarithmic probabilities, next to each chosen token with its
    own; None: return none."""

    @property
    def is_greedy(self) -> bool:
        """Return whether nothing is drawn."""
        return self.temperature < ALMOST_GREEDY

    @property
    def changes_scores(self) -> bool:
        """Return whether a bias or a penalty gives tokens other scores than the model's."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or self.repetition_penalty != 1 or any(penalties)

    @property
    def warping(self) -> tuple[float, int, float, float]:
        """Return temperature, ``top_k``, ``top_p`` and ``min_p`` in the types that transformers expects."""
        return float(self.temperature), self.top_k, float(self.top_p), float(self.min_p)


DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of ``Sampling`` that a model's generation config may set for requests that do not set them."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token, and its log probability in the model, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at its position, the first ones first, with theirs."""


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
LogprobCount = Annotated[int, Field(ge=0, le=20)]


class Fields(BaseModel):
    """Fields of a request; others are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Fields):
    """Options of a stream of pieces of an answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Fields):
    """A schema of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str = ""
    description: str | None = None
    strict: bool | None = None
    content: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Fields):
    """The form of an answer: text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema_if_it_needs_one(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("schema", "json_schema goes with the type json_schema")
        return self

    @property
    def value_schema(self) -> dict[str, Any] | None:
        """Return the schema of the answer; None for any text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.content


class GenerationRequest(Fields):
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
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[TokenText, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    response_format: ResponseFormat | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Token] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

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
        """Return the most new tokens."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts before which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of likely tokens to return with their log probabilities; None for none."""
        return None

    def sampling(self, defaults: Sampling) -> Sampling:
        """Return how tokens are drawn, with ``defaults`` for missing fields."""
        said: dict[str, Any] = {n: v for n in DEFAULT_FIELDS if (v := getattr(self, n)) is not None}
        said |= {n: getattr(self, n) for n in ("presence_penalty", "frequency_penalty", "seed")}
        bias = tuple((int(token), value) for token, value in self.logit_bias.items())
        constraint = self.constraint
        if constraint is not None and self.ignore_eos:
            raise BadRequest("an answer that follows a schema ends where that does", "ignore_eos")
        return replace(
            defaults, **said, logit_bias=bias, constraint=constraint, num_logprobs=self.num_logprobs
        )

    @property
    def constraint(self) -> Constraint | None:
        """Return the texts that ``response_format`` allows; None for any."""
        schema = None if self.response_format is None else self.response_format.value_schema
        # In its order: properties come in the order in which they are named.
        return None if schema is None else Constraint(json.dumps(schema))


class CompletionRequest(GenerationRequest):
    """A request to ``/v1/completions``."""

    prompt: str | list[Token] | list[str] | list[list[Token]]
    logprobs: LogprobCount | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See ``GenerationRequest``."""
        return self.logprobs

    @property
    def has_text(self) -> bool:
        """Return whether a prompt is a text."""
        return isinstance(self.prompt, str) or any(isinstance(each, str) for each in self.prompt)

    def token_ids(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt, which is a text or ids."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        prompts: list[Any] = [prompt] if is_one else list(prompt)
        return [list(tokenizer(each)["input_ids"]) if isinstance(each, str) else each for each in prompts]


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Fields):
    """Where an image is, which may be the URL itself."""

    url: str
    detail: str | None = None
    """Accepted: the model's processor decides."""


class ImagePart(Fields):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(BaseModel):
    """A message of a chat. The chat template gets all of it, other fields too (calls of tools)."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[Part] | None = None

    @property
    def images(self) -> list[ImagePart]:
        """Return the images in the message."""
        parts = self.content if isinstance(self.content, list) else []
        return [part for part in parts if isinstance(part, ImagePart)]

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it.

        Clients send the arguments of calls as JSON, and empty fields as null. Templates expect objects, and
        fields that have values.
        """
        message = self.model_dump(exclude_unset=True)
        calls = message.get("tool_calls")
        if isinstance(self.content, list) and not self.images:
            message["content"] = "".join(part.text for part in self.content if isinstance(part, TextPart))
        if isinstance(calls, list) and calls:
            message["content"] = message.get("content") or ""
            message["tool_calls"] = [_with_object(call) for call in calls]
        return {name: value for name, value in message.items() if value is not None or name == "content"}


def _with_object(call: Any) -> Any:
    """Return a call of a tool with its arguments as an object, if they are JSON of one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


class ToolFunction(BaseModel):
    """A function that the model may call. The chat template gets all of it, other fields too."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """Schema of the arguments, which are one object."""
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(Fields):
    """The name of a function."""

    name: str


class ChosenTool(Fields):
    """The tool that an answer has to call."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(GenerationRequest):
    """A request to ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    """A variable of chat templates that OpenAI's API has as a field."""
    logprobs: bool = False
    top_logprobs: LogprobCount = 0

    @property
    def num_logprobs(self) -> int | None:
        """See ``GenerationRequest``."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs is for answers with logprobs: true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None

    @property
    def has_text(self) -> bool:
        """Return whether there is a text; messages are one."""
        return True

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Return the variables that the chat template gets from the request."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**self.chat_template_kwargs, **effort}

    @property
    def image_urls(self) -> list[str]:
        """Return the URLs of all images in order."""
        return [part.image_url.url for message in self.messages for part in message.images]

    def messages_with(self, images: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the messages as processors expect them, with ``images`` in place of URLs."""
        left, messages = iter(images), []
        for message in self.messages:
            shown = message.for_template()
            if message.images and isinstance(message.content, list):
                shown["content"] = [
                    {"type": "text", "text": part.text}
                    if isinstance(part, TextPart)
                    else {"type": "image", "image": next(left)}
                    for part in message.content
                ]
            elif isinstance(shown.get("content"), str):
                shown["content"] = [{"type": "text", "text": shown["content"]}]
            messages.append(shown)
        return messages

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the template gets: none if the answer may call none."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def token_ids(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of the messages as one prompt, by the tokenizer's chat template."""
        if tokenizer.chat_template is None:
            raise BadRequest("the model's tokenizer has no chat template; use completions", "messages", 404)
        messages = [message.for_template() for message in self.messages]
        options = {"add_generation_prompt": True, **self.template_arguments, "return_dict": True}
        try:
            encoded = tokenizer.apply_chat_template(
                messages, tools=self.shown_tools or None, tokenize=True, **options
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may raise on roles that it does not expect
            raise BadRequest(
                f"the chat template does not take these messages: {error}", "messages"
            ) from error
        return [list(encoded["input_ids"])]


class ErrorBody(BaseModel):
    """The error message."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The form of every error."""

    error: ErrorBody
