"""Response templates of every shape that transformers' parser has, each with an answer of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CALL = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True)
class Shape:
    """A template, and a text that uses all of it.

    Attributes:
        prompt: the prompt's text.
        answer: an answer that thinks, speaks as far as the template lets it, and calls two tools.
        chat_template: a chat template that writes calls of this form.
    """

    template: dict[str, Any]
    prompt: str
    answer: str
    chat_template: str


def _chat_template(
    begin: str,
    call: str,
    end: str,
    separator: str = "",
    around: tuple[str, str] = ("", ""),
    content: str = "TEXT",
) -> str:
    """A chat template; in ``call``, NAME and ARGUMENTS are those of a call, and ``content`` has its TEXT."""
    written = call.replace("NAME", "{{ c.function.name }}")
    written = written.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
    first = "{% if not loop.first %}" + separator + "{% endif %}"
    calls = "{% for c in m.tool_calls %}" + first + written + "{% endfor %}"
    who = begin.replace("ROLE", "{{ 'bot' if m.role == 'assistant' else m.role }}")
    return (
        "{% for m in messages %}"
        + who
        + "{% if m.content %}"
        + content.replace("TEXT", "{{ m.content }}")
        + "{% endif %}{% if m.tool_calls %}"
        f"{around[0]}{calls}{around[1]}"
        "{% endif %}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}" + begin.replace("ROLE", "bot") + "{% endif %}"
    )


def _template(anchor: Any, **fields: Any) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


SHAPES = {
    "a list of calls in one place": Shape(
        _template(
            "[bot]",
            content={"open": "[say]", "close": "[/say]"},
            thinking={"open": "[think]", "close": "[/think]"},
            tool_calls={
                "open": "[act]",
                "close": "[/act]",
                "content": "json",
                "transform_each": True,
                "transform": {"function": {"name": "{tool}", "arguments": "{with}"}},
            },
        ),
        "[user]hi[bot]",
        "[think] one\n two [/think][say]Let me look.[/say]"
        '[act][{"tool": "look", "with": {"at": "ä"}}, {"tool": "nod", "with": {}}][/act][end]',
        _chat_template(
            "[ROLE]",
            '{"tool": "NAME", "with": ARGUMENTS}',
            "[end]",
            ", ",
            ("[act][", "][/act]"),
            "[say]TEXT[/say]",
        ),
    ),
    "reasoning that begins without a mark": Shape(
        _template(
            "bot:",
            thinking={"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            content={"open": "<say>\n", "close_pattern": r"\n?</say>"},
            tool_calls={
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": CALL,
            },
        ),
        "user:hi\nbot:",
        "I look.\n</think>\n<say>\nHere\n</say>\n"
        '<call>\n{"name": "look", "arguments": {"at": [1, 2]}}\n</call>\n<call>{"name": "nod"}</call>',
        _chat_template(
            "ROLE:",
            '<call>{"name": "NAME", "arguments": ARGUMENTS}</call>',
            "\n",
            content="<say>\nTEXT\n</say>",
        ),
    ),
    "channels with the name in the mark": Shape(
        _template(
            "<start>bot",
            thinking={"open": "<to>self<text>", "close": "<end>"},
            content={"open": "<to>user<text>", "close": "<end>"},
            tool_calls={
                "open_pattern": r"<to>tools\.(?P<name>\w+).*?<text>",
                "close": "<call>",
                "repeats": True,
                "content": "json",
                "transform": NAMED,
            },
        ),
        "<start>user<text>hi<end><start>bot",
        "<to>self<text>Hm <b>.<end><start>bot<to>user<text>Wait.<end>"
        '<start>bot<to>tools.look json<text>{"at": "x"}<call><to>tools.nod<text>{}<call>',
        _chat_template(
            "<start>ROLE",
            "<to>tools.NAME json<text>ARGUMENTS<call>",
            "",
            "<start>bot",
            content="<to>user<text>TEXT<end>",
        ),
    ),
    "content without a mark": Shape(
        _template(
            "<bot>\n",
            reasoning_content={"open": "<think>", "close": "</think>"},
            tool_calls={
                "open_pattern": r"\s*<tool>",
                "close": "</tool>",
                "repeats": True,
                "content": "json",
                "transform": CALL,
            },
            content={"close_pattern": r"\s*(?:<done>|<over>)"},
        ),
        "<user>\nhi<done>\n<bot>\n<think>\n",
        "I look. </think>Look < there > \n<tool>\n"
        '{"name": "look", "arguments": {"at": "</too"}}\n</tool>\n'
        '<tool>{"name": "nod", "arguments": {}}</tool>'
        "<done>\n<over>",
        _chat_template("<ROLE>\n", '\n<tool>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool>', "<done>\n"),
    ),
    "arguments as tags": Shape(
        _template(
            "<bot>\n",
            thinking={"open": "<think>", "close": "</think>"},
            tool_calls={
                "open_pattern": r"<tool>\s*<function=(?P<name>\w+)>",
                "close": "</tool>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<argument=(?P<key>\w+)>\s*(?P<value>.*?)\s*</argument>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
                "transform": NAMED,
            },
        ),
        "<bot>\n",
        "<think>\nHm.\n</think>\n\n<tool>\n<function=look>\n<argument=at>\nParis, France\n</argument>\n"
        "<argument=n>\n3\n</argument>\n</function>\n</tool><tool><function=nod></function></tool><done>",
        _chat_template(
            "<ROLE>\n",
            "<tool>\n<function=NAME>\n{% for key, value in c.function.arguments.items() %}"
            "<argument={{ key }}>\n{{ value if value is string else value | tojson }}\n</argument>\n"
            "{% endfor %}</function>\n</tool>",
            "<done>\n",
        ),
    ),
    "JSON of its own dialect": Shape(
        _template(
            ["<turn>bot\n", "<answered>"],
            thinking={"open": "<aside>thought\n", "close": "<aside/>"},
            tool_calls={
                "open_pattern": r"<tool>call:(?P<name>\w+)",
                "close": "<tool/>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
                "transform": NAMED,
            },
            content={"close": ["<turn/>", "<answer>", "<eos>"]},
        ),
        "<turn>user\nhi<turn/>\n<turn>bot\n",
        '<aside>thought\nA "quote".<aside/>So:'
        '<tool>call:look{at:<q>x "y"<q>,n:2}<tool/><tool>call:nod{}<tool/>',
        _chat_template(
            "<turn>ROLE\n",
            "<tool>call:NAME{{ '{' }}"
            "{% for key, value in c.function.arguments.items() %}{% if not loop.first %},{% endif %}"
            "{{ key }}:<q>{{ value }}<q>{% endfor %}}<tool/>",
            "<turn/>\n",
        ),
    ),
    "parts that are joined": Shape(
        _template(
            "<bot>",
            thinking={
                "open_pattern": r"(?:<bot>)?[^<]*<aside>",
                "close": "<end>",
                "repeats": True,
                "join": "",
                "content_args": {"strip": False},
            },
            content={
                "open_pattern": r"(?:<bot>)?[^<]*<text>",
                "close": "<end>",
                "repeats": True,
                "join": " + ",
            },
            tool_calls={
                "open_pattern": r"(?:<bot>)?[^<]*<tool>",
                "close": "<end>",
                "repeats": True,
                "content": "json",
                "transform": {"function": {"name": "{content.name}", "arguments": "{content.args}"}},
            },
        ),
        "<user>hi<end><bot>",
        "<aside> one <end><bot>me<aside>two\n<end><bot>me<text> three <end><bot>me<text>four<end>"
        '<bot>look<tool>{"name": "look", "args": {"at": 1}}<end>'
        '<bot>nod<tool>{"name": "nod", "args": {}}<end>',
        _chat_template(
            "<ROLE>",
            'NAME<tool>{"name": "NAME", "args": ARGUMENTS}<end>',
            "",
            "<bot>",
            content="me<text>TEXT<end>",
        ),
    ),
}
