"""The plan that the converter solves for and the runtime builds from.

Frozen values; ``plan_json`` writes and reads them, ``docs/plan-format.md`` is the specification.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ..errors import PlanError
from .dims import Dim, size
from .measured import MemoryPlan
from .names import MAX_NAMES, expand_all
from .pipeline_stages import StagedModule, StagesPlan
from .slices import Mesh, local_size

VERSION = 4
FORMAT = "shardconv.plan"


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """The code that the plan was solved for."""

    torch: str
    transformers: str
    sources: tuple[str, ...]
    """Importable names of the Python modules whose source the fingerprint covers, sorted."""
    fingerprint: str
    """sha256 (hex) over those sources."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model to build."""

    class_name: str
    """``module:Class`` of the model."""
    dtype: str
    """Default dtype of the model, as ``"bfloat16"``."""
    num_parameters: int
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class PackedDim:
    """A dim of a stored tensor of a packed parameter."""

    of: int | None
    """The dim of the weight along which it runs; None: it is whole on each rank."""
    step: int
    """Positions of that dim for one of this; the last may have fewer. The size where ``of`` is None."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A stored tensor of a packed parameter."""

    name: str
    """In the parameter's module; ``*`` stands for the parameter's own name: ``qweight``, ``*.absmax``."""
    dtype: str
    dims: tuple[PackedDim, ...]
    checkpoint_shape: tuple[int, ...] = ()
    """Its global shape in an ordinary checkpoint, if not that of ``dims``; elements are in the same order."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a packed parameter is stored: as tensors of a quantized format, which run along its dims."""

    method: str
    """The format: ``fp8``, ``gptq``, ``bnb_4bit`` ..., a file of ``packed/``."""
    tensors: tuple[PackedTensor, ...]
    settings: tuple[tuple[str, int], ...] = ()
    """What the format needs to know beside its tensors, such as ``bits``."""


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """How the parameters (and persistent buffers) of these names are laid out over the ranks."""

    names: tuple[str, ...]
    """FQN patterns, ``model.layers.{0..31}.mlp.up_proj.weight``."""
    dims: tuple[Dim, ...]
    """One tree for each dim, outermost first; global sizes."""
    dtype: str
    partial: tuple[int, ...] = ()
    """Mesh axes over which the parameter is a Partial: its values where their coordinate is 0, else zero."""
    reason: str = ""
    """Why it is replicated; empty where some dim is sharded or partial."""
    packing: Packing | None = None
    """How it is stored, if not as it is; dims and dtype are those of the weight that it stands for."""
    grad_axes: tuple[int, ...] = ()
    """Mesh axes over which the gradient is a Partial; positions that are not sharded over them are summed."""
    grad_levels: int = 0
    """Levels from the parameter's own module up to the one that reads it; 0: its own module reads it."""


@dataclass(frozen=True, slots=True)
class AllReduceStep:
    """Partial over ``axes`` to Replicate."""

    slot: str
    """Where the step runs: ``input.hidden_states``, ``input.position_embeddings.0``, ``output``,
    ``output.logits``, ``output.0``; likewise in all steps."""
    op: Literal["all_reduce"] = field(default="all_reduce", init=False)
    axes: tuple[int, ...]
    per_token: int = 0
    """Elements of the (global) tensor for each token of the input; for reports, likewise in all steps."""
    grad_axes: tuple[int, ...] = ()
    """Mesh axes of the step over which the gradient of its replicated side is a Partial: of the output of
    ``all_reduce`` and ``all_gather``, of the input of ``slice``; likewise below."""


@dataclass(frozen=True, slots=True)
class AllGatherStep:
    """Dim ``dim``, laid out as ``layout``, becomes replicated."""

    slot: str
    op: Literal["all_gather"] = field(default="all_gather", init=False)
    dim: int
    layout: Dim
    per_token: int = 0
    grad_axes: tuple[int, ...] = ()
    local_grad_axes: tuple[int, ...] = ()
    """The same for the sharded side, where the layout has segments that are not sharded; likewise below."""


