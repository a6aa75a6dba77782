"""Training a model with stages: microbatches through a schedule of ``torch.distributed.pipelining``.

Each process runs the model's own forward pass for each microbatch and each of its stages, with placeholders
for the modules of other stages. The schedule sends the values that cross the border of two neighboring
stages, values for later stages included, and their gradients. Values that the passes compute around modules,
for example masks, every stage computes from the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from ..comm.call_agreement import require_same_inputs
from ..errors import OptionError, PlanError, RefusedCallError
from ..loaded import loaded, unwrapped
from ..training.loss_parallel import has_parallel_loss
from ..training.replica_comparison import COMPARISON, ReplicaComparison
from .border_values import StageBoundary, ValueForm, measured_forms
from .microbatches import count_labels, divide, require_alike
from .stage_link import Crossing, StageLink
from .stage_model import StageModel
from .stage_processes import ProcessTransport
from .stage_training import StageLoss
from .tied_gradients import TiedGradients

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""Name -> torch's schedule for one stage in each process."""

SEVERAL: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "looped": ScheduleLoopedBFS}
"""Name -> torch's schedule for several stages in each process."""

Batch = Mapping[str, Any]
"""Arguments of the model by name."""

LossOf = Callable[[Any, Batch], Tensor]
"""A function from the model's results for a microbatch, and the microbatch, to its loss, a scalar."""


