"""Prove by numbers that a module of experts is a sum of modules of fewer experts.

The hypothesis: with the rows of its parameters for some of the experts, ids that count from the first of
these, and a weight of zero for ids of other experts, the module computes the term of these experts. A search
finds out how to make it a module of fewer experts: which int attributes are the number of experts, and
whether the module skips ids past its last expert (some do if a bool attribute is set), which saves the work
on tokens of other ranks. Every candidate is compared with the full module in float64, for even and uneven
shards and all implementations of experts in transformers. A large module is made narrower first, since the
hypothesis does not depend on its widths.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.format.plan import AttributeOverride
from shardconv_runtime.parallel.attribute_overrides import apply_overrides, raise_flags
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.parallel.build import owner_of
from torch import Tensor, nn

from ..dim_analysis.composite_modules import ExpertCall, ExpertSharding
from ..tracing.tape import Tape
from .model_runs import Float64

TOLERANCE = 1e-11
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""Implementations of experts in transformers that run on any device. A plan must be right for each."""

_MAX_ATTRIBUTES = 6
_MAX_CHOICES = 3
_NUM_TOKENS = 6
_SMALL = 1 << 18
"""Elements of all experts up to which their widths are kept."""
_TOO_LARGE = 1 << 26
_NARROW = 8
"""The greatest common divisor of the widths after narrowing."""


class NotProven(Exception):
    """No way to shard the module was found. The message has the last failure."""


def prove_experts(module: nn.Module, where: ExpertCall, tape: Tape) -> ExpertSharding:
    """Find a way to make a module of experts one of fewer experts, proven on numbers.

    Args:
        module: the candidate's module; its parameters may be on meta.
        where: its call on the tape.
        tape: the traced forward pass.

    Raises:
        NotProven: if no candidate is the sum over shards of its leading dims.
    """
    if any(b.device.type == "meta" for b in module.buffers()):
        raise NotProven("it has buffers that the checkpoint holds")
    problem = "its parameters have no common leading dim"
    # The number of experts is the leading dim, or an int attribute that divides it.
    rows = {p.shape[0] for p in module.parameters()}
    shared = list(rows) if len(rows) == 1 else []
    owned = sorted({v for m in module.modules() for v in vars(m).values() if type(v) is int}, reverse=True)
    divisors = [n for n in owned if n > 1 and all(r % n == 0 for r in rows)]
    for num_experts in (n for n in dict.fromkeys([*shared, *divisors]) if n > 1):
        try:
            trial = _first_trial(module, where, tape, num_experts)
        except _Failed as failure:
            problem = str(failure)
            continue
        for sharding in _shardings(module, num_experts):
            try:
                trial.check(sharding)
                return sharding
            except _Failed as failure:
                problem = str(failure)
    raise NotProven(problem)


