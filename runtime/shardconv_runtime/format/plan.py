"""The plan that the converter solves for and the runtime builds from.

Frozen values, each of which checks its own fields when it is made; ``plan_json`` has the rules between the
parts of a plan. Entries get their names when they are put into a plan; before that, ``names`` may be empty.
``plan_json`` writes and reads plans, ``docs/plan-format.md`` is the specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from ..errors import PlanError
from .dims import MAX_SIZE, Dim, axes_of, size
from .field_checks import (
    MAX_STEP_LENGTH,
    MAX_TENSOR_DIMS,
    check_dtype,
    check_port,
    check_text,
    check_tp,
    fail,
    is_importable,
    is_path,
    is_sha256,
    is_step,
    one_of,
)
from .measured import MemoryPlan
from .module_steps import (
    AllGatherStep,
    GradDivideStep,
    LocalRowsOrEndStep,
    LocalRowsStep,
    ModuleStep,
    SliceStep,
    ZeroOutOfShardStep,
)
from .names import FORBIDDEN, MAX_NAMES, expand_all
from .pipeline_stages import StagedModule, StagesPlan
from .slices import Mesh, local_size

VERSION = 6
FORMAT = "shardconv.plan"

MAX_SOURCES = 4096
"""Most modules that the fingerprint covers."""

MAX_MESH_AXES = 16

MAX_PACKED_TENSORS = 16
"""Most stored tensors of a packed parameter, and most settings."""

EXPERT_MODES = ("tp", "ep")

GATE_ACTIVATIONS = ("silu", "sigmoid", "gelu", "relu", "identity")
"""Activations of the gate of a gated norm: functions of ``torch.nn.functional``, or none."""

NORM_KINDS = ("rms", "layer", "l2")

WHOLE = "*"
"""In the name of a stored tensor: the parameter's own name."""

CATEGORIES = ("column", "row", "vocab", "experts", "norm", "boundary")
CATEGORY_OF_FIELD = {"norm": "norm", "flags": "experts"}
"""Optional field of a module -> the category in which it may be set."""


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """The code that the plan was solved for."""

    torch: str
    transformers: str
    sources: tuple[str, ...]
    """Importable names of the Python modules whose source the fingerprint covers, sorted."""
    fingerprint: str
    """sha256 (hex) over those sources."""

    def __post_init__(self) -> None:
        check_text("torch", self.torch)
        check_text("transformers", self.transformers)
        if len(self.sources) > MAX_SOURCES:
            fail("sources", f"more than {MAX_SOURCES} modules")
        for index, source in enumerate(self.sources):
            if not is_importable(source):
                fail(f"sources[{index}]", f"{source!r} is not the name of a module")
        if list(self.sources) != sorted(set(self.sources)):
            fail("sources", "must be sorted, each name once")
        if not is_sha256(self.fingerprint):
            fail("fingerprint", "expected 64 hex digits in lower case")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model to build."""

    class_name: str
    """``module:Class`` of the model."""
    dtype: str
    """Default dtype of the model, as ``"bfloat16"``."""
    num_parameters: int
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype)
        if self.num_parameters < 0:
            fail("num_parameters", "must not be negative")


@dataclass(frozen=True, slots=True)
class PackedDim:
    """A dim of a stored tensor of a packed parameter."""

    of: int | None
    """The dim of the weight along which it runs; None if it is replicated."""
    step: int
    """Positions of that dim for one of this; the last may have fewer. The size if ``of`` is None."""

    def __post_init__(self) -> None:
        if not (0 if self.of is None else 1) <= self.step <= MAX_SIZE:
            fail("step", f"must be 1 to {MAX_SIZE}")


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A stored tensor of a packed parameter."""

    name: str
    """The name in the parameter's module; ``*`` is the parameter's own name: ``qweight``, ``*.absmax``."""
    dtype: str
    dims: tuple[PackedDim, ...]
    checkpoint_shape: tuple[int, ...] = ()
    """Its global shape in an ordinary checkpoint if it differs from ``dims``; the elements are in the same
    order."""

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype)
        components = self.name.replace(WHOLE, "x").split(".")
        if "" in components or FORBIDDEN.search(self.name) or len(self.name) > MAX_STEP_LENGTH:
            fail("name", "is no name of a tensor in a module")
        if len(self.dims) > MAX_TENSOR_DIMS or len(self.checkpoint_shape) > MAX_TENSOR_DIMS:
            fail("dims", f"more than {MAX_TENSOR_DIMS} dims")
        along = [dim.of for dim in self.dims if dim.of is not None]
        if len(set(along)) < len(along):
            fail("dims", "two of them run along one dim of the weight")