class Pipeline:
    """Train a model with pipeline stages in microbatches.

    Create one on every process of the model, and call ``step`` with the same batch on all of them.
    Processes of other data-parallel replicas use other batches. Gradients accumulate in the parameters, as
    with ``backward``.

    Args:
        model: returned by ``load(..., training=True)`` for a model with stages.
        microbatches: number of microbatches into which ``step`` divides a batch.
        schedule: ``"1f1b"`` runs a backward pass as soon as possible, so a stage keeps the activations of
            at most as many microbatches as there are stages. ``"gpipe"`` runs all forward passes first.
            With several stages in each process, ``"interleaved"`` corresponds to ``"1f1b"`` and
            ``"looped"`` to ``"gpipe"``: they wait less and send more often.
        loss: function of the model's output and the microbatch; by default the model's own loss.

    Raises:
        PlanError: the model has no stages or was loaded for inference, or the schedule does not fit.

    Example:
        >>> model = shardconv_runtime.load("out/", training=True)
        >>> pipeline = shardconv_runtime.Pipeline(model.train(), microbatches=8)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> loss = pipeline.step({"input_ids": ids, "labels": ids})
        >>> shardconv_runtime.clip_grad_norm(model, 1.0)
        >>> optimizer.step(), optimizer.zero_grad()
    """

    def __init__(
        self, model: nn.Module, *, microbatches: int, schedule: str = "1f1b", loss: LossOf | None = None
    ) -> None:
        source = loaded(model)
        if source.stage is None:
            raise RefusedCallError(
                "Pipeline is for models with stages; this one has none: call backward() of its loss"
            )
        if not source.building.options.training:
            raise RefusedCallError("the model was loaded for inference; load it with training=True")
        stage: StageModel = source.stage
        assert isinstance(stage.link.transport, ProcessTransport), "it was loaded on processes"
        _require_schedule(schedule, stage.link, microbatches)
        self.model = unwrapped(model)
        self.microbatches = microbatches
        self._schedule = (SCHEDULES | SEVERAL)[schedule]
        self._stage = stage
        self._link = stage.link
        self._group = stage.link.transport.group
        # Check that FSDP2 shards some module of each stage by itself: it takes the end of a backward pass
        # from such modules.
        for number in stage.link.stages if isinstance(self.model, FSDPModule) else ():
            inner = (module for unit in stage.units_of(self.model, number) for module in unit.modules())
            if number < stage.link.count - 1 and not any(isinstance(module, FSDPModule) for module in inner):
                raise RefusedCallError(
                    f"all parameters of stage {number} are used by several modules, so FSDP2 can shard "
                    "none of these modules separately; load the model without data_parallel=, or convert "
                    "it with other --stages"
                )
        self._step = _Step(self.model, loss)
        self._passes = [_Pass(self._step, stage, number) for number in stage.link.stages]
        self._tied = TiedGradients(model)
        self._prepared: tuple[object, Any] | None = None
        self._start = source.launch
        self._num_steps = 0

    def step(self, batch: Batch | Sequence[Batch]) -> Tensor:
        """Run a batch forward and backward on all stages.

        The loss is the mean over all tokens of the batch that have labels. Auxiliary losses of the model,
        for example for balanced experts, are averaged over the microbatches.

        Args:
            batch: arguments of the model, with ``labels`` unless ``loss`` was given. Tensors are divided
                along their first dim, which must be the batch. It can also be a list of microbatches. All
                must have the same shapes.

        Returns:
            The loss, a scalar without gradient, the same on all stages.

        Raises:
            PlanError: the batch cannot be divided, or the microbatches differ in their shapes.
            ShardconvError: the model calls its modules in another way than in the trace.
        """
        parts = divide(batch, self.microbatches) if isinstance(batch, Mapping) else list(batch)
        if len(parts) != self.microbatches:
            raise OptionError(f"{len(parts)} microbatches were given to a pipeline of {self.microbatches}")
        self._step.begin(parts)
        # Ranks of all stages compare their inputs, which costs a message: in the steps 1, 2, 4, 8 ...
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) == 0:
            arguments = {f"{n} of microbatch {i}": v for i, part in enumerate(parts) for n, v in part.items()}
            require_same_inputs(self._start, arguments)
        replicas: ReplicaComparison | None = vars(self.model).get(COMPARISON)
        if replicas is not None:
            replicas.require_same({f"{n} of {i}": v for i, part in enumerate(parts) for n, v in part.items()})
        # The schedule for microbatches of these forms; that of the last step is kept.
        forms = require_alike(parts)
        if self._prepared is None or self._prepared[0] != forms:
            made = measured_forms(self.model, self._stage, parts[0])
            self._prepared = None  # gives the buffers of the other one back
            stages = [self._torch_stage(each, made) for each in self._passes]
            for_torch: Any = stages if len(stages) > 1 else stages[0]
            options = {
                "loss_fn": lambda loss, _: loss,
                "scale_grads": False,
            }  # the last stage returns the loss
            self._prepared = forms, self._schedule(for_torch, self.microbatches, **options)
        schedule = self._prepared[1]
        losses: list[Tensor] = []
        with self._tied.apart():
            numbers = torch.arange(self.microbatches)
            schedule.step(number=numbers, target=numbers, losses=losses, return_outputs=False)
        # All stages return the sum of the losses of the last stage.
        total = torch.zeros((), dtype=torch.float64, device=self._stage.device)
        if losses:
            total += torch.stack([loss.detach().double() for loss in losses]).sum()
        dist.broadcast(total, group=self._group, group_src=self._link.num_places - 1)
        return total

    def _torch_stage(self, each: _Pass, forms: Mapping[Crossing, ValueForm]) -> PipelineStage:
        link, number = self._link, each.number
        each.border = border = StageBoundary.of(self._stage, number, forms)
        received = [form.tensor() for form in border.received.values()]
        left = [form.tensor() for form in border.left.values()]
        if number == link.count - 1:
            left = [torch.empty((), dtype=LOSS_DTYPE, device="meta", requires_grad=True)]
        return PipelineStage(
            each,
            number,
            link.count,
            self._stage.device,
            input_args=tuple(received),
            output_args=tuple(left),
            group=self._group,
        )


