"""Models loaded in the parts of FSDP2, by real processes: they equal those that are split afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save
from distributed import run_processes
from shardconv_runtime import DataParallel
from shardconv_runtime.files import manifest
from shardconv_runtime.loading import rank_files
from shardconv_runtime.loading.data_sharding import data_sharding
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training_runs import VOCAB, Curve, adamw, converted_for_two, cpu_mesh, train_parts

import shardconv


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of a type, converted for two ranks; its checkpoint lies beside it."""
    return partial(converted_for_two, tmp_path_factory.mktemp("outs"))


def both_ways(path: Any, mesh: Any, settings: DataParallel, **options: Any) -> tuple[Any, Any]:
    """Loaded in parts, and loaded and then split."""
    in_parts = shardconv_runtime.load(path, mesh=mesh, training=True, data_parallel=settings, **options)
    split = shardconv_runtime.load(path, mesh=mesh, training=True, **options)
    return in_parts, shardconv_runtime.data_parallel(split, mesh, **vars(settings))


def require_same_tensors(found: Any, wanted: Any) -> None:
    """Names, placements and bits of parameters and buffers."""
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(wanted, kind)())
        ours = dict(getattr(found, kind)())
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            assert type(ours[name]) is type(tensor), name
            assert ours[name].requires_grad == tensor.requires_grad, name
            if isinstance(tensor, DTensor):
                assert (ours[name].device_mesh, ours[name].placements) == (
                    tensor.device_mesh,
                    tensor.placements,
                )
                assert (ours[name].shape, ours[name].stride()) == (tensor.shape, tensor.stride())
            a, b = local(ours[name]), local(tensor)
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            assert torch.equal(a, b), name


def local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def train_both(path: Path, shape: tuple[int, ...], sequence: bool, out: Path) -> None:
    mesh = cpu_mesh(*shape)
    models = both_ways(path, mesh, DataParallel(), sequence_parallel=sequence)
    require_same_tensors(*models)
    curves = []
    for name, model in zip(("parts", "split"), models, strict=True):
        optimizer = adamw(model.train())
        curves.append(train_parts(model, optimizer, mesh, 0, 2))
        shardconv_runtime.save(model, out / name)
        shardconv_runtime.save_optimizer(model, optimizer, out / f"{name}-optimizer")
    assert curves[0] == curves[1]
    require_same_tensors(*models)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("model_type", "shape", "sequence"),
    [
        ("qwen3", (2, 2), True),
        ("phi3", (2, 1, 2), False),
        pytest.param("gpt2", (2, 2), False, marks=pytest.mark.slow),
    ],
)
def test_a_model_in_parts_trains_as_one_that_was_split(
    model_type: str, shape: tuple[int, ...], sequence: bool, outs: Callable[[str], Path], tmp_path: Path
) -> None:
    run_processes(4, train_both, outs(model_type), shape, sequence, tmp_path)
    assert contents(tmp_path / "parts") == contents(tmp_path / "split")


# What is unusual -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for one rank with fewer rows in some parameters than there are processes."""
    root = tmp_path_factory.mktemp("narrow")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=6,
        intermediate_size=5,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
    )
    save(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64), root / "model")
    shardconv.convert(root / "model", root / "out", 1, check=False)
    return root / "out"


@pytest.mark.parametrize("shape", [(4, 1), pytest.param((2, 2, 1), marks=pytest.mark.slow)])
def test_processes_without_rows(shape: tuple[int, ...], narrow: Path, tmp_path: Path) -> None:
    """As many shards as processes, or replicas of shards."""
    run_processes(4, train_both, narrow, shape, False, tmp_path)
    assert contents(tmp_path / "parts") == contents(tmp_path / "split")


