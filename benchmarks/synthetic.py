"""Synthetic llama checkpoints of real shape, as sharded safetensors files: random bytes, or holes.

Files are streamed: only a block of random bytes is in memory.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

DEMO_CHECKPOINT = Path(__file__).resolve().parents[1] / "scripts" / "demo_checkpoint.py"
"""The program that writes the demo's checkpoint, a real model, to a directory."""
NOISE_BYTES = 1 << 26
BLOCK_BYTES = 1 << 23
ITEM_BYTES = 2
SHARDED_COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Sharded over dim 1, in strided slices; every other matrix is sharded over dim 0."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a llama model in bfloat16, with untied embeddings."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int = 1

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor_bytes(shape) for shape in self.tensors().values())

    def config(self) -> dict[str, object]:
        """The contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Global shapes by name, in the order of the layers."""
        table = (self.vocab, self.hidden)
        layers = (self._layer(f"model.layers.{index}.") for index in range(self.layers))
        return {
            "model.embed_tokens.weight": table,
            **{name: shape for layer in layers for name, shape in layer.items()},
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": table,
        }

    def _layer(self, prefix: str) -> dict[str, tuple[int, ...]]:
        kv = self.hidden // self.heads * self.kv_heads
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


LLAMA_8B = Shape(4096, 14336, 32, 8, 128256)
LLAMA_405B = Shape(16384, 53248, 128, 8, 128256)
SMALLER = (
    LLAMA_8B,
    replace(LLAMA_8B, vocab=32000),
    Shape(2048, 7168, 16, 8, 32000),
    Shape(1024, 3584, 8, 8, 32000),
)
"""In order of preference: a checkpoint of less than 2.6 GB has no room for a layer of the first."""


def tensor_bytes(shape: tuple[int, ...]) -> int:
    """Of a bfloat16 tensor."""
    return math.prod(shape) * ITEM_BYTES


def sharded_dim(name: str) -> int | None:
    """The dim over which tensor parallelism shards a tensor; None for norms, which are replicated."""
    if name.endswith("norm.weight"):
        return None
    return 1 if name.endswith(SHARDED_COLUMNS) else 0


def shape_of_size(num_bytes: float, candidates: tuple[Shape, ...] = SMALLER) -> Shape:
    """The first candidate of which at least one layer fits, with as many layers as fit.

    Raises:
        SystemExit: none fits.
    """
    for shape in candidates:
        layer = replace(shape, layers=2).num_bytes - shape.num_bytes
        if shape.num_bytes <= num_bytes:
            return replace(shape, layers=1 + int((num_bytes - shape.num_bytes) // layer))
    smallest = min(shape.num_bytes for shape in candidates)
    raise SystemExit(f"error: the smallest checkpoint of this shape is {smallest / 1e9:.2f} GB; ask for more")


def write_checkpoint(shape: Shape, directory: Path, *, shard_bytes: int, sparse: bool = False) -> None:
    """Make ``directory`` a model: config.json, weight files and their index.

    Args:
        shape: of the model.
        directory: to make; it must not exist.
        shard_bytes: after which a new weight file is begun; each tensor stays in one file.
        sparse: leave holes where the tensors are, which take no room on disk and read as zeros, instead of
            random finite numbers.
    """
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=2))
    parts = _shards(shape.tensors(), shard_bytes)
    fill = _extend if sparse else _noise()
    weight_map: dict[str, str] = {}
    for index, part in enumerate(parts, 1):
        name = f"model-{index:05}-of-{len(parts):05}.safetensors"
        with (directory / name).open("wb") as file:
            file.write(_header(part))
            fill(file, sum(map(tensor_bytes, part.values())))
        weight_map |= dict.fromkeys(part, name)
    content = {"metadata": {"total_size": shape.num_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))


def _shards(tensors: dict[str, tuple[int, ...]], limit: int) -> list[dict[str, tuple[int, ...]]]:
    """Consecutive tensors that together stay within ``limit`` bytes, or are alone."""
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in tensors.items():
        if parts[-1] and held + tensor_bytes(shape) > limit:
            parts.append({})
            held = 0
        parts[-1][name] = shape
        held += tensor_bytes(shape)
    return parts


def _header(tensors: dict[str, tuple[int, ...]]) -> bytes:
    """Of a safetensors file: https://github.com/huggingface/safetensors#format"""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + tensor_bytes(shape)
        fields[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _extend(file: BinaryIO, num_bytes: int) -> None:
    file.truncate(file.tell() + num_bytes)


def _noise() -> Callable[[BinaryIO, int], None]:
    """Writes random finite bfloat16 numbers: pieces of one buffer from random offsets, so blocks differ."""
    generator = random.Random(0)
    buffer = bytearray(generator.randbytes(NOISE_BYTES))
    finite = bytes(
        byte & ~0x40 for byte in range(256)
    )  # the highest bit of the exponent: below 2, no inf or nan
    buffer[1::2] = buffer[1::2].translate(finite)

    def fill(file: BinaryIO, num_bytes: int) -> None:
        for start in range(0, num_bytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, num_bytes - start)
            offset = generator.randrange(0, NOISE_BYTES - size + 1, ITEM_BYTES)
            file.write(memoryview(buffer)[offset : offset + size])

    return fill


def step_bytes(model: Any, length: int) -> int:
    """The bytes that a decoding step reads at least: all weights but the embedding, and the static cache."""
    table = model.get_input_embeddings().weight
    weights = sum(p.nbytes for p in model.parameters() if p is not table)
    layer = model.model.layers[0].self_attn
    cached = 2 * layer.k_proj.weight.shape[0] * length * table.element_size()
    return int(weights + cached * len(model.model.layers))
