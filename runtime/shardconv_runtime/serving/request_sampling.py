"""How each request of a batch draws its tokens, and which fields of a generation config can be granted.

transformers has temperature, top_k and top_p of each request; ``min_p`` is added here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, MinPLogitsWarper

# Private, but nothing public lets a batch have a processor whose argument is the request's own.
from transformers.generation.continuous_batching import cb_logits_processors

from ..errors import ShardconvError
from .schemas import SAMPLING_FIELDS, Sampling

HONORED = (*SAMPLING_FIELDS, "do_sample", "eos_token_id")
NOT_OF_TOKENS = (
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "max_length",
    "max_new_tokens",
    "use_cache",
    "cache_implementation",
    "transformers_version",
    "_from_model_config",
    "_attn_implementation",
    "disable_compile",
    "trust_remote_code",
)
"""Fields of a generation config that do not choose tokens, or that each request says for itself."""
ONE_ASKS_FOR_NOTHING = (
    "repetition_penalty",
    "encoder_repetition_penalty",
    "typical_p",
    "guidance_scale",
    "length_penalty",
    "num_beams",
    "num_return_sequences",
)
"""Fields whose value 1 is that of a config that does not say."""


def default_sampling(own: Any, ignored: frozenset[str] = frozenset()) -> Sampling:
    """How tokens are drawn for requests that do not say: as the model's generation config says, or the API.

    Args:
        own: the generation config of the model.
        ignored: fields that need not be granted.

    Raises:
        ShardconvError: it has fields that would choose other tokens and cannot be granted.
    """
    said = {name for name, value in own.to_diff_dict().items() if _chooses(name, value)}
    refused = sorted(said - {*HONORED, *ignored})
    if refused:
        raise ShardconvError(
            f"the model's generation_config.json has {', '.join(refused)}, which the server cannot grant: "
            "its answers would be others than those of generate; to serve without, say "
            f"--ignore {' '.join(refused)}"
        )
    found = {name: getattr(own, name) for name in SAMPLING_FIELDS}
    return Sampling(**{n: value for n, value in found.items() if value is not None and n not in ignored})


def _chooses(name: str, value: Any) -> bool:
    """Whether a field of a generation config makes other tokens likely."""
    if name in NOT_OF_TOKENS or name.startswith(("output_", "return_")):
        return False
    if name in ONE_ASKS_FOR_NOTHING and value == 1:
        return False
    return bool(value) or (name.endswith("_token_id") and value == 0 and value is not False)


def serving_config(own: Any) -> GenerationConfig:
    """A generation config with which each request says how its tokens are drawn.

    The values are no one's: those that ask for nothing would leave out the step, for all requests.

    Args:
        own: the generation config of the model.
    """
    cb_logits_processors.CLASSIC_TO_CB_PROCESSORS_MAP[MinPLogitsWarper] = _MinP
    return GenerationConfig(
        do_sample=True, temperature=0.5, top_k=1, top_p=0.5, min_p=0.5, eos_token_id=own.eos_token_id or -1
    )


class _MinP(cb_logits_processors.ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Tokens that are less likely than a share of the most likely one are not drawn."""

    supported_kwargs = {"min_p": float}  # noqa: RUF012 (as in the base class)
    ignored_kwargs = ("filter_value", "min_tokens_to_keep")

    def __init__(self, processor: MinPLogitsWarper) -> None:
        self.min_p = processor.min_p

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Fill the arguments of all rows."""
        int32_tensor.copy_(torch.full_like(int32_tensor, self.min_p, dtype=torch.float32).view(torch.int32))

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Each request's own: int32 ``[B]``, the bits of float32."""
        given = [r.state.logit_processor_kwargs.get("min_p", self.min_p) for r in requests_with_new_token]
        return torch.tensor(given, dtype=torch.float32).view(torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Scores ``[B, V]`` of the tokens that may be drawn; others have none."""
        least = tensor_arg[: scores.size(0)].view(torch.float32).unsqueeze(-1)
        probabilities = scores.softmax(-1)
        return scores.masked_fill(probabilities < least * probabilities.amax(-1, keepdim=True), -torch.inf)
