"""Every form of ``calls.FORMS`` on a type: two processes load it, the unsharded model says what is right."""

from __future__ import annotations

import copy
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import shardconv_runtime
import torch
import torch.distributed as dist
from distributed import run_outcomes
from forked import Forked
from made_inputs import make_inputs
from shardconv_runtime import Communication
from shardconv_runtime.errors import LaunchError, ShardconvError
from torch import Tensor

import shardconv
from shardconv.simulation.model_runs import Float64

from .calls import CASTS, FORMS, PLAIN, Given, NotApplicable, make_given
from .kept_rows import rows_in
from .measure import FLOAT32_TOLERANCE, TOLERANCE, difference
from .saved import save_random
from .sweep import append

RIGHT, REFUSED, WRONG, CRASH, ABSENT = "right", "refused", "wrong", "crash", "absent"
"""As the unsharded model; an error of ours on every rank; other numbers on some rank; anything else on some
rank; the unsharded model cannot be called so."""
TP = 2
COLLECTIVE_S = 20
"""How long a rank waits for another one that has left a form."""
TYPE_S = 420
"""Limit for one type."""

T = TypeVar("T")
Outcome = tuple[str, str]
"""What became of a form, and what is to be said of it."""
Wanted = list[Tensor] | str
"""What the unsharded model gives, or why it does not."""


@dataclass(frozen=True)
class Reference:
    """What the unsharded model gives, and how it was run."""

    given: Given
    dtype: torch.dtype
    is_exact: bool
    """Whether casts to float32 inside of the model keep float64."""
    want: Mapping[str, Wanted]

    @property
    def tolerance(self) -> float:
        """Largest difference from it, relative to the largest value."""
        return TOLERANCE if self.is_exact else FLOAT32_TOLERANCE


