"""Adapters of every kind that peft has: right on ranks, or refused with what to do.

Elsewhere only LoRA is looked at. A layer of which a rank has a part then computes with local sizes (reports:
huggingface/peft#3628, #3044), AdaLoRA regularizes parts of its matrices, OSF decomposes a part of the weight,
and a vector that all layers share gets the gradient of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file
from shardconv_runtime.adapters import attaching
from shardconv_runtime.errors import PlanError, ShardconvError
from torch import Tensor, nn

import shardconv
from shardconv.converted.adapt import adapt

SMALL = transformers.LlamaConfig(
    hidden_size=48,
    intermediate_size=72,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    vocab_size=131,
    attention_bias=True,
    use_cache=False,
    dtype="float64",
)
IDS = torch.tensor([[5, 9, 2, 77, 31, 4], [3, 90, 1, 55, 6, 120]])
MLP = ["gate_proj", "up_proj"]
ROWS = ["o_proj", "down_proj"]
ATTENTION = ["q_proj", "v_proj", "o_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYOUT = "leave (its layer|layers) out .*LoRA needs no other layout"
TOKENS = "adds tokens, not parameters of layers"
WEIGHTS = "from the weights of the model whenever it loads the adapter.*merge it in one process"
AROUND = "runs its code around the model.*use LoRA"


@dataclass(frozen=True)
class Kind:
    """A config, and what becomes of it."""

    config: Callable[..., Any]
    options: Mapping[str, Any]
    refused: str = ""
    """The error, if it is refused."""
    is_new: bool = True
    """Whether a new one can be made of parts of the weights, too."""

    def make(self) -> Any:
        return self.config(task_type="CAUSAL_LM", **self.options)


RANK = {"r": 4}
KINDS: Mapping[str, Kind] = {
    "LORA": Kind(peft.LoraConfig, {**RANK, "target_modules": "all-linear"}),
    "BEFT": Kind(peft.BeftConfig, {"target_modules": ALL}),
    "BOFT": Kind(peft.BOFTConfig, {"target_modules": ROWS, "boft_block_size": 4}),
    "C3A": Kind(peft.C3AConfig, {"target_modules": ATTENTION, "block_size": 6}),
    "DEFT": Kind(peft.DeftConfig, {"target_modules": ROWS, **RANK}, is_new=False),
    "DELORA": Kind(peft.DeloraConfig, {"target_modules": ALL, **RANK}, is_new=False),
    "FOURIERFT": Kind(peft.FourierFTConfig, {"target_modules": ALL, "n_frequency": 10}),
    "GLORA": Kind(peft.GloraConfig, {"target_modules": [*MLP, "q_proj"], **RANK}),
    "GRALORA": Kind(peft.GraloraConfig, {"target_modules": ATTENTION, **RANK, "gralora_k": 2}),
    "HIRA": Kind(peft.HiraConfig, {"target_modules": ALL, **RANK}),
    "HRA": Kind(peft.HRAConfig, {"target_modules": [*MLP, "q_proj"], **RANK}),
    "IA3": Kind(
        peft.IA3Config, {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    ),
    "LILY": Kind(peft.LilyConfig, {"target_modules": ALL, **RANK}),
    "LN_TUNING": Kind(peft.LNTuningConfig, {"target_modules": ["input_layernorm", "norm"]}),
    "LOHA": Kind(peft.LoHaConfig, {"target_modules": ALL, **RANK}),
    "LOKR": Kind(peft.LoKrConfig, {"target_modules": ["q_proj", "v_proj"], **RANK}),
    "MISS": Kind(peft.MissConfig, {"target_modules": ATTENTION, **RANK}),
    "OFT": Kind(peft.OFTConfig, {"target_modules": ATTENTION, "oft_block_size": 4}),
    "PEANUT": Kind(peft.PeanutConfig, {"target_modules": ROWS, **RANK}),
    "PVERA": Kind(peft.PveraConfig, {"target_modules": MLP, **RANK}),
    "RANDLORA": Kind(peft.RandLoraConfig, {"target_modules": MLP, **RANK}),
    "ROAD": Kind(peft.RoadConfig, {"target_modules": ATTENTION, "group_size": 4}),
    "TINYLORA": Kind(peft.TinyLoraConfig, {"target_modules": ALL, **RANK}, is_new=False),
    "UNILORA": Kind(peft.UniLoraConfig, {"target_modules": ALL, **RANK}),
    "VBLORA": Kind(
        peft.VBLoRAConfig, {"target_modules": ATTENTION, **RANK, "num_vectors": 8, "vector_length": 6}
    ),
    "VERA": Kind(peft.VeraConfig, {"target_modules": MLP, **RANK}),
    "WAVEFT": Kind(peft.WaveFTConfig, {"target_modules": ALL, "n_frequency": 10}),
    # Right in evaluation, refused for training.
    "ADALORA": Kind(peft.AdaLoraConfig, {"target_modules": ALL, "total_step": 9}),
    # Refused.
    "ADAPTION_PROMPT": Kind(peft.AdaptionPromptConfig, {"adapter_len": 2, "adapter_layers": 1}, TOKENS),
    "CARTRIDGE": Kind(peft.CartridgeConfig, {"num_virtual_tokens": 2}, TOKENS),
    "CPT": Kind(peft.CPTConfig, {}, TOKENS),
    "FROD": Kind(peft.FrodConfig, {"target_modules": ["q_proj"]}, WEIGHTS, is_new=False),
    "MULTITASK_PROMPT_TUNING": Kind(peft.MultitaskPromptTuningConfig, {"num_virtual_tokens": 2}, TOKENS),
    "OSF": Kind(peft.OSFConfig, {"target_modules": ["q_proj"]}, WEIGHTS, is_new=False),
    "POLY": Kind(peft.PolyConfig, {"target_modules": ["q_proj"], **RANK}, AROUND),
    "PREFIX_TUNING": Kind(peft.PrefixTuningConfig, {"num_virtual_tokens": 2}, TOKENS),
    "PROMPT_TUNING": Kind(peft.PromptTuningConfig, {"num_virtual_tokens": 2}, TOKENS),
    "PSOFT": Kind(peft.PsoftConfig, {"target_modules": ["q_proj"], **RANK}, "refuses it.*float32"),
    "P_TUNING": Kind(peft.PromptEncoderConfig, {"num_virtual_tokens": 2}, TOKENS),
    "SHADOW": Kind(peft.ShadowConfig, {"target_modules": ["q_proj"]}, AROUND),
    "SHIRA": Kind(peft.ShiraConfig, {"target_modules": ["q_proj"], "r": 2}, LAYOUT),
    "SUPERTUNING": Kind(peft.SupertuningConfig, {"target_modules": ["q_proj"]}, LAYOUT, is_new=False),
    "TRAINABLE_TOKENS": Kind(
        peft.TrainableTokensConfig,
        {"target_modules": ["embed_tokens"], "token_indices": [1, 77]},
        "train the whole embedding with modules_to_save",
    ),
}
NOT_HERE = {"ADAMSS": "it needs scikit-learn", "XLORA": "it is made of other adapters"}
TRAINED = [name for name, kind in KINDS.items() if not kind.refused and name != "ADALORA"]
QUICK = ["LORA", "C3A", "DELORA", "IA3", "LILY", "LOHA", "TINYLORA", "UNILORA", "VBLORA", "VERA"]
"""Kinds that differ in what ranks do; the others are like one of them."""


def test_the_table_is_complete() -> None:
    assert {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} == {*KINDS, *NOT_HERE}


def unsharded(root: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(root / "base", dtype=torch.float64)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, converted, and with a saved adapter of each kind."""
    found = tmp_path_factory.mktemp("kinds")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(SMALL).to(torch.float64)
    randomize(model, 0.2)
    model.save_pretrained(found / "base")
    shardconv.convert(found / "base", found / "out", tp=2, check=False)
    return found


