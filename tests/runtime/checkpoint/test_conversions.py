"""Each conversion that transformers makes of a checkpoint: recorded, it gives what it gives otherwise."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_cases import Files, random_tensor, same
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf
from shardconv_runtime.checkpoint.recording_tensors import RecordedTensor, lazy_of
from torch import Tensor, nn
from transformers import core_model_loading as ops

CONFIG = types.SimpleNamespace(num_attention_heads=4, num_experts=3)
CONFIG.get_text_config = lambda: CONFIG


class Target(nn.Module):
    """Has the parameters whose shapes conversions ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(11, 4))
        self.transposed = nn.Parameter(torch.zeros(4, 16))


@dataclass(frozen=True)
class Case:
    """One conversion."""

    op: ops.ConversionOps
    shapes: Mapping[str, list[tuple[int, ...]]]
    """Of what is read, by pattern; several for a list."""
    targets: list[str]
    computed: bool = False
    name: str = "a"
    """Of the parameter."""
    lists: bool = field(default=True)

    def run(self, tensors: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """Convert."""
        given: dict[str, Any] = {
            key: list(value) if self.lists else value[0] for key, value in tensors.items()
        }
        found = self.op.convert(
            given,
            source_patterns=list(tensors),
            target_patterns=list(self.targets),
            config=CONFIG,
            model=Target(),
            full_layer_name=self.name,
        )
        return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


MATRIX, EXPERTS = [(16, 4)], [(6, 4)] * 3
HEADS = {"q": [(16, 4)], "b": [(16,)]}

CASES: dict[str, Case] = {
    "nothing": Case(ops._IdentityOp(), {"x": MATRIX}, ["a"]),
    "chunk": Case(ops.Chunk(0), {"x": MATRIX}, ["a", "b"]),
    "chunk columns": Case(ops.Chunk(1), {"x": MATRIX}, ["a", "b"]),
    "chunk by the config": Case(ops.Chunk(0, "num_experts"), {"x": [(9, 4)]}, ["a.*"]),
    "split": Case(ops.Split(0), {"x": MATRIX}, ["a", "b"]),
    "concatenate": Case(ops.Concatenate(0), {"x": MATRIX, "y": [(3, 4)]}, ["a"]),
    "concatenate columns": Case(ops.Concatenate(1), {"x": MATRIX, "y": [(16, 2)]}, ["a"]),
    "merge experts": Case(ops.MergeModulelist(0), {"x": EXPERTS}, ["a"]),
    "merge two lists": Case(ops.MergeModulelist(0), {"x": EXPERTS, "y": EXPERTS}, ["a"]),
    "split experts": Case(ops.SplitModulelist(0), {"x": [(3, 6, 4)]}, ["a.*"]),
    "transpose": Case(ops.Transpose(0, 1), {"x": MATRIX}, ["a"]),
    "transpose experts": Case(ops.Transpose(1, 2), {"x": [(3, 6, 4)]}, ["a"]),
    "transpose if needed": Case(
        ops.Transpose(0, 1, check_dims=True), {"x": MATRIX}, ["a"], name="transposed"
    ),
    "convolution as a matrix": Case(ops.Conv3dToLinear(3, (2, 2, 2)), {"x": [(5, 3, 2, 2, 2)]}, ["a"]),
    "matrix as a convolution": Case(ops.LinearToConv3d(3, (2, 2, 2)), {"x": [(5, 24)]}, ["a"]),
    "text and images": Case(
        ops.ErnieFuseAndSplitTextVisionExperts(), {"x": [(6, 4)] * 4, "y": [(6, 4)] * 4}, ["a", "b"]
    ),
    "text and images, back": Case(
        ops.ErnieSplitAndDecoupleTextVisionExperts(), {"x": [(2, 12, 4)], "y": [(2, 12, 4)]}, ["a.*", "b.*"]
    ),
    "interleave": Case(ops.Interleave(0), {"x": MATRIX}, ["a"], computed=True),
    "interleave, back": Case(ops.Interleave(1, inverse=True), {"x": [(3, 8)]}, ["a"], computed=True),
    "rotary": Case(ops.PermuteForRope(), {"q": [(16, 4)]}, ["a"], computed=True, lists=False),
    "rotary, back": Case(ops.PermuteForRope(inverse=True), {"q": [(16,)]}, ["a"], computed=True, lists=False),
    "rotary, of some": Case(
        ops.PermuteForRope(permute_layer_names=["q"]), {"v": [(16, 4)]}, ["a"], lists=False
    ),
    "rotary, fused": Case(
        ops.VisionFuseAndPermuteForRope(permute_layer_names=["q"]),
        {"q": [(16, 4)], "v": [(16, 4)]},
        ["a"],
        computed=True,
    ),
    "rotary, unfused": Case(
        ops.VisionUnfuseAndPermuteForRope(permute_layer_names=["q"]),
        {"x": [(32, 4)]},
        ["q", "v"],
        computed=True,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_conversion(tmp_path: Path, case: str) -> None:
    files, chosen = Files(tmp_path), CASES[case]
    real = {
        key: [random_tensor("bfloat16", shape, seed) for seed, shape in enumerate(shapes)]
        for key, shapes in chosen.shapes.items()
    }
    recorded = {key: [RecordedTensor(files.add(tensor)) for tensor in value] for key, value in real.items()}
    expected, found = chosen.run(real), chosen.run(recorded)
    assert found.keys() == expected.keys()
    computed = False
    for name, tensor in expected.items():
        lazy = lazy_of(found[name])
        assert lazy is not None
        assert same(read_tensor(lazy), tensor), name
        computed |= any(isinstance(piece.leaf, ComputedLeaf) for piece in lazy.pieces)
    assert computed == chosen.computed


def test_no_conversion_is_left_out() -> None:
    known = {
        value
        for value in vars(ops).values()
        if isinstance(value, type) and issubclass(value, ops.ConversionOps) and value is not ops.ConversionOps
    }
    assert known == {type(case.op) for case in CASES.values()}
