"""Pipeline stages in real processes: the logits and tokens of the unsharded model, on every rank."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import HIDDEN, save, save_causal
from distributed import run_errors, run_processes
from shardconv_runtime import CheckpointError, LaunchError, PlanError, ShardconvError
from shardconv_runtime.errors import DamagedError
from shardconv_runtime.files import manifest
from shardconv_runtime.files.small_files import stage_directory
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.header import read_header
from shardconv_runtime.format.plan import parameter_plans
from shardconv_runtime.format.stage_names import held_names
from torch import Tensor

import shardconv
from shardconv import cli
from shardconv.arguments import Writing
from shardconv.reporting.plan_lines import stage_bytes

PP = 2
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {"max_new_tokens": 8, "do_sample": True, "top_k": 0},
    "beams": {**GREEDY, "num_beams": 3},
    "static cache": {**GREEDY, "cache_implementation": "static", "disable_compile": True},
    "with scores": {**GREEDY, "output_scores": True, "return_dict_in_generate": True},
}


def prompts() -> dict[str, Tensor]:
    """Two prompts, the second padded on the left: ``[2, 7]``."""
    ids = torch.tensor([[11, 245, 3, 77, 130, 9, 201], [0, 0, 0, 88, 5, 254, 19]])
    return {"input_ids": ids, "attention_mask": (torch.arange(7) >= torch.tensor([[0], [3]])).long()}


def results(model: Any, ways: list[str]) -> dict[str, Any]:
    """Logits of a call, and what each way of generating gives."""
    found: dict[str, Any] = {}
    with torch.inference_mode():
        if not model.config.is_encoder_decoder:
            found["logits"] = model(**prompts()).logits
        for way in ways:
            torch.manual_seed(7)
            tokens = model.generate(**prompts(), **WAYS[way])
            found[way] = tokens if isinstance(tokens, Tensor) else [tokens.sequences, *tokens.scores]
    return found


def of_rank(source: str, plan: str | None, ways: list[str]) -> dict[str, Any]:
    """The results of a loaded model, and what this process holds and sends."""
    model = shardconv_runtime.load(source, plan=plan)
    found = results(model, ways)
    link = model._forward_hooks  # the link is reached through the hook that shares results
    (sharer,) = [hook for hook in link.values() if hasattr(hook, "link")]
    found["held"] = {name: p.nbytes for name, p in model.named_parameters()}
    sharer.link.transport.sent_bytes = 0
    with torch.inference_mode():
        model(**prompts())
    found["sent"] = sharer.link.transport.sent_bytes
    return found


def planned(source: Path, tp: int, **options: Any) -> Path:
    """A plan in two stages beside a model."""
    path = source / "staged.json"
    plan_json.write(shardconv.plan(source, tp, pp=PP, dtype="float32", **options), path)
    return path


def require_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    """Tokens are the same, logits equal but for rounding."""
    for name, value in want.items():
        if name == "logits":
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)
        elif isinstance(value, list):
            for x, y in zip(found[name], value, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("model_type", "tp"), [("llama", 2), ("gpt2", 1), ("mixtral", 1)])
def test_every_rank_gets_logits_and_tokens(model_type: str, tp: int, tmp_path: Path) -> None:
    source = save_causal(model_type, tmp_path / model_type)
    plan = planned(source, tp)
    whole = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    want = results(whole.eval(), list(WAYS))
    for found in run_processes(PP * tp, of_rank, str(source), str(plan), list(WAYS)):
        require_same(found, want)


def test_processes_hold_and_send_what_the_plan_says(tmp_path: Path) -> None:
    source = save_causal("llama", tmp_path / "llama")
    plan = planned(source, 1)
    first, last = run_processes(PP, of_rank, str(source), str(plan), [])
    names = parameter_plans(plan_json.read(plan)).keys()
    assert first["held"].keys() | last["held"].keys() == names
    assert not first["held"].keys() & last["held"].keys()
    assert first["sent"] == 2 * 7 * HIDDEN * 4
    assert last["sent"] == 0


def test_a_model_with_an_encoder_is_cut(tmp_path: Path) -> None:
    config = transformers.BartConfig(
        vocab_size=256,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        pad_token_id=0,
        forced_eos_token_id=None,
    )
    model = transformers.BartForConditionalGeneration._from_config(config, dtype=torch.float64)
    source = save(model, tmp_path / "bart")
    plan = planned(source, 1)
    whole = transformers.BartForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    want = results(whole.eval(), ["greedy", "beams"])
    for found in run_processes(PP, generated, str(source), str(plan), ["greedy", "beams"]):
        require_same(found, want)


def generated(source: str, plan: str, ways: list[str]) -> dict[str, Any]:
    """What a loaded model generates."""
    return results(shardconv_runtime.load(source, plan=plan), ways)


def cast_logits(source: str, plan: str) -> Tensor:
    """The logits of a model that is loaded in another dtype than it was planned for, and of a copy of it."""
    model = shardconv_runtime.load(source, plan=plan, dtype=torch.float64)
    with torch.inference_mode():
        logits: Tensor = model(**prompts()).logits
        copied = copy.deepcopy(model)(**prompts()).logits
        torch.testing.assert_close(copied, logits, rtol=1e-12, atol=1e-12)  # weights lie elsewhere in memory
    return logits


def test_parameters_are_cast_on_every_stage(tmp_path: Path) -> None:
    source = save_causal("llama", tmp_path / "llama")
    whole = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    with torch.inference_mode():
        want = whole.eval()(**prompts()).logits
    for logits in run_processes(PP, cast_logits, str(source), str(planned(source, 1, check=False))):
        assert logits.dtype == torch.float64
        torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-6)


def loaded_with(source: str, plan: str | None, options: dict[str, Any]) -> None:
    """Load a model."""
    shardconv_runtime.load(source, plan=plan, **options)


def test_what_does_not_know_stages_is_refused(tmp_path: Path) -> None:
    source = save_causal("llama", tmp_path / "llama")
    options = {"training": True, "compile": True}
    for error in run_errors(PP, loaded_with, str(source), str(planned(source, 1, check=False)), options):
        assert isinstance(error, PlanError)
        assert "compile=True with training=True does not know stages yet" in str(error)


def shards_of_logits(source: str, plan: str, options: dict[str, Any]) -> tuple[Tensor, str]:
    """What a model returns that keeps a rank's shard, and what it says when it is to generate."""
    model = shardconv_runtime.load(source, plan=plan, gather_logits=False, **options)
    with torch.no_grad():
        logits: Tensor = model(**prompts()).logits
    with pytest.raises(ShardconvError) as error:
        model.generate(**prompts())
    return logits, str(error.value)


