"""Optimizers whose step needs more than an element's own gradient are refused for parts of tensors.

Most optimizers treat each element by itself, and so are right on a part of a tensor. Others compute norms,
factors or products of full tensors, and would silently compute them from this rank's part. There are too
many to know them by name: in a trial before its first step, the optimizer takes a few steps on small
parameters, and on halves of the same parameters, as ranks hold them. If the results differ, it needs full
tensors.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import RefusedCallError
from ..loaded import loaded
from ..parallel.refused_changes import MARK, require_own_part
from .fsdp import models_of


@cache
def guard_optimizers() -> None:
    """Refuse such optimizers of parameters of ``MODELS``, and those that loaded another rank's state."""
    register_optimizer_step_pre_hook(_check)


OPTIONS = {"percentile_clipping": 100, "max_unorm": 0.0}
"""Options of optimizers of bitsandbytes whose steps depend on norms of tensors, and the values without. They
may have no effect in a trial, since they compare a gradient with a hundred earlier ones."""

TRIED: WeakSet[Optimizer] = WeakSet()
"""Optimizers that treat each element by itself."""

_REMEDY = "use an optimizer that treats each element separately, such as AdamW, Adam, SGD or Adagrad"


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _check_state(optimizer)
    if optimizer in TRIED or not _models(optimizer):
        return
    name, settings = type(optimizer).__name__, getattr(optimizer, "args", None)
    option = next((n for n, without in OPTIONS.items() if getattr(settings, n, without) != without), None)
    name += f" with {option}" if option else ""
    try:
        if option or needs_full_tensors(optimizer):
            raise RefusedCallError(
                f"{name} computes its step from full tensors, and each rank holds parts of them; {_REMEDY}"
            )
    except TrialError as error:
        raise RefusedCallError(
            f"{name} could not be tried on small parameters ({error}), so it may compute its step from full "
            f"tensors, of which each rank holds parts; {_REMEDY}"
        ) from error
    TRIED.add(optimizer)


def _models(optimizer: Optimizer) -> list[nn.Module]:
    return models_of(p for group in optimizer.param_groups for p in group["params"])


# States that a program saves itself, with ``optimizer.state_dict()``. The states of two ranks often have the
# same shapes, so that all could load the state that rank 0 saved. At its first step an optimizer is known to
# be one of a loaded model. From then on its states have a mark, in their groups. A mark that was loaded
# before is compared there.

_MARKING: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose states get a mark."""


def _check_state(optimizer: Optimizer) -> None:
    marks = [group.pop(MARK, None) for group in optimizer.param_groups]
    if optimizer in _MARKING and not any(marks):
        return
    models = _models(optimizer)
    if not models:
        return
    launch = loaded(models[0]).launch
    place = (launch.rank, launch.world_size)
    for mark in filter(None, marks):
        require_own_part("optimizer.load_state_dict", mark, place)
    if optimizer not in _MARKING:
        _MARKING.add(optimizer)
        optimizer.register_state_dict_post_hook(partial(_mark_state, place))


def _mark_state(place: tuple[int, int], optimizer: Optimizer, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group[MARK] = place


SIZE = 136
"""Rows and columns of the matrix: some optimizers leave matrices with fewer than 128 rows as they are."""


STEPS = 30
"""Some optimizers begin to precondition after 25 steps."""


LEAST_RATE = 1e-2
"""The first step of a schedule with a warmup has a rate of 0, which would show nothing."""


ROUNDING = 1e-3
"""Largest difference that counts as rounding, relative to the largest change of a parameter."""


QUANTIZING = 0.1
"""The same for optimizers whose states have 8 bits: their blocks begin elsewhere in a half."""


class TrialError(Exception):
    """The optimizer could not be tried: its step failed, or changed nothing."""


def needs_full_tensors(optimizer: Optimizer) -> bool:
    """Return whether the steps of an optimizer differ on parts of parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state") and _holds_parameters(value, set(parameters)):
            raise TrialError(f"its attribute {name} holds parameters, or another optimizer of them")
    device = parameters[0].device if parameters else torch.device("cpu")
    with _quiet(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            return _differs(optimizer, device, torch.float64)
        except TrialError:  # some work in float32 only
            return _differs(optimizer, device, torch.float32)


def _holds_parameters(value: Any, parameters: Set[Tensor]) -> bool:
    """Return whether an attribute of an optimizer would let the trial change the parameters themselves."""
    if isinstance(value, Tensor):
        return value in parameters
    if isinstance(value, Mapping):
        return any(_holds_parameters(x, parameters) for each in value.items() for x in each)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_parameters(x, parameters) for x in value)
    return isinstance(value, nn.Module) or hasattr(value, "param_groups")


