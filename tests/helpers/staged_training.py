"""Training of models in stages, in real processes and in one: each process has its part of what one has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal
from shardconv_runtime import Training
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import parameter_plans
from shardconv_runtime.parallel.local_modules import local_view
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardconv
from shardconv.simulation.model_runs import Float64

PP = 2
WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


@dataclass(frozen=True)
class Run:
    """How a job trains."""

    pp: int = PP
    per_process: int = 1
    tp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 4
    steps: int = 1
    recompute: bool = False
    clip: bool = True
    sequence_parallel: bool = False
    length: int = 6
    gather_logits: bool | None = None

    @property
    def places(self) -> int:
        """Processes among which the stages are divided."""
        return self.pp // self.per_process

    @property
    def num_processes(self) -> int:
        return self.places * self.tp * self.dp


def batch(step: int = 0, length: int = 6) -> dict[str, Tensor]:
    """Eight sequences, of which some tokens have no label, and one none."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 250, (8, length), generator=generator)
    labels = ids.clone()
    labels[0, 3:] = labels[5] = labels[6, :2] = -100
    return {"input_ids": ids, "labels": labels}


def gpt2(path: Path, **changes: object) -> tuple[Path, nn.Module]:
    """A model with a tied head, in float64 and without dropout, and its checkpoint."""
    return checkpoint("gpt2", path, **WITHOUT_DROPOUT, **changes)


def checkpoint(model_type: str, path: Path, **changes: object) -> tuple[Path, nn.Module]:
    """A checkpoint, and its model to be trained by one process."""
    source = save_causal(model_type, path / "model", **changes)
    return source, transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).train()


def planned(source: Path, tp: int, pp: int = PP, **options: bool) -> str:
    """A plan in stages beside a model."""
    path = source / f"staged-{pp}-{tp}.json"
    if not path.exists():
        plan_json.write(shardconv.plan(source, tp, pp=pp, dtype="float64", **options), path)
    return str(path)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that FSDP2 shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(source: str, plan: str, run: Run) -> dict[str, Any]:
    """What a process finds: the losses, the norms, its gradients of the last step, and its parameters."""
    mesh = None
    if run.dp > 1:
        mesh = init_device_mesh("cpu", (run.places, run.dp, run.tp), mesh_dim_names=("pp", "dp", "tp"))
    forms: dict[str, Any] = {"sequence_parallel": run.sequence_parallel}
    forms["gather_logits"] = run.gather_logits
    model = shardconv_runtime.load(
        source,
        plan=plan,
        mesh=mesh,
        data_parallel=run.dp > 1,
        training=Training(stages_per_process=run.per_process),
        **forms,
    ).train()
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
        found.update(evaluated(model, run))
    found["parameters"] = {n: whole(p) for n, p in model.named_parameters()}
    return found


def evaluated(model: nn.Module, run: Run) -> dict[str, Any]:
    """What the trained model gives without gradients."""
    model.eval()
    with torch.no_grad():
        logits = model(batch(0, run.length)["input_ids"]).logits
        return {"logits": logits, "evaluated": model(**batch(1, run.length)).loss.item()}


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
        found.update(evaluated(model, run))
    found["parameters"] = {n: p.detach() for n, p in model.named_parameters()}
    return found


def require_same(found: list[dict[str, Any]], want: dict[str, Any], run: Run) -> None:
    """What a process has is its part of what one process has; replicas average their losses."""
    plan = plan_json.read(found[0]["plan"])
    entries = parameter_plans(plan)
    aliases = dict(plan.tied)
    losses = torch.tensor([process["losses"] for process in found])
    torch.testing.assert_close(losses.mean(0), torch.tensor(want["losses"]), rtol=0.0, atol=1e-6)
    for number, process in enumerate(found):
        if run.dp == 1:
            assert process["losses"] == pytest.approx(want["losses"], abs=1e-9)
        assert process["evaluated"] == pytest.approx(want["evaluated"], abs=1e-7)
        assert process["norms"] == pytest.approx(want["norms"], abs=1e-8)
        logits = want["logits"]
        if run.gather_logits is False:
            logits = logits.chunk(run.tp, -1)[number % run.tp]
        torch.testing.assert_close(process["logits"], logits, rtol=0.0, atol=1e-7)
        for kind in ("gradients", "parameters"):
            for name, value in process[kind].items():
                first = aliases.get(name, name)
                right = local_view(entries[first], want[kind][first], plan.mesh, number % run.tp)
                torch.testing.assert_close(value, right, rtol=0.0, atol=1e-8, msg=name)
    names = {aliases.get(n, n) for process in found for n in process["parameters"]}
    assert names == want["parameters"].keys()


def interrupted(source: str, plan: str, run: Run, out: str) -> None:
    """Train for two steps, and save."""
    several = run.per_process
    model = shardconv_runtime.load(source, plan=plan, training=Training(stages_per_process=several)).train()
    pipeline = shardconv_runtime.Pipeline(model, microbatches=run.microbatches, schedule=run.schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Float64():
        for step in range(2):
            pipeline.step(batch(step))
            optimizer.step()
            optimizer.zero_grad()
    shardconv_runtime.save(model, f"{out}/model")
    shardconv_runtime.save_optimizer(model, optimizer, f"{out}/optimizer")
    model.save_pretrained(f"{out}/plain")


def resumed(out: str, converted: str, run: Run | None) -> float:
    """The loss of the fourth step, with stages or without."""
    several = 1 if run is None else run.per_process
    model = shardconv_runtime.load(converted, training=Training(stages_per_process=several)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardconv_runtime.load_optimizer(model, optimizer, f"{out}/optimizer")
    pipeline = None
    if run is not None:
        pipeline = shardconv_runtime.Pipeline(model, microbatches=run.microbatches, schedule=run.schedule)
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
