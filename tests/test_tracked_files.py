"""What is in the repository was put there on purpose."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from places import ROOT

LARGEST_BYTES = 2**22
"""A model that a script has written by mistake is larger."""


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="this is no clone")
def test_no_file_is_large() -> None:
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]  # another user may own the clone
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    listed = done.stdout.split("\0")[:-1]
    assert len(listed) > 100
    sizes = {name: (ROOT / name).stat().st_size for name in listed if (ROOT / name).is_file()}
    assert {name for name, size in sizes.items() if size > LARGEST_BYTES} == set()
