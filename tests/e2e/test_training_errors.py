"""Wrong use of what trains: each process raises, and says what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
from distributed import run_processes
from shardconv_runtime import CheckpointError, DataParallel
from shardconv_runtime.files import manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.loading import data_sharding, rank_files
from shardconv_runtime.storage import reading
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training_runs import cpu_mesh, save_model

import shardconv

Case = Callable[[Path], object]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was converted for two ranks."""
    root = tmp_path_factory.mktemp("out")
    save_model("qwen3", root / "model")
    shardconv.convert(root / "model", root / "out", 2, sequence_parallel=True)
    return root / "out"


def with_plan(out: Path, path: Path, change: Callable[[Plan], Plan]) -> Path:
    """A copy of a converted directory with another plan."""
    shutil.copytree(out, path)
    digest = plan_json.write(change(plan_json.read(path / "plan.json")), path / "plan.json")
    manifest.write(replace(manifest.read(path), plan_sha256=digest), path)
    return path


def messages(path: Path, cases: tuple[Case, ...]) -> list[str]:
    """What each case raised on this process."""
    found = []
    for case in cases:
        try:
            case(path)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing was raised")
    return found


def require(out: Path, cases: dict[Case, str], num_processes: int = 4) -> None:
    """Every process raises in every case, with these words."""
    for found in run_processes(num_processes, messages, out, tuple(cases), start_group=True):
        for message, words in zip(found, cases.values(), strict=True):
            assert words in message, message


def loaded(path: Path, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    return shardconv_runtime.load(path, mesh=mesh or cpu_mesh(2, 2), training=True, **options).train()


# Loading ---------------------------------------------------------------------------------------------


def load_on_four(path: Path) -> object:
    return loaded(path, cpu_mesh(1, 4))


def load_without_tp(path: Path) -> object:
    return loaded(path, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "model")))


def load_with_group_too(path: Path) -> object:
    return loaded(path, group=dist.group.WORLD)


def load_regathering(path: Path) -> object:
    return loaded(path, regather=True)


def test_loading(out: Path) -> None:
    require(
        out,
        {
            load_on_four: "LaunchError: the model was converted for tp=2, and 4 process(es) load it",
            load_without_tp: "none of them is named 'tp'",
            load_with_group_too: "give group= or mesh=, not both",
            load_regathering: "regather= is about training with sequence_parallel=True",
        },
    )


def load_sequence(path: Path) -> object:
    return loaded(path, sequence_parallel=True)


def odd_length(path: Path) -> object:
    model = loaded(path, sequence_parallel=True)
    dist.barrier()  # all have loaded it; this raises without a word to the others
    return model(torch.ones((1, 5), dtype=torch.long))


def base_model(path: Path) -> object:
    model = loaded(path, sequence_parallel=True)
    ids = torch.ones((1, 4), dtype=torch.long)
    model(ids)
    return model.base_model(ids)


def test_a_part_of_a_sequence_parallel_model_is_not_called_by_itself(out: Path) -> None:
    require(out, {base_model: "in a sequence-parallel model was called by itself"})


def test_plans_that_lack_what_is_asked_for(out: Path, tmp_path: Path) -> None:
    def without_sequence(plan: Plan) -> Plan:
        assert plan.training is not None
        return replace(plan, training=replace(plan.training, sequence=None))

    no_training = with_plan(out, tmp_path / "no-training", lambda plan: replace(plan, training=None))

    def without_padding(plan: Plan) -> Plan:
        assert plan.training is not None
        assert plan.training.sequence is not None
        sequence = replace(plan.training.sequence, may_pad=False)
        return replace(plan, training=replace(plan.training, sequence=sequence))

    no_padding = with_plan(out, tmp_path / "no-padding", without_padding)
    require(
        no_padding,
        {odd_length: "RefusedCallError: a sequence of 5 tokens cannot be sharded over 2 ranks, and the plan"},
    )
    no_sequence = with_plan(out, tmp_path / "no-sequence", without_sequence)
    require(
        no_training, {loaded: "PlanError: the model cannot be trained: its plan was solved for inference"}
    )
    require(no_sequence, {load_sequence: "PlanError: sequence_parallel=True: the plan has no sequence"})


# Data parallelism ------------------------------------------------------------------------------------


def other_tp(path: Path) -> object:
    model = loaded(path)
    return shardconv_runtime.data_parallel(
        model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    )


def no_tp(path: Path) -> object:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    return shardconv_runtime.data_parallel(loaded(path), mesh)


def no_data_dim(path: Path) -> object:
    return shardconv_runtime.data_parallel(loaded(path), cpu_mesh(2, 2)["tp"])


def twice(path: Path) -> object:
    mesh = cpu_mesh(2, 2)
    return shardconv_runtime.data_parallel(shardconv_runtime.data_parallel(loaded(path, mesh), mesh), mesh)


def for_inference(path: Path) -> object:
    mesh = cpu_mesh(2, 2)
    return shardconv_runtime.data_parallel(shardconv_runtime.load(path, mesh=mesh), mesh)


def not_loaded(path: Path) -> object:
    return shardconv_runtime.data_parallel(nn.Linear(2, 2), cpu_mesh(2, 2))


def two_dtypes(path: Path) -> object:
    mesh = cpu_mesh(2, 2)
    model = loaded(path, mesh)
    model.model.layers[0].self_attn.q_norm.float()
    return shardconv_runtime.data_parallel(model, mesh)


