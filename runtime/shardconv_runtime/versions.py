"""The version of both packages, and of the libraries that a manifest records.

The packages also run from a clone that is not installed, which has no metadata to ask. So the version is a
constant here, and ``pyproject.toml`` takes it from this file.
"""

from __future__ import annotations

__version__ = "0.1.0"


def tool_versions() -> dict[str, str]:
    """Return the versions of the packages that write a converted directory, for its manifest."""
    import safetensors  # these are imported here since the command line answers without torch
    import torch
    import transformers

    return {
        "shardconv": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }
