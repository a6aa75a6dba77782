"""``load`` of a model by a plan that knows the links between hosts: the ranks are the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import save, save_causal
from one_and_ranks import Use, of_one, of_ranks, require_same
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import leaves

import shardconv
from shardconv import cli
from shardconv.hardware.machines import Device, Link, devices_text

IDS = torch.tensor([[1, 5, 40, 7, 50, 9], [3, 12, 33, 17, 51, 8]])
DEVICE = Device(
    name="D",
    memory_bytes=10**11,
    bandwidth=1e9,
    flops={"float64": 1e15},
    operator_s=0.0,
    kernel_s=0.0,
    inside=Link(1e12, 0.0, 0.0),
    between=Link(1e8, 0.0, 0.0),
    disk_bandwidth=1e9,
    host_bandwidth=1e9,
)
"""A device of which the tiny models are divided as large ones are: some layers over the hosts, some not."""


def dense(path: Path) -> Path:
    return save_causal("llama", path)


def experts(path: Path) -> Path:
    return save_causal("mixtral", path)


def encoder_decoder(path: Path) -> Path:
    sizes = {"vocab_size": 256, "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 8}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0)
    return save(transformers.T5ForConditionalGeneration._from_config(config, dtype=torch.float64), path)


def eager(model: Any) -> Any:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product has no float64 on CPUs
    return model


def logits(model: Any) -> torch.Tensor:
    """Those of all positions; an encoder-decoder model makes the inputs of its decoder from the labels."""
    result: torch.Tensor = eager(model)(input_ids=IDS, labels=IDS).logits
    return result


def tokens(model: Any) -> torch.Tensor:
    """Of greedy generation."""
    result: torch.Tensor = eager(model).generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None)
    return result


def gradients(model: Any) -> torch.Tensor:
    """Of the loss, for all norms, which are on every rank."""
    eager(model)(input_ids=IDS, labels=IDS).loss.backward()
    return torch.cat([p.grad for name, p in model.named_parameters() if "norm" in name])


def is_over_hosts(entry: Any) -> bool:
    return any(0 in leaf.axes for dim in entry.dims for leaf in leaves(dim))


def planned(save_model: Callable[[Path], Path], tp: int, link: float | None, root: Path) -> tuple[Path, Path]:
    """A model, and its plan for two hosts: of the device with a link of some bytes a second, or of H100s."""
    model, file = save_model(root / "model"), root / "plan.json"
    options = ["--tp", str(tp), "--batch", "8", "--context", "64", "--no-check", "--quiet"]
    if link is None:
        options += ["--on", "2x2xH100"]
    else:
        device = replace(DEVICE, between=Link(link, 0.0, 0.0))
        (root / "devices.json").write_text(devices_text([device]))
        options += ["--on", f"2x{tp // 2}xD", "--hardware", str(root / "devices.json")]
    assert cli.run(["plan", str(model), *options, "-o", str(file)]) == 0
    matrices = [entry for entry in plan_json.read(file).parameters if len(entry.dims) > 1]
    over_hosts = [is_over_hosts(entry) for entry in matrices]
    assert (any(over_hosts), all(over_hosts)) == (link is not None, False)
    return model, file


def test_logits_of_two_hosts(tmp_path: Path) -> None:
    model, file = planned(dense, 2, 1e8, tmp_path)
    require_same([logits], of_one(model, [logits]), of_ranks(model, [logits], plan=file))


def test_a_conversion_for_two_hosts(tmp_path: Path) -> None:
    """The plan is proven and stored; the same options continue it, and others are told apart by name."""
    model, out, hardware = dense(tmp_path / "model"), tmp_path / "out", tmp_path / "devices.json"
    hardware.write_text(devices_text([replace(DEVICE, between=Link(1e8, 0.0, 0.0))]))
    here = shardconv.OnCluster("2x1xD", context=64, batch=8, hardware=hardware)
    plan = shardconv.convert(model, out, 2, on=here)
    assert plan.devices == "2x1xD, batch 8, context 64"
    assert plan.proven_arguments
    matrices = [is_over_hosts(entry) for entry in plan.parameters if len(entry.dims) > 1]
    assert (any(matrices), all(matrices)) == (True, False)
    require_same([logits], of_one(model, [logits]), of_ranks(out, [logits]))
    assert shardconv.convert(model, out, 2, on=here) == plan
    with pytest.raises(ShardconvError, match="devices"):
        shardconv.convert(model, out, 2)
    shardconv.verify(out, against=model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_model", "tp", "link"),
    [
        (dense, 2, 1e8),
        (dense, 4, 3e7),
        (experts, 2, 1e8),
        (experts, 4, 3e7),
        (encoder_decoder, 2, 1e8),
        (encoder_decoder, 4, 5e7),
        (dense, 4, None),
        (experts, 4, None),
        (encoder_decoder, 4, None),
    ],
)
def test_logits_tokens_and_gradients_of_two_hosts(
    save_model: Callable[[Path], Path], tp: int, link: float | None, tmp_path: Path
) -> None:
    model, file = planned(save_model, tp, link, tmp_path)
    uses: list[Use] = [logits, tokens]
    require_same(uses, of_one(model, uses), of_ranks(model, uses, tp, plan=file))
    trained = of_ranks(model, [gradients], tp, plan=file, training=True)
    require_same([gradients], of_one(model, [gradients]), trained, tolerance=1e-5)  # norms are in float32
