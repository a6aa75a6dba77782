"""Plans a model at the size that people use, without weights, and measures what planning took."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import SourceError
from shardconv_runtime.format.dims import size
from shardconv_runtime.format.plan import Plan, local_shape, parameter_plans
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from shardconv import plan_forms
from shardconv.arguments import SolveOptions
from shardconv.numeric_check import TOO_LARGE
from shardconv.passes import solve_plan
from shardconv.reporting.summary import all_notes
from shardconv.simulation.available_memory import most_bytes
from shardconv.tracing.tape import starred

from .measure import collectives_in_layers, plan_facts
from .models import is_part
from .releases import DTYPE, RELEASES, Release
from .shrink import config_class

MOST = 40
"""Of what is replicated, and of collectives, so many places are kept."""
MOST_UNREAD = 4
"""So many names of what is not read are kept."""
LEFT_OUT = "traced without "
"""Begins the note of a plan on an input that its model could not be traced with."""

FAMILIES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "causal": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,),
    "seq2seq": (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,),
    "masked": (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,),
    "vision": (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,),
    "audio": (
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_CTC_MAPPING_NAMES,
        auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    ),
    "multimodal": (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    ),
}
"""What a model is for -> model type -> name of the class, in each of some mappings."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A model to plan."""

    family: str
    type: str
    class_name: str
    release: Release | None
    """None: the defaults of its config's class."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells it from others: the first fields of what is measured."""
        return self.family, self.type, self.release.name if self.release else "", self.class_name


@dataclass
class Measured:
    """What planning a model at its size took and gave."""

    family: str
    type: str
    release: str
    class_name: str
    tp: int
    status: str = "crash"
    """``planned``; ``not built`` (by transformers), ``refused``, ``timeout``, ``crash``."""
    message: str = ""
    hidden: int = 0
    layers: int = 0
    parameters: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    """Above what the process held after its imports."""
    rounds: int = 0
    """How often the model was solved."""
    replicated: float = 0.0
    """Of the bytes of parameters of two or more dims, those that the traced call does not read among them."""
    unread: float = 0.0
    """Of the same bytes: what the traced call does not read."""
    unread_names: dict[str, float] = field(default_factory=dict)
    """Its largest parts, numbers as ``*``, and their shares of the bytes."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Inputs that the model could not be traced with, and why."""
    rank_excess: float = 0.0
    """Bytes of rank 0, relative to a fair share."""
    per_layer: float = 0.0
    collectives: dict[str, int] = field(default_factory=dict)
    """Those inside of layers: where, and how many."""
    kept: dict[str, str] = field(default_factory=dict)
    """Replicated parameters of two or more dims, numbers as ``*``, and why."""
    notes: tuple[str, ...] = ()
    stages: list[str] = field(default_factory=list)
    """What the converter told of its progress: that a plan was not proven, too."""
    checked: bool = False
    """Whether the plan was to be proven on numbers."""
    proof: list[str] = field(default_factory=list)
    """What does not hold of it, or was not shown."""
    is_verified: bool = False
    """Whether its numbers were compared."""


def models(family: str) -> Iterator[Sized]:
    """Each type's releases, or one at its defaults; a class only in its first family."""
    seen = {
        name
        for earlier in list(FAMILIES)[: list(FAMILIES).index(family)]
        for names in FAMILIES[earlier]
        for name in map(_class_name, names.values())
    }
    found: dict[tuple[str, str], None] = {
        (t, _class_name(n)): None for names in FAMILIES[family] for t, n in names.items()
    }
    for model_type, class_name in found:
        if class_name not in seen:
            for release in _releases(model_type, class_name):
                yield Sized(family, model_type, class_name, release)


def _releases(model_type: str, class_name: str) -> Sequence[Release | None]:
    """Those of a class if it has its own, else those of its type, else its defaults."""
    found = RELEASES.get(model_type, ())
    own = [r for r in found if r.class_name == class_name]
    return own or [r for r in found if not r.class_name] or [None]