@dataclass(frozen=True, slots=True)
class SliceStep:
    """Dim ``dim``, replicated, becomes this rank's part of ``layout``."""

    slot: str
    op: Literal["slice"] = field(default="slice", init=False)
    dim: int
    layout: Dim
    per_token: int = 0
    grad_axes: tuple[int, ...] = ()
    local_grad_axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReduceScatterStep:
    """Partial over the axes of ``layout`` to this rank's part of dim ``dim``."""

    slot: str
    op: Literal["reduce_scatter"] = field(default="reduce_scatter", init=False)
    dim: int
    layout: Dim
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class KeepOnFirstStep:
    """Replicate to Partial over ``axes``: the first rank along them keeps the value, others have zeros."""

    slot: str
    op: Literal["keep_on_first"] = field(default="keep_on_first", init=False)
    axes: tuple[int, ...]
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class GradAllReduceStep:
    """The value passes; its gradient, Partial over ``axes``, is summed."""

    slot: str
    op: Literal["grad_all_reduce"] = field(default="grad_all_reduce", init=False)
    axes: tuple[int, ...]
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class GradDivideStep:
    """The value passes; its gradient, replicated over ``axes``, becomes a Partial."""

    slot: str
    op: Literal["grad_divide"] = field(default="grad_divide", init=False)
    axes: tuple[int, ...]
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class LocalRowsStep:
    """Global row ids (of a table whose dim 0 is laid out as ``layout``) become local row ids.

    Out-of-shard ids become 0 and are remembered. Only on inputs.
    """

    slot: str
    op: Literal["local_rows"] = field(default="local_rows", init=False)
    layout: Dim
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class LocalRowsOrEndStep:
    """As ``LocalRowsStep``, but out-of-shard ids become the number of local rows: experts skip these ids."""

    slot: str
    op: Literal["local_rows_or_end"] = field(default="local_rows_or_end", init=False)
    layout: Dim
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class ZeroOutOfShardStep:
    """Zero the positions whose ids were out of the shard.

    The tensor has the shape of the ids plus trailing dims: it is an output, or another input (the weights of
    experts).
    """

    slot: str
    op: Literal["zero_foreign"] = field(default="zero_foreign", init=False)
    per_token: int = 0


ReshardingStep = AllGatherStep | SliceStep | ReduceScatterStep
"""Steps that change how one dim is sharded."""

Boundary = (
    AllReduceStep
    | ReshardingStep
    | KeepOnFirstStep
    | GradAllReduceStep
    | GradDivideStep
    | LocalRowsStep
    | LocalRowsOrEndStep
    | ZeroOutOfShardStep
)
"""One step at a slot of a module: applied, in order, before (inputs) or after (outputs) its forward."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An int attribute that must shrink with the parameters."""

    attribute: str
    """``num_heads``; ``config.num_attention_heads`` (the module gets its own copy of the config);
    ``split_sizes.0``."""
    value: int
    """Global value, which the attribute has before the edit."""
    local: tuple[int, ...]
    """Local value: one for all ranks, or one for each rank."""


@dataclass(frozen=True, slots=True)
class NormInfo:
    """How a norm over a sharded dim computes (its statistic is reduced over the ranks)."""

    kind: str
    """``rms`` or ``layer``."""
    eps: float
    size: int
    """Global size of the last dim, or of one group of it, where groups are normalized one by one."""
    axes: tuple[int, ...]
    """Mesh axes that shard it; none where each group is on one rank."""
    weight: str = ""
    """Name of the weight parameter in the module; may be empty, likewise ``bias``."""
    bias: str = ""
    weight_offset: float = 0.0
    """Added to the weight (1.0 for norms that store ``weight - 1``)."""
    compute_dtype: str = "float32"
    """Dtype of the statistic, or ``input``."""
    weight_before_cast: bool = False
    """Multiply by the weight in the compute dtype, then cast; else cast first."""
    groups: tuple[int, ...] = (1,)
    """Local number of groups of the last dim: one for all ranks, or one for each."""
    input: str = ""
    """Argument that is normalized; empty where the norm has one argument."""
    gate: str = ""
    """Argument that multiplies, after ``gate_activation``; empty if the norm has no gate."""
    gate_activation: str = ""
    """``silu``, ``sigmoid``, ``gelu``, ``relu`` or ``identity``."""
    gate_first: bool = False
    """Multiply before the norm; else after it."""


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """How the runtime changes the modules of these names."""

    names: tuple[str, ...]
    category: str
    """``column``, ``row``, ``vocab``, ``experts``, ``norm`` or ``boundary``."""
    inputs: tuple[Boundary, ...] = ()
    outputs: tuple[Boundary, ...] = ()
    edits: tuple[Edit, ...] = ()
    gather_output: bool = False
    """Column, vocab: the output is gathered here."""
    input_is_parallel: bool = False
    """Row: the input arrives sharded."""
    reduce_output: bool = False
    """Row, vocab, experts: the Partial output is reduced here."""
    norm: NormInfo | None = None
    flags: tuple[str, ...] = ()
    """Experts: bool attributes to set, so that the module skips ids past the last expert."""


