"""Weights of the head and of embeddings that code multiplies by itself, past the layer that they belong to.

A rank has some rows of them, so such code computes a loss of a part of the vocabulary. The gradients tell: a
weight has one though its layer never ran, or in rows that the layer never looked up.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm.collectives import Communicator
from ..errors import PlanError, RefusedCallError
from ..format.dims import axes_of
from ..format.plan import Plan, parameter_plans
from ..parallel.layers import VocabParallelEmbedding


def refuse_direct_use(model: nn.Module, plan: Plan, comm: Communicator) -> None:
    """Raise an error in a backward pass in which a sharded head or embedding was used past its layer.

    That is for callers of the base model, who compute a loss of its states themselves. Once the complete
    model was called, nothing is said any more: its own code may use the weights so, as the plan knows. Rows
    are looked at in the backward passes 1, 2, 4, 8 ... of a weight.
    """
    entries = parameter_plans(plan)
    aliases = dict(plan.tied)
    head = plan.logits.module if plan.logits is not None else None
    users: dict[nn.Parameter, _Uses] = {}
    for name, module in model.named_modules():
        if not isinstance(module, VocabParallelEmbedding) and name != head:
            continue
        weight, first = f"{name}.weight", aliases.get(f"{name}.weight", f"{name}.weight")
        parameter = module._parameters.get("weight")
        if parameter is None or first not in entries or not comm.real(axes_of(entries[first].dims[0])):
            continue
        if parameter.requires_grad and not isinstance(parameter, DTensor):  # a DTensor refuses such products
            if parameter not in users:
                users[parameter] = _Uses(parameter)
            users[parameter].watch(weight, module)
    if not users:
        return

    def judge_no_more(model: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            for uses in users.values():
                uses.may_be_any = True

    model.register_forward_pre_hook(judge_no_more)


class _Uses:
    """The calls of the layers of one weight, until a call after which it may have any gradient."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._names: list[str] = []
        self.may_be_any = False
        self._looked_up: Tensor | None = None
        """Local rows that were looked up in any call, bool ``[rows]``."""
        self._num_gradients = 0
        parameter.register_hook(self.check)  # type: ignore[no-untyped-call]
        parameter.register_hook = self._refuse_hook  # type: ignore[method-assign]

    def watch(self, name: str, module: nn.Module) -> None:
        """Note the calls of a layer with this weight, of this name."""
        self._names.append(name)
        module.register_forward_pre_hook(self._note)

    def _refuse_hook(self, hook: object) -> NoReturn:
        raise RefusedCallError(
            f"{' and '.join(self._names)}: a hook of the parameter would be given the gradient of this "
            "rank's rows, which are not the tokens of these numbers; change the parameter's grad after the "
            "backward pass: the embedding's rows(ids) returns this rank's rows of token ids, and which ids "
            "are on other ranks"
        )

    def _note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # nothing is noted in compiled code, so nothing can be said
            self.may_be_any = True
            return
        if not torch.is_grad_enabled():
            return
        if self.may_be_any:
            return
        if not isinstance(module, VocabParallelEmbedding):
            self.may_be_any = True
            return
        local, out_of_shard = module.rows(args[0])
        if self._looked_up is None:
            self._looked_up = torch.zeros(module.rows.num_rows, dtype=torch.bool, device=local.device)
        self._looked_up[local[~out_of_shard]] = True

    def check(self, gradient: Tensor) -> None:
        """Check a gradient of the weight, local ``[rows, width]``; a hook of the parameter."""
        self._num_gradients += 1
        if self.may_be_any:
            return
        if self._looked_up is None:
            raise self._error()
        is_checked = self._num_gradients & (self._num_gradients - 1) == 0
        if is_checked and gradient[~self._looked_up.to(gradient.device)].any():
            raise self._error()

    def _error(self) -> PlanError:
        return PlanError(
            f"{' and '.join(self._names)}: the gradient does not come from the layer: code multiplied by the "
            "weight itself, of which each rank has a part of the rows (for example, a fused loss); call the "
            "layer, or use the model's own loss, see docs/training.md"
        )
