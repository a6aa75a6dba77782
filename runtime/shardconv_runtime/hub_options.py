"""How the Hub is reached."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hub:
    """How to reach the Hub; the fields are those of ``huggingface_hub``."""

    revision: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    token: str | bool | None = None
