"""Several stages in each process, trained by interleaved schedules: all is as in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_errors_of_each, run_processes
from shardconv_runtime import ShardconvError, Training
from staged_training import (
    Run,
    batch,
    checkpoint,
    gpt2,
    interrupted,
    planned,
    require_same,
    resumed,
    trained,
    trained_alone,
)

import shardconv
from shardconv.simulation.model_runs import Float64

PP = 4
INTERLEAVED = Run(pp=PP, per_process=2, schedule="interleaved")


def llama(path: Path) -> Path:
    """A model of four layers, in float64."""
    return checkpoint("llama", path, num_hidden_layers=PP)[0]


@pytest.mark.parametrize(
    "run",
    [
        Run(PP, 2, tp=2, dp=2, schedule="interleaved", steps=2, recompute=True),
        pytest.param(Run(PP, 2, schedule="looped", steps=3), marks=pytest.mark.slow),
        pytest.param(Run(PP, 2, schedule="interleaved", microbatches=1), marks=pytest.mark.slow),
        pytest.param(Run(PP, 2, schedule="interleaved", microbatches=8, steps=30), marks=pytest.mark.slow),
        pytest.param(Run(PP, 2, tp=2, dp=2, schedule="looped", steps=10), marks=pytest.mark.slow),
        pytest.param(Run(6, 2, dp=2, schedule="interleaved", steps=2), marks=pytest.mark.slow),
        pytest.param(
            Run(6, 3, dp=2, schedule="interleaved", steps=2, recompute=True), marks=pytest.mark.slow
        ),
        pytest.param(
            Run(6, 3, tp=2, schedule="looped", microbatches=2, gather_logits=False), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_tied_head_trains_as_in_one_process(run: Run, tmp_path: Path) -> None:
    source, model = gpt2(tmp_path, n_layer=run.pp)
    found = run_processes(run.num_processes, trained, str(source), planned(source, run.tp, run.pp), run)
    require_same(found, trained_alone(model, run), run)


@pytest.mark.parametrize(
    "run",
    [
        Run(PP, 2, tp=2, schedule="interleaved", sequence_parallel=True, length=7),
        pytest.param(
            Run(PP, 2, tp=2, dp=2, schedule="looped", steps=2, sequence_parallel=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Run(PP, 2, tp=2, dp=2, schedule="interleaved", sequence_parallel=True, recompute=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_sequence_parallel_stages(run: Run, tmp_path: Path) -> None:
    # What is recomputed does not see the mode that keeps norms in float64; those of gpt2 need none.
    layers = {"n_layer": PP} if run.recompute else {"num_hidden_layers": PP}
    source, model = gpt2(tmp_path, **layers) if run.recompute else checkpoint("llama", tmp_path, **layers)
    plan = planned(source, run.tp, run.pp, sequence_parallel=True, check=True)
    found = run_processes(run.num_processes, trained, str(source), plan, run)
    require_same(found, trained_alone(model, run), run)


def test_checkpoints_do_not_know_how_many_stages_a_process_has(tmp_path: Path) -> None:
    source, model = gpt2(tmp_path, n_layer=PP)
    out = tmp_path / "trained"
    run_processes(PP, interrupted, str(source), planned(source, 2, PP), INTERLEAVED, str(out))
    want = trained_alone(model, Run(steps=4, clip=False))
    for run in (INTERLEAVED, Run(pp=PP)):
        number = 2 * PP // run.per_process
        for loss in run_processes(number, resumed, str(out), str(out / "model"), run):
            assert loss == pytest.approx(want["losses"][3], abs=1e-8)
    shardconv.merge(out / "model", tmp_path / "merged")
    for plain in (tmp_path / "merged", out / "plain"):
        alone = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64)
        with Float64():
            assert alone(**batch(2)).loss.item() == pytest.approx(want["losses"][2], abs=1e-8)


@pytest.mark.slow
def test_stages_of_one_process_each_go_on_with_several(tmp_path: Path) -> None:
    source, model = gpt2(tmp_path, n_layer=PP)
    out = tmp_path / "trained"
    run_processes(2 * PP, interrupted, str(source), planned(source, 2, PP), Run(pp=PP), str(out))
    want = trained_alone(model, Run(steps=4, clip=False))
    for loss in run_processes(PP, resumed, str(out), str(out / "model"), INTERLEAVED):
        assert loss == pytest.approx(want["losses"][3], abs=1e-8)


def refused(source: str, plan: str) -> dict[str, str]:
    """What a process is told of things that several stages in each process cannot do."""
    model = shardconv_runtime.load(source, plan=plan, training=Training(stages_per_process=2))
    found: dict[str, str] = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ShardconvError as error:
            found[name] = str(error)

    given = batch()
    ids = given["input_ids"]
    pipeline = shardconv_runtime.Pipeline(model, microbatches=4, schedule="interleaved")
    note("a call with gradients", lambda: model(**given))
    for schedule in ("1f1b", "zigzag"):
        note(schedule, lambda s=schedule: shardconv_runtime.Pipeline(model, microbatches=4, schedule=s))
    for number in (0, 5):
        note(
            f"{number} microbatches",
            lambda n=number: shardconv_runtime.Pipeline(model, microbatches=n, schedule="interleaved"),
        )
    note("other inputs", lambda: pipeline.step({n: v + int(os.environ["RANK"]) for n, v in given.items()}))
    with torch.no_grad():
        note("generate", lambda: model.generate(ids, max_new_tokens=2))
        cache = transformers.DynamicCache()
        note("a cache", lambda: model(ids, past_key_values=cache))
        assert model(ids).past_key_values is None
    return found


def test_what_several_stages_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    source = llama(tmp_path)
    first, second = run_processes(2, refused, str(source), planned(source, 1, PP))
    wanted = {
        "a call with gradients": "train with shardconv_runtime.Pipeline",
        "1f1b": "schedule='1f1b' is not for 2 stages in each process; choose one of 'interleaved', 'looped'",
        "zigzag": "'zigzag' should be one of 'interleaved', 'looped'",
        "0 microbatches": "needs at least 1",
        "5 microbatches": "in 2 equal rounds on 2 processes, which do not divide them; give a multiple of 2",
        "other inputs": "another input_ids of microbatch 0 on rank 1",
        "generate": "generate is for models with one stage in each process",
        "a cache": "past_key_values was given to a model with several stages in each process",
    }
    for found in (first, second):
        assert found.keys() == wanted.keys()
        for name, text in wanted.items():
            assert text in found[name], name


def loads(source: str, plan: str | None, several: int) -> None:
    """Load a model, and make an interleaved schedule for it."""
    model = shardconv_runtime.load(source, plan=plan, training=Training(stages_per_process=several))
    shardconv_runtime.Pipeline(model, microbatches=4, schedule="interleaved")


def test_loads_with_other_numbers_of_stages_are_refused_on_every_rank(tmp_path: Path) -> None:
    source = llama(tmp_path)
    plan, plain = planned(source, 1, PP), planned(source, 2, 1)
    calls = {
        "does not divide the 4 stages of the model; choose among [1, 2]": (plan, 3),
        "one process would have all stages": (plan, PP),
        "does not divide": (plan, 0),
        "the model has no stages": (plain, 2),
        "tp=1 and 4 stages, and 2 process(es)": (plan, 1),
    }
    given = [(str(source), made, several) for made, several in calls.values()]
    for text, errors in zip(calls, run_errors_of_each(2, loads, given), strict=True):
        assert all(error is not None and text in str(error) for error in errors), (text, errors)