@dataclass(frozen=True, slots=True)
class Packing:
    """How a packed parameter is stored: as tensors of a quantized format, which run along its dims."""

    method: str
    """The format: ``fp8``, ``gptq``, ``bnb_4bit`` ..., a file of ``packed/``."""
    tensors: tuple[PackedTensor, ...]
    settings: tuple[tuple[str, int], ...] = ()
    """Settings of the format in addition to its tensors, such as ``bits``."""

    def __post_init__(self) -> None:
        if not self.method or len(self.method) > MAX_STEP_LENGTH:
            fail("method", f"must have 1 to {MAX_STEP_LENGTH} characters")
        if not 1 <= len(self.tensors) <= MAX_PACKED_TENSORS:
            fail("tensors", f"must be 1 to {MAX_PACKED_TENSORS}")
        names = {tensor.name for tensor in self.tensors}
        if len(names) < len(self.tensors):
            fail("tensors", "two of them have one name")
        is_long = any(len(key) > MAX_STEP_LENGTH for key, _ in self.settings)
        if len(self.settings) > MAX_PACKED_TENSORS or is_long:
            fail(
                "settings",
                f"more than {MAX_PACKED_TENSORS}, or a name of more than {MAX_STEP_LENGTH} characters",
            )


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """How the parameters (and persistent buffers) of these names are laid out over the ranks."""

    names: tuple[str, ...]
    """FQN patterns, ``model.layers.{0..31}.mlp.up_proj.weight``."""
    dims: tuple[Dim, ...]
    """One tree for each dim, outermost first; global sizes."""
    dtype: str
    partial: tuple[int, ...] = ()
    """Mesh axes over which the parameter is a Partial: its values where their coordinate is 0, otherwise
    zero."""
    reason: str = ""
    """Why it is replicated; empty if some dim is sharded or partial."""
    packing: Packing | None = None
    """How it is stored, if not as it is; dims and dtype describe the dequantized weight."""
    grad_axes: tuple[int, ...] = ()
    """Mesh axes over which the gradient is a Partial; positions that are not sharded over them are summed."""
    grad_levels: int = 0
    """Levels from the parameter's own module up to the one that reads it; 0: its own module reads it."""

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype)
        check_text("reason", self.reason)
        if len(self.dims) > MAX_TENSOR_DIMS:
            fail("dims", f"more than {MAX_TENSOR_DIMS} dims")
        both = [axis for axis in sorted(self.partial) if any(axis in axes_of(dim) for dim in self.dims)]
        if both:
            fail(
                "partial",
                f"mesh axis {both[0]} also shards a dim; a tensor is Partial or Shard over an axis, not both",
            )
        if self.packing is not None:
            if self.partial:
                fail("packing", "a packed parameter cannot be Partial: its zeros cannot be stored")
            if any(name.endswith("}") for name in self.names):
                fail("packing", "a packed parameter has a name of its own in its module, not a number")
            shape = global_shape(self)
            for index, tensor in enumerate(self.packing.tensors):
                where = f"packing.tensors[{index}]"
                for place, dim in enumerate(tensor.dims):
                    if dim.of is not None and not 0 <= dim.of < len(shape):
                        fail(f"{where}.dims[{place}].of", f"the weight has {len(shape)} dims")
                sizes = [
                    dim.step if dim.of is None else math.ceil(shape[dim.of] / dim.step) for dim in tensor.dims
                ]
                if tensor.checkpoint_shape and math.prod(tensor.checkpoint_shape) != math.prod(sizes):
                    fail(f"{where}.checkpoint_shape", f"has not as many elements as {sizes}")


@dataclass(frozen=True, slots=True)
class AttributeOverride:
    """An int attribute that must shrink with the parameters."""

    attribute: str
    """``num_heads``; ``config.num_attention_heads`` (the module gets its own copy of the config);
    ``split_sizes.0``."""
    value: int
    """Global value, which the attribute has before the override."""
    local: tuple[int, ...]
    """Local value: one for all ranks, or one for each rank."""

    def __post_init__(self) -> None:
        path = self.attribute.split(".")
        if not path[0].isidentifier() or not is_path(path) or any(step.startswith("_") for step in path):
            fail("attribute", f"not the path of an attribute: {self.attribute!r}")
        if self.value < 1 or any(value < 1 for value in self.local):
            fail("", "the values must be 1 or more")
        if max(self.local, default=0) > self.value:
            fail("", "a local value is larger than the global one")


