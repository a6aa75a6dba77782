"""Stages that are trained, in real processes: loss, gradients, norm and steps are those of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime import PlanError, ShardconvError
from shardconv_runtime.format.plan_json import require_training
from shardconv_runtime.pp.stage_link import Handover
from staged_training import (
    PP,
    Run,
    batch,
    checkpoint,
    gpt2,
    interrupted,
    planned,
    require_same,
    resumed,
    trained,
    trained_alone,
)
from torch import Tensor, nn

import shardconv
from shardconv.simulation.model_runs import Float64


@pytest.mark.parametrize(
    "run",
    [
        Run(steps=3),
        Run(tp=2, schedule="gpipe", microbatches=2, steps=2, recompute=True, gather_logits=False),
    ],
    ids=["1f1b", "tp 2, gpipe, recomputed, shards of logits"],
)
def test_stages_train_as_one_process(run: Run, tmp_path: Path) -> None:
    source, model = gpt2(tmp_path)
    found = run_processes(run.num_processes, trained, str(source), planned(source, run.tp), run)
    require_same(found, trained_alone(model, run), run)


@pytest.mark.parametrize(
    "run",
    [
        Run(tp=2, steps=2, sequence_parallel=True),
        Run(tp=2, dp=2, microbatches=2, sequence_parallel=True, length=7, recompute=True),
    ],
    ids=["even", "padded, dp 2, recomputed"],
)
def test_stages_with_sequence_parallelism(run: Run, tmp_path: Path) -> None:
    source, model = gpt2(tmp_path)
    plan = planned(source, run.tp, sequence_parallel=True, check=True)
    found = run_processes(run.num_processes, trained, str(source), plan, run)
    require_same(found, trained_alone(model, run), run)


def test_parameters_beside_layers_are_there_for_each_backward_pass(tmp_path: Path) -> None:
    """A norm behind the embedding needs its weight, which FSDP2 frees after the pass of a microbatch."""
    source, model = checkpoint("bloom", tmp_path, hidden_dropout=0.0, attention_dropout=0.0)
    run = Run(dp=2, schedule="gpipe")
    found = run_processes(run.num_processes, trained, str(source), planned(source, run.tp), run)
    require_same(found, trained_alone(model, run), run)


@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_steps_of_eight_processes(steps: int, tmp_path: Path) -> None:
    source, model = gpt2(tmp_path)
    run = Run(tp=2, dp=2, microbatches=2, steps=steps)
    found = run_processes(run.num_processes, trained, str(source), planned(source, run.tp), run)
    require_same(found, trained_alone(model, run), run)


def test_a_job_with_stages_is_resumed_with_stages_and_without(tmp_path: Path) -> None:
    source, model = gpt2(tmp_path)
    out = tmp_path / "trained"
    run = Run(tp=2, microbatches=2)
    run_processes(2 * PP, interrupted, str(source), planned(source, 2), run, str(out))
    want = trained_alone(model, Run(steps=4, clip=False))
    shardconv.reshard(out / "model", tmp_path / "plain-1", 1)
    (alone,) = run_processes(1, resumed, str(out), str(tmp_path / "plain-1"), None)
    for found in [alone, *run_processes(2 * PP, resumed, str(out), str(out / "model"), Run())]:
        assert found == pytest.approx(want["losses"][3], abs=1e-8)
    plain = transformers.AutoModelForCausalLM.from_pretrained(out / "plain", dtype=torch.float64)
    with Float64():
        assert plain(**batch(2)).loss.item() == pytest.approx(want["losses"][2], abs=1e-8)


def refused(source: str, plan: str) -> dict[str, str]:
    """What a process is told of things that stages cannot do."""
    model = shardconv_runtime.load(source, plan=plan, training=True)
    found: dict[str, str] = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ShardconvError as error:
            found[name] = str(error)

    given = batch()
    pipeline = shardconv_runtime.Pipeline(model, microbatches=4)
    note("a call with gradients", lambda: model(**given))
    note("two stages, one microbatch", lambda: shardconv_runtime.Pipeline(model, microbatches=1))
    note("schedule", lambda: shardconv_runtime.Pipeline(model, microbatches=4, schedule="zigzag"))
    note("three of four", lambda: pipeline.step({n: v[:3] for n, v in given.items()}))
    note("no labels", lambda: pipeline.step({"input_ids": given["input_ids"]}))
    parts = [{n: v[2 * i : 2 * i + 2, : 6 - (i == 3)] for n, v in given.items()} for i in range(4)]
    note("other lengths", lambda: pipeline.step(parts))
    note("as many", lambda: pipeline.step(parts[:3]))
    mine = {n: v + int(os.environ["RANK"]) for n, v in given.items()}
    note("other inputs", lambda: pipeline.step(mine))
    return found


def test_what_stages_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    source, _ = gpt2(tmp_path)
    first, second = run_processes(PP, refused, str(source), planned(source, 1))
    wanted = {
        "a call with gradients": "train with shardconv_runtime.Pipeline",
        "two stages, one microbatch": "needs at least 2",
        "schedule": "'zigzag' should be one of 'gpipe', '1f1b'",
        "three of four": "input_ids 3, labels 3 cannot be divided into 4 microbatches",
        "no labels": "give them, or a loss= to Pipeline",
        "other lengths": "microbatch 3 has other arguments or shapes",
        "as many": "3 microbatches were given to a pipeline of 4",
        "other inputs": "another input_ids of microbatch 0 on rank 1",
    }
    for found in (first, second):
        assert found.keys() == wanted.keys()
        for name, text in wanted.items():
            assert text in found[name], name


def with_other_losses(source: str, plan: str) -> list[float]:
    """The loss of a user, and the model's own with a number of items that the user gives."""
    model = shardconv_runtime.load(source, plan=plan, training=True).train()

    def loss(output: Any, part: Any) -> Tensor:
        found: Tensor = output.logits.square().mean()
        return found

    given = batch()
    own = shardconv_runtime.Pipeline(model, microbatches=4, loss=loss)
    usual = shardconv_runtime.Pipeline(model, microbatches=2, schedule="gpipe")
    with Float64():
        found = [own.step({"input_ids": given["input_ids"]}).item()]
        norms = [shardconv_runtime.grad_norm(model).item()]
        model.zero_grad()
        found += [usual.step({**given, "num_items_in_batch": torch.tensor(7)}).item()]
        shorter = {name: value[:, :4] for name, value in given.items()}
        model.zero_grad()
        found += [usual.step(shorter).item()]
        norms += [shardconv_runtime.grad_norm(model).item()]
    return found + norms


