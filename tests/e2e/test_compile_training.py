"""Training steps that ``torch.compile`` captures: the gradients, collectives and random masks of eager ones.

Graphs are captured and differentiated as always (AOTAutograd), and run as they are: generating code takes
minutes. Inductor gets the same graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch._dynamo
import transformers
from checkpoints import CONFIGS, save
from distributed import run_processes
from shardconv_runtime import Training
from shardconv_runtime.parallel.boundary import renumber
from shardconv_runtime.training.checkpointing import repeated_layers
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from training_runs import BATCH, CHANGES, MAX_NORM, VOCAB, cpu_mesh, load_unsharded, unsharded_loss
from warm_compiler import warm_up

import shardconv

TP = 2
BACKEND = "aot_eager"

Outs = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> Outs:
    """A model of a type with some layers, converted for two ranks; its checkpoint lies beside it."""
    warm_up()
    root = tmp_path_factory.mktemp("compile-training")

    @cache
    def out(model_type: str, num_layers: int) -> Path:
        path = root / f"{model_type}-{num_layers}"
        depth = {"n_layer" if model_type == "gpt2" else "num_hidden_layers": num_layers}
        options = CONFIGS[model_type] | CHANGES.get(model_type, {}) | depth | {"vocab_size": VOCAB}
        config = transformers.CONFIG_MAPPING[model_type](**options)
        if model_type == "gpt2":
            config.summary_first_dropout = 0.0  # of a head that it does not have
        save(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64), path / "model")
        # In another process: from torch 2.15 on, no fork of one that ran a backward pass can capture one.
        run_processes(1, convert, path)
        return path / "out"

    return out


def convert(path: Path) -> None:
    shardconv.convert(path / "model", path / "out", TP, sequence_parallel=True)


def text(length: int) -> Tensor:
    return torch.randint(VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(length))


@dataclass(frozen=True)
class Step:
    """What one training step gave."""

    losses: list[float]
    gradients: dict[str, Tensor]
    """After they were clipped; this process's part."""
    norm: float


