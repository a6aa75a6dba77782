"""Trains one step of one model of the zoo on simulated ranks, and compares every gradient.

The converter compares gradients by itself when it makes a plan. Here they are judged again: other weights,
other inputs, of a length that the ranks do not divide, in each form in which a plan can be trained.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from made_inputs import make_inputs
from shardconv_runtime.adapters.adapter_names import ANY_NAME
from shardconv_runtime.adapters.attaching import Adapter, attach
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import SolveError, SourceError
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import stored_tensors
from shardconv_runtime.training.prepare import TrainingForm, parallelize_for_training
from shardconv_runtime.training.sequence import FLAT_OUTPUTS, attach_sequence
from torch import Tensor, nn

from shardconv.adapted_plan import Adaptation
from shardconv.arguments import SolveOptions
from shardconv.dim_analysis.rules import RULES
from shardconv.inputs.trace_inputs import TraceInputs, trace_inputs
from shardconv.passes import solve_plan
from shardconv.simulation.model_runs import Float64, WithoutNoise
from shardconv.simulation.random_weights import fill, local_weights
from shardconv.simulation.rank_threads import run_ranks
from shardconv.tracing.trace import results

from .measure import random_weight
from .models import ZooModel

Module = TypeVar("Module", bound=nn.Module)
Made = TypeVar("Made")

TOLERANCE = 1e-9
"""Largest difference in float64 of a parameter's gradient, relative to its largest element."""
FLOOR = 1e-4
"""Of the largest gradient of the model: a smaller one (zero, but for rounding) is compared with this."""


@dataclass(frozen=True)
class Form:
    """A way to train a plan."""

    sequence: bool
    parallel_loss: bool
    checkpointing: bool

    def __str__(self) -> str:
        names = {"sequence": self.sequence, "loss": self.parallel_loss, "checkpointing": self.checkpointing}
        return " + ".join(name for name, chosen in names.items() if chosen) or "plain"


ROUTERS = "routers"
"""Variant: the outputs of routers are part of the loss."""
ADAPTER = "adapter"
"""Variant: a low-rank adapter of all linear layers is trained, and the model itself is not."""
ADAPTER_FEW = "adapter-grouped"
"""The same of a model with two key/value heads."""
PROCESSES = "adapter-processes"
"""The same in real processes, see ``fully_sharded.py``."""
TRAINERS = "trainers"
"""What trainers do to a model, in real processes, see ``trainer_habits.py``."""
WITH_ADAPTER = (ADAPTER, ADAPTER_FEW, PROCESSES)
FORMS = tuple(Form(s, p, c) for s in (False, True) for p in (False, True) for c in (False, True))
FORMS_OF_ADAPTERS = (Form(False, False, False), Form(False, True, True), Form(True, True, True))


@dataclass(frozen=True)
class Trained:
    """How one model came out in one form."""

    type: str
    variant: str
    tp: int
    form: str
    status: str
    """``equal``, ``wrong``, ``refused``, ``no sequence form``, ``no loss form``, ``no checkpointing``, or
    ``not judged``: the unsharded model has no gradients in float64."""
    message: str = ""
    error: float = math.nan
    seconds: float = 0.0


def train(model: ZooModel, tp: int, variant: str = "", forms: tuple[Form, ...] = FORMS) -> Iterator[Trained]:
    """Plan a model for ``tp`` ranks and judge its gradients in each form; of all outputs if ``ROUTERS``."""
    about = (model.type, variant, tp)
    spec = ModelSpec(name=model.type, config=model.config, model_class=model.model_class, dtype="float32")
    no_sequence = ""
    adapter = None
    try:
        if variant in WITH_ADAPTER:
            adapter = low_rank(spec)
        try:
            plan = _planned(spec, SolveOptions(tp, sequence_parallel=True), adapter)
        except SolveError as error:
            no_sequence = line(error)
            plan = _planned(spec, SolveOptions(tp), adapter)
    except Exception as error:
        yield Trained(*about, "", "refused", line(error))
        return
    if plan.training is None:
        yield Trained(*about, "", "refused", f"for inference only: {plan.inference_only}")
        return
    if variant == ROUTERS and not plan.training.extra_outputs:
        return  # it has none
    try:
        trial = _Trial(plan, model, all_outputs=variant == ROUTERS, adapter=adapter)
    except Exception as error:
        yield Trained(*about, "", "not judged", line(error))
        return
    for form in forms:
        start = time.perf_counter()
        if form.sequence and no_sequence:
            yield Trained(*about, str(form), "no sequence form", no_sequence)
        elif form.parallel_loss and not plan.training.parallel_loss:
            yield Trained(*about, str(form), "no loss form")
        else:
            try:
                error, name = trial.run(form)
                status = "equal" if error <= TOLERANCE else "wrong"
                name += unadapted(adapter)
                yield Trained(*about, str(form), status, name, error, time.perf_counter() - start)
            except Exception as problem:
                refused = form.checkpointing and not trial.runs_checkpointed()
                status = "no checkpointing" if refused else "wrong"
                yield Trained(*about, str(form), status, "" if refused else line(problem))