def measure_planning(model: Sized, tp: int, *, check: bool) -> Measured:
    """Plan a model in this process, which did nothing before but imports."""
    about = Measured(*model.key, tp, checked=check)
    try:
        spec = _specification(model)
    except Exception as error:
        about.status, about.message = "not built", _line(error)
        return about
    config = spec.config.get_text_config()
    about.hidden, about.layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    rounds = _counted_rounds()
    memory, wall, cpu = most_bytes(), time.perf_counter(), time.process_time()
    try:
        plan = solve_plan(spec, SolveOptions(tp, check=check), progress=about.stages.append)
    except SourceError as error:
        about.status, about.message = "not built", _line(error)
    except Exception as error:
        about.status, about.message = "refused", _line(error)
    else:
        about.status = "planned"
    about.wall_s, about.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    about.peak_bytes, about.rounds = most_bytes() - memory, len(rounds)
    if about.status == "planned":
        _describe(plan, about)
    return about


def _specification(model: Sized) -> ModelSpec:
    cls = getattr(transformers, model.class_name)
    own = config_class(model.type)
    arguments = model.release.arguments if model.release else {}
    if cls.config_class is not own and is_part(cls.config_class, own):
        own, arguments = cls.config_class, _arguments_of_part(own, cls.config_class, arguments)
    config = own(**arguments)
    dtype = model.release.dtype if model.release else DTYPE
    return ModelSpec(name=model.type, config=config, model_class=cls, dtype=dtype)


def _arguments_of_part(
    whole: type[PreTrainedConfig], part: type[PreTrainedConfig], arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    (name,) = (name for name, cls in whole.sub_configs.items() if cls is part)
    found: Mapping[str, Any] = arguments.get(name, {})
    return found


def _describe(plan: Plan, about: Measured) -> None:
    facts = plan_facts(plan)
    entries = parameter_plans(plan)
    width = {n: _itemsize(e.dtype) for n, e in entries.items()}
    total = rank = wide = kept = 0
    unread: Counter[str] = Counter()
    for name, entry in entries.items():
        elements = _product(size(d) for d in entry.dims)
        local = _product(local_shape(entry, plan.mesh, 0))
        total += elements * width[name]
        rank += local * width[name]
        if len(entry.dims) > 1:
            wide += elements * width[name]
            kept += elements * width[name] * (local == elements)
            unread[starred(name)] += elements * width[name] * ("does not use it" in entry.reason)
    about.parameters = plan.model.num_parameters
    about.replicated = kept / max(1, wide)
    about.unread = unread.total() / max(1, wide)
    about.unread_names = {name: n / max(1, wide) for name, n in unread.most_common(MOST_UNREAD) if n}
    notes = [note.removeprefix(LEFT_OUT) for note in plan.notes if note.startswith(LEFT_OUT)]
    about.left_out = {name: why for name, _, why in (note.partition(" ") for note in notes)}
    about.rank_excess = rank * plan.tp / max(1, total)
    about.per_layer = facts["per_layer"]
    about.collectives = dict(list(collectives_in_layers(plan).items())[:MOST])
    about.kept = dict(list(facts["replicated"].items())[:MOST])
    about.notes = all_notes(plan)
    unproven = [
        note for note in plan.notes if note.startswith((TOO_LARGE, "this plan is for ", "proven with "))
    ]
    only = [f"for inference only: {plan.inference_only}"] if plan.inference_only else []
    about.proof = [*only, *unproven] if about.checked else []
    about.is_verified = about.checked and TOO_LARGE not in about.proof


def _counted_rounds() -> list[None]:
    """Grows by one whenever a model is solved from here on."""
    rounds: list[None] = []
    attempt = plan_forms._attempt

    def counted(*args: Any) -> Any:
        rounds.append(None)
        return attempt(*args)

    plan_forms._attempt = counted  # type: ignore[attr-defined]
    return rounds


def _class_name(names: Any) -> str:
    return names[0] if isinstance(names, tuple) else names


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, 0)
    return value if isinstance(value, int) else 0


def _itemsize(dtype: str) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


def _product(numbers: Any) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def _line(error: BaseException) -> str:
    text = re.sub(r"0x[0-9a-f]+", "0x…", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:600]
