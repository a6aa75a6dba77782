"""Run a model on numbers, and compare its outputs and gradients with another run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

import torch
from shardconv_runtime.comm.host_numbers import host_seed
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..inputs.trace_inputs import TraceInputs
from ..tracing.trace import results
from .available_memory import require_memory

# Model code casts to float32 in places (norms, softmax, rotary tables), and to the dtype that its config
# names. There, a sum over ranks and a sum on one device differ by float32 rounding, which would hide small
# mistakes. Under ``Float64`` such casts keep float64, so that a sharded model must agree with the unsharded
# one to float64 rounding.


class Float64(TorchFunctionMode):
    """While active, functions that ask for a smaller floating point dtype get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm") and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **(kwargs or {}))
        args = tuple(torch.float64 if _is_smaller(a) else a for a in args)
        kwargs = {k: torch.float64 if _is_smaller(v) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _is_smaller(value: Any) -> bool:
    """Return whether an argument is a floating point dtype of models that is smaller than float64."""
    return isinstance(value, torch.dtype) and value in (torch.float32, torch.float16, torch.bfloat16)


class WithoutNoise(TorchFunctionMode):
    """While active, dropout drops nothing, and random numbers are replaced by their medians."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if len(args) <= 4 else {}
        result = func(*args, **kwargs)
        if name in _MEDIANS and isinstance(result, torch.Tensor):
            result.fill_(_MEDIANS[name](*args[1:], **kwargs) if name.endswith("_") else _MEDIANS[name]())
        return result


_MEDIANS: Mapping[str, Callable[..., float]] = {
    "rand": lambda: 0.5,
    "rand_like": lambda: 0.5,
    "randn": lambda: 0.0,
    "randn_like": lambda: 0.0,
    "uniform_": lambda start=0.0, end=1.0, **given: (given.get("from", start) + given.get("to", end)) / 2,
    "normal_": lambda mean=0.0, *_, **__: mean,
    "exponential_": lambda lambd=1.0, **_: math.log(2) / lambd,
}
"""Functions that draw numbers -> the median, from the arguments of methods that fill a tensor."""


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, **_: Any) -> torch.Tensor:
    """Multiply rows ``x [S, I]``, sorted by group, with the ``weight [E, I, O]`` of their group.

    torch 2.13 has no float64 kernel for this. Its kernels leave rows past the last group unwritten; here,
    they are NaN. The weights of groups without rows are not read.
    """
    ends = offs.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    # The backward of an index fills a gradient of the whole stack for each group; unbind avoids that.
    matrices = weight.unbind() if weight.requires_grad else weight
    rows = torch.split(x, [*sizes, x.shape[0] - sum(sizes)])
    parts = [rows[i] @ matrices[i] for i, size in enumerate(sizes) if size]
    rest = x.new_full((x.shape[0] - sum(sizes), weight.shape[-1]), math.nan)
    return torch.cat([*parts, rest])


class ReusedModel:
    """A model that begins each run as it was built, even if runs change attributes, hooks and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # The attributes of each module, and copies of the dicts among them, such as the dicts of its hooks.
        self._made = [
            (module, dict(vars(module)), [(v, dict(v)) for v in vars(module).values() if isinstance(v, dict)])
            for module in model.modules()
        ]

    def fresh(self) -> nn.Module:
        """Return the model as it was built, without gradients."""
        copies: dict[int, Tensor] = {}
        for module, attributes, contents in self._made:
            vars(module).clear()
            vars(module).update(attributes)
            for changed, made in contents:  # in place: handles of hooks refer to these
                changed.clear()
                changed.update(made)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
        self._model.zero_grad(set_to_none=True)
        return self._model


TOLERANCE = 1e-9
"""Largest difference of the outputs, relative to the largest output, in float64."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype in which models are compared, and the allowed rounding error."""

    dtype: torch.dtype
    tolerance: float
    """The largest difference that is allowed, relative to the largest output."""
    least_gradient: float
    """Fraction of the largest gradient; differences of smaller gradients are relative to it."""

    def computing(self) -> AbstractContextManager[object]:
        """Return a context that leaves out casts to float32 if the dtype is float64."""
        return Float64() if self.dtype == torch.float64 else nullcontext()


PRECISIONS = (Precision(torch.float64, TOLERANCE, 1e-4), Precision(torch.float32, 1e-4, 1e-2))
"""float32 is for the few models whose code insists on it."""


@contextmanager
def _evaluating(precision: Precision) -> Iterator[None]:
    """Run code without gradients; a model that draws random numbers draws the same on every rank."""
    with torch.inference_mode(), precision.computing(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def raw_output_of(model: nn.Module, inputs: TraceInputs, precision: Precision) -> Any:
    """Return the output of a model in evaluation, unchanged; see ``outputs_of``."""
    inputs = inputs.to(precision.dtype)
    with _evaluating(precision):
        return model(**inputs.tensors, **inputs.options)


def outputs_of(model: nn.Module, inputs: TraceInputs, precision: Precision) -> list[Tensor]:
    """Return all tensors that a model returns in evaluation."""
    return outputs_of_calls(model, inputs, precision, 1)[0]


def outputs_of_calls(
    model: nn.Module, inputs: TraceInputs, precision: Precision, calls: int, *, or_fewer: bool = False
) -> list[list[Tensor]]:
    """Return the tensors of several calls: each later one gets one more token and the cache of the first.

    With ``or_fewer``, a later call that fails is the end, and no error.
    """
    inputs = inputs.to(precision.dtype)
    with _evaluating(precision):
        result = model(**inputs.tensors, **inputs.options)
        outputs = [results(model, result)]
        while len(outputs) < calls:
            try:
                result = model(**continuation(model, inputs, result))
            except Exception as error:  # model code may raise anything in a call that it does not expect
                require_memory(error)
                if or_fewer:
                    break
                raise
            outputs.append(results(model, result))
    return outputs


def continuation(model: nn.Module, inputs: TraceInputs, result: Any) -> dict[str, Any]:
    """Return the arguments of a second call: one more token, and the cache of the first call.

    The token comes from another row. If code picks keys by their values (``topk``), a token that the row
    already contains would tie with itself, and rounding would decide.
    """
    parameters = inspect.signature(model.forward).parameters
    back = (
        {n: v for n, v in dict(result).items() if n in parameters and v is not None}
        if hasattr(result, "keys")
        else {}
    )
    is_decoder = any(name.startswith("decoder_input") for name in inputs.tensors)
    kinds = ("decoder_input_ids", "decoder_inputs_embeds") if is_decoder else ("input_ids", "inputs_embeds")
    tokens = next((name for name in kinds if name in inputs.tensors), None)
    if not back or tokens is None:
        raise ValueError("nothing is handed back")
    tensors: dict[str, Any] = dict(inputs.tensors) if is_decoder else {}
    tensors[tokens] = inputs.tensors[tokens].roll(1, 0)[:, :1]
    mask = inputs.tensors.get("attention_mask")
    if mask is not None and not is_decoder:
        tensors["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return {**tensors, **inputs.options, **back}


def usable_gradients(
    new_model: Callable[[], nn.Module], inputs: TraceInputs, precision: Precision
) -> tuple[TraceInputs, dict[str, Tensor], str]:
    """Return the gradients of the unsharded model, and why they cannot be used (empty if they can)."""
    try:
        gradients = gradients_of(new_model(), inputs, precision)
        infinite = [name for name, g in gradients.items() if not g.isfinite().all()]
    except Exception as error:
        require_memory(error)
        if inputs.options.get("use_cache"):  # writing to a cache may have no backward
            without = replace(inputs, options={**inputs.options, "use_cache": False})
            return usable_gradients(new_model, without, precision)
        return inputs, {}, f"the unsharded model has no backward pass: {shorten(str(error), 200)}"
    if not gradients:
        return inputs, {}, "no output of the unsharded model has a gradient"
    if infinite:
        return inputs, {}, f"the gradient of {infinite[0]} is not finite in the unsharded model"
    return inputs, gradients, ""


def gradients_of(
    model: nn.Module, inputs: TraceInputs, precision: Precision, call: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    """Run forward in training mode, without noise, and backward from a random gradient of every output."""
    inputs = inputs.to(precision.dtype)
    model.train()
    with torch.enable_grad(), precision.computing(), torch.random.fork_rng(devices=[]), host_seed(0):
        torch.manual_seed(0)
        with WithoutNoise():
            outputs = results(model, (call or model)(**inputs.tensors, **inputs.options))
        torch.manual_seed(1)
        terms = [
            (torch.where(t.isfinite(), t, 0.0) * torch.randn(t.shape, dtype=t.dtype)).sum()
            for t in outputs
            if t.requires_grad and t.dtype == precision.dtype
        ]
        if terms:
            with WithoutNoise():  # checkpointed code runs again in the backward pass
                torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def largest_difference(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to each tensor's largest value.

    It is infinite if their shapes differ.
    """
    if [t.shape for t in got] != [t.shape for t in want]:
        return math.inf
    return max((_relative(x.double(), y.double()) for x, y in zip(got, want, strict=True)), default=0.0)


def _relative(x: Tensor, y: Tensor) -> float:
    """Return the largest difference over the largest value; the same infinity or NaN counts as equal."""
    finite = y.isfinite()
    if y.numel() == 0:
        return 0.0
    if not finite.any():
        return math.inf  # nothing to compare: nothing is proven
    same = (x == y) | (x.isnan() & y.isnan())
    error = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=math.inf)
    return float(error.max() / y[finite].abs().max().clamp_min(1e-30))
