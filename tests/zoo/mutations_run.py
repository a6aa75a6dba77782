"""Put a fault into the runtime's code at one module, and see which module converting and verifying name."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from quantized_checkpoints import dense_config, save_quantized
from shardconv_faults import FAULTS, GRADIENTS, OUTPUTS, PACKED, SEQUENCE, Fault, faulty, watching
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.errors import DamagedError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import parallelize
from shardconv_runtime.training.prepare import TrainingForm, parallelize_for_training
from small_models import save_random
from torch import nn

import shardconv
from shardconv.arguments import Writing
from shardconv.simulation import random_weights
from shardconv.simulation.rank_threads import MetaCommunicator

from .kept_rows import Row

TPS = (2, 3)

SIZES = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _dense() -> Any:
    """Six heads of queries and one of keys: slices, gathers and gates; biases everywhere."""
    return transformers.LlamaConfig(
        **SIZES, **TOKENS, intermediate_size=30, num_key_value_heads=1, attention_bias=True, mlp_bias=True
    )


def _parallel_blocks() -> Any:
    """Attention and MLP side by side, so that sums are late, and layers that are no ``nn.Linear``."""
    return transformers.FalconConfig(**SIZES, **TOKENS, bias=True)


def _fused() -> Any:
    """Fused projections, of which a part is on all ranks."""
    return transformers.Phi3Config(**SIZES, **TOKENS, intermediate_size=30, num_key_value_heads=1)


def _experts() -> Any:
    """Seven experts, and norms over sharded heads."""
    return transformers.OlmoeConfig(
        **SIZES, **TOKENS, intermediate_size=18, num_key_value_heads=3, num_experts=7,
        num_experts_per_tok=2, attention_bias=True,
    )  # fmt: skip


def _encoder_decoder() -> Any:
    return transformers.T5Config(
        vocab_size=61, d_model=24, d_kv=4, d_ff=30, num_layers=1, num_decoder_layers=1, num_heads=6,
        decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A tiny model for the faults."""

    config: Callable[[], Any]
    model_class: type[nn.Module]
    experts: str = "tp"
    is_packed: bool = False


MODELS: dict[str, Model] = {
    "dense": Model(_dense, transformers.LlamaForCausalLM),
    "parallel blocks": Model(_parallel_blocks, transformers.FalconForCausalLM),
    "fused projections": Model(_fused, transformers.Phi3ForCausalLM),
    "experts": Model(_experts, transformers.OlmoeForCausalLM, "ep"),
    "encoder-decoder": Model(_encoder_decoder, transformers.T5ForConditionalGeneration),
    "quantized": Model(dense_config, transformers.Qwen3ForCausalLM, is_packed=True),
}

NAMED, NEIGHBOR, OTHER, NO_MODULE = "named", "neighbor", "another module", "no module"
AROUND = "planned without what failed"
"""Begins the message of a plan that works around a fault that shapes show."""
UNSEEN, NOT_ON_PATH = "not noticed", "not on its path"


@dataclass
class Judged:
    """How one fault came out, in one model at one number of ranks."""

    fault: str
    room: str
    model: str
    tp: int
    module: str = ""
    """The module that has the fault."""
    convert: str = NOT_ON_PATH
    verify: str = NOT_ON_PATH
    convert_message: str = ""
    verify_message: str = ""
    seconds: float = 0.0


def judge(task: tuple[str, str, int]) -> Row | None:
    """The row of a fault in a model at a number of ranks; None if the model's plan does not run that code."""
    name, model_name, tp = task
    fault = next(each for each in FAULTS if each.name == name)
    row = Judged(fault.name, fault.room, model_name, tp)
    start = time.perf_counter()
    setup = _setup(model_name, tp)
    targets = setup.targets(fault)
    if not targets:
        return None
    row.module = targets[0]
    if fault.shown_by != PACKED:
        row.convert_message = setup.refusal(fault, row.module)
        row.convert = _judged(row.convert_message, row.module, setup.modules)
    if fault.shown_by in (OUTPUTS, PACKED):
        row.verify_message = setup.difference(fault, row.module)
        row.verify = _judged(row.verify_message, row.module, setup.modules)
    row.seconds = time.perf_counter() - start
    return asdict(row)


def _judged(message: str, fqn: str, modules: set[str]) -> str:
    """What a message says of a fault at a module."""
    if not message:
        return UNSEEN
    words = re.findall(r"[\w.*]+", message.rpartition("it begins in ")[2])
    named: list[str] = next((found for word in words if (found := _modules(word, modules))), [])
    if not named:
        return NO_MODULE
    if fqn in named:
        return NAMED
    return NEIGHBOR if any(_are_neighbors(name, fqn) for name in named) else OTHER


def _modules(word: str, modules: set[str]) -> list[str]:
    """The modules that a word of a message names, by their name, a pattern or one of their parameters."""
    word = word.rstrip(".")
    if "." not in word and word != "lm_head":
        return []
    pattern = re.escape(word).replace(r"\*", r"\d+")
    return [name for name in modules if re.fullmatch(f"{pattern}", name)] or [
        name for name in modules if name and name == word.rpartition(".")[0]
    ]


