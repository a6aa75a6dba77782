"""``shardconv_runtime.save``: what a model was trained to is what merge, reshard and load find."""

from __future__ import annotations

import copy
import os
import resource
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal, save_encoder
from converted import llama_plan, random_llama, write_directory
from distributed import run_errors, run_processes
from quantized_checkpoints import dense_config, save_quantized
from shardconv_runtime.errors import LaunchError, PlanError, ShardconvError
from shardconv_runtime.files import manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import parameter_plans
from shardconv_runtime.saving import save
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import shardconv
from shardconv.arguments import Writing

IDS = [[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 3]]
TYPES = ("llama", "gpt2", "phi3", "bloom", "mixtral")


def slow_but(*types: str) -> Any:
    """All types; those that are not named in slow tests, since their bytes take the same ways."""
    marked = [t if t in types else pytest.param(t, marks=pytest.mark.slow) for t in TYPES]
    return pytest.mark.parametrize("model_type", marked)


"""Plain, tied with partial biases, fused, tied with one fused axis of heads, stacked experts."""


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of a type, converted for two ranks; its checkpoint lies beside it."""
    root = tmp_path_factory.mktemp("outs")

    def out(model_type: str) -> Path:
        path = root / model_type / "out"
        if not path.exists():
            save_causal(model_type, root / model_type / "model")
            shardconv.convert(root / model_type / "model", path, 2, check=False)
        return path

    return out


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def shards_of(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(path).items() if name.endswith(".safetensors")}


def beside(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


def grow(model: nn.Module) -> None:
    """Change every parameter, as training would; zeros of Partial ones stay."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def load_and_save(path: Path, out: Path, **options: Any) -> None:
    shardconv_runtime.save(shardconv_runtime.load(path), out, **options)


def load_dequantized_and_save(path: Path, out: Path) -> None:
    shardconv_runtime.save(shardconv_runtime.load(path, dequantize=True), out)


def load_grow_save(path: Path, out: Path) -> torch.Tensor:
    model = shardconv_runtime.load(path)
    grow(model)
    shardconv_runtime.save(model, out)
    return logits(model)


def load_logits(path: Path) -> torch.Tensor:
    return logits(shardconv_runtime.load(path))


def load_parameters(path: Path) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in shardconv_runtime.load(path, dequantize=True).named_parameters()}


def logits(model: Any) -> torch.Tensor:
    model.set_experts_implementation("eager")  # the others take no float64
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor(IDS)).logits
    return found


@slow_but("bloom", "mixtral")
def test_an_unchanged_model_gives_the_same_bytes(
    model_type: str, outs: Callable[[str], Path], tmp_path: Path
) -> None:
    out = outs(model_type)
    run_processes(2, load_and_save, out, tmp_path / "saved")
    want, found = files_of(out), files_of(tmp_path / "saved")
    assert want.keys() == found.keys()
    assert [name for name in want if want[name] != found[name]] == ["manifest.json"]
    assert manifest.read(tmp_path / "saved").files[0].checksum == manifest.read(out).files[0].checksum
    assert beside(tmp_path / "saved") == ["saved"]


@slow_but("gpt2", "phi3", "mixtral")
def test_a_changed_model_is_merged_and_resharded(
    model_type: str, outs: Callable[[str], Path], tmp_path: Path
) -> None:
    out, saved = outs(model_type), tmp_path / "saved"
    before = run_processes(2, load_grow_save, out, saved)
    shardconv.verify(saved)
    shardconv.merge(saved, tmp_path / "merged")
    source = transformers.AutoModelForCausalLM.from_pretrained(out.parent / "model", dtype=torch.float64)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    grow(source)
    want = dict(source.named_parameters())
    assert all(torch.equal(p, want[name]) for name, p in merged.named_parameters())
    found = run_processes(2, load_logits, saved)[0]
    torch.testing.assert_close(found, before[0], rtol=0, atol=1e-12 * float(found.abs().max()))
    shardconv.reshard(saved, tmp_path / "four", 4, check=False)
    shardconv.merge(tmp_path / "four", tmp_path / "merged-of-four")
    assert shards_of(tmp_path / "merged-of-four") == shards_of(tmp_path / "merged")


