"""Random streams in training: one for replicated tensors on all ranks, one on each rank for sharded ones.

The ranks of a model are seeded alike and draw from one common stream. If the plan says so, a rank switches
at a module's boundary to its own stream, seeded by one number of the common CPU stream and the rank's
coordinates in the mesh; afterwards the common stream continues where it was left. So all ranks stay in step
even if they draw differently in between, and activations that are recomputed from the common stream's state
(``torch.utils.checkpoint``) get the same masks.

Modules whose probabilities (attributes found by their names, on submodules and configs) are all 0 are not
changed; outside of compiled code it is checked that they draw nothing. Compiled graphs end at modules that
draw random numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..comm.collectives import Communicator
from ..errors import PlanError, RefusedCallError, missing
from ..format.names import expand_all
from ..format.plan import DrawPlan
from ..format.slices import coordinates
from ..parallel.boundary import renumber
from ..parallel.build import DROPOUTS

_RANDOM_NAMES = ("drop", "jitter", "noise")
"""Parts of the names of attributes that are probabilities of dropout or scales of noise."""

_MAX_SEED = 1 << 62


def attach_random_streams(model: nn.Module, plans: Iterable[DrawPlan], comm: Communicator) -> None:
    """Switch between random streams at the modules of a plan, in training mode."""
    plans = [p for p in plans if p.mixed or comm.real(p.axes) or not p.axes]
    if not any(p.mixed or p.axes or p.afterwards for p in plans):
        return
    streams = _Streams(comm)
    for plan in plans:
        for name in expand_all(plan.names):
            try:
                module = model.get_submodule(name)
            except AttributeError as error:
                raise PlanError(missing([name], "module", "the plan", "the model")) from error
            hooks = _StreamHooks(streams, name, plan, _probabilities(module))
            renumber(module, module.register_forward_pre_hook(hooks.before, prepend=True))
            renumber(module, module.register_forward_hook(hooks.after, always_call=True))
    model.register_forward_pre_hook(streams.begin, prepend=True)


GeneratorStates = tuple[Tensor, ...]
"""States of the random generators, uint8: the CPU's, and the device's if one is used."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(reason: str) -> Callable[[_Function], _Function]:
    """Return a decorator that ends compiled graphs before a function."""

    def decorated(function: _Function) -> _Function:
        disable: Any = torch.compiler.disable
        return cast("_Function", disable(function, reason=reason))

    return decorated


_apart = not_compiled("random numbers that differ between ranks")


class _Running(threading.local):
    """The streams of the model that runs in this thread; None outside of its modules."""

    streams: _Streams | None = None


_running = _Running()


def resumable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward``, to be called once and again to recompute; recomputing draws from the same stream.

    The modules around a recomputed part do not run again, so their streams have to be resumed.
    """
    streams = _running.streams
    return forward if streams is None else _resumable(forward, streams)


@_apart
def _resumable(forward: Callable[..., Any], streams: _Streams) -> Callable[..., Any]:
    start = streams.position()
    calls = 0

    @_apart
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return forward(*args, **kwargs)
        before = streams.position()
        streams.resume(start)
        try:
            return forward(*args, **kwargs)
        finally:
            streams.resume(before)

    return run


@dataclass
class _Frame:
    """A running module."""

    name: str
    outer: tuple[int, ...]
    """Axes of the stream around it."""
    is_mixed: bool = False
    known: GeneratorStates = ()
    """If mixed: the generators when its last submodule returned."""


class _Streams:
    """The random stream that a rank of a model draws from."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._axes: tuple[int, ...] = ()
        self._common: GeneratorStates = ()
        self.frames: list[_Frame] = []

    def position(self) -> tuple[tuple[int, ...], GeneratorStates, list[_Frame]]:
        """Return the stream and the running modules at this point of a pass."""
        return self._axes, self._common, [replace(frame) for frame in self.frames]

    def resume(self, position: tuple[tuple[int, ...], GeneratorStates, list[_Frame]]) -> None:
        """Return to a position; the caller sets the generators."""
        self._axes, self._common, frames = position
        self.frames = [replace(frame) for frame in frames]
        self._tell()

    def _tell(self) -> None:
        _running.streams = self if self.frames else None

    def begin(self, module: nn.Module, args: Any) -> None:
        """Drop the frames of an interrupted pass; a forward pre-hook of the model."""
        if self.frames:
            self.frames.clear()
            self._tell()
            self._change(())

    @_apart
    def enter(self, name: str, plan: DrawPlan) -> None:
        """Switch to the stream of a module that begins."""
        self._require_untouched()
        self.frames.append(_Frame(name, self._axes, plan.mixed))
        self._tell()
        self._change(plan.axes)
        self._note()

    @_apart
    def leave(self, name: str, plan: DrawPlan) -> None:
        """Switch back after a module has returned or failed."""
        if all(frame.name != name for frame in self.frames):
            return
        while (frame := self.frames[-1]).name != name:
            self.frames.pop()
        try:
            self._require_untouched()
        finally:
            self.frames.pop()
            is_followed = plan.afterwards is not None and bool(self.frames)
            around = self.frames[-1].name if self.frames else ""
            if is_followed and (not around or name.startswith(around + ".")):
                self._change(plan.afterwards or ())
            else:
                self._change(frame.outer)
            self._tell()
        self._note()

    def _change(self, axes: tuple[int, ...]) -> None:
        axes = self._comm.real(axes)
        if axes == self._axes:
            return
        if self._axes:
            common_states = self._common
            torch.set_rng_state(common_states[0])
            if len(common_states) > 1:
                torch.cuda.set_rng_state(common_states[1])
            self._common = ()
        self._axes = axes
        if axes:
            number = int(torch.randint(_MAX_SEED, ()))
            self._common = states()
            position = coordinates(self._comm.mesh, self._comm.rank)
            # Ranks at the same position along the axes draw the same numbers, others different ones.
            digest = hashlib.sha256(repr((number, axes, [position[a] for a in axes])).encode()).digest()
            seed = int.from_bytes(digest[:8], "little") % _MAX_SEED
            torch.default_generator.manual_seed(seed)
            if _uses_cuda():
                torch.cuda.manual_seed(seed)

    def _note(self) -> None:
        if self.frames and self.frames[-1].is_mixed:
            self.frames[-1].known = states()

    def _require_untouched(self) -> None:
        """Refuse random numbers of a mixed module: they may belong to replicated or to sharded tensors."""
        if self.frames and self.frames[-1].is_mixed and not _same(self.frames[-1].known, states()):
            raise RefusedCallError(
                f"{self.frames[-1].name or 'the model'}: its code draws random numbers for replicated and "
                "for sharded activations without a module in between, so they cannot be told apart; set its "
                "dropout probabilities to 0, or train it with tp=1"
            )


