"""The rules for the norms of a plan."""

from __future__ import annotations

import math

from .plan import ModulePlan, NormInfo
from .plan_checks import check_axes, check_dtype, fail, is_step, one_of
from .slices import Mesh

GATE_ACTIVATIONS = ("silu", "sigmoid", "gelu", "relu", "identity")
"""Activations of the gate of a gated norm: functions of ``torch.nn.functional``, or none."""


def check_norms(where: str, modules: tuple[ModulePlan, ...], mesh: Mesh) -> None:
    """Check the norms among module entries.

    Raises:
        MalformedError: a rule is broken; the message begins with ``where``.
    """
    for index, entry in enumerate(modules):
        if entry.norm is not None:
            _check_norm(f"{where}[{index}].norm", entry.norm, mesh)


def _check_norm(where: str, norm: NormInfo, mesh: Mesh) -> None:
    if norm.kind not in ("rms", "layer"):
        fail(f"{where}.kind", one_of(norm.kind, ("rms", "layer")))
    if norm.eps < 0:
        fail(f"{where}.eps", "must not be negative")
    if norm.size < 1:
        fail(f"{where}.size", "must be 1 or more")
    check_axes(f"{where}.axes", norm.axes, mesh)
    if len(norm.groups) not in (1, math.prod(mesh)) or any(n < 1 for n in norm.groups):
        fail(f"{where}.groups", "needs a number of 1 or more for all ranks, or one for each")
    if norm.gate and (norm.gate_activation not in GATE_ACTIVATIONS or not norm.input):
        fail(f"{where}.gate", "needs an input and a known gate_activation")
    for field, name in (("weight", norm.weight), ("bias", norm.bias)):
        if name and not is_step(name):
            fail(f"{where}.{field}", f"not the name of a parameter: {name!r}")
    if norm.compute_dtype != "input":
        check_dtype(f"{where}.compute_dtype", norm.compute_dtype)
