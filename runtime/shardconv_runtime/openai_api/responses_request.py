"""Requests to ``/v1/responses``: the same as a chat, in other words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from .chat_request import MOST_TOOLS, ChatRequest
from .schemas import BadRequest, Count, Fields

NOT_KEPT = "the server keeps no responses; send all items of the conversation as input"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), NOT_KEPT),
    "conversation": ((), NOT_KEPT),
    "prompt": ((), "the server keeps no prompts; send the text as input"),
    "background": ((False,), NOT_KEPT),
    "truncation": (("disabled",), "no items are left out; send fewer"),
    "include": (([], ["reasoning.encrypted_content"]), "nothing can be included"),
    "top_logprobs": ((0,), "use chat completions"),
    "max_tool_calls": ((), "it is about tools that a server calls"),
    "service_tier": (("auto", "default"), "there is one tier"),
}
"""Fields that the server does not support: the values that ask for nothing, and a remedy."""


class ContentPart(Fields):
    """A text in a message or in the result of a tool."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str


class ImageContent(Fields):
    """An image in a message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["input_image"]
    image_url: str


def _kind_of_part(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "image" if kind == "input_image" else "text"


Part = Annotated[
    Annotated[ContentPart, Tag("text")] | Annotated[ImageContent, Tag("image")], Discriminator(_kind_of_part)
]
Content = str | list[Part]


class _Item(Fields):
    """An item of the input. Clients send back items of earlier responses, with ids and states."""

    model_config = ConfigDict(extra="ignore", strict=True)


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(_Item):
    """A call of a tool in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(_Item):
    """The reasoning of an earlier response."""

    type: Literal["reasoning"]
    content: list[ContentPart] | None = None
    summary: list[ContentPart] | None = None


def _kind_of_item(value: Any) -> str | None:
    """Return the type of an item, which messages may leave out."""
    return value.get("type", "message") if isinstance(value, Mapping) else getattr(value, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of_item),
]


class FunctionTool(Fields):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunctionTool(Fields):
    """The function that a response has to call."""

    type: Literal["function"]
    name: str


class TextFormat(Fields):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    content: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Fields):
    """Options of the text."""

    format: TextFormat = TextFormat()


class ReasoningOptions(Fields):
    """Options of the reasoning."""

    effort: str | None = None
    summary: str | None = None
    """Accepted: the reasoning itself is returned."""


class ResponsesRequest(Fields):
    """A request to ``/v1/responses``."""

    model: str | None = None
    input: Annotated[list[Item], Field(min_length=1)]
    """The conversation; a text is one message of the user."""
    instructions: str | None = None
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunctionTool = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _without_unsupported_fields(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        for name, (allowed, remedy) in UNSUPPORTED.items():
            if value.get(name) is not None and value[name] not in allowed:
                message = f"{name} is not supported: {remedy}"
                raise PydanticCustomError("unsupported", "{message}", {"parameter": name, "message": message})
        fields = {n: v for n, v in value.items() if v is not None and n not in UNSUPPORTED}
        if isinstance(fields.get("input"), str):
            fields["input"] = [{"role": "user", "content": fields["input"]}]
        return fields

    def chat(self) -> ChatRequest:
        """Return the chat that has the same answer."""
        form = self.text.format
        fields: dict[str, Any] = {
            "messages": self._messages(),
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        if form.type == "json_schema":
            named = {"name": form.name or "", "schema": form.content or {}}
            fields["response_format"] = {"type": form.type, "json_schema": named}
        elif form.type == "json_object":
            fields["response_format"] = {"type": form.type}
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
            for tool in self.tools
        ]
        choice = self.tool_choice
        named_choice = {"type": "function", "function": {"name": getattr(choice, "name", "")}}
        return ChatRequest(
            **fields,
            tool_choice=choice if isinstance(choice, str) else named_choice,  # type: ignore[arg-type]
            model=self.model,
            stream=self.stream,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning.effort,
        )

    def _messages(self) -> list[dict[str, Any]]:
        """Return the items as messages of a chat: reasoning, text and calls of one turn are one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        turn: dict[str, Any] | None = None
        for item in self.input:
            if isinstance(item, MessageItem) and item.role != "assistant":
                # Chat templates know this role by its earlier name.
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _parts(item.content)})
                turn = None
            elif isinstance(item, ResultItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                turn = None
            else:
                begins_turn = turn is None or (not isinstance(item, CallItem) and "tool_calls" in turn)
                if begins_turn or turn is None:
                    turn = {"role": "assistant", "content": ""}
                    messages.append(turn)
                _add_to_turn(turn, item)
        return messages


def _add_to_turn(turn: dict[str, Any], item: MessageItem | CallItem | ReasoningItem) -> None:
    if isinstance(item, MessageItem):
        turn["content"] += _text(item.content)
    elif isinstance(item, ReasoningItem):
        turn["reasoning_content"] = turn.get("reasoning_content", "") + _text(item.content or [])
    else:
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _parts(content: Content) -> Any:
    """Return the content of a message as chats have it."""
    if isinstance(content, str) or not any(isinstance(part, ImageContent) for part in content):
        return _text(content)
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, ContentPart)
        else {"type": "image_url", "image_url": {"url": part.image_url}}
        for part in content
    ]


def _text(content: str | Iterable[ContentPart | ImageContent]) -> str:
    if isinstance(content, str):
        return content
    if any(isinstance(part, ImageContent) for part in content):
        raise BadRequest("images come in messages of the user", "input")
    return "".join(part.text for part in content if isinstance(part, ContentPart))
