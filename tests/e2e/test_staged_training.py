"""Stages that are trained, in real processes: loss, gradients, norm and steps are those of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal
from distributed import run_processes
from shardconv_runtime import PlanError, ShardconvError
from shardconv_runtime.comm.stage_link import Handover
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import parameter_plans
from shardconv_runtime.format.plan_forms import require_training
from shardconv_runtime.parallel.local_tensor import local_view
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardconv
from shardconv.verifying.simulation.float64 import Float64

PP = 2
EXACT = {"rtol": 0.0, "atol": 1e-9}
WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


@dataclass(frozen=True)
class Run:
    """How a job trains."""

    tp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 4
    steps: int = 1
    recompute: bool = False
    clip: bool = True
    sequence_parallel: bool = False
    length: int = 6


def batch(step: int = 0, length: int = 6) -> dict[str, Tensor]:
    """Eight sequences, of which some tokens have no label, and one none."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 250, (8, length), generator=generator)
    labels = ids.clone()
    labels[0, 3:] = labels[5] = labels[6, :2] = -100
    return {"input_ids": ids, "labels": labels}


def gpt2(path: Path) -> tuple[Path, nn.Module]:
    """A model with a tied head, in float64 and without dropout, and its checkpoint."""
    source = save_causal("gpt2", path / "model", **WITHOUT_DROPOUT)
    return source, transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).train()