def _first_trial(module: nn.Module, where: ExpertCall, tape: Tape, num_experts: int) -> _Trial:
    """Make a trial of the module if it is small, otherwise of the first narrower module that runs."""
    problem = _Failed("it is too large to be tried, and could not be made narrower")
    width = tape.tensors[where.inputs[0]].shape[-1]
    for narrower, divisor in _narrower(module, num_experts, width):
        try:
            return _Trial(narrower, where, tape, num_experts, width // divisor)
        except _Failed as failure:
            problem = failure
    raise problem


def _narrower(module: nn.Module, num_experts: int, width: int) -> Iterator[tuple[nn.Module, int]]:
    """Yield the module with all widths divided, and the divisor. Int attributes of these widths stay, or
    follow."""
    numel = sum(p.numel() for p in module.parameters())
    inner = [(p.shape[0] // num_experts, *p.shape[1:]) for p in module.parameters()]
    widths = {n for shape in inner for n in shape if n > 1} | {width}
    divisor = math.gcd(*widths) // _NARROW
    if numel > _SMALL and divisor > 1:
        for depth in range(3):
            yield _divided(module, num_experts, divisor, widths, depth), divisor
    if numel <= _TOO_LARGE:
        yield module, 1


def _divided(module: nn.Module, num_experts: int, divisor: int, widths: set[int], depth: int) -> nn.Module:
    """Divide the widths of parameters, of attributes (``depth`` 1), and of attributes of configs (``depth``
    2)."""
    out = copy.deepcopy(module)
    for owner in out.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                rows, *inner = parameter.shape
                sizes = [n // divisor if n in widths else n for n in (rows // num_experts, *inner)]
                small = parameter.new_empty((num_experts * sizes[0], *sizes[1:]))
                owner._parameters[name] = nn.Parameter(small, requires_grad=False)
    for width in sorted(widths) if depth else ():
        for path, attribute in _attributes(module, width):
            if depth == 2 or "." not in attribute:
                apply_overrides(
                    out.get_submodule(path), (AttributeOverride(attribute, width, (width // divisor,)),), 0
                )
    return out


def _shardings(module: nn.Module, num_experts: int) -> Iterator[ExpertSharding]:
    """Yield ways to shard: first those that skip out-of-shard ids, with few overrides."""
    attributes = list(_attributes(module, num_experts))[:_MAX_ATTRIBUTES]
    unset = [k for k, v in vars(module).items() if v is False and k != "training"]
    ways = [(True, ()), *((True, (flag,)) for flag in unset), (False, ())]
    for past_end, flags in ways:
        for count in range(len(attributes) + 1):
            for overrides in itertools.combinations(attributes, count):
                yield ExpertSharding(num_experts, past_end, flags, overrides)


def _attributes(module: nn.Module, value: int) -> Iterator[tuple[str, str]]:
    """Yield int attributes with this value, first of modules, then of their configs."""
    configs: list[tuple[str, str]] = []
    for path, owner in module.named_modules():
        for name, item in vars(owner).items():
            if type(item) is int and item == value and not name.startswith("_"):
                yield path, name
            elif hasattr(item, "to_dict") and hasattr(item, "__dict__"):
                equal = [k for k, v in vars(item).items() if type(v) is int and v == value]
                configs += [(path, f"{name}.{key}") for key in equal]
    yield from configs


class _Failed(Exception):
    """A candidate does not compute the same."""


@dataclass(frozen=True)
class _Call:
    """The inputs of one call, and the result of the full module."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    want: Tensor


class _Trial:
    """The full module on random numbers, with which sums of shards are compared."""

    def __init__(
        self, module: nn.Module, where: ExpertCall, tape: Tape, num_experts: int, width: int
    ) -> None:
        self.module = module
        self.width = width
        self.where = where
        self.num_experts = num_experts
        self.generator = torch.Generator().manual_seed(num_experts)
        self.parameters = {n: self._random(p.shape) for n, p in module.named_parameters()}
        self.calls: dict[str, list[_Call]] = {}
        inputs = [self._inputs(tape, kind) for kind in ("spread", "first")]
        problem: _Failed | None = None
        for name in IMPLEMENTATIONS if _implementation(module) else ("",):
            full = self._shard(name, ExpertSharding(num_experts, False, (), ()), range(num_experts))
            try:
                self.calls[name] = [_Call(*i, self._run(full, *i)) for i in inputs]
            except _Failed as failure:
                problem = failure
                continue
            self._require_no_more_experts(full, *inputs[0])
        current = _implementation(module)
        if not self.calls or (current in IMPLEMENTATIONS and current not in self.calls):
            raise problem or _Failed("it cannot be run by itself")

    def check(self, sharding: ExpertSharding) -> None:
        """Check that shards of the module add up to the full one.

        Raises:
            _Failed: if they do not.
        """
        count = self.num_experts
        half, third = (count + 1) // 2, (count + 2) // 3
        even_and_uneven: list[tuple[int, ...]] = [(0, half, count), (0, 1, count), (0, count - 1, count)]
        if count > 2:
            even_and_uneven.append((0, third, min(2 * third, count - 1), count))
        for bounds in dict.fromkeys(even_and_uneven):
            parts = [range(a, b) for a, b in itertools.pairwise(bounds)]
            for name, calls in self.calls.items():
                modules = [self._shard(name, sharding, part) for part in parts]
                for call in calls:
                    terms = [
                        self._term(m, sharding, part, call) for m, part in zip(modules, parts, strict=True)
                    ]
                    got, want = sum(terms[1:], terms[0]), call.want
                    if got.shape != want.shape:
                        raise _Failed(
                            f"its shards return {list(got.shape)} where the full module returns "
                            f"{list(want.shape)}"
                        )
                    error = float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))
                    if not error <= TOLERANCE:
                        raise _Failed(
                            f"the sum over shards of its experts differs by {error:.1e} of its largest output"
                        )

    def _term(self, module: nn.Module, sharding: ExpertSharding, part: range, call: _Call) -> Tensor:
        out_of_shard = (call.ids < part.start) | (call.ids >= part.stop)
        ids = (call.ids - part.start).masked_fill(out_of_shard, len(part) if sharding.past_end else 0)
        mask = out_of_shard.reshape(call.weights.shape)
        return self._run(module, call.x, ids, call.weights.masked_fill(mask, 0.0))

    def _shard(self, implementation: str, sharding: ExpertSharding, part: range) -> nn.Module:
        """Make a module of the experts in ``part``."""
        local = copy.deepcopy(self.module)
        if implementation:
            local.config._experts_implementation = implementation  # type: ignore[union-attr]
        try:
            for path, attribute in sharding.overrides:
                override = AttributeOverride(attribute, self.num_experts, (len(part),))
                apply_overrides(local.get_submodule(path), (override,), 0)
            raise_flags(local, sharding.flags)
        except ShardconvError as error:
            raise _Failed(str(error)) from error
        for name, full in self.parameters.items():
            rows = full.shape[0] // self.num_experts
            rows_of_rank = full[part.start * rows : part.stop * rows]
            owner, attribute = owner_of(local, name)
            owner._parameters[attribute] = nn.Parameter(rows_of_rank, requires_grad=False)
        return local.eval()

    def _run(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ports = {self.where.x: x, self.where.ids: ids.clone(), self.where.weights: weights.clone()}
        # Arguments are passed by position if possible: implementations of experts name them differently.
        named = {port.partition(".")[2]: value for port, value in ports.items()}
        args = []
        for position, name in enumerate(forward_signature(module).parameters):
            key = next((k for k in (name, str(position)) if k in named), None)
            if key is None:
                break
            args.append(named.pop(key))
        try:
            with torch.inference_mode(), Float64():
                result = module(*args, **named)
        except Exception as error:  # a changed module may raise anything
            raise _Failed(f"{type(error).__name__}: {error}") from error
        if not isinstance(result, Tensor) or not bool(result.isfinite().all()):
            raise _Failed("it returns values that are not finite")
        return result

    def _require_no_more_experts(self, full: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Reject modules that compute something for ids beyond their matrices, since each rank would add it.

        Clamping such ids to the last expert is fine, as transformers 5.17 does: no router returns them.
        """
        for beyond in (self.num_experts, self.num_experts + 1):
            try:
                result = self._run(full, x, torch.full_like(ids, beyond), weights)
            except _Failed:
                continue
            clamped = torch.full_like(ids, self.num_experts - 1)
            if bool(result.any()) and not torch.equal(result, self._run(full, x, clamped, weights)):
                raise _Failed("it computes something for ids beyond its stacked parameters")

    def _random(self, shape: Sequence[int]) -> Tensor:
        numbers = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return numbers / math.sqrt(shape[-1])

    def _inputs(self, tape: Tape, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a few tokens in the shapes of the traced call. With ``first``, they choose only the first
        experts."""
        x, ids, weights = (tape.tensors[t].shape for t in self.where.inputs)
        one_each = math.prod(ids[:-1]) != math.prod(x[:-1])
        choices = 1 if one_each else min(ids[-1], self.num_experts, _MAX_CHOICES)
        scores = torch.rand(_NUM_TOKENS, self.num_experts, generator=self.generator, dtype=torch.float64)
        if kind == "first":
            scores += torch.arange(self.num_experts, 0, -1)
        top, chosen = scores.topk(choices, -1)
        shape = _lead(ids) if one_each else (*_lead(ids[:-1]), choices)
        widened = (*shape, 1) if len(weights) > len(ids) else shape
        values = torch.randn(*_lead(x[:-1]), self.width, generator=self.generator, dtype=torch.float64)
        return values, chosen.reshape(shape), (top % 1 + 0.5).reshape(widened)


def _lead(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape ``[1, ..., tokens]`` instead of one with another batch and length."""
    return (*(1 for _ in shape[1:]), _NUM_TOKENS)


def _implementation(module: nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "_experts_implementation", None) or "")
