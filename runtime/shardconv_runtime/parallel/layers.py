"""The parallel layers that replace exact ``torch.nn`` classes.

A linear layer computes ``Y = X W^T + b``. Sharded over the rows of W (its output dim), each rank has a
part of Y: column-parallel. Sharded over the columns of W (its input dim), each rank has a term of the sum:
row-parallel. An embedding sharded over its rows gives zeros for out-of-shard ids.
(Megatron-LM, arXiv 1909.08053, section 3; "column" and "row" refer to W^T.)

Parameters keep their names, so that every FQN of the model stays. Layers of a plan have the ``in_features``,
``out_features`` and ``num_embeddings`` that the model's code reads: the global ones, unless the plan has an
override. The weight has the local shape. The backward of a layer is the backward of its steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm.collectives import refuse_gradient
from ..comm.steps import Reduce, ReduceScatter
from ..errors import PlanError
from ..format.module_steps import AllGatherStep
from ..format.names import expand_all
from ..format.pipeline_stages import PlaceholderDim, PlaceholderItem, StagedModule
from ..format.plan import LogitsInfo, ModulePlan, Plan, module_plans
from ..format.stage_names import staged_modules
from .boundary import TensorStep
from .row_ids import RowIds, zero_out_of_shard

# Models that keep their shard of the logits.

WHY_NO_LABELS = (
    "that was loaded with gather_logits=False: its loss would be that of a shard of the vocabulary; load "
    "with gather_logits=True"
)


def without_logits_gather(
    modules: dict[str, ModulePlan], logits: LogitsInfo | None, heads: Collection[str]
) -> dict[str, ModulePlan]:
    """Return the modules without the gather of the logits.

    Args:
        modules: the modules of a plan.
        logits: the logits of the plan.
        heads: further modules that compute the logits in place of the plan's, in other calls.

    Raises:
        PlanError: the plan gathers none.
    """
    module, gather = _gather(modules, logits)
    without_gather = dict(modules)
    for name in {module, *heads}:
        outputs = tuple(step for step in modules[name].outputs if step != gather)
        without_gather[name] = replace(modules[name], outputs=outputs)
    return without_gather


def _gather(modules: Mapping[str, ModulePlan], logits: LogitsInfo | None) -> tuple[str, AllGatherStep]:
    """Return the FQN of the module that computes the logits, and the step that gathers them."""
    entry = modules.get(logits.module) if logits else None
    if logits is None or entry is None:
        raise PlanError("gather_logits=False: the plan does not shard the logits")
    for step in entry.outputs:
        if step.port == logits.port and isinstance(step, AllGatherStep):
            return logits.module, step
    raise PlanError(f"{logits.module}: the plan gathers no logits at port {logits.port!r}")


def with_local_logits(plan: Plan) -> Plan:
    """Return the plan of stages whose last one keeps a rank's shard of the logits, as placeholders of the
    head do.

    Args:
        plan: a plan with stages, in the form that is to run.

    Raises:
        PlanError: the plan lacks the result of a placeholder for only the head.
    """
    assert plan.stages is not None
    gather = _gather(module_plans(plan), plan.logits)
    module, port = gather[0], gather[1].port
    entry_and_step = staged_modules(plan).get(module)
    if entry_and_step is None or entry_and_step[0].returns != "tensor" or port != "output":
        raise PlanError(
            f"gather_logits=False: with stages, the module that computes the logits ({module}) should not be "
            "a part of another one that has parameters; leave it out, or convert without --pp"
        )
    entry, step = entry_and_step[0], gather[1]
    tensor = entry.items[0].tensor
    assert tensor is not None, "it is the only item"
    dims = list(tensor.dims)
    dims[step.dim] = PlaceholderDim(size=step.layout)
    head = replace(entry, names=(module,), items=(PlaceholderItem(replace(tensor, dims=tuple(dims))),))
    without_head = [replace(each, names=_without(each, module)) for each in plan.stages.modules]
    modules = (*(each for each in without_head if each.names), head)
    return replace(plan, stages=replace(plan.stages, modules=modules))


def _without(entry: StagedModule, name: str) -> tuple[str, ...]:
    names = expand_all(entry.names)
    return tuple(other for other in names if other != name) if name in names else entry.names


class Steps(NamedTuple):
    """Steps of the plan around a layer's own product, in order."""

    inputs: Sequence[TensorStep] = ()
    outputs: Sequence[TensorStep] = ()


class _PartOfLayer(nn.Module):
    """Prints, behind the global sizes of a layer, the part of the weight that this rank holds."""

    local_part = ""

    def reset_parameters(self) -> None:
        """Draw the weights, unless they are on meta, where a plan puts others in their place."""
        weight = self.weight
        if not (isinstance(weight, Tensor) and weight.is_meta):
            super().reset_parameters()  # type: ignore[misc]  # of the layer's class, which comes next

    def extra_repr(self) -> str:
        """Return the layer's own text, and the local shape with its place."""
        text = super().extra_repr()
        return f"{text}, {self.local_part}" if self.local_part else text


