"""Operations of a user on a loaded model with adapters: adding, merging, saving."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Generator, Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..adapters.adapter_files import PlannedAdapter, require_name
from ..adapters.adapter_names import DEFAULT, is_of_adapter, peft
from ..adapters.adapter_set import AdapterSet
from ..adapters.attaching import Adapter, Attached
from ..comm import agreement
from ..comm.rank_0 import without_drawing
from ..default_modes import in_default_modes
from ..errors import OptionError, PlanError, RefusedCallError, UnsupportedError
from ..format import plan_json
from ..format.names import expand_all
from ..format.plan import ParameterPlan, parameter_plans
from ..format.slices import coordinates
from ..loaded import Loaded, loaded, unwrapped
from ..parallel.outside_calls import as_planned
from ..parallel.refused_changes import refuse_method
from ..saving.adapter_saving import save_adapters
from ..saving.stored_model import named_tensors
from ..versions import converter_function
from .building import ModelBuilder
from .transform import Stored

_REFUSED = {
    "add_adapter": "call shardconv_runtime.add_adapter(model, config), which returns a model with both",
    "load_adapter": 'run `shardconv adapt`, and pass it too: load(..., adapter={"a": DIR, "b": DIR})',
    "add_weighted_adapter": "combine the adapters in one process with peft, and run `shardconv adapt`",
    "push_to_hub": "each rank has a part; call save_pretrained(DIR) on all ranks, then `hf upload`",
}
"""Methods of ``PeftModel`` that assume they hold the full model -> the remedy."""

_TOLERANCES = {torch.float64: 1e-9, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference of a layer's outputs after merging, relative to the largest output, by dtype."""


@in_default_modes
@agreement.named_call("add_adapter")
def add_adapter(model: nn.Module, config: Any, name: str = DEFAULT, *, seed: int = 0) -> Any:
    """Add a new adapter to a loaded model; call it on every rank of the job.

    Rank 0 plans and checks the model with the adapter, which takes seconds. ``shardconv adapt`` does this
    ahead of time. The returned model shares the parameters of ``model`` and has its other adapters.

    Args:
        model: returned by ``load`` or by this function. To train the adapter, load it with
            ``training=True``.
        config: a ``peft.LoraConfig``, or another peft config for adapters of layers.
        name: name of the adapter. If it is the only adapter, it becomes the active one.
        seed: seed of its initial weights. They are the weights that peft draws in one process after
            ``torch.manual_seed(seed)``.

    Returns:
        A ``peft.PeftModel`` in eval mode.

    Raises:
        PlanError: the model has an adapter with this name, or FSDP has sharded it.
        SourceError: peft does not accept the config for this model, or the initial adapter depends on the
            weights of the model.
        SolveError: the model cannot be planned with the adapter and these shards.
        LaunchError: the converter is not installed on rank 0.

    Example:
        >>> model = shardconv_runtime.load("out/", training=True)
        >>> model = shardconv_runtime.add_adapter(model, LoraConfig(target_modules="all-linear"))
    """
    building: ModelBuilder = loaded(model).building
    present_adapters = {} if building.checked.adapters is None else building.checked.adapters.adapters
    _require_unsplit(model, "add_adapter")
    require_name(name)
    if name in present_adapters:
        raise OptionError(f"the model has an adapter {name!r}; give another name")
    adapter = Adapter(config, None, seed)

    def plan_on_rank_0() -> str:
        if building.start.rank:
            return ""
        plan_adapter = converter_function("plan_adapter", "a new adapter needs a plan with its layers")
        with without_drawing():
            plan = plan_adapter(building.checked.directory, building.checked.plan, adapter)
        return plan_json.dumps(plan)

    plan_text: str = agreement.together(building.start, plan_on_rank_0, agreement.READ_TIMEOUT_S)
    text = agreement.exchange(building.start, plan_text)[0]
    planned = PlannedAdapter(adapter, plan_json.loads(text), plan_json.sha256(text))
    every = {**present_adapters, name: planned}
    adapters = AdapterSet.of(every, building.checked.plan, building.unsharded_model)
    stored: Stored | None = None
    if not loaded(model).packed:  # modules of packed formats have other tensors than the files
        present, base = named_tensors(model), _base_tensors(model)

        def stored(attached: Attached | None) -> Generator[tuple[str, Tensor]]:
            """Yield the tensors of ``model``, without copying them, and the tensors of the new adapter."""
            assert attached is not None, "the model has adapters"
            for fqn, tensor in adapters.tensors(lambda rows: _each(base), attached, building.start, {}):
                is_present = any(is_of_adapter(fqn, each) for each in present_adapters)
                yield fqn, present[fqn].detach() if is_present else tensor

    return guard_adapters(building.with_adapters(adapters).model(stored))


def _each(tensors: Mapping[str, Tensor]) -> Generator[tuple[str, Tensor]]:
    yield from tensors.items()


