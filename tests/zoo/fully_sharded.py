"""Trains an adapter of one causal model for a step in four processes, two replicas of two ranks, each of
which reads and holds a quarter of the weights; what is saved is compared with the step of one process.

Activations are sharded over the sequence and layers recomputed, where the model can be trained so.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
from distributed import run_processes
from made_inputs import make_inputs
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.training.sequence import FLAT_OUTPUTS
from training_runs import cpu_mesh

import shardconv
from shardconv.arguments import Writing
from shardconv.inputs.trace_inputs import TraceInputs

from .models import ZooModel
from .saved import draw
from .training import (
    FLOOR,
    PROCESSES,
    TOLERANCE,
    Trained,
    checkpoint,
    cut,
    gradients,
    line,
    low_rank,
    unadapted,
    with_eager_experts,
    with_sequence,
)

TP, REPLICAS = 2, 2


def train_fully_sharded(model: ZooModel, folder: Path) -> Trained:
    """Judge one step of a low-rank adapter of a causal model.

    Args:
        model: of the zoo.
        folder: an empty directory, for the model and its adapters.
    """
    about = (model.type, PROCESSES, TP)
    start = time.perf_counter()
    form = "two replicas, each weight in four parts"
    spec = ModelSpec(name=model.type, config=model.config, model_class=model.model_class, dtype="float32")
    try:
        adapter = low_rank(spec)
        _save(model, adapter.config, folder)
        is_sequence = _convert(folder)
    except Exception as error:
        return Trained(*about, form, "refused", line(error))
    try:
        inputs = [_inputs(model, seed) for seed in range(REPLICAS)]
        whole = _load_unsharded(model, folder)
        recomputes = _runs_checkpointed(whole, inputs[0])
        for each in inputs:
            gradients(whole, each)  # they add up
    except Exception as error:
        return Trained(*about, form, "not judged", line(error))
    try:
        run_processes(TP * REPLICAS, _train, folder, inputs, is_sequence, recomputes)
    except AssertionError as error:
        lines = [text for text in str(error).splitlines() if text.strip()]
        return Trained(*about, form, "wrong", lines[-1][:900])
    error, name = _largest_difference(whole, folder)
    status = "equal" if error <= TOLERANCE else "wrong"
    form_here = " + ".join(["sequence"] * is_sequence + ["checkpointing"] * recomputes)
    note = f"{name}{unadapted(adapter)}; {form_here or 'plain'}"
    return Trained(*about, form, status, note, error, time.perf_counter() - start)


def _save(model: ZooModel, config: Any, folder: Path) -> None:
    """Write a checkpoint and an adapter of it, all random."""
    whole = model.model_class._from_config(model.config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    draw(whole.parameters(), generator)
    whole.save_pretrained(folder / "model")
    adapted = get_peft_model(whole, config)
    draw((p for p in adapted.parameters() if p.requires_grad), generator)
    adapted.save_pretrained(folder / "adapter")


def _convert(folder: Path) -> bool:
    """Convert both, where possible for training with a sharded sequence; whether that was possible."""

    def convert(is_sequence: bool) -> None:
        shardconv.convert(
            folder / "model",
            folder / "out",
            tp=TP,
            sequence_parallel=is_sequence,
            check=False,
            writing=Writing(overwrite=True),
        )
        shardconv.adapt(folder / "out", folder / "adapter", folder / "adapted", check=False)

    return with_sequence(convert)[1]


def _inputs(model: ZooModel, seed: int) -> TraceInputs:
    """Of one replica."""
    single = model.model_class._from_config(model.config, dtype=torch.float32)
    made = cut(make_inputs(single, seed=seed).to(torch.float64), TP)
    options = {name: value for name, value in made.options.items() if name not in FLAT_OUTPUTS}
    return replace(made, options={**options, "use_cache": False}).with_labels()


def _load_unsharded(model: ZooModel, folder: Path) -> Any:
    base = model.model_class.from_pretrained(folder / "model", dtype=torch.float64)
    with_eager_experts(base)
    return PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)


def _runs_checkpointed(whole: Any, inputs: TraceInputs) -> bool:
    base = whole.get_base_model()
    try:
        checkpoint(base)
        gradients(whole, inputs)
    except Exception:
        return False
    finally:
        whole.zero_grad()
        if getattr(base, "is_gradient_checkpointing", False):
            base.gradient_checkpointing_disable()
    return True


def _train(folder: Path, inputs: list[TraceInputs], is_sequence: bool, recomputes: bool) -> None:
    """A step of one process."""
    mesh = cpu_mesh(REPLICAS, TP)
    model = shardconv_runtime.load(
        folder / "out",
        adapter=folder / "adapted",
        mesh=mesh,
        training=True,
        sequence_parallel=is_sequence,
        data_parallel=True,
        gather_logits=True,
    )
    with_eager_experts(model.get_base_model())
    if recomputes:
        checkpoint(model.get_base_model())
    own = inputs[mesh.get_local_rank(0)]
    with torch.no_grad():  # FSDP2 makes its buffers, in dtypes that the mode of float64 would change
        model(**own.tensors, **own.options)
    gradients(model, own)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    shardconv_runtime.save(model, folder / "trained")


def _largest_difference(whole: Any, folder: Path) -> tuple[float, str]:
    """Of a parameter after the step, in units of its largest gradient, and its name."""
    before = load_file(folder / "adapter" / "adapter_model.safetensors")
    trained = load_file(folder / "trained" / "adapter_model.safetensors")
    want = {
        name.replace(".default", ""): parameter.grad / REPLICAS
        for name, parameter in whole.named_parameters()
        if parameter.grad is not None
    }
    assert trained.keys() == before.keys() >= want.keys()
    largest = max(float(gradient.abs().max()) for gradient in want.values())
    worst = (0.0, "")
    for name, old in before.items():
        gradient = want.get(name, torch.zeros_like(old))
        error = float((old - trained[name] - gradient).abs().max())
        scale = max(float(gradient.abs().max()), FLOOR * largest, 1e-6 * float(old.abs().max()))
        worst = max(worst, (error / scale, name))
    return worst
