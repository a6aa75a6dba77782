"""Runs a model once on meta tensors and records it.

Hooks on every module record marks. A ``TorchFunctionMode`` answers sizes with ``TracedInt``, int attributes
of modules and of their configs are wrapped as well, and every torch call that is given some is recorded
as a ``Replay``: that is how the attributes are found that must shrink with the parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .ints import TracedInt
from .recorder import Recorder
from .tape import ModuleCall, Ref, Replay, Tape


def trace(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    keep: Collection[str],
    options: Mapping[str, Any] | None = None,
) -> Tape:
    """Run ``model(**inputs, **options)`` once and record it.

    Args:
        model: parameters on meta; buffers on meta or real. Its int attributes are wrapped while it
            runs and restored afterwards.
        inputs: real CPU tensors by keyword; their values answer data-dependent questions.
        keep: operators that are recorded whole even if they are composite.
        options: further arguments, not tensors.

    Raises:
        SolveError: the forward pass failed on the meta device.
    """
    recorder = Recorder(keep)
    recorder.register_model(model)
    arguments = {name: recorder.register_input(name, value) for name, value in inputs.items()}
    undo = _wrap(model, recorder)
    try:
        with torch.inference_mode(), _Functions(recorder), recorder:
            outputs = model(**arguments, **(options or {}))
    except SolveError:
        raise
    except Exception as error:
        where = recorder.current_fqn() or type(model).__name__
        raise SolveError(f"{where}: the forward pass cannot be traced on the meta device: {error}") from error
    finally:
        undo()
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    recorder.tape.outputs = tuple(recorder.tid(t) for t in leaves)
    return recorder.tape


class _ModuleHook:
    """The pre- and post-forward hooks of one module."""

    def __init__(self, recorder: Recorder, module: nn.Module, fqn: str) -> None:
        self.recorder = recorder
        self.fqn = fqn
        self.parameters = _parameter_names(module)
        self.outer: list[list[tuple[torch.Tensor, int]]] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        recorder = self.recorder
        index = recorder.call_counts.get(self.fqn, 0)
        recorder.call_counts[self.fqn] = index + 1
        call = len(recorder.tape.calls)
        recorder.tape.calls.append(ModuleCall(self.fqn, index, recorder.stack[-1] if recorder.stack else -1))
        recorder.stack.append(call)
        named = {self.parameters[i] if i < len(self.parameters) else str(i): a for i, a in enumerate(args)}
        slots = list(_tensor_slots("input", {**named, **kwargs}))
        self.outer.append([(t, recorder.tid(t)) for _, t in slots])
        recorder.mark(call, slots)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recorder = self.recorder
        slots = list(_tensor_slots("output", output))
        recorder.mark(recorder.stack[-1], slots)
        returned = {id(t) for _, t in slots}
        for tensor, tid in self.outer.pop():
            if id(tensor) not in returned and id(tensor) not in recorder.stale:
                recorder.ids[id(tensor)] = tid
        recorder.stack.pop()


def _parameter_names(module: nn.Module) -> list[str]:
    out = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            break
        out.append(parameter.name)
    return out


def _tensor_slots(prefix: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensor_slots(f"{prefix}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _tensor_slots(f"{prefix}.{index}", item)


def _wrap(model: nn.Module, recorder: Recorder) -> Callable[[], None]:
    """Hook every submodule and wrap its int attributes; returns what undoes it.

    The forward pass may store tensors on modules (caches of positions, say): that is undone too.
    """
    handles: list[Any] = []
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for fqn, module in model.named_modules():
        for attributes in (module.__dict__, module._buffers, module._parameters):
            saved.append((attributes, dict(attributes)))
        _wrap_ints(module, fqn)
    for fqn, module in model.named_modules():
        hook = _ModuleHook(recorder, module, fqn)
        handles.append(module.register_forward_pre_hook(hook.enter, with_kwargs=True))
        handles.append(module.register_forward_hook(hook.leave, with_kwargs=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for attributes, before in saved:
            attributes.clear()
            attributes.update(before)

    return undo


# Traced ints -------------------------------------------------------------------------------------


class _Functions(TorchFunctionMode):
    """Answers sizes with traced ints and records the calls that are given some."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SIZES:
            return self._size(func(*args, **kwargs), args, kwargs)
        if func in _CONVERSIONS and isinstance(args[0], torch.Tensor):
            return self._converted(func, args, kwargs)
        if not _has_traced(args) and not _has_traced(kwargs.values()):
            return func(*args, **kwargs)
        refs = self._refs(args), {k: self._refs(v) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        leaves = result if isinstance(result, (tuple, list)) else (result,)
        outputs = tuple(self.recorder.tid(t) for t in leaves if isinstance(t, torch.Tensor))
        self.recorder.tape.replays.append(
            Replay(func, refs[0], refs[1], outputs, self.recorder.current_fqn())
        )
        return result

    def _converted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``tolist`` and the like: of the true value, if it does not depend on parameters."""
        recorder = self.recorder
        tid = recorder.tid(args[0])
        real = recorder.value(tid)
        if real is None:
            recorder.tape.guesses.append(f"{recorder.current_fqn()}: the values of a {args[0].dtype} tensor")
            real = recorder.plausible(tid)
        with torch.utils._python_dispatch._disable_current_modes():
            return func(real, *args[1:], **kwargs)

    def _refs(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self.recorder.tid(value))
        if isinstance(value, (tuple, list)):
            items = [self._refs(v) for v in value]
            return tuple(items) if isinstance(value, tuple) else items
        return value

    def _size(self, result: Any, args: Any, kwargs: Any) -> Any:
        tid = self.recorder.tid(args[0])
        if isinstance(result, int):
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return TracedInt(result, ("size", tid, dim % args[0].dim()))
        return torch.Size([TracedInt(n, ("size", tid, d)) for d, n in enumerate(result)])


_SIZES = frozenset({torch.Tensor.shape.__get__, torch.Tensor.size})  # type: ignore[attr-defined]
_CONVERSIONS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})


def _has_traced(values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind is TracedInt:
            return True
        if kind is slice:
            if _has_traced((value.start, value.stop, value.step)):
                return True
        elif isinstance(value, (tuple, list)) and _has_traced(value):
            return True
    return False


def _wrap_ints(module: nn.Module, fqn: str) -> None:
    attributes = module.__dict__
    for key, value in list(attributes.items()):
        if key.startswith("_"):
            continue
        if type(value) is int:
            attributes[key] = TracedInt(value, ("attr", fqn, key, value))
        elif type(value) in (tuple, list) and value and all(type(v) is int for v in value):
            attributes[key] = type(value)(
                TracedInt(v, ("attr", fqn, f"{key}.{i}", v)) for i, v in enumerate(value)
            )
        elif _is_config(value):
            attributes[key] = _traced_config(value, fqn, key)


def _is_config(value: Any) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _traced_config(config: Any, fqn: str, key: str) -> Any:
    """A copy of ``config`` whose int attributes are traced as ``key.<name>`` of module ``fqn``."""
    kind = type(config)

    def read(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)  # type: ignore[call-arg]
        if type(value) is int and not name.startswith("_"):
            return TracedInt(value, ("attr", fqn, f"{key}.{name}", value))
        return value

    traced = copy.copy(config)
    object.__setattr__(traced, "__class__", type(kind.__name__, (kind,), {"__getattribute__": read}))
    return traced
