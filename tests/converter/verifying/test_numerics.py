"""`verify --numerics` and `--against` on plans that the solver made: real weights, run and compared."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from quantized_checkpoints import dense_config, experts_config, save_quantized
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.errors import CheckpointError, CodeMismatchError, SolveError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import ModulePlan, Plan, parameter_plans
from shardconv_runtime.format.stored_layout import stored_plans
from shardconv_runtime.tensors import lazy_tensor
from small_models import save_random, small_config
from verify_cases import change_plan, change_tensors, set_element, shard

import shardconv
from shardconv import cli
from shardconv.converted.shards import read
from shardconv.reporting.progress import Silent
from shardconv.verifying.directories import numerics
from shardconv.verifying.directories.verify import DamagedError

LAYERS = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers with random weights, in float32."""
    path = tmp_path_factory.mktemp("source") / "llama"
    save_random(small_config(num_hidden_layers=LAYERS), transformers.LlamaForCausalLM, path)
    return path


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    """It, converted for four ranks, of which two share a key/value head."""
    shardconv.convert(source, source.parent / "out", 4)
    return source.parent / "out"


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    """One that may be changed."""
    return shutil.copytree(converted, tmp_path / "out")


def test_the_ranks_compute_the_same(converted: Path, source: Path) -> None:
    for against in (None, source):
        found = shardconv.verify(converted, against, numerics=True).numerics
        assert found is not None
        assert (found.dtype, found.tolerance) == ("float64", 1e-9)
        assert 0 <= found.worst < 1e-12


def test_the_command(converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", str(converted), "--numerics"]) == 0
    captured = capsys.readouterr()
    line = captured.out.splitlines()[1]
    assert line.startswith("the simulated ranks differ from the unsharded model by ")
    assert (
        "e-16 of its largest output at most (float64, 1e-09 allowed; input_ids [" in line or "e-15 of" in line
    )
    assert captured.err.splitlines()[1:] == ["tracing", "running the unsharded model and the ranks"]


CASES = {
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 101}, "tp"),
    "qwen2": ({**small_config().to_diff_dict(), "num_hidden_layers": 2}, "tp"),
    "mixtral": ({"num_local_experts": 4}, "tp"),
    "mixtral, whole experts": ({"num_local_experts": 4}, "ep"),
}


@pytest.mark.parametrize("case", CASES)
def test_models_of_other_kinds(tmp_path: Path, case: str) -> None:
    """Partial biases, transposed and stacked weights, tied ones; cast, on an uneven number of ranks."""
    values, experts = CASES[case]
    kind = case.partition(",")[0]
    if kind == "mixtral":
        values = {**small_config().to_diff_dict(), **values}
    values = {
        k: v for k, v in values.items() if k not in ("model_type", "architectures", "transformers_version")
    }
    config = transformers.CONFIG_MAPPING[kind](**values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 3, experts=experts, dtype="bfloat16")
    found = shardconv.verify(tmp_path / "out", tmp_path / "model", numerics=True)
    assert found.num_tensors == len(dict(model.named_parameters()))
    assert found.numerics is not None
    assert found.numerics.worst < 1e-12


BLOCK_SCALED = {
    "dense": (dense_config, transformers.Qwen3ForCausalLM),
    "experts": (experts_config, transformers.DeepseekV3ForCausalLM),
}


@pytest.mark.parametrize("kind", BLOCK_SCALED)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_block_scaled_values(tmp_path: Path, kind: str, dtype: str | None) -> None:
    """Kept with their factors, or multiplied with them."""
    config, cls = BLOCK_SCALED[kind]
    save_quantized(config(), cls, tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 2, dtype=dtype)
    found = shardconv.verify(tmp_path / "out", tmp_path / "model", numerics=True)
    plan = plan_json.read(tmp_path / "out" / "plan.json")
    assert (found.num_tensors, found.remarks) == (len(stored_plans(plan)), ())
    assert any(entry.block for entry in plan.parameters) == (dtype is None)
    assert found.numerics is not None
    assert found.numerics.worst < 1e-12
    if dtype is None:
        name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
        set_element(tmp_path / "out", shard(1), name, (0, 0))
        with pytest.raises(DamagedError) as caught:
            shardconv.verify(tmp_path / "out", tmp_path / "model")
        (problem,) = caught.value.problems
        assert problem.startswith(f"{name}: differs from {tmp_path / 'model'} first at ")
        set_element(tmp_path / "out", shard(1), name, (0, 0), float("nan"))
        with pytest.raises(SolveError, match="fails on its own weights"):
            shardconv.verify(tmp_path / "out", numerics=True)


