"""Every head of transformers that computes a loss: its value and its gradients on ranks and in one process.

The converter compares calls with labels by itself when it makes a plan. Here they are judged again, on other
weights and inputs, in every form of labels that the model's code takes. Many labels let the solver shard the
last layer.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from made_inputs import make_inputs
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.comm.host_numbers import host_seed
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.meta.meta_model import build_model, tied_names
from shardconv_runtime.parallel.build import stored_tensors
from shardconv_runtime.training.prepare import TrainingForm, parallelize_for_training
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from shardconv.arguments import SolveOptions
from shardconv.inputs.label_forms import forms_with_a_loss, loss_arguments, problem_type
from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.passes import solve_plan
from shardconv.simulation.model_runs import Float64, WithoutNoise
from shardconv.simulation.random_weights import fill, local_weights
from shardconv.simulation.rank_threads import run_ranks

from .left_out import LEFT_OUT
from .measure import random_weight
from .models import config_class, tiny_config
from .overrides import OVERRIDES
from .training import FLOOR, TOLERANCE, line, with_eager_experts, without_dropout

SPANS = "question answering"
COUNTED = ("classification", "segmentation", "detection", "xvector")
"""Words in the names of tasks whose heads have as many outputs as labels. Others have a size of their own."""
MANY = 301
"""So many labels that the last layer is worth sharding, and a number that no number of ranks divides."""
OF_A_WHOLE = ("sequence", "image", "video", "audio")
"""First words of classification tasks with one label for each input; with a single one it is a regression."""
TASKS = {
    name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES").replace("_", " ").lower(): name
    for name in vars(modeling_auto)
    if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")
}
"""What heads are for -> the name of transformers' table of their classes."""


@dataclass(frozen=True)
class Head:
    """One class and what it is for."""

    task: str
    type: str
    class_name: str


def heads() -> Iterator[Head]:
    """Every class of transformers' tables that takes labels, once."""
    seen = set()
    for task, table in TASKS.items():
        for model_type, names in getattr(modeling_auto, table).items():
            for name in (names,) if isinstance(names, str) else names:
                cls = getattr(transformers, name, None)
                if cls is None or name in seen or model_type in LEFT_OUT or not loss_arguments_of(cls):
                    continue
                seen.add(name)
                yield Head(task, model_type, name)


def loss_arguments_of(cls: type[nn.Module]) -> list[str]:
    """The arguments of a class for which it computes a loss."""
    try:
        return loss_arguments(cls)  # type: ignore[arg-type]  # its forward method has the same names
    except (TypeError, ValueError):
        return []


@dataclass
class Judged:
    """How one head came out."""

    task: str
    type: str
    class_name: str
    num_labels: int
    tp: int
    status: str = ""
    """``equal``, ``wrong``, ``refused``, or ``not judged``: the unsharded model has no loss here."""
    message: str = ""
    forms: list[str] = field(default_factory=list)
    """The forms of labels that were compared."""
    sharded_head: bool = False
    """Whether the logits are gathered from shards."""
    error: float = 0.0
    seconds: float = 0.0


def numbers_of_labels(head: Head) -> tuple[int, ...]:
    """The numbers of labels with which a head is tried."""
    if head.task == SPANS:
        return (2,)
    if head.task.endswith(" classification") and head.task.split()[0] in OF_A_WHOLE:
        return (1, MANY)
    return (MANY,) if any(word in head.task for word in COUNTED) else (0,)


def judge(task: tuple[Head, int, int]) -> dict[str, Any]:
    """The row of one head, with a number of labels, for a number of ranks."""
    head, num_labels, tp = task
    warnings.simplefilter("ignore")
    row = Judged(head.task, head.type, head.class_name, num_labels, tp)
    start = time.perf_counter()
    try:
        _judge(row)
    except Exception as error:  # a sweep goes on
        row.status, row.message = row.status or "not judged", line(error)
    row.seconds = time.perf_counter() - start
    return asdict(row)


def _judge(row: Judged) -> None:
    model_class = getattr(transformers, row.class_name)
    own = model_class.config_class or config_class(row.type)
    overrides = {"pad_token_id": 0, **OVERRIDES.get(row.type, {})}
    overrides |= {"num_labels": row.num_labels} if row.num_labels else {}
    config = tiny_config(own, overrides)
    spec = ModelSpec(name=row.class_name, config=config, model_class=model_class, dtype="float32")
    trial = _Trial(spec)
    forms = list(trial.forms())
    if not forms:
        row.status, row.message = "not judged", "no form of labels was found with which it has a finite loss"
        return
    try:
        plan = solve_plan(spec, SolveOptions(row.tp))
    except ShardconvError as error:
        row.status, row.message = "refused", line(error)
        return
    row.sharded_head = plan.logits is not None
    refused = [name for name in loss_arguments(trial.whole) if name in plan.left_out]
    if refused or plan.training is None:
        why = plan.inference_only or f"labels are refused: {', '.join(refused)}"
        row.status, row.message = "refused", why
        return
    for name, problem, inputs in forms:
        row.forms.append(f"{problem}: {name}" if problem else name)
        row.status = "wrong"
        try:
            row.error = max(row.error, trial.difference(plan, problem, inputs))
        except ShardconvError as error:
            row.status, row.message = "refused", line(error)
            return
        if row.error > TOLERANCE:
            row.message = row.forms[-1]
            if trial.amplifies_rounding(problem, inputs):
                row.status, row.message = "not judged", "gradients of the unsharded model amplify rounding"
            return
    row.status = "equal"


