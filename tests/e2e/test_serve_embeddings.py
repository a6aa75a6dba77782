"""A server of two ranks with an encoder: its embeddings are those of the unsharded model."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import ENCODER, VOCAB, save, save_encoder
from distributed import torchrun_env
from forked import run_forked
from ports import free_port
from shardconv_runtime import serve

import shardconv

pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

import openai
from test_serve import START_S, _exit_with, arguments, running_ranks, save_words


@dataclass(frozen=True)
class Embedding:
    """A running server, and the unsharded model."""

    client: Any
    unsharded: Any

    def expected(self, row: list[int]) -> torch.Tensor:
        """The mean of the hidden states of one text, of length 1."""
        with torch.no_grad():
            hidden = self.unsharded(torch.tensor([row])).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden.mean(0), dim=0)


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedding]:
    root = tmp_path_factory.mktemp("embeddings")
    config = transformers.BertConfig(**ENCODER)
    model = transformers.BertModel(config).to(torch.float64).eval()
    save(model, root / "bert")
    save_words(root / "bert")
    shardconv.convert(root / "bert", root / "out", tp=2, check=False)
    with running_ranks(root / "out") as port:
        url = f"http://127.0.0.1:{port}/v1"
        yield Embedding(openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60), model)


def test_embeddings(embedding: Embedding) -> None:
    """Many requests at once, of one text and of several, as words and as ids."""
    draw = random.Random(0)
    rows = [[draw.randrange(30, 199) for _ in range(draw.choice([1, 3, 17, 40]))] for _ in range(24)]

    def embed(index: int) -> list[Any]:
        several = rows[index : index + 3]
        texts = [" ".join(f"w{token}" for token in row) for row in several]
        asked: Any = (texts[0], texts, several[0], several)[index % 4]
        found = embedding.client.embeddings.create(model="tiny", input=asked, encoding_format="float")
        assert [each.index for each in found.data] == list(range(len(found.data)))
        assert found.usage.prompt_tokens == sum(map(len, several[: len(found.data)]))
        return [each.embedding for each in found.data]

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(embed, range(12)))
    for index, found in enumerate(answers):
        want = torch.stack([embedding.expected(row) for row in rows[index : index + len(found)]])
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), want, rtol=0, atol=1e-10)


def test_the_form_that_the_client_asks_for_by_default(embedding: Embedding) -> None:
    """Bytes of float32 in base64."""
    (found,) = embedding.client.embeddings.create(model="tiny", input="w11 w12").data
    want = embedding.expected([11, 12])
    assert torch.allclose(torch.tensor(found.embedding, dtype=torch.float64), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": "w11 " * 3000}, "the model takes"),
        ({"input": [[VOCAB]]}, f"the id {VOCAB}"),
        ({"input": ["w11"] * 2049}, "input"),
        ({"input": "w11", "dimensions": 4}, "dimensions"),
        ({"input": "w11", "model": "other"}, "not served"),
        ({"input": "w11", "extra_body": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_what_is_refused(embedding: Embedding, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(openai.APIStatusError, match=reason) as error:
        embedding.client.embeddings.create(**{"model": "tiny", **options})
    assert 400 <= error.value.status_code < 500


def test_the_server_has_no_other_answers(embedding: Embedding) -> None:
    assert embedding.client.models.retrieve("tiny").pooling == "mean"
    with pytest.raises(openai.NotFoundError):
        embedding.client.completions.create(model="tiny", prompt="w11")


def test_a_model_with_another_head_is_refused_at_the_start(tmp_path: Path) -> None:
    source = save_encoder(tmp_path / "bert")
    save_words(source)
    shardconv.convert(source, tmp_path / "out", tp=1, check=False)
    argv = ["serve", *arguments(tmp_path / "out", free_port())]
    env = os.environ | torchrun_env(0, 1, free_port())
    done = run_forked(_exit_with, serve.main, argv=argv, env=env, timeout=START_S)
    assert done.returncode == 5
    assert "neither generates text nor returns last_hidden_state" in done.stderr
