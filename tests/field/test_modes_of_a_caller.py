"""Scripts begin with ``torch.set_default_device("cuda")``, or do everything in inference mode: the results
are those of a fresh process. The device ``meta`` stands for a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal
from shardconv_runtime.default_modes import in_default_modes

import shardconv

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "default device": lambda: torch.device("meta"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal("llama", tmp_path_factory.mktemp("modes") / "model")


def done(source: Path, directory: Path) -> list[bytes]:
    """The files that commands write."""
    shardconv.convert(source, directory / "out", 2)
    shardconv.convert(source, directory / "new", 2, random_init=True, check=False)
    shardconv.verify(directory / "out", against=str(source), numerics=True)
    shardconv.merge(directory / "out", directory / "merged")
    files = [*directory.rglob("*.safetensors"), *directory.rglob("plan.json")]
    return [file.read_bytes() for file in sorted(files)]


@pytest.mark.usefixtures("solved_anew")
@pytest.mark.parametrize("mode", MODES)
def test_commands_write_the_same(source: Path, mode: str, tmp_path: Path) -> None:
    with MODES[mode]():
        found = done(source, tmp_path / "in the mode")
    assert found == done(source, tmp_path / "plain")


@pytest.mark.parametrize("mode", MODES)
def test_a_loaded_model_is_the_same_and_can_be_trained(source: Path, mode: str, tmp_path: Path) -> None:
    shardconv.convert(source, tmp_path / "out", 1, check=False)
    ids = torch.arange(3, 11)[None]
    with MODES[mode]():
        model = shardconv_runtime.load(tmp_path / "out", training=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with MODES[mode]():
        shardconv_runtime.save_optimizer(model, optimizer, tmp_path / "optimizer")
        shardconv_runtime.save(model, tmp_path / "saved")
        again = shardconv_runtime.load(tmp_path / "saved", training=True)
        other = torch.optim.AdamW(again.parameters())
        shardconv_runtime.load_optimizer(again, other, tmp_path / "optimizer")
    assert torch.equal(again(ids).logits, model(ids).logits)
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(other.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
        assert not mine.is_inference()


def test_every_function_is_called_in_default_modes() -> None:
    functions = {name: getattr(shardconv, name) for name in shardconv.__all__ if name.islower()}
    functions.pop("__version__")
    names = ("add_adapter", "load", "load_optimizer", "parallelize", "save", "save_optimizer")
    functions |= {f"runtime.{name}": getattr(shardconv_runtime, name) for name in names}
    for name, function in functions.items():
        assert inspect.unwrap(function) is not function, f"{name}: decorate it with in_default_modes"


def test_modes_are_restored_after_an_error() -> None:
    @in_default_modes
    def fails() -> None:
        assert (torch.is_inference_mode_enabled(), torch.get_default_device().type) == (False, "cpu")
        raise KeyError

    with torch.inference_mode(), torch.device("meta"):
        with pytest.raises(KeyError):
            fails()
        assert torch.is_inference_mode_enabled()
        assert torch.get_default_device().type == "meta"


def test_batches_in_inference_mode_have_the_tokens_of_others(source: Path, tmp_path: Path) -> None:
    """Transformers' manager writes to tensors that it made in the caller's mode, and returns no tokens."""
    shardconv.convert(source, tmp_path / "out", 1, check=False)
    model = shardconv_runtime.load(tmp_path / "out")
    options = {
        "generation_config": transformers.GenerationConfig(max_new_tokens=3, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=32
        ),
    }

    def tokens() -> list[list[int]]:
        answers = model.generate_batch([[1, 2, 3], [4, 5]], **options)
        return [answer.generated_tokens for answer in answers.values()]

    with torch.inference_mode():
        found = tokens()
    assert found == tokens()
    assert [len(each) for each in found] == [3, 3]