@pytest.mark.parametrize("options", [{}, {"training": True, "sequence_parallel": True}], ids=str)
def test_every_stage_gets_its_ranks_shard_of_the_logits(options: dict[str, Any], tmp_path: Path) -> None:
    source = save_causal("llama", tmp_path / "llama")
    whole = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        want = whole.eval()(**prompts()).logits
    plan = planned(source, 2, sequence_parallel=bool(options), check=bool(options))
    found = run_processes(2 * PP, shards_of_logits, str(source), str(plan), options)
    for rank, (logits, error) in enumerate(found):
        shard = want.chunk(2, -1)[rank % 2]
        torch.testing.assert_close(logits, shard, rtol=1e-4, atol=1e-4)
        assert "generate needs full logits" in error


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    source = save_causal("llama", tmp_path / "llama")
    plan = planned(source, 2, check=False)
    with pytest.raises(LaunchError, match=r"tp=2 and 2 stages.*--nproc-per-node 4"):
        shardconv_runtime.load(source, plan=plan)


def parts_of(source: str, plan: str) -> list[str]:
    """The errors of calls that some stage cannot answer."""
    model = shardconv_runtime.load(source, plan=plan)
    stage = int(os.environ["RANK"])
    calls = [
        lambda: model.model(**prompts()),
        lambda: model(**prompts(), output_hidden_states=True),
        lambda: model.generate(**prompts(), output_hidden_states=True, return_dict_in_generate=True),
        *([lambda: model.get_input_embeddings()(prompts()["input_ids"])] if stage else []),
    ]
    found = []
    for call in calls:
        try:
            call()
        except ShardconvError as error:
            found.append(str(error))
    with torch.inference_mode():
        model(**prompts())  # a refused call leaves nothing behind
    return found


