"""Tiny quantized checkpoints, made by the formats' own libraries or transformers' integrations of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

HEAD = "lm_head"
"""What no format quantizes here, beside what is no linear layer."""


NUM_LAYERS = 1
"""Of the models; a process of its own may set it."""


def dense_model(**settings: Any) -> Any:
    """A random dense model with biases; its widths are 3 and 5 groups of 64, 6 and 10 of 32."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "head_dim": 32}
    config = transformers.LlamaConfig(
        **(sizes | {"num_key_value_heads": 2, "num_hidden_layers": NUM_LAYERS, "vocab_size": 64} | settings),
        attention_bias=True,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def save_plain(directory: Path, **settings: Any) -> Path:
    """The unquantized model in a directory of its own beside this one."""
    plain = directory.with_name(f"{directory.name}-plain")
    dense_model(**settings).save_pretrained(plain)
    return plain


def save_by_transformers(directory: Path, config: Any, **settings: Any) -> Path:
    """The dense model, quantized by transformers while it is loaded."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        save_plain(directory, **settings), quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(directory)
    return directory


def save_bnb(directory: Path, **settings: Any) -> Path:
    """bitsandbytes, with these settings of ``BitsAndBytesConfig``."""
    return save_by_transformers(directory, transformers.BitsAndBytesConfig(**settings))


def save_torchao(directory: Path, quantization: Any) -> Path:
    """torchao, with one of its configs."""
    return save_by_transformers(directory, transformers.TorchAoConfig(quantization))


def save_packed(
    directory: Path, pack: Callable[[torch.nn.Linear], dict[str, torch.Tensor]], settings: dict[str, Any]
) -> Path:
    """The dense model with the tensors that ``pack`` gives for each linear layer, and these settings."""
    save_plain(directory)
    model = dense_model().to(torch.float16)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != HEAD:
            module.name = name
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in pack(module).items()}
    model.save_pretrained(directory)
    return save_tensors(directory, tensors, settings)


def save_tensors(directory: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> Path:
    """A saved model with other tensors, which are quantized with these settings."""
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_gptq(directory: Path, bits: int, group: int, *, act_order: bool, form: str = "gptq") -> Path:
    """GPTQ, packed by gptqmodel with random groups of inputs in act-order; asymmetric.

    Args:
        group: inputs of a group; -1: all.
        form: ``gptq`` or ``gptq_v2``.
    """
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": False,
        "checkpoint_format": form,
        "modules_in_block_to_quantize": None,
        "lm_head": False,
    }
    return save_packed(
        directory, lambda linear: pack_gptq(linear, bits, group, act_order=act_order, form=form), settings
    )


def gptq_module(linear: torch.nn.Linear, bits: int, group: int, *, act_order: bool) -> Any:
    """gptqmodel's module of a linear layer, in the second version of the format."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    size = linear.in_features if group == -1 else group
    index = torch.arange(linear.in_features, dtype=torch.int32) // size
    if act_order:
        index = index[torch.randperm(len(index))]
    weight, scales, zeros = round_to_groups(linear.weight, index, bits)
    module = TorchLinear(
        bits, group, False, act_order, linear.in_features, linear.out_features, linear.bias is not None
    )
    layer = torch.nn.Linear(linear.in_features, linear.out_features, False, dtype=torch.float32)
    layer.weight.data = weight
    module.pack_original(layer, scales, zeros, index)
    return module


def pack_gptq(
    linear: torch.nn.Linear, bits: int, group: int, *, act_order: bool, form: str
) -> dict[str, torch.Tensor]:
    """The stored tensors of a linear layer."""
    module = gptq_module(linear, bits, group, act_order=act_order)
    if form == "gptq":
        module.qzeros -= sum(1 << shift for shift in range(0, 32, bits))
    return {name: getattr(module, name) for name in ("qweight", "qzeros", "scales", "g_idx")}


def save_awq(directory: Path, group: int) -> Path:
    """AWQ in 4 bits, packed by gptqmodel."""
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return save_packed(directory, lambda linear: pack_awq(linear, group), settings)


def awq_module(linear: torch.nn.Linear, group: int) -> Any:
    """gptqmodel's module of a linear layer."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    index = torch.arange(linear.in_features) // (linear.in_features if group == -1 else group)
    weight, scales, zeros = round_to_groups(linear.weight, index, 4)
    module = AwqTorchLinear(4, group, False, False, linear.in_features, linear.out_features)
    layer = torch.nn.Linear(linear.in_features, linear.out_features, False, dtype=torch.float32)
    layer.weight.data = weight
    module.pack(layer, scales.half(), zeros)
    return module


def pack_awq(linear: torch.nn.Linear, group: int) -> dict[str, torch.Tensor]:
    """The stored tensors of a linear layer."""
    module = awq_module(linear, group)
    return {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}


def save_fp8(directory: Path, model: Any, block: tuple[int, int], **settings: Any) -> Path:
    """Block-scaled float8 of all linear layers and experts, by the quantizer of transformers.

    Args:
        settings: others of ``FineGrainedFP8Config``.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = transformers.FineGrainedFP8Config(weight_block_size=block, **settings)
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=config))
    model.save_pretrained(directory)
    tensors = {}
    for name, tensor in stored(directory).items():
        is_linear = name.endswith("_proj.weight")
        tensors |= quantizer.convert({name: tensor}) if is_linear else {name: tensor}
    return save_tensors(directory, tensors, config.to_dict())


