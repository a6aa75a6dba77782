"""Adapters of models in stages: results, training and files are those of peft in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from adapters import low_rank, scramble
from checkpoints import save_causal
from distributed import run_errors, run_processes
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from shardconv_runtime import PlanError, ShardconvError, Training
from shardconv_runtime.format import plan_json
from staged_training import WITHOUT_DROPOUT, batch, equal_labels
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardconv
from shardconv.simulation.model_runs import Float64

PP = 4
WEIGHTS = "adapter_model.safetensors"
ATTENTION = low_rank(["q_proj", "o_proj"], r=8)


def unsharded(source: Path) -> Any:
    """A model in one process."""
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)


def save_adapter(source: Path, config: LoraConfig, path: Path) -> Path:
    """A random adapter."""
    torch.manual_seed(1)
    model = get_peft_model(unsharded(source), config)
    scramble(model)
    model.save_pretrained(path)
    return path


def converted(tmp_path: Path, config: LoraConfig, tp: int, **changes: Any) -> tuple[Path, Path, Path, Path]:
    """A model of four layers and an adapter of it, ordinary and converted."""
    source = save_causal("llama", tmp_path / "model", num_hidden_layers=PP, **changes)
    saved = save_adapter(source, config, tmp_path / "adapter")
    shardconv.convert(source, tmp_path / "out", tp, pp=PP, dtype="float64", check=False)
    shardconv.adapt(tmp_path / "out", saved, tmp_path / "adapted")
    return source, saved, tmp_path / "out", tmp_path / "adapted"


def steps(model: Any, loss: Callable[[dict[str, Tensor]], float], clip: Callable[..., Tensor]) -> list[Any]:
    """Losses and norms of two steps of an optimizer of what is trained."""
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own or [nn.Parameter(torch.zeros(1))], lr=1e-2)
    found = []
    with Float64():
        for step in range(2):
            value = loss(equal_labels(batch(step)))
            found.append((value, clip(model, 1.0).item()))
            optimizer.step()
            optimizer.zero_grad()
    return found


def trained(options: dict[str, Any], out: str, schedule: str, dp: int) -> list[Any]:
    """The same on stages; the adapter is saved."""
    mesh = None
    if dp > 1:
        places = int(os.environ["WORLD_SIZE"]) // dp
        mesh = init_device_mesh("cpu", (places, dp, 1), mesh_dim_names=("pp", "dp", "tp"))
    loads = {"mesh": mesh, "data_parallel": dp > 1}
    model = shardconv_runtime.load(**options, **loads).train()
    pipeline = shardconv_runtime.Pipeline(model, microbatches=4, schedule=schedule)

    def loss(given: dict[str, Tensor]) -> float:
        if mesh is None:
            return pipeline.step(given).item()
        part = {name: value.chunk(dp)[mesh.get_local_rank("dp")] for name, value in given.items()}
        total = pipeline.step(part)
        torch.distributed.all_reduce(total, group=mesh.get_group("dp"))
        return total.item() / dp

    found = steps(model, loss, shardconv_runtime.clip_grad_norm)
    model.save_pretrained(out)
    return found


def trained_alone(source: Path, saved: Path, out: Path) -> list[Any]:
    """The same in one process."""
    model = PeftModel.from_pretrained(unsharded(source), saved, is_trainable=True).train()

    def loss(given: dict[str, Tensor]) -> float:
        value = model(**given).loss
        value.backward()
        found: float = value.item()
        return found

    found = steps(model, loss, lambda m, most: nn.utils.clip_grad_norm_(m.parameters(), most))
    model.save_pretrained(out)
    return found


def require_trained(found: list[Any], out: Path, want: list[Any], wanted: Path) -> None:
    """Losses, norms and the files that peft loads are the same."""
    for process in found:
        for step, right in zip(process, want, strict=True):
            assert step == pytest.approx(right, abs=1e-9)
    mine, theirs = load_file(out / WEIGHTS), load_file(wanted / WEIGHTS)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0.0, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("config", "tp", "dp", "schedule"),
    [
        (low_rank(), 2, 1, "interleaved"),
        pytest.param(low_rank(), 2, 1, "1f1b", marks=pytest.mark.slow),
        pytest.param(ATTENTION, 1, 2, "interleaved", marks=pytest.mark.slow),
        pytest.param(low_rank(["q_proj"], layers_to_transform=[2]), 1, 1, "1f1b", marks=pytest.mark.slow),
        pytest.param(low_rank(["q_proj", "lm_head", "embed_tokens"]), 2, 1, "looped", marks=pytest.mark.slow),
    ],
    ids=["all", "all, 1f1b", "attention, dp 2", "one stage", "ends"],
)
def test_an_adapter_trains_as_in_one_process(
    config: LoraConfig, tp: int, dp: int, schedule: str, tmp_path: Path
) -> None:
    source, saved, out, adapted = converted(tmp_path, config, tp)
    several = 1 if schedule == "1f1b" else 2
    options: dict[str, Any] = {"path": str(out), "adapter": str(adapted)}
    options["training"] = Training(stages_per_process=several)
    number = PP // several * tp * dp
    found = run_processes(number, trained, options, str(tmp_path / "trained"), schedule, dp)
    want = trained_alone(source, saved, tmp_path / "wanted")
    require_trained(found, tmp_path / "trained", want, tmp_path / "wanted")


@pytest.mark.slow
def test_a_tied_head_by_a_plan(tmp_path: Path) -> None:
    """The ordinary files of a GPT-2, whose head and embedding are on both ends."""
    source = save_causal("gpt2", tmp_path / "model", n_layer=PP, **WITHOUT_DROPOUT)
    saved = save_adapter(source, low_rank(["c_attn", "c_fc"], fan_in_fan_out=True), tmp_path / "adapter")
    shardconv.convert(source, tmp_path / "out", 2, pp=PP, dtype="float64", check=False)
    shardconv.adapt(tmp_path / "out", saved, tmp_path / "adapted")
    plan = tmp_path / "plan.json"
    plan_json.write(shardconv.plan(source, 2, pp=PP, dtype="float64", check=False), plan)
    adapter = str(tmp_path / "adapted")
    options = {"path": str(source), "plan": str(plan), "adapter": adapter, "training": True}
    found = run_processes(2 * PP, trained, options, str(tmp_path / "trained"), "1f1b", 1)
    want = trained_alone(source, saved, tmp_path / "wanted")
    require_trained(found, tmp_path / "trained", want, tmp_path / "wanted")


def answers(out: str, adapters: dict[str, str]) -> dict[str, Any]:
    """What a model with several adapters returns, and what it refuses."""
    model = shardconv_runtime.load(out, adapter=adapters)
    ids = batch()["input_ids"]
    found: dict[str, Any] = {}
    with torch.no_grad(), Float64():
        for name in adapters:
            model.set_adapter(name)
            found[name] = model(ids).logits
            found[f"{name}, tokens"] = model.generate(ids[:2], max_new_tokens=5, do_sample=False).tolist()
        with model.disable_adapter():
            found["without"] = model(ids).logits
    for name in ("merge_and_unload", "merge_adapter", "unload"):
        with pytest.raises(PlanError, match="does not know stages yet"):
            getattr(model, name)()
    with pytest.raises(PlanError, match="add_adapter does not know stages yet"):
        shardconv_runtime.add_adapter(model, low_rank(), "more")
    return found


def test_several_adapters_answer_as_in_one_process(tmp_path: Path) -> None:
    source, saved, out, adapted = converted(tmp_path, ATTENTION, 1)
    other = save_adapter(source, low_rank(["down_proj"]), tmp_path / "other")
    shardconv.adapt(out, other, tmp_path / "other-adapted")
    model = PeftModel.from_pretrained(unsharded(source), saved, "first").eval()
    model.load_adapter(other, "second")
    given = {"first": str(adapted), "second": str(tmp_path / "other-adapted")}
    ids = batch()["input_ids"]
    for process in run_processes(PP, answers, str(out), given):
        with torch.no_grad(), Float64():
            for name in given:
                model.set_adapter(name)
                torch.testing.assert_close(process[name], model(ids).logits, rtol=0.0, atol=1e-9)
                tokens = model.generate(ids[:2], max_new_tokens=5, do_sample=False).tolist()
                assert process[f"{name}, tokens"] == tokens
            with model.disable_adapter():
                torch.testing.assert_close(process["without"], model(ids).logits, rtol=0.0, atol=1e-9)


def loaded_with(out: str, adapter: str) -> None:
    """Load a model."""
    shardconv_runtime.load(out, adapter=adapter)


def test_adapters_of_other_stages_are_refused(tmp_path: Path) -> None:
    source, saved, out, _ = converted(tmp_path, ATTENTION, 1)
    shardconv.convert(source, tmp_path / "two", 1, pp=2, check=False, dtype="float64")
    shardconv.adapt(tmp_path / "two", saved, tmp_path / "for-two")
    for error in run_errors(PP, loaded_with, str(out), str(tmp_path / "for-two")):
        assert isinstance(error, ShardconvError)
        assert "adapted for a conversion of other stages" in str(error)
    with pytest.raises(ShardconvError, match="name the directory of all of them"):
        shardconv.adapt(out / "stage-00000-of-00004", saved, tmp_path / "none")
