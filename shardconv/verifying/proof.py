"""Prove on numbers that all uses of a plan are right, in as few runs as possible.

A plan is used for more than the calls that were traced: a loss of sharded logits, logits that stay on the
ranks, eager attention and experts, and embeddings in place of ids. Each of these concerns another part of the
model, so one run checks several of them. If such a run fails, each is run separately to find out which one is
wrong.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from shardconv_runtime.errors import ShardconvError, SolveError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.training.sequence import FLAT_OUTPUTS
from torch import Tensor, nn

from ..inputs.label_forms import PROBLEM_TYPES, LabelForm, label_forms, loss_arguments
from ..inputs.trace_inputs import TraceInputs
from ..planning.gradients import SECOND_TOKENS
from ..simulation.rank_simulation import Logits, Outcome, Simulation, Unprovable
from ..simulation.streamed_weights import USUAL, Draw, RandomWeights

# The ranks are simulated on numbers before a byte is written.
#
# All ranks run in one process, on random weights, in float64, and must return the same as the unsharded
# model. Models are made smaller first, so that this takes little memory.


class OutputsDiffer(SolveError):
    """The ranks return different numbers than the unsharded model; ``worst`` is the ``Outcome``'s."""

    def __init__(self, message: str, worst: float) -> None:
        super().__init__(message)
        self.worst = worst


@dataclass(frozen=True)
class Case:
    """A plan, its model, and the numbers to simulate them on."""

    plan: Plan
    model: nn.Module
    """Unsharded, on meta; it is copied."""
    inputs: TraceInputs
    draw: Draw = USUAL
    """Random numbers of the weights."""

    @cached_property
    def simulation(self) -> Simulation:
        """Return the simulation on random weights, which builds its models once."""
        return Simulation(self.plan, self.model, RandomWeights(self.plan, self.draw))

    def with_model(self, model: nn.Module) -> Case:
        """Return the case of another model with the same parameters, on the same weights."""
        case = replace(self, model=model)
        case.__dict__["simulation"] = Simulation(self.plan, model, self.simulation.weights)
        return case


def simulate(
    case: Case,
    inputs: TraceInputs | None = None,
    *,
    gradients: bool = False,
    calls: int = 1,
    logits: Logits = Logits.BOTH,
) -> Outcome:
    """Run every rank in this process and compare with the unsharded model.

    Args:
        case: the plan to prove, and its model.
        inputs: inputs to use instead of the case's.
        gradients: run the backward pass too.
        calls: number of calls. With 2, a second call that continues the first is compared too.
        logits: the choice of the ranks' logits to compare.

    Returns:
        The outcome. Wrong gradients are not an error; the outcome names the worst one.

    Raises:
        Unprovable: if the unsharded model fails.
        OutputsDiffer: if the ranks' outputs differ from the unsharded model's by more than ``TOLERANCE``.
        SolveError: if the ranks fail.
    """
    inputs = inputs or case.inputs
    outcome = case.simulation.evaluate(inputs, calls=calls, logits=logits)
    if not outcome.agrees:
        raise OutputsDiffer(
            f"the plan is wrong: simulated ranks differ from the unsharded model by {outcome.worst:.1e} of "
            f"its largest output (allowed: {outcome.tolerance:.0e}). Nothing was written. This is a bug in "
            "shardconv; please report it.",
            outcome.worst,
        )
    return replace(outcome, gradients=case.simulation.wrong_gradient(inputs)) if gradients else outcome


def runs(case: Case) -> bool:
    """Return whether the unsharded model runs on random weights."""
    try:
        case.simulation.run_unsharded(case.inputs)
    except Unprovable:
        return False
    return True


def may_be_padded(case: Case) -> bool:
    """Return whether the runtime's padding at the end of sequences leaves the results of all tokens
    unchanged.

    The runtime pads one sequence, so models with an encoder and a decoder are not padded.
    """
    inputs = case.inputs
    if SECOND_TOKENS in inputs.tensors:
        return False
    mask = inputs.tensors.get("attention_mask")
    if mask is not None:  # masked at the end, since masking at the start leaves tokens that attend to nothing
        mask = torch.ones_like(mask)
        mask[0, -2:] = 0
        inputs = replace(inputs, tensors={**inputs.tensors, "attention_mask": mask})
    options = {name: value for name, value in inputs.options.items() if name not in FLAT_OUTPUTS}
    return case.simulation.agrees_when_padded(replace(inputs, options=options))