def _differs(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> bool:
    random = torch.Generator().manual_seed(0)
    # Halves of a matrix of equal numbers would have equal norms.
    scales = torch.linspace(0.2, 3.0, SIZE)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        scale = scales if len(shape) == 1 else scales[:, None] * scales
        return (torch.randn(shape, generator=random) * scale).to(device, dtype)

    shapes = [shape for group in optimizer.param_groups for shape in _shapes(group)]
    values, slopes = ([drawn(shape) for shape in shapes] for _ in range(2))
    trials = [_Trial(optimizer, [take(x) for x in values]) for take in _PARTS]
    least = 16 * torch.finfo(dtype).eps
    for step in range(STEPS):
        # Later gradients point where the first one did: some optimizers estimate a step size from that.
        drawn_now = [drawn(shape) for shape in shapes]
        gradients = drawn_now if step < STEPS // 2 else slopes
        for trial, take in zip(trials, _PARTS, strict=True):
            trial.step([take(g) for g in gradients])
        whole, *halves = (trial.parameters for trial in trials)
        moved = [float((x - y).abs().max()) for x, y in zip(whole, values, strict=True)]
        allowed = QUANTIZING if trials[0].has_quantized_state() else ROUNDING
        for dim, (first, second) in ((0, halves[:2]), (-1, halves[2:])):
            for full, change, one, other in zip(whole, moved, first, second, strict=True):
                difference = (torch.cat((one, other), dim) - full).abs()
                if not bool((difference <= allowed * change + least).all()):
                    return True
    if not max(moved, default=0.0):
        raise TrialError("its step changes nothing")
    return False


_PARTS: Sequence[Callable[[Tensor], Tensor]] = (
    lambda x: x,
    lambda x: x.chunk(2)[0],
    lambda x: x.chunk(2)[1],
    lambda x: x.chunk(2, -1)[0],
    lambda x: x.chunk(2, -1)[1],
)
"""Full tensors, halves by rows, halves by columns."""


def _shapes(group: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of the trial's parameters for a group: some groups are for matrices only."""
    has_matrices = {parameter.dim() > 1 for parameter in group["params"]}
    shapes: Mapping[bool, tuple[int, ...]] = {True: (SIZE, SIZE), False: (SIZE,)}
    return [shapes[each] for each in sorted(has_matrices, reverse=True)]


_PUT_IN_PLACE = ("step", "grad_scale", "found_inf")
"""Attributes that schedules (to count steps) and scalers (of fused kernels) give to an optimizer."""


class _Trial:
    """A copy of an optimizer with other parameters."""

    def __init__(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> None:
        self.parameters = [nn.Parameter(x.clone()) for x in tensors]
        self._optimizer = copy.copy(optimizer)
        attributes = vars(self._optimizer)
        attributes.clear()
        for name, value in vars(optimizer).items():
            if name in _PUT_IN_PLACE:
                continue
            attributes[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
            if name.endswith("_hooks"):
                attributes[name] = type(value)()
        left = iter(self.parameters)
        self._optimizer.param_groups = [
            _options(group) | {"params": [next(left) for _ in _shapes(group)]}
            for group in optimizer.param_groups
        ]
        self._optimizer.state = defaultdict(dict)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take a step with gradients of the shapes of the parameters."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        function: Any = type(self._optimizer).step
        function = getattr(function, "__wrapped__", function)  # without torch's hooks around it
        torch.manual_seed(0)
        try:
            try:
                function(self._optimizer)
            except TypeError:
                function(self._optimizer, lambda: torch.ones((), device=gradients[0].device))
        except Exception as error:
            raise TrialError(f"{type(error).__name__}: {error}") from error

    def has_quantized_state(self) -> bool:
        """Return whether a state of a parameter is stored in 8 bits or fewer."""
        of_parameters = [state for state in self._optimizer.state.values() if isinstance(state, dict)]
        states = [value for state in of_parameters for value in state.values()]
        return any(isinstance(x, Tensor) and x.numel() > 1 and x.element_size() == 1 for x in states)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
    rate = options.get("lr")
    if rate is not None:
        options["lr"] = rate.clamp_min(LEAST_RATE) if isinstance(rate, Tensor) else max(rate, LEAST_RATE)
    return options


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield
