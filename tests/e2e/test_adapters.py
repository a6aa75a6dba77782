"""Adapters of the peft library on sharded models, in real processes: what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
from adapters import CONFIGS, load_adapter, low_rank, save_adapters, save_base
from distributed import run_errors, run_processes
from peft import IA3Config, LoHaConfig, OFTConfig, PeftConfig, get_peft_model
from shardconv_runtime.adapters.adapter_set import local_parts
from shardconv_runtime.errors import PlanError, SolveError
from shardconv_runtime.loaded import loaded
from torch import Tensor
from training_runs import adamw, cpu_mesh, load_unsharded, train_parts, train_unsharded

import shardconv
from shardconv.simulation.model_runs import Float64

STEPS = 2
NEW = low_rank(r=5, modules_to_save=["lm_head"])


@dataclass(frozen=True)
class Adapted:
    """A model and adapters of it, ordinary and for some ranks."""

    root: Path
    tp: int

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def directories(self) -> dict[str, Path]:
        return {name: self.root / f"out-{name}" for name in CONFIGS}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Adapted]:
    """For so many ranks, with these adapters planned."""
    made: dict[int, Adapted] = {}

    def of(tp: int, *names: str) -> Adapted:
        if tp not in made:
            found = made[tp] = Adapted(tmp_path_factory.mktemp(f"adapted-{tp}"), tp)
            save_base(found.base)
            save_adapters(found.base, found.root / "adapters")
            shardconv.convert(found.base, found.out, tp, sequence_parallel=True)
        found = made[tp]
        for name in names:
            if not found.directories[name].exists():
                adapter = found.root / "adapters" / name
                pads = tp == 2  # sequences of nine tokens, which is right if it was proven
                shardconv.adapt(found.out, adapter, found.directories[name], check=pads)
        return found

    return of


def tokens() -> Tensor:
    return torch.randint(131, (2, 9), generator=torch.Generator().manual_seed(0))


def differs(got: Tensor, want: Tensor) -> bool:
    return not torch.allclose(got, want, 1e-9, 1e-9)


def generated(model: Any) -> Tensor:
    ids = tokens()
    found: Tensor = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=5,
        do_sample=False,
        pad_token_id=0,
    )
    return found


def use_several(found: Adapted) -> list[str]:
    """All that differs from one process, by what was done."""
    wrong = []
    model = shardconv_runtime.load(found.out, adapter=found.directories)
    whole = save_adapters(found.base, found.root / f"again-{dist.get_rank()}")
    ids = tokens()

    def compare(what: str, got: Tensor, want: Tensor) -> None:
        if differs(got, want):
            wrong.append(what)

    with torch.no_grad():
        for name in (*CONFIGS, "attention"):
            model.set_adapter(name)
            whole.set_adapter(name)
            compare(name, model(ids).logits, whole(ids).logits)
            with model.disable_adapter(), whole.disable_adapter():
                compare(f"{name}, disabled", model(ids).logits, whole(ids).logits)
        if not torch.equal(generated(model), generated(whole)):
            wrong.append("generated tokens")
        model.merge_adapter()
        compare("merged", model(ids).logits, whole(ids).logits)
        model.unmerge_adapter()
        compare("unmerged", model(ids).logits, whole(ids).logits)
        for name in ("everything", "attention"):
            model.set_adapter(name)
            model.save_pretrained(found.root / "saved")
        shardconv_runtime.save(model, found.root / "saved-planned")
        plain = model.unload()
        with whole.disable_adapter():
            compare("unloaded", plain(ids).logits, whole(ids).logits)
        whole.set_adapter("everything")
        model.set_adapter("everything")
        want = whole.merge_and_unload()(ids).logits
        plain = model.merge_and_unload()
        compare("merged and unloaded", plain(ids).logits, want)
        plain.save_pretrained(found.root / "merged")
    return wrong


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_several_adapters_do_what_they_do_in_one_process(adapted: Callable[..., Adapted], tp: int) -> None:
    found = adapted(tp, *CONFIGS)
    assert run_processes(tp, use_several, found) == [[]] * tp
    ids = tokens()
    for name in CONFIGS:
        want = load_adapter(found.base, found.root / "adapters" / name)(ids).logits
        assert not differs(load_adapter(found.base, found.root / "saved" / name)(ids).logits, want)
        planned = found.root / "saved-planned" / name
        assert not differs(load_adapter(found.base, planned)(ids).logits, want)
        if name == "everything":
            assert not differs(load_unsharded(found.root / "merged").eval()(ids).logits, want)
    again = run_processes(tp, logits_of, found.out, found.root / "saved-planned" / "everything")
    assert not any(differs(got, want) for got in again)


def logits_of(out: Path, directory: Path) -> Tensor:
    with torch.no_grad():
        logits: Tensor = shardconv_runtime.load(out, adapter=directory)(tokens()).logits
    return logits


def backward(model: Any) -> None:
    """Of a loss in float64."""
    with Float64():
        model(input_ids=tokens(), labels=tokens()).loss.backward()


def compare_gradients(found: Adapted, name: str, sequence: bool, recompute: bool) -> list[str]:
    """Names of parameters whose gradient is not this rank's part of that of one process."""
    model = shardconv_runtime.load(
        found.out, adapter=found.directories[name], training=True, sequence_parallel=sequence
    )
    if recompute:
        model.get_base_model().gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": lambda: (nullcontext(), Float64())}
        )
    backward(model.train())
    whole = load_adapter(found.base, found.root / "adapters" / name, trainable=True)
    backward(whole.train())
    parameters = dict(whole.get_base_model().named_parameters())
    want = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    got = {n: p.grad for n, p in model.get_base_model().named_parameters()}
    trained = {n for n, gradient in got.items() if gradient is not None}
    wrong = sorted(trained ^ want.keys())
    for fqn, part in local_parts(want.items(), loaded(model).plan, dist.get_rank()):
        gradient = got[fqn]
        if gradient is not None and differs(gradient, part):
            wrong.append(fqn)
    return wrong


