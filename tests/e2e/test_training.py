"""Models trained in parts, by real processes over gloo: each step is that of the unsharded model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
from distributed import comm_counts, run_processes
from shardconv_runtime import PlanError
from shardconv_runtime.format import plan_json
from shardconv_runtime.training.checkpointing import repeated_layers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from training_runs import (
    Curve,
    adamw,
    batches,
    converted_for_two,
    cpu_mesh,
    data_rank,
    load_unsharded,
    part_loss,
    train_parts,
    train_unsharded,
    unsharded_loss,
)

import shardconv
from shardconv.simulation.model_runs import Float64

TYPES = ("qwen3", "phi3", "gpt2")


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of a type, converted for two ranks; its checkpoint lies beside it."""
    return partial(converted_for_two, tmp_path_factory.mktemp("outs"))


def load_parts(path: Path, shape: tuple[int, ...], sequence: bool, **options: Any) -> tuple[Any, Any]:
    mesh = cpu_mesh(*shape)
    model = shardconv_runtime.load(
        path, mesh=mesh, training=True, sequence_parallel=sequence, **options
    ).train()
    return model, mesh


def difference(found: list[float], want: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, want, strict=True))


def require_same_parameters(saved: Path, model: nn.Module, tolerance: float) -> None:
    """What was trained in shards, merged, equals the model trained unsharded."""
    shardconv.merge(saved, saved.parent / "merged")
    merged = dict(load_unsharded(saved.parent / "merged").named_parameters())
    for name, parameter in model.named_parameters():
        assert (merged[name] - parameter).abs().max() < tolerance, name


# The curve -------------------------------------------------------------------------------------------


def train_and_save(path: Path, shape: tuple[int, ...], sequence: bool, num_steps: int, out: Path) -> Curve:
    model, mesh = load_parts(path, shape, sequence)
    shardconv_runtime.data_parallel(model, mesh)
    curve = train_parts(model, adamw(model), mesh, 0, num_steps)
    shardconv_runtime.save(model, out)
    return curve