class _StreamHooks:
    """Forward hooks of one module that switch the stream."""

    def __init__(
        self, streams: _Streams, name: str, plan: DrawPlan, probabilities: list[tuple[Any, str]]
    ) -> None:
        self._streams = streams
        self._name = name
        self._plan = plan
        self._probabilities = probabilities
        self._resting: GeneratorStates = ()
        self._is_inside = False

    def before(self, module: nn.Module, args: Any) -> None:
        """Switch to the module's stream."""
        if not module.training:
            return
        settings = (getattr(owner, name, 0) for owner, name in self._probabilities)
        if self._streams.frames or any(map(_is_above_0, settings)):
            if self._is_inside and not self._streams.frames:
                raise RefusedCallError(
                    f"{self._name} runs without the modules around it, and would draw different random "
                    "numbers; to recompute activations use checkpoint_activations, or "
                    "torch.utils.checkpoint around full layers"
                )
            self._is_inside = bool(self._streams.frames)
            # Refuse layerdrop: ranks that skip different layers would wait for each other in collectives.
            name = self._name
            for attribute, value in vars(module).items():
                if "layerdrop" in attribute.lower().replace("_", "") and value not in (0, None, False):
                    raise RefusedCallError(
                        f"{name or 'the model'} skips layers at random ({attribute}={value}), and ranks draw "
                        "different numbers here, so they would skip different layers; set it to 0"
                    )
            self._streams.enter(self._name, self._plan)
        elif not torch.compiler.is_compiling():
            self._resting = states()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Switch back."""
        if self._streams.frames:
            self._streams.leave(self._name, self._plan)
        elif self._resting and not torch.compiler.is_compiling():
            before, self._resting = self._resting, ()
            # Code with a table of probabilities may compare a number with a 0 in it (peft 0.21: LoHa, LoKr).
            # All ranks draw that number, and it decides nothing.
            has_tables = any(isinstance(getattr(owner, name, 0), dict) for owner, name in self._probabilities)
            if not has_tables and not _same(before, states()):
                raise RefusedCallError(
                    f"{self._name or 'the model'} drew random numbers without a dropout probability above 0 "
                    "(in an attribute named for it, of the module or its config), so ranks may have drawn "
                    "the same numbers for different activations; please report it"
                )


def _probabilities(module: nn.Module) -> list[tuple[Any, str]]:
    """Return the owners and names of the attributes of a module that are probabilities."""
    places: dict[tuple[int, str], tuple[Any, str]] = {}  # by identity: configs cannot be hashed
    for child in module.modules():
        if isinstance(child, DROPOUTS):
            places[id(child), "p"] = child, "p"
        for owner in (child, getattr(child, "config", None)):
            for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
                is_known = _is_number(value) or (
                    isinstance(value, dict) and bool(value) and all(map(_is_number, value.values()))
                )
                if is_known and any(part in name.lower() for part in _RANDOM_NAMES):
                    places[id(owner), name] = owner, name
    return list(places.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_above_0(value: Any) -> bool:
    """Return whether a probability, or one in a table, is not 0."""
    return any(value.values()) if isinstance(value, dict) else value not in (0, None, False)


def states() -> GeneratorStates:
    """Return the states of the CPU's generator and, if one is used, of the current CUDA device's."""
    if _uses_cuda():
        return torch.get_rng_state(), torch.cuda.get_rng_state()
    return (torch.get_rng_state(),)


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call, unused-ignore]


def _same(a: GeneratorStates, b: GeneratorStates) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
