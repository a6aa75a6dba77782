"""Training of the model of a pipeline stage: forms of values that cross its borders, loss, tied parameters.

Calls without a schedule are refused, since their gradients would end where the stage begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.process_groups import axes_group
from ..errors import PlanError, ShardconvError
from ..format.plan import parameter_plans
from ..format.stage_names import held_names, stages_of
from ..loaded import loaded
from ..parallel.boundary import forward_signature, given_cache
from ..saving.dcp_boxes import local_tensor
from ..saving.stored_model import named_tensors
from ..training.checkpointing import without_cache
from ..training.loss_parallel import predicts_next
from ..training.sequence import padded
from .stage_link import Crossing, Handover, StageLink
from .stage_model import StageModel
from .stage_processes import ProcessTransport

# A batch in parts that run one after another.

IGNORED = -100
"""The label of tokens without a loss, in transformers, unless a call says another one."""


def divide(batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Divide the tensors of a batch along their first dim."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    sizes = {name: value.shape[0] for name, value in tensors.items()}
    if not sizes:
        raise PlanError("the batch has no tensors to divide into microbatches")
    if len(set(sizes.values())) > 1 or next(iter(sizes.values())) % count:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise PlanError(
            f"a batch with first dims of {found} cannot be divided into {count} microbatches; give a list of "
            "microbatches"
        )
    chunks = {name: value.chunk(count) for name, value in tensors.items()}
    return [
        {name: chunks[name][i] if name in chunks else value for name, value in batch.items()}
        for i in range(count)
    ]


def require_alike(parts: Sequence[Mapping[str, Any]]) -> object:
    """Return the names, shapes and dtypes that all parts have."""
    forms = []
    for part in parts:
        form: list[tuple[Any, ...]] = []
        for name, v in sorted(part.items()):
            form.append((name, str(v.dtype), tuple(v.shape)) if isinstance(v, Tensor) else (name, repr(v)))
        forms.append(form)
    for number, form in enumerate(forms):
        if form != forms[0]:
            raise PlanError(
                f"microbatch {number} has other arguments or shapes ({form}) than the first ({forms[0]}): "
                "stages receive equal shapes; pad them"
            )
    return forms[0]


def count_labels(model: nn.Module, parts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return how many labels of each part have a loss."""
    first = 1 if predicts_next(getattr(model, "loss_type", None)) else 0
    return [int((p["labels"][..., first:] != p.get("ignore_index", IGNORED)).sum()) for p in parts]


# The values that cross the borders of a stage in the pass of a microbatch.
#
# Every stage finds their forms in a pass of placeholders, without a message: placeholders also replace its
# own modules and return tensors of the shapes in the plan, while the code around them runs unchanged.


@dataclass(frozen=True)
class ValueForm:
    """The shape, local, and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Make a meta tensor of this form, which requires a gradient if it can have one."""
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.dtype.is_floating_point
        )


@dataclass(frozen=True)
class StageBoundary:
    """The values that a stage receives from the one before, and leaves for the next one, in order."""

    received: Mapping[Crossing, ValueForm]
    left: Mapping[Crossing, ValueForm]

    @classmethod
    def of(cls, stage: StageModel, number: int, forms: Mapping[Crossing, ValueForm]) -> StageBoundary:
        """Return the borders of a stage; a value for a later stage crosses all borders on its way."""
        crossings = stage.crossings()
        ways = {crossing: crossings[crossing] for crossing in crossings if crossing in forms}
        return cls(
            {c: forms[c] for c, (source, last) in ways.items() if source < number <= last},
            {c: forms[c] for c, (source, last) in ways.items() if source <= number < last},
        )

    def handover(self, received: Sequence[Tensor]) -> Handover:
        """Make the handover for a pass that received these values."""
        return Handover(dict(zip(self.received, received, strict=True)))

    def leaving(self, handover: Handover) -> tuple[Tensor, ...]:
        """Return the values that the pass leaves for the next stage."""
        if missing := [crossing for crossing in self.left if crossing not in handover.values]:
            raise ShardconvError(
                f"{missing[0][0]} was not called for this microbatch, and was for the first one; give all "
                "microbatches the same arguments"
            )
        return tuple(_for_backward(handover.values[crossing].contiguous()) for crossing in self.left)


def _for_backward(x: Tensor) -> Tensor:
    """Return a value with which a backward pass can begin, though no parameter that is trained made it."""
    is_constant = torch.is_grad_enabled() and x.is_floating_point() and not x.requires_grad
    return x.detach().requires_grad_() if is_constant else x


class _Measuring(Handover):
    """Records the values that passes would receive, and returns zeros."""

    only_measures = True

    def __init__(self, device: torch.device) -> None:
        super().__init__({})
        self._device = device
        self.forms: dict[Crossing, ValueForm] = {}

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return zeros of this form."""
        found = torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        self.forms[crossing] = ValueForm(tuple(shape), found.dtype)
        self.send(crossing, found, ())
        return found


def measured_forms(
    model: nn.Module, stage: StageModel, inputs: Mapping[str, Any]
) -> dict[Crossing, ValueForm]:
    """Return the forms of all values that stages hand on in a call."""
    with padded(model, inputs) as given:
        return forms_inside(model, stage, given)


def forms_inside(model: nn.Module, stage: StageModel, given: Mapping[str, Any]) -> dict[Crossing, ValueForm]:
    """Return the same for the arguments of the model's code, behind its hooks."""
    measuring = _Measuring(stage.device)
    devices = [stage.device] if stage.device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        stage.without_units(model),
        stage.link.calling(),
        stage.link.through(measuring),
    ):
        model.forward(**given)
    return measuring.forms