@pytest.mark.parametrize(
    ("shape", "sequence", "num_steps"),
    [
        ((2, 2), True, 2),
        ((2, 1, 2), True, 2),
        pytest.param((1, 2, 2), False, 3, marks=pytest.mark.slow),
        *(pytest.param((2, 2), sequence, 50, marks=pytest.mark.slow) for sequence in (False, True)),
    ],
)
def test_training_follows_one_process(
    shape: tuple[int, ...],
    sequence: bool,
    num_steps: int,
    outs: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    path = outs("qwen3")
    curves = run_processes(4, train_and_save, path, shape, sequence, num_steps, tmp_path / "out")
    unsharded = load_unsharded(path.parent / "model")
    want = train_unsharded(unsharded, adamw(unsharded), 0, num_steps)
    assert all(curve == curves[0] for curve in curves)
    assert difference(curves[0].losses, want.losses) < 1e-7
    assert difference(curves[0].norms, want.norms) < 1e-7
    require_same_parameters(tmp_path / "out", unsharded, 1e-7)
    assert want.norms[0] > 0.5, "gradients were clipped"


def curves_in(path: Path, param_dtypes: Sequence[torch.dtype | None]) -> list[Curve]:
    curves = []
    for param_dtype in param_dtypes:
        model, mesh = load_parts(path, (2, 2), True, dtype="float32")
        shardconv_runtime.data_parallel(model, mesh, param_dtype=param_dtype)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        curves.append(train_parts(model, adamw(model), mesh, 0, 2))
    return curves


def test_mixed_precision_stays_near(outs: Callable[[str], Path]) -> None:
    full, mixed = run_processes(4, curves_in, outs("qwen3"), (None, torch.bfloat16))[0]
    assert difference(full.losses, mixed.losses) < 0.1
    assert 0 < abs(full.norms[0] - mixed.norms[0]) < 0.05 * full.norms[0]


def continue_training(path: Path, round_: int, num_steps: int, out: Path) -> None:
    model, mesh = load_parts(path, (2, 2), True)
    shardconv_runtime.data_parallel(model, mesh)
    optimizer = adamw(model)
    if round_:
        shardconv_runtime.load_optimizer(model, optimizer, path.parent / f"optimizer-{round_}")
    train_parts(model, optimizer, mesh, round_ * num_steps, num_steps)
    shardconv_runtime.save(model, out)
    shardconv_runtime.save_optimizer(model, optimizer, out.parent / f"optimizer-{round_ + 1}")


@pytest.mark.parametrize("num_rounds", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_is_continued(num_rounds: int, outs: Callable[[str], Path], tmp_path: Path) -> None:
    num_steps, path = 1, outs("gpt2")
    source = path.parent / "model"
    for round_ in range(num_rounds):
        run_processes(4, continue_training, path, round_, num_steps, tmp_path / f"out-{round_}")
        path = tmp_path / f"out-{round_}"
    unsharded = load_unsharded(source)
    train_unsharded(unsharded, adamw(unsharded), 0, num_rounds * num_steps)
    require_same_parameters(path, unsharded, 1e-9)


# Gradients and their norm ----------------------------------------------------------------------------

ORDERS = (2.0, math.inf, 1.0, 3.0)


def norms_of(cases: Sequence[tuple[Path, str]]) -> list[list[float]]:
    return [norms(path, wrapper, wrapper != "ddp") for path, wrapper in cases]


def norms(path: Path, wrapper: str, sequence: bool) -> list[float]:
    """Of all orders, and that of clipped gradients."""
    model, mesh = load_parts(path, (2, 2), sequence)
    part, _ = data_rank(mesh)
    if wrapper == "fsdp":
        shardconv_runtime.data_parallel(model, mesh)
    elif wrapper == "ddp":
        model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    ids = next(batches(0, 1))[0]
    mine = ids[2 * part :][:2] if wrapper else ids
    with Float64():
        model(input_ids=mine, labels=mine).loss.backward()
    found = [shardconv_runtime.grad_norm(model, norm_type=order).item() for order in ORDERS]
    before = shardconv_runtime.clip_grad_norm(model, 0.1, norm_type=3.0, foreach=wrapper != "ddp")
    assert before.item() == pytest.approx(found[-1], rel=1e-12)  # of one tensor after the other, or of all
    found.append(shardconv_runtime.grad_norm(model).item())
    assert clip_by_torch(model, 0.01) == pytest.approx(found[-1], rel=1e-12)
    return [*found, shardconv_runtime.grad_norm(model).item()]


def clip_by_torch(model: nn.Module, max_norm: float) -> float:
    """The norm before clipping; another model's gradients among them are refused."""
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    with pytest.raises(PlanError, match="clip these apart"):
        torch.nn.utils.clip_grad_norm_([*model.parameters(), other], max_norm)
    assert torch.nn.utils.get_total_norm([other.grad]).item() == pytest.approx(2**0.5)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()


WRAPPED = [
    ("qwen3", ""),
    ("phi3", "fsdp"),
    ("gpt2", "fsdp"),
    ("gpt2", "ddp"),
]
OTHERS = [case for case in itertools.product(TYPES, ("", "fsdp", "ddp")) if case not in WRAPPED]


@pytest.mark.parametrize("cases", [WRAPPED, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_every_element_counts_once(cases: list[tuple[str, str]], outs: Callable[[str], Path]) -> None:
    converted = [(outs(name), wrapper) for name, wrapper in cases]
    found = run_processes(4, norms_of, converted)
    assert all(each == found[0] for each in found)
    for (path, _), norms_of_case in zip(converted, found[0], strict=True):
        assert norms_of_case == pytest.approx(unsharded_norms(path.parent / "model"), rel=1e-12), path


def unsharded_norms(path: Path) -> list[float]:
    """Those that ``norms`` returns, of one process."""
    unsharded = load_unsharded(path)
    unsharded_loss(unsharded, next(batches(0, 1))[0]).backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in unsharded.parameters() if p.grad is not None]
    found = [torch.nn.utils.get_total_norm(gradients, order).item() for order in ORDERS]
    torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.1, norm_type=3.0)
    found.append(torch.nn.utils.get_total_norm(gradients).item())
    torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.01)
    return [*found, torch.nn.utils.get_total_norm(gradients).item()]


def clip_nonfinite(path: Path) -> dict[float, list[Any]]:
    return {value: clip_with(path, value) for value in (math.nan, math.inf)}


def clip_with(path: Path, value: float) -> list[Any]:
    model, mesh = load_parts(path, (2, 2), False)
    shardconv_runtime.data_parallel(model, mesh)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    if torch.distributed.get_rank() == 3:
        next(model.parameters()).grad.to_local()[0, 0] = value
    found: list[Any] = [shardconv_runtime.grad_norm(model, norm_type=math.inf).item()]
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        shardconv_runtime.clip_grad_norm(model, 1.0, error_if_nonfinite=True)
    found.append(shardconv_runtime.clip_grad_norm(model, 1.0).item())
    last = list(model.parameters())[-1].grad.to_local()
    return [*found, bool(last.isnan().all()), bool((last == 0).all())]


def test_norms_that_are_not_finite(outs: Callable[[str], Path]) -> None:
    """As torch does: a NaN makes all gradients NaN, an infinity makes those zero that are finite."""
    for cases in run_processes(4, clip_nonfinite, outs("qwen3")):
        for is_nan, (*found, all_nan, all_zero) in zip((True, False), cases.values(), strict=True):
            assert [math.isnan(x) for x in found] == [is_nan] * 2
            assert [math.isinf(x) for x in found] == [not is_nan] * 2
            assert (all_nan, all_zero) == (is_nan, not is_nan)


def gated_gradients(path: Path) -> tuple[float, list[str]]:
    """The norm, and the classes of what is wrapped."""
    model, mesh = load_parts(path, (2, 2), False)
    shardconv_runtime.data_parallel(model, mesh)
    part, _ = data_rank(mesh)
    mine = next(batches(0, 1))[0][2 * part :][:2]
    part_loss(model, mine).backward()  # type: ignore[no-untyped-call]
    wrapped = [type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)]
    return shardconv_runtime.grad_norm(model).item(), wrapped


