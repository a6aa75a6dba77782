"""Requests that ended a server, held its loop, or were answered wrongly: each is the client's fault."""

from __future__ import annotations

import random
from typing import Any

CHARACTERS = '{}[]":,.0123456789abcdefghijklmnopqrstuvwxyz -'
TEMPLATE = (
    "{% for i in range(loops or 0) %}{% for j in range(loops) %}{{ i }}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m['content'] }} {% endfor %}{{ note }}"
    "{% if add_generation_prompt %}a{% endif %}"
)
"""A chat template with arguments."""


REPETITIONS = "{0,10000}"


def letters() -> Any:
    """A tokenizer with a token for each character, and no capitals."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rows = {text: index for index, text in enumerate(("<pad>", "<unk>", "<end>", *CHARACTERS))}
    model = Tokenizer(models.WordLevel(rows, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    return fast


def schemas(draw: random.Random) -> dict[str, Any]:
    """Schemas that cannot be followed; other ones each time, so that each is compiled."""
    name = f"p{draw.randrange(10**9)}"
    return {
        "no capitals": {"enum": ["Yes", "No"], "description": name},
        "itself": {"$ref": "#", "description": name},
        "cycle": {"$defs": {name: {"$ref": f"#/$defs/{name}"}}, "$ref": f"#/$defs/{name}"},
        "parentheses": {"type": "string", "pattern": "(" * 30_000 + name + ")" * 30_000},
        "repetitions": {"type": "string", "pattern": f"^(({name}|b|c){REPETITIONS}d?){REPETITIONS}$"},
        "optional": {"type": "object", "properties": {f"{name}{i}": {"type": "string"} for i in range(1500)}},
        "ignored": {"type": "array", "items": {"const": name}, "uniqueItems": True},
        "levels": nested(200),
    }


def nested(levels: int) -> Any:
    """A schema of lists of lists."""
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"chat_template": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}x"},
    {"padding": "max_length", "max_length": 10**9},
    {"max_length": 300, "padding": True},
    {"truncation": True, "max_length": 2},
    {"return_tensors": "pt"},
    {"tokenize": False},
    {"messages": []},
    {"eos_token": "x"},
    {"raise_exception": 1},
    {"add_generation_prompt": "no"},
    {"no_such_variable": 1},
)
"""Arguments for a chat template that it must not get."""


def completions(draw: random.Random) -> list[dict[str, Any]]:
    """Bodies of completions."""
    formats = [
        {"type": "json_schema", "json_schema": {"schema": schema}} for schema in schemas(draw).values()
    ]
    return [
        *({"prompt": "a", "response_format": each, "temperature": draw.choice((0, 1))} for each in formats),
        {"prompt": "a", "logprobs": 21},
        {"prompt": "a", "logprobs": True},
        {"prompt": "a", "logit_bias": {"999": 1}},
    ]


def chats() -> list[dict[str, Any]]:
    """Bodies of chats."""
    messages = [{"role": "user", "content": "a"}]
    return [
        *({"messages": messages, "chat_template_kwargs": each} for each in ARGUMENTS),
        {"messages": messages, "top_logprobs": 3},
    ]
