"""Checkpoints of real types: the lazy weights are, to the last place, what transformers itself loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shardconv_runtime.checkpoint.checkpoint_weights import lazy_weights
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, LazyTensor
from shardconv_runtime.checkpoint.resolve import resolve

from . import models

MOVED = (
    ("causal", "llama"),
    ("causal", "gpt2"),
    ("causal", "mixtral"),  # a matrix for each expert on the disk, stacked in the model
    ("causal", "deepseek_v3"),
    ("causal", "gpt_oss"),
    ("causal", "internlm3"),  # built from another type's class
    ("causal", "hy_v4"),  # its code makes tensors like those of the checkpoint
    ("causal", "olmo_hybrid"),
    ("seq2seq", "t5"),
    ("masked", "deberta-v2"),
    ("other", "hubert"),  # transformers fills the product of a convolution's two tensors
    ("other", "llava"),
)
COMPUTED = (
    ("causal", "inkling2_text"),  # a conversion that computes
    ("causal", "zaya"),  # its code writes into what was loaded
    ("seq2seq", "marian"),  # tables of sines are not in the checkpoint
)


@pytest.mark.parametrize(("family", "model_type"), [*MOVED, *COMPUTED])
def test_weights_are_those_that_transformers_loads(family: str, model_type: str, tmp_path: Path) -> None:
    found = models.build(family, model_type)
    torch.manual_seed(0)
    model = found.model_class(found.config)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.config.architectures = [found.model_class.__name__]
    model.save_pretrained(tmp_path, max_shard_size="100kB")
    expected = found.model_class.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    weights = lazy_weights(resolve(tmp_path, dtype="float32")).tensors
    assert weights.keys() == expected.keys()
    computed = set()
    for name, lazy in weights.items():
        assert isinstance(lazy, LazyTensor)
        assert torch.equal(read_tensor(lazy), expected[name]), name
        if any(isinstance(piece.leaf, ComputedLeaf) for piece in lazy.pieces):
            computed.add(name)
    assert bool(computed) == ((family, model_type) in COMPUTED)