def load_on_a_gpu(path: Path) -> None:
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
    found, wanted = both_ways(path, mesh, DataParallel(), dtype="float32")
    require_same_tensors(found, wanted)
    assert all(local(parameter).is_cuda for parameter in found.parameters())
    ids = torch.arange(8, device="cuda")[None]
    losses = [model(ids, labels=ids).loss.item() for model in (found, wanted)]
    assert losses[0] == losses[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_process_on_a_gpu(narrow: Path) -> None:
    run_processes(1, load_on_a_gpu, narrow)


def load_in_forms(path: Path) -> None:
    mesh = cpu_mesh(2, 2)
    forms: list[tuple[Path, dict[str, Any]]] = [
        (path, {"dtype": "float32"}),
        (path, {"verify": True, "gather_logits": True}),
        (path.parent / "model", {"plan": path}),
        (path.parent / "model", {"plan": path, "dtype": torch.bfloat16}),
    ]
    for directory, options in forms:
        found, wanted = both_ways(directory, mesh, DataParallel(reshard_after_forward=False), **options)
        require_same_tensors(found, wanted)
        ours, theirs = gradients_of(found), gradients_of(wanted)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], gradient) for name, gradient in theirs.items())


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Of a step with recomputed activations."""
    shardconv_runtime.checkpoint_activations(model.train())
    ids = torch.arange(8)[None]
    model(ids, labels=ids).loss.backward()
    return {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", ["gpt2", pytest.param("bamba", marks=pytest.mark.slow)])
def test_every_form_in_which_a_model_is_loaded(model_type: str, outs: Callable[[str], Path]) -> None:
    run_processes(4, load_in_forms, outs(model_type))


def spans_ahead(path: Path) -> list[tuple[Path, int, int]]:
    mesh = cpu_mesh(2, 2)
    found = manifest.read(path)
    plan = manifest.read_plan(path, found)
    files = rank_files.check_files(path, found, plan, mesh.get_local_rank("tp"))
    sharding = data_sharding(mesh, True, training=True, compiled=False)
    return sharding.spans(files.shards)


def test_what_is_read_ahead_is_shared_out(outs: Callable[[str], Path]) -> None:
    """Between the processes of a rank: each byte of its tensors, once."""
    found = run_processes(4, spans_ahead, outs("gpt2"))
    for rank in range(2):
        spans = sorted(span for span in (*found[rank], *found[rank + 2]) if span[1] < span[2])
        paths = {path for path, _, _ in spans}
        assert {path.parent.name for path in paths} == {"common", f"rank-{rank:05}-of-00002"}
        for (path, _, end), (following, begin, _) in itertools.pairwise(spans):
            assert end == (begin if path == following else path.stat().st_size)


def save_at_once(path: Path, out: Path) -> None:
    model = shardconv_runtime.load(path, mesh=cpu_mesh(2, 2), training=True, data_parallel=True)
    shardconv_runtime.save(model, out)


def test_a_model_is_saved_before_it_ran(outs: Callable[[str], Path], tmp_path: Path) -> None:
    run_processes(4, save_at_once, outs("gpt2"), tmp_path / "saved")
    shards = [file.relative_to(outs("gpt2")) for file in outs("gpt2").rglob("*.safetensors")]
    assert shards
    for file in shards:
        assert (tmp_path / "saved" / file).read_bytes() == (outs("gpt2") / file).read_bytes()


def go_on(path: Path, root: Path, in_parts: bool, last: int) -> Curve:
    """Train from step 1 to ``last``, after the first step by the other way if there is a state of one."""
    mesh = cpu_mesh(2, 2)
    model = shardconv_runtime.load(path, mesh=mesh, training=True, data_parallel=in_parts).train()
    if not in_parts:
        shardconv_runtime.data_parallel(model, mesh)
    optimizer = adamw(model)
    first = int((root / "optimizer").exists())
    if first:
        shardconv_runtime.load_optimizer(model, optimizer, root / "optimizer")
    curve = train_parts(model, optimizer, mesh, first, last - first)
    if not first:
        shardconv_runtime.save(model, root / "model")
        shardconv_runtime.save_optimizer(model, optimizer, root / "optimizer")
    return curve


@pytest.mark.parametrize("in_parts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_training_is_continued(in_parts: bool, outs: Callable[[str], Path], tmp_path: Path) -> None:
    whole = run_processes(4, go_on, outs("gpt2"), tmp_path / "none", True, 2)[0]
    (tmp_path / "none").rename(tmp_path / "gone")
    first = run_processes(4, go_on, outs("gpt2"), tmp_path, not in_parts, 1)[0]
    second = run_processes(4, go_on, tmp_path / "model", tmp_path, in_parts, 2)[0]
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-12)
    assert first.norms + second.norms == pytest.approx(whole.norms, rel=1e-12)