def with_sequence(make: Callable[[bool], Made]) -> tuple[Made, bool]:
    """What is made for a sharded sequence, or else for a full one; whether it is for a sharded one."""
    try:
        return make(True), True
    except SolveError:
        return make(False), False


def with_eager_experts(model: nn.Module) -> None:
    """Have experts computed one by one, if there are any: torch's grouped product has no float64 on CPUs."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def low_rank(spec: ModelSpec) -> Adapter:
    """An adapter of all linear layers of a model that peft can adapt in one process."""
    from peft import LoraConfig

    left_out: list[str] = []
    while True:
        adapter = Adapter(LoraConfig(r=4, target_modules="all-linear", exclude_modules=left_out or None))
        model = build_model(spec.model_class, copy.deepcopy(spec.config), torch.float32)
        try:
            attach(model, {ANY_NAME: adapter}, trainable=True, initialized=False)
            trace_inputs(model, RULES)
        except (SourceError, SolveError) as error:
            listed = re.search(r"Incompatible modules: \{([^}]*)\}", str(error.__cause__))
            failed = re.match(r"(\S+): the forward pass cannot be traced", str(error))
            more = re.findall(r"'(\w+)'", listed[1]) if listed else []
            more += [failed[1].rpartition(".")[2]] if failed else []
            if not set(more) - set(left_out):
                raise
            left_out += more
        else:
            return adapter


def unadapted(adapter: Adapter | None) -> str:
    """The layers that peft does not adapt."""
    names = adapter.config.exclude_modules if adapter is not None else None
    return f"; without {', '.join(sorted(names))}" if names else ""


def _planned(spec: ModelSpec, options: SolveOptions, adapter: Adapter | None) -> Plan:
    """The plan of a model, or of a model with an adapter."""
    if adapter is None:
        return solve_plan(spec, options)
    base = solve_plan(spec, replace(options, check=False))
    return solve_plan(spec, options, adaptation=Adaptation(base, adapter))


class _Trial:
    """One model with its weights and inputs, and the gradients of the unsharded model."""

    def __init__(
        self,
        plan: Plan,
        model: ZooModel,
        seed: int = 1,
        *,
        all_outputs: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        self.plan = plan
        entries = parameter_plans(plan)
        self.whole = build_model(model.model_class, copy.deepcopy(model.config), torch.float64)
        with_eager_experts(self.whole)
        if adapter is not None:
            attach(self.whole, {ANY_NAME: adapter}, trainable=True)
        generator = torch.Generator().manual_seed(seed)
        stored = {n: t for n, t in stored_tensors(self.whole) if n in entries}
        self.weights = {n: random_weight(t, generator) for n, t in stored.items()}
        single = build_model(model.model_class, copy.deepcopy(model.config), torch.float32)
        made = make_inputs(single, seed=seed).to(torch.float64)
        asked = {n: v for n, v in made.options.items() if all_outputs or n not in FLAT_OUTPUTS}
        self.inputs = replace(made, options=asked)
        mask = self.inputs.tensors.get("attention_mask")
        if mask is not None:  # as texts are padded for training: no token has nothing but padding to look at
            mask.fill_(1)
            mask[0, -2:] = 0
        sequence = plan.training.sequence if plan.training is not None else None
        may_pad = sequence is not None and sequence.may_pad and not all_outputs
        if sequence is not None and (not may_pad or self._changes_when_padded()):
            self.inputs = cut(self.inputs, plan.tp)
        if plan.training is not None and plan.training.parallel_loss:
            self.inputs = self.inputs.with_labels()
        try:
            self.want = self._unsharded_gradients()
        except RuntimeError:
            if not self.inputs.options.get("use_cache"):
                raise
            self.inputs = replace(self.inputs, options={**self.inputs.options, "use_cache": False})
            self.want = self._unsharded_gradients()
        if not all(gradient.isfinite().all() for gradient in self.want.values()):
            raise ArithmeticError("a gradient is not finite")
        if not any(gradient.any() for gradient in self.want.values()):
            raise ArithmeticError("all gradients are zero")

    def _unsharded_gradients(self) -> dict[str, Tensor]:
        return gradients(fill(copy.deepcopy(self.whole), self.weights, True), self.inputs)

    def runs_checkpointed(self) -> bool:
        """Whether the unsharded model runs with activation checkpointing."""
        whole = fill(copy.deepcopy(self.whole), self.weights, True)
        try:
            checkpoint(whole.eval())
            gradients(whole, self.inputs)
        except Exception:
            return False
        return True

    def _changes_when_padded(self) -> bool:
        """Whether the unsharded model does, with these weights: where they tie, it may choose otherwise."""
        whole = fill(copy.deepcopy(self.whole), self.weights).eval()
        padded = fill(copy.deepcopy(self.whole), self.weights).eval()
        attach_sequence(padded, self.plan.tp)
        with torch.inference_mode(), Float64():
            want, got = (results(m, m(**self.inputs.tensors, **self.inputs.options)) for m in (whole, padded))
        return any(
            not torch.allclose(a, b, 1e-9, 1e-9, equal_nan=True) for a, b in zip(want, got, strict=True)
        )

    def run(self, form: Form) -> tuple[float, str]:
        """The largest difference of a gradient, and the parameter's name."""
        assert self.plan.training is not None
        plan = replace(self.plan, training=replace(self.plan.training, parallel_loss=form.parallel_loss))

        def rank(comm: Communicator) -> tuple[float, str]:
            local = parallelize_for_training(
                copy.deepcopy(self.whole),
                plan,
                comm,
                TrainingForm(gather_logits=True, sequence_parallel=form.sequence, regather=form.sequence),
            )
            fill(local, local_weights(self.weights, plan, comm.rank), True).eval()
            if form.checkpointing:
                checkpoint(local)
            return self._difference(gradients(local, self.inputs), plan, comm.rank)

        return max(run_ranks(plan.mesh, rank))

    def _difference(self, got: Mapping[str, Tensor], plan: Plan, rank: int) -> tuple[float, str]:
        largest = max(float(g.abs().max()) for g in self.want.values() if g.numel())
        worst = (0.0, "")
        for name, want in local_weights(self.want, plan, rank).items():
            if want.numel():
                error = (got.get(name, torch.zeros_like(want)) - want).abs().max().nan_to_num(nan=math.inf)
                scale = max(float(self.want[name].abs().max()), FLOOR * largest)
                worst = max(worst, (float(error) / scale, name))
        return worst


