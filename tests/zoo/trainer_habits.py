"""What trainers do to a model: hooks, packed samples, scaled losses.

Two processes that train a part each, over a sharded sequence where the model can be trained so, have the
gradients of one process, or both refuse.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
from made_inputs import make_inputs
from shardconv_runtime import Communication
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.loaded import loaded
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.training.sequence import FLAT_OUTPUTS
from torch import Tensor
from torch.amp import GradScaler

import shardconv
from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.simulation.random_weights import local_weights

from .calls import noisy_embeddings
from .calls_run import (
    ABSENT,
    COLLECTIVE_S,
    CRASH,
    REFUSED,
    RIGHT,
    TP,
    WRONG,
    Outcome,
    from_ranks,
    in_step,
    judged,
)
from .models import ZooModel
from .saved import draw
from .training import (
    FLOOR,
    TOLERANCE,
    TRAINERS,
    Trained,
    cut,
    gradients,
    line,
    with_eager_experts,
    with_sequence,
    without_dropout,
)

STATUS = {RIGHT: "equal", REFUSED: "refused", WRONG: "wrong", CRASH: "wrong", ABSENT: "not judged"}
SCALE = 2.0**16

Gradients = dict[str, Tensor]
Habit = Callable[[Any, TraceInputs], Gradients]
"""A step of a model, unsharded or of one rank -> the gradients of its parameters."""


def _with_noise(model: Any, inputs: TraceInputs) -> Gradients:
    """As NEFTune."""
    with noisy_embeddings(model):
        return gradients(model, inputs)


def _with_loss_of_last_norm(model: Any, inputs: TraceInputs) -> Gradients:
    """As a value head: a loss of what the last norm returns."""
    found: list[Tensor] = []

    def keep(module: Any, args: Any, output: Tensor) -> None:
        found.append(output)

    handle = model.get_submodule(model.config.last_norm_of_this_test).register_forward_hook(keep)
    try:
        return gradients(model, inputs, lambda: (found[-1].double() ** 2).mean())
    finally:
        handle.remove()


def _of_packed_samples(model: Any, inputs: TraceInputs) -> Gradients:
    """Two samples in a row, told by their positions."""
    length = inputs.tensors["input_ids"].shape[1]
    positions = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)])
    tensors = {n: t for n, t in inputs.tensors.items() if n != "attention_mask"}
    tensors["position_ids"] = positions.expand(len(tensors["input_ids"]), -1).clone()
    return gradients(model, replace(inputs, tensors=tensors))


def _after_an_overflow(model: Any, inputs: TraceInputs) -> Gradients:
    """What a step with a scaler adds to the weights, after one that is skipped for a single gradient."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in parameters.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=SCALE)
    is_last = not dist.is_initialized() or dist.get_rank() == TP - 1
    for overflows in (is_last, False):
        optimizer.zero_grad()
        gradients(model, inputs, scale=scaler.get_scale())
        scaler.scale(torch.zeros(()))  # its tensors are made by the first call
        if overflows:
            next(
                p.grad for p in reversed(parameters.values()) if p.grad is not None and p.grad.numel()
            ).fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == SCALE / 2, "the scale was not halved once"
    return {n: before[n] - p.detach() for n, p in parameters.items()}


HABITS: Mapping[str, Habit] = {
    "no hook": gradients,
    "hook on the embedding": _with_noise,
    "hook on the last norm": _with_loss_of_last_norm,
    "packed positions": _of_packed_samples,
    "GradScaler": _after_an_overflow,  # it changes the weights
}


def try_habits(model: ZooModel) -> list[Trained]:
    """Judge the gradients of a causal model in each habit; one row for all if it has no plan for training."""
    about = (model.type, TRAINERS, TP)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            is_sequence = _convert(model, folder)
        except Exception as error:
            return [Trained(*about, "", "refused", line(error))]
        try:
            whole = _load_unsharded(model, folder / "model")
            inputs = _inputs(model, is_sequence)
        except Exception as error:
            return [Trained(*about, "", "not judged", line(error))]
        norms = [n for n, m in whole.named_modules() if "norm" in type(m).__name__.lower()]
        whole.config.last_norm_of_this_test = norms[-1] if norms else ""
        want = {habit: _of_one(whole, inputs, habit) for habit in HABITS}
        rows = {h: (ABSENT, w, 0.0) for h, w in want.items() if isinstance(w, str)}
        while left := [habit for habit in HABITS if habit not in rows]:
            started = time.perf_counter()
            given = (folder / "out", whole.config.last_norm_of_this_test, is_sequence, inputs, want, left)
            found = from_ranks(left, _on_rank, *given)
            seconds = (time.perf_counter() - started) / len(found)
            rows |= {habit: (*outcome, seconds) for habit, outcome in found.items()}
    form = " over a sharded sequence" if is_sequence else ""
    return [Trained(*about, h + form, STATUS[rows[h][0]], rows[h][1], seconds=rows[h][2]) for h in HABITS]


