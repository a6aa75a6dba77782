"""Sequence parallelism around a model's forward: inputs are padded to lengths that the ranks divide.

Between the parallel blocks each rank has an equal part of the sequence. The model's inputs are padded at the
end and its outputs trimmed; labels are padded with the index that losses ignore, and the padding is masked.
So every token has the same result as without padding.

Code that picks positions for which to compute logits (``logits_to_keep``) would pick them from a rank's part.
The model gets the request for all, and the module that computes the logits picks them from the full sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from ..comm.collectives import Communicator
from ..errors import OptionError, RefusedCallError
from ..parallel.boundary import forward_signature, given_cache, replace_at
from ..parallel.layers import ColumnParallelLinear, RowParallelLinear
from ..parallel.refusals import is_asked_for
from .checkpointing import without_cache

IGNORED = -100
"""The label that the losses of transformers ignore unless a call says another one."""

_PADDING: Mapping[str, int] = {
    "input_ids": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "labels": IGNORED,
    "shift_labels": IGNORED,
}
"""Arguments ``[B, S]``, and the values of their padding."""

_LABELS = ("labels", "shift_labels")
"""Arguments that belong to logits. If a call computes logits of some positions only, they belong to these."""

_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "cache_position")
"""Arguments of one dim that count the tokens of the sequence."""

_OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
"""Arguments that are a second sequence, whose length is independent."""

FLAT_OUTPUTS = ("output_router_logits",)
"""Arguments that request outputs in which the tokens of all sequences are one dim, ``[B * S, ...]``."""

_KEPT = "logits_to_keep"
"""Argument: how many positions at the end of the sequence to compute logits for, 0 for all, or which."""

_PADDING_OF: WeakKeyDictionary[nn.Module, _Padding] = WeakKeyDictionary()
"""The hooks of models whose activations are sharded over the sequence."""


def attach_sequence(
    model: nn.Module,
    num_ranks: int,
    may_pad: bool = True,
    head: nn.Module | None = None,
    comm: Communicator | None = None,
) -> None:
    """Pad the inputs and trim the outputs of a model whose activations are sharded over the sequence."""
    picked: _Picked | None = None
    if head is not None:
        picked = _Picked()
        if isinstance(head, ColumnParallelLinear | RowParallelLinear):
            head.inputs = (*head.inputs, picked)
        else:
            head.register_forward_pre_hook(picked.before)
    hooks = _Padding(model, num_ranks, may_pad, picked, comm)
    _PADDING_OF[model] = hooks
    model.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
    model.register_forward_hook(hooks.after)
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and module is not model:
            module.register_forward_pre_hook(hooks.require_running, prepend=True)


@contextmanager
def padded(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the padded arguments with which to call the model's code past its hooks, within this context."""
    hooks = _PADDING_OF.get(model)
    if hooks is None:
        yield dict(inputs)
        return
    try:
        yield hooks.before(model, (), dict(inputs))[1]
    finally:
        hooks.after(model, (), ())