def cut(inputs: TraceInputs, tp: int) -> TraceInputs:
    """Inputs of lengths that the ranks divide."""
    ids = [t for n, t in inputs.tensors.items() if n in ("input_ids", "decoder_input_ids")]
    ends = {t.shape[1]: t.shape[1] - t.shape[1] % tp for t in ids}
    cut = {n: t[:, : ends.get(t.shape[1])] if t.dim() > 1 else t for n, t in inputs.tensors.items()}
    return replace(inputs, tensors=cut)


def checkpoint(model: nn.Module) -> None:
    """Enable activation checkpointing."""
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (nullcontext(), _recomputing())}
    )


def gradients(
    model: nn.Module, inputs: TraceInputs, more: Callable[[], Tensor] | None = None, scale: float = 1.0
) -> dict[str, Tensor]:
    """Of the loss, if there are labels, and of a random function of everything else that is returned.

    Args:
        model: unsharded, or of one rank.
        inputs: of a call.
        more: another term, of what hooks found in the call.
        scale: of all terms.
    """
    without_dropout(model.train())
    torch.manual_seed(0)
    with torch.enable_grad(), Float64():
        with WithoutNoise():
            outputs = results(model, model(**inputs.tensors, **inputs.options))
        torch.manual_seed(1)
        terms = [
            (torch.where(t.isfinite(), t, 0.0) * torch.randn(t.shape, dtype=t.dtype)).sum()
            for t in outputs
            if t.requires_grad and t.is_floating_point()
        ]
        if more is not None:
            terms.append(more())
        (torch.stack(terms).sum() * scale).backward()  # type: ignore[no-untyped-call]
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@contextmanager
def _recomputing() -> Iterator[None]:
    """As the forward pass runs."""
    with Float64(), WithoutNoise():
        yield


def without_dropout(model: Module) -> Module:
    """Set probabilities of 0, for which the ranks need no random numbers of their own.

    transformers may recompute less than a layer, where they would be unknown.
    """
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                is_dropout = "drop" in name or (name == "p" and isinstance(module, nn.Dropout))
                if is_dropout and type(value) is float:
                    setattr(owner, name, 0.0)
    return model


def line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:900]