@dataclass(frozen=True, slots=True)
class NormInfo:
    """How a norm over a sharded dim computes (its statistic is reduced over the ranks)."""

    kind: str
    """``rms``, ``layer`` or ``l2``."""
    eps: float
    size: int
    """Global size of the last dim, or of one group of it, if groups are normalized one by one."""
    axes: tuple[int, ...]
    """Mesh axes that shard it; none if each group is on one rank."""
    weight: str = ""
    """Name of the weight parameter in the module; may be empty."""
    bias: str = ""
    """Name of the bias parameter in the module; may be empty."""
    weight_offset: float = 0.0
    """Number to add to the weight (1.0 for norms that store ``weight - 1``)."""
    compute_dtype: str = "float32"
    """Dtype of the statistic, or ``input``."""
    weight_before_cast: bool = False
    """Multiply by the weight in the compute dtype, then cast; otherwise cast first."""
    groups: tuple[int, ...] = (1,)
    """Local number of groups of the last dim: one for all ranks, or one for each."""
    input: str = ""
    """Argument that is normalized; empty if the norm has one argument."""
    gate: str = ""
    """Argument that multiplies, after ``gate_activation``; empty if the norm has no gate."""
    gate_activation: str = ""
    """``silu``, ``sigmoid``, ``gelu``, ``relu`` or ``identity``."""
    gate_first: bool = False
    """Multiply before the norm; otherwise after it."""

    def __post_init__(self) -> None:
        if self.kind not in NORM_KINDS:
            fail("kind", one_of(self.kind, NORM_KINDS))
        if self.eps < 0:
            fail("eps", "must not be negative")
        if self.size < 1:
            fail("size", "must be 1 or more")
        if any(n < 1 for n in self.groups):
            fail("groups", "needs a number of 1 or more for all ranks, or one for each")
        if self.gate and (self.gate_activation not in GATE_ACTIVATIONS or not self.input):
            fail("gate", "needs an input and a known gate_activation")
        for field, name in (("weight", self.weight), ("bias", self.bias)):
            if name and not is_step(name):
                fail(field, f"not the name of a parameter: {name!r}")
        if self.compute_dtype != "input":
            check_dtype("compute_dtype", self.compute_dtype)


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """How the runtime changes the modules of these names."""

    names: tuple[str, ...]
    category: str
    """``column``, ``row``, ``vocab``, ``experts``, ``norm`` or ``boundary``."""
    inputs: tuple[ModuleStep, ...] = ()
    outputs: tuple[ModuleStep, ...] = ()
    overrides: tuple[AttributeOverride, ...] = ()
    norm: NormInfo | None = None
    flags: tuple[str, ...] = ()
    """Experts: bool attributes to set, so that the module skips ids past the last expert."""

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES:
            fail("category", one_of(self.category, CATEGORIES))
        for field, category in CATEGORY_OF_FIELD.items():
            if getattr(self, field) and self.category != category:
                fail(field, f'a module of the category "{self.category}" cannot have it')
        # A step that zeroes positions needs the ids that an earlier step found to be out-of-shard.
        remembers = False
        for index, step in enumerate(self.inputs):
            if isinstance(step, ZeroOutOfShardStep) and not remembers:
                fail(f"inputs[{index}]", f"{step.op} needs a local_rows before it")
            remembers |= isinstance(step, LocalRowsStep | LocalRowsOrEndStep)
        has_rows = any(isinstance(step, LocalRowsStep) for step in self.inputs)
        if not has_rows and any(isinstance(step, ZeroOutOfShardStep) for step in self.outputs):
            fail("outputs", "zero_out_of_shard needs a local_rows among the inputs")
        if flags := [flag for flag in self.flags if not flag.isidentifier() or flag.startswith("__")]:
            fail("flags", f"not the name of an attribute: {flags[0]!r}")
        if len(set(self.flags)) < len(self.flags):
            fail("flags", "an attribute is named twice")
        overridden: set[str] = set()
        for index, override in enumerate(self.overrides):
            if override.attribute in overridden:
                fail(f"overrides[{index}].attribute", f"{override.attribute!r} is overridden twice")
            overridden.add(override.attribute)
        if self.category == "norm" and self.norm is None:
            fail("", 'the key "norm" is missing')

    @property
    def input_is_parallel(self) -> bool:
        """Row: whether the input arrives sharded."""
        return self.category == "row" and not any(isinstance(step, SliceStep) for step in self.inputs)


