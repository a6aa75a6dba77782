"""Attention of packed calls on CPUs, computed for each request by itself: masks that know their requests."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map
from transformers.integrations import sdpa_attention

Block = tuple[int, int, int, int]
"""Where the queries begin and end, and where the keys do."""


@functools.cache
def _share_keys_by_groups() -> None:
    """Have transformers' attention share keys among the heads of a group, given a ``MaskByRequest``.

    With a mask it copies keys and values for each head (5.23 and 5.24), since kernels of GPUs cannot take
    both a mask and groups. That of CPUs can. Earlier versions go on copying.
    """
    original = getattr(sdpa_attention, "use_gqa_in_sdpa", None)
    if original is None:
        return

    @functools.wraps(original)
    def decided(attention_mask: Any, *args: Any, **kwargs: Any) -> bool:
        return isinstance(attention_mask, MaskByRequest) or bool(original(attention_mask, *args, **kwargs))

    sdpa_attention.use_gqa_in_sdpa = decided


class MaskByRequest(Tensor):
    """The mask of a packed call, with which the attention of each request is computed by itself.

    For scaled dot product attention, transformers (5.17 to 5.24) computes the scores of each token with the
    keys of all requests, and masks those of other requests: for 64 requests 64 times as many as are needed.
    Each block of the mask, with the same queries and keys, gives the same results. Short requests share a
    block, since a call of the kernel takes as long as some thousand scores, and threads wait for each other.

    All other operators get the plain mask. Those without a mask cost nothing more.
    """

    plain: Tensor
    """``[1, 1, queries, keys]``"""
    blocks: Sequence[Block]
    """See ``_blocks``."""

    @classmethod
    def of(cls, mask: Tensor, blocks: Sequence[Block]) -> Self:
        """Return a mask with its blocks; it shares the memory."""
        made = mask.as_subclass(cls)
        made.plain, made.blocks = mask, blocks
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mask = kwargs.get("attn_mask")
        if func is scaled_dot_product_attention and isinstance(mask, cls) and len(args) == 3:
            queries, keys = mask.plain.shape[-2:]
            if (args[0].shape[-2], args[1].shape[-2]) == (queries, keys):
                return mask._attend(*args, options=kwargs)
        self_mask = next(each for each in (*args, *kwargs.values()) if isinstance(each, cls))
        args, kwargs = tree_map(lambda each: each.plain if isinstance(each, cls) else each, (args, kwargs))
        result = func(*args, **kwargs)
        return self_mask if _is_same(result, self_mask.plain) else result

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        results = []
        for start, end, first, last in self.blocks:
            options["attn_mask"] = self.plain[..., start:end, first:last]
            block = (query[..., start:end, :], key[..., first:last, :], value[..., first:last, :])
            results.append(scaled_dot_product_attention(*block, **options))
        return torch.cat(results, dim=-2) if len(results) > 1 else results[0]


def _is_same(result: Any, mask: Tensor) -> bool:
    """Return whether a result is the whole mask, as of ``mask[:, :, :, :keys]``."""
    return (
        type(result) is Tensor
        and result.shape == mask.shape
        and result.dtype == mask.dtype
        and result.data_ptr() == mask.data_ptr()
        and result.stride() == mask.stride()
    )


def masked_by_request(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the inputs of a packed call, with masks that know their requests.

    They are the same on GPUs, where many small kernels may take longer than a large one, and for attention
    that has no mask.
    """
    masks, keys = inputs.get("attention_mask"), inputs.get("cu_seq_lens_k")
    if device.type != "cpu" or torch.compiler.is_compiling() or masks is None or keys is None:
        return inputs
    _share_keys_by_groups()
    queries = inputs["cu_seq_lens_q"].tolist()
    if isinstance(masks, Tensor):  # all layers are of one kind
        [of_all] = keys.values() if isinstance(keys, Mapping) else [keys]
        return {**inputs, "attention_mask": MaskByRequest.of(masks, _blocks(queries, of_all.tolist()))}
    made = {
        kind: MaskByRequest.of(mask, _blocks(queries, keys[kind].tolist())) for kind, mask in masks.items()
    }
    return {**inputs, "attention_mask": made}


SHARED_SCORES = 2048
"""Most scores of a block that several requests share."""


def _blocks(queries: Sequence[int], keys: Sequence[int]) -> list[Block]:
    """Return the blocks of a packed call."""
    blocks: list[Block] = []
    for (start, end), (first, last) in zip(pairwise(queries), pairwise(keys), strict=True):
        if blocks and (end - blocks[-1][0]) * (last - blocks[-1][2]) <= SHARED_SCORES:
            start, _, first, _ = blocks.pop()
        blocks.append((start, end, first, last))
    return blocks
