"""Masks in training: alike where all ranks hold the same, independent where they hold parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.nn.functional as F
import transformers
from distributed import run_processes
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.plan import DrawPlan
from shardconv_runtime.training.random_streams import attach_random_streams, resumable
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardconv
from shardconv.simulation.rank_threads import run_ranks

WIDTH = 64


class Part(nn.Module):
    """Draws a mask; then another module, and a second mask."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout = p
        self.inner = nn.Dropout(p)
        self.masks: list[Tensor] = []

    def draw(self) -> None:
        self.masks.append(F.dropout(torch.ones(WIDTH), self.dropout, self.training))

    def forward(self, x: Tensor) -> Tensor:
        self.draw()
        full = self.inner(torch.ones_like(x))
        self.masks.append(full)
        self.draw()
        out: Tensor = x * self.masks[-3] * full * self.masks[-1]
        return out


class Model(nn.Module):
    """Whole masks around ``part``."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.before, self.part, self.behind = nn.Dropout(p), Part(p), nn.Dropout(p)
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.behind(self.part(self.before(x * self.weight)))
        return out


INSIDE = (DrawPlan(("part",), (0,)), DrawPlan(("part.inner",)))


def on_ranks(
    plans: tuple[DrawPlan, ...],
    use: Callable[[Model], Any],
    p: float = 0.3,
    mesh: tuple[int, ...] = (2,),
    prepare: Callable[[Model], None] = lambda _: None,
) -> list[Any]:
    def rank(comm: Communicator) -> Any:
        model = Model(p)
        attach_random_streams(model, plans, comm)
        prepare(model)
        return use(model)

    torch.manual_seed(3)
    return run_ranks(mesh, rank)


def masks(model: Model) -> tuple[list[Tensor], Tensor, Tensor]:
    x = torch.ones(WIDTH, dtype=torch.float64)
    model(x)
    behind = model.behind(x)
    return model.part.masks, behind, torch.get_rng_state()


def test_masks_of_shards_differ_and_replicated_ones_are_equal() -> None:
    (first, second) = on_ranks(INSIDE, masks)
    assert [torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True)] == [False, True, False]
    assert not torch.equal(first[0][0], first[0][2])
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


def test_ranks_along_other_axes_draw_alike() -> None:
    found = on_ranks((DrawPlan(("part",), (1,)),), masks, mesh=(2, 2))
    same = [[torch.equal(a[0][0], b[0][0]) for b in found] for a in found]
    assert same == [[i % 2 == j % 2 for j in range(4)] for i in range(4)]


def test_code_behind_a_module_may_draw_from_another_stream() -> None:
    plans = (DrawPlan(("part",)), DrawPlan(("part.inner",), afterwards=(0,)))
    (first, second) = on_ranks(plans, masks)
    assert [torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True)] == [True, True, False]
    assert torch.equal(first[2], second[2])


def test_passes_draw_other_masks() -> None:
    def twice(model: Model) -> bool:
        model(torch.ones(WIDTH, dtype=torch.float64))
        model(torch.ones(WIDTH, dtype=torch.float64))
        return torch.equal(model.part.masks[0], model.part.masks[3])

    assert on_ranks(INSIDE, twice) == [False, False]


def test_the_mean_of_masks_is_one() -> None:
    def mean(model: Model) -> Tensor:
        x = torch.ones(WIDTH, dtype=torch.float64)
        return torch.stack([model(x).detach() for _ in range(500)]).mean()

    assert all(abs(found - 1) < 0.05 for found in on_ranks(INSIDE, mean))


def masks_and_gradient(model: Model) -> tuple[list[Tensor], Tensor]:
    found = gradient(model)
    return model.part.masks, found


def gradient(model: Model) -> Tensor:
    x = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
    (model(x) ** 2).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad


def recompute_call(model: Model) -> None:
    model.forward = lambda x: model.behind(  # type: ignore[method-assign]
        checkpoint(model.part, model.before(x * model.weight), use_reentrant=False)
    )


def recompute_forward(model: Model) -> None:
    """As ``checkpoint_activations`` does it: the hooks of the module do not run again."""
    forward = model.part.forward
    model.part.forward = lambda x: checkpoint(  # type: ignore[method-assign]
        resumable(forward), x, use_reentrant=False
    )


@pytest.mark.parametrize("prepare", [recompute_call, recompute_forward])
@pytest.mark.parametrize("plans", [INSIDE, (DrawPlan(("part",)), DrawPlan(("part.inner",), afterwards=(0,)))])
def test_recomputed_masks_are_the_same(prepare: Callable[[Model], None], plans: tuple[DrawPlan, ...]) -> None:
    plain = on_ranks(plans, masks_and_gradient)
    again = on_ranks(plans, masks_and_gradient, prepare=prepare)
    for (drawn, expected), (redrawn, found) in zip(plain, again, strict=True):
        assert len(drawn) == 3
        assert len(redrawn) == 6, "in the forward pass, and recomputed"
        assert all(torch.equal(a, b) for a, b in zip([*drawn, *drawn], redrawn, strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert not torch.allclose(plain[0][1], plain[1][1])


def test_recomputing_without_the_modules_around_is_refused() -> None:
    def prepare(model: Model) -> None:
        forward = model.part.forward
        model.part.forward = lambda x: checkpoint(  # type: ignore[method-assign]
            forward, x, use_reentrant=False
        )

    with pytest.raises(PlanError, match=r"part\.inner runs without the modules around it"):
        on_ranks(INSIDE, gradient, prepare=prepare)


def test_without_dropout_nothing_is_drawn_nor_changed() -> None:
    def state(model: Model) -> Tensor:
        gradient(model)
        return torch.get_rng_state()

    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert all(torch.equal(before, after) for after in on_ranks(INSIDE, state, p=0.0))


def test_probabilities_may_change_later() -> None:
    def later(model: Model) -> Tensor:
        gradient(model)
        model.part.dropout = 0.3
        gradient(model)
        return model.part.masks[-1]

    (first, second) = on_ranks(INSIDE, later, p=0.0)
    assert not torch.equal(first, second)


def test_evaluation_draws_nothing() -> None:
    def state(model: Model) -> bool:
        before = torch.get_rng_state()
        x = torch.rand(0, WIDTH)
        model.eval()(x)
        return torch.equal(before, torch.get_rng_state())

    assert on_ranks(INSIDE, state) == [True, True]


def test_draws_that_nothing_tells_of_are_an_error() -> None:
    def hidden(model: Model) -> Any:
        model.part.draw = lambda: model.part.masks.append(F.dropout(torch.ones(WIDTH), 0.5))  # type: ignore[method-assign]
        return model(torch.ones(WIDTH))

    with pytest.raises(PlanError, match="part drew random numbers without a dropout probability"):
        on_ranks(INSIDE, hidden, p=0.0)


def test_draws_that_cannot_be_told_apart_are_an_error() -> None:
    plans = (DrawPlan(("part",), mixed=True), DrawPlan(("part.inner",)))
    with pytest.raises(PlanError, match="part: its code draws random numbers for replicated and"):
        on_ranks(plans, masks)

    def only_inside(model: Model) -> Any:
        model.part.dropout = 0.0
        return masks(model)

    (first, second) = on_ranks(plans, only_inside)
    assert torch.equal(first[0][1], second[0][1])


def test_layers_that_are_skipped_at_random_are_refused() -> None:
    def skipping(model: Model) -> Any:
        model.part.layerdrop = 0.1  # type: ignore[assignment]
        return masks(model)

    with pytest.raises(PlanError, match="skips layers at random"):
        on_ranks(INSIDE, skipping)


def test_a_module_that_fails_gives_the_stream_back() -> None:
    def fails(model: Model) -> tuple[Tensor, Tensor]:
        with pytest.raises(RuntimeError, match="size"):
            model(torch.ones(WIDTH + 1))
        return torch.get_rng_state(), model.behind(torch.ones(WIDTH))

    def prepare(model: Model) -> None:
        model.forward = model.part.__call__  # type: ignore[method-assign]

    (first, second) = on_ranks(INSIDE, fails, prepare=prepare)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_a_copy_has_streams_of_its_own() -> None:
    (first, second) = on_ranks(INSIDE, lambda model: masks(copy.deepcopy(model)))
    assert not torch.equal(first[0][0], second[0][0])
    assert torch.equal(first[1], second[1])


def test_without_dropout_the_graph_is_one() -> None:
    def compiled(comm: Communicator) -> Tensor:
        model = Model(0.0)
        attach_random_streams(model, INSIDE, comm)
        forward = torch.compile(model, fullgraph=True, backend="eager")
        out: Tensor = forward(torch.ones(WIDTH, dtype=torch.float64))
        return out

    for out in run_ranks((2,), compiled):
        assert torch.equal(out, torch.ones(WIDTH, dtype=torch.float64))


# Real processes ----------------------------------------------------------------------------------------


def train(path: Path, sequence: bool, recompute: str) -> dict[str, Any]:
    model = shardconv_runtime.load(path, training=True, sequence_parallel=sequence).train()
    if recompute == "ours":
        shardconv_runtime.checkpoint_activations(model)
    elif recompute == "transformers":
        model.gradient_checkpointing_enable()
    torch.manual_seed(5)
    ids = torch.arange(24).reshape(2, 12) % 101
    found: dict[str, Any] = {}
    part: Any = model
    attention = part.transformer.h[0].attn

    def keep(module: Any, args: Any, out: Any) -> None:
        found.setdefault("hidden", out[0].detach())

    attention.register_forward_hook(keep)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    found["loss"] = float(out.loss)
    found["state"] = torch.get_rng_state()
    found["gradient"] = part.transformer.ln_f.weight.grad
    found["inner"] = part.transformer.h[0].mlp.c_fc.weight.grad
    return found


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("draws")
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=101,
        n_positions=64,
        embd_pdrop=0.3,
        resid_pdrop=0.3,
        attn_pdrop=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).double().save_pretrained(root / "model")
    shardconv.convert(root / "model", root / "out", 2, sequence_parallel=True)
    return root / "out"


@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_stay_in_step_with_dropout_everywhere(converted: Path, sequence: bool) -> None:
    plain = run_processes(2, train, converted, sequence, "")
    forms = ("ours",) if sequence else ("ours", "transformers")
    again = [run_processes(2, train, converted, sequence, form) for form in forms]
    first, second = plain
    assert torch.equal(first["state"], second["state"])
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-12)
    assert torch.allclose(first["gradient"], second["gradient"], atol=1e-12)
    if not sequence:  # replicated
        assert torch.allclose(first["hidden"], second["hidden"], atol=1e-12)
    for one, other in [pair for ranks in again for pair in zip(plain, ranks, strict=True)]:
        assert torch.equal(one["state"], other["state"])
        for name in ("gradient", "inner"):
            scale = float(one[name].abs().max())
            torch.testing.assert_close(other[name], one[name], rtol=0, atol=1e-12 * scale)
