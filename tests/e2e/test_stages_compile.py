"""Compiled stages, and stages whose products of one input are one: the numbers and tokens of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import shardconv_runtime
import torch
import transformers
from batches import batch, one_by_one
from batches import prompts as many_prompts
from checkpoints import save_causal
from distributed import run_errors, run_processes
from shardconv_runtime import Communication, Compiling, LaunchError, PlanError
from shardconv_runtime.format import plan_json
from shardconv_runtime.parallel.fused_products import fused_products
from torch import Tensor
from warm_compiler import warm_up

import shardconv

PP = 2
LENGTHS = (7, 7)
"""A second length has a graph for all: ``tests/e2e/test_compile.py``."""
NEW: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def text(length: int) -> dict[str, Tensor]:
    """Two prompts ``[2, length]``, the second one padded on the left."""
    ids = torch.randint(3, 256, (2, length), generator=torch.Generator().manual_seed(length))
    mask = (torch.arange(length) >= torch.tensor([[0], [3]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def results(model: Any) -> dict[str, list[Tensor]]:
    """Logits, and tokens, of texts of several lengths."""
    with torch.inference_mode():
        return {
            "logits": [model(**text(length)).logits for length in LENGTHS],
            "tokens": [model.generate(**text(length), **NEW) for length in LENGTHS[1:]],
        }


def require_same(found: dict[str, list[Tensor]], want: dict[str, list[Tensor]]) -> None:
    for got, logits in zip(found["logits"], want["logits"], strict=True):
        torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
    for got, tokens in zip(found["tokens"], want["tokens"], strict=True):
        assert torch.equal(got, tokens)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a plan of it in two stages."""
    root = tmp_path_factory.mktemp("stages")
    source, path = save_causal("llama", root / "llama"), root / "staged.json"
    plan_json.write(shardconv.plan(source, 1, pp=PP, dtype="float32", check=False), path)
    warm_up()
    return source, path


def unsharded(source: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def compiled(source: Path, plan: Path) -> dict[str, Any]:
    """What a compiled stage gives, and how many graphs it has."""
    graphs: list[Any] = []

    def captured(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    with mock.patch.object(
        torch,
        "compile",
        lambda function, *, options=None, **others: compile_(function, **others, backend=captured),
    ):
        model = shardconv_runtime.load(
            source, plan=plan, communication=Communication(timeout_s=60), compile=True
        )
        found: dict[str, Any] = results(model)
        found["graphs"] = len(graphs)
        found["batch"] = batch(model, many_prompts(3))
        assert "forward" not in vars(model)
        with pytest.raises(PlanError, match="no decoding with one graph"):
            shardconv_runtime.load(source, plan=plan, compile=Compiling(warm_up=[(1, 16)]))
    return found


def test_compiled_stages(llama: tuple[Path, Path]) -> None:
    source, plan = llama
    model = unsharded(source)
    want, answers = results(model), one_by_one(model, many_prompts(3))
    for found in run_processes(PP, compiled, source, plan):
        require_same(found, want)
        assert found["batch"] == answers
        # The first call of a length is uncompiled; a graph is for the second, and one decodes.
        assert found["graphs"] == 2


def breaking(source: Path, plan: Path) -> None:
    """One stage cannot be captured. Neither generates code, which takes seconds and shows nothing here."""
    compile_ = torch.compile

    def captured(function: Any, *, options: Any = None, **others: Any) -> Any:
        def breaks(*args: Any, **kwargs: Any) -> Any:
            if os.environ["RANK"] == "0":
                torch._dynamo.graph_break()
            return function(*args, **kwargs)

        return compile_(breaks, **others, backend="eager")

    torch.compile = captured
    model = shardconv_runtime.load(source, plan=plan, communication=Communication(timeout_s=60), compile=True)
    with torch.inference_mode():
        for _ in range(2):
            model(**text(7))


def test_a_stage_that_cannot_be_captured_is_an_error_on_all(llama: tuple[Path, Path]) -> None:
    first, last = run_errors(PP, breaking, *llama)
    assert isinstance(first, PlanError)
    assert isinstance(last, LaunchError)
    for error in (first, last):
        assert "cannot be captured as one" in str(error)


def fused(source: Path) -> dict[str, Any]:
    """What a stage with fused layers gives, and how many it has."""
    model = shardconv_runtime.load(source, communication=Communication(timeout_s=60), fuse=True)
    found: dict[str, Any] = results(model)
    found["fused"] = len(fused_products(model))
    return found


def test_products_of_one_input_are_one(tmp_path: Path) -> None:
    source, out = save_causal("llama", tmp_path / "llama"), tmp_path / "out"
    shardconv.convert(source, out, 2, pp=PP, dtype="float32", check=False)
    want = results(unsharded(source))
    for found in run_processes(PP * 2, fused, out):
        require_same(found, want)
        assert found["fused"] == 2, "of this stage's layer: queries, keys and values; gate and up"
