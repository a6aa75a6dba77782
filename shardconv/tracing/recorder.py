"""Record ATen operators on meta tensors.

In inference mode, a ``TorchDispatchMode`` sees composite operators (``linear``,
``scaled_dot_product_attention``, ``reshape`` …) before they are decomposed. A composite operator without a
rule is recorded as its parts. ``Values`` answers questions about values.

The recording can be rewound to an earlier point if a module cannot be traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .identities import (
    FIRST_ASKED,
    META,
    META_RESULTS,
    Identities,
    IdentitiesPoint,
    OperatorFacts,
    TensorKey,
    mutated_arguments,
    result_on_meta,
    tensor_key,
    tensors_in,
)
from .tape import Mark, Op, Ref, Tape, TensorInfo, starred
from .values import Values

T = TypeVar("T")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every ATen operator on a tape."""

    def __init__(
        self,
        keep: Collection[str],
        answers: Mapping[tuple[str, int], Sequence[Any]] | None = None,
        few_chosen: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keep = keep
        self.answers = answers or {}
        self.tape = Tape()
        self.stack: list[int] = []
        """Indices of the module calls that are running, outermost first."""
        self.values = Values(self.tape, few_chosen)
        self.identities = Identities(self.tape, self.values, self.stack)
        self.is_paused = False
        """Whether a module is running on numbers, so that calls are not recorded."""
        self.call_counts: dict[str, int] = {}
        """FQN -> number of calls."""
        self._facts: dict[Any, OperatorFacts] = {}

    # Tensors ---------------------------------------------------------------------------------

    def register_model(self, model: nn.Module) -> None:
        """Make parameters and buffers tensors of the tape. Tied ones keep their first name."""
        for name, parameter in model.named_parameters():
            self.values.add_unknown(self.identities.new(parameter, "parameter", name), is_weight=True)
        persistent = set(model.state_dict(keep_vars=True))
        for name, buffer in model.named_buffers():
            kind = "buffer" if name in persistent else "constant"
            self.identities.add_constant(buffer, kind, name, is_weight=True)

    def register_input(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a meta proxy for an input. Its real value answers questions about data."""
        twin = torch.empty_like(value, device=META)
        tid = self.identities.new(twin, "input", name)
        self.values.known[tid] = value
        self.tape.inputs += (tid,)
        return twin

    # Operators -------------------------------------------------------------------------------

    def emit(self, op: Op) -> None:
        """Append an operator to the tape."""
        self.tape.events.append(op)
        self.values.made(op)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = OperatorFacts.of(func, self.keep)
        kwargs = kwargs or {}
        if facts.may_take_apart:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._facts[func] = replace(facts, may_take_apart=False)
        if facts.name == "aten._local_scalar_dense.default":
            return self.ask(args[0]).item()
        origin = _calling_module()
        inputs: list[int] = []
        recorded_args = tuple([self._recorded(a, inputs) for a in args])
        recorded_kwargs = {k: self._recorded(v, inputs) for k, v in kwargs.items()}
        op = Op(facts.name, recorded_args, recorded_kwargs, tuple(inputs), (), self.call(), func, origin)
        result, values = self._run(func, facts, args, kwargs, op)
        if facts.is_mutable:
            op.outputs = tuple(self.identities.rewrite(t) for t in mutated_arguments(func, args, kwargs))
        if not op.outputs:
            leaves = result if isinstance(result, (tuple, list)) else (result,)
            op.outputs = tuple(self.identities.new(t) for t in leaves if isinstance(t, torch.Tensor))
        self.emit(op)
        for tid, value in zip(op.outputs, values, strict=False):
            (self.values.guessed if self.values.is_unknown(tid) else self.values.known)[tid] = value
        return result

    def _recorded(self, value: Any, inputs: list[int]) -> Any:
        """Return an argument as it is on the tape, and add its tensors to ``inputs``."""
        if isinstance(value, torch.Tensor):
            tid = self.identities.tid(value)
            inputs.append(tid)
            return Ref(tid)
        if isinstance(value, (tuple, list)):
            items = [self._recorded(v, inputs) for v in value]
            return tuple(items) if type(value) is tuple else items
        return value

    def _run(
        self, func: Any, facts: OperatorFacts, args: Any, kwargs: dict[str, Any], op: Op
    ) -> tuple[Any, list[torch.Tensor]]:
        """Run on meta. If the shape depends on data, run on values, which are returned as well."""
        tensors = tensors_in(args) + tensors_in(kwargs.values())
        if "device" in kwargs or (facts.takes_device and not tensors):
            kwargs = {**kwargs, "device": META}
        if any(t.device != META for t in tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.identities.meta, (args, kwargs))
        if facts.takes_device:
            args = tuple(META if isinstance(a, torch.device) else a for a in args)
        if facts.name == "aten.lift_fresh.default":
            return args[0], []
        result = result_on_meta(facts.name, args)
        if result is not None:
            return result, []
        try:
            return META_RESULTS.run(func, args, kwargs) if facts.makes_new else func(*args, **kwargs), []
        except (NotImplementedError, RuntimeError):
            # The meta function of the operator fails: it runs on values, or on made-up ones.
            asked = op.inputs[FIRST_ASKED.get(op.name, 0) :]
            if all(self.values.value(t) is not None for t in asked):
                result = self.values.results(op, asked)
            else:
                self.note_guess(f"the result of {op.name}, which depends on data")
                result = self._answered(lambda: self.values.results(op, asked))
            on_meta = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device=META), result)
            return on_meta, tensors_in((result,)) if len(asked) == len(op.inputs) else []

    # Values ----------------------------------------------------------------------------------

    def compared(self, left: Any, right: Any) -> None:
        """Note that code asked which of two ints is larger."""
        self.tape.comparisons.append((left, right))

    def ask(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor on the CPU, or a guess. Ranks must hold all of the tensor."""
        tid = self.identities.tid(tensor)
        self.emit(Op("question", (Ref(tid),), {}, (tid,), (), self.call(), None, _calling_module()))
        value = self.values.value(tid)
        if value is not None:
            return value
        what = "the values of a {} tensor" if tensor.dim() else "the value of a {} scalar"
        self.note_guess(what.format(tensor.dtype))
        return self._answered(lambda: self.values.guess(tid))

    def note_guess(self, what: str) -> None:
        """Note a guess for the user."""
        self.tape.guesses.append(f"{starred(self.current_fqn()) or 'the model'}: {what}")

    def _answered(self, guess: Callable[[], T]) -> T:
        """Return a guess, or the answer to the same question in an earlier run."""
        call = self.tape.calls[self.call()] if self.tape.calls else None
        key = (call.fqn, call.index) if call else ("", 0)
        answers, before = self.answers.get(key, ()), self.tape.answers.setdefault(key, [])
        before.append(answers[len(before)] if len(before) < len(answers) else guess())
        answer: T = before[-1]
        return answer

    # Modules ---------------------------------------------------------------------------------

    def call(self) -> int:
        """Return the module call that is running."""
        return self.stack[-1] if self.stack else 0

    def current_fqn(self) -> str:
        """Return the FQN of the module that is running."""
        return self.tape.calls[self.stack[-1]].fqn if self.stack else ""

    def mark(self, call: int, ports: list[tuple[str, torch.Tensor]]) -> None:
        """Record identities for the tensors at these ports. Ports with the same tensor share one."""
        ports_of: dict[TensorKey, list[str]] = {}
        tensors: dict[TensorKey, torch.Tensor] = {}
        for name, tensor in ports:
            ports_of.setdefault(tensor_key(tensor), []).append(name)
            tensors[tensor_key(tensor)] = tensor
        for key, tensor in tensors.items():
            source = self.identities.tid(tensor)
            info = self.tape.tensors[source]
            if info.kind == "parameter":
                continue
            target = len(self.tape.tensors)
            self.tape.tensors.append(TensorInfo(info.shape, info.dtype, "value"))
            self.identities.become(tensor, target)
            if source in self.values.known:
                self.values.known[target] = self.values.known[source]
            else:
                alias = torch.ops.aten.alias.default
                self.values.made(Op("mark", (Ref(source),), {}, (source,), (target,), call, alias))
            self.tape.events.append(Mark(call, tuple(ports_of[key]), source, target))

    # Taking back -----------------------------------------------------------------------------

    def point(self) -> Point:
        """Return the current state of the recording."""
        t = self.tape
        recorded = (t.tensors, t.events, t.calls, t.replays, t.guesses, t.opaque)
        lengths = tuple(len(x) for x in recorded)
        return Point(lengths, self.identities.point(), len(self.stack))

    def rewind(self, point: Point) -> None:
        """Forget everything that was recorded since ``point``."""
        tape = self.tape
        num_tensors, num_events, num_calls, num_replays, num_guesses, num_opaque = point.lengths
        self.values.forget(num_tensors, len(tape.tensors))
        for call in tape.calls[num_calls:]:
            self.call_counts[call.fqn] -= 1
            tape.answers.pop((call.fqn, call.index), None)
        for key in list(tape.opaque)[num_opaque:]:
            del tape.opaque[key]
        del tape.tensors[num_tensors:], tape.events[num_events:], tape.calls[num_calls:]
        del tape.replays[num_replays:], tape.guesses[num_guesses:], self.stack[point.depth :]
        self.identities.rewind(point.identities, num_tensors)


@dataclass(frozen=True, slots=True)
class Point:
    """A state of a recorder to which it can be rewound."""

    lengths: tuple[int, ...]
    """Lengths of the lists of the tape."""
    identities: IdentitiesPoint
    depth: int
    """Depth of the stack of module calls."""


_PARTS = ("identities", "operators", "recorder", "trace", "functions", "opaque")
_TRACER = ("torch.", "contextlib", *(f"{__package__}.{part}" for part in _PARTS))


def _calling_module() -> str:
    """Return the name of the Python module outside of torch and of the tracer that is calling an operator."""
    frame = sys._getframe(2)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if not name.startswith(_TRACER) and name != "torch":
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""
