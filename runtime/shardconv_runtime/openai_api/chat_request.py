"""The JSON of requests to ``/v1/chat/completions``: messages with texts and images, and tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .schemas import BadRequest, Fields, GenerationRequest, LogprobCount

MOST_TOOLS = 128
"""Tools of one request, as in OpenAI's API."""


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
    tools: list[Tool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
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
