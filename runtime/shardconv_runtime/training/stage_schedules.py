"""Training a model with stages: microbatches through a schedule of ``torch.distributed.pipelining``.

Each process runs the model's own forward pass for each microbatch, with stand-ins in the place of other
stages' modules. What crosses the border of two neighboring stages, values for later stages included, is sent
by the schedule, and so are its gradients. What the passes compute around modules, as masks, every stage
computes from the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ..comm.same_calls import require_same_inputs
from ..comm.stage_link import Crossing
from ..comm.stage_processes import ProcessLink
from ..errors import PlanError, ShardconvError
from ..loaded import loaded, unwrapped
from ..parallel.stage_model import StageModel
from .microbatches import count_labels, divide, require_alike
from .model_losses import has_parallel_loss
from .stage_forms import Border, Form, measured_forms
from .stage_training import StageLoss
from .tied_stages import TiedGradients

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""By name, the schedules of torch for one stage in each process."""

Batch = Mapping[str, Any]
"""Arguments of the model by name."""

LossOf = Callable[[Any, Batch], Tensor]
"""From what the model returns for a microbatch, and the microbatch, to its loss, a scalar."""


class Pipeline:
    """Steps of training of a model with stages.

    Every process of the model makes one, and calls ``step`` with the same batch; processes of other
    data-parallel replicas do with batches of their own. Gradients add up in the model's parameters, as
    ``backward`` would add them.

    Args:
        model: returned by ``load(..., training=True)`` of a directory, or with a plan, that has stages.
        microbatches: into how many parts ``step`` divides a batch, of which the stages run several at a time.
        schedule: ``"1f1b"`` runs a backward pass as soon as it can, so that a stage keeps the activations of
            at most as many microbatches as there are stages, or ``"gpipe"``: all forward passes first.
        loss: of a microbatch, from the model's results and the microbatch; by default the model's own loss.

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
            raise PlanError(
                "Pipeline is for models with stages; this one has none: call backward() of its loss"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise PlanError("the model was loaded for inference; load it with training=True")
        if schedule not in SCHEDULES:
            raise PlanError(f"schedule={schedule!r} should be one of {', '.join(map(repr, SCHEDULES))}")
        stage: StageModel = source.stage
        if microbatches < 1 or (schedule == "1f1b" and microbatches < stage.link.count):
            raise PlanError(
                f"microbatches={microbatches}: schedule {schedule!r} of {stage.link.count} stages needs at "
                f"least {stage.link.count if schedule == '1f1b' else 1}"
            )
        assert isinstance(stage.link, ProcessLink), "it was loaded on processes"
        self.model = unwrapped(model)
        self.microbatches = microbatches
        self._schedule = SCHEDULES[schedule]
        self._stage = stage
        self._link: ProcessLink = stage.link
        self._pass = _Pass(self.model, stage, loss)
        self._tied = TiedGradients(model)
        self._prepared: tuple[object, Any] | None = None
        self._start = source.launch
        self._num_steps = 0

    def step(self, batch: Batch | Sequence[Batch]) -> Tensor:
        """Run a batch forward and backward on all stages.

        The loss is that of the whole batch: the mean over all tokens that have labels, whatever microbatch
        they are in; terms that a model adds to it, such as that of balanced experts, are averaged over the
        microbatches.

        Args:
            batch: arguments of the model, with ``labels`` if no other loss was given. Tensors are divided
                along their first dim, whose size is the batch's; or the microbatches themselves, a list of as
                many as there should be. All have the same shapes.

        Returns:
            The loss, a scalar without gradient, the same on all stages.

        Raises:
            PlanError: the batch cannot be divided, or the microbatches differ in their shapes.
            ShardconvError: the model calls its modules otherwise than it was traced.
        """
        parts = divide(batch, self.microbatches) if isinstance(batch, Mapping) else list(batch)
        if len(parts) != self.microbatches:
            raise PlanError(f"{len(parts)} microbatches were given to a pipeline of {self.microbatches}")
        self._pass.begin(parts)
        self._compare(parts)
        schedule = self._prepare(require_alike(parts), parts[0])
        losses: list[Tensor] = []
        with self._tied.apart():
            numbers = torch.arange(self.microbatches)
            schedule.step(number=numbers, target=numbers, losses=losses, return_outputs=False)
        return self._shared(losses)

    def _compare(self, parts: Sequence[Batch]) -> None:
        """Whether all ranks of all stages were given the same, in the steps 1, 2, 4, 8 ..."""
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) == 0:
            given = {f"{n} of microbatch {i}": v for i, part in enumerate(parts) for n, v in part.items()}
            require_same_inputs(self._start, given)

    def _prepare(self, forms: object, first: Batch) -> Any:
        """The schedule for microbatches of these forms; that of the last step is kept."""
        if self._prepared is None or self._prepared[0] != forms:
            made = measured_forms(self.model, self._stage, first)
            self._prepared = None  # gives the buffers of the other one back
            self._prepared = forms, self._make(made)
        return self._prepared[1]

    def _make(self, forms: Mapping[Crossing, Form]) -> Any:
        link, device = self._link, self._stage.device
        border = Border.of(self._stage, forms)
        self._pass.border = border
        given = [form.tensor() for form in border.received.values()]
        left = [form.tensor() for form in border.left.values()]
        if link.is_last:
            left = [torch.empty((), device="meta", requires_grad=True)]
        stage = PipelineStage(
            self._pass,
            link.stage,
            link.count,
            device,
            input_args=tuple(given),
            output_args=tuple(left),
            group=link.group,
        )
        return self._schedule(stage, self.microbatches, loss_fn=_loss_itself, scale_grads=False)

    def _shared(self, losses: list[Tensor]) -> Tensor:
        """The sum of the losses of the last stage, on all of them."""
        total = torch.zeros((), dtype=torch.float64, device=self._stage.device)
        if losses:
            total += torch.stack([loss.detach().double() for loss in losses]).sum()
        dist.broadcast(total, group=self._link.group, group_src=self._link.count - 1)
        return total


def _loss_itself(output: Tensor, target: Tensor) -> Tensor:
    """The last stage returns its loss."""
    return output


class _Pass(nn.Module):
    """One pass of a stage, as torch's schedules call it.

    Args:
        model: of the stage.
        stage: its link and forms.
        loss: see ``Pipeline``.
    """

    def __init__(self, model: nn.Module, stage: StageModel, loss: LossOf | None) -> None:
        super().__init__()
        self._model = (model,)  # not as a submodule: its parameters are the model's
        self.border = Border({}, {})
        self._stage = stage
        self._loss = loss
        self._parts: Sequence[Batch] = ()
        self._num_items: float | None = None

    def begin(self, parts: Sequence[Batch]) -> None:
        """The microbatches of the next step."""
        self._parts, self._num_items = parts, None
        if self._loss is not None:
            return
        if self._own_function is not None and all("num_items_in_batch" in part for part in parts):
            return
        if any(part.get("labels") is None for part in parts):
            raise PlanError("the batch has no labels: give them, or a loss= to Pipeline")
        counts = count_labels(self._model[0], parts)
        if len(set(counts)) == 1:
            return  # the mean of means over as many tokens
        own_loss, kind = self._own_function, getattr(self._model[0], "loss_type", None)
        if own_loss is None or not has_parallel_loss(kind):
            raise self._uneven(counts)
        self._num_items = sum(counts) / len(counts)

    @property
    def _own_function(self) -> StageLoss | None:
        found = getattr(self._model[0], "loss_function", None)
        return found if isinstance(found, StageLoss) else None

    def _uneven(self, counts: Sequence[int]) -> PlanError:
        return PlanError(
            f"microbatches with {list(counts)} labels: a {type(self._model[0]).__name__} averages its loss "
            "itself, and the mean of such means is not that of the batch; give equally many to each"
        )

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        """The values for the next stage, or on the last one the loss.

        Args:
            received: of the stage before, in the order of its border.
            number: of the microbatch, ``[1]``, on the CPU.
        """
        index, link = int(number), self._stage.link
        part = self._parts[index]
        own_loss = self._own_function
        if own_loss is not None:
            own_loss.num_items, own_loss.was_called = self._num_items, False
            own_loss.num_parts = len(self._parts)
        handover = self.border.handover(received)
        link.handover, link.shares_results = handover, False
        try:
            output = self._model[0](**part)
        finally:
            link.handover, link.shares_results = None, True
            if own_loss is not None:
                own_loss.num_items, own_loss.num_parts = None, 1
        if not link.is_last:
            return self.border.leaving(handover)
        if self._loss is not None:
            return self._loss(output, part) / len(self._parts)
        return self._own_loss(output) / len(self._parts)

    def _own_loss(self, output: Any) -> Tensor:
        loss = output["loss"] if isinstance(output, Mapping) else output[0]
        if not isinstance(loss, Tensor) or loss.dim():
            raise ShardconvError(
                f"a {type(self._model[0]).__name__} returns no loss for labels; give a loss= to Pipeline"
            )
        own_function = self._own_function
        if self._num_items is not None and own_function is not None and not own_function.was_called:
            raise self._uneven(count_labels(self._model[0], self._parts))
        return loss