def test_gates_on_modules_above_a_parameters_own(outs: Callable[[str], Path]) -> None:
    path = outs("bamba")
    plan = plan_json.read(path / "plan.json")
    assert any(entry.grad_levels and entry.grad_axes for entry in plan.parameters)
    unsharded = load_unsharded(path.parent / "model")
    unsharded_loss(unsharded, next(batches(0, 1))[0]).backward()  # type: ignore[no-untyped-call]
    want = torch.nn.utils.get_total_norm([p.grad for p in unsharded.parameters() if p.grad is not None])
    for norm, wrapped in run_processes(4, gated_gradients, path):
        assert norm == pytest.approx(want.item(), rel=1e-12)
        assert wrapped == ["FSDPBambaForCausalLM", "FSDPBambaDecoderLayer", "FSDPBambaDecoderLayer"]


# Recomputed activations ------------------------------------------------------------------------------

FORMS = ("none", "transformers", "all", "matmul", "operators")


def recompute(model: Any, form: str) -> None:
    if form == "transformers":
        model.gradient_checkpointing_enable()
    elif form == "all":
        shardconv_runtime.checkpoint_activations(model)
    elif form == "matmul":
        shardconv_runtime.checkpoint_activations(model, save="matmul")
    elif form == "operators":
        shardconv_runtime.checkpoint_activations(model, save=[torch.ops.aten.mm.default])


