"""What torchrun starts on each host: generating with one stage of a pipeline; a host may die meanwhile."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import shardconv_runtime
import torch
import torch.distributed as dist
import transformers


class Dies(transformers.LogitsProcessor):
    """Ends the processes of the second host, and its agent, before the fourth token."""

    def __init__(self) -> None:
        self._steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._steps += 1
        if self._steps == 4 and os.environ["GROUP_RANK"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(9)
        return scores


def main(path: Path, result: Path, dies: bool) -> None:
    """Generate with what lies at ``path``; rank 0 writes the tokens, and what is held where."""
    torch.set_num_threads(1)
    model = shardconv_runtime.load(path)
    ids = torch.tensor([[11, 245, 3, 77]])
    processors = transformers.LogitsProcessorList([Dies()]) if dies else None
    tokens = model.generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=0, logits_processor=processors
    )
    held = sorted(name for name, _ in model.named_parameters())
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, (int(os.environ["GROUP_RANK"]), held))
    if dist.get_rank() == 0:
        result.write_text(json.dumps({"tokens": tokens.tolist(), "places": places}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "dies")
