"""`verify --numerics` and `--against` on plans that the solver made: real weights, run and compared."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from quantized_checkpoints import dense_config, experts_config, save_quantized
from shardconv_runtime.checkpoint import lazy_tensor
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.errors import (
    CheckpointError,
    CodeMismatchError,
    DamagedError,
    ShardconvError,
    SolveError,
)
from shardconv_runtime.files import manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.measured import Numerics
from shardconv_runtime.format.plan import ModulePlan, Plan, global_shape, parameter_plans
from shardconv_runtime.format.stored_layout import stored_plans
from small_models import save_random, small_config
from verify_cases import change_plan, change_tensors, set_element, shard

import shardconv
from shardconv import cli
from shardconv.arguments import Writing
from shardconv.converted import numerics
from shardconv.converted.derived_directory import identity
from shardconv.converted.shards import read
from shardconv.reporting import report
from shardconv.reporting.progress import Silent
from shardconv.simulation.model_runs import PRECISIONS
from shardconv.tracing.tape import Mark, Op, Ref, Tape, TensorInfo

LAYERS = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights, in float32."""
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
    """One that may be changed, and was not measured."""
    shutil.copytree(converted, tmp_path / "out")
    record(tmp_path / "out", None)
    return tmp_path / "out"


MEASURED = Numerics(2e-15, 1e-9, "float64", {"input_ids": (3, 24)})


def record(out: Path, found: Numerics | None = MEASURED) -> None:
    """Write a result to the manifest."""
    manifest.write(dataclasses.replace(manifest.read(out), numerics=found), out)


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
        "e-16 of its largest output (float64, tolerance 1e-09; attention_mask [" in line or "e-15 of" in line
    )
    assert captured.err.splitlines()[1:] == ["tracing", "running all ranks in float64: 0.1 MB"]


CASES = {
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 101}, "tp"),
    "qwen2": ({**small_config().to_diff_dict(), "num_hidden_layers": 2}, "tp"),
    "mixtral": ({"num_local_experts": 4}, "tp"),
    "mixtral, whole experts": ({"num_local_experts": 4}, "ep"),
    "t5": ({"d_model": 24, "d_kv": 4, "d_ff": 40, "num_layers": 1, "num_heads": 3, "vocab_size": 31}, "tp"),
    "lfm2": (
        {
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "vocab_size": 31,
            "layer_types": ["conv", "full_attention"],
        },
        "tp",
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        "gpt2",
        "mixtral, whole experts",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("qwen2", "mixtral")),
    ],
)
def test_models_of_other_kinds(tmp_path: Path, case: str) -> None:
    """Partial biases, stacked weights, tied ones, an encoder, convolutions; cast, on 3 ranks."""
    values, experts = CASES[case]
    kind = case.partition(",")[0]
    if kind == "mixtral":
        values = {**small_config().to_diff_dict(), **values}
    values = {
        k: v for k, v in values.items() if k not in ("model_type", "architectures", "transformers_version")
    }
    config = transformers.CONFIG_MAPPING[kind](**values)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float64)
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


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("dense", None),
        ("experts", "bfloat16"),
        pytest.param("dense", "bfloat16", marks=pytest.mark.slow),
        pytest.param("experts", None, marks=pytest.mark.slow),
    ],
)
def test_block_scaled_values(tmp_path: Path, kind: str, dtype: str | None) -> None:
    """Kept with their factors, or multiplied with them."""
    config, cls = BLOCK_SCALED[kind]
    save_quantized(config(), cls, tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 2, dtype=dtype)
    found = shardconv.verify(tmp_path / "out", tmp_path / "model", numerics=True)
    plan = plan_json.read(tmp_path / "out" / "plan.json")
    assert (found.num_tensors, found.remarks) == (len(stored_plans(plan)), ())
    assert any(entry.packing for entry in plan.parameters) == (dtype is None)
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
        with pytest.raises(CheckpointError, match=r"\*_scale_inv has values that are not finite"):
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
    """Terms of a sum are what a module may give; a layer that adds its input to them is not right."""

    def without_sums(entry: ModulePlan) -> ModulePlan:
        if not entry.names[0].endswith("down_proj"):
            return entry
        return dataclasses.replace(entry, outputs=())

    def change(plan: Plan) -> Plan:
        return dataclasses.replace(plan, modules=tuple(map(without_sums, plan.modules)))

    change_plan(out, change)
    shardconv.verify(out)
    found = (
        r"simulated ranks differ from the unsharded model by \d.*; it begins in model.layers.0: its output "
    )
    with pytest.raises(CheckpointError, match=found + r"differs by \d\.\de[+-]\d\d; compare"):
        shardconv.verify(out, numerics=True)
    assert cli.run(["verify", str(out), "--numerics", "-q"]) == 3
    assert capsys.readouterr().err.startswith(f"error: {out}: simulated ranks differ from")


def test_the_ranks_run_on_what_their_files_hold(out: Path) -> None:
    """Ranks 0 and 1 hold the same key/value head; the unsharded model gets one of the two."""
    name = "model.layers.1.self_attn.k_proj.weight"
    set_element(out, shard(1, 4), name, (0, 0), 3.0)
    shardconv.verify(out)
    with pytest.raises(
        CheckpointError, match=r"differ .*; it begins in model.layers.1.self_attn.k_proj: its"
    ):
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
    with pytest.raises(
        CheckpointError, match=r"simulated ranks differ .*; it begins in model.norm: its output"
    ):
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
    monkeypatch.setattr("shardconv.converted.file_checks.checksums", None)
    with pytest.raises(CodeMismatchError, match="shardconv reshard SRC --in-place"):
        shardconv.verify(out, numerics=True)


