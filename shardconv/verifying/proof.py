"""What of a plan holds, shown on numbers in as few runs as can show it.

A plan is for more than the calls that were traced: a loss of sharded logits, logits that stay on the ranks,
the plain implementations of attention and experts, and embeddings in place of ids. Each of these concerns
another part of the model, so that one run shows several. Only where such a run fails is each of them run by
itself, which says what does not hold.
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

from ..inputs.trace_inputs import TraceInputs
from ..simulation.rank_simulation import Logits, Outcome, Simulation, Unprovable
from ..simulation.simulated_weights import USUAL, Draw, RandomWeights
from ..solving.sequence_dims import SECOND_TOKENS

# Simulates the ranks on numbers, before a byte is written.
#
# All ranks run in one process, on random weights, in float64, and must return the same as the unsharded
# model. Models are made smaller first, so that this takes little memory.


class OutputsDiffer(SolveError):
    """The ranks return other numbers than the unsharded model."""


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    plan: Plan
    model: nn.Module
    """Unsharded, on meta; it is copied."""
    inputs: TraceInputs
    """Of its calls."""
    draw: Draw = USUAL
    """Of its weights."""

    @cached_property
    def simulation(self) -> Simulation:
        """On random weights; its models are made once."""
        return Simulation(self.plan, self.model, RandomWeights(self.plan, self.draw))

    def with_model(self, model: nn.Module) -> Case:
        """The case of another model with the same parameters, on the same weights."""
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
        inputs: others than those of the case.
        gradients: run the backward pass too.
        calls: 2: hand back what the first call returns, and compare a second one.
        logits: which of the ranks' logits are compared.

    Returns:
        How they compare. Gradients that differ are no error: the outcome says which.

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
            "shardconv; please report it."
        )
    return replace(outcome, gradients=case.simulation.wrong_gradient(inputs)) if gradients else outcome


def runs(case: Case) -> bool:
    """Whether the unsharded model runs on random weights."""
    try:
        case.simulation.run_unsharded(case.inputs)
    except Unprovable:
        return False
    return True


def may_be_padded(case: Case) -> bool:
    """Whether padding at the end of sequences, as the runtime adds it, changes the results of no token.

    It pads one sequence: never that of an encoder beside a decoder's.
    """
    inputs = case.inputs
    if SECOND_TOKENS in inputs.tensors:
        return False
    mask = inputs.tensors.get("attention_mask")
    if mask is not None:  # at the end: the results of tokens that attend to nothing are not compared
        mask = torch.ones_like(mask)
        mask[0, -2:] = 0
        inputs = replace(inputs, tensors={**inputs.tensors, "attention_mask": mask})
    options = {name: value for name, value in inputs.options.items() if name not in FLAT_OUTPUTS}
    return case.simulation.agrees_when_padded(replace(inputs, options=options))


# Other weights and inputs for models that fail on the first ones.
#
# Code divides by what it counts, takes logarithms, or asks for what the first random numbers do not give.
# Such a model is tried with a few others, always the same ones in the same order.

_DRAWS = (Draw(1), Draw(4, vectors=0.02), Draw(2, 0.25), Draw(3, 4.0))
"""The second is for code that divides vectors by the standard deviation with which they are initialized."""


def other_numbers(case: Case) -> Iterator[tuple[str, Case]]:
    """The case as it is and with other numbers, and in words what these are."""
    yield f"weights of {case.draw}", case
    for draw in _DRAWS:
        yield f"weights of {draw}", replace(case, draw=draw)
    yield "ids in reverse order", replace(case, inputs=_reversed(case.inputs))


def _reversed(inputs: TraceInputs) -> TraceInputs:
    """The ids of each row in reverse order, so that there are as many of each."""
    ids = {n: t.flip(1) for n, t in inputs.tensors.items() if _is_per_token(n, inputs)}
    return replace(inputs, tensors={**inputs.tensors, **ids})


def _is_per_token(name: str, inputs: TraceInputs) -> bool:
    tensor, ids = inputs.tensors[name], inputs.tensors.get("input_ids")
    if ids is None or tensor.is_floating_point() or name.endswith("attention_mask"):
        return False
    return tensor.shape[:2] == ids.shape[:2]


# Proves a plan for the other implementations that a user may choose when the model is loaded.
#
# transformers can run attention and experts in several ways. A plan is solved for the one that the config
# chooses; the others run other code on the same parameters. The plain one ("eager") of both, and those of
# attention that run on a CPU, are simulated as well. A fused kernel for GPUs cannot be: it is given the same
# heads as the implementation that was traced.

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
    """An implementation under which the ranks compute something else than the unsharded model."""

    kind: str
    name: str
    note: str
    """For the plan."""


def other_kinds(model: nn.Module) -> list[str]:
    """What the model implements in another way than the plain one."""
    return [kind for kind in _SETTERS if _chosen(model, kind) not in (None, PLAIN)]


def with_implementations(case: Case, names: Mapping[str, str]) -> Case | None:
    """The case with these implementations, by kind; None where the model is none other then."""
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
    """The plain implementations under which the plan does not hold.

    Args:
        case: proven for the implementations of the model's config.
    """
    kinds = other_kinds(case.model)
    if not kinds or _problem(case, dict.fromkeys(kinds, PLAIN), calls=2) is None:
        return ()
    return tuple(wrong for kind in kinds for wrong in _wrong(case, kind, PLAIN, calls=2))


def wrong_others(case: Case) -> tuple[Wrong, ...]:
    """The further implementations of attention under which the plan does not hold; argument as above."""
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
    """Why the plan does not hold with these implementations, by kind; None if it does, or if they cannot be
    run at all."""
    other = with_implementations(case, names)
    if other is None:
        return None
    try:
        with _uncompiled(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # flex attention warns where it is not compiled
            simulate(other, calls=calls, logits=Logits.GATHERED)
    except Unprovable:
        return None
    except ShardconvError as error:
        return str(error).partition(". Nothing was written")[0]
    return None


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Code that compiles itself, as flex attention does, runs as it is.

    Where nothing will be compiled, ``torch.compile`` imports Inductor nevertheless, which takes longer than
    the proof of most models; it returns its function unchanged here. transformers (5.17 to 5.24) keeps what
    it compiled in an instance of a class, which is another one meanwhile.
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
    """In place of ``torch.compile``, which may be a decorator."""
    return function if function is not None else _unchanged


def _compiled_attention() -> Any:
    """The class, if it has been imported."""
    module = sys.modules.get("transformers.integrations.flex_attention")
    return getattr(module, "WrappedFlexAttention", None)


# Embeddings that are given in place of ids, which were traced.

IN_PLACE_OF = {"inputs_embeds": "input_ids", "decoder_inputs_embeds": "decoder_input_ids"}
"""Argument of transformers' models -> the ids that it replaces."""


def embedding_arguments(model: nn.Module, inputs: TraceInputs) -> tuple[str, ...]:
    """The arguments of a model that may replace the ids that it is given."""
    taken = forward_signature(model).parameters
    return tuple(
        name
        for name, ids in IN_PLACE_OF.items()
        if name in taken and ids in inputs.tensors and _width(model, name) is not None
    )


def proven_arguments(case: Case, *, gradients: bool) -> tuple[str, ...]:
    """The arguments for embeddings with which, one at a time, the ranks compute the same.

    Where the unsharded model itself does not run on them, nothing is proven.

    Args:
        case: proven for ids; its plan allows these arguments.
        gradients: whether the gradients must be right, too.
    """
    return tuple(
        name
        for name in embedding_arguments(case.model, case.inputs)
        if any(_holds(case, inputs, gradients) for inputs in with_embeddings(case, [name]))
    )


def with_embeddings(case: Case, names: Collection[str]) -> Iterator[TraceInputs]:
    """The inputs with random embeddings, such as those of a trained prompt, in place of ids.

    First they come beside the other inputs, then, if there are images or sounds, beside ids and masks alone.

    Args:
        case: the model and its inputs.
        names: of the arguments for embeddings.
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
    """The last dim of what the model embeds ids as; None where it does not say."""
    try:
        part = model.get_decoder() if name.startswith("decoder") else model  # type: ignore[operator]
        return int(part.get_input_embeddings().weight.shape[-1])  # type: ignore[operator, union-attr]
    except (AttributeError, NotImplementedError):
        return None


Tell = Callable[[str], object]


@dataclass(frozen=True)
class Proof:
    """What holds of a plan whose outputs are right."""

    wrong_gradient: str
    """What is wrong with the gradients; empty if nothing is, or the plan has none."""
    parallel_loss: bool
    """Whether the loss of sharded logits is the model's own."""
    arguments: tuple[str, ...]
    """For embeddings in place of ids."""
    wrong: tuple[Wrong, ...]
    """Implementations for which the plan does not hold."""
    wrong_labels: str = ""
    """Why a call with labels is wrong, as without training; empty if it is right, or the model takes none."""