def _convert(model: ZooModel, folder: Path) -> bool:
    """Write a random checkpoint and convert it; whether it can be trained over a sharded sequence."""
    whole = model.model_class._from_config(model.config, dtype=torch.float64)
    draw(whole.parameters(), torch.Generator().manual_seed(1))
    whole.save_pretrained(folder / "model")
    options = {"tp": TP, "check": False}
    plan, is_sequence = with_sequence(
        lambda seq: shardconv.convert(folder / "model", folder / "out", sequence_parallel=seq, **options)
    )
    if plan.training is None:
        raise SolveError(f"for inference only: {plan.inference_only}")
    return is_sequence


def _load_unsharded(model: ZooModel, path: Path) -> Any:
    """Parameters that its code freezes are frozen, which ``from_pretrained`` forgets."""
    whole = model.model_class.from_pretrained(path, dtype=torch.float64)
    made = model.model_class._from_config(model.config, dtype=torch.float32)
    for parameter, new in zip(whole.parameters(), made.parameters(), strict=True):
        parameter.requires_grad_(new.requires_grad)
    return _prepared(whole)


def _prepared(model: Any) -> Any:
    with_eager_experts(model)
    return without_dropout(model.train())


def _inputs(model: ZooModel, is_sequence: bool) -> TraceInputs:
    single = model.model_class._from_config(model.config, dtype=torch.float32)
    made = make_inputs(single, seed=1).to(torch.float64)
    options = {name: value for name, value in made.options.items() if name not in FLAT_OUTPUTS}
    if "use_cache" in forward_signature(single).parameters:
        options["use_cache"] = False
    made = replace(made, options=options)
    return (cut(made, TP) if is_sequence else made).with_labels()


def _of_one(whole: Any, inputs: TraceInputs, habit: str) -> Gradients | str:
    whole.zero_grad()
    try:
        found = HABITS[habit](whole, inputs)
    except Exception as error:
        return line(error)
    if not found or not all(gradient.isfinite().all() for gradient in found.values()):
        return "a gradient is not finite"
    return {name: gradient.clone() for name, gradient in found.items()}


def _on_rank(
    path: Path,
    last_norm: str,
    is_sequence: bool,
    inputs: TraceInputs,
    want: Mapping[str, Gradients],
    left: list[str],
) -> list[Outcome]:
    model = shardconv_runtime.load(
        path,
        training=True,
        sequence_parallel=is_sequence,
        gather_logits=True,
        communication=Communication(timeout_s=COLLECTIVE_S),
    )
    _prepared(model).config.last_norm_of_this_test = last_norm
    return in_step(left, lambda habit: _try(model, inputs, habit, want[habit]))


def _try(model: Any, inputs: TraceInputs, habit: str, want: Gradients) -> Outcome:
    def judge(got: Gradients) -> Outcome:
        worst, name = _difference(got, want, loaded(model).plan)
        return (RIGHT, "") if worst <= TOLERANCE else (WRONG, f"{name} differs by {worst:.1e}")

    model.zero_grad()
    return judged(lambda: HABITS[habit](model, inputs), judge)


def _difference(got: Gradients, want: Gradients, plan: Plan) -> tuple[float, str]:
    """The largest one of a gradient, in units of its largest value."""
    largest = max(float(gradient.abs().max()) for gradient in want.values() if gradient.numel())
    worst = (0.0, "")
    for name, gradient in local_weights(want, plan, dist.get_rank()).items():
        if gradient.numel():
            found = got.get(name, torch.zeros_like(gradient))
            error = float((found - gradient).abs().max().nan_to_num(nan=torch.inf))
            worst = max(worst, (error / max(float(want[name].abs().max()), FLOOR * largest), name))
    return worst