class TestMemory:
    """Where there is no room for float64, there may be some for float32; the result says so."""

    def verified(
        self, converted: Path, monkeypatch: pytest.MonkeyPatch, elements: int, item_bytes: int
    ) -> Numerics | None:
        monkeypatch.setattr(numerics, "_activation_bytes", lambda tape, precision: 0)
        monkeypatch.setattr(numerics, "MEMORY_SHARE", 1.0)
        monkeypatch.setattr(numerics, "available_bytes", lambda: numerics.COPIES * elements * item_bytes)
        return shardconv.verify(converted, numerics=True).numerics

    def test_the_largest_weight_decides(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = plan_json.read(out / "plan.json")
        largest = max(math.prod(global_shape(entry)) for entry in plan.parameters)
        found = self.verified(out, monkeypatch, largest, 8)
        assert found is not None
        assert (found.dtype, found.tolerance) == ("float64", 1e-9)
        found = self.verified(out, monkeypatch, largest, 4)
        assert found is not None
        assert (found.dtype, found.tolerance) == ("float32", 1e-4)
        assert 1e-12 < found.worst < 1e-5
        assert manifest.read(out).numerics == found
        with pytest.raises(
            ShardconvError,
            match=r"its files are as they should be, but to run it in float64 takes some .* of memory, for "
            r"model.embed_tokens.weight and for activations, and .* may be taken here; leave out --numerics",
        ):
            self.verified(out, monkeypatch, largest - 1, 4)

    def test_a_tensor_that_an_operator_takes(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Found when it is read: a stack whose matrices would fit."""
        monkeypatch.setattr(numerics, "largest_read", lambda tensor, dtype: 8)
        with pytest.raises(
            ShardconvError, match=r"an operator takes 25,856 bytes of model.embed_tokens.weight at"
        ):
            self.verified(out, monkeypatch, 1000, 8)

    def test_what_is_computed_from_weights_is_no_activation(self) -> None:
        tape = Tape(
            [
                TensorInfo((10, 10), torch.float32, "parameter"),
                TensorInfo((10, 10), torch.float32, "value"),
                TensorInfo((10, 10), torch.float32, "value"),
                TensorInfo((3, 10), torch.float32, "input"),
                TensorInfo((3, 10), torch.float32, "value"),
            ],
            [
                Mark(0, ("input.0",), 0, 1),
                Op("t", (Ref(1),), {}, (1,), (2,), 0),
                Op("mm", (Ref(3), Ref(2)), {}, (3, 2), (4,), 0),
            ],
        )
        size = numerics._activation_bytes(tape, PRECISIONS[1])
        assert size == 30 * 4 * numerics.LIVE_ACTIVATIONS


class TestTheRecord:
    """The manifest keeps the result, for the files that it was measured on."""

    def test_it_is_shown(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.run(["inspect", str(out)]) == 0
        assert "numerics       not measured; to compare all ranks" in capsys.readouterr().out
        before = manifest.read(out)
        found = shardconv.verify(out, numerics=True).numerics
        after = manifest.read(out)
        assert after.numerics == found is not None
        assert dataclasses.replace(after, numerics=None, sha256="") == dataclasses.replace(before, sha256="")
        assert shardconv.verify(out).remarks == ()
        assert cli.run(["inspect", str(out)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"numerics {report.numerics_text(found)}" in text
        assert cli.run(["inspect", str(out), "--html", str(out.parent / "page.html")]) == 0
        page = (out.parent / "page.html").read_text()
        assert report.numerics_text(found) in page

    def test_an_earlier_result_does_not_outlive_a_difference(self, out: Path) -> None:
        record(out)
        set_element(out, shard(1, 4), "model.layers.1.self_attn.k_proj.weight", (0, 0), 3.0)
        assert manifest.read(out).numerics is not None, "the test keeps it; no command would"
        with pytest.raises(CheckpointError, match="simulated ranks differ"):
            shardconv.verify(out, numerics=True)
        assert manifest.read(out).numerics is None

    def test_other_directories_have_none(self, out: Path, tmp_path: Path) -> None:
        """Merged, resharded and converted again, the weights are in other files."""
        record(out)
        shardconv.reshard(out, tmp_path / "two", 2, check=False)
        assert manifest.read(tmp_path / "two").numerics is None
        shardconv.merge(out, tmp_path / "merged")
        shardconv.convert(tmp_path / "merged", out, 4, check=False, writing=Writing(overwrite=True))
        assert manifest.read(out).numerics is None

    def test_another_plan_has_none(self, out: Path) -> None:
        change_plan(out, lambda plan: dataclasses.replace(plan, notes=("another",)))
        record(out)
        shardconv.replan(out, check=False)
        assert manifest.read(out).numerics is None
        record(out)
        shardconv.replan(out, check=False)
        assert manifest.read(out).numerics == MEASURED, "the same plan"

    def test_a_directory_that_is_verified_meanwhile_is_the_same(self, out: Path) -> None:
        """An interrupted conversion of it continues."""
        before = identity(read(out))
        assert before == {"manifest": manifest.sha256_of(out / "manifest.json")}
        record(out)
        assert identity(read(out)) == before

    def test_where_it_cannot_be_written(
        self, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (out / "manifest.json").rename(out / "blob")
        (out / "manifest.json").symlink_to("blob")
        remarks = shardconv.verify(out, numerics=True).remarks
        assert (
            "the result was not written to manifest.json, which is a link (to a cache of the Hub?)" in remarks
        )
        (out / "blob").replace(out / "manifest.json")

        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("shardconv.converted.replaced_documents.write_text", refuse)
        found = shardconv.verify(out, numerics=True)
        assert found.numerics is not None
        assert found.remarks == ("the result was not written to manifest.json (Permission denied)",)
        assert manifest.read(out).numerics is None
