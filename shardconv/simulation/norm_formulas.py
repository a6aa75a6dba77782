"""Find the formula of a norm module by trying: a norm of the runtime must equal the module.

A norm over a sharded dim is replaced at run time by one that reduces its statistic over the ranks. Its
formula (RMS or layer norm, where it casts, whether it stores its weight minus one) is not read from the code.
Instead, every variant is compared with the module on random weights and inputs, in three dtypes. An L2 norm
divides by the length of its input, so it is an RMS norm with another scale.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.format.plan import NormInfo
from shardconv_runtime.parallel.sharded_norms import ShardedNorm
from torch import nn

from ..dim_analysis.norm_sites import ACTIVATIONS, NormSite
from ..dim_analysis.rule_builder import Arguments
from ..tracing.tape import Op, Tape
from .model_runs import Float64
from .rank_threads import run_ranks

_TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
_WIDE = 1 << 16
"""Elements of a row. For wider rows, fewer rows are compared."""


def fit_norm(module: nn.Module, site: NormSite, tape: Tape) -> NormInfo | None:
    """Return the formula of a norm module, as on one rank, or None if no variant computes the same.

    Args:
        module: the norm; its parameters may be on meta.
        site: its operators on the tape.
        tape: the traced forward pass.
    """
    size = tape.tensors[site.inputs[0]].shape[-1]
    cases = {dtype: _case(module, site, size, dtype) for dtype in _TOLERANCES}
    best: tuple[float, NormInfo] | None = None
    for kinds in (("rms", "layer"), ("l2",)):  # the usual ones first
        for info in _variants(kinds, site, tape, size):
            error = 0.0
            for dtype, case in cases.items():
                error += _error(info, *case) / _TOLERANCES[dtype]
                if not error <= 1:
                    break
            if error <= 1 and (best is None or error < best[0]):
                best = error, info
        if best is not None:
            return best[1]
    return None


def _variants(kinds: Sequence[str], site: NormSite, tape: Tape, size: int) -> Iterator[NormInfo]:
    names = [tape.tensors[t].name.rpartition(".")[2] for t in site.parameters]
    roles: list[tuple[str, str]] = [(names[0] if names else "", "")]
    if len(names) > 1:  # (weight, bias) in every order
        roles = list(itertools.permutations(names, 2))
    # Candidates for eps are the small numbers among the operators' arguments, defaults too.
    ops = [op for index in site.events if isinstance(op := tape.events[index], Op)]
    numbers = (value for op in ops for value in Arguments(op).values.values())
    epsilons = list(dict.fromkeys(v for v in numbers if isinstance(v, float) and 0 <= v < 1e-2)) or [0.0]
    for weight, bias in roles:
        for kind, offset, dtype, early, eps in itertools.product(
            kinds, (0.0, 1.0), ("float32", "input"), (False, True), epsilons
        ):
            info = NormInfo(
                kind=kind, eps=eps, size=size // site.groups, axes=(), weight=weight, bias=bias,
                weight_offset=offset, compute_dtype=dtype, weight_before_cast=early, groups=(site.groups,),
            )  # fmt: skip
            yield from _gated(info, site, tape) if len(site.inputs) > 1 else (info,)


def _gated(info: NormInfo, site: NormSite, tape: Tape) -> Iterator[NormInfo]:
    """Yield the formula with either argument as the gate, before and after the norm."""
    used = {op.base for i in site.events if isinstance(op := tape.events[i], Op)}
    activations = [name for op, name in ACTIVATIONS.items() if op in used] or ["identity"]
    for names, activation, first in itertools.product(
        itertools.permutations(site.arguments), activations, (True, False)
    ):
        yield replace(info, input=names[0], gate=names[1], gate_activation=activation, gate_first=first)


def _case(
    module: nn.Module, site: NormSite, size: int, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, torch.Tensor], torch.Tensor]:
    """Return the module with random weights, its arguments, and its output."""
    generator = torch.Generator().manual_seed(size)
    real = copy.deepcopy(module).to_empty(device="cpu").to(dtype)
    for parameter in real.parameters():
        parameter.data = (torch.rand(parameter.shape, generator=generator) + 0.5).to(dtype)
    arguments = {}
    for name in site.arguments:
        rows = (5, 3) if size <= _WIDE else (2, 1)
        x = torch.randn(*rows, size, generator=generator, dtype=torch.float64)
        arguments[name] = (x * 2 + 0.3).to(dtype)
    with torch.inference_mode(), _precision(dtype):
        return real, arguments, _call(real, arguments)


def _call(module: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Call with named arguments. Unnamed ones have their position as a name."""
    result: torch.Tensor = module(
        *(x for name, x in given.items() if name.isdigit()),
        **{name: x for name, x in given.items() if not name.isdigit()},
    )
    return result


def _precision(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Leave out casts to float32 in float64, on both sides. Their effect shows in the other dtypes."""
    return Float64() if dtype == torch.float64 else nullcontext()


def _error(info: NormInfo, real: nn.Module, given: dict[str, torch.Tensor], want: torch.Tensor) -> float:
    """Return the largest difference from the module's output, relative to its largest value."""

    def compute(comm: Communicator) -> torch.Tensor:
        with torch.inference_mode(), _precision(want.dtype):
            return _call(ShardedNorm(info, real, comm), given)

    (got,) = run_ranks((1,), compute)
    if got.dtype != want.dtype:
        return math.inf
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())