def planned(source: Path, tp: int, **options: bool) -> str:
    """A plan in two stages beside a model."""
    path = source / f"staged-{tp}.json"
    if not path.exists():
        plan_json.write(shardconv.plan(source, tp, pp=PP, dtype="float64", **options), path)
    return str(path)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that FSDP2 shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(source: str, plan: str, run: Run) -> dict[str, Any]:
    """What a process finds: the losses, the norms, its gradients of the last step, and its parameters."""
    mesh = None
    if run.dp > 1:
        mesh = init_device_mesh("cpu", (PP, run.dp, run.tp), mesh_dim_names=("pp", "dp", "tp"))
    forms = {"training": True, "sequence_parallel": run.sequence_parallel}
    model = shardconv_runtime.load(source, plan=plan, mesh=mesh, data_parallel=run.dp > 1, **forms).train()
    if run.recompute:
        shardconv_runtime.checkpoint_activations(model)
    pipeline = shardconv_runtime.Pipeline(model, microbatches=run.microbatches, schedule=run.schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {"losses": [], "norms": [], "plan": plan}
    with Float64():
        for step in range(run.steps):
            given = batch(step, run.length)
            if mesh is not None:
                number = mesh.get_local_rank("dp")
                given = {n: v.chunk(run.dp)[number] for n, v in equal_labels(given).items()}
            found["losses"].append(pipeline.step(given).item())
            found["gradients"] = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            found["norms"].append(shardconv_runtime.clip_grad_norm(model, 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found["logits"] = model(batch(0, run.length)["input_ids"]).logits
    found["parameters"] = {n: whole(p) for n, p in model.named_parameters()}
    return found


def interrupted(source: str, plan: str, out: str) -> None:
    """Train for two steps, and save."""
    model = shardconv_runtime.load(source, plan=plan, training=True).train()
    pipeline = shardconv_runtime.Pipeline(model, microbatches=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Float64():
        for step in range(2):
            pipeline.step(batch(step))
            optimizer.step()
            optimizer.zero_grad()
    shardconv_runtime.save(model, f"{out}/model")
    shardconv_runtime.save_optimizer(model, optimizer, f"{out}/optimizer")
    model.save_pretrained(f"{out}/plain")


def resumed(out: str, converted: str, staged: bool) -> float:
    """The loss of the fourth step, with stages or without."""
    model = shardconv_runtime.load(converted, training=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardconv_runtime.load_optimizer(model, optimizer, f"{out}/optimizer")
    pipeline = shardconv_runtime.Pipeline(model, microbatches=4) if staged else None
    loss = torch.zeros(())
    with Float64():
        for step in (2, 3):
            optimizer.zero_grad()
            if pipeline is not None:
                loss = pipeline.step(batch(step))
            else:
                loss = model(**batch(step)).loss
                loss.backward()
            optimizer.step()
    return loss.item()


def equal_labels(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Labels for all tokens: replicas average their means."""
    return {"input_ids": given["input_ids"], "labels": given["input_ids"]}


def trained_alone(model: nn.Module, run: Run) -> dict[str, Any]:
    """The same by one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {"losses": [], "norms": []}
    with Float64():
        for step in range(run.steps):
            given = batch(step, run.length)
            given = given if run.dp == 1 else equal_labels(given)
            loss = model(**given).loss
            loss.backward()
            found["losses"].append(loss.item())
            found["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters()}
            if run.clip:
                found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found["logits"] = model(batch(0, run.length)["input_ids"]).logits
    found["parameters"] = {n: p.detach() for n, p in model.named_parameters()}
    return found


def require_same(found: list[dict[str, Any]], want: dict[str, Any], run: Run) -> None:
    """What a process has is its part of what one process has; replicas average their losses."""
    plan = plan_json.read(found[0]["plan"])
    entries = parameter_plans(plan)
    aliases = {"lm_head.weight": "transformer.wte.weight"}
    losses = torch.tensor([process["losses"] for process in found])
    torch.testing.assert_close(losses.mean(0), torch.tensor(want["losses"]), rtol=0.0, atol=1e-6)
    for number, process in enumerate(found):
        if run.dp == 1:
            assert process["losses"] == pytest.approx(want["losses"], abs=1e-9)
        assert process["norms"] == pytest.approx(want["norms"], abs=1e-8)
        torch.testing.assert_close(process["logits"], want["logits"], rtol=0.0, atol=1e-7)
        for kind in ("gradients", "parameters"):
            for name, value in process[kind].items():
                first = aliases.get(name, name)
                right = local_view(entries[first], want[kind][first], plan.mesh, number % run.tp)
                torch.testing.assert_close(value, right, rtol=0.0, atol=1e-8, msg=name)
    names = {aliases.get(n, n) for process in found for n in process["parameters"]}
    assert names == want["parameters"].keys()


@pytest.mark.parametrize(
    "run",
    [
        Run(steps=3),
        Run(tp=2, schedule="gpipe", microbatches=2, steps=2, recompute=True),
    ],
    ids=["1f1b", "tp 2, gpipe, recomputed"],
)
def test_stages_train_as_one_process(run: Run, tmp_path: Path) -> None:
    source, model = gpt2(tmp_path)
    found = run_processes(PP * run.tp, trained, str(source), planned(source, run.tp), run)
    require_same(found, trained_alone(model, run), run)


@pytest.mark.parametrize(
    "run",
    [
        Run(tp=2, steps=2, sequence_parallel=True),
        Run(tp=2, dp=2, steps=2, microbatches=2, sequence_parallel=True, length=7, recompute=True),
    ],
    ids=["even", "padded, dp 2, recomputed"],
)
def test_stages_with_sequence_parallelism(run: Run, tmp_path: Path) -> None:
    source, model = gpt2(tmp_path)
    plan = planned(source, run.tp, sequence_parallel=True, check=True)
    found = run_processes(PP * run.tp * run.dp, trained, str(source), plan, run)
    require_same(found, trained_alone(model, run), run)


@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_steps_of_eight_processes(steps: int, tmp_path: Path) -> None:
    source, model = gpt2(tmp_path)
    run = Run(tp=2, dp=2, microbatches=2, steps=steps)
    found = run_processes(PP * run.tp * run.dp, trained, str(source), planned(source, run.tp), run)
    require_same(found, trained_alone(model, run), run)


def test_a_job_with_stages_is_resumed_with_stages_and_without(tmp_path: Path) -> None:
    source, model = gpt2(tmp_path)
    out = tmp_path / "trained"
    run_processes(2 * PP, interrupted, str(source), planned(source, 2), str(out))
    want = trained_alone(model, Run(steps=4, clip=False))
    shardconv.reshard(out / "model", tmp_path / "plain-1", 1)
    (alone,) = run_processes(1, resumed, str(out), str(tmp_path / "plain-1"), False)
    for found in [alone, *run_processes(2 * PP, resumed, str(out), str(out / "model"), True)]:
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
    take = Handover.take
    monkeypatch.setattr(Handover, "take", lambda *args: take(*args).detach())
    plan = shardconv.plan(source, 2, pp=PP, check=True)
    assert plan.training is None
    assert plan.inference_only.startswith("with stages, the gradient of transformer.")
    with pytest.raises(PlanError, match="with stages, the gradient of"):
        require_training(plan)