class ColumnParallelLinear(_PartOfLayer, nn.Linear):
    """A linear layer whose output dim is sharded.

    Args:
        in_features: local; equal to the global one unless the plan shards it too.
        out_features: local.
        bias: whether there is a bias, sharded like the output.
        steps: steps on the input and output; a ``Gather`` on the output makes it replicated.
        training: the steps have backwards; without it, an input that requires a gradient is refused.

    Shapes: ``input: [..., in_features]``, output: local ``[..., out_features]``, global after a ``Gather``;
    the dtype of the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        steps: Steps = Steps(),  # noqa: B008  (it is immutable)
        training: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.inputs = tuple(steps.inputs)
        self.outputs = tuple(steps.outputs)
        self._has_backward = training

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        if not self._has_backward and input.requires_grad:
            refuse_gradient(input)
        x = without_gaps(_apply(self.inputs, input) if self.inputs else input)
        return finish(self.outputs, F.linear(x, self.weight, self.bias))


class RowParallelLinear(_PartOfLayer, nn.Linear):
    """A linear layer whose input dim is sharded.

    Args:
        in_features: local.
        out_features: local; equal to the global one unless the plan shards it too.
        bias: whether there is a bias.
        bias_is_partial: the bias is zero on all ranks but one, and is added before the reduction; otherwise
            it is replicated, and is added once, after the reduction.
        steps: on the input, a ``Slice`` if it arrives replicated; on the output, a ``Reduce`` sums the ranks'
            terms.

    Shapes: ``input: local [..., in_features]`` (global before a ``Slice``), output ``[..., out_features]``, a
    Partial before a ``Reduce``; the dtype of the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bias_is_partial: bool = False,
        steps: Steps = Steps(),  # noqa: B008  (it is immutable)
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        reduced = 0
        if bias and not bias_is_partial:  # the bias is added after the last step that sums over ranks
            sums = (Reduce, ReduceScatter)
            reduced = max(
                (i + 1 for i, step in enumerate(steps.outputs) if isinstance(step, sums)), default=0
            )
        self.inputs = tuple(steps.inputs)
        self.reductions = tuple(steps.outputs[:reduced])
        self.outputs = tuple(steps.outputs[reduced:])

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        x = _apply(self.inputs, input) if self.inputs else input
        if not self.reductions:
            return finish(self.outputs, F.linear(x, self.weight, self.bias))
        y = finish(self.reductions, F.linear(x, self.weight))
        return finish(self.outputs, y + self.bias)


class VocabParallelEmbedding(_PartOfLayer, nn.Embedding):
    """An embedding whose rows are sharded.

    Args:
        rows: maps ids to local rows.
        embedding_dim: local; equal to the global one unless the plan shards it too.
        padding_idx: local row of the padding id; None if it is out-of-shard.
        num_embeddings: the value that the model's code reads under this name; None is the global number of
            rows.
        steps: steps on the ids, and on the output, where a ``Reduce`` sums the ranks' rows.

    Shapes: ``input``: global row ids, int ``[...]``; output ``[..., embedding_dim]``, a Partial before a
    ``Reduce``; the dtype of the weight.
    """

    def __init__(
        self,
        rows: RowIds,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        num_embeddings: int | None = None,
        steps: Steps = Steps(),  # noqa: B008  (it is immutable)
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(rows.num_rows, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.num_embeddings = rows.num_global_rows if num_embeddings is None else num_embeddings
        self.rows = rows
        self.inputs = tuple(steps.inputs)
        self.outputs = tuple(steps.outputs)

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        ids, out_of_shard = self.rows(_apply(self.inputs, input))
        if self.rows.num_rows:
            rows = zero_out_of_shard(F.embedding(ids, self.weight, self.padding_idx), out_of_shard)
        else:  # there are more ranks than rows of the table
            rows = self.weight.new_zeros((*ids.shape, self.embedding_dim))
        return finish(self.outputs, rows)


def without_gaps(x: Tensor) -> Tensor:
    """Return ``x`` [B, S, H], copied if its sequences are parts of longer ones, as those of last tokens are.

    Torch (2.13) multiplies such a view by a batched product. On a CPU, in bfloat16, a head takes a hundred
    times as long.
    """
    if x.dim() == 3 and x.stride(0) != x.shape[1] * x.shape[2]:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _apply(steps: Sequence[TensorStep], x: Tensor) -> Tensor:
    for step in steps:
        x = step(x)
    return x


def finish(steps: Sequence[TensorStep], y: Tensor) -> Tensor:
    """Return the steps on a result that a layer has just computed, so that sums may take its memory."""
    for step in steps:
        y = step.overwriting(y) if isinstance(step, Reduce) else step(y)
    return y
