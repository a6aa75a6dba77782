"""A server of two ranks with a model that takes images: its answers are those of ``generate``."""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import VOCAB, save
from test_serve_agents import SHAPE, Serving, save_characters

import shardconv

pytest.importorskip("PIL")
if not hasattr(transformers.ContinuousBatchingManager, "pause"):
    pytest.skip("batches of this transformers cannot pause", allow_module_level=True)

import openai
import PIL.Image
from test_serve import running_ranks
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

SIZE = 28
TEXT = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
TOKENS = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)
"""The content of a message in the chat template."""


def save_model(path: Path) -> Any:
    """A random model with its processor; the unsharded one."""
    save_characters(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT, **HEADS, **TOKENS, "max_position_embeddings": 1024},
        vision_config={"model_type": "clip_vision_model", **VISION, "image_size": SIZE, "patch_size": 14},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = transformers.LlavaForConditionalGeneration(config).to(torch.float64).eval()
    save(model, path)
    template = SHAPE.chat_template.replace("{{ m.content }}", PARTS)
    images = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    tokenizer.chat_template = template
    transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=template,
        num_additional_image_tokens=1,
    ).save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    root = tmp_path_factory.mktemp("images")
    unsharded = save_model(root / "llava")
    shardconv.convert(root / "llava", root / "out", tp=2, check=False)
    with running_ranks(root / "out") as port:
        yield Serving(port, unsharded, transformers.AutoProcessor.from_pretrained(root / "llava"))


def picture(width: int, height: int) -> Any:
    return PIL.Image.linear_gradient("L").resize((width, height)).convert("RGB")


def url_of(image: Any, form: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def message(*parts: Any) -> list[dict[str, Any]]:
    """A message of texts and images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def generated(serving: Serving, parts: tuple[Any, ...], **options: Any) -> str:
    """What the unsharded model answers to a message."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    inputs = serving.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )
    tokens = serving.unsharded.generate(
        **inputs.to(torch.float64), max_new_tokens=8, pad_token_id=0, eos_token_id=None, **options
    )
    return str(serving.tokenizer.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])).strip()


SIZES = [(40, 30), (28, 28), (5, 90), (300, 20), (1, 1), (64, 64), (13, 17), (500, 400), (29, 27), (2, 60)]


def test_answers_are_those_of_generate(serving: Serving) -> None:
    """Twenty requests at once: images of several sizes, and chats without any; one is streamed and drawn."""
    asked: list[tuple[Any, ...]] = [(picture(*size), "a") for size in SIZES]
    asked += [("c", picture(9, 9), "d", picture(30, 40)), (picture(7, 7), picture(8, 80), "e")]
    asked += [(text,) for text in ("b", "e", "f", "ab", "cd", "fed", "b a b")]
    options = {"model": "tiny", "max_tokens": 8, "extra_body": {"ignore_eos": True}}

    def answer(parts: tuple[Any, ...]) -> str:
        completion = serving.client.chat.completions.create(
            messages=message(*parts), temperature=0, **options
        )
        return str(completion.choices[0].message.content)

    def streamed() -> str:
        pieces = serving.client.chat.completions.create(
            messages=message(*asked[0]), temperature=0.8, seed=4, stream=True, **options
        )
        return "".join(piece.choices[0].delta.content or "" for piece in pieces)

    with ThreadPoolExecutor(len(asked) + 1) as pool:
        drawn = pool.submit(streamed)
        found = list(pool.map(answer, asked))
    assert found == [generated(serving, parts, do_sample=False) for parts in asked]
    assert len(set(found)) > 4
    torch.manual_seed(4)
    assert drawn.result() == generated(serving, asked[0], do_sample=True, temperature=0.8, top_k=0)


def test_a_response_to_an_image(serving: Serving) -> None:
    content = [
        {"type": "input_image", "image_url": url_of(picture(40, 30)), "detail": "auto"},
        {"type": "input_text", "text": "a"},
    ]
    response = serving.client.responses.create(
        model="tiny", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=8
    )
    want = generated(serving, (picture(40, 30), "a"), do_sample=False)
    assert want.startswith(response.output_text)


def test_a_client_that_leaves_an_answer_to_an_image(serving: Serving) -> None:
    """The batch goes on soon."""
    options = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
    with serving.client.chat.completions.create(
        messages=message(picture(9, 9), "a"), max_tokens=900, stream=True, **options
    ) as stream:
        next(iter(stream))
    answer = serving.client.chat.completions.create(messages=message("b"), max_tokens=8, timeout=8, **options)
    assert answer.choices[0].message.content == generated(serving, ("b",), do_sample=False)


def image_header(width: int, height: int) -> bytes:
    """A PNG file of a size without its pixels."""
    buffer = io.BytesIO()
    picture(8, 8).save(buffer, "PNG")
    content = bytearray(buffer.getvalue())
    content[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return bytes(content)


def as_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


HOSTILE = {
    "a bomb": ([as_url(image_header(60_000, 60_000))], "at most|cannot be read"),
    "a size that it has not": ([as_url(image_header(4000, 4000))], "cannot be read"),
    "no image": ([as_url(b"hello")], "cannot be read"),
    "a picture of vectors": ([as_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>")], "cannot be read"),
    "nothing": (["data:image/png;base64,"], "cannot be read"),
    "no base64": (["data:image/png;base64,???"], "base64"),
    "another server": (["http://127.0.0.1:1/a.png"], "the server fetches none"),
    "a file": (["file:///etc/passwd"], "data URLs"),
    "a URL that is none": (["http://[::1/a.png"], "valid URL"),
    "too many": ([url_of(picture(1, 1))] * 17, "at most 16"),
    "10,000": (["data:image/png;base64,"] * 10_000, "at most 16"),
}


def test_hostile_images(serving: Serving) -> None:
    """Each is the client's fault, and others are answered."""
    for urls, reason in HOSTILE.values():
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        request = urllib.request.Request(
            f"http://127.0.0.1:{serving.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=60)
        text = error.value.read().decode()
        assert error.value.code == 400, (reason, text)
        assert any(each in json.loads(text)["error"]["message"] for each in reason.split("|")), text
    with pytest.raises(openai.BadRequestError, match="messages"):
        serving.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]
        )
    answer = serving.client.chat.completions.create(
        model="tiny", messages=message("b"), max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].message.content == generated(serving, ("b",), do_sample=False)