def _base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return local tensors by their names without adapters, laid out as without; every rank calls it."""
    source = loaded(model)
    building: ModelBuilder = source.building
    before, entries = parameter_plans(building.checked.plan), parameter_plans(source.plan)
    names = source.attached.base_names if source.attached is not None else {}
    base_tensors = {}
    for name, tensor in named_tensors(model).items():
        old = names.get(name, name)
        if old in before and name in entries and (source.attached is None or name in names):
            is_term = entries[name].partial != before[old].partial
            base_tensors[old] = (
                _summed(tensor.detach(), entries[name], source) if is_term else tensor.detach()
            )
    return base_tensors


def _summed(tensor: Tensor, entry: ParameterPlan, source: Loaded) -> Tensor:
    """Return the sum of a parameter of which an adapter made each rank hold a term.

    Without adapters all ranks hold the sum; with them one rank of each group does, and the others zeros.
    """
    parts = agreement.exchange(source.launch, tensor.cpu())
    mesh, own_coordinates = source.plan.mesh, coordinates(source.plan.mesh, source.launch.rank)
    holder_coordinates = tuple(
        0 if axis in entry.partial else own_coordinates[axis] for axis in range(len(mesh))
    )
    holder = next(rank for rank in range(len(parts)) if coordinates(mesh, rank) == holder_coordinates)
    return parts[holder].to(tensor.device)


def guard_adapters(wrapper: Any) -> Any:
    """Make the methods of a ``PeftModel`` correct for sharded parameters, or refuse them, in place."""
    packed = loaded(wrapper).packed
    for name, remedy in _REFUSED.items():
        setattr(wrapper, name, partial(refuse_method, name, remedy))
    wrapper.save_pretrained = MethodType(_save_pretrained, wrapper)
    if loaded(wrapper).launch.world_size > 1 and loaded(wrapper).stage is None:
        wrapper.get_nb_trainable_parameters = partial(_num_parameters, wrapper)
    for module in (wrapper, wrapper.base_model):
        module.merge_and_unload = partial(_merge_and_unload, wrapper, packed)
        module.unload = partial(_unload, wrapper)
        module.merge_adapter = partial(_merge_adapter, wrapper, packed)
    return wrapper


def _num_parameters(wrapper: Any) -> tuple[int, int]:
    """Return the number of parameters of the full model that are trained, and of all."""
    model: Any = unwrapped(wrapper)
    return model.num_parameters(only_trainable=True), model.num_parameters()


@agreement.named_call("save_pretrained")
def _save_pretrained(
    wrapper: Any,
    save_directory: str | os.PathLike[str],
    safe_serialization: bool = True,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: bool | str = "auto",
    is_main_process: bool = True,
    **options: Any,
) -> None:
    """Write the adapters as peft does; every rank calls it."""
    if options or not safe_serialization or save_embedding_layers is True:
        unsupported = ", ".join(options) or (
            "safe_serialization" if not safe_serialization else "save_embedding_layers"
        )
        raise UnsupportedError(
            f"save_pretrained: {unsupported} is not supported for adapters of a sharded model; leave it out"
        )
    save_adapters(wrapper, save_directory, selected_adapters, overwrite=True)


def _merge_adapter(
    wrapper: Any, packed: bool, adapter_names: list[str] | None = None, safe_merge: bool = False
) -> None:
    """Add products of adapters to the weights of the model, each rank to its part."""
    names = adapter_names or wrapper.active_adapters
    _require_mergeable(wrapper, names, packed=packed)
    type(wrapper.base_model).merge_adapter(wrapper.base_model, adapter_names, safe_merge)


def _merge_and_unload(
    wrapper: Any,
    packed: bool,
    progressbar: bool = False,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> Any:
    """Return the model without adapters, whose products are added to its weights; every rank calls it."""
    _merge_adapter(wrapper, packed, adapter_names, safe_merge)
    model = _rebuilt(wrapper)
    is_untied = loaded(model).plan.tied != loaded(wrapper).building.checked.plan.tied
    if is_untied and getattr(model.config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = False  # as in peft: a checkpoint of it has its own head
    return model


def _unload(wrapper: Any) -> Any:
    """Return the model without adapters; every rank calls it."""
    kind = peft().tuners.tuners_utils.BaseTunerLayer
    if any(isinstance(module, kind) and module.merged for module in wrapper.modules()):
        raise RefusedCallError("unload: adapters are merged into the weights; call unmerge_adapter() first")
    return _rebuilt(wrapper)


def _rebuilt(wrapper: Any) -> Any:
    """Return the model without adapters. As in peft, copies of modules of active adapters stay."""
    source = loaded(wrapper)
    building: ModelBuilder = source.building
    _require_unsplit(wrapper, "unloading")
    # FQN of a tensor in an active adapter's copy of a module -> FQN, without adapters, of the original.
    copied: dict[str, str] = {}
    for module, original in source.attached.copied_modules().items():
        if any(is_of_adapter(module, adapter) for adapter in wrapper.active_adapters):
            prefix, names = source.attached.base_names[original], source.attached.copies
            copied |= {n: prefix + n.removeprefix(module) for n in names if n.startswith(f"{module}.")}
    if source.packed:
        if copied:
            raise RefusedCallError(
                f"unloading: the adapter has a copy of {min(copied.values())}, which would take its place, "
                "and the weights of the model stay packed; load it with dequantize=True"
            )
        return building.with_adapters(None).model()
    present, base = named_tensors(wrapper), _base_tensors(wrapper)
    plan = building.checked.plan
    entries = parameter_plans(plan)
    values = {alias: base[first] for alias, first in plan.tied} | base
    values |= {old: present[name] for name, old in copied.items()}
    # Tied parameters are several tensors if a copy of one of their modules stays. They are laid out alike.
    together: dict[str, list[str]] = {name: [name] for name in entries}
    for alias, first in plan.tied:
        together[first].append(alias)
    parameters, tied = list(plan.parameters), []
    for first, names in together.items():
        first_name_of: dict[int, str] = {}
        for name in names:
            if (first_name := first_name_of.setdefault(id(values[name]), name)) != name:
                tied.append((name, first_name))
            elif name != first:
                _require_separable(building, first, name)
                parameters.append(replace(entries[first], names=(name,)))
    if tied != list(plan.tied):
        plan = replace(plan, parameters=tuple(parameters), tied=tuple(tied))
        building = replace(building, checked=replace(building.checked, plan=plan))
    tensors = {name: values[name].detach() for name in parameter_plans(plan)}
    return building.with_adapters(None).model(lambda attached: _each(tensors))


def _require_separable(building: ModelBuilder, first: str, name: str) -> None:
    """Raise ``PlanError`` if the plan sums a gradient of parameters that are not tied any more.

    The plan sums the gradient of tied parameters once, for both.
    """
    plan = building.checked.plan
    sequence = plan.training and plan.training.sequence
    summed = {n for e in plan.parameters if e.grad_axes for n in expand_all(e.names)}
    summed |= {n for e in (sequence.gradients if sequence else ()) for n in expand_all(e.names)}
    if building.options.form and first in summed:
        raise RefusedCallError(
            f"unloading: {name} and {first} are tied, and are two tensors with the adapter's copy, whose "
            "gradients the plan does not know; load the model without training=True, or merge in one process "
            "with peft and convert the result"
        )


def _require_mergeable(wrapper: Any, names: Collection[str], *, packed: bool) -> None:
    """Try on a copy of each layer whether it computes the same with the adapters merged into its weight."""
    if packed:
        raise RefusedCallError("merging: the weights are packed; load the model with dequantize=True")
    _require_unsplit(wrapper, "merging")
    wrong = []
    kind = peft().tuners.tuners_utils.BaseTunerLayer
    for fqn, layer in unwrapped(wrapper).named_modules():
        if isinstance(layer, kind):
            try:
                wrong += [] if _stays_the_same(layer, list(names), loaded(wrapper).plan.tp) else [fqn]
            except (PlanError, RuntimeError, AttributeError, TypeError, ValueError, IndexError):
                wrong.append(fqn)
    if wrong:
        raise RefusedCallError(
            f"merging: {wrong[0]} does not compute the same with its part of the weight and of the adapter "
            f"merged ({len(wrong)} such); merge in one process with peft, and convert the result"
        )


@torch.no_grad()
def _stays_the_same(layer: Any, names: list[str], tp: int) -> bool:
    """Return whether a layer with adapters computes the same once they are merged."""
    base = layer.get_base_layer()
    if hasattr(layer, "parameter_name"):  # a stack of experts: compare shapes, since its layouts are pinned
        shape = getattr(base, layer.parameter_name).shape
        lora_names = [name for name in names if name in layer.lora_A]
        return all(layer.get_delta_weight(name).shape == shape for name in lora_names)
    trial = copy.deepcopy(layer)
    generator = torch.Generator().manual_seed(0)
    tokens = (1, 2 * tp)  # steps of sequence parallelism are for inputs [B, S, ...]
    if isinstance(base, nn.Embedding):
        x = torch.randint(base.weight.shape[0], tokens, generator=generator).to(base.weight.device)
    else:
        num_inputs = base.weight.shape[0 if getattr(layer, "fan_in_fan_out", False) else -1]
        x = torch.randn(*tokens, num_inputs, generator=generator).to(base.weight)
    with as_planned():
        before = type(trial).forward(trial, x)
        trial.merge(adapter_names=names)
        after = type(trial).forward(trial, x)
    largest = float(before.abs().max())
    return float((after - before).abs().max()) <= _TOLERANCES.get(base.weight.dtype, 1e-4) * largest


def _require_unsplit(model: nn.Module, what: str) -> None:
    if loaded(model).stage is not None:
        raise RefusedCallError(
            f"{what} does not know stages yet; reshard the model to one without, or do it before converting"
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise RefusedCallError(
            f"{what}: FSDP has sharded the parameters; do that before data_parallel, or save the adapter "
            "and load it"
        )