def gradients_of_forms(path: Path, sequence: bool, wrapped: bool) -> list[int]:
    """Check that all forms have the same gradients; return what each form computed, in flops."""
    want: dict[str, Tensor] = {}
    flops = []
    for form in FORMS:
        model, mesh = load_parts(path, (2, 2) if wrapped else (1, 2), sequence)
        names = [name for name, _ in model.named_parameters()]
        recompute(model, form)
        if wrapped:
            shardconv_runtime.data_parallel(model, mesh)
        ids = next(batches(0, 1))[0]
        with FlopCounterMode(display=False) as counter:
            model(ids, labels=ids).loss.backward()
        flops.append(counter.get_total_flops())
        assert [name for name, _ in model.named_parameters()] == names
        assert all(parameter.is_leaf for parameter in model.parameters())
        found = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        want = want or found
        assert found.keys() == want.keys() == set(names)
        for name, gradient in want.items():
            error = (found[name] - gradient).abs().max()
            assert error <= 1e-12 * gradient.abs().max(), (form, name)
    return flops


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.parametrize(
    ("sequence", "wrapped"),
    [
        (True, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((False, False), (False, True), (True, False))
        ),
    ],
)
def test_recomputed_activations_give_the_same_gradients(
    sequence: bool, wrapped: bool, outs: Callable[[str], Path]
) -> None:
    num_processes = 4 if wrapped else 2
    for found in run_processes(num_processes, gradients_of_forms, outs("qwen3"), sequence, wrapped):
        none, theirs, everything, matmul, operators = found
        assert none <= matmul <= operators < everything == theirs


def recompute_with_cache(path: Path) -> str:
    model, _ = load_parts(path, (1, 2), False)
    shardconv_runtime.checkpoint_activations(model)
    ids = torch.arange(6)[None]
    assert model(ids, use_cache=True).past_key_values is None
    cache = model.eval()(ids, use_cache=True).past_key_values
    assert cache is not None
    with pytest.raises(shardconv_runtime.PlanError, match="past_key_values") as caught:
        model.train()(ids, past_key_values=cache)
    with pytest.raises(shardconv_runtime.PlanError, match="already"):
        shardconv_runtime.checkpoint_activations(model)
    return str(caught.value)


def test_no_cache_is_filled_twice(outs: Callable[[str], Path]) -> None:
    assert len(set(run_processes(2, recompute_with_cache, outs("qwen3")))) == 1


# Activations that are gathered again -----------------------------------------------------------------


def gathered_again(path: Path, shape: tuple[int, ...]) -> list[int]:
    """Check that gradients keep their bits; return how often each form of the model gathers."""
    numbers, found = [], []
    for regather in (True, False):
        model, mesh = load_parts(path, shape, True, regather=regather)
        if shape[0] > 1:
            shardconv_runtime.data_parallel(model, mesh)
        part, parts = data_rank(mesh)
        ids = next(batches(0, 1))[0].chunk(parts)[part]
        with CommDebugMode() as counter:
            part_loss(model, ids).backward()  # type: ignore[no-untyped-call]
        numbers.append(comm_counts(counter)["all_gather_into_tensor"])
        found.append({name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        norm = shardconv_runtime.grad_norm(model).item()
        assert norm == pytest.approx(float((path.parent / "norm").read_text()), rel=1e-12)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    return numbers


@pytest.mark.parametrize(
    ("model_type", "shape"), [("qwen3", (2, 2)), pytest.param("gpt2", (1, 2), marks=pytest.mark.slow)]
)
def test_activations_are_gathered_again(
    model_type: str, shape: tuple[int, ...], outs: Callable[[str], Path]
) -> None:
    path = outs(model_type)
    unsharded = load_unsharded(path.parent / "model")
    unsharded_loss(unsharded, next(batches(0, 1))[0]).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([p.grad for p in unsharded.parameters() if p.grad is not None])
    (path.parent / "norm").write_text(repr(norm.item()))
    for again, once in run_processes(math.prod(shape), gathered_again, path, shape):
        assert again == once + 2 * len(repeated_layers(unsharded))


# Layers ----------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A container that nobody calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList([inner])


def test_layers_are_the_children_of_outermost_lists() -> None:
    first, second, third, shared = (nn.Sequential(nn.Linear(2, 2)) for _ in range(4))
    first.append(nn.ModuleList([nn.Linear(2, 2)]))  # type: ignore[arg-type]
    model = nn.Module()
    model.layers = nn.ModuleList([first, shared, nn.ModuleList([second])])
    model.other = nn.ModuleList([shared, Holder(third)])
    assert repeated_layers(model) == [first, shared, second, third]
