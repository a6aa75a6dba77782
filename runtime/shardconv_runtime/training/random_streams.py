"""Random numbers in training: the same on all ranks for whole tensors, others on each rank for shards.

The ranks of a model are seeded alike and draw from one common stream. Where the plan says so, a rank leaves
it at a module's boundary for a stream of its own: its seed is made of one number of the common CPU stream
and of the rank's place in the mesh, and the common stream goes on where it was left. So all ranks stay in
step whatever they draw in between, and activations that are recomputed from the common stream's state
(``torch.utils.checkpoint``) get the same masks.

Nothing is done to modules whose probabilities (attributes that are named for it, on the modules inside of
them and on their configs) are all 0. That they indeed draw nothing is checked, but in compiled code. Where
something is drawn, a compiled graph ends at these modules.
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
from ..errors import PlanError
from ..format.names import expand_all
from ..format.plan import DrawPlan
from ..format.slices import coordinates
from ..parallel.boundary import renumber

_NAMED = ("drop", "jitter", "noise")
"""Parts of the names of attributes that are probabilities or sizes of something random."""

_MAX_SEED = 1 << 62


def attach_random_streams(model: nn.Module, plans: Iterable[DrawPlan], comm: Communicator) -> None:
    """Change the stream of random numbers at the modules of a plan, in training mode.

    Args:
        model: one rank's part.
        plans: of this form of the model.
        comm: this rank.

    Raises:
        PlanError: the model lacks a module.
    """
    plans = [p for p in plans if p.mixed or comm.real(p.axes) or not p.axes]
    if not any(p.mixed or p.axes or p.afterwards for p in plans):
        return
    streams = _Streams(comm)
    for plan in plans:
        for name in expand_all(plan.names):
            try:
                module = model.get_submodule(name)
            except AttributeError as error:
                raise PlanError(f"{name}: the plan has this module, the model has not") from error
            hooks = _Boundary(streams, name, plan, _probabilities(module))
            renumber(module, module.register_forward_pre_hook(hooks.before, prepend=True))
            renumber(module, module.register_forward_hook(hooks.after, always_call=True))
    model.register_forward_pre_hook(streams.begin, prepend=True)


_Function = TypeVar("_Function", bound=Callable[..., Any])

GeneratorStates = tuple[Tensor, ...]
"""Of the generators: the CPU's, and the device's."""


def _not_compiled(function: _Function) -> _Function:
    """Graphs end before ``function``."""
    disable: Any = torch.compiler.disable
    return cast("_Function", disable(function, reason="random numbers that differ between ranks"))


class _Running(threading.local):
    """The streams of the model that runs in this thread, while some module of it is entered."""

    streams: _Streams | None = None


_running = _Running()


def resumable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, to be called once and then to recompute: it draws from the stream that it drew from.

    Where the modules around a recomputed part do not run again, their streams have to be taken up.
    """
    streams = _running.streams
    return forward if streams is None else _resumable(forward, streams)


@_not_compiled
def _resumable(forward: Callable[..., Any], streams: _Streams) -> Callable[..., Any]:
    found = streams.position()
    calls = 0

    @_not_compiled
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return forward(*args, **kwargs)
        before = streams.position()
        streams.resume(found)
        try:
            return forward(*args, **kwargs)
        finally:
            streams.resume(before)

    return run


@dataclass
class _Frame:
    """A module that runs."""

    name: str
    outer: tuple[int, ...]
    """Axes of the stream around it."""
    is_mixed: bool = False
    known: GeneratorStates = ()
    """Mixed: the generators when the module inside of it that ran last had returned."""


