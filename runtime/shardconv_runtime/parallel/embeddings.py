"""Embeddings that a user looks up, or gives to the model in place of ids.

If that saves a collective, a plan reduces the result of an embedding not at the embedding but later, after a
sum or a dropout. So the embedding's result in a forward pass may be a term of a sum over ranks, or a
shard. A user sees neither: an embedding that is called by itself returns full rows, and embeddings that enter
the model as ``inputs_embeds`` are sharded as the plan expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Communicator
from ..comm.steps import Gather, KeepOnFirst, Reduce, Slice
from ..errors import RefusedCallError
from ..format.dims import Dim, Leaf, axes_of, size
from ..format.module_steps import AllGatherStep, AllReduceStep, LocalRowsStep, ReduceScatterStep, SliceStep
from ..format.plan import ModulePlan, ParameterPlan
from .boundary import forward_signature, renumber
from .row_ids import RowIds, zero_out_of_shard
from .user_hooks import PLACED

ARGUMENT = "inputs_embeds"
"""Name of the argument of transformers' models for embeddings in place of ids."""

_WHY_NO_GRADIENT = (
    f"{ARGUMENT} that require gradients were given to a model whose ranks each have a part of that gradient; "
    f"pass input_ids, or {ARGUMENT}.detach() where only the model is trained"
)
_WHY_SEQUENCE = "the ranks keep their parts of the sequence; load without sequence_parallel=True"


def attach_embeddings(
    model: nn.Module,
    modules: Mapping[str, ModulePlan],
    parameters: Mapping[str, ParameterPlan],
    tied: Mapping[str, str],
    comm: Communicator,
) -> None:
    """Have embeddings return full rows outside of a forward pass, and forward passes take full embeddings."""
    names = {module: name for name, module in model.named_modules()}
    embeddings: dict[nn.Module, None] = {}
    for part in model.modules():
        try:
            embeddings[part.get_input_embeddings()] = None  # type: ignore[operator]
        except (AttributeError, NotImplementedError):  # a part without one
            continue
    for module in embeddings:
        if not isinstance(module, nn.Module):
            continue
        name = names.get(module)
        weight = None if name is None else parameters.get(tied.get(f"{name}.weight", f"{name}.weight"))
        if name is None or weight is None or len(weight.dims) != 2 or isinstance(module, nn.Linear):
            continue  # it embeds patches of images, in no rows
        if any(module.children()):
            continue  # modules inside of it have their own steps
        entry = modules.get(name, ModulePlan((), "boundary"))
        if axes_of(weight.dims[0]) and not any(isinstance(step, LocalRowsStep) for step in entry.inputs):
            # An embedding that no forward pass calls, though others share its rows: it returns full ones.
            rows, width = weight.dims
            ids = RowIds(comm, rows, table=name)
            lookup = _UnusedLookup(ids, Gather(comm, -1, width, ()), Reduce(comm, axes_of(rows), ()))
            module.register_forward_pre_hook(lookup.before)
            module.register_forward_hook(lookup.after)
            module.__dict__[PLACED] = _Embedding(_Placement(frozenset(), Leaf(size(width))), comm)
        else:
            # The placement of the result after the steps at the boundary of the embedding.
            partial, width, is_sequence = set(axes_of(weight.dims[0])), weight.dims[1], False
            for step in entry.outputs:
                if isinstance(step, AllReduceStep):
                    partial -= set(step.axes)
                elif isinstance(step, AllGatherStep):
                    width = Leaf(size(step.layout))
                elif isinstance(step, SliceStep | ReduceScatterStep):
                    partial -= axes_of(step.layout) if isinstance(step, ReduceScatterStep) else frozenset()
                    if size(step.layout) == size(width):
                        width = step.layout
                    else:
                        is_sequence = True
            _attach(model, name, module, _Placement(frozenset(partial), width, is_sequence), comm)


@dataclass(frozen=True)
class _Placement:
    """The placement of an embedding's result in a forward pass."""

    partial: frozenset[int]
    """Mesh axes over which it is a term of a sum."""
    width: Dim
    """Layout of its last dim."""
    is_sequence: bool = False
    """Whether it is sharded over the sequence."""

    @property
    def is_full(self) -> bool:
        """Return whether each rank has all of it."""
        return not (self.partial or axes_of(self.width) or self.is_sequence)