@dataclass(frozen=True, slots=True)
class LogitsInfo:
    """The gather that ``load(..., gather_logits=False)`` leaves out."""

    module: str
    """FQN whose output gather may be dropped."""
    port: str

    def __post_init__(self) -> None:
        check_port("port", self.port, "output")


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """Groups of linear layers of one input, whose products are one product in a model for inference."""

    members: tuple[tuple[str, ...], ...]
    """FQN patterns of a member of each group, in call order: the first names of all are one group, the second
    names another."""


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """The ``grad_axes`` and ``grad_levels`` of the parameters of these names, see ``ParameterPlan``."""

    names: tuple[str, ...]
    axes: tuple[int, ...]
    levels: int = 0


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """The stream of random numbers from which modules draw in training mode."""

    names: tuple[str, ...]
    axes: tuple[int, ...] = ()
    """Mesh axes along which ranks draw different numbers while the module runs; none: all draw the same."""
    afterwards: tuple[int, ...] | None = None
    """The same for the code around the module, from its return until it calls another; None: as before."""
    mixed: bool = False
    """The module's own code draws both kinds with no module in between: it must draw nothing."""

    def __post_init__(self) -> None:
        if self.mixed and self.axes:
            fail("mixed", "a mixed module cannot have axes")


@dataclass(frozen=True, slots=True)
class HookPort:
    """A tensor at a port of a module that each rank has all of, a term of, or a part of the sequence of."""

    port: str
    grad_axes: tuple[int, ...] = ()
    """Mesh axes over which its gradient is a Partial."""
    sequence_axes: tuple[int, ...] = ()
    """Mesh axes that shard its second dim, the sequence."""
    partial_axes: tuple[int, ...] = ()
    """Mesh axes over which it is a Partial."""
    is_written: bool = False
    """Code around the module writes to it later. A hook could not be given a copy of it."""
    has_gradient: bool = True
    """False for a floating tensor that needed no gradient in the trace, such as an image."""

    @property
    def is_full(self) -> bool:
        """Whether each rank has all of the tensor and of its gradient."""
        return not (self.grad_axes or self.sequence_axes or self.partial_axes)


