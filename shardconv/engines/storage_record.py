"""What was written to one storage of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from shardconv_runtime.checkpoint.recorded import lazy_of
from shardconv_runtime.tensors.lazy_tensor import LazyTensor

from .strided_views import UnknownContentError, View, Write, content_of


@dataclass(slots=True)
class StorageRecord:
    """The writes to a storage."""

    tensor: torch.Tensor
    """Keeps the storage alive, so that no other one gets its address."""
    is_real: bool
    """Whether its memory has the values; False once a write was kept and not done."""
    writes: list[tuple[View, LazyTensor | str | None]] = field(default_factory=list)
    """In their order: a view, and what it holds since; None: what its memory holds."""

    def note(self, tensor: torch.Tensor, content: LazyTensor | str | None) -> None:
        """Add a write to a view of the storage."""
        if tensor.dtype == self.tensor.dtype:
            self.writes.append((View.of(tensor), content))
        else:
            size = self.tensor.untyped_storage().nbytes() // self.tensor.itemsize
            self.writes.append((View(0, (size,), (1,)), _taken_for(tensor.dtype)))

    def content(self, tensor: torch.Tensor) -> LazyTensor:
        """What a view of the storage holds.

        Raises:
            UnknownContentError: it cannot be known.
        """
        if tensor.dtype != self.tensor.dtype:
            raise UnknownContentError(_taken_for(tensor.dtype))
        known = [
            Write(view, self._memory(view) if content is None else content) for view, content in self.writes
        ]
        return content_of(View.of(tensor), dtype_name(tensor.dtype), known)

    def _memory(self, view: View) -> LazyTensor:
        return constant(self.tensor.as_strided(view.shape, view.strides, view.offset))


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, as in a plan."""
    return str(dtype).removeprefix("torch.")


def constant(tensor: torch.Tensor) -> LazyTensor:
    """The values of a tensor in memory, as they are now."""
    found = lazy_of(tensor.detach().clone(memory_format=torch.contiguous_format))
    assert found is not None, "it is real"
    return found


def _taken_for(dtype: torch.dtype) -> str:
    return f"its bytes are taken for {dtype}"