class _Streams:
    """Which stream a rank of a model draws from."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._axes: tuple[int, ...] = ()
        self._common: GeneratorStates = ()
        self.frames: list[_Frame] = []

    def position(self) -> tuple[tuple[int, ...], GeneratorStates, list[_Frame]]:
        """Where in a pass this rank is."""
        return self._axes, self._common, [replace(frame) for frame in self.frames]

    def resume(self, position: tuple[tuple[int, ...], GeneratorStates, list[_Frame]]) -> None:
        """Be there again; the generators are the caller's matter."""
        self._axes, self._common, frames = position
        self.frames = [replace(frame) for frame in frames]
        self._tell()

    def _tell(self) -> None:
        _running.streams = self if self.frames else None

    def begin(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the model: an interrupted pass has left its frames behind."""
        if self.frames:
            self._drop()

    @_not_compiled
    def enter(self, name: str, plan: DrawPlan) -> None:
        """A module begins.

        Raises:
            PlanError: the code around it has drawn what cannot be told apart.
        """
        self._require_untouched()
        self.frames.append(_Frame(name, self._axes, plan.mixed))
        self._tell()
        self._change(plan.axes)
        self._note()

    @_not_compiled
    def leave(self, name: str, plan: DrawPlan) -> None:
        """A module has returned, or failed.

        Raises:
            PlanError: it has drawn what cannot be told apart.
        """
        if all(frame.name != name for frame in self.frames):
            return
        while (frame := self.frames[-1]).name != name:
            self.frames.pop()
        try:
            self._require_untouched()
        finally:
            self.frames.pop()
            is_followed = plan.afterwards is not None and bool(self.frames)
            if is_followed and _is_in(name, self.frames[-1].name):
                self._change(plan.afterwards or ())
            else:
                self._change(frame.outer)
            self._tell()
        self._note()

    def _drop(self) -> None:
        self.frames.clear()
        self._tell()
        self._change(())

    def _change(self, axes: tuple[int, ...]) -> None:
        axes = self._comm.real(axes)
        if axes == self._axes:
            return
        if self._axes:
            _set_states(self._common)
            self._common = ()
        self._axes = axes
        if axes:
            number = int(torch.randint(_MAX_SEED, ()))
            self._common = states()
            place = coordinates(self._comm.mesh, self._comm.rank)
            _seed(_mixed(number, axes, [place[a] for a in axes]))

    def _note(self) -> None:
        if self.frames and self.frames[-1].is_mixed:
            self.frames[-1].known = states()

    def _require_untouched(self) -> None:
        """No module draws whose draws cannot be told apart."""
        if self.frames and self.frames[-1].is_mixed and not _same(self.frames[-1].known, states()):
            raise PlanError(
                f"{self.frames[-1].name or 'the model'}: its code draws random numbers on whole and on split "
                "activations with no module in between, so that they cannot be told apart; set its dropout "
                "probabilities to 0, or train it with tp=1"
            )


class _Boundary:
    """Forward hooks of one module."""

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
        """Another stream begins.

        Raises:
            PlanError: the module is recomputed without those around it, whose stream is not known then.
        """
        if not module.training:
            return
        if self._streams.frames or self._draws():
            if self._is_inside and not self._streams.frames:
                raise PlanError(
                    f"{self._name} runs without the modules around it, and would draw other random numbers "
                    "than with them; to recompute activations use checkpoint_activations, or "
                    "torch.utils.checkpoint around whole layers"
                )
            self._is_inside = bool(self._streams.frames)
            _require_all_layers(self._name, module)
            self._streams.enter(self._name, self._plan)
        elif not torch.compiler.is_compiling():
            self._resting = states()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """The stream ends.

        Raises:
            PlanError: the module drew, and nothing on it had said so.
        """
        if self._streams.frames:
            self._streams.leave(self._name, self._plan)
        elif self._resting and not torch.compiler.is_compiling():
            before, self._resting = self._resting, ()
            if not _same(before, states()):
                raise PlanError(
                    f"{self._name or 'the model'} drew random numbers, although it has no dropout "
                    "probability above 0 (no attribute named like that, here or in its config), so that "
                    "ranks may have drawn the same for different activations; please report it"
                )

    def _draws(self) -> bool:
        return any(getattr(owner, name, 0) not in (0, None, False) for owner, name in self._probabilities)


def _probabilities(module: nn.Module) -> list[tuple[Any, str]]:
    """Owners and names of attributes that say whether something is drawn in a module."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            found[id(part), "p"] = part, "p"
        for owner in (part, getattr(part, "config", None)):
            for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if is_number and any(word in name.lower() for word in _NAMED):
                    found[id(owner), name] = owner, name
    return list(found.values())


def _require_all_layers(name: str, module: nn.Module) -> None:
    """Ranks that skipped other layers would wait for each other."""
    for attribute, value in vars(module).items():
        if "layerdrop" in attribute.lower().replace("_", "") and value not in (0, None, False):
            raise PlanError(
                f"{name or 'the model'}: it skips layers at random ({attribute}={value}), and ranks draw "
                "other numbers here, so that they would skip different ones; set it to 0"
            )


def _is_in(name: str, other: str) -> bool:
    return not other or name.startswith(other + ".")


def states() -> GeneratorStates:
    """Of the generators that modules draw from: the CPU's, and the current CUDA device's if one is used."""
    if _uses_cuda():
        return torch.get_rng_state(), torch.cuda.get_rng_state()
    return (torch.get_rng_state(),)


def _set_states(found: GeneratorStates) -> None:
    torch.set_rng_state(found[0])
    if len(found) > 1:
        torch.cuda.set_rng_state(found[1])


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if _uses_cuda():
        torch.cuda.manual_seed(seed)


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call, unused-ignore]


def _same(a: GeneratorStates, b: GeneratorStates) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _mixed(number: int, axes: tuple[int, ...], place: list[int]) -> int:
    digest = hashlib.sha256(repr((number, axes, place)).encode()).digest()
    return int.from_bytes(digest[:8], "little") % _MAX_SEED