@dataclass(frozen=True, slots=True)
class LogitsInfo:
    """The gather that ``load(..., gather_logits=False)`` leaves out."""

    module: str
    """FQN whose output gather may be dropped."""
    slot: str


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """Groups of linear layers of one input, whose products are one product in a model for inference."""

    members: tuple[tuple[str, ...], ...]
    """In call order, FQN patterns of a member of each group: the first names of all are one group, the second
    ones another."""


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


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """The sequence-parallel form: activations between the parallel blocks are sharded over the sequence.

    Its fields replace those of the plan; ``gradients`` replaces the ``grad_axes`` of its parameters.
    """

    modules: tuple[ModulePlan, ...]
    gradients: tuple[GradientPlan, ...] = ()
    draws: tuple[DrawPlan, ...] = ()
    may_pad: bool = False
    """Lengths that the ranks do not divide are padded: it was shown that tokens keep their results."""
    stages: tuple[StagedModule, ...] = ()
    """The modules of the stages, if the plan has any."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The part of a plan that training needs."""

    sequence: SequencePlan | None = None
    parallel_loss: bool = False
    """The loss is computed from the ranks' shards of the logits; else from gathered ones, by the model."""
    draws: tuple[DrawPlan, ...] = ()
    """Modules at which the stream of random numbers changes; none where all ranks draw the same."""
    extra_outputs: tuple[str, ...] = ()
    """Arguments of the forward pass, as ``output_router_logits``, whose outputs may be part of a loss."""


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
    """Why the model cannot be trained; empty where it can."""
    proven_arguments: tuple[str, ...] = ()
    """Arguments that replace traced ones (``inputs_embeds``), with which the ranks compute the same."""
    left_out: tuple[str, ...] = ()
    """Inputs of the model (``pixel_values``) with which it could not be traced: nothing is known of what the
    ranks compute of them."""
    wrong_attention: tuple[str, ...] = ()
    """Implementations of attention (``flex_attention``) with which the ranks compute something else than the
    unsharded model."""
    wrong_experts: tuple[str, ...] = ()
    """The same of experts."""
    stages: StagesPlan | None = None
    """Of a pipeline; each stage is sharded over its own ``tp`` ranks. None: there is one stage."""
    memory: MemoryPlan | None = None
    """What a rank needs beside its weights; None where it could not be measured."""
    notes: tuple[str, ...] = ()
    """For a person: opaque modules, guessed values, operators without a rule."""
    version: int = VERSION


_Entry = TypeVar("_Entry", ParameterPlan, ModulePlan, GradientPlan, DrawPlan)


def parameter_plans(plan: Plan) -> dict[str, ParameterPlan]:
    """The entry of each parameter and persistent buffer by its FQN, in the order of the plan.

    Aliases of tied parameters are not in it (see ``Plan.tied``).

    Raises:
        PlanError: two entries claim one name, or the patterns stand for too many names.
    """
    return by_name("parameters", plan.parameters)


def module_plans(plan: Plan) -> dict[str, ModulePlan]:
    """The entry of each module that changes by its FQN, in the order of the plan.

    Raises:
        PlanError: two entries claim one name, or the patterns stand for too many names.
    """
    return by_name("modules", plan.modules)


def layout_of(step: Boundary) -> Dim | None:
    """The layout of the dim that a step concerns; None for a step that concerns all dims alike."""
    return step.layout if isinstance(step, ReshardingStep | LocalRowsStep | LocalRowsOrEndStep) else None


def global_shape(entry: ParameterPlan) -> tuple[int, ...]:
    """Global shape of the parameter."""
    return tuple(size(dim) for dim in entry.dims)


def local_shape(entry: ParameterPlan, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Local shape on ``rank``; of a Partial, too, each rank holds a tensor of this shape."""
    return tuple(local_size(dim, mesh, rank) for dim in entry.dims)


def by_name(path: str, entries: tuple[_Entry, ...]) -> dict[str, _Entry]:
    """Expand the names of entries.

    Raises:
        PlanError: two entries claim one name, or the patterns stand for too many names.
    """
    found: dict[str, _Entry] = {}
    for index, entry in enumerate(entries):
        try:
            names = expand_all(entry.names, MAX_NAMES - len(found))
        except PlanError as error:
            raise PlanError(f"{path}[{index}].names: {error}") from error
        for name in names:
            if name in found:
                earlier = entries.index(found[name])
                raise PlanError(f"{path}[{index}].names: {name!r} is claimed by {path}[{earlier}] already")
            found[name] = entry
    return found
