"""Collectives over axes of the mesh.

Parallel modules and the steps of a plan call a ``Communicator``, in a job a ``ProcessCommunicator``. Its
operations have no backward: ``steps.py`` puts each next to its adjoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol, Self

import torch
import torch.distributed as dist

# Private, but the interface that Dynamo traces without a graph break and that CommDebugMode counts;
# importing it registers the meta kernels of the operators used below. Only this file knows of it.
import torch.distributed._functional_collectives
from torch import Tensor

from ..errors import RefusedCallError, UnsupportedError
from ..format.slices import Mesh, group_of
from .process_groups import needs_host

_functional = torch.ops._c10d_functional

AllReduce = Callable[[Tensor, str], Tensor]
"""Sums a contiguous tensor of any shape over the process group of this name; does not write to its input."""

Axes = Iterable[int]

CPU = torch.device("cpu")


class Regathering(Protocol):
    """A forward pass that keeps parts of activations that it gathers along the sequence
    (``training/regather.py``).

    ``step`` is a ``tensor_steps.Resharding``.
    """

    def reshard(self, step: Any, x: Tensor) -> Tensor: ...


class Communicator(ABC):
    """One rank of a mesh, and its collectives.

    Args:
        rank: this rank, row-major in ``mesh``.
        mesh: sizes of the mesh axes.
        device: the device of the model. Steps allocate their buffers there when they are made: memory that
            is allocated in a call may belong to a CUDA graph.

    Attributes:
        regathering: set while a forward pass runs that keeps parts of gathered activations.
        sequence: the lengths of the sequence without and with padding in the last forward pass whose
            activations are sharded over it. They are kept for a backward pass that recomputes.
    """

    def __init__(self, rank: int, mesh: Mesh, device: torch.device = CPU) -> None:
        self.rank = rank
        self.mesh = mesh
        self.device = device
        self.regathering: Regathering | None = None
        self.sequence: tuple[int, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this communicator: a copy of a model communicates with the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a model whose parameters are sharded over ranks cannot be pickled; call save_pretrained or "
            "shardconv_runtime.save on all ranks, or torch.save(model.state_dict()) for this rank's part"
        )

    def group(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that differ from this one in ``axes`` only, in coordinate order."""
        return group_of(self.mesh, axes, self.rank)

    def num_ranks(self, axes: Iterable[int]) -> int:
        """Return the number of ranks along ``axes``."""
        count = 1
        for axis in axes:  # a plain loop, which compilers can look through
            count *= self.mesh[axis]
        return count

    def real(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Return the axes, ascending, along which there is more than one rank."""
        return tuple(sorted(a for a in axes if self.mesh[a] > 1))

    def all_reduce(self, x: Tensor, axes: tuple[int, ...], *, overwrite: bool = False) -> Tensor:
        """Sum over the ranks along ``axes``, of ``x``'s shape and dtype: Partial to Replicate. No backward.

        Args:
            x: local, of any shape, the same on each rank.
            axes: mesh axes, ascending; none (or axes of extent 1) makes this the identity.
            overwrite: nothing else reads ``x``, so that the sum may take its memory. A compiler finds this
                out by itself, and gets the operation that keeps ``x``.

        Raises:
            PlanError: ``x`` requires a gradient. The other collectives raise it too.
        """
        if x.requires_grad:
            refuse_gradient(x)
        if self.num_ranks(axes) == 1:
            return x
        if overwrite and not torch.compiler.is_compiling():
            return self._sum_in_place(x.contiguous(), axes)
        return self._sum(x.contiguous(), axes)

    def concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Concatenate local ``[n, ...]`` of ``p`` ranks along ``axes`` to ``[p * n, ...]``. No backward."""
        if x.requires_grad:
            refuse_gradient(x)
        if self.num_ranks(axes) == 1:
            return x
        return self._concatenate(x.contiguous(), axes)

    def begin_concatenating(self, x: Tensor, axes: tuple[int, ...]) -> Callable[[], Tensor]:
        """Begin to concatenate; the returned function waits for the result."""
        concatenated = self.concatenate(x, axes)
        return lambda: concatenated

    def reduce_scatter(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Sum ``[p * n, ...]`` over ``p`` ranks along ``axes`` to local ``[n, ...]``. No backward."""
        if x.requires_grad:
            refuse_gradient(x)
        if self.num_ranks(axes) == 1:
            return x
        return self._reduce_scatter(x.contiguous(), axes)

    @abstractmethod
    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Sum of a contiguous tensor of any shape over two or more ranks; does not write to ``x``."""

    def _sum_in_place(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Sum like ``_sum``; ``x`` may be overwritten."""
        return self._sum(x, axes)

    @abstractmethod
    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Concatenate contiguous ``[n, ...]`` along dim 0 over two or more ranks."""

    def _reduce_scatter(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Sum of contiguous ``[p * n, ...]`` over ``p`` ranks, two or more: this rank's ``[n, ...]``."""
        parts = self._sum(x, axes).chunk(self.num_ranks(axes))
        return parts[self.group(axes).index(self.rank)].clone()


class ProcessCommunicator(Communicator):
    """Ranks that are processes of ``torch.distributed``.

    Args:
        groups: the process group of this rank, for each tuple of axes that is used.
        all_reduce: used in place of torch's own.
        device: see ``Communicator``.
    """

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        all_reduce: AllReduce | None = None,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(rank, mesh, device)
        self.groups = dict(groups)
        self._names = {axes: group.group_name for axes, group in groups.items()}
        self._all_reduce = all_reduce
        self._through_host = any(needs_host(group, device) for group in groups.values())
        if self._through_host:
            from . import host_gather  # noqa: F401  (registers the operator, which takes 20 ms)

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        _require_memory(x)
        if self._all_reduce is not None:
            return self._all_reduce(x, self._names[axes])
        return _wait(_functional.all_reduce(x, "sum", self._names[axes]))

    def _sum_in_place(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        if self._all_reduce is not None:
            return self._sum(x, axes)
        _require_memory(x)
        dist.all_reduce(x, group=self.groups[axes])
        return x

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        _require_memory(x)
        num_ranks = self.num_ranks(axes)
        if self._through_host:
            gathered: Tensor = torch.ops.shardconv.host_gather(x, num_ranks, self._names[axes])
            return gathered
        return _wait(_functional.all_gather_into_tensor(x, num_ranks, self._names[axes]))

    def begin_concatenating(self, x: Tensor, axes: tuple[int, ...]) -> Callable[[], Tensor]:
        """See ``Communicator``."""
        if self._through_host:
            return super().begin_concatenating(x, axes)
        _require_memory(x)
        pending = _functional.all_gather_into_tensor(x.contiguous(), self.num_ranks(axes), self._names[axes])
        return lambda: _wait(pending)

    def _reduce_scatter(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        if self._through_host:  # gloo sums CUDA tensors, which is all that this needs
            return super()._reduce_scatter(x, axes)
        _require_memory(x)
        return _wait(_functional.reduce_scatter_tensor(x, "sum", self.num_ranks(axes), self._names[axes]))


def refuse_gradient(x: Tensor) -> None:
    """Stop before autograd records an operation on ``x`` (of any shape) that has no backward.

    Callers ask ``x.requires_grad`` first, so that a call without gradients makes no further call for it.

    Raises:
        PlanError: gradients are enabled and ``x`` requires one.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise RefusedCallError(
            "the model was loaded for inference: it has no gradient collectives, so that a backward pass "
            "would be wrong; load it with training=True, or run it under torch.no_grad()"
        )


def refuse_second_gradient() -> None:
    """Stop a backward pass that autograd records, in which gradients of gradients are of other ranks.

    Raises:
        PlanError: gradients are enabled.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RefusedCallError(
            "a model whose parameters are sharded over ranks can be differentiated once: leave "
            "create_graph=True out of backward() or torch.autograd.grad()"
        )


def _require_memory(x: Tensor) -> None:
    """Refuse a tensor of ``torch.func`` that stands for many: a process group would write to one of them.

    Raises:
        PlanError: the tensor has no memory of its own.
    """
    if torch.compiler.is_compiling():
        return
    try:
        x.data_ptr()
    except RuntimeError as error:
        raise RefusedCallError(
            "vmap, or torch.autograd.grad(is_grads_batched=True), was to run a collective of the model for "
            "several samples at once, which process groups cannot; call the model, or grad, for each of them "
            "(vectorize=False in torch.autograd.functional)"
        ) from error


def _wait(x: Tensor) -> Tensor:
    out: Tensor = _functional.wait_tensor(x)
    return out