def try_calls(family: str, model_type: str, forms: Iterable[str] = tuple(FORMS)) -> dict[str, Outcome]:
    """Convert a type and call it in every form.

    Raises:
        ShardconvError: it has no plan.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        model = save_random(family, model_type, path / "in", torch.float32)
        shardconv.convert(path / "in", path / "out", tp=TP)
        reference = refer(model, tuple(forms))
        out: dict[str, Outcome] = {
            form: (ABSENT, want) for form, want in reference.want.items() if isinstance(want, str)
        }
        while left := [form for form in reference.want if form not in out]:
            out |= _from_ranks(path / "out", reference, left)
    return {form: out[form] for form in reference.want}


# The unsharded model -------------------------------------------------------------------------------


def refer(model: Any, forms: Sequence[str]) -> Reference:
    """Call an unsharded float32 model in every form, in float64 if its code can compute in it."""
    made = make_inputs(model, seed=7)
    for dtype, is_exact in ((torch.float64, True), (torch.float64, False), (torch.float32, False)):
        unsharded = _prepared(copy.deepcopy(model), dtype)
        inputs = made.to(dtype)
        with torch.no_grad(), _mode(is_exact):
            given = make_given(unsharded, inputs.tensors, inputs.options)
        want = {form: _wanted(unsharded, given, form, is_exact) for form in forms}
        first = _wanted(unsharded, given, next(iter(FORMS)), is_exact)
        if not isinstance(first, str) and any(t.isfinite().any() for t in first if t.numel()):
            break
    return Reference(given, dtype, is_exact, want)


def _prepared(model: Any, dtype: torch.dtype) -> Any:
    """The model as all forms call it."""
    model.to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product has no float64 on CPUs
    return model


def _mode(is_exact: bool) -> AbstractContextManager[Any]:
    return Float64() if is_exact else nullcontext()


def _wanted(model: Any, given: Given, form: str, is_exact: bool) -> Wanted:
    try:
        found = _call(model, given, form, is_exact)
    except NotApplicable as reason:
        return str(reason)
    except Exception as error:
        return _line(error)
    return found if found else "returns no tensor"


def _call(model: Any, given: Given, form: str, is_exact: bool) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad(), _mode(is_exact and form not in (*CASTS, *PLAIN)):
        return [t.detach().clone() for t in FORMS[form](model, given)]


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


# The ranks -----------------------------------------------------------------------------------------


def _from_ranks(path: Path, reference: Reference, forms: Sequence[str]) -> dict[str, Outcome]:
    """The outcomes of the forms, up to the first after which the ranks cannot go on; at least one."""
    return from_ranks(forms, _on_rank, path, reference, forms)


def from_ranks(names: Sequence[str], on_rank: Callable[..., list[Outcome]], *args: Any) -> dict[str, Outcome]:
    """The outcomes of ranks that try one after another, up to the first after which they cannot go on."""
    outcomes = run_outcomes(TP, on_rank, *args)
    failed = [text for _, text, _ in outcomes if text is not None]
    if failed:
        return {names[0]: (CRASH, failed[0].strip().splitlines()[-1])}
    return dict(zip(names, outcomes[0][0], strict=False))


def _on_rank(path: Path, reference: Reference, forms: Sequence[str]) -> list[Outcome]:
    model = shardconv_runtime.load(path, communication=Communication(timeout_s=COLLECTIVE_S))
    _prepared(model, reference.dtype)
    return in_step(forms, lambda form: _try(model, reference, form))


def in_step(names: Sequence[str], attempt: Callable[[str], Outcome]) -> list[Outcome]:
    """What became of each attempt on all ranks, up to the first after which they cannot go on."""
    control = dist.new_group(backend="gloo")
    out: list[Outcome] = []
    for name in names:
        found: list[Any] = [None] * TP
        dist.all_gather_object(found, attempt(name), group=control)
        out.append(joined(found))
        if out[-1][0] == CRASH:
            break  # the ranks may be at different collectives
    return out


def judged(run: Callable[[], T], judge: Callable[[T], Outcome]) -> Outcome:
    """What is to be said of a result, or of the error that came in its place."""
    try:
        got = run()
    except LaunchError as error:
        return CRASH, _line(error)
    except ShardconvError as error:
        return REFUSED, _line(error)
    except Exception as error:
        return CRASH, _line(error)
    return judge(got)


def _try(model: Any, reference: Reference, form: str) -> Outcome:
    return judged(
        lambda: _call(model, reference.given, form, reference.is_exact),
        lambda got: _judge(got, reference, form),
    )


def _judge(got: list[Tensor], reference: Reference, form: str) -> Outcome:
    want = reference.want[form]
    assert not isinstance(want, str)
    if form in CASTS:
        return _judge_cast(got, want, reference)
    error = difference(got, want)
    return (RIGHT, "") if error <= reference.tolerance else (WRONG, f"differs by {error:.1e}")


def _judge_cast(got: list[Tensor], want: list[Tensor], reference: Reference) -> Outcome:
    """In few digits, a sharded model may be as far from the numbers of many digits as the unsharded one."""
    truth = reference.want[next(iter(FORMS))]
    assert not isinstance(truth, str)
    if [t.shape for t in got] != [t.shape for t in want]:
        return WRONG, "other shapes"
    ours, theirs = _mean_error(got, truth), _mean_error(want, truth)
    few = max(torch.finfo(t.dtype).eps for t in want if t.is_floating_point())
    return (
        (RIGHT, "") if ours <= 3 * theirs + 10 * few else (WRONG, f"{ours:.1e} off, unsharded {theirs:.1e}")
    )


def _mean_error(got: list[Tensor], truth: list[Tensor]) -> float:
    """The mean difference of the first output, which are logits, relative to the mean value."""
    x, y = got[0].double(), truth[0].double()
    return float((x - y).abs().nanmean() / y.abs().nanmean().clamp_min(1e-30))


def joined(ranks: Sequence[Outcome]) -> Outcome:
    """What the outcomes of the ranks amount to."""
    for status in (CRASH, WRONG):
        for rank, (found, text) in enumerate(ranks):
            if found == status:
                return status, f"rank {rank}: {text}"
    if len({status for status, _ in ranks}) > 1:
        return CRASH, f"not on all ranks: {'; '.join(text or status for status, text in ranks)}"
    return ranks[0]


# Many types ----------------------------------------------------------------------------------------


def try_types(
    todo: Iterable[tuple[str, str]],
    jobs: int,
    results: Path,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Try the types, each in a fork of this process, append a row of each to a file, and tell it."""
    running: dict[Forked, tuple[str, str, float]] = {}
    left = iter(todo)
    while True:
        while len(running) < jobs and (each := next(left, None)):
            running[Forked(_one, *each, results)] = (*each, time.perf_counter())
        if not running:
            return
        for child, (family, model_type, started) in list(running.items()):
            seconds = time.perf_counter() - started
            if child.poll() is None and seconds < TYPE_S:
                continue
            child.send_signal(signal.SIGKILL)
            if child.returncode != 0:
                lost = {"family": family, "type": model_type, "error": "took too long, or died"}
                append(results, lost | {"seconds": seconds})
            done = [row for row in rows_in(results) if (row["family"], row["type"]) == (family, model_type)]
            tell(done[-1])
            del running[child]
        time.sleep(0.02)


def _one(family: str, model_type: str, results: Path) -> None:
    started = time.perf_counter()
    row: dict[str, Any] = {"family": family, "type": model_type}
    try:
        row["calls"] = try_calls(family, model_type)
    except Exception as error:
        row["error"] = _line(error)
    row["seconds"] = time.perf_counter() - started
    append(results, row)
