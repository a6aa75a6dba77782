"""The harness lm-eval on a sharded model: the model type ``shardconv``.

    torchrun --nproc-per-node 2 -m shardconv_runtime.integrations.lm_eval run \\
        --model shardconv --model_args pretrained=out/ --tasks hellaswag

The command takes all arguments of ``lm_eval``. Every rank runs all requests, since all ranks compute each of
them together; only rank 0 has results, prints them and writes files. It needs
``pip install lm-eval``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import transformers
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from ..comm.call_agreement import brief_digest, require_same_call
from ..errors import OptionError
from ..loaded import loaded
from ..loading.load import load

OF_LOAD = ("plan", "dtype", "revision", "cache_dir", "token", "trust_remote_code", "dequantize", "adapter")
"""Arguments of the model that ``load`` takes; the type ``hf`` takes all others."""

OF_ANOTHER_WAY = ("parallelize", "tp_plan", "peft", "delta", "autogptq", "gptqmodel", "gguf_file")
"""Arguments of ``hf`` about loading and distribution, which a converted directory determines."""


@register_model("shardconv")
class ShardedLM(HFLM):  # type: ignore[misc]  # lm-eval is not typed for mypy
    """A converted causal model, sharded over the ranks of torchrun.

    Args:
        pretrained: a converted directory or its id on the Hub; with ``plan``, an ordinary model.
        batch_size: a number; the ranks would find other ones by themselves.
        max_batch_size: left out.
        device: ``cpu``, or each rank's own GPU.
        given: further arguments of ``load`` and of the model type ``hf``.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **given: Any,
    ) -> None:
        if not str(batch_size).isdigit():
            raise OptionError(f"batch_size={batch_size}: each rank would choose its own; name a number")
        for name in OF_ANOTHER_WAY:
            if given.pop(name, None):
                raise OptionError(f"{name}= is about loading an ordinary model; leave it out")
        options = {name: given.pop(name) for name in OF_LOAD if name in given}
        if options.get("dtype") == "auto":
            del options["dtype"]
        where = "cpu" if device == "cpu" else None  # lm-eval names cuda by default, even without a GPU
        model = load(pretrained, device=where, **options)
        tokenizer = given.pop("tokenizer", None) or transformers.AutoTokenizer.from_pretrained(pretrained)
        self._has_run = False
        super().__init__(model, tokenizer=tokenizer, batch_size=int(batch_size), **given)

    @property
    def rank(self) -> int:
        """Return the number of this process once requests have run; only 0 prints and writes results.

        Before, it is 0 everywhere, since lm-eval divides requests between ranks.
        """
        return dist.get_rank() if self._has_run and dist.is_initialized() else 0

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer as ``hf`` does."""
        return self._run(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer as ``hf`` does."""
        return self._run(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer as ``hf`` does."""
        return self._run(super().generate_until, requests, disable_tqdm)

    def _run(self, method: Any, requests: Any, disable_tqdm: bool) -> Any:
        # They could differ after an interrupted run with use_cache, whose file each rank has for itself.
        digest = brief_digest([request.args for request in requests], "requests")
        require_same_call(loaded(self.model).launch, method.__name__, {"requests": digest})
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        results = method(requests, disable_tqdm=disable_tqdm or not is_first)
        self._has_run = True
        return results


def main() -> None:
    """Run ``lm_eval``, which knows the model type ``shardconv`` then."""
    try:
        cli_evaluate()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
