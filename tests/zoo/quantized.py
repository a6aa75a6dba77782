"""Checkpoints of every quantized format, made by its own library: converted, merged, loaded, compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plain_kernels
import torch
from distributed import run_processes
from library_checkpoints import (
    dense_model,
    experts_model,
    save_awq,
    save_bnb,
    save_compressed,
    save_fp8,
    save_gptq,
    save_mxfp4,
    save_torchao,
    stored,
)
from packed_ranks import held_bytes, in_float32
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.format.plan import parameter_plans
from shardconv_runtime.format.stored_layout import is_common, stored_plans

import shardconv
from shardconv.converted.shards import read

IDS = [[1, 5, 60, 7, 50, 3, 8], [9, 2, 6, 33, 1, 0, 4]]
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 64}
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
KERNELS: dict[str, dict[str, Any]] = {
    "gptq": {"backend": "gptq_torch"},
    "awq": {"backend": "torch_awq"},
    "compressed-tensors": {"use_optimized_inference": True},
}
"""Settings that choose kernels which compute with packed weights, in the dtype of the activations, by
``quant_method``."""


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Callable[[Path], Any]:
    return lambda path: save_compressed(path, {".*_proj": weights}, inputs)


def _torchao(kind: str) -> Callable[[Path], Any]:
    def save(path: Path) -> Any:
        import torchao.quantization

        return save_torchao(path, getattr(torchao.quantization, kind)())

    return save


@dataclass(frozen=True)
class Kind:
    """A format and a model."""

    name: str
    save: Callable[[Path], Any]
    model: str = "dense, 3 and 5 groups"
    experts: str = "tp"


EXPERTS = "4 experts"
KINDS = (
    Kind("FP8, blocks of 64", lambda path: save_fp8(path, dense_model(), (64, 64))),
    Kind("FP8, blocks of 16", lambda path: save_fp8(path, experts_model(), (16, 16)), EXPERTS),
    Kind("FP8, blocks of 16", lambda path: save_fp8(path, experts_model(), (16, 16)), EXPERTS, "ep"),
    Kind(
        "FP8, a factor for each output (compressed-tensors)",
        _compressed(CHANNELS, TOKENS),
    ),
    Kind("GPTQ, 4 bits, groups of 64", lambda path: save_gptq(path, 4, 64, act_order=False)),
    Kind("GPTQ, 4 bits, groups of 32, act-order", lambda path: save_gptq(path, 4, 32, act_order=True)),
    Kind("GPTQ, 8 bits, groups of 64", lambda path: save_gptq(path, 8, 64, act_order=False)),
    Kind("AWQ, groups of 64", lambda path: save_awq(path, 64)),
    Kind("bitsandbytes nf4", lambda path: save_bnb(path, **NF4)),
    Kind(
        "bitsandbytes nf4, nested",
        lambda path: save_bnb(path, load_in_4bit=True, bnb_4bit_use_double_quant=True),
    ),
    Kind("bitsandbytes int8", lambda path: save_bnb(path, load_in_8bit=True)),
    Kind("torchao int8 weight-only", _torchao("Int8WeightOnlyConfig")),
    Kind("torchao float8 weight-only", _torchao("Float8WeightOnlyConfig")),
    Kind("compressed-tensors int4, groups of 64", _compressed(INT4)),
    Kind("compressed-tensors int4, zero points", _compressed(INT4 | {"symmetric": False})),
    Kind("NVFP4 (compressed-tensors)", _compressed(NVFP4)),
    Kind("MXFP4, 3 and 5 blocks", save_mxfp4, EXPERTS),
    Kind("MXFP4, 3 and 5 blocks", save_mxfp4, EXPERTS, "ep"),
)


@dataclass(frozen=True)
class Row:
    """A kind at a number of ranks."""

    name: str
    model: str
    experts: str
    tp: int
    sharded: str
    """Packed weights that are sharded, of all packed ones."""
    rank_share: float
    """Bytes of the largest rank's tensors over those of the checkpoint."""
    merged: bool
    """Merging gives every tensor of the checkpoint, byte for byte."""
    packed: str
    """The largest error of logits of packed ranks over the largest logit; or why they were refused."""
    memory: float
    """Bytes in memory of a packed rank over those of its files; 0 where it was refused."""
    dequantized: float
    """The same error for ``dequantize=True``."""