def _require_schedule(schedule: str, link: StageLink, microbatches: int) -> None:
    """Check whether a schedule suits the stages of a process, and the number of microbatches."""
    num_stages = len(link.stages)
    fitting, other = (SCHEDULES, SEVERAL) if num_stages == 1 else (SEVERAL, SCHEDULES)
    names = ", ".join(map(repr, fitting))
    if schedule in other:
        remedy = (
            "load it with stages_per_process=" if num_stages == 1 else "load it without stages_per_process"
        )
        raise OptionError(
            f"schedule={schedule!r} is not for {num_stages} stage{'s' if num_stages > 1 else ''} in each "
            f"process; choose one of {names}, or {remedy}"
        )
    if schedule not in fitting:
        raise OptionError(f"schedule={schedule!r} should be one of {names}")
    least = link.count if schedule == "1f1b" else 1
    if microbatches < least:
        raise OptionError(
            f"microbatches={microbatches}: schedule {schedule!r} of {link.count} stages needs at least "
            f"{least}"
        )
    rounds = max(1, microbatches // link.num_places)
    if schedule == "interleaved" and microbatches % rounds:
        raise OptionError(
            f"microbatches={microbatches}: schedule {schedule!r} runs them in {rounds} equal rounds on "
            f"{link.num_places} processes, which do not divide them; give a multiple of {link.num_places}"
        )


class _Step:
    """The common state of the passes of a step: its microbatches, and the loss."""

    def __init__(self, model: nn.Module, loss: LossOf | None) -> None:
        self.model = model
        self._loss = loss
        self.parts: Sequence[Batch] = ()
        self._num_items: float | None = None

    def begin(self, parts: Sequence[Batch]) -> None:
        """Take the microbatches of the next step."""
        self.parts, self._num_items = parts, None
        if self._loss is not None:
            return
        if self._own_function is not None and all("num_items_in_batch" in part for part in parts):
            return
        if any(part.get("labels") is None for part in parts):
            raise OptionError("the batch has no labels: give them, or a loss= to Pipeline")
        counts = count_labels(self.model, parts)
        if len(set(counts)) == 1:
            return  # the mean of means over as many tokens
        own_loss, kind = self._own_function, getattr(self.model, "loss_type", None)
        if own_loss is None or not has_parallel_loss(kind):
            raise self._uneven(counts)
        self._num_items = sum(counts) / len(counts)

    @property
    def _own_function(self) -> StageLoss | None:
        function = getattr(self.model, "loss_function", None)
        return function if isinstance(function, StageLoss) else None

    def _uneven(self, counts: Sequence[int]) -> PlanError:
        return PlanError(
            f"microbatches with {list(counts)} labels: a {type(self.model).__name__} averages its loss "
            "itself, and the mean of such means is not that of the batch; give equally many to each"
        )

    def output(self, part: Batch) -> Any:
        """Return the model's results for a microbatch, in the pass of a stage."""
        own_loss = self._own_function
        if own_loss is not None:
            own_loss.num_items, own_loss.was_called = self._num_items, False
            own_loss.num_parts = len(self.parts)
        try:
            return self.model(**part)
        finally:
            if own_loss is not None:
                own_loss.num_items, own_loss.num_parts = None, 1

    def loss(self, output: Any, part: Batch) -> Tensor:
        """Return the share of a microbatch in the loss of the step, from the results of the last stage."""
        if self._loss is not None:
            return self._loss(output, part) / len(self.parts)
        loss = output["loss"] if isinstance(output, Mapping) else output[0]
        if not isinstance(loss, Tensor) or loss.dim():
            raise RefusedCallError(
                f"a {type(self.model).__name__} returns no loss for labels; give a loss= to Pipeline"
            )
        own_function = self._own_function
        if self._num_items is not None and own_function is not None and not own_function.was_called:
            raise self._uneven(count_labels(self.model, self.parts))
        return loss / len(self.parts)


LOSS_DTYPE = torch.float64
"""Dtype of the last stage's result. torch 2.11 wants to know it before a step, and models differ in it."""


class _Pass(nn.Module):
    """The passes of a stage, as torch's schedules call them."""

    def __init__(self, step: _Step, stage: StageModel, number: int) -> None:
        super().__init__()
        self._step = step  # not as a submodule: torch does nothing to the parameters of a stage
        self._link = stage.link
        self.number = number
        self.border = StageBoundary({}, {})

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        """Return the values for the next stage, or on the last one the loss.

        Args:
            number: the number of the microbatch, ``[1]``, on the CPU.
        """
        part = self._step.parts[int(number)]
        handover = self.border.handover(received)
        with self._link.through(handover, self.number):
            output = self._step.output(part)
        if self.number == self._link.count - 1:
            return self._step.loss(output, part).to(LOSS_DTYPE)
        left = self.border.leaving(handover)
        _gather_before_backward(self._step.model, left)
        return left


def _gather_before_backward(model: nn.Module, left: Sequence[Tensor]) -> None:
    """Have FSDP2 gather the parameters that are in none of its inner modules when a backward pass begins.

    It would do so by itself only for tensors that the model returns, and a stage leaves other tensors. Since
    the forward pass, the backward pass of another microbatch may have freed them.
    """
    if not isinstance(model, FSDPModule):
        return
    for x in left:
        if x.grad_fn is not None:
            x.register_hook(lambda gradient: model.unshard() and None)  # type: ignore[no-untyped-call]
