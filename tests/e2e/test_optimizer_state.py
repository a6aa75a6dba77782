"""Training goes on where it was, with other ranks and other data-parallel processes, but for rounding."""

from __future__ import annotations

import math
import os
import resource
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal
from converted import local_part
from distributed import run_errors, run_errors_of_each, run_processes
from shardconv_runtime.errors import CheckpointError, PlanError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import global_shape, parameter_plans
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import shardconv

STEPS = 3
Layout = tuple[int, ...]
"""Data-parallel processes for each rank (copies and shards), and ranks."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
}


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A model of a type converted for some ranks; its checkpoint lies beside it."""
    root = tmp_path_factory.mktemp("outs")

    def out(model_type: str, tp: int) -> Path:
        source, path = root / model_type / "model", root / model_type / str(tp)
        if not source.exists():
            save_causal(model_type, source)
        if not path.exists():
            shardconv.convert(source, path, tp, check=False)
        return path

    return out


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """Of the full parameter, the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def groups_of(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Two groups, as usual: weight decay for matrices alone."""
    matrices = [p for p in parameters.values() if p.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in parameters.values() if p.dim() <= 1], "lr": 0.02}]


def trained_unsharded(source: Path, kind: str, steps: int) -> dict[str, Tensor]:
    """The parameters of the unsharded model after some steps without interruption."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    optimizer = OPTIMIZERS[kind](groups_of(parameters))
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, tuple(parameter.shape), step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def mesh_of(layout: Layout) -> Any:
    return init_device_mesh("cpu", layout, mesh_dim_names=("copy", "dp", "tp")[-len(layout) :])


def replicas_of(layout: Layout, sharded: bool) -> Any:
    """What has to be said where nothing else does."""
    return None if sharded or layout[0] == 1 else mesh_of(layout)["dp"].get_group()


def prepared(path: Path, layout: Layout, kind: str, sharded: bool) -> tuple[Any, torch.optim.Optimizer]:
    """A loaded model whose parameters are trained, and its optimizer."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(layout)
    data_parallel = mesh[mesh.mesh_dim_names[:-1]]
    model = shardconv_runtime.load(path, process_group=mesh["tp"].get_group())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if sharded:
        blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        for block in blocks:
            fully_shard(block, mesh=data_parallel)
        fully_shard(model, mesh=data_parallel)
    return model, OPTIMIZERS[kind](groups_of(dict(model.named_parameters())))


def do_steps(model: Any, optimizer: torch.optim.Optimizer, path: Path, tp: int, steps: range) -> None:
    rank = int(os.environ["RANK"]) % tp
    plan = plan_json.read(path / "plan.json")
    entries = parameter_plans(plan)
    for step in steps:
        for name, parameter in model.named_parameters():
            full = gradient(name, global_shape(entries[name]), step)
            local = local_part(full, entries[name], plan.mesh, rank)
            if isinstance(parameter, DTensor):
                local = distribute_tensor(local, parameter.device_mesh, parameter.placements)
            parameter.grad = local
        optimizer.step()


def begin(path: Path, root: Path, layout: Layout, kind: str, sharded: bool) -> None:
    model, optimizer = prepared(path, layout, kind, sharded)
    do_steps(model, optimizer, path, layout[-1], range(STEPS))
    replicas = replicas_of(layout, sharded)
    shardconv_runtime.save(model, root / "model", replicas=replicas)
    shardconv_runtime.save_optimizer(model, optimizer, root / "optimizer", replicas=replicas)


def go_on(path: Path, root: Path, layout: Layout, kind: str, sharded: bool) -> dict[str, Tensor]:
    """The rank's parameters after as many steps again."""
    model, optimizer = prepared(path, layout, kind, sharded)
    for group in optimizer.param_groups:
        group["lr"] = 7.0  # what was saved counts
    replicas = replicas_of(layout, sharded)
    shardconv_runtime.load_optimizer(model, optimizer, root / "optimizer", replicas=replicas)
    do_steps(model, optimizer, path, layout[-1], range(STEPS, 2 * STEPS))
    return {name: gathered_over_dp(parameter) for name, parameter in model.named_parameters()}


def gathered_over_dp(parameter: Any) -> Tensor:
    tensor: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return tensor.detach()


def resumed(out: Path, root: Path, before: Layout, after: Layout, kind: str, sharded: bool = False) -> None:
    """Train, save, reshard, load and train; compare with training without a pause."""
    run_processes(math.prod(before), begin, out, root, before, kind, sharded, start_group=True)
    path = root / "model"
    tp = after[-1]
    if tp != before[-1]:
        shardconv.reshard(path, root / "resharded", tp, check=False)
        path = root / "resharded"
    found = run_processes(math.prod(after), go_on, path, root, after, kind, sharded, start_group=True)
    want = trained_unsharded(out.parent / "model", kind, 2 * STEPS)
    plan = plan_json.read(path / "plan.json")
    for number, parameters in enumerate(found):
        assert parameters.keys() == parameter_plans(plan).keys() - buffers(plan)
        for name, parameter in parameters.items():
            expected = local_part(want[name], parameter_plans(plan)[name], plan.mesh, number % tp)
            torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12, msg=name)