def prove(case: Case, tell: Tell = lambda what: None) -> Proof:
    """Compare all that a plan is for with the unsharded model.

    Args:
        case: of the plan; its parallel loss is one that may be the model's own.
        tell: is called with what is run next.

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
        self.calls = 1
        """How many were compared: two, if the unsharded model takes what it hands back."""

    def run(self) -> Proof:
        """All of it."""
        self.tell("outputs, loss and gradients")
        loss = self._holds_with_labels()
        wrong_labels = ""
        if not loss:
            training = self.case.plan.training
            if training is not None and training.parallel_loss:
                plan = replace(self.case.plan, training=replace(training, parallel_loss=False))
                self.case = replace(self.case, plan=plan)
            wrong_labels = self._wrong_labels()
        if not loss or self.calls == 1:  # some hand nothing back in a call with labels
            self.calls = simulate(self.case, calls=2, logits=Logits.GATHERED).calls
        problem = self._wrong_gradient(self.case.inputs) if not loss else ""
        self.tell("other implementations and inputs")
        inputs = self._shown_at_once()
        is_new = loss or inputs is not self.case.inputs
        if inputs is None or (is_new and not problem and self._wrong_gradient(inputs)):
            return replace(self._one_by_one(loss, problem), wrong_labels=wrong_labels)
        return Proof(problem, loss, self.arguments, self._wrong_others(), wrong_labels)

    def _holds_with_labels(self) -> bool:
        """Whether outputs, the loss of sharded logits and the gradients of both are right."""
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

    def _wrong_labels(self) -> str:
        """Why the model's own loss, from gathered logits, is not that of the unsharded model; empty if it is.

        Code that runs with labels only is not on the tape. It may ask a layer for its size, for example.
        """
        if self.case.plan.tp == 1 or "labels" not in forward_signature(self.case.model).parameters:
            return ""
        try:
            simulate(self.case, self.case.inputs.with_labels(), logits=Logits.GATHERED)
        except (Unprovable, KeyError):
            return ""  # the unsharded model takes other labels than tokens, or none
        except ShardconvError as error:
            return str(error).partition(". Nothing was written")[0]
        return ""

    def _shown_at_once(self) -> TraceInputs | None:
        """The inputs with which plain implementations, embeddings and own logits were shown in one run.

        None: that run failed.
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
                    simulate(plain, logits=Logits.GATHERED)  # what reads images is implemented so, too
            except Unprovable:
                continue
            except ShardconvError:
                return None
            return inputs if outcome.calls >= self.calls else None
        return None

    def _one_by_one(self, loss: bool, problem: str) -> Proof:
        """Each by itself; with a loss, the gradients without one are not known yet."""
        self.tell("implementations and inputs one by one")
        simulate(self.case, logits=Logits.OWN)
        wrong = wrong_plain(self.case) if self.case.plan.tp > 1 else ()
        problem = problem or (self._wrong_gradient(self.case.inputs) if loss else "")
        gradients = self.has_gradients and not problem
        arguments = proven_arguments(self.case, gradients=gradients)
        return Proof(problem, loss, arguments, (*wrong, *self._wrong_others()))

    def _wrong_others(self) -> tuple[Wrong, ...]:
        return wrong_others(self.case) if self.case.plan.tp > 1 else ()

    def _wrong_gradient(self, inputs: TraceInputs) -> str:
        return self.case.simulation.wrong_gradient(inputs) if self.has_gradients else ""
