"""A server of two ranks for agents: calls that a random model has to write, and prompts that begin alike."""

from __future__ import annotations

import json
import string
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import VOCAB, save_causal
from response_shapes import SHAPES
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import shardconv

pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
pytest.importorskip("xgrammar")

import openai
from test_serve import running_ranks

SHAPE = SHAPES["content without a mark"]
CHARACTERS = ("<pad>", "<unk>", "<done>", *string.printable)
NO_REASONING = {str(CHARACTERS.index("h")): -100}
"""A random model would never end it."""
ARGUMENTS = {
    "type": "object",
    "properties": {"at": {"enum": ["x", "y"]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOL = {"name": "f", "parameters": ARGUMENTS, "strict": True}
HELLO = [{"role": "user", "content": "a"}]


def save_characters(path: Path) -> None:
    """A tokenizer with a token for each character, a chat template, and a response template."""
    rows = {text: row for row, text in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(rows, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<done>"
    )
    fast.chat_template = SHAPE.chat_template
    fast.response_template = SHAPE.template
    fast.save_pretrained(path)


@dataclass(frozen=True)
class Serving:
    """A running server, and the unsharded model."""

    port: int
    unsharded: Any
    tokenizer: Any

    @property
    def client(self) -> Any:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    root = tmp_path_factory.mktemp("agents")
    source = save_causal("llama", root / "llama", max_position_embeddings=4096)
    save_characters(source)
    shardconv.convert(source, root / "out", tp=2, check=False)
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    with running_ranks(root / "out") as port:
        yield Serving(port, unsharded, transformers.AutoTokenizer.from_pretrained(source))


def test_two_steps_with_a_tool(serving: Serving) -> None:
    """A call that is demanded, its result, and a named call as a stream: the arguments follow the schema."""
    tools = [{"type": "function", "function": TOOL}]
    options = {"model": "tiny", "tools": tools, "temperature": 0, "logit_bias": NO_REASONING}
    one = {"parallel_tool_calls": False, "max_tokens": 120}
    answer = serving.client.chat.completions.create(messages=HELLO, tool_choice="required", **one, **options)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, answer.choices[0].finish_reason) == ("f", "tool_calls")
    arguments = json.loads(call.function.arguments)
    assert arguments["at"] in ("x", "y")
    result = {"role": "tool", "tool_call_id": call.id, "content": arguments["at"]}
    named = {"type": "function", "function": {"name": "f"}}
    pieces = list(
        serving.client.chat.completions.create(
            messages=[*HELLO, message, result], tool_choice=named, stream=True, **one, **options
        )
    )
    calls = [each for piece in pieces for each in piece.choices[0].delta.tool_calls or ()]
    assert json.loads(calls[0].function.arguments).keys() == {"at"}
    assert [len(calls), pieces[-1].choices[0].finish_reason] == [1, "tool_calls"]


def test_a_schema_beside_strict_tools(serving: Serving) -> None:
    """The random model chooses one of both."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["sun", "rain"]}}}
    answer = serving.client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        tools=[{"type": "function", "function": TOOL}],
        response_format=form,
        logit_bias=NO_REASONING,
        max_tokens=200,
        seed=1,
    )
    message = answer.choices[0].message
    if message.tool_calls:
        assert all(json.loads(call.function.arguments).keys() == {"at"} for call in message.tool_calls)
    else:
        assert message.content in ('"sun"', '"rain"')


def test_an_answer_without_demands_is_the_text_of_the_model(serving: Serving) -> None:
    """Parsed: the text that ``generate`` gives, as transformers parses it."""
    prompt = serving.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_tensors="pt")
    tokens = serving.unsharded.generate(
        **prompt, max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=2
    )
    new = tokens[0, prompt["input_ids"].shape[1] :]
    want = serving.tokenizer.parse_response(new.tolist(), prefix=prompt["input_ids"][0].tolist())
    answer = serving.client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=30, temperature=0
    )
    assert answer.choices[0].message.content == want.get("content", "")


def test_prompts_that_begin_alike(serving: Serving) -> None:
    """The second one finds two blocks in the cache, and its answer is that of the unsharded model."""
    tokens = torch.randint(3, VOCAB, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    cached = []
    for last in (5, 6):
        prompt = [*tokens, last]
        answer = serving.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
        )
        want = serving.unsharded.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        assert answer.choices[0].text == serving.tokenizer.decode(want[0, 601:], skip_special_tokens=True)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 512]
    text = urllib.request.urlopen(f"http://127.0.0.1:{serving.port}/metrics", timeout=5).read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["shardconv_cached_prompt_tokens_total"]) >= 512


def test_the_model_says_where_its_template_is(serving: Serving) -> None:
    assert serving.client.models.retrieve("tiny").response_template == "tokenizer"