def _are_neighbors(one: str, other: str) -> bool:
    return one.startswith(f"{other}.") or other.startswith(f"{one}.") or _parent(one) == _parent(other)


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


@dataclass
class _Setup:
    """A model on disk, and converted without a check for a number of ranks."""

    model: Model
    folder: Path
    tp: int

    def __post_init__(self) -> None:
        self._proven: dict[bool, Plan] = {}
        self.source = self.folder.parent / "model"
        self.out = self.folder / "out"
        self.convert(self.out, check=False)
        spec = resolve(self.source, need_weights=False)
        plan = plan_json.read(self.out / "plan.json")
        self.plan: Plan = plan
        self.whole = lambda: build_model(spec.model_class, spec.config, torch.float32, dict(plan.tied))
        self.modules = {name for name, _ in self.whole().named_modules()}

    def convert(self, out: Path, *, check: bool, sequence_parallel: bool = False) -> Any:
        """Convert the model."""
        return shardconv.convert(
            self.source, out, self.tp, check=check, experts=self.model.experts,
            writing=Writing(overwrite=True), sequence_parallel=sequence_parallel,
        )  # fmt: skip

    def targets(self, fault: Fault) -> list[str]:
        """The modules at which the fault can be, in the order of the model."""
        if self.model.is_packed != (fault.shown_by == PACKED):
            return []
        seen: dict[str, None] = {}

        def note(kind: str, fqn: str, made: Any) -> None:
            if kind == fault.kind and re.search(fault.where, fqn) and fault.fits(made):
                seen[fqn] = None

        with watching(note):
            try:
                self._make(fault)
            except shardconv.ShardconvError:  # there is no such form
                return []
        order = {name: place for place, name in enumerate(self.modules_in_order())}
        return sorted(seen, key=lambda name: order.get(name, len(order)))

    def modules_in_order(self) -> list[str]:
        """The FQNs of all modules."""
        return [name for name, _ in self.whole().named_modules()]

    def plan_for(self, *, check: bool, sequence_parallel: bool) -> Plan:
        """Plan the model."""
        return shardconv.plan(
            self.source, self.tp, experts=self.model.experts, check=check, sequence_parallel=sequence_parallel
        )

    def proven_plan(self, sequence_parallel: bool) -> Plan:
        """The plan of the model by the code without a fault."""
        if sequence_parallel not in self._proven:
            self._proven[sequence_parallel] = self.plan_for(check=True, sequence_parallel=sequence_parallel)
        return self._proven[sequence_parallel]

    def _make(self, fault: Fault) -> None:
        """Make the objects of one rank in the form that shows a fault."""
        comm = MetaCommunicator(0, self.plan.mesh)
        if fault.shown_by == SEQUENCE:
            plan = self.plan_for(check=False, sequence_parallel=True)
            parallelize_for_training(self.whole(), plan, comm, TrainingForm(sequence_parallel=True))
        elif fault.shown_by == GRADIENTS:
            parallelize_for_training(self.whole(), self.plan, comm, TrainingForm(gather_logits=True))
        elif fault.shown_by == PACKED:
            shardconv.verify(self.out, numerics=True)
        elif fault.is_written:
            stored, planned = self.whole().state_dict(), parameter_plans(self.plan)
            weights = {name: tensor for name, tensor in stored.items() if name in planned}
            random_weights.local_weights(weights, self.plan, 0)
        else:
            parallelize(self.whole(), self.plan, comm)

    def refusal(self, fault: Fault, fqn: str) -> str:
        """Why a plan is refused, is for inference only, or is another one; empty if it is the right one."""
        in_sequence = fault.shown_by == SEQUENCE
        right = self.proven_plan(in_sequence)
        with faulty(fault, fqn):
            try:
                plan = self.plan_for(check=True, sequence_parallel=in_sequence)
            except Exception as error:
                return str(error).replace(str(self.source), "MODEL")
        if plan.inference_only != right.inference_only:
            return plan.inference_only
        notes = [note for note in plan.notes if note not in right.notes]
        return f"{AROUND}: {'; '.join(notes)}" if plan != right else ""

    def difference(self, fault: Fault, fqn: str) -> str:
        """What ``verify --numerics`` says of a conversion without a check; empty if all is equal."""
        out = self.out
        with faulty(fault, fqn):
            try:
                if fault.is_written:
                    out = self.folder / "faulty"
                    self.convert(out, check=False)
                # A model that is put together from wrong files agrees with the ranks.
                shardconv.verify(out, self.source if fault.is_written else None, numerics=True)
            except DamagedError as error:
                return error.problems[0]
            except Exception as error:
                return str(error).replace(str(out), "OUT")
        return ""


_FOLDER = tempfile.TemporaryDirectory(prefix="mutations-")


@cache
def _setup(model_name: str, tp: int) -> _Setup:
    """The model of a name, converted once in each process."""
    model = MODELS[model_name]
    folder = Path(_FOLDER.name) / f"{model_name.replace(' ', '-')}-{tp}-{time.time_ns()}"
    (folder / f"{tp}").mkdir(parents=True)
    save = save_quantized if model.is_packed else save_random
    save(model.config(), model.model_class, folder / "model")
    return _Setup(model, folder / f"{tp}", tp)