def train(model: Any, *lengths: int) -> Step:
    """One step: the gradients of texts of these lengths are added up and clipped."""
    torch.manual_seed(3)
    model.zero_grad()
    losses = []
    for length in lengths:
        loss = model(input_ids=text(length), labels=text(length)).loss / len(lengths)
        loss.backward()
        losses.append(loss.item())
    norm = shardconv_runtime.clip_grad_norm(model, MAX_NORM).item()
    gradients = {n: local(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    return Step(losses, gradients, norm)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def require_same(found: Step, want: Step) -> None:
    assert found.losses == pytest.approx(want.losses, rel=1e-12)
    assert found.norm == pytest.approx(want.norm, rel=1e-12)
    assert want.norm > 0
    assert found.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        assert (found.gradients[name] - gradient).abs().max() <= 1e-9 * gradient.abs().max(), name


def collectives(model: Any, length: int) -> Counter[str]:
    """Of a step, by kind; modes that count would have compiled code left out."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        train(model, length)
    names: list[str] = [event.name for event in seen.events()]
    # Of ranks that compare their inputs; from torch 2.15 on the gather has the second name.
    messages = ("c10d::monitored_barrier_", "c10d::allgather_", "c10d::_allgather_base_")
    return Counter(name for name in names if name.startswith("c10d::") and name not in messages)


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def start_counting() -> None:
    torch._dynamo.reset()
    counters.clear()


# The unsharded model ------------------------------------------------------------------------------------


def unsharded_model(path: Path, steps: tuple[tuple[int, ...], ...]) -> tuple[list[int], int]:
    """Graphs after steps of texts of these lengths, and graph breaks; compiled code gathers nothing again."""
    eager, compiled = (
        shardconv_runtime.load(path, training=Training(regather=regather), sequence_parallel=True).train()
        for regather in (False, True)
    )
    start_counting()
    compiled.compile(backend=BACKEND, dynamic=False)
    graphs = []
    for lengths in steps:
        require_same(train(compiled, *lengths), train(eager, *lengths))
        graphs.append(num_graphs())
    assert collectives(compiled, 13) == collectives(eager, 13)
    return graphs, sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("steps", "num_graphs"),
    [
        (((13, 13), (13,)), [2, 2]),
        pytest.param(((12, 12), (13,), (12, 13)), [1, 3, 3], marks=pytest.mark.slow),
    ],
)
def test_unsharded_model(outs: Outs, steps: tuple[tuple[int, ...], ...], num_graphs: list[int]) -> None:
    """Under sequence parallelism; a length that is padded is one more graph, and the padding a small one."""
    for graphs, breaks in run_processes(TP, unsharded_model, outs("qwen3", 1), steps):
        assert graphs == num_graphs
        assert breaks == 0


# Layer by layer, with FSDP ---------------------------------------------------------------------------


def each_layer(path: Path) -> tuple[list[int], int]:
    """Graphs after steps of several lengths, and graph breaks."""
    mesh = cpu_mesh(1, TP)
    options: dict[str, Any] = {"mesh": mesh, "training": True, "sequence_parallel": True}
    eager = shardconv_runtime.load(path, **options).train()
    compiled = shardconv_runtime.load(path, **options, data_parallel=True).train()
    for model in (eager, compiled):
        shardconv_runtime.checkpoint_activations(model)
    shardconv_runtime.data_parallel(eager, mesh)
    start_counting()
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for layer in repeated_layers(compiled):
        layer.compile(backend=BACKEND, dynamic=False)
    graphs = []
    for _ in range(2):
        require_same(train(compiled, 12, 12), train(eager, 12, 12))
        graphs.append(num_graphs())
    return graphs, sum(counters["graph_break"].values())


def test_each_layer(outs: Outs) -> None:
    """All layers share a graph, though each has hooks of its own; FSDP's hooks stay outside of it."""
    for graphs, breaks in run_processes(TP, each_layer, outs("qwen3", 2)):
        assert graphs == [2, 2]
        assert breaks == 0


# Random numbers --------------------------------------------------------------------------------------


def dropout(path: Path, without_first: bool) -> tuple[float, float, str]:
    """The loss and the norm without dropout, and what is said where graphs may not break.

    Args:
        without_first: compile the model without dropout, too.
    """
    eager, compiled, strict = (shardconv_runtime.load(path, training=True).train() for _ in range(3))
    start_counting()
    compiled.compile(backend=BACKEND)
    plain = train(compiled if without_first else eager, 12)
    assert not counters["graph_break"]
    for model in (eager, compiled, strict):
        shardconv_runtime.checkpoint_activations(model)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
    for _ in range(2):
        require_same(train(compiled, 12), train(eager, 12))
    assert counters["graph_break"]
    start_counting()
    strict.compile(backend=BACKEND, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        train(strict, 12)
    return plain.losses[0], plain.norm, str(caught.value)


@pytest.mark.parametrize("without_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_masks_are_those_of_eager_steps(outs: Outs, without_first: bool) -> None:
    """Graphs end where the stream of random numbers changes, in layers that are recomputed too."""
    path = outs("gpt2", 1)
    unsharded = load_unsharded(path.parent / "model")
    want = unsharded_loss(unsharded, text(12))
    want.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([p.grad for p in unsharded.parameters() if p.grad is not None])
    for loss, found, message in run_processes(TP, dropout, path, without_first):
        assert loss == pytest.approx(want.item(), rel=1e-9)
        assert found == pytest.approx(norm.item(), rel=1e-9)
        assert "random numbers that differ between ranks" in message


# Hooks -----------------------------------------------------------------------------------------------


def test_hooks_keep_their_order_and_options() -> None:
    seen: list[tuple[str, Any]] = []
    module = nn.Identity()
    module.register_forward_pre_hook(lambda m, args: seen.append(("second", args)))
    first = module.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(("first", kwargs)), prepend=True, with_kwargs=True
    )
    third = module.register_forward_hook(lambda m, args, out: seen.append(("third", out)), always_call=True)
    for handle in (first, third):
        renumber(module, handle)
    module(1)
    with pytest.raises(TypeError):
        module()
    assert seen[:3] == [("first", {}), ("second", (1,)), ("third", 1)]
    assert seen[3:] == [("first", {}), ("second", ()), ("third", None)]
    assert min(module._forward_pre_hooks) == -1
    assert list(module._forward_hooks) == [-2]