@pytest.mark.parametrize(("sequence", "recompute"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("tp", "name"),
    [
        (3, "everything"),
        pytest.param(2, "everything", marks=pytest.mark.slow),
        pytest.param(3, "attention", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process(
    adapted: Callable[..., Adapted], tp: int, name: str, sequence: bool, recompute: bool
) -> None:
    found = run_processes(tp, compare_gradients, adapted(tp, name), name, sequence, recompute)
    assert found == [[]] * tp


def train_new(found: Adapted, split: str) -> Any:
    """Train a new adapter on tp x dp processes; the losses, and the norms of the gradients."""
    mesh = cpu_mesh(2, found.tp)
    planned = found.root / "planned-new"
    options = {"data_parallel": True} if split == "while loading" else {}
    model = shardconv_runtime.load(found.out, adapter=planned, mesh=mesh, training=True, **options)
    if split == "afterwards":
        shardconv_runtime.data_parallel(model, mesh)
    optimizer = adamw(model.train())
    curve = train_parts(model, optimizer, mesh, 0, STEPS)
    directory = found.root / f"trained-{split}"
    shardconv_runtime.save(model, directory, overwrite=True)
    shardconv_runtime.save_optimizer(model, optimizer, f"{directory}-optimizer", overwrite=True)
    return curve


@pytest.fixture(scope="module")
def trained(adapted: Callable[..., Adapted]) -> Callable[[str], Any]:
    """Gives the curve of each way to split the model, which was trained and saved once."""
    found = adapted(2)
    shardconv.adapt(found.out, NEW, found.root / "planned-new", seed=3, overwrite=True, check=False)
    return cache(lambda split: run_processes(4, train_new, found, split)[0])


@pytest.mark.parametrize("split", [pytest.param("afterwards", marks=pytest.mark.slow), "while loading"])
def test_a_new_adapter_is_trained_as_in_one_process(
    adapted: Callable[..., Adapted], trained: Callable[[str], Any], split: str
) -> None:
    found, curve = adapted(2), trained(split)
    torch.manual_seed(3)
    whole = get_peft_model(load_unsharded(found.base), NEW).train()
    want = train_unsharded(whole, adamw(whole), 0, STEPS)
    assert curve.losses == pytest.approx(want.losses, rel=1e-9)
    assert curve.norms == pytest.approx(want.norms, rel=1e-7)
    trained = load_adapter(found.base, found.root / f"trained-{split}")
    ids = tokens()
    assert not differs(trained(ids).logits, whole.eval()(ids).logits)


def go_on(found: Adapted, adapter: Path, state: Path) -> Any:
    """Train on with the state of a job of another size."""
    mesh = cpu_mesh(1, found.tp)
    model = shardconv_runtime.load(found.out, adapter=adapter, mesh=mesh, training=True)
    optimizer = adamw(model.train())
    shardconv_runtime.load_optimizer(model, optimizer, state)
    return train_parts(model, optimizer, mesh, STEPS, STEPS)


def test_training_goes_on_with_another_number_of_processes(
    adapted: Callable[..., Adapted], trained: Callable[[str], Any], tmp_path: Path
) -> None:
    two, three = adapted(2), adapted(3)
    trained("while loading")
    directory = two.root / "trained-while loading"
    shardconv.adapt(three.out, directory, tmp_path / "for-three", check=False)
    curve = run_processes(3, go_on, three, tmp_path / "for-three", f"{directory}-optimizer")[0]
    torch.manual_seed(3)
    whole = get_peft_model(load_unsharded(two.base), NEW).train()
    optimizer = adamw(whole)
    train_unsharded(whole, optimizer, 0, STEPS)
    want = train_unsharded(whole, optimizer, STEPS, STEPS)
    assert curve.losses == pytest.approx(want.losses, rel=1e-9)


def add(found: Adapted) -> tuple[bool, bool, list[str]]:
    """Whether new adapters begin as they do in one process, and what was refused."""
    base = shardconv_runtime.load(found.out, training=True)
    one = shardconv_runtime.add_adapter(base, NEW, seed=3)
    two = shardconv_runtime.add_adapter(one, low_rank(["q_proj"]), "second", seed=4)
    torch.manual_seed(3)
    whole = get_peft_model(load_unsharded(found.base), NEW)
    theirs = dict(whole.get_base_model().named_parameters())
    same = all(
        torch.equal(got, dict(model.get_base_model().named_parameters())[n])
        for model in (one, two)
        for n, want in theirs.items()
        if "lora" in n
        for got in [dict(local_parts([(n, want)], loaded(model).plan, dist.get_rank()))[n]]
    )
    shares = (
        two.get_base_model().get_input_embeddings().weight.data_ptr() == next(base.parameters()).data_ptr()
    )
    refused = []
    for call in (
        lambda: two.add_adapter("third", NEW),
        lambda: two.load_adapter(found.root / "adapters" / "attention", "third"),
        lambda: two.push_to_hub("user/name"),
        lambda: shardconv_runtime.add_adapter(two, NEW, "second"),
        lambda: shardconv_runtime.add_adapter(two, NEW, "a.b"),
        lambda: get_peft_model(shardconv_runtime.load(found.out), NEW),
        lambda: two.save_pretrained(found.root / "x", save_embedding_layers=True),
    ):
        try:
            call()
        except PlanError as error:
            refused.append(str(error))
    return same, shares, refused


def test_adapters_that_are_added_to_a_loaded_model(adapted: Callable[..., Adapted]) -> None:
    for same, shares, refused in run_processes(2, add, adapted(2)):
        assert same
        assert shares
        assert len(refused) == 7, refused


KINDS: dict[str, PeftConfig] = {
    "weight decomposition of columns": low_rank(["q_proj", "up_proj"], use_dora=True),
    "embeddings and head": low_rank(["embed_tokens", "lm_head"]),
    "biases of the model": low_rank(["q_proj", "o_proj"], bias="all", lora_bias=True),
    "activations": IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "Hadamard products": LoHaConfig(target_modules=["q_proj", "o_proj"], r=4, task_type="CAUSAL_LM"),
    "rotations": OFTConfig(target_modules=["q_proj", "o_proj"], oft_block_size=4, r=0, task_type="CAUSAL_LM"),
}
NOT_MERGED = ("embeddings and head", "rotations")
"""The ranks' parts of the weight and of the adapter do not fit together."""


def results_of(out: Path, directory: Path, saved: Path) -> tuple[list[Tensor], str]:
    """Logits: with the adapter, with it disabled, with it merged; or why that is refused."""
    model = shardconv_runtime.load(out, adapter=directory)
    found, why = [], ""
    with torch.no_grad():
        found.append(model(tokens()).logits)
        with model.disable_adapter():
            found.append(model(tokens()).logits)
        model.save_pretrained(saved)
        try:
            found.append(model.merge_and_unload()(tokens()).logits)
        except PlanError as error:
            why = str(error)
    return found, why


@pytest.mark.parametrize(
    "kind", [k if k.startswith(("e", "b")) else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_other_kinds_of_adapters(adapted: Callable[..., Adapted], kind: str, tmp_path: Path) -> None:
    found = adapted(2)
    whole = save_adapters(found.base, tmp_path / "saved", {"default": KINDS[kind]})
    shardconv.adapt(found.out, tmp_path / "saved", tmp_path / "planned")
    with torch.no_grad():
        want = [whole(tokens()).logits]
        with whole.disable_adapter():
            want.append(whole(tokens()).logits)
    ranks = run_processes(2, results_of, found.out, tmp_path / "planned", tmp_path / "again")
    assert not differs(load_adapter(found.base, tmp_path / "again")(tokens()).logits, want[0])
    want.append(whole.merge_and_unload()(tokens()).logits.detach())
    for got, why in ranks:
        assert ("merging" in why) == (kind in NOT_MERGED), why
        assert not any(differs(a, b) for a, b in zip(got, want, strict=bool(not why)))


def test_what_would_change_the_layout_of_the_model_is_refused(
    adapted: Callable[..., Adapted], tmp_path: Path
) -> None:
    found = adapted(2)
    save_adapters(found.base, tmp_path / "saved", {"default": low_rank(["o_proj"], use_dora=True)})
    with pytest.raises(SolveError, match=r"o_proj.base_layer.weight: the adapter would need it laid out as"):
        shardconv.adapt(found.out, tmp_path / "saved", tmp_path / "planned")
    assert not (tmp_path / "planned").exists()


def load_other(found: Adapted, directory: Path) -> None:
    shardconv_runtime.load(found.out, adapter=directory)


def test_adapters_of_other_conversions_are_refused_on_all_ranks(adapted: Callable[..., Adapted]) -> None:
    two, three = adapted(2), adapted(3, "everything")
    for directory, message in (
        (three.directories["everything"], "was adapted for another conversion"),
        (two.root / "adapters" / "attention", "run `shardconv adapt"),
        (two.base, "it has no adapter_config.json"),
    ):
        for error in run_errors(2, load_other, two, directory):
            assert message in str(error)