# A call, without gradients, of the model of a process that has several stages: one pass for each of them.
#
# Values that cross the border of two neighboring stages go from process to process as in a schedule, in which
# this is one microbatch.


def evaluate_in_passes(model: nn.Module, stage: StageModel) -> None:
    """Have a call of a model run all stages of this process, in place."""
    inner = getattr(model.forward, "__func__", type(model).forward)
    names = list(forward_signature(model).parameters)

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if stage.link.is_scheduled():
            return inner(self, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        if (name := given_cache(given)) is not None:
            raise ShardconvError(
                f"{name} was given to a model with several stages in each process, which keeps none; pass "
                "full sequences, or load it without stages_per_process"
            )
        given = without_cache(self, names, given)  # each pass would make one for its stage
        link, processes = stage.link, stage.link.transport
        output: Any = None
        forms = forms_inside(self, stage, given)
        for number in link.stages:
            border = StageBoundary.of(stage, number, forms)
            received = [
                processes.receive(crossing, form.shape, form.dtype, number - 1)
                for crossing, form in border.received.items()
            ]
            handover = border.handover(received)
            with link.through(handover, number):
                output = self.forward(**given)
            if number < link.count - 1:
                for crossing, x in zip(border.left, border.leaving(handover), strict=True):
                    processes.send(crossing, x, (number + 1,))
        # Values that are handed back to the model, such as caches, belong to one pass: they are left out.
        for name in names if isinstance(output, MutableMapping) else ():
            if output.get(name) is not None:
                output[name] = None
        return output

    model.__dict__["forward"] = MethodType(forward, model)


# Parameters that several processes hold for their stages, for example an embedding that is the head too.
# Their gradients are summed. Gradients from stages of one process add up in its parameter by themselves.


class TiedGradients:
    """Sums the gradients of a step over the processes that hold a parameter; each of them makes one."""

    def __init__(self, model: nn.Module) -> None:
        source = loaded(model)
        link: StageLink = source.stage.link
        assert isinstance(link.transport, ProcessTransport), "it was loaded on processes"
        tensors = named_tensors(model)
        plan, num_places = source.plan, link.num_places
        held = [held_names(plan, stages_of(plan, place, num_places)) for place in range(num_places)]
        self._tied: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        for first in parameter_plans(plan):
            places = tuple(place for place, names in enumerate(held) if first in names)
            if len(places) < 2 or link.place not in places:
                continue
            tensor = tensors[held[link.place][first]]
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                self._tied.append((tensor, axes_group(link.transport.group, places)))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Sum the gradients of passes within this context, and add them to the earlier gradients."""
        before: list[Tensor | None] = [parameter.grad for parameter, _ in self._tied]
        for parameter, _ in self._tied:
            parameter.grad = None
        yield
        for (parameter, group), earlier in zip(self._tied, before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_tensor(parameter.grad), group=group)
            if earlier is not None:
                parameter.grad += earlier


class StageLoss:
    """Replaces the loss function of a model with stages.

    The last stage divides the sum over the tokens of a microbatch by the mean number of tokens of all
    microbatches, so that the mean over microbatches is the mean over all tokens. The other stages, which have
    no logits, return zero.
    """

    def __init__(self, own: Any, link: StageLink) -> None:
        self.own = own
        self._link = link
        self.num_items: float | None = None
        """The divisor of the sum over the tokens of a microbatch; None: the number of these tokens."""
        self.num_parts = 1
        """The number of microbatches over which the losses are averaged; a caller who gives
        ``num_items_in_batch`` wants their sum."""
        self.was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss, a scalar; see the model's loss function for the arguments."""
        self.was_called = True
        if self._link.is_last and not self._link.is_measuring:
            is_sum = kwargs.get("num_items_in_batch") is not None
            if self.num_items is not None and not is_sum:
                kwargs["num_items_in_batch"] = self.num_items
            loss: Tensor = self.own(*args, **kwargs)
            return loss * self.num_parts if is_sum else loss
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        wide = any(value.dtype == torch.float64 for value in given)
        device = given[0].device if given else None
        return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)


def prepare_stage(model: nn.Module, link: StageLink) -> None:
    """Make the model of a stage ready to be trained, in place."""
    if hasattr(model, "loss_function"):
        model.loss_function = StageLoss(model.loss_function, link)  # type: ignore[assignment]

    def refuse(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not link.is_scheduled() and (torch.is_grad_enabled() or model.training):
            raise ShardconvError(
                "a single stage cannot give gradients: train with shardconv_runtime.Pipeline(model, ...)"
                ".step(batch); to evaluate, call the model after eval(), in torch.no_grad()"
            )

    model.register_forward_pre_hook(refuse, prepend=True, with_kwargs=True)
