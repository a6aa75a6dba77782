"""Calls of tools that an answer must have: their grammar is read from the chat template."""

from __future__ import annotations

import json
import random
import string
from functools import cache, partial
from typing import Any

import pytest
import torch
from hostile_requests import nested
from response_shapes import SHAPES

pytest.importorskip("xgrammar")

import xgrammar
from shardconv_runtime.openai_api.call_syntax import CallSyntax, call_syntax, content_marks
from shardconv_runtime.openai_api.chat_grammars import chat_constraint
from shardconv_runtime.openai_api.chat_request import ChatRequest
from shardconv_runtime.openai_api.message_parser import MessageDelta, MessageParser
from shardconv_runtime.openai_api.response_templates import ResponseTemplate
from shardconv_runtime.openai_api.schemas import BadRequest
from shardconv_runtime.serving.grammars import Prepared, compiled_grammar, prepare_calls
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 2
ROWS = {text: row for row, text in enumerate(("<pad>", "<unk>", "<end>", *string.printable))}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}, "at": {"enum": ["ab", "c d"]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "nod", "parameters": {"properties": {}, "additionalProperties": False}},
    },
]
WRITTEN = (
    "a list of calls in one place",
    "channels with the name in the mark",
    "content without a mark",
    "reasoning that begins without a mark",
    "arguments as tags",
)
"""Shapes whose calls are a name and then JSON or tags."""


def letters(chat_template: str) -> Any:
    """A tokenizer with a token for each character."""
    tokenizer = Tokenizer(models.WordLevel(ROWS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = chat_template
    return fast


@cache
def syntax_of(name: str) -> CallSyntax:
    shape = SHAPES[name]
    ends = ["<call>"] if "channels" in name else ["<done>", "[end]"]
    return call_syntax(ResponseTemplate(shape.template, "option"), letters(shape.chat_template), ends)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare_calls(letters(""), len(ROWS), [END])


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS} | fields
    )


def drawn(prepared: Prepared, grammar: bytes, draw: random.Random, begin: str = "") -> str:
    """A text that a grammar allows; a model that ends where it can, and writes the shorter ones."""
    import zlib

    compiled = xgrammar.CompiledGrammar.deserialize_json(zlib.decompress(grammar).decode(), prepared.info)
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, len(ROWS))
    texts = {row: text for text, row in ROWS.items()}
    text = ""
    while not matcher.is_terminated():
        if len(text) < len(begin):
            row = ROWS[begin[len(text)]]
        else:
            mask.fill_(-1)
            matcher.fill_next_token_bitmask(mask)
            bits = (mask[0, :, None] >> torch.arange(32)) & 1
            allowed = bits.flatten()[: len(ROWS)].nonzero().flatten().tolist()
            row = END if END in allowed and draw.random() < 0.7 else draw.choice(allowed)
        assert matcher.accept_token(row)
        text += "" if row == END else texts[row]
        assert len(text) < 2000
    return text


def message(name: str, text: str, prompt: str = "") -> MessageDelta:
    template = ResponseTemplate(SHAPES[name].template, "option")
    parser = MessageParser(partial(template.parser, prompt, TOOLS), template.fields)
    return parser.push(text) + parser.end(is_cut=False)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("choice", ["required", "look", "one"])
def test_demanded_calls(prepared: Prepared, name: str, choice: str) -> None:
    """Whatever the model would say, the answer is calls of tools with arguments that follow the schemas."""
    named = {"type": "function", "function": {"name": "look"}}
    body = request(tool_choice=named if choice == "look" else "required", parallel_tool_calls=choice != "one")
    template = ResponseTemplate(SHAPES[name].template, "option")
    constraint = chat_constraint(body, template, syntax_of(name), None)
    assert constraint is not None
    grammar = compiled_grammar(prepared, constraint)
    counts = set()
    for seed in range(4):  # without reasoning, which a model like this would never end
        delta = message(name, drawn(prepared, grammar, random.Random(seed), syntax_of(name).begin[:6]))
        assert delta.content == ""
        for call in delta.calls:
            arguments = json.loads(call.arguments)
            assert call.name in ("look", "nod")
            assert arguments == {} if call.name == "nod" else arguments["n"] in (1, 2)
        if choice == "look":
            assert [call.name for call in delta.calls] == ["look"]
        counts.add(len(delta.calls))
    assert counts == {1} if choice != "required" or "channels" in name else min(counts) == 1


