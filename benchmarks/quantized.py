#!/usr/bin/env python3
"""Quantized checkpoints of hundreds of GB, converted for one rank: their real layouts, as files of holes.

The header of the checkpoint has the name, shape and dtype of each tensor of a release; its bytes are a hole,
which reads as zeros. One rank of ``--tp`` is converted; bytes that are zero are not written, since the disk
would not hold them. Everything else is as for a user: headers, plan, copying, checksums, journal.

    python benchmarks/quantized.py [deepseek_v3] [gpt_oss] [--tp 8] [--experts tp|ep] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""safetensors' dtype and global shape by name."""

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
KEPT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": list(KEPT)}
BLOCK = 32
"""Values that share a factor in MXFP4."""


def plain_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint that transformers would save of the plain model."""
    import transformers
    from shardconv_runtime.checkpoint.resolve import resolve

    from shardconv.exports.saved_layout import model_of, positions, saved_tensors

    assert isinstance(config, transformers.PreTrainedConfig)
    spec = resolve(config, need_weights=False)
    model = model_of(spec)
    state = model.state_dict()
    weights = {name: positions(name, "bfloat16", tuple(tensor.shape)) for name, tensor in state.items()}
    return {name: tensor.shape for name, tensor in saved_tensors(model, weights).items()}


def deepseek_v3() -> tuple[Any, Tensors]:
    """DeepSeek-V3: float8 in blocks of 128 by 128, but for norms, routers, embeddings and head."""
    import transformers

    config = transformers.DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], dtype="bfloat16")
    found: Tensors = {}
    for name, shape in plain_tensors(config).items():
        if len(shape) == 2 and not any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate.")):
            found[name] = ("F8_E4M3", shape)
            found[f"{name}_scale_inv"] = ("F32", (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128)))
        else:
            found[name] = ("F32" if "correction_bias" in name else "BF16", shape)
    config.quantization_config = FP8
    return config, found


def gpt_oss() -> tuple[Any, Tensors]:
    """gpt-oss-120b: experts in MXFP4, all else in bfloat16."""
    import transformers

    config = transformers.GptOssConfig(architectures=["GptOssForCausalLM"], dtype="bfloat16")
    found: Tensors = {}
    for name, shape in plain_tensors(config).items():
        if name.endswith(("gate_up_proj", "down_proj")) and len(shape) == 3:
            experts, inputs, outputs = shape
            found[f"{name}_blocks"] = ("U8", (experts, outputs, inputs // BLOCK, BLOCK // 2))
            found[f"{name}_scales"] = ("U8", (experts, outputs, inputs // BLOCK))
        else:
            found[name] = ("BF16", shape)
    config.quantization_config = MXFP4
    return config, found


LAYOUTS: dict[str, Callable[[], tuple[Any, Tensors]]] = {"deepseek_v3": deepseek_v3, "gpt_oss": gpt_oss}


def write_holes(directory: Path, config: Any, tensors: Tensors) -> int:
    """A checkpoint of holes; returns the bytes of its tensors."""
    directory.mkdir(parents=True)
    settings = config.to_dict() | {"quantization_config": config.quantization_config}
    (directory / "config.json").write_text(json.dumps(settings, default=str))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return offset


def convert(arguments: list[str]) -> None:
    """``shardconv convert`` that leaves holes where it would write zeros, and so needs no free space."""
    real = os.pwrite
    zeros = bytes(1 << 20)

    def pwrite(handle: int, data: Any, offset: int) -> int:
        view = memoryview(data).cast("B")
        parts = (view[i : i + len(zeros)] for i in range(0, len(view), len(zeros)))
        if all(bytes(part) == zeros[: len(part)] for part in parts):
            return len(view)
        return real(handle, data, offset)

    os.pwrite = pwrite
    os.statvfs = lambda path: SimpleNamespace(f_bavail=1 << 40, f_frsize=1 << 20)
    from shardconv.cli.entry import main as run

    run(["convert", *arguments])


def measure(name: str, options: argparse.Namespace, scratch: Path) -> Iterator[str]:
    """The row of one layout."""
    config, tensors = LAYOUTS[name]()
    source, out = scratch / name, scratch / f"{name}-out"
    total = write_holes(source, config, tensors)
    command = [sys.executable, __file__, "--convert", str(source), "--tp", str(options.tp), str(out)]
    command += ["--ranks", "0", "--experts", options.experts, "--no-check"]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    files = out.rglob("*.safetensors")  # of an unfinished directory: rank 0 and what all ranks hold
    held = sum(path.stat().st_size for path in files)
    yield name
    yield f"{len(tensors):,}"
    yield f"{total / 1e9:.1f}"
    yield f"{held / 1e9:.2f}"
    yield f"{held * options.tp / total:.3f}"
    yield f"{seconds:.0f}"
    yield f"{peak / 1e9:.2f}"


def main() -> None:
    """See the module."""
    if sys.argv[1:2] == ["--convert"]:
        convert(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layouts", nargs="*", choices=[*LAYOUTS, []], default=list(LAYOUTS))
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--experts", choices=["tp", "ep"], default="tp")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    heads = ["layout", "tensors", "file, GB", "rank 0, GB", "tp x rank / file", "seconds", "peak memory, GB"]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        for name in options.layouts:
            lines.append("| " + " | ".join(measure(name, options, Path(scratch))) + " |")
            print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
