"""Steps of decoding that are recorded, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from shardconv_runtime.inference import decoding, replay


class Recording:
    """Stands for a CUDA graph: does what was compiled when it was made, whatever has changed in Python."""

    def __init__(self, run: Any) -> None:
        for _ in range(replay.WARM_UP_RUNS + 1):
            run()
        captured = run.func.captured(*run.args)
        assert captured is not None
        self.replay = lambda: captured(*run.args)


def record_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all compiled models record their steps."""
    monkeypatch.setattr(replay, "_record", Recording)
    monkeypatch.setattr(decoding, "Replay", lambda step, args, records: replay.Replay(step, args, True))