def _attach(model: nn.Module, name: str, module: nn.Module, left: _Placement, comm: Communicator) -> None:
    """Watch the modules around an embedding that returns less than full rows."""
    state = module.__dict__[PLACED] = _Embedding(left, comm)
    if left.is_full:
        return
    parents = [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)] + [""]
    renumber(module, module.register_forward_hook(state.finish))
    for parent in map(model.get_submodule, parents):
        names = list(forward_signature(parent).parameters)
        is_entrance = ARGUMENT in names and f"decoder_{ARGUMENT}" not in names  # which has two embeddings
        before = _Before(state, names.index(ARGUMENT) if is_entrance else None)
        renumber(parent, parent.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        renumber(parent, parent.register_forward_hook(state.leave, always_call=True))


class _Embedding:
    """Forward hooks of one embedding and of the modules around it."""

    def __init__(self, left: _Placement, comm: Communicator) -> None:
        self.is_full = left.is_full
        self._is_sequence = left.is_sequence
        self._keeps = all(comm.group((axis,))[0] == comm.rank for axis in left.partial)
        self._keep = KeepOnFirst(comm, left.partial, training=True)
        self._slice = Slice(comm, -1, left.width, ())
        self._gather = Gather(comm, -1, left.width, ())
        self._reduce = Reduce(comm, left.partial, ())
        self._running: list[nn.Module] = []
        self._is_placed = False

    def enter(self, module: nn.Module) -> None:
        """Note that a module around the embedding begins."""
        if not self._running:
            self._is_placed = False
        self._running.append(module)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note that a module around the embedding has returned or raised."""
        if module in self._running:
            del self._running[self._running.index(module) :]

    def finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return full rows to a caller that calls the embedding by itself."""
        if self._running or not isinstance(output, Tensor):
            self._is_placed = True
            return None
        if self._is_sequence:
            raise RefusedCallError(f"the embedding was called by itself: {_WHY_SEQUENCE}")
        return self._reduce(self._gather(output))

    def full(self, x: Tensor) -> Tensor | None:
        """Return full rows for a hook on the embedding; None if they are full, or part of the sequence."""
        if not self._running or self._is_sequence:
            return None
        return self._reduce(self._gather(x))

    def part(self, x: Tensor) -> Tensor:
        """Return the plan's part of full rows, the inverse of ``full``."""
        return self._keep(self._slice(x))

    def placed(self, embeds: Tensor) -> Tensor:
        """Return full embeddings ``[..., H]`` as in the plan: a shard, and zeros on all ranks but one.

        Embeddings that the module has made in this forward pass, or that an outer module was given, already
        are.
        """
        if self._is_placed:
            return embeds
        if self._is_sequence:
            raise RefusedCallError(f"{ARGUMENT} were given: {_WHY_SEQUENCE}")
        if embeds.requires_grad and torch.is_grad_enabled():
            raise RefusedCallError(_WHY_NO_GRADIENT)
        self._is_placed = True
        shard = self._slice(embeds)
        return shard if self._keeps else torch.zeros_like(shard)


class _Before:
    """Forward pre-hook of a module around an embedding, which may take embeddings in place of ids."""

    def __init__(self, state: _Embedding, position: int | None) -> None:
        self._state = state
        self._position = position

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._state.enter(module)
        i = self._position
        if i is not None and isinstance(kwargs.get(ARGUMENT), Tensor):
            kwargs = {**kwargs, ARGUMENT: self._state.placed(kwargs[ARGUMENT])}
        elif i is not None and i < len(args) and isinstance(args[i], Tensor):
            args = (*args[:i], self._state.placed(args[i]), *args[i + 1 :])
        return args, kwargs


class _UnusedLookup:
    """Forward hooks: global ids to local ones, and the rows of this rank to full ones."""

    def __init__(self, rows: RowIds, gather: Gather, reduce: Reduce) -> None:
        self._rows, self._gather, self._reduce = rows, gather, reduce
        self._out_of_shard: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        local, self._out_of_shard = self._rows(args[0])
        return (local, *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        assert self._out_of_shard is not None
        return self._reduce(self._gather(zero_out_of_shard(output, self._out_of_shard)))
