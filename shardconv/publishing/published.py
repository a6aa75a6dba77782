"""A converted directory in a repository of the Hub."""

from __future__ import annotations

from dataclasses import dataclass

from shardconv_runtime.format.manifest import Manifest
from shardconv_runtime.format.plan import Plan


@dataclass(frozen=True, slots=True)
class Published:
    """One of the converted directories of a repository."""

    path: str
    """Of its folder in the repository, as ``tp-8``."""
    manifest: Manifest
    plan: Plan
