"""Whether the stages of a model of the zoo compute, and generate, what the unsharded model does."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.format.stage_names import held_by, num_stages
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from shardconv_runtime.pp.stage_link import StageLink
from shardconv_runtime.pp.stage_model import argument_names, keep_stage, returned_tensors
from torch import Tensor, nn

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan
from shardconv.simulation.model_runs import Float64
from shardconv.simulation.random_weights import fill, local_weights
from shardconv.simulation.rank_threads import run_ranks
from shardconv.simulation.stage_simulation import Mail, MailTransport

from .generation import NEW_TOKENS
from .measure import difference, random_weight
from .models import ZooModel, build
from .tasks import specification

TOLERANCE = 1e-9
LAYERS = 6
"""Of the models that are cut into more than two stages, where the type lets them have so many."""


@dataclass(frozen=True)
class StagesResult:
    """How one model came out, cut into stages."""

    family: str
    type: str
    pp: int
    tp: int
    status: str
    """``equal``, or ``refused``: the plan was proven by the converter's own simulation, or not."""
    message: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    """``from-to`` -> number of tensors."""
    generated: str = ""
    """``same``, ``different: ...``, ``unsupported: ...`` where the unsharded model itself cannot."""
    untrained: str = ""
    """Why the stages are for inference only; empty where the proof found their gradients equal."""
    seconds: float = 0.0


def run(family: str, model_type: str, pp: int, tp: int) -> StagesResult:
    """Cut a model into stages, and generate with them."""
    start = time.perf_counter()
    about: dict[str, Any] = {"family": family, "type": model_type, "tp": tp}
    try:
        model, pp = _deep_enough(family, model_type, pp)
        plan = solve_plan(specification(model), SolveOptions(tp, pp=pp))
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        seconds = time.perf_counter() - start
        return StagesResult(**about, pp=pp, status="refused", message=message, seconds=seconds)
    generated = generates(plan, model) if family in ("causal", "seq2seq") else ""
    seconds = time.perf_counter() - start
    return StagesResult(
        **about,
        pp=pp,
        status="equal",
        sent=_sent(plan),
        generated=generated,
        untrained="" if plan.training is not None else plan.inference_only or "for inference only",
        seconds=seconds,
    )


def _deep_enough(family: str, model_type: str, pp: int) -> tuple[ZooModel, int]:
    """A model of more layers than usual for more than two stages; else the usual one, and two stages."""
    usual = build(family, model_type)
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if pp > 2 else ():
        try:
            model = build(family, model_type, **{name: LAYERS})
            solve_plan(specification(model), SolveOptions(1, check=False, pp=pp))
        except Exception:  # a config that refuses the number, or an argument that it does not have
            continue
        return model, pp
    if pp > 2:
        try:
            solve_plan(specification(usual), SolveOptions(1, check=False, pp=pp))
        except Exception:
            return usual, 2
    return usual, pp


def _sent(plan: Plan) -> dict[str, int]:
    assert plan.stages is not None
    found: dict[str, int] = {}
    for entry in plan.stages.modules:
        for value in entry.sent:
            for stage in value.to:
                key = f"{entry.stages[0]}-{stage}"
                found[key] = found.get(key, 0) + 1
    return found


# Generating ------------------------------------------------------------------------------------------


class _Replayed(MailTransport):
    """A stage whose calls get the results of the unsharded model, and compares them if it is the last."""

    def __init__(self, stage: int, count: int, rank: int, mail: Mail, want: Sequence[list[Tensor]]) -> None:
        super().__init__(stage, rank, mail)
        self._is_last = stage == count - 1
        self._want = deque(want)
        self.worst = 0.0

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Results of the next call."""
        want = self._want.popleft()
        if self._is_last:
            self.worst = max(self.worst, difference(list(tensors), want))
            return
        for result, right in zip(tensors, want, strict=True):
            result.copy_(right)


def generates(plan: Plan, model: ZooModel) -> str:
    """Greedy tokens and beams of every stage against those of the unsharded model."""
    outcome = ""
    for dtype in (torch.float64, torch.float32):  # some code cannot compute in float64
        outcome = _generates(plan, model, dtype)
        if not outcome.startswith("unsupported"):
            break
    return outcome


def _generates(plan: Plan, model: ZooModel, dtype: torch.dtype) -> str:
    whole = build_model(model.model_class, copy.deepcopy(model.config), dtype)
    if not getattr(whole, "can_generate", lambda: False)():
        return "unsupported: the class has no generate"
    if hasattr(whole, "set_experts_implementation"):
        whole.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(11)
    entries = parameter_plans(plan)
    weights = {n: random_weight(t, generator) for n, t in stored_tensors(whole) if n in entries}
    for beams in (1, 2):
        reference = fill(copy.deepcopy(whole), weights).eval()
        made: list[list[Tensor]] = []
        hook = _noting(made)
        reference.register_forward_hook(hook)
        try:
            want = _tokens(reference, dtype, beams)
        except Exception as error:
            return f"unsupported: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if not all(t.isfinite().any() for call in made for t in call if t.numel()):
            return "unsupported: no result of the unsharded model is finite"
        problem = _stages_differ(plan, whole, weights, dtype, beams, made, want)
        if problem:
            return f"different: {'beams: ' if beams > 1 else ''}{problem}"
    return "same"


def _noting(made: list[list[Tensor]]) -> Any:
    def note(model: nn.Module, args: Any, output: Any) -> None:
        made.append([t.clone() for t in returned_tensors(model, output)])

    return note


def _stages_differ(
    plan: Plan,
    whole: nn.Module,
    weights: dict[str, Tensor],
    dtype: torch.dtype,
    beams: int,
    made: list[list[Tensor]],
    want: Tensor,
) -> str:
    """What is wrong; empty if nothing is."""
    mail = Mail()
    count = num_stages(plan)
    tolerance = TOLERANCE if dtype == torch.float64 else 1e-4

    def rank(comm: Communicator, stage: int) -> str:
        local = parallelize(copy.deepcopy(whole), plan, comm)
        replayed = _Replayed(stage, count, comm.rank, mail, made)
        link = StageLink(stage, count, replayed)
        keep_stage(local, plan, link, comm.rank, torch.device("cpu"), dtype, argument_names(whole, plan))
        parts = local_weights(weights, plan, comm.rank)
        fill(local, held_by(plan, stage, parts))
        with link.calling():  # ``generate`` may call an encoder by itself
            tokens = _tokens(local.eval(), dtype, beams)
        if replayed.worst > tolerance:
            return f"stage {stage}: logits differ by {replayed.worst:.1e}"
        return "" if torch.equal(tokens, want) else f"stage {stage}: other tokens"

    for stage in range(count):
        try:
            problems = run_ranks(plan.mesh, lambda comm, stage=stage: rank(comm, stage))
        except Exception as error:
            return f"stage {stage}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if problem := next(filter(None, problems), ""):
            return problem
    return ""


def _tokens(model: Any, dtype: torch.dtype, beams: int) -> Tensor:
    """Prompt and new tokens of a batch with left padding."""
    ids = torch.tensor([[11, 245, 3, 77, 130, 9, 201], [0, 0, 0, 88, 5, 254, 19]])
    with torch.inference_mode(), Float64() if dtype == torch.float64 else nullcontext():
        tokens: Tensor = model.generate(
            input_ids=ids,
            attention_mask=(ids != 0).long(),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=beams,
            disable_compile=True,
        )
    return tokens