def measure(kind: Kind, tp: int, scratch: Path) -> Row:
    """Make, convert, merge and load a checkpoint."""
    source, out = scratch / "q", scratch / "out"
    expected, plain_expected = run_processes(1, _references, kind, source)[0]
    plan = shardconv.convert(source, out, tp, experts=kind.experts)
    shardconv.merge(out, scratch / "merged")
    entries = parameter_plans(plan)
    packed = [name for name, entry in entries.items() if entry.packing is not None]
    parts = stored_plans(plan)
    is_cut = {n: any(not is_common(parts[t]) for t in _tensor_names(n, entries[n])) for n in packed}
    held = read(out).tensors
    rank_bytes = [
        sum(t.num_bytes for tensors in (held[None], held[rank]) for t in tensors.values())
        for rank in range(tp)
    ]
    file_bytes = sum(tensor.nbytes for tensor in stored(source).values())
    found = run_processes(tp, _packed_rank, out)
    plain = run_processes(tp, _dequantized_rank, out)
    refused = found[0] if isinstance(found[0], str) else ""
    return Row(
        kind.name,
        kind.model,
        kind.experts,
        tp,
        f"{sum(is_cut.values())} of {len(packed)}",
        max(rank_bytes) / file_bytes,
        _are_equal(stored(source), stored(scratch / "merged")),
        refused or f"{max(_error(logits, expected) for logits, _ in found):.0e}",
        0.0 if refused else max(size / rank_bytes[rank] for rank, (_, size) in enumerate(found)),
        max(_error(logits, plain_expected) for logits in plain),
    )


def _tensor_names(name: str, entry: Any) -> list[str]:
    from shardconv_runtime.format.stored_layout import tensor_name

    return [tensor_name(name, tensor.name) for tensor in entry.packing.tensors]


def _references(kind: Kind, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs in a process of its own: logits of the model that transformers loads, packed and dequantized."""
    kind.save(path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    method = config["quantization_config"].get("quant_method")
    config["quantization_config"] |= KERNELS.get(method, {})
    file.write_text(json.dumps(config))
    plain_kernels.use_those_of_cpus()
    plain = _dequantized_logits(path)
    try:
        return _logits(in_float32(path)), plain
    except Exception:  # the library does not compute in float32, or not on this device
        return plain, plain


def _dequantized_logits(path: Path) -> torch.Tensor:
    """Of the plain model with the weights that a conversion for one rank dequantizes."""
    import shardconv_runtime

    out = path.with_name("one")
    dtype = json.loads((path / "config.json").read_text())["dtype"]
    shardconv.convert(path, out, 1, dtype=dtype, check=False)
    return _logits(shardconv_runtime.load(out, dtype="float32"))


def _packed_rank(out: Path) -> Any:
    import shardconv_runtime

    plain_kernels.use_those_of_cpus()
    try:
        held = held_bytes(shardconv_runtime.load(out))
    except ShardconvError as error:
        return str(error)
    return _logits(shardconv_runtime.load(out, dtype="float32")), held


def _dequantized_rank(out: Path) -> torch.Tensor:
    import shardconv_runtime

    return _logits(shardconv_runtime.load(out, dequantize=True, dtype="float32"))


def _logits(model: Any) -> torch.Tensor:
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor(IDS)).logits
    return found.float()


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return one.keys() == other.keys() and all(
        (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        and torch.equal(bits(tensor), bits(other[name]))
        for name, tensor in one.items()
    )