def randomize(model: nn.Module, scale: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)


def save_trained(root: Path, name: str) -> Path:
    torch.manual_seed(0)
    model = peft.get_peft_model(unsharded(root), KINDS[name].make())
    randomize(model, 0.1)
    model.save_pretrained(root / name)
    return root / name


def used(model: Any, where: Path) -> dict[str, Tensor]:
    """What a model computes before, during and after three steps of training; it is saved."""
    found = {}
    with torch.no_grad():
        found["logits"] = model(IDS).logits
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.train()
    losses = []
    for _ in range(3):
        torch.manual_seed(7)
        loss = model(IDS).logits.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found["losses"] = torch.stack(losses)
    model.save_pretrained(where)
    model.eval()
    with torch.no_grad():
        found["trained"] = model(IDS).logits
    return found


def on_rank(root: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        model = shardconv_runtime.load(root / "out", adapter=root / f"{name}-out", training=True)
        found[name] = used(model, root / f"{name}-ranks")
    return found


def compare_with_one_process(root: Path, names: list[str]) -> None:
    """Compare outputs, losses, and the files after training."""
    wanted: dict[str, dict[str, Tensor]] = {}
    for name in names:
        checked = name in ("LILY", "TINYLORA")  # layers share their tensors
        plan = adapt(root / "out", save_trained(root, name), root / f"{name}-out", check=checked)
        assert not plan.inference_only, name
        model = peft.PeftModel.from_pretrained(unsharded(root), root / f"{name}-out", is_trainable=True)
        wanted[name] = used(model.eval(), root / f"{name}-one")
    for found in run_processes(2, on_rank, root, names):
        for name, values in found.items():
            require_close(name, values, wanted[name])
    for name in names:
        one, ranks = (
            load_file(root / f"{name}-{side}" / "adapter_model.safetensors") for side in ("one", "ranks")
        )
        require_close(name, ranks, one)


def require_close(name: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys(), name
    tolerance = 1e-5 if name in ("DEFT", "WAVEFT") else 1e-9  # these compute in float32
    for what, value in wanted.items():
        assert float((found[what] - value).abs().max()) <= tolerance, f"{name}: {what}"


def test_it_is_trained_as_in_one_process(root: Path) -> None:
    compare_with_one_process(root, QUICK)


@pytest.mark.slow
def test_others_are_trained_as_in_one_process(root: Path) -> None:
    compare_with_one_process(root, [name for name in TRAINED if name not in QUICK])


MASKED = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", lora_dropout=0.5)


def masked_step(model: Any, hook: Callable[[str], Callable[..., Any]]) -> Tensor:
    """The logits in training mode after a step of training; the hook sees each dropout of an adapter."""
    model.train()
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, nn.Dropout) and ".lora_dropout." in name:
            nn.Module.register_forward_hook(module, hook(name))  # a rank's part as it is
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model(IDS).logits.square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        found: Tensor = model.eval()(IDS).logits
    return found


def on_rank_with_masks(root: Path) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    masks: dict[str, Tensor] = {}

    def seen(name: str) -> Callable[..., None]:
        def note(module: Any, args: Any, output: Tensor) -> None:
            masks.setdefault(name, (output != 0).double())

        return note

    model = shardconv_runtime.load(root / "out", adapter=root / "MASKED-out", training=True)
    torch.manual_seed(0)
    logits = masked_step(model, seen)
    with torch.no_grad():
        plain = shardconv_runtime.load(root / "out", adapter=root / "ADALORA-out")(IDS).logits
    for adapted in ("ADALORA-out", "ADALORA-earlier"):
        with pytest.raises(PlanError, match="AdaLoRA adds a loss of its full matrices"):
            shardconv_runtime.load(root / "out", adapter=root / adapted, training=True)
    over_sequence = shardconv_runtime.load(
        root / "sequence", adapter=root / "IA3-sequence", training=True, sequence_parallel=True
    )
    with torch.no_grad():
        merged = [over_sequence(IDS).logits]
        over_sequence.merge_adapter()
        merged.append(over_sequence(IDS).logits)
        merged.append(over_sequence.merge_and_unload()(IDS).logits)
    return masks, torch.stack([logits, plain]), merged


def test_masks_are_those_of_one_process_and_merging_knows_sequences(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicated inputs have one mask, parts of an input have parts of one, as one process could draw them.

    AdaLoRA is used, and not trained, also by a plan that an earlier version made. An adapter can be merged
    also where ranks have parts of a sequence.
    """
    save_trained(root, "ADALORA")
    plan = adapt(root / "out", root / "ADALORA", root / "ADALORA-out", check=False)
    assert plan.inference_only
    with monkeypatch.context() as patch:
        patch.setattr(attaching, "_why_not_trained", lambda adapter, added: "")
        plan = adapt(root / "out", root / "ADALORA", root / "ADALORA-earlier", check=False)
        assert not plan.inference_only
    plan = adapt(root / "out", MASKED, root / "MASKED-out")
    assert not plan.inference_only
    shardconv.convert(root / "base", root / "sequence", tp=2, check=False, sequence_parallel=True)
    adapt(root / "sequence", save_trained(root, "IA3"), root / "IA3-sequence", check=False)
    (first, found, merged), (second, also, _) = run_processes(2, on_rank_with_masks, root)
    assert torch.equal(found, also)
    masks = {}
    for name, mask in first.items():
        is_row = any(f".{row}." in name for row in ROWS)
        masks[name] = torch.cat([mask, second[name]], -1) if is_row else mask
        assert torch.equal(mask, second[name]) == (not is_row), name

    def masked(name: str) -> Callable[..., Tensor]:
        return lambda module, args, output: args[0] * masks[name] * 2 if module.training else output

    model = peft.PeftModel.from_pretrained(unsharded(root), root / "MASKED-out", is_trainable=True)
    wanted = masked_step(model, masked)
    assert float((found[0] - wanted).abs().max()) < 1e-9
    plain = peft.PeftModel.from_pretrained(unsharded(root), root / "ADALORA-out").eval()
    with torch.no_grad():
        assert float((found[1] - plain(IDS).logits).abs().max()) < 1e-9
        scaled = peft.PeftModel.from_pretrained(unsharded(root), root / "IA3").eval()(IDS).logits
    assert all(float((logits - scaled).abs().max()) < 1e-9 for logits in merged)


def test_a_new_one_is_the_one_that_peft_makes(root: Path) -> None:
    for name in ("VBLORA", "UNILORA", "VERA"):  # of which peft keeps tensors beside the model
        adapt(root / "out", KINDS[name].make(), root / f"{name}-new", seed=3, check=False)
        torch.manual_seed(3)
        model = peft.get_peft_model(unsharded(root), KINDS[name].make())
        model.save_pretrained(root / f"{name}-peft")
        ours, theirs = (
            load_file(root / f"{name}-{side}" / "adapter_model.safetensors") for side in ("new", "peft")
        )
        assert ours.keys() == theirs.keys(), name
        assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items()), name


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.refused])
def test_others_are_refused(root: Path, name: str) -> None:
    kind = KINDS[name]
    with pytest.raises(
        ShardconvError, match=kind.refused if kind.is_new else "is initialized from the weights"
    ):
        adapt(root / "out", kind.make(), root / f"{name}-refused", check=False)
    if not kind.is_new:
        with pytest.raises(ShardconvError, match=kind.refused):
            adapt(root / "out", save_trained(root, name), root / f"{name}-refused", check=False)


@pytest.mark.parametrize("option", ["rank_dropout", "module_dropout"])
def test_masks_that_peft_draws_itself_are_not_trained(root: Path, option: str) -> None:
    config = peft.LoHaConfig(task_type="CAUSAL_LM", target_modules=ALL, r=4, **{option: 0.5})
    plan = adapt(root / "out", config, root / option, check=False)
    assert f"{option}=0.5 of LOHA draws random numbers for the full weights" in plan.inference_only
