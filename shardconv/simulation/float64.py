"""A float64 model that computes in float64 throughout.

Model code casts to float32 here and there (norms, softmax, rotary tables), and to the dtype that its config
names. There, a sum over ranks and a
sum on one device differ by float32 rounding, which would hide small mistakes. Under ``Float64`` such casts
keep float64, so that a sharded model must agree with the unsharded one to float64 rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """While active, whatever asks for a smaller floating point dtype gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm") and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **(kwargs or {}))
        args = tuple(torch.float64 if _is_smaller(a) else a for a in args)
        kwargs = {k: torch.float64 if _is_smaller(v) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _is_smaller(value: Any) -> bool:
    """Whether an argument is a dtype of models, but for float64."""
    return isinstance(value, torch.dtype) and value in (torch.float32, torch.float16, torch.bfloat16)


class WithoutNoise(TorchFunctionMode):
    """While active, dropout drops nothing, and random numbers are medians: results depend on none."""

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
"""Functions that draw numbers: their medians, of the arguments of methods that fill a tensor."""


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, **_: Any) -> torch.Tensor:
    """Rows ``x [S, I]``, sorted by group, times ``weight [E, I, O]`` of their group, which torch
    has no float64 kernel for. The kernels leave rows past the last group as they find them: here, NaN.
    The weights of groups without rows are not touched."""
    ends = offs.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    # The backward of an index fills a gradient of the whole stack, for each group; that of unbind does not.
    matrices = weight.unbind() if weight.requires_grad else weight
    rows = torch.split(x, [*sizes, x.shape[0] - sum(sizes)])
    parts = [rows[i] @ matrices[i] for i, size in enumerate(sizes) if size]
    rest = x.new_full((x.shape[0] - sum(sizes), weight.shape[-1]), math.nan)
    return torch.cat([*parts, rest])