# Some models fail on the first random numbers: they divide by counts, take logarithms, or require certain
# values. They are tried with a few other numbers, always the same ones in the same order.

_DRAWS = (Draw(1), Draw(4, vectors=0.02), Draw(2, 0.25), Draw(3, 4.0))
"""Small vectors are for code that divides vectors by the standard deviation of their initialization."""


def other_numbers(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the case as it is and with other numbers, each with a description."""
    yield f"weights of {case.draw}", case
    for draw in _DRAWS:
        yield f"weights of {draw}", replace(case, draw=draw)
    # Reversing all integers per token keeps their counts, and keeps them consistent with the ids.
    tensors = case.inputs.tensors
    ids = tensors.get("input_ids")
    flipped = {
        name: tensor.flip(1)
        for name, tensor in tensors.items()
        if ids is not None and not tensor.is_floating_point() and not name.endswith("attention_mask")
        if tensor.shape[:2] == ids.shape[:2]
    }
    yield "ids in reverse order", replace(case, inputs=replace(case.inputs, tensors={**tensors, **flipped}))


# A user may choose other implementations of attention and experts when the model is loaded.
#
# A plan is solved for the implementations that the config chooses; others run other code on the same
# parameters. The eager implementations, and attention that runs on a CPU, are simulated as well. Fused
# kernels for GPUs cannot be simulated, but they get the same heads as the implementation that was traced.

PLAIN = "eager"
OTHERS = ("sdpa", "flex_attention")
"""Further implementations of attention that run on a CPU."""
_SETTERS = {
    "attention": ("_attn_implementation", "set_attn_implementation"),
    "experts": ("_experts_implementation", "set_experts_implementation"),
}
"""Kind -> the attribute of a config that names its implementation, and the method of a model that sets it."""


@dataclass(frozen=True)
class Wrong:
    """An implementation with which the ranks differ from the unsharded model."""

    kind: str
    name: str
    note: str
    """Note for the plan."""


def other_kinds(model: nn.Module) -> list[str]:
    """Return the kinds of implementations of the model that are not eager."""
    return [kind for kind in _SETTERS if _chosen(model, kind) not in (None, PLAIN)]


def with_implementations(case: Case, names: Mapping[str, str]) -> Case | None:
    """Return the case with these implementations, by kind; None if the model does not change."""
    other = copy.deepcopy(case.model)
    try:
        for kind, name in names.items():
            getattr(other, _SETTERS[kind][1])(name)
    except (ValueError, NotImplementedError, ImportError):
        return None  # the model does not offer it
    if all(_chosen(other, kind) == _chosen(case.model, kind) for kind in names):
        return None
    return case.with_model(other)


def wrong_plain(case: Case) -> tuple[Wrong, ...]:
    """Find the eager implementations for which the plan is wrong.

    Args:
        case: proven for the implementations of the model's config.
    """
    kinds = other_kinds(case.model)
    if not kinds or _problem(case, dict.fromkeys(kinds, PLAIN), calls=2) is None:
        return ()
    return tuple(wrong for kind in kinds for wrong in _wrong(case, kind, PLAIN, calls=2))


def wrong_others(case: Case) -> tuple[Wrong, ...]:
    """Find the other implementations of attention for which the plan is wrong."""
    chosen = _chosen(case.model, "attention")
    names = [name for name in OTHERS if chosen is not None and name != chosen]
    return tuple(wrong for name in names for wrong in _wrong(case, "attention", name, calls=1))


def _wrong(case: Case, kind: str, name: str, calls: int) -> list[Wrong]:
    problem = _problem(case, {kind: name}, calls)
    if problem is None:
        return []
    chosen = _chosen(case.model, kind)
    note = f"this plan is for {kind} implemented as {chosen!r}, not as {name!r}: {problem}"
    return [Wrong(kind, name, note)]


def _chosen(model: nn.Module, kind: str) -> str | None:
    attribute, setter = _SETTERS[kind]
    if not hasattr(model, setter):
        return None
    return getattr(getattr(model, "config", None), attribute, None)


def _problem(case: Case, names: Mapping[str, str], calls: int) -> str | None:
    """Say why the plan is wrong with these implementations, by kind; None if it is right, or if they cannot
    run."""
    other = with_implementations(case, names)
    if other is None:
        return None
    try:
        with _uncompiled(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # flex attention warns if it is not compiled
            simulate(other, calls=calls, logits=Logits.GATHERED)
    except Unprovable:
        return None
    except ShardconvError as error:
        return str(error).partition(". Nothing was written")[0]
    return None


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run code that compiles itself, such as flex attention, without compilation.

    ``torch.compile`` imports Inductor even if nothing is compiled, which takes longer than the proof of
    most models. Here, it returns its function unchanged. transformers (5.17 to 5.24) keeps the compiled
    function in a singleton, which is replaced meanwhile.
    """
    compile_, kept = torch.compile, _compiled_attention()
    instance = getattr(kept, "_instance", None)
    torch.compile = _unchanged  # type: ignore[assignment]
    if kept is not None:
        kept._instance = None
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.compile = compile_
        if (kept := _compiled_attention()) is not None:
            kept._instance = instance


def _unchanged(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replace ``torch.compile``, which may be called as a decorator."""
    return function if function is not None else _unchanged


def _compiled_attention() -> Any:
    """Return the singleton's class, if it has been imported."""
    module = sys.modules.get("transformers.integrations.flex_attention")
    return getattr(module, "WrappedFlexAttention", None)


IN_PLACE_OF = {"inputs_embeds": "input_ids", "decoder_inputs_embeds": "decoder_input_ids"}
"""Argument of transformers' models -> the ids that it replaces."""


def embedding_arguments(model: nn.Module, inputs: TraceInputs) -> tuple[str, ...]:
    """Return the arguments of a model that may replace the ids that it is given."""
    taken = forward_signature(model).parameters
    return tuple(
        name
        for name, ids in IN_PLACE_OF.items()
        if name in taken and ids in inputs.tensors and _width(model, name) is not None
    )


def proven_arguments(case: Case, *, gradients: bool) -> tuple[str, ...]:
    """Return the arguments for embeddings with which the ranks compute the same, tested one at a time.

    Arguments with which the unsharded model fails are not proven.

    Args:
        case: proven for ids; its plan allows these arguments.
        gradients: also require right gradients.
    """
    return tuple(
        name
        for name in embedding_arguments(case.model, case.inputs)
        if any(_holds(case, inputs, gradients) for inputs in with_embeddings(case, [name]))
    )


def with_embeddings(case: Case, names: Collection[str]) -> Iterator[TraceInputs]:
    """Yield the inputs with random embeddings (for example of a trained prompt) in place of ids.

    The other inputs are kept first. If there are images or sounds, the second inputs keep only integers.

    Args:
        case: the model and its inputs.
        names: the names of the arguments for embeddings.
    """
    rng = torch.Generator().manual_seed(0)
    dtype = next((p.dtype for p in case.model.parameters() if p.is_floating_point()), torch.float32)
    others = dict(case.inputs.tensors)
    embeds: dict[str, Tensor] = {}
    for name in names:
        width = _width(case.model, name)
        assert width is not None
        shape = (*others.pop(IN_PLACE_OF[name]).shape, width)
        embeds[name] = torch.randn(shape, generator=rng, dtype=dtype)
    alone = {n: t for n, t in others.items() if not t.is_floating_point()}
    for beside in (others,) if len(alone) == len(others) else (others, alone):
        yield replace(case.inputs, tensors={**beside, **embeds})


def _holds(case: Case, inputs: TraceInputs, gradients: bool) -> bool:
    try:
        return not simulate(case, inputs, gradients=gradients).gradients
    except ShardconvError:
        return False


def _width(model: nn.Module, name: str) -> int | None:
    """Return the width of a model's embeddings of ids; None if the model does not say."""
    try:
        part = model.get_decoder() if name.startswith("decoder") else model  # type: ignore[operator]
        return int(part.get_input_embeddings().weight.shape[-1])  # type: ignore[operator, union-attr]
    except (AttributeError, NotImplementedError):
        return None


Tell = Callable[[str], object]


@dataclass(frozen=True)
class LabelsProof:
    """The results of calls with labels."""

    names: tuple[str, ...] = ()
    """Arguments that must be refused, or that were not compared; empty if all is right."""
    wrong: str = ""
    """Why a call with them is wrong; empty if it was not compared, since its code takes no known form of
    labels."""


def _with_labels(case: Case) -> Iterator[tuple[Case, LabelForm]]:
    """Yield calls of the unsharded model that return a loss: one form of labels for each loss of its code.

    The config of a classifier of transformers chooses among losses. If it does not, the first labels do, and
    the code writes the choice to the config.
    """
    try:
        returned, _ = case.simulation.returned(case.inputs)
    except Unprovable:
        return
    chosen = None
    for kind in (None, *PROBLEM_TYPES):
        if kind is not None and (chosen is None or kind == chosen):
            continue
        tried = case if kind is None else _with_problem_type(case, kind)
        forms = list(label_forms(case.model, case.inputs, returned))
        if kind in PROBLEM_TYPES[1:]:  # others would be broadcast to the logits
            forms = [form for form in forms if form.is_for_each_logit]
        for form in forms:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # for example, of labels that are broadcast
                    outputs, model = tried.simulation.returned(form.inputs)
            except Unprovable:
                continue
            loss = outputs.get("loss")
            if loss is not None and loss.isfinite().all():
                if kind is None and _problem_type(case.model) is None:
                    chosen = _problem_type(model)
                yield tried, form
                break


def _problem_type(model: nn.Module) -> str | None:
    return getattr(getattr(model, "config", None), "problem_type", None)


def _with_problem_type(case: Case, kind: str) -> Case:
    model = copy.deepcopy(case.model)
    model.config.problem_type = kind  # type: ignore[union-attr]
    return case.with_model(model)


@dataclass(frozen=True)
class Proof:
    """The results for a plan whose outputs are right."""

    wrong_gradient: str
    """The problem of the gradients; empty if they are right, or the plan has none."""
    parallel_loss: bool
    """Whether the loss of sharded logits equals the model's own loss."""
    arguments: tuple[str, ...]
    """Arguments for embeddings in place of ids."""
    wrong: tuple[Wrong, ...]
    """Implementations for which the plan is wrong."""
    labels: LabelsProof
    """Calls with labels, from gathered logits."""
    gradient_error: float = 0.0
    """The largest error of the gradients that are wrong."""


def prove(case: Case, tell: Tell = lambda what: None) -> Proof:
    """Compare everything that a plan is used for with the unsharded model.

    Args:
        case: the case of the plan; its parallel loss may be the model's own.
        tell: is called with a description of the next runs.

    Raises:
        Unprovable: if the unsharded model fails.
        SolveError: if the ranks compute something else.
    """
    arguments = embedding_arguments(case.model, case.inputs) if case.plan.tp > 1 else ()
    plan = replace(case.plan, proven_arguments=arguments)
    return _Proof(replace(case, plan=plan), arguments, tell).run()


class _Proof:
    """One case."""

    def __init__(self, case: Case, arguments: tuple[str, ...], tell: Tell) -> None:
        self.case = case
        self.tell = tell
        self.arguments = arguments
        self.has_gradients = case.plan.training is not None
        self.gradient_error = 0.0
        self.calls = 1
        """Number of calls that were compared: two, if the unsharded model can continue a call."""

    def run(self) -> Proof:
        """Compare everything, in one run if possible."""
        self.tell("outputs, loss and gradients")
        loss = self._holds_with_labels()
        if not loss:
            training = self.case.plan.training
            if training is not None and training.parallel_loss:
                plan = replace(self.case.plan, training=replace(training, parallel_loss=False))
                self.case = replace(self.case, plan=plan)
        if not loss or self.calls == 1:  # some models return no cache in a call with labels
            self.calls = simulate(self.case, calls=2, logits=Logits.GATHERED).calls
        problem = self._wrong_gradient(self.case.inputs) if not loss else ""
        labels = LabelsProof() if loss else self._compare_labels(self.has_gradients and not problem)
        self.tell("other implementations and inputs")
        inputs = self._shown_at_once()
        is_new = loss or inputs is not self.case.inputs
        if inputs is None or (is_new and not problem and self._wrong_gradient(inputs)):
            return self._one_by_one(loss, problem, labels)
        return Proof(problem, loss, self.arguments, self._wrong_others(), labels, self.gradient_error)

    def _holds_with_labels(self) -> bool:
        """Return whether outputs, the loss of sharded logits, and the gradients of both are right."""
        training = self.case.plan.training
        if training is None or not training.parallel_loss:
            return False
        labels = self.case.inputs.with_labels()
        try:
            outcome = simulate(self.case, labels, gradients=True, calls=2, logits=Logits.GATHERED)
        except ShardconvError:
            return False  # the loss needs full logits, or the model cannot compute one
        self.calls = outcome.calls
        return not outcome.gradients

    def _compare_labels(self, gradients: bool) -> LabelsProof:
        """Compare the model's own loss, from gathered logits, in every form of labels that its code takes.

        Args:
            gradients: compare its gradients too.

        Code that runs with labels only is not on the tape. It may ask a layer for its size, for example.
        """
        names = tuple(loss_arguments(self.case.model))
        if self.case.plan.tp == 1 or not names:
            return LabelsProof()
        self.tell("labels")
        compared: list[str] = []
        for case, form in _with_labels(self.case):
            try:
                outcome = simulate(case, form.inputs, gradients=gradients, logits=Logits.GATHERED)
                wrong = outcome.gradients or ""
            except Unprovable:
                continue  # it fails in the precision of the comparison
            except ShardconvError as error:
                wrong = str(error).partition(". Nothing was written")[0]
            if wrong:
                given = {**form.inputs.tensors, **form.inputs.options}
                return LabelsProof(names=tuple(n for n in names if n in given), wrong=wrong)
            compared.append(form.name)
        return LabelsProof(names=() if compared else names)

    def _shown_at_once(self) -> TraceInputs | None:
        """Return the inputs with which eager implementations, embeddings and local logits passed one run.

        The result is None if that run failed.
        """
        plan, kinds = self.case.plan, other_kinds(self.case.model)
        plain = (
            with_implementations(self.case, dict.fromkeys(kinds, PLAIN)) if kinds and plan.tp > 1 else None
        )
        if plain is None and plan.logits is None and not self.arguments:
            return self.case.inputs
        given = with_embeddings(self.case, self.arguments) if self.arguments else [self.case.inputs]
        for inputs in given:
            try:
                outcome = simulate(plain or self.case, inputs, calls=2, logits=Logits.OWN)
                if plain is not None and len(inputs.tensors) < len(self.case.inputs.tensors):
                    simulate(plain, logits=Logits.GATHERED)  # the encoders of images are eager, too
            except Unprovable:
                continue
            except ShardconvError:
                return None
            return inputs if outcome.calls >= self.calls else None
        return None

    def _one_by_one(self, loss: bool, problem: str, labels: LabelsProof) -> Proof:
        """Compare each separately. With a loss, the gradients without one have not been compared yet."""
        self.tell("implementations and inputs one by one")
        simulate(self.case, logits=Logits.OWN)
        wrong = wrong_plain(self.case) if self.case.plan.tp > 1 else ()
        problem = problem or (self._wrong_gradient(self.case.inputs) if loss else "")
        gradients = self.has_gradients and not problem
        arguments = proven_arguments(self.case, gradients=gradients)
        others = (*wrong, *self._wrong_others())
        return Proof(problem, loss, arguments, others, labels, self.gradient_error)

    def _wrong_others(self) -> tuple[Wrong, ...]:
        return wrong_others(self.case) if self.case.plan.tp > 1 else ()

    def _wrong_gradient(self, inputs: TraceInputs) -> str:
        if not self.has_gradients:
            return ""
        problem = self.case.simulation.wrong_gradient(inputs)
        if problem:
            self.gradient_error = max(self.gradient_error, self.case.simulation.gradient_error)
        return problem