class _Picked:
    """A step behind those at the input of the head: the positions for which there are to be logits."""

    def __init__(self) -> None:
        self.positions: Tensor | slice | None = None
        """The positions of the sequence without padding; None: all."""
        self.length = 0
        """The length of the padded sequence."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the hidden states at the positions, ``[B, K, H]`` of ``[B, S, H]``."""
        if self.positions is None:
            return x
        if x.dim() != 3 or x.shape[1] != self.length:
            raise OptionError(
                f"{_KEPT} was passed, and the module that computes the logits got {tuple(x.shape)}, not "
                f"[B, {self.length}, H], from which no positions can be picked; leave it out"
            )
        return x[:, self.positions]

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the step as a forward pre-hook."""
        return (self(args[0]), *args[1:])


class _Padding:
    """Forward hooks of the model."""

    def __init__(
        self,
        model: nn.Module,
        num_ranks: int,
        may_pad: bool,
        picked: _Picked | None,
        comm: Communicator | None,
    ) -> None:
        self._names = list(forward_signature(model).parameters)
        self._num_ranks = num_ranks
        self._comm = comm
        self._may_pad = may_pad
        self._picked = picked
        self._length: int | None = None
        self._is_running = False

    def require_running(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Refuse a call from outside of a part of the model, whose outputs would be parts of sequences."""
        if not self._is_running:
            raise RefusedCallError(
                f"the {type(module).__name__} in a sequence-parallel model was called by itself; its outputs "
                "are parts of the sequence: call the model, or load it without sequence_parallel=True"
            )

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pad the inputs; the model receives all arguments by name."""
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments.get("inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise OptionError(
                "a sequence-parallel model needs input_ids or inputs_embeds, [B, S, ...]; pass one of them"
            )
        if (name := given_cache(arguments)) is not None:
            raise OptionError(f"a sequence-parallel model takes full sequences; leave {name} out")
        arguments = without_cache(module, self._names, arguments)
        length = tokens.shape[1]
        missing = -length % self._num_ranks
        self._length = length if missing else None
        if missing and not self._may_pad:
            raise RefusedCallError(
                f"a sequence of {length} tokens cannot be sharded over {self._num_ranks} ranks, and the "
                "plan does not allow padding the inputs of this model (its results would change, or this was "
                f"not tried); pass a length that {self._num_ranks} divides"
            )
        self._require_second_sequence(arguments)
        if missing:
            # Refuse outputs whose tokens are not their own dim, since they cannot be trimmed.
            for name in FLAT_OUTPUTS:
                if is_asked_for(module, name, arguments.get(name)):
                    raise RefusedCallError(
                        f"{name} was requested, and {length} tokens cannot be sharded over {self._num_ranks} "
                        "ranks without padding, which cannot be trimmed from it; pass a length that "
                        f"{self._num_ranks} divides"
                    )
        self._pick(arguments, length, length + missing)
        if missing:
            self._pad(arguments, tokens, length, missing)
        self._is_running = True
        if self._comm is not None:
            self._comm.sequence = length, length + missing
        return (), arguments

    def _require_second_sequence(self, given: Mapping[str, Any]) -> None:
        """Refuse a decoder's sequence that cannot be sharded; it may be made of the labels."""
        if not any(name in self._names for name in _OF_DECODER):
            return
        for name in (*_OF_DECODER, "labels"):
            value = given.get(name)
            if isinstance(value, Tensor) and value.shape[1] % self._num_ranks:
                raise RefusedCallError(
                    f"{name} {tuple(value.shape)}: a decoder's sequence is not padded; pass a length that "
                    f"{self._num_ranks} divides"
                )

    def _pick(self, given: dict[str, Any], length: int, padded: int) -> None:
        """Leave the choice of positions to the head."""
        positions = given.get(_KEPT)
        if self._picked is not None:
            self._picked.positions, self._picked.length = None, padded
        if positions is None or (isinstance(positions, int) and not positions):
            return
        if self._picked is None:
            raise OptionError(
                f"{_KEPT} was passed to a sequence-parallel model, and the plan does not say which module "
                "computes the logits; leave it out"
            )
        if isinstance(positions, Tensor):
            if len(positions) == padded != length:
                raise OptionError(
                    f"{_KEPT} has {len(positions)} positions, as many as the padded sequence; pass fewer"
                )
            self._picked.positions = torch.where(positions < 0, positions + length, positions)
        else:
            self._picked.positions = slice(*slice(-positions, None).indices(length))
        given[_KEPT] = 0

    def _pad(self, given: dict[str, Any], tokens: Tensor, length: int, missing: int) -> None:
        is_picked = self._picked is not None and self._picked.positions is not None
        positions = given.get("position_ids")
        if given.get("attention_mask") is None and positions is None and "attention_mask" in self._names:
            given["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        for name, value in given.items():
            if not isinstance(value, Tensor) or name == _KEPT or (is_picked and name in _LABELS):
                continue
            if name == "inputs_embeds":
                given[name] = F.pad(value, (0, 0, 0, missing))
            elif name == "position_ids":
                more = torch.arange(missing, device=value.device).expand(*value.shape[:-1], missing)
                given[name] = torch.cat((value, more.to(value.dtype)), -1)
            elif name in _PADDING and value.dim() == 2 and value.shape[1] == length:
                ignored = given.get("ignore_index", IGNORED)
                filling = ignored if name in _LABELS else _PADDING[name]
                given[name] = F.pad(value, (0, missing), value=filling)
            elif length in value.shape[1:] or name in _OFFSETS:
                raise RefusedCallError(
                    f"{name} {tuple(value.shape)} cannot be padded from {length} to {length + missing} "
                    f"tokens; pass a length that {self._num_ranks} divides"
                )

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Trim the outputs to the length of the inputs."""
        self._is_running = False
        length = self._length
        if length is None:
            return output
        padded = length + -length % self._num_ranks
        items = output.items() if isinstance(output, Mapping) else enumerate(output)
        for key, value in list(items):
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == padded:
                output = replace_at(output, (str(key),), lambda x: x[:, :length], f"output.{key}")
        return output