def test_several_files_of_a_rank(outs: Callable[[str], Path], tmp_path: Path) -> None:
    shardconv.convert(
        outs("llama").parent / "model",
        tmp_path / "out",
        2,
        writing=Writing(max_file_size=50_000),
        check=False,
    )
    run_processes(2, save_in_small_files, tmp_path / "out", tmp_path / "saved")
    assert len(shards_of(tmp_path / "out")) > 6
    assert shards_of(tmp_path / "saved") == shards_of(tmp_path / "out")


def save_in_small_files(path: Path, out: Path) -> None:
    load_and_save(path, out, max_file_size=50_000)


def test_ranks_that_hold_nothing_of_a_parameter(tmp_path: Path) -> None:
    """Three ranks share one row of the second table of an encoder, among other uneven shares."""
    save_encoder(tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 3, check=False)
    run_processes(3, load_and_save, tmp_path / "out", tmp_path / "saved")
    assert shards_of(tmp_path / "saved") == shards_of(tmp_path / "out")


class TestDtypes:
    def test_what_it_was_cast_to_is_stored(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        saved = tmp_path / "saved"
        same = run_processes(2, load_cast_save, outs("llama"), saved)
        plan = plan_json.read(saved / "plan.json")
        assert plan.model.dtype == "bfloat16"
        norms = {n for n, e in parameter_plans(plan).items() if e.dtype != "bfloat16"}
        assert norms == {"model.norm.weight"}
        assert parameter_plans(plan)["model.norm.weight"].dtype == "float32"
        shardconv.verify(saved)
        assert all(same)

    def test_it_can_be_resharded(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        run_processes(2, load_half_save, outs("llama"), tmp_path / "saved")
        shardconv.reshard(tmp_path / "saved", tmp_path / "one", 1, check=False)
        plan = plan_json.read(tmp_path / "one" / "plan.json")
        assert {entry.dtype for entry in plan.parameters} == {plan.model.dtype} == {"bfloat16"}

    def test_blocks_are_multiplied_out(self, tmp_path: Path) -> None:
        save_quantized(dense_config(), transformers.Qwen3ForCausalLM, tmp_path / "model")
        shardconv.convert(tmp_path / "model", tmp_path / "out", 2, check=False)
        run_processes(2, load_dequantized_and_save, tmp_path / "out", tmp_path / "saved")
        plan = plan_json.read(tmp_path / "saved" / "plan.json")
        assert not any(entry.packing for entry in plan.parameters)
        assert {entry.dtype for entry in plan.parameters} == {plan.model.dtype}
        assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
        shardconv.verify(tmp_path / "saved")
        both = [run_processes(2, load_parameters, tmp_path / name) for name in ("out", "saved")]
        for want, found in zip(*both, strict=True):
            assert found.keys() == want.keys()
            assert all(torch.equal(found[name], want[name]) for name in want)
        shardconv.merge(tmp_path / "saved", tmp_path / "merged")

    def test_ranks_with_other_dtypes_are_refused(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        errors = run_errors(2, load_cast_on_one_save, outs("llama"), tmp_path / "saved")
        assert all("different dtypes" in str(error) for error in errors)
        assert not (tmp_path / "saved").exists()


def load_cast_save(path: Path, out: Path) -> bool:
    model = shardconv_runtime.load(path, dtype="bfloat16")
    model.model.norm.float()
    shardconv_runtime.save(model, out)
    again = dict(shardconv_runtime.load(out).named_parameters())
    return all(torch.equal(p, again[n]) and p.dtype == again[n].dtype for n, p in model.named_parameters())


def load_half_save(path: Path, out: Path) -> None:
    shardconv_runtime.save(shardconv_runtime.load(path, dtype="bfloat16"), out)


def load_cast_on_one_save(path: Path, out: Path) -> None:
    model = shardconv_runtime.load(path)
    if os.environ["RANK"] == "1":
        model.model.norm.float()
    shardconv_runtime.save(model, out)


class TestDataParallel:
    """Four processes, two of them for each rank."""

    @pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp", "replicas"])
    def test_one_process_of_each_rank_writes(
        self, kind: str, outs: Callable[[str], Path], tmp_path: Path
    ) -> None:
        run_processes(4, save_data_parallel, outs("gpt2"), tmp_path / "saved", kind, start_group=True)
        assert shards_of(tmp_path / "saved") == shards_of(outs("gpt2"))
        shardconv.verify(tmp_path / "saved")

    def test_a_mesh_that_mixes_ranks_is_refused(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        errors = run_errors(2, save_data_parallel, outs("llama"), tmp_path / "s", "mixed", start_group=True)
        text = "are ranks of one model, but replicas for its data parallelism"
        assert all(text in str(error) for error in errors)

    def test_others_wait_for_a_slow_disk_outside_of_collectives(self, tmp_path: Path) -> None:
        model = random_llama()
        path = write_directory(tmp_path / "out", model, llama_plan(model.config, (1,)))
        run_processes(2, save_slowly, path, tmp_path / "saved", start_group=True)
        saved = load_parameters(tmp_path / "saved")
        assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())


def save_slowly(path: Path, out: Path) -> None:
    """A tensor takes longer to write than a collective may take."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = fully_shard(shardconv_runtime.load(path, mesh=mesh), mesh=mesh["dp"])
    mesh.get_group("dp").set_timeout(timedelta(seconds=1))
    to_bytes, begun = save._bytes, []

    def slow_bytes(tensor: torch.Tensor) -> Any:
        begun.append(tensor)
        time.sleep(2 if len(begun) == 2 else 0)
        return to_bytes(tensor)

    save._bytes = slow_bytes
    shardconv_runtime.save(model, out)


def save_data_parallel(path: Path, out: Path, kind: str) -> None:
    from torch.distributed.fsdp import fully_shard

    if kind == "mixed":
        model: Any = shardconv_runtime.load(path)
        shardconv_runtime.save(fully_shard(model, mesh=init_device_mesh("cpu", (2,))), out)
        return
    shape, names = {"hsdp": ((2, 1, 2), ("copy", "dp", "tp"))}.get(kind, ((2, 2), ("dp", "tp")))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = shardconv_runtime.load(path, process_group=mesh["tp"].get_group())
    if kind in ("fsdp", "hsdp"):
        fully_shard(model.transformer.h[0], mesh=mesh[names[:-1]])
        model = fully_shard(model, mesh=mesh[names[:-1]])
        logits(model)  # leaves the parameters of the model itself unsharded
    if kind == "ddp":
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    replicas = mesh["dp"].get_group() if kind == "replicas" else None
    shardconv_runtime.save(model, out, replicas=replicas)


class TestErrors:
    @pytest.mark.parametrize("failing", [0, 1])
    def test_a_full_disk(self, failing: int, outs: Callable[[str], Path], tmp_path: Path) -> None:
        """All ranks raise, and nothing is left."""
        errors = run_errors(2, save_with_little_room, outs("llama"), tmp_path / "saved", failing)
        assert "cannot be written: File too large" in str(errors[failing])
        assert isinstance(errors[1 - failing], LaunchError)
        assert f"rank {failing}: " in str(errors[1 - failing])
        assert beside(tmp_path / "saved") == []

    def test_a_full_disk_among_shards_of_one_rank(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        """A process that cannot write does not leave those alone that it shares its DTensors with."""
        errors = run_errors(4, save_shards_with_little_room, outs("gpt2"), tmp_path / "s", start_group=True)
        assert all("cannot be written: File too large" in str(error) for error in errors)

    def test_a_rank_that_ends(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        errors = run_errors(2, end_while_saving, outs("llama"), tmp_path / "saved")
        assert isinstance(errors[1], ChildProcessError)
        assert "another rank did not answer within 3600 s or ended" in str(errors[0])
        assert beside(tmp_path / "saved") == []

    def test_a_place_that_one_rank_does_not_see(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        errors = run_errors(2, save_unseen, outs("llama"), tmp_path / "saved")
        assert all("use a file system that all ranks share" in str(error) for error in errors)
        assert beside(tmp_path / "saved") == []

    def test_what_was_there_outlives_a_failure(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        run_processes(2, load_and_save, outs("llama"), tmp_path / "saved")
        want = files_of(tmp_path / "saved")
        for failing in (0, 1):
            assert all(run_errors(2, save_with_little_room, outs("llama"), tmp_path / "saved", failing))
            assert files_of(tmp_path / "saved") == want
        assert beside(tmp_path / "saved") == ["saved"]

    def test_out_is_there(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        saved = tmp_path / "saved"
        run_processes(2, load_and_save, outs("llama"), saved)
        errors = run_errors(2, load_and_save, outs("llama"), saved)
        assert all("is not empty; name another directory, or pass overwrite=True" in str(e) for e in errors)
        assert isinstance(errors[0], ShardconvError)
        run_processes(2, save_over, outs("gpt2"), saved)
        assert shards_of(saved) == shards_of(outs("gpt2"))
        (saved / "mine.txt").touch()
        errors = run_errors(2, save_over, outs("llama"), saved)
        assert all("holds mine.txt, which shardconv did not write" in str(error) for error in errors)
        assert shards_of(saved) == shards_of(outs("gpt2"))

    @pytest.mark.parametrize("name", ["", "inner/saved", ".."])
    def test_out_and_the_source_apart(self, name: str, outs: Callable[[str], Path]) -> None:
        out = outs("llama")
        want = files_of(out.parent)
        errors = run_errors(2, save_over, out, out / name)
        assert all("which was loaded, one contains the other; name another" in str(error) for error in errors)
        assert files_of(out.parent) == want

    def test_a_source_that_changed(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        errors = run_errors(2, change_source_and_save, outs("llama"), tmp_path)
        assert all("config.json was changed since it was written" in str(error) for error in errors)
        assert not (tmp_path / "saved").exists()

    def test_a_model_that_was_not_loaded(self, tmp_path: Path) -> None:
        with pytest.raises(PlanError, match="was not loaded by shardconv_runtime"):
            shardconv_runtime.save(nn.Linear(2, 2), tmp_path / "saved")

    def test_a_model_of_other_parameters(self, outs: Callable[[str], Path], tmp_path: Path) -> None:
        for change, text in (
            ("add", "1 tensor of the model is missing from the plan: model.extra"),
            ("resize", "model.norm.weight has shape \\(3,\\)"),
            ("untie", "lm_head.weight and transformer.wte.weight were tied when"),
        ):
            path = outs("gpt2" if change == "untie" else "llama")
            shardconv.reshard(path, tmp_path / change, 1, check=False)
            model = shardconv_runtime.load(tmp_path / change)
            CHANGES[change](model)
            with pytest.raises(PlanError, match=text):
                shardconv_runtime.save(model, tmp_path / "saved")


def add(model: Any) -> None:
    model.model.extra = nn.Parameter(torch.zeros(2))


def resize(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(torch.zeros(3))


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())


CHANGES = {"add": add, "resize": resize, "untie": untie}


def save_over(path: Path, out: Path) -> None:
    load_and_save(path, out, overwrite=True)


def save_with_little_room(path: Path, out: Path, failing: int) -> None:
    model = shardconv_runtime.load(path)
    if int(os.environ["RANK"]) == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    shardconv_runtime.save(model, out, overwrite=True)


def end_while_saving(path: Path, out: Path) -> None:
    model = shardconv_runtime.load(path)
    if os.environ["RANK"] == "1":
        save._write = lambda *_: os._exit(1)  # type: ignore[assignment]
    shardconv_runtime.save(model, out)


def save_unseen(path: Path, out: Path) -> None:
    model = shardconv_runtime.load(path)
    if os.environ["RANK"] == "1":
        Path.is_dir = lambda self: ".partial-" not in self.name  # type: ignore[assignment, method-assign, misc]
    shardconv_runtime.save(model, out)


def save_shards_with_little_room(path: Path, out: Path) -> None:
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    save_data_parallel(path, out, "fsdp")


def change_source_and_save(path: Path, root: Path) -> None:
    copy = root / os.environ["RANK"]
    shutil.copytree(path, copy)
    model = shardconv_runtime.load(copy)
    (copy / "config.json").write_text("{}")
    shardconv_runtime.save(model, root / "saved")


def test_wrappers_of_one_process_alone(outs: Callable[[str], Path], tmp_path: Path) -> None:
    """The model copied and compiled, its layers compiled and checkpointed."""
    shardconv.reshard(outs("llama"), tmp_path / "one", 1, check=False)
    model = copy.deepcopy(shardconv_runtime.load(tmp_path / "one"))
    model.model.layers[0] = torch.compile(model.model.layers[0])
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    compiled: Any = torch.compile(model)
    shardconv_runtime.save(compiled, tmp_path / "saved")
    assert shards_of(tmp_path / "saved") == shards_of(tmp_path / "one")