@dataclass(frozen=True, slots=True)
class HookPlan:
    """The tensors of modules that hooks may be given, as the caller of a module passes or gets them."""

    names: tuple[str, ...]
    inputs: tuple[HookPort, ...] = ()
    """All inputs; none if ranks have parts of one of them."""
    outputs: tuple[HookPort, ...] = ()
    """All outputs; none if ranks have parts of one of them."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The steps on attention weights of modules, which run only in calls that ask for these."""

    names: tuple[str, ...]
    outputs: tuple[ModuleStep, ...]

    def __post_init__(self) -> None:
        for index, step in enumerate(self.outputs):
            if not isinstance(step, AllGatherStep | GradDivideStep):
                fail(f"outputs[{index}]", f"must be an all_gather or a grad_divide, not {step.op}")


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """The sequence-parallel form: activations between the parallel blocks are sharded over the sequence.

    Its fields replace the plan's fields; ``gradients`` replaces the ``grad_axes`` of its parameters.
    """

    modules: tuple[ModulePlan, ...]
    gradients: tuple[GradientPlan, ...] = ()
    draws: tuple[DrawPlan, ...] = ()
    may_pad: bool = False
    """Lengths that the ranks do not divide are padded: it was shown that tokens keep their results."""
    stages: tuple[StagedModule, ...] = ()
    """The modules of the stages, if the plan has any."""
    hooks: tuple[HookPlan, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The part of a plan that training needs."""

    sequence: SequencePlan | None = None
    parallel_loss: bool = False
    """The loss is computed from the ranks' shards of the logits; otherwise from full ones, by the model."""
    draws: tuple[DrawPlan, ...] = ()
    """Modules at which the stream of random numbers changes; none if all ranks draw the same."""
    extra_outputs: tuple[str, ...] = ()
    """Arguments of the forward pass, as ``output_router_logits``, whose outputs may be part of a loss."""
    draws_on_host: bool = False
    """The model's code draws random numbers with numpy or Python in training mode, and the layouts are right
    for its use of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A solved model."""

    tp: int
    mesh: Mesh
    """Sizes of the mesh axes; their product is ``tp``."""
    model: ModelInfo
    code: CodeInfo
    parameters: tuple[ParameterPlan, ...]
    """Every parameter and persistent buffer of the model exactly once, tied ones under their first name."""
    modules: tuple[ModulePlan, ...]
    """Only modules that change."""
    tied: tuple[tuple[str, str], ...] = ()
    """(alias, name) of parameters that are the same tensor."""
    logits: LogitsInfo | None = None
    fused: tuple[FusedPlan, ...] = ()
    """Linear layers that are computed as one product; their parameters are adjacent in the files."""
    experts: str = "tp"
    """How mixture-of-experts layers are sharded: ``tp``, inside of each expert, or ``ep``, by expert."""
    training: TrainingPlan | None = None
    """None: for inference only."""
    inference_only: str = ""
    """Why the model cannot be trained; empty if it can."""
    hooks: tuple[HookPlan, ...] = ()
    """Modules on which hooks may be registered; ranks have parts of the tensors of all others."""
    attentions: tuple[AttentionPlan, ...] = ()
    """Modules that return the attention weights of a rank's heads, if ``output_attentions`` is proven."""
    proven_arguments: tuple[str, ...] = ()
    """Arguments with which the ranks compute the same, though the traced call lacks them: those that replace
    others (``inputs_embeds``), and ``output_attentions``."""
    left_out: tuple[str, ...] = ()
    """Inputs of the model (``pixel_values``) with which it could not be traced. The results of ranks with
    these inputs are unknown."""
    wrong_attention: tuple[str, ...] = ()
    """Implementations of attention (``flex_attention``) with which the ranks' results differ from the
    unsharded model."""
    wrong_experts: tuple[str, ...] = ()
    """Implementations of experts with which the ranks' results differ from the unsharded model."""
    stages: StagesPlan | None = None
    """The stages of a pipeline; each stage is sharded over its own ``tp`` ranks. None: there is one stage."""
    memory: MemoryPlan | None = None
    """Memory that a rank needs in addition to its weights; None if it could not be measured."""
    devices: str = ""
    """The devices and the calls whose predicted times decided the plan; empty: it is for any devices."""
    notes: tuple[str, ...] = ()
    """Notes for a person: opaque modules, guessed values, operators without a rule."""
    version: int = VERSION

    def __post_init__(self) -> None:
        check_tp(self.tp)
        if len(self.mesh) > MAX_MESH_AXES:
            fail("mesh", f"more than {MAX_MESH_AXES} axes")
        if any(extent < 1 for extent in self.mesh) or math.prod(self.mesh) != self.tp:
            fail("mesh", f"the product of {list(self.mesh)} must be tp = {self.tp}")
        if self.experts not in EXPERT_MODES:
            fail("experts", one_of(self.experts, EXPERT_MODES))
        if self.training is not None and self.inference_only:
            fail("inference_only", "must be empty, since the plan has a training part")
        check_text("inference_only", self.inference_only)
        check_text("devices", self.devices)
        for index, note in enumerate(self.notes):
            check_text(f"notes[{index}]", note)


_Entry = TypeVar("_Entry", ParameterPlan, ModulePlan, GradientPlan, DrawPlan, HookPlan, AttentionPlan)


def parameter_plans(plan: Plan) -> dict[str, ParameterPlan]:
    """Return the entry of each parameter and persistent buffer by its FQN, in the order of the plan.

    Aliases of tied parameters are not in it (see ``Plan.tied``).
    """
    return by_name("parameters", plan.parameters)


def module_plans(plan: Plan) -> dict[str, ModulePlan]:
    """Return the entry of each module that changes by its FQN, in the order of the plan."""
    return by_name("modules", plan.modules)


def global_shape(entry: ParameterPlan) -> tuple[int, ...]:
    """Return the global shape of the parameter."""
    return tuple(size(dim) for dim in entry.dims)


def local_shape(entry: ParameterPlan, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the local shape on ``rank``; of a Partial, too, each rank holds a tensor of this shape."""
    return tuple(local_size(dim, mesh, rank) for dim in entry.dims)


def by_name(path: str, entries: tuple[_Entry, ...]) -> dict[str, _Entry]:
    """Expand the names of entries."""
    entry_of: dict[str, _Entry] = {}
    for index, entry in enumerate(entries):
        try:
            names = expand_all(entry.names, MAX_NAMES - len(entry_of))
        except PlanError as error:
            raise PlanError(f"{path}[{index}].names: {error}") from error
        for name in names:
            if name in entry_of:
                earlier = entries.index(entry_of[name])
                raise PlanError(f"{path}[{index}].names: {name!r} is claimed by {path}[{earlier}] already")
            entry_of[name] = entry
    return entry_of