def test_reasoning_comes_first(prepared: Prepared) -> None:
    """Both where the prompt has begun it, and where the model may."""
    name = "content without a mark"
    template = ResponseTemplate(SHAPES[name].template, "option")
    for open_field, prompt, begin in (
        ("reasoning_content", "<think>", "so <tool> </think>"),
        (None, "", "<think>so <tool> </think>"),
    ):
        constraint = chat_constraint(request(tool_choice="required"), template, syntax_of(name), open_field)
        assert constraint is not None
        text = drawn(prepared, compiled_grammar(prepared, constraint), random.Random(0), begin)
        delta = message(name, text, prompt)
        assert delta.reasoning == "so <tool>"
        assert delta.calls


def test_strict_tools(prepared: Prepared) -> None:
    """The answer is any text, in which each call follows its schema."""
    name = "content without a mark"
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    template = ResponseTemplate(SHAPES[name].template, "option")
    constraint = chat_constraint(request(tools=[strict, TOOLS[1]]), template, syntax_of(name), None)
    assert constraint is not None
    grammar = compiled_grammar(prepared, constraint)
    assert drawn(prepared, grammar, random.Random(0), "Hello.").startswith("Hello.")
    delta = message(name, drawn(prepared, grammar, random.Random(1), "Hello. <tool>"))
    assert delta.content.startswith("Hello.")
    assert delta.calls
    assert all(call.name == "nod" or json.loads(call.arguments)["n"] in (1, 2) for call in delta.calls)
    assert chat_constraint(request(), template, syntax_of(name), None) is None


def test_a_schema_beside_tools(prepared: Prepared) -> None:
    """The answer is calls or follows the schema."""
    name = "content without a mark"
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    template = ResponseTemplate(SHAPES[name].template, "option")
    constraint = chat_constraint(request(response_format=form), template, syntax_of(name), None)
    assert constraint is not None
    grammar = compiled_grammar(prepared, constraint)
    assert drawn(prepared, grammar, random.Random(0), '"yes"') == '"yes"'
    assert message(name, drawn(prepared, grammar, random.Random(0), "<tool>")).calls


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "arguments as tags"])
def test_content_that_follows_a_schema(prepared: Prepared, name: str) -> None:
    """It has the marks without which the response template does not read it."""
    shape = SHAPES[name]
    template = ResponseTemplate(shape.template, "option")
    marks = content_marks(template, letters(shape.chat_template), ["<done>", "[end]", "<turn/>"])
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    constraint = chat_constraint(request(response_format=form, tools=[]), template, "because", None, marks)
    assert constraint is not None
    begin = f'{marks[0]}"'
    text = drawn(prepared, compiled_grammar(prepared, constraint), random.Random(0), begin)
    assert message(name, text).content in ('"yes"', '"no"')


def test_content_whose_marks_are_not_known() -> None:
    tags, first = (SHAPES[name] for name in ("arguments as tags", WRITTEN[0]))
    template = ResponseTemplate(first.template, "option")
    with pytest.raises(ValueError, match="has no content"):
        content_marks(ResponseTemplate(tags.template, "option"), letters(tags.chat_template), [])
    with pytest.raises(ValueError, match="reads other content"):
        content_marks(template, letters(first.chat_template.replace("[say]", "[said]")), [])
    form = {"type": "json_object"}
    with pytest.raises(BadRequest, match="cannot follow a schema: because") as error:
        chat_constraint(request(response_format=form, tools=[]), template, "because", None, "because")
    assert error.value.parameter == "response_format"


def test_arguments_cannot_end_their_call(prepared: Prepared) -> None:
    """The text that ends a call may not be in a string."""
    words = {
        "type": "object",
        "properties": {"n": {"enum": [1]}, "at": {"type": "string"}},
        "required": ["n"],
    }
    tool = {"type": "function", "function": {"name": "look", "parameters": words}}
    constraint = chat_constraint(
        request(tools=[tool], tool_choice="required"),
        ResponseTemplate(SHAPES[WRITTEN[2]].template, "option"),
        syntax_of(WRITTEN[2]),
        None,
    )
    assert constraint is not None
    begin = '<tool>\n{"name": "look", "arguments": {"n": 1, "at": "</tool>'
    with pytest.raises(AssertionError):
        drawn(prepared, compiled_grammar(prepared, constraint), random.Random(0), begin)


