"""Run a model once on meta tensors and record it. Hooks on every module record marks.

The innermost module whose forward fails on meta tensors becomes one operator (``opaque.py``). If it fails on
numbers as well, the module around it is tried, and so on, except the model itself. If it fails on numbers
with the same error, and the error neither names the meta device nor follows a guess, then it is about its
inputs, and no other module is tried.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from shardconv_runtime.parallel.boundary import positional_names, replace_at
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from .functions import Functions, watching, wrap_ints
from .identities import TensorKey, tensor_key
from .opaque import Opaque, pristine_copy
from .recorder import Point, Recorder
from .tape import CacheUpdate, ModuleCall, Op, Ref, Returned, ReturnedItem, Tape, reads_and_writes

_UPDATES = tuple(name for name in vars(Cache) if name.startswith("update"))
"""Methods that write the results of one layer."""


def caches_in(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Cache]]:
    """Yield (argument, attribute, cache) of each cache among arguments, or of each part of a composite
    cache."""
    for name, value in arguments.items():
        if isinstance(value, Cache):
            parts = [(key, part) for key, part in vars(value).items() if isinstance(part, Cache)]
            yield from ((name, key, part) for key, part in parts or [("", value)])


class GivenCaches:
    """The caches that the running module calls got."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._given: dict[int, list[tuple[str, str, Cache]]] = {}

    def enter(self, call: int, arguments: Mapping[str, Any]) -> None:
        """Note that a module is called."""
        self._given[call] = list(caches_in(arguments))
        if self._given[call]:
            self._recorder.tape.given_caches.add(call)

    def note(self, cache: Cache, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a cache is about to be written to."""
        recorder = self._recorder
        if recorder.is_paused:
            return
        givers = {
            call: (name, attribute)
            for call in recorder.stack
            for name, attribute, value in self._given.get(call, ())
            if value is cache
        }
        with torch._C.DisableTorchFunction():
            plain = tuple(self._plain(a) for a in args), {k: self._plain(v) for k, v in kwargs.items()}
        recorder.tape.cache_updates.append(CacheUpdate(recorder.call(), method, *plain, givers))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self._recorder.identities.tid(value))
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


@contextmanager
def watching_caches(given: GivenCaches) -> Iterator[None]:
    """Note every update of a cache of transformers' own classes."""
    before = {name: vars(Cache)[name] for name in _UPDATES}
    for name, method in before.items():
        setattr(Cache, name, _noted(given, name, method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Cache, name, method)


def _noted(given: GivenCaches, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def update(self: Cache, *args: Any, **kwargs: Any) -> Any:
        given.note(self, name, args, kwargs)
        return method(self, *args, **kwargs)

    return update


def trace(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    keep: Collection[str],
    options: Mapping[str, Any] | None = None,
    like: Tape | None = None,
    on_numbers: bool = True,
    few_chosen: bool = False,
) -> Tape:
    """Run ``model(**inputs, **options)`` once and record it.

    Args:
        inputs: real CPU tensors by keyword, of global shapes. Their values answer questions about data.
        like: the tape of the global model, if this is a rank's. Questions get the same answers, and the same
            modules become one operator.
    """
    recorder = Recorder(keep, like.answers if like else None, few_chosen)
    recorder.register_model(model)
    arguments = {name: recorder.register_input(name, value) for name, value in inputs.items()}
    tracer = _Tracer(recorder, model, like, on_numbers and like is None)
    try:
        with (
            torch.inference_mode(),
            _autocast_as_on_cpu(),
            watching(recorder.compared),
            watching_caches(tracer.caches),
            Functions(recorder),
            recorder,
        ):
            outputs = model(**arguments, **(options or {}))
    except SolveError:
        raise
    except Exception as error:
        where = tracer.where(error) or recorder.current_fqn() or type(model).__name__
        raise SolveError(f"{where}: the forward pass cannot be traced on the meta device: {error}") from error
    finally:
        tracer.undo()
    tids = recorder.identities.tid
    recorder.tape.outputs = tuple(map(tids, results(model, outputs)))
    recorder.tape.handed_back = tuple(map(tids, _tensors(_handed_back(model, outputs))))
    return recorder.tape


@contextmanager
def _autocast_as_on_cpu() -> Iterator[None]:
    """Replace the meta device by the CPU in autocast, which models may disable for the device of a tensor.

    torch (2.13) has no autocast for the meta device.
    """
    init = torch.autocast.__init__

    def on_cpu(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = on_cpu  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = init  # type: ignore[method-assign]


# Modules -----------------------------------------------------------------------------------------


class _Tracer:
    """Attach hooks to the modules of one model; ``undo`` removes them.

    The forward pass may store tensors on modules, such as caches of positions. This is undone too.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, like: Tape | None, on_numbers: bool) -> None:
        self.recorder = recorder
        self.like = like
        self.on_numbers = on_numbers
        """Whether modules that fail may become one operator. Opaque modules of ``like`` always do."""
        self.caches = GivenCaches(recorder)
        self.frames: list[_Frame] = []
        """One frame for each module call of the tape."""
        self.hooks: dict[nn.Module, _ModuleHook] = {}
        self.kept: dict[int, Any] = {id(recorder): recorder, id(self): self}
        """Memo of ``copy.deepcopy``, keyed by ``id``: objects that a copy of a module shares."""
        self.failure: tuple[BaseException, str] | None = None
        self.wrong_inputs: BaseException | None = None
        """An error that a module also raises on numbers. No module around it is tried."""
        self.handles: list[Any] = []
        states: dict[int, dict[Any, Any]] = {}
        for module in model.modules():
            states.update((id(attributes), attributes) for attributes in _state(module))
        self.saved = [(attributes, dict(attributes)) for attributes in states.values()]
        for fqn, module in model.named_modules():
            self.kept.update(wrap_ints(module, fqn))
        for fqn, module in model.named_modules():
            hook = _ModuleHook(self, module, fqn)
            self.hooks[module] = hook
            self.kept[id(hook)] = hook
            self.handles.append(module.register_forward_pre_hook(hook.enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(hook.leave, with_kwargs=True))
            if not isinstance(module, torch.jit.ScriptModule):
                module.__dict__["forward"] = hook.guarded(module.forward)

    def undo(self) -> None:
        """Restore the model.

        References between the tracer and its hooks are removed. Solving runs without the garbage collector,
        so cycles would keep all tensors of a trace alive.
        """
        for handle in self.handles:
            handle.remove()
        for attributes, before in self.saved:
            attributes.clear()
            attributes.update(before)
        self.kept.clear()
        self.hooks.clear()
        self.frames.clear()

    def copied(self, module: nn.Module) -> nn.Module:
        """Deep copy a module, without hooks of the tracer."""
        named = module.named_modules(remove_duplicate=False)
        forwards = {path: self.hooks[m].own_forward for path, m in named if m in self.hooks}
        return pristine_copy(module, self.kept, forwards)

    def where(self, error: BaseException) -> str:
        """Return the innermost module that raised this error."""
        return self.failure[1] if self.failure is not None and self.failure[0] is error else ""

    def note_failure(self, error: BaseException, fqn: str) -> None:
        """Note that a module raised an error. Modules around it raise the same error again."""
        if self.failure is None or self.failure[0] is not error:
            self.failure = error, fqn

    def rewind(self, point: Point) -> tuple[int, ...]:
        """Rewind the operators of a module, and return the earlier tensors that they read."""
        tape = self.recorder.tape
        num_tensors, num_events, num_calls, *_ = point.lengths
        gone = tape.events[num_events:]
        read = [t for e in gone for t in reads_and_writes(e)[0] if t < num_tensors]
        tape.inner_sources |= {e.origin for e in gone if isinstance(e, Op) and e.origin}
        for frame in reversed(self.frames[num_calls:]):
            frame.restore()
        del self.frames[num_calls:]
        self.recorder.rewind(point)
        tape.cache_updates[:] = [update for update in tape.cache_updates if update.call < num_calls]
        tape.given_caches = {call for call in tape.given_caches if call < num_calls}
        for call in [call for call in tape.returned if call >= num_calls]:
            del tape.returned[call]
        return tuple(dict.fromkeys(read))


@dataclass(frozen=True, slots=True)
class _Frame:
    """A module call: the caller's tensors, and the module's attributes when it was entered."""

    module: nn.Module
    outer: list[tuple[torch.Tensor, int]]
    attributes: dict[str, Any]
    buffers: dict[str, Any]
    entered: dict[TensorKey, int] = field(default_factory=dict)
    """Input of the call -> its number behind the mark at the input."""

    def restore(self) -> None:
        """Restore the attributes of the module."""
        for now, before in (
            (self.module.__dict__, self.attributes),
            (self.module._buffers, self.buffers),
        ):
            now.clear()
            now.update(before)


def results(model: nn.Module, outputs: Any) -> list[torch.Tensor]:
    """Return the tensors that a model returns to its caller, which must be complete on each rank.

    An output that is named like an argument (a state, a cache) is passed to the same rank in the next call.
    """
    handed_back = _handed_back(model, outputs)
    if isinstance(outputs, Mapping):
        outputs = [value for name, value in outputs.items() if name not in handed_back]
    return _tensors(outputs)


def _handed_back(model: nn.Module, outputs: Any) -> dict[str, Any]:
    """Return the outputs that are named like an argument."""
    if not isinstance(outputs, Mapping):
        return {}
    arguments = inspect.signature(model.forward).parameters
    return {name: value for name, value in outputs.items() if name in arguments}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


class _ModuleHook:
    """The hooks around the forward of one module."""

    def __init__(self, tracer: _Tracer, module: nn.Module, fqn: str) -> None:
        self.tracer = tracer
        self.recorder = tracer.recorder
        self.fqn = fqn
        self.parameters = positional_names(module)
        self.own_forward = module.__dict__.get("forward")
        self.is_entered = False

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the call and mark its inputs, as a forward pre-hook."""
        if not self.recorder.is_paused:
            with torch._C.DisableTorchFunction():  # sizes that the tracer reads are not the model's
                recorder = self.recorder
                index = recorder.call_counts.get(self.fqn, 0)
                recorder.call_counts[self.fqn] = index + 1
                call, parent = len(recorder.tape.calls), recorder.stack[-1] if recorder.stack else -1
                recorder.tape.calls.append(ModuleCall(self.fqn, index, parent))
                recorder.stack.append(call)
                positional = self.parameters
                named = {positional[i] if i < len(positional) else str(i): a for i, a in enumerate(args)}
                self.tracer.caches.enter(call, {**named, **kwargs})
                ports = list(tensor_ports("input", {**named, **kwargs}))
                outer = [(t, recorder.identities.tid(t)) for _, t in ports]
                self.tracer.frames.append(_Frame(module, outer, dict(module.__dict__), dict(module._buffers)))
                recorder.mark(call, ports)
                entered = {tensor_key(t): recorder.identities.tid(t) for _, t in ports}
                self.tracer.frames[call].entered.update(entered)
                self.is_entered = True

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Mark the outputs and restore the identities of the caller's tensors, as a forward hook.

        A tensor that the module returns as it was given gets another object: the caller may also use its own,
        which the steps at the module's boundary do not change.
        """
        if not self.recorder.is_paused:
            with torch._C.DisableTorchFunction():
                recorder, call = self.recorder, self.recorder.stack[-1]
                recorder.tape.returned[call] = self._form(output, args, kwargs)
                ports = list(tensor_ports("output", output))
                frame = self.tracer.frames[call]
                unchanged = {
                    tensor_key(t)
                    for _, t in ports
                    if frame.entered.get(tensor_key(t), -1) == recorder.identities.tid(t)
                }
                recorder.mark(call, ports)
                if isinstance(output, tuple):
                    recorder.tape.result_tuples[call] = type(output), len(output)
                for tensor, tid in {tensor_key(t): (t, tid) for t, tid in frame.outer}.values():
                    paths = [tuple(port.split(".")[1:]) for port, value in ports if value is tensor]
                    is_again = tensor_key(tensor) in unchanged and tensor.device.type == "meta"
                    if recorder.identities.is_stale(tensor) or (paths and not is_again):
                        continue
                    if paths:
                        again = recorder.identities.again(tensor)
                        for path in paths:
                            output = replace_at(output, path, _always(again), "output")
                    recorder.identities.become(tensor, tid)
                recorder.stack.pop()
        return output

    def _form(self, output: Any, args: Any, kwargs: Any) -> Returned:
        named = {**dict(zip(self.parameters, args, strict=False)), **kwargs}

        def item(value: Any) -> ReturnedItem:
            if isinstance(value, torch.Tensor) or value is None:
                return ReturnedItem(value is not None)
            name = next((name for name, argument in named.items() if argument is value), "")
            return ReturnedItem(argument=name, is_other=not name)

        if isinstance(output, torch.Tensor):
            return Returned("tensor", (item(output),))
        if type(output) in (tuple, list):
            return Returned(type(output).__name__, tuple(map(item, output)))
        return Returned("other")

    def guarded(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``forward`` that makes the module one operator if it cannot be traced."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.recorder.is_paused or not self.is_entered:
                return forward(*args, **kwargs)
            self.is_entered = False
            point = self.recorder.point()
            if self._key() in (self.tracer.like.opaque if self.tracer.like else ()):
                return self._opaque(point, args, kwargs)
            try:
                return forward(*args, **kwargs)
            except Exception as error:
                self.tracer.note_failure(error, self.fqn)
                is_hopeless = error is self.tracer.wrong_inputs
                if not self.fqn or not self.tracer.on_numbers or is_hopeless:
                    raise
                # Try the module as one operator. If that fails as well, raise the error of the trace.
                may_be_numbers = bool(self.recorder.tape.guesses) or "meta" in str(error)
                try:
                    output = self._opaque(point, args, kwargs)
                except Exception as other:
                    if not may_be_numbers and (type(other), str(other)) == (type(error), str(error)):
                        self.tracer.wrong_inputs = error
                    raise error from None
                self.recorder.tape.opaque[self._key()] = f"{type(error).__name__}: {error}"
                return output

        return run

    def _key(self) -> tuple[str, int]:
        call = self.recorder.tape.calls[self.recorder.stack[-1]]
        return call.fqn, call.index

    def _opaque(self, point: Point, args: Any, kwargs: Any) -> Any:
        read = self.tracer.rewind(point)
        frame = self.tracer.frames[self.recorder.stack[-1]]
        frame.restore()
        self.recorder.is_paused = True
        try:
            return Opaque(self.recorder, self.tracer.copied, read).record(frame.module, args, kwargs)
        finally:
            self.recorder.is_paused = False


def _always(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: tensor


def _state(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Return the dicts that a forward pass may change.

    These are attributes, dicts among them (such as caches of tables by device), attributes of objects that
    are not modules (such as a cached table of ids), tensors, and hooks, which a first forward may register.
    """
    values = module.__dict__.values()
    shared = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType)
    objects = (
        v for v in values if isinstance(getattr(v, "__dict__", None), dict) and not isinstance(v, shared)
    )
    return (
        module.__dict__,
        *(value for value in values if type(value) in (dict, OrderedDict)),
        *(value.__dict__ for value in objects),
    )


def tensor_ports(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the arguments or the output of a module, with their ports."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensor_ports(f"{prefix}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensor_ports(f"{prefix}.{index}", item)