def one_is_frozen(path: Path) -> object:
    mesh = cpu_mesh(2, 2)
    model = loaded(path, mesh)
    if dist.get_rank() == 1:
        model.requires_grad_(False)
    return shardconv_runtime.data_parallel(model, mesh)


def test_data_parallel(out: Path) -> None:
    require(
        out,
        {
            other_tp: "LaunchError: the dim 'tp' of the mesh has the processes",
            no_tp: "LaunchError: the mesh has the dims ('dp',), and none of them is named 'tp'",
            no_data_dim: "the mesh has the dims ('tp',); in addition to 'tp' it should have one",
            twice: "RefusedCallError: fully_shard has already sharded the model or a part of it",
            for_inference: "RefusedCallError: no parameter of the model requires a gradient",
            not_loaded: "PlanError: this Linear was not loaded by shardconv_runtime.load",
            two_dtypes: "RefusedCallError: a layer has parameters in torch.float32 and torch.float64",
            one_is_frozen: "no parameter of the model requires a gradient",
        },
    )


def in_parts(path: Path, mesh: DeviceMesh | None = None, **options: Any) -> object:
    return loaded(path, mesh, data_parallel=True, **options)


def without_mesh(path: Path) -> object:
    return shardconv_runtime.load(path, training=True, data_parallel=True)


def parts_for_inference(path: Path) -> object:
    return shardconv_runtime.load(path, mesh=cpu_mesh(2, 2), data_parallel=True)


def settings_as_dict(path: Path) -> object:
    return loaded(path, data_parallel={"param_dtype": torch.bfloat16})


def one_graph(path: Path) -> object:
    return in_parts(path, compile=True)


def without_data_dim(path: Path) -> object:
    return in_parts(path, cpu_mesh(2, 2)["tp"])


def split_again(path: Path) -> object:
    mesh = cpu_mesh(2, 2)
    return shardconv_runtime.data_parallel(in_parts(path, mesh), mesh)  # type: ignore[arg-type]


def other_settings(path: Path) -> object:
    settings = DataParallel(reshard_after_forward=dist.get_rank() != 3)
    return loaded(path, data_parallel=settings)


def failing_on_three(path: Path, module: Any, name: str) -> object:
    """Process 3, of the second replica, fails in a stage."""

    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("the disk is gone")

    if dist.get_rank() != 3:
        return in_parts(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, fail)
        return in_parts(path)


def no_files(path: Path) -> object:
    return failing_on_three(path, rank_files, "check_files")


def no_shards(path: Path) -> object:
    return failing_on_three(path, data_sharding, "shard_parameters")


def no_bytes(path: Path) -> object:
    return failing_on_three(path, reading, "map_file")


def test_loading_in_parts(out: Path) -> None:
    """An error of a process is raised by those of other replicas too."""
    require(
        out,
        {
            without_mesh: "PlanError: data_parallel= is for training over a mesh",
            parts_for_inference: "PlanError: data_parallel= is for training over a mesh",
            settings_as_dict: "OptionError: data_parallel={'param_dtype': torch.bfloat16} should be True",
            one_graph: "OptionError: compile=True makes one graph of the forward pass, and FSDP2",
            without_data_dim: "the mesh has the dims ('tp',); in addition to 'tp' it should have one",
            split_again: "RefusedCallError: fully_shard has already sharded the model",
            other_settings: "the ranks must load the same form: rank 0 loads dtype=None",
            no_files: "the disk is gone",
            no_shards: "the disk is gone",
            no_bytes: "the disk is gone",
        },
    )


# Training --------------------------------------------------------------------------------------------

IDS = torch.arange(8)[None]


def label_out_of_range(path: Path) -> object:
    return loaded(path, cpu_mesh(1, 2))(IDS, labels=IDS + 1000)


def inference_backward(path: Path) -> object:
    return shardconv_runtime.load(path)(IDS, labels=IDS).loss.backward()


def inference_with_gradients(path: Path) -> object:
    return shardconv_runtime.load(path).requires_grad_()(IDS, labels=IDS)


def without_gradients(path: Path) -> object:
    model = loaded(path, cpu_mesh(1, 2))
    with torch.no_grad():
        return model(IDS, labels=IDS).loss.backward()


def order_of_norm(path: Path) -> object:
    return shardconv_runtime.clip_grad_norm(loaded(path, cpu_mesh(1, 2)), 1.0, norm_type=0.0)


def added_parameter(path: Path) -> object:
    model = loaded(path, cpu_mesh(1, 2))
    model.adapter = nn.Linear(2, 2)
    return shardconv_runtime.grad_norm(model)


def saved_operators(path: Path) -> object:
    return shardconv_runtime.checkpoint_activations(loaded(path, cpu_mesh(1, 2)), save="everything")


def both_recompute(path: Path) -> object:
    model = loaded(path, cpu_mesh(1, 2))
    model.gradient_checkpointing_enable()
    return shardconv_runtime.checkpoint_activations(model)


def test_training(out: Path) -> None:
    require(
        out,
        {
            label_out_of_range: "LossInputError: ",
            inference_backward: "does not require grad",
            inference_with_gradients: "RefusedCallError: the model was loaded for inference",
            without_gradients: "does not require grad",
            order_of_norm: "OptionError: norm_type=0.0 should be above 0",
            added_parameter: "PlanError: 1 parameter of the model is missing from the plan: adapter.weight",
            saved_operators: "OptionError: save='everything' should be",
            both_recompute: "RefusedCallError: the model recomputes its activations already",
        },
        num_processes=2,
    )
