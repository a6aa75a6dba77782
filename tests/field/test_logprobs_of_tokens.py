"""Log probabilities of an answer: a token is shown as what it adds to the text.

Elsewhere: equal texts collapse, parts of characters are shown as U+FFFD, tokens lose their spaces, offsets do
not fit, and an excluded token's -inf is no JSON.

- https://github.com/sgl-project/sglang/issues/32290
- https://github.com/sgl-project/sglang/issues/5984
- https://github.com/vllm-project/vllm/issues/5334
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from shardconv_runtime.openai_api.answer_forms import AnswerForm, AnswerPiece
from shardconv_runtime.openai_api.schemas import TokenLogprob
from shardconv_runtime.openai_api.token_texts import BYTE_OF, TokenTexts


def byte_level() -> Any:
    """A token for each byte, and some words; two of the tokens have one text."""
    rows = dict(BYTE_OF)
    rows |= {"Ġhello": 256, "Ġworld": 257, "âĤ": 258}  # two of the three bytes of the euro sign
    model = Tokenizer(models.BPE(rows, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_tokens([AddedToken("a", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=model)


def sentence_pieces() -> Any:
    """Words with a mark for their space, and bytes; the decoder strips the first space."""
    rows = {f"<0x{byte:02X}>": byte for byte in range(256)}
    rows |= {text: 256 + n for n, text in enumerate(("▁hello", "▁world", "hello", "<unk>", "A"))}
    model = Tokenizer(models.BPE(rows, [], unk_token="<unk>", byte_fallback=True))
    replaced = decoders.Replace("▁", " ")
    model.decoder = decoders.Sequence(
        [replaced, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")


def shown(tokenizer: Any, entries: list[TokenLogprob], *, chat: bool = False) -> Any:
    """The log probabilities of an answer, as a client gets them."""
    form = AnswerForm("tiny", TokenTexts(tokenizer), chat, [[1]], 1, True)
    found = form.whole([[AnswerPiece("", len(entries), "stop", tuple(entries))]])["choices"][0]["logprobs"]
    return json.loads(json.dumps(found, allow_nan=False))


def of_tokens(*tokens: int) -> list[TokenLogprob]:
    return [TokenLogprob(token, -1.0) for token in tokens]


@pytest.mark.parametrize(
    ("make", "ids", "names", "offsets"),
    [
        (byte_level, [256, 257, 0xE2, 0x82, 0xAC, 257], [" hello", " world"], [0, 6, 12, 12, 12, 13]),
        (sentence_pieces, [256, 257, 0xE2, 0x82, 0xAC, 257], ["hello", " world"], [0, 5, 11, 11, 11, 12]),
        (sentence_pieces, [0xE2, 0x82, 0xAC, 256, 258], [], [0, 0, 0, 1, 7]),
    ],
)
def test_tokens_have_their_spaces_offsets_and_bytes(
    make: Any, ids: list[int], names: list[str], offsets: list[int]
) -> None:
    tokenizer = make()
    text = tokenizer.decode(ids)
    found = shown(tokenizer, of_tokens(*ids))
    assert found["tokens"][: len(names)] == names
    assert found["text_offset"] == offsets
    for name, offset in zip(found["tokens"], offsets, strict=True):
        assert name.startswith("bytes:\\x") or text[offset:].startswith(name), name
    chat = shown(tokenizer, of_tokens(*ids), chat=True)["content"]
    assert bytes(byte for entry in chat for byte in entry["bytes"]).decode() == text
    assert "\\xe2" in [entry["token"] for entry in chat]


def test_bytes_of_several_at_once() -> None:
    found = shown(byte_level(), of_tokens(258, 0xAC), chat=True)["content"]
    assert [entry["bytes"] for entry in found] == [[0xE2, 0x82], [0xAC]]
    assert [entry["token"] for entry in found] == ["\\xe2\\x82", "\\xac"]


@pytest.mark.parametrize("chosen", [0x41, 260])
def test_equal_texts_do_not_collapse(chosen: int) -> None:
    """Of a byte and a token with one text, the chosen one has it."""
    tokenizer = sentence_pieces()
    top = ((0x41, -2.24), (260, -3.28), (0xE2, -4.0), (0x82, -5.0), (257, -6.0))
    entries = [TokenLogprob(257, -6.0, top), TokenLogprob(chosen, dict(top)[chosen], top)]
    found = shown(tokenizer, entries)
    first, second = found["top_logprobs"]
    other = {0x41: 260, 260: 0x41}[chosen]
    assert first == {"A": -2.24, "token_id:260": -3.28, "bytes:\\xe2": -4, "bytes:\\x82": -5, "world": -6}
    assert second["A"] == found["token_logprobs"][1] == dict(top)[chosen]
    assert second[f"token_id:{other}"] == dict(top)[other]
    assert list(second.values()) == [value for _, value in top]
    assert " world" in second


def test_tokens_that_the_model_excludes_are_json() -> None:
    top = ((256, -0.5), (257, -math.inf))
    assert shown(byte_level(), [TokenLogprob(256, -0.5, top)])["top_logprobs"][0][" world"] == -9999
    (entry,) = shown(byte_level(), [TokenLogprob(256, -0.5, top)], chat=True)["content"]
    assert entry["top_logprobs"][1]["logprob"] == -9999


def test_pieces_of_a_stream_join_to_the_whole() -> None:
    tokenizer = sentence_pieces()
    ids = [256, 257, 0xE2, 0x82, 0xAC, 257]
    form = AnswerForm("tiny", TokenTexts(tokenizer), False, [[1]], 1, True)
    joined: dict[str, list[Any]] = defaultdict(list)
    for begin, end in ((0, 1), (1, 4), (4, 6)):
        piece = AnswerPiece("", end, None, tuple(of_tokens(*ids[begin:end])))
        for key, values in form.parts(0, piece)[0]["choices"][0]["logprobs"].items():
            joined[key] += values
    assert joined == shown(tokenizer, of_tokens(*ids))