def test_a_plain_model_instead_of_a_block_scaled_one(tmp_path: Path) -> None:
    save_quantized(dense_config(), transformers.Qwen3ForCausalLM, tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 2)
    with pytest.raises(DamagedError) as caught:
        shardconv.verify(tmp_path / "out", tmp_path / "model-plain")
    missing = [line for line in caught.value.problems if "_scale_inv: is not in" in line]
    plan = plan_json.read(tmp_path / "out" / "plan.json")
    assert len(missing) == len(stored_plans(plan)) - len(parameter_plans(plan)) > 0


def test_a_wrong_plan_is_found(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def without_sums(entry: ModulePlan) -> ModulePlan:
        if not entry.names[0].endswith("down_proj"):
            return entry
        return dataclasses.replace(entry, outputs=(), reduce_output=False)

    def change(plan: Plan) -> Plan:
        return dataclasses.replace(plan, modules=tuple(map(without_sums, plan.modules)))

    change_plan(out, change)
    shardconv.verify(out)
    with pytest.raises(CheckpointError, match=r"simulated ranks differ from the unsharded model by \d"):
        shardconv.verify(out, numerics=True)
    assert cli.run(["verify", str(out), "--numerics", "-q"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {out}: simulated ranks differ from")


def test_the_ranks_run_on_what_their_files_hold(out: Path) -> None:
    """Ranks 0 and 1 hold the same key/value head; the unsharded model gets one of the two."""
    name = "model.layers.1.self_attn.k_proj.weight"
    set_element(out, shard(1, 4), name, (0, 0), 3.0)
    shardconv.verify(out)
    with pytest.raises(CheckpointError, match="simulated ranks differ from the unsharded model"):
        shardconv.verify(out, numerics=True)


def test_what_is_common_is_read(out: Path, source: Path) -> None:
    """The unsharded model has the source's, whatever is in common/."""
    set_element(out, shard(None, 4), "model.norm.weight", (0,), 3.0)
    assert shardconv.verify(out, numerics=True).numerics is not None
    with pytest.raises(CheckpointError, match="1 problem") as caught:
        shardconv.verify(out, source, numerics=True)
    assert caught.value.remarks == ("the ranks were not run, since there are problems",)


def test_the_unsharded_model_gets_the_weights_that_it_is_given(converted: Path) -> None:
    opened = read(converted)
    spec = resolve(converted, need_weights=False)
    weights = opened.weights()
    name = "model.norm.weight"
    other = weights | {name: lazy_tensor.zeros("float32", weights[name].shape)}
    with pytest.raises(CheckpointError, match="simulated ranks differ"):
        numerics.run_numerics(opened, spec, other, Silent())


def test_weights_that_are_no_numbers(out: Path) -> None:
    for rank in range(4):
        change_tensors(
            out,
            shard(rank, 4),
            lambda tensors: {n: torch.full_like(t, torch.nan) for n, t in tensors.items()},
        )
    with pytest.raises(
        SolveError, match=r"its files are as they should be, but the unsharded model fails on its"
    ):
        shardconv.verify(out, numerics=True)


def test_code_that_is_another(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read."""
    change_plan(out, lambda p: dataclasses.replace(p, code=dataclasses.replace(p.code, fingerprint="0" * 64)))
    shardconv.verify(out)
    monkeypatch.setattr("shardconv.verifying.directories.intact.checksums", None)
    with pytest.raises(CodeMismatchError, match="shardconv replan OUT"):
        shardconv.verify(out, numerics=True)