REPEATED = [("llama", 2, 4), ("llama", 2, 1), ("llama", 4, 3), ("phi3", 3, 2)]
"""Plain ones, and one with fused matrices, whose ways the others take too."""


def buffers(plan: Any) -> set[str]:
    return {name for name in parameter_plans(plan) if name.endswith((".attn.bias", ".masked_bias"))}


@pytest.mark.parametrize(
    ("model_type", "before", "after"),
    [
        ("gpt2", 2, 3),
        ("mixtral", 1, 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in REPEATED),
    ],
)
def test_other_ranks(
    model_type: str, before: int, after: int, outs: Callable[[str, int], Path], tmp_path: Path
) -> None:
    """Uneven, tied and fused with partial biases; stacked experts."""
    resumed(outs(model_type, before), tmp_path, (1, before), (1, after), "AdamW")


@pytest.mark.parametrize("kind", [pytest.param("SGD", marks=pytest.mark.slow), "NAdam"])
def test_other_optimizers(kind: str, outs: Callable[[str, int], Path], tmp_path: Path) -> None:
    """One with a tensor for each parameter, one with numbers beside them."""
    resumed(outs("gpt2", 2), tmp_path, (1, 2), (1, 1), kind)


@pytest.mark.parametrize(
    ("model_type", "before", "after"),
    [
        pytest.param("llama", (2, 2), (1, 2), marks=pytest.mark.slow),
        pytest.param("llama", (2, 2), (2, 1), marks=pytest.mark.slow),
        ("gpt2", (2, 2), (3, 1)),
        pytest.param("gpt2", (3, 1), (2, 2), marks=pytest.mark.slow),
        pytest.param("phi3", (1, 2), (3, 1), marks=pytest.mark.slow),
        ("gpt2", (2, 2, 1), (1, 2)),
        pytest.param("gpt2", (1, 2), (2, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_other_data_parallel_shards(
    model_type: str, before: Layout, after: Layout, outs: Callable[[str, int], Path], tmp_path: Path
) -> None:
    resumed(outs(model_type, before[-1]), tmp_path, before, after, "AdamW", sharded=True)


def test_data_parallel_copies(outs: Callable[[str, int], Path], tmp_path: Path) -> None:
    resumed(outs("gpt2", 2), tmp_path, (2, 2), (2, 1), "AdamW")


def test_the_same_state_is_written_the_same_way(outs: Callable[[str, int], Path], tmp_path: Path) -> None:
    out = outs("gpt2", 2)
    for name in ("a", "b"):
        run_processes(2, begin, out, tmp_path / name, (1, 2), "AdamW", False, start_group=True)
    sizes = [sizes_of(tmp_path / name / "optimizer") for name in ("a", "b")]
    assert sizes[0] == sizes[1]
    assert sizes[0].keys() == {"__0_0.distcp", "__1_0.distcp", "optimizer.json"}


def sizes_of(directory: Path) -> dict[str, int]:
    """But of DCP's own index, which has a random number in it."""
    return {p.name: p.stat().st_size for p in directory.iterdir() if p.name != ".metadata"}


def test_dcp_reads_full_tensors(outs: Callable[[str, int], Path], tmp_path: Path) -> None:
    """What is on disk is an ordinary checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    out = outs("gpt2", 2)
    run_processes(2, begin, out, tmp_path, (1, 2), "SGD", False, start_group=True)
    dcp_to_torch_save(tmp_path / "optimizer", tmp_path / "full.pt")
    state = torch.load(tmp_path / "full.pt")
    entries = parameter_plans(plan_json.read(out / "plan.json"))
    name = "transformer.h.0.attn.c_proj.bias"
    assert entries[name].partial, "the case that this is about"
    momentum = torch.zeros(global_shape(entries[name]), dtype=torch.float64)
    for step in range(STEPS):
        momentum = 0.9 * momentum + gradient(name, global_shape(entries[name]), step)
    torch.testing.assert_close(state[f"state.{name}.momentum_buffer"], momentum, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def saved(outs: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its optimizer after some steps of two ranks."""
    root = tmp_path_factory.mktemp("saved")
    run_processes(2, begin, outs("llama", 2), root, (1, 2), "AdamW", False, start_group=True)
    return root


CHANGES = [
    ("class", "has the state of AdamW, and this optimizer is SGD"),
    ("groups", "has 2 parameter groups, and this optimizer has 1"),
    (
        "fewer",
        r"group 0: .* of the saved state (is|are) missing from this optimizer.* lm_head.weight;",
    ),
    ("model", r"of the saved state (is|are) missing from this optimizer.* lm_head.weight;"),
    ("other model", "parameter 0 of group 0 of the optimizer does not belong to the model"),
    ("directory", "lacks optimizer.json: shardconv_runtime.save_optimizer did not write it"),
    (
        "moved",
        "parameter group 0: 1 parameter of the saved state is missing from this optimizer: "
        "model.layers.0.mlp.up_proj.weight",
    ),
    ("lacking", "process 1 holds a part of lm_head.weight, and parameter group 0 of its optimizer"),
    ("uneven", "lr of parameter group 1 differs between processes 0 and 1"),
]
"""What is not as it was saved, and what is said of it."""

DAMAGED = [
    ("missing", "__1_0.distcp is missing"),
    ("short", "__1_0.distcp has "),
    ("shape", "model.norm.weight has shape .65. there, and .64. in this model"),
    ("value", "is not of kind float"),
    ("index", "unknown key"),
    ("bytes", "cannot be read: process"),
]
"""The same of files."""


class TestErrors:
    """All ranks raise, and the optimizer is as it was."""

    def test_another_optimizer(self, saved: Path, outs: Callable[[str, int], Path]) -> None:
        calls = [(outs("gpt2" if what == "model" else "llama", 2), saved, what) for what, _ in CHANGES]
        found = run_errors_of_each(2, load_changed, calls, start_group=True)
        for errors, (_, text) in zip(found, CHANGES, strict=True):
            self.refused(errors, text)

    def test_a_damaged_directory(self, saved: Path, outs: Callable[[str, int], Path], tmp_path: Path) -> None:
        import shutil

        for damage, _ in DAMAGED:
            shutil.copytree(saved / "optimizer", tmp_path / damage / "optimizer")
            DAMAGES[damage](tmp_path / damage / "optimizer")
        calls = [(outs("llama", 2), tmp_path / damage, "") for damage, _ in DAMAGED]
        found = run_errors_of_each(2, load_changed, calls, start_group=True)
        for errors, (_, text) in zip(found, DAMAGED, strict=True):
            self.refused(errors, text)

    def refused(self, errors: list[Any], text: str) -> None:
        import re

        assert all(re.search(text, str(error)) for error in errors), errors
        assert not any("was changed" in str(error) for error in errors)

    def test_a_full_disk(self, saved: Path, outs: Callable[[str, int], Path]) -> None:
        """What was there outlives it."""
        before = {p.name: p.read_bytes() for p in (saved / "optimizer").iterdir()}
        errors = run_errors(2, save_with_little_room, outs("llama", 2), saved, start_group=True)
        assert all("cannot be written: process 1: " in str(error) for error in errors), errors
        assert {p.name: p.read_bytes() for p in (saved / "optimizer").iterdir()} == before
        assert sorted(p.name for p in saved.iterdir()) == ["model", "optimizer"]

    def test_a_directory_that_is_there(self, saved: Path, outs: Callable[[str, int], Path]) -> None:
        errors = run_errors(2, save_over, outs("llama", 2), saved, False, start_group=True)
        assert all("is not empty; name another directory, or pass overwrite=True" in str(e) for e in errors)
        errors = run_errors(2, save_over, outs("llama", 2), saved / "model", True, start_group=True)
        assert all("cannot be replaced: " in str(error) for error in errors)
        run_processes(2, save_over, outs("llama", 2), saved, True, start_group=True)

    def test_ranks_out_of_step(self, saved: Path, outs: Callable[[str, int], Path], tmp_path: Path) -> None:
        errors = run_errors(2, save_out_of_step, outs("llama", 2), tmp_path / "o", start_group=True)
        text = "processes 0 and 1 keep different state (step 1.0, exp_avg"
        assert all(text in str(error) for error in errors), errors

    def test_state_of_other_shapes(self, outs: Callable[[str, int], Path], tmp_path: Path) -> None:
        model = shardconv_runtime.load(outs("llama", 1))
        optimizer: torch.optim.Optimizer = torch.optim.Adafactor(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with pytest.raises(PlanError, match="keeps row_var, a Tensor of shape"):
            shardconv_runtime.save_optimizer(model, optimizer, tmp_path / "optimizer")


def load_changed(path: Path, root: Path, change: str) -> None:
    model, optimizer = prepared(path, (1, 2), "SGD" if change == "class" else "AdamW", False)
    parameters = dict(model.named_parameters())
    if change == "groups":
        optimizer = OPTIMIZERS["AdamW"](list(parameters.values()))
    if change == "fewer" or (change == "lacking" and os.environ["RANK"] == "1"):
        del parameters["lm_head.weight"]
        optimizer = OPTIMIZERS["AdamW"](groups_of(parameters))
    if change == "moved":
        parameters = {n: p for n, p in parameters.items() if "up_proj" not in n or "layers.0" not in n}
        optimizer = OPTIMIZERS["AdamW"](groups_of(parameters))
        optimizer.param_groups[1]["params"].append(model.model.layers[0].mlp.up_proj.weight)
    if change == "other model" and os.environ["RANK"] == "1":
        optimizer = OPTIMIZERS["AdamW"]([nn.Parameter(torch.zeros(2))])
    if change == "uneven" and os.environ["RANK"] == "1":
        optimizer.param_groups[1]["lr"] = 3.0
    try:
        shardconv_runtime.load_optimizer(
            model, optimizer, root / ("" if change == "directory" else "optimizer")
        )
    finally:
        assert not optimizer.state, "the optimizer was changed"
        assert optimizer.param_groups[0]["lr"] == 0.01, "the optimizer was changed"


def damage_text(old: str, new: str, directory: Path) -> None:
    text = (directory / "optimizer.json").read_text()
    assert old in text
    (directory / "optimizer.json").write_text(text.replace(old, new))


def cut(directory: Path) -> None:
    (directory / "__1_0.distcp").write_bytes(b"short")


def scramble(directory: Path) -> None:
    path = directory / "__1_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": lambda directory: (directory / "__1_0.distcp").unlink(),
    "short": cut,
    "shape": partial(damage_text, '"model.norm.weight", "shape": [64]', '"model.norm.weight", "shape": [65]'),
    "value": partial(damage_text, '"0.01"', '"a penny"'),
    "index": partial(damage_text, '"optimizer":', '"optimiser":'),
    "bytes": scramble,
}


def stepped(path: Path) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = prepared(path, (1, 2), "AdamW", False)
    do_steps(model, optimizer, path, 2, range(1))
    return model, optimizer


def save_with_little_room(path: Path, root: Path) -> None:
    model, optimizer = stepped(path)
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    shardconv_runtime.save_optimizer(model, optimizer, root / "optimizer", overwrite=True)


def save_over(path: Path, root: Path, overwrite: bool) -> None:
    model, optimizer = stepped(path)
    place = root if root.name == "model" else root / "optimizer"
    shardconv_runtime.save_optimizer(model, optimizer, place, overwrite=overwrite)


def save_out_of_step(path: Path, directory: Path) -> None:
    model, optimizer = stepped(path)
    if os.environ["RANK"] == "1":
        optimizer.step()
    shardconv_runtime.save_optimizer(model, optimizer, directory)


def test_one_process_alone(outs: Callable[[str, int], Path], tmp_path: Path) -> None:
    """Without a process group; a state in float32 of a parameter in float64 stays what it is."""
    saved, loaded = (fresh_sgd(outs("llama", 1)) for _ in range(2))
    for parameter in saved[0].parameters():
        saved[1].state[parameter]["momentum_buffer"] = torch.randn(parameter.shape, dtype=torch.float32)
    shardconv_runtime.save_optimizer(*saved, tmp_path / "optimizer")
    shardconv_runtime.load_optimizer(*loaded, tmp_path / "optimizer")
    for ours, theirs in zip(saved[0].parameters(), loaded[0].parameters(), strict=True):
        assert torch.equal(
            saved[1].state[ours]["momentum_buffer"], loaded[1].state[theirs]["momentum_buffer"]
        )
        assert loaded[1].state[theirs]["momentum_buffer"].dtype == torch.float32


def fresh_sgd(path: Path) -> tuple[Any, torch.optim.Optimizer]:
    model = shardconv_runtime.load(path)
    return model, OPTIMIZERS["SGD"](model.parameters())


def test_no_warnings_of_one_process(
    outs: Callable[[str, int], Path], tmp_path: Path, recwarn: Iterator[Any]
) -> None:
    shardconv_runtime.save_optimizer(*fresh_sgd(outs("llama", 1)), tmp_path / "optimizer")
    assert not [w for w in recwarn if "distributed" in str(w.message)]


def test_fewer_or_more_parameters(outs: Callable[[str, int], Path], tmp_path: Path) -> None:
    model, optimizer = fresh_sgd(outs("llama", 1))
    fewer = OPTIMIZERS["SGD"](list(model.parameters())[:3])
    shardconv_runtime.save_optimizer(model, optimizer, tmp_path / "all")
    with pytest.raises(CheckpointError, match="of the saved state are missing from this optimizer"):
        shardconv_runtime.load_optimizer(model, fewer, tmp_path / "all")
    shardconv_runtime.save_optimizer(model, fewer, tmp_path / "fewer")
    with pytest.warns(UserWarning, match="parameters start anew, of which"):
        shardconv_runtime.load_optimizer(model, optimizer, tmp_path / "fewer")