@dataclass
class _Step:
    """What a model returns for labels, and the gradients of all of it."""

    loss: Tensor
    gradients: dict[str, Tensor]


class _Trial:
    """One model with its weights and inputs."""

    def __init__(self, spec: ModelSpec) -> None:
        self.whole = build_model(spec.model_class, copy.deepcopy(spec.config), torch.float64)
        with_eager_experts(self.whole)
        generator = torch.Generator().manual_seed(1)
        aliases = tied_names(self.whole)
        stored = {n: t for n, t in stored_tensors(self.whole) if n not in aliases}
        self.weights = {n: random_weight(t, generator) for n, t in stored.items()}
        single = build_model(spec.model_class, copy.deepcopy(spec.config), torch.float32)
        made = make_inputs(single, seed=1).to(torch.float64)
        options = {n: v for n, v in made.options.items() if not n.startswith("output_") and n != "use_cache"}
        self.inputs = TraceInputs(made.tensors, options)

    def forms(self) -> Iterator[tuple[str, str | None, TraceInputs]]:
        """Yield the name, the problem type and the inputs of each form of labels with a loss."""
        model = fill(copy.deepcopy(self.whole), self.weights, True).eval()
        with torch.inference_mode(), Float64():
            returned = dict(model(**self.inputs.tensors, **self.inputs.options))
        tensors = {name: value for name, value in returned.items() if isinstance(value, Tensor)}

        def loss_of(problem: str | None, inputs: TraceInputs) -> tuple[Tensor | None, str | None]:
            model, inputs = self._model(problem), inputs.to(torch.float64)
            try:
                with torch.inference_mode(), Float64():
                    loss = model(**inputs.tensors, **inputs.options).loss
            except Exception:
                return None, None  # not labels of this head
            return loss, problem_type(model)

        for problem, form in forms_with_a_loss(self.whole, self.inputs, tensors, loss_of):
            yield form.name, problem, form.inputs.to(torch.float64)

    def _model(self, problem: str | None) -> Any:
        model = fill(copy.deepcopy(self.whole), self.weights, True)
        if problem is not None:
            model.config.problem_type = problem  # type: ignore[union-attr]
        return model

    def difference(self, plan: Plan, problem: str | None, inputs: TraceInputs) -> float:
        """The largest relative difference of the loss and of any gradient, on any rank."""
        want = _step(self._model(problem), inputs)
        entries = parameter_plans(plan)

        def rank(comm: Communicator) -> float:
            whole = copy.deepcopy(self.whole)
            if problem is not None:
                whole.config.problem_type = problem  # type: ignore[union-attr]
            local = parallelize_for_training(whole, plan, comm, TrainingForm(gather_logits=True))
            stored = {n: t for n, t in self.weights.items() if n in entries}
            got = _step(fill(local, local_weights(stored, plan, comm.rank), True), inputs)
            return _distance(got, want, local_weights(want.gradients, plan, comm.rank))

        return max(run_ranks(plan.mesh, rank))

    def amplifies_rounding(self, problem: str | None, inputs: TraceInputs) -> bool:
        """Whether changes in the last digits of the weights change the unsharded model's results as much."""
        want = _step(self._model(problem), inputs)
        exact, random = self.weights, torch.Generator().manual_seed(0)
        self.weights = {
            name: x * (1 + 4e-16 * torch.randn(x.shape, generator=random, dtype=x.dtype))
            if x.is_floating_point()
            else x
            for name, x in exact.items()
        }
        try:
            return _distance(_step(self._model(problem), inputs), want, want.gradients) > TOLERANCE / 10
        finally:
            self.weights = exact


def _distance(got: _Step, want: _Step, gradients: dict[str, Tensor]) -> float:
    """The largest relative difference from ``want``, whose gradients are ``gradients`` in local shapes."""
    largest = max((float(g.abs().max()) for g in want.gradients.values() if g.numel()), default=0.0)
    worst = float((got.loss - want.loss).abs().max() / want.loss.abs().max().clamp_min(1e-30))
    for name, gradient in gradients.items():
        if gradient.numel():
            mine = got.gradients.get(name, torch.zeros_like(gradient))
            scale = max(float(want.gradients[name].abs().max()), FLOOR * largest, 1e-30)
            worst = max(worst, float((mine - gradient).abs().max().nan_to_num(nan=1e9)) / scale)
    return worst


def _step(model: Any, inputs: TraceInputs) -> _Step:
    without_dropout(model.train())
    torch.manual_seed(0)
    with torch.enable_grad(), Float64(), WithoutNoise(), host_seed(0):
        output = model(**inputs.tensors, **inputs.options)
        torch.manual_seed(1)
        terms = [output.loss.sum()]
        for value in dict(output).values():  # the logits too
            if isinstance(value, Tensor) and value.requires_grad and value is not output.loss:
                kept = torch.where(value.isfinite(), value, 0.0)
                terms.append(0.1 * (kept * torch.randn(value.shape, dtype=value.dtype)).sum())
        torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return _Step(output.loss.detach(), gradients)