def test_losses_of_the_user_and_other_lengths(tmp_path: Path) -> None:
    source, model = gpt2(tmp_path)
    given = batch()
    shorter = {name: value[:, :4] for name, value in given.items()}
    with Float64():
        square = model(given["input_ids"]).logits.square().mean()
        square.backward()
        norms = [grad_norm(model)]
        want = [square.item(), model(**given, num_items_in_batch=torch.tensor(7)).loss.item()]
        model.zero_grad()
        loss = model(**shorter).loss
        loss.backward()
        want += [loss.item(), *norms, grad_norm(model)]
    for found in run_processes(PP, with_other_losses, str(source), planned(source, 1)):
        assert found == pytest.approx(want, abs=1e-8)


def grad_norm(model: nn.Module) -> float:
    """Of all parameters."""
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(norms).norm().item()


def test_the_proof_finds_a_gradient_that_does_not_cross(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = gpt2(tmp_path)
    receive = Handover.receive
    monkeypatch.setattr(Handover, "receive", lambda *args: receive(*args).detach())
    plan = shardconv.plan(source, 2, pp=PP, check=True)
    assert plan.training is None
    assert plan.inference_only.startswith("with stages, the gradient of transformer.")
    with pytest.raises(PlanError, match="with stages, the gradient of"):
        require_training(plan)