def experts_model() -> Any:
    """A random mixture of four experts; in per-expert files."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def save_mxfp4(directory: Path) -> Path:
    """A random mixture of four experts with random values in MXFP4, of 3 blocks and of 5."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    tensors = {}
    for name, tensor in stored(directory).items():
        if not name.endswith("_proj"):
            tensors[name] = tensor
            continue
        shape = (tensor.shape[0], tensor.shape[2], tensor.shape[1] // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(115, 123, shape, dtype=torch.uint8)
    return save_tensors(directory, tensors, transformers.Mxfp4Config().to_dict())


def save_compressed(
    directory: Path, groups: dict[str, dict[str, Any]], inputs: dict[str, Any] | None = None
) -> Path:
    """compressed-tensors, packed by its own compressors.

    Args:
        groups: for each pattern of names of modules the settings of their weights.
        inputs: the settings of their inputs; None: they are not quantized.
    """
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    schemes = {
        pattern: QuantizationScheme(targets=[f"re:{pattern}"], weights=weights, input_activations=inputs)
        for pattern, weights in groups.items()
    }
    for scheme in schemes.values():
        scheme.format = infer_module_format(torch.nn.Linear, scheme)
    formats = {scheme.format.value for scheme in schemes.values()}
    config = QuantizationConfig(
        config_groups={f"group_{i}": scheme for i, scheme in enumerate(schemes.values())},
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=[HEAD],
    )

    def pack(linear: torch.nn.Linear) -> dict[str, torch.Tensor]:
        pattern = next(p for p in schemes if re.fullmatch(p, linear.name))
        return pack_compressed(linear.weight, schemes[pattern])

    return save_packed(directory, pack, json.loads(config.model_dump_json()))


def pack_compressed(weight: torch.Tensor, scheme: Any) -> dict[str, torch.Tensor]:
    """The stored tensors of a matrix."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight, shared = weight.detach().bfloat16(), {}
    cells = in_cells(weight, scheme.weights)
    if scheme.weights.strategy == "tensor_group":
        shared["global_scale"] = generate_gparam(weight.amin(), weight.amax())
    scale, zeros = calculate_qparams(*cells.aminmax(dim=-1), scheme.weights, **shared)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zeros}
    state |= {f"weight_{name}": tensor for name, tensor in shared.items()}
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, scheme))
    return compressor.compress(state, scheme)


def in_cells(weight: torch.Tensor, settings: Any) -> torch.Tensor:
    """The values that share a factor, in the last dim."""
    if settings.strategy == "tensor":
        return weight.reshape(1, -1)
    if settings.strategy == "channel":
        return weight[:, None]
    if settings.strategy == "block":
        rows, columns = settings.block_structure
        height, width = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -width % columns, 0, -height % rows))
        cells = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return cells.transpose(1, 2).flatten(2)
    return weight.unflatten(1, (-1, settings.group_size))


def round_to_groups(
    weight: torch.Tensor, index: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rounded weight, and scales and zero points, from 1, ``[out, groups]`` of groups of inputs."""
    top, groups = 2**bits - 1, []
    for group in range(int(index.max()) + 1):
        values = weight.detach().float()[:, index == group]
        low, high = values.amin(1).clamp(max=-1e-3), values.amax(1).clamp(min=1e-3)
        scale = ((high - low) / top).half().float()
        groups.append((scale, (-low / scale).round().clamp(1, top)))
    scales, zeros = (torch.stack(values, 1) for values in zip(*groups, strict=True))
    of = index.long()
    codes = (weight.detach().float() / scales[:, of] + zeros[:, of]).round().clamp(0, top)
    return (codes - zeros[:, of]) * scales[:, of], scales, zeros


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in one file."""
    return load_file(directory / "model.safetensors")
