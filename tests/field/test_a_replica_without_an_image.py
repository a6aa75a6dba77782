"""Training beside FSDP where one replica's batch lacks what a part of the model needs: an error, no hang.

The replica without an image gathers layers of the text while the other one gathers those of the vision tower.
Over gloo that ended the processes, over NCCL it hangs.
https://github.com/huggingface/transformers/issues/37186, https://github.com/pytorch/torchtitan/pull/4777
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
from distributed import run_processes
from made_inputs import make_inputs
from one_and_ranks import Outcome
from shardconv_runtime import ShardconvError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from zoo.saved import save_random

import shardconv

SHAPES = {1: (2, 1), 2: (2, 2)}
"""Of meshes, by tp."""


def step(path: Path, tp: int, batches: list[dict[str, Tensor]], training: bool, later: bool) -> Outcome:
    """A step of the batch of this process's replica."""
    mesh = init_device_mesh("cpu", SHAPES[tp], mesh_dim_names=("dp", "tp"))
    options: dict[str, Any] = {"mesh": mesh, "training": True, "timeout_s": 30}
    model = shardconv_runtime.load(path, **options, data_parallel=not later)
    if later:
        shardconv_runtime.data_parallel(model, mesh)
    batch = batches[mesh["dp"].get_local_rank()]
    try:
        with torch.set_grad_enabled(training):
            output = model.train(training)(**batch)
        result = output.logits if output.get("logits") is not None else output[0]
        if training:
            result.float().mean().backward()
        return Outcome(result.detach())
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}", isinstance(error, ShardconvError))


def text_of(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the image, and tokens that stand for it."""
    return {"input_ids": given["input_ids"].clamp(max=200), "attention_mask": given["attention_mask"]}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A model of images and text, converted into "1" and "2" for as many ranks, and what it takes."""
    root = tmp_path_factory.mktemp("llava")
    given = make_inputs(save_random("other", "llava", root / "model"), seed=5).tensors
    for tp in SHAPES:
        shardconv.convert(root / "model", root / str(tp), tp=tp, check=False)
    return root, dict(given)


@pytest.mark.parametrize(("tp", "training", "later"), [(1, True, False), (2, True, True), (1, False, True)])
def test_replicas_agree_before_they_gather(llava: Any, tp: int, training: bool, later: bool) -> None:
    root, image = llava
    given = [image, text_of(image)], training, later
    for found in run_processes(2 * tp, step, root / str(tp), tp, *given, start_group=True):
        assert found.is_ours, found
        assert "called the model with pixel_values, and process" in found.error
        assert "with ids alone" in found.error


@pytest.mark.parametrize("kind", ["images", "text"])
def test_batches_of_one_kind_train(llava: Any, kind: str) -> None:
    root, image = llava
    batch = image if kind == "images" else text_of(image)
    for found in run_processes(2, step, root / "1", 1, [batch, batch], True, False, start_group=True):
        assert found.value is not None, found


def test_an_encoder_that_one_replica_skips(tmp_path: Path) -> None:
    model = save_random("other", "whisper", tmp_path / "model")
    given = make_inputs(model, seed=5).tensors
    with torch.no_grad():
        encoded = model.get_encoder()(given["input_features"])
    shardconv.convert(tmp_path / "model", tmp_path / "out", tp=1, check=False)
    others = {name: x for name, x in given.items() if name != "input_features"}
    batches = [dict(given), {**others, "encoder_outputs": (encoded[0],)}]
    for found in run_processes(2, step, tmp_path / "out", 1, batches, True, False, start_group=True):
        assert found.is_ours, found
        assert "called the model with input_features, and process 1" in found.error