def test_arguments_in_tags(prepared: Prepared) -> None:
    """Strings are any text up to the tag, other values are JSON, and some may be left out."""
    name = "arguments as tags"
    schema = {
        "type": "object",
        "properties": {
            "at": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "n": {"$ref": "#/$defs/n"},
            "is": {"const": True},
        },
        "$defs": {"n": {"enum": [7]}},
        "required": ["at", "n"],
    }
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    template = ResponseTemplate(SHAPES[name].template, "option")
    constraint = chat_constraint(
        request(tools=[tool], tool_choice="required", parallel_tool_calls=False),
        template,
        syntax_of(name),
        None,
    )
    assert constraint is not None
    grammar = compiled_grammar(prepared, constraint)
    begin = "<tool>\n<function=look>\n<argument=at>\nhe said <argument> </b>\n</argument>\n<argument=n>\n"
    arguments = set()
    for seed in range(4):
        (call,) = message(name, drawn(prepared, grammar, random.Random(seed), begin)).calls
        arguments.add(call.arguments)
    first = '{"at": "he said <argument> </b>", "n": 7'
    assert arguments == {f"{first}}}", f'{first}, "is": true}}'}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"properties": {}, "required": ["a"]},
        {"anyOf": [{"type": "object"}]},
    ],
)
def test_schemas_that_tags_cannot_follow(schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    template = ResponseTemplate(SHAPES["arguments as tags"].template, "option")
    with pytest.raises(BadRequest, match="cannot be followed") as error:
        chat_constraint(
            request(tools=[tool], tool_choice="required"), template, syntax_of("arguments as tags"), None
        )
    assert error.value.parameter == "tool_choice"


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"properties": {"a": nested(200)}}, "levels"),
        ({"type": "nonsense"}, "cannot be followed"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {}}}}, None),
        ({}, None),
    ],
)
def test_schemas_of_tools(prepared: Prepared, parameters: dict[str, Any], reason: str | None) -> None:
    """Each is followed, or refused with the reason and the field of the request."""
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters, "strict": True}}
    template = ResponseTemplate(SHAPES[WRITTEN[2]].template, "option")
    constraint = chat_constraint(request(tools=[tool]), template, syntax_of(WRITTEN[2]), None)
    assert constraint is not None
    if reason is None:
        assert compiled_grammar(prepared, constraint)
        return
    with pytest.raises(BadRequest, match=reason) as error:
        compiled_grammar(prepared, constraint)
    assert error.value.parameter == "tools"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("JSON of its own dialect", "neither JSON behind a name nor tags"),
        ("parts that are joined", "neither JSON behind a name nor tags"),
    ],
)
def test_syntax_that_is_not_known(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        syntax_of(name)


@pytest.mark.parametrize(
    ("chat_template", "reason"),
    [
        ("{{ raise_exception('no') }}", "does not take such an answer: no"),
        ("<bot>\n{{ messages[0].content }}", "leaves out a part"),
        (SHAPES[WRITTEN[2]].chat_template.replace("<tool>", "<tool>{{ c.id }}"), "ids of calls"),
        (SHAPES[WRITTEN[2]].chat_template.replace("<tool>", "<tol>"), "reads other calls"),
    ],
)
def test_chat_templates_without_a_syntax(chat_template: str, reason: str) -> None:
    template = ResponseTemplate(SHAPES[WRITTEN[2]].template, "option")
    with pytest.raises(ValueError, match=reason):
        call_syntax(template, letters(chat_template), ["<done>"])


@pytest.mark.parametrize(
    ("fields", "syntax", "parameter", "reason"),
    [
        ({"tool_choice": "required", "tools": []}, None, "tool_choice", "needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            None,
            "tool_choice",
            "not among the tools",
        ),
        ({"tool_choice": "required"}, "because", "tool_choice", "cannot be demanded: because"),
        (
            {"tools": [{"type": "function", "function": {"name": 'a"b', "strict": True}}]},
            None,
            "tools",
            "which no grammar writes",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "because",
            "tools",
            "strict tools cannot be followed: because",
        ),
        ({"response_format": {"type": "json_object"}}, "because", "response_format", "because"),
        ({"tool_choice": "required", "ignore_eos": True}, None, "ignore_eos", "ends where"),
    ],
)
def test_requests_that_cannot_be_granted(fields: Any, syntax: Any, parameter: str, reason: str) -> None:
    template = ResponseTemplate(SHAPES[WRITTEN[2]].template, "option")
    with pytest.raises(BadRequest, match=reason) as error:
        chat_constraint(request(**fields), template, syntax or syntax_of(WRITTEN[2]), None)
    assert error.value.parameter == parameter
