"""Token ids or positions that a table does not have: an error in one process, and so on every rank.

An embedding that is sharded by rows takes ids of other ranks' rows for zero vectors. Without a check, ids of
no rank's rows are zero vectors as well: a loss and a text out of nothing.
Megatron-LM asserts it (https://github.com/NVIDIA/Megatron-LM/issues/926).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_causal
from distributed import run_processes
from one_and_ranks import of_one, of_ranks, outcome, require_same
from shardconv_runtime import Communication
from torch import Tensor
from warm_compiler import warm_up

import shardconv


def ids(*tokens: int) -> Tensor:
    return torch.tensor([tokens])


def inside(model: Any) -> Tensor:
    return model(ids(5, 255, 0)).logits


def above(model: Any) -> Tensor:
    return model(ids(5, 256, 7)).logits


def negative(model: Any) -> Tensor:
    return model(ids(5, -1, 7)).logits


def generated(model: Any) -> Tensor:
    return model.generate(ids(5, 262, 7), max_new_tokens=3, do_sample=False)


def with_loss(model: Any) -> Tensor:
    return model(ids(5, 262, 7), labels=ids(5, 6, 7)).loss


def looked_up(model: Any) -> Tensor:
    return model.get_input_embeddings()(ids(5, 262, 7))


def longer_than_the_positions(model: Any) -> Tensor:
    return model(torch.arange(129)[None]).logits


def position(model: Any) -> Tensor:
    return model(ids(5, 6, 7), position_ids=ids(0, 1, 128)).logits


def negative_position(model: Any) -> Tensor:
    return model(ids(5, 6, 7), position_ids=ids(0, 1, -1)).logits


def token_type(model: Any) -> Tensor:
    return model(ids(5, 6, 7), token_type_ids=ids(5, 6, 300)).logits


USES = (
    inside,
    above,
    negative,
    generated,
    with_loss,
    looked_up,
    longer_than_the_positions,
    position,
    negative_position,
    token_type,
)


def compiled(model: Any) -> Tensor:
    return above(torch.compile(model, backend="aot_eager"))


def compiled_negative(model: Any) -> Tensor:
    return negative(torch.compile(model, backend="aot_eager"))


def in_a_batch(model: Any) -> Tensor:
    import transformers

    config = transformers.GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = model.generate_batch([[5, 6, 7], [5, 262, 7]], generation_config=config)
    return torch.tensor([answer.generated_tokens for answer in answers.values()])


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of tokens and of positions, sharded by rows; converted into "out" beside it."""
    root = tmp_path_factory.mktemp("gpt2")
    plain = save_causal("gpt2", root / "model", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    shardconv.convert(plain, root / "out", tp=2, sequence_parallel=True)
    return root


def test_ids_are_refused_as_in_one_process(gpt2: Path) -> None:
    require_same(USES, of_one(gpt2 / "model", USES), of_ranks(gpt2 / "out", USES))


def test_in_training_with_sequence_parallelism(gpt2: Path) -> None:
    uses = [use for use in USES if use not in (generated, looked_up)]
    options = {"training": True, "sequence_parallel": True, "gather_logits": True}
    require_same(uses, of_one(gpt2 / "model", uses, training=True), of_ranks(gpt2 / "out", uses, **options))


def test_compiled_code_fails_too(gpt2: Path) -> None:
    """The operator that looks ids up refuses them there."""
    warm_up()
    for found in of_ranks(gpt2 / "out", (compiled, compiled_negative)):
        assert all("index out of range" in each.error for each in found), found


def on_a_stage(path: Path) -> Any:
    import shardconv_runtime

    return outcome(
        above,
        lambda: shardconv_runtime.load(path, dtype=torch.float64, communication=Communication(timeout_s=30)),
    )


def test_on_every_stage_and_in_batches(tmp_path: Path) -> None:
    """Stages without the table would wait for what the first one makes of the ids."""
    plain = save_causal("llama", tmp_path / "model")
    shardconv.convert(plain, tmp_path / "out", tp=2, pp=2, check=False)
    for found in run_processes(4, on_a_stage, tmp_path / "out"):
        assert found.is_ours, found
        assert "model.embed_tokens was given the id 256" in found.error
    shardconv.convert(plain, tmp_path / "ranks", tp=2, check=False)
    for found in of_ranks(tmp_path / "ranks", (in_a_batch,))[0]:
        assert found.is_ours, found
        assert "the id 262" in found.error