def test_calls_that_a_stage_cannot_answer_are_refused(tmp_path: Path) -> None:
    source = save_causal("llama", tmp_path / "llama")
    first, last = run_processes(PP, parts_of, str(source), str(planned(source, 1, check=False)))
    expected = [
        "model has layers on several stages",
        "output_hidden_states asks for results of every layer",
        "output_hidden_states asks for results of every layer",
    ]
    for errors, own in ((first, expected), (last, [*expected, "is on another stage"])):
        assert len(errors) == len(own)
        assert all(text in error for text, error in zip(own, errors, strict=True))


# Converted directories -------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "tp"), [("qwen3", 2), ("gpt2", 1)])
def test_each_stage_is_a_directory(model_type: str, tp: int, tmp_path: Path) -> None:
    source, out = save_causal(model_type, tmp_path / model_type), tmp_path / "out"
    plan = shardconv.convert(source, out, tp, pp=PP, dtype="float32", check=False)
    whole = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    want = results(whole.eval(), ["greedy"])
    for rank, found in enumerate(run_processes(PP * tp, of_rank, str(out), None, ["greedy"])):
        require_same(found, want)
        assert sum(found["held"].values()) == stage_bytes(plan)[rank // tp][rank % tp]
    for stage in range(PP):
        directory = out / stage_directory(stage, PP)
        held = {name for file in directory.rglob("*.safetensors") for name in read_header(file)[1]}
        expected = held_names(plan, stage, parameter_plans(plan).keys())
        assert held == set(expected.values())
        assert cli.run(["verify", str(directory)]) == 0
        assert cli.run(["inspect", str(directory)]) == 0


def test_a_conversion_of_stages_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = save_causal("llama", tmp_path / "llama"), tmp_path / "out"
    options: dict[str, Any] = {"pp": PP, "check": False}
    shardconv.convert(source, out, 1, **options)
    first, last = (out / stage_directory(stage, PP) for stage in range(PP))
    written = (first / "manifest.json").stat().st_mtime_ns
    shutil.rmtree(last)
    shardconv.convert(source, out, 1, **options)
    assert (first / "manifest.json").stat().st_mtime_ns == written
    assert (last / "manifest.json").is_file()
    capsys.readouterr()
    assert cli.run(["convert", str(source), str(out), "--tp", "1", "--pp", "2", "--no-check"]) == 0
    assert capsys.readouterr().out == f"{out}: already complete\n"
    assert (first / "manifest.json").stat().st_mtime_ns == written
    shutil.rmtree(last)
    with pytest.raises(ShardconvError, match="of another conversion"):
        shardconv.convert(source, out, 1, **options, dtype="float32")
    with pytest.raises(ShardconvError, match="holds stage-00000-of-00002, which is none of 3 stages"):
        shardconv.convert(source, out, 1, pp=3)


def test_commands_that_do_not_know_stages_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = save_causal("llama", tmp_path / "llama"), tmp_path / "out"
    shardconv.convert(source, out, 1, pp=PP, check=False)
    stage = out / stage_directory(0, PP)
    for command in (
        ["export", stage, tmp_path / "merged", "--format", "hf"],
        ["reshard", stage, tmp_path / "resharded", "--tp", 2],
        ["verify", stage, "--against", source],
    ):
        assert cli.run([str(part) for part in command]) != 0
        assert "stage of 2" in capsys.readouterr().err
    assert cli.run(["inspect", str(out), "--html", f"{out}-report.html"]) == 0
    assert (tmp_path / "out-report.html").is_file()


def test_all_stages_are_inspected_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = save_causal("gpt2", tmp_path / "gpt2"), tmp_path / "out"
    shardconv.convert(source, out, 2, pp=PP, check=False)
    assert cli.run(["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "STAGES  2, with 2 ranks each" in shown
    assert "\nstage-00001-of-00002\nFILES" in shown
    assert shardconv.verify(out, against=source, numerics=True).num_tensors == 28
    for stage in range(PP):
        found = manifest.read(out / stage_directory(stage, PP)).numerics
        assert found is not None
        assert found.worst < 1e-9
    damaged = max((out / stage_directory(1, PP)).rglob("*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(DamagedError) as error:
        shardconv.verify(out, against=source)
    first, second = error.value.problems
    assert first.startswith("stage-00001-of-00002: rank-00001-of-00002/")
    assert second.startswith("transformer.h.1.mlp.c_proj.bias: differs from")
    shutil.rmtree(out / stage_directory(0, PP))
    with pytest.raises(CheckpointError, match="stage-00000-of-00002"):
        shardconv.verify(out)


def test_stages_are_planned_again(tmp_path: Path) -> None:
    source, out = save_causal("qwen3", tmp_path / "qwen3"), tmp_path / "out"
    shardconv.convert(source, out, 2, pp=PP, check=False, stages="0-0,1-1")
    stages = [out / stage_directory(stage, PP) for stage in range(PP)]
    before = [(stage / "plan.json").read_bytes() for stage in stages]
    for stage in stages:
        plan = (stage / "plan.json").read_text()
        (stage / "plan.json").write_text(plan.replace(transformers.__version__, "5.0.0"))
    with pytest.raises(CheckpointError):
        shardconv.verify(out)
    assert cli.run(["reshard", str(out), "--in-place", "--no-check"]) == 0
    assert [(stage / "plan.json").read_bytes() for stage in stages] == before
    shardconv.verify(out)
    (stages[1] / "plan.json").write_text((stages[1] / "plan.json").read_text().replace("torch", "toren"))
    assert cli.run(["reshard", str(stages[1]), "--in-place", "--no-check"]) != 0
    (stages[1] / "plan.json").write_bytes(before[1])
    assert cli.run(["reshard", str(stages[1]), "--in-place", "--no-check"]) == 0
    assert (stages[1] / "plan.json").read_bytes() == before[1]


def test_some_ranks_of_stages_are_written(tmp_path: Path) -> None:
    source, out = save_causal("llama", tmp_path / "llama"), tmp_path / "out"
    first, last = (out / stage_directory(stage, PP) for stage in range(PP))
    for ranks in ("2-3", [0], "1"):
        shardconv.convert(source, out, 2, pp=PP, check=False, writing=Writing(ranks=ranks))
        assert (last / "manifest.json").is_file()
        assert (first / "manifest.json").is_file() == (ranks == "1")
    shardconv.convert(source, tmp_path / "whole", 2, pp=PP, check=False)
    require_equal_files(out, tmp_path / "whole")
    with pytest.raises(ShardconvError, match="not ranks of 4"):
        shardconv.convert(source, tmp_path / "x", 2, pp=PP, writing=Writing(ranks="0-4"))


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2"])
def test_stages_are_merged_and_resharded(model_type: str, tmp_path: Path) -> None:
    source, out = save_causal(model_type, tmp_path / model_type), tmp_path / "out"
    shardconv.convert(source, out, 2, pp=PP, check=False)
    shardconv.merge(out, tmp_path / "merged")
    want = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert want.keys() == merged.keys()
    assert all(torch.equal(want[name], merged[name]) for name in want)
    shardconv.reshard(out, tmp_path / "plain", 3, check=False)
    shardconv.convert(source, tmp_path / "converted", 3, check=False)
    require_equal_files(tmp_path / "plain", tmp_path / "converted")
    shardconv.reshard(tmp_path / "plain", tmp_path / "again", 2, stages=PP, check=False)
    require_equal_files(tmp_path / "again", out)


def require_equal_files(one: Path, other: Path) -> None:
    """Shards of the same names have the same bytes."""
    shards = sorted(file.relative_to(other) for file in other.rglob("*.safetensors"))
    assert sorted(file.relative_to(one) for file in one.rglob("*.safetensors")) == shards
    assert all((one / shard).read_bytes() == (other / shard).read_bytes() for shard in shards)


def test_the_directory_of_another_stage_is_refused(tmp_path: Path) -> None:
    source, out = save_causal("llama", tmp_path / "llama"), tmp_path / "out"
    shardconv.convert(source, out, 1, pp=PP, check=False)
    for error in run_errors(PP, loaded_with, str(out / stage_directory(0, PP)), None, {}):
        assert isinstance(error, ShardconvError)
        assert "this rank is on stage 1" in str(error)
