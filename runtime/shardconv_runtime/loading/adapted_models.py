"""What a user does to a loaded model with adapters: new adapters, merging, saving."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..adapters.adapter_files import PlannedAdapter, require_name
from ..adapters.adapter_names import DEFAULT, is_of_adapter
from ..adapters.adapter_set import AdapterSet
from ..adapters.attaching import Adapter, Attached
from ..comm import agreement
from ..errors import PlanError
from ..format import plan_json
from ..format.names import expand_all
from ..format.plan import ParameterPlan, parameter_plans
from ..format.slices import coordinates
from ..loaded import Loaded, loaded, unwrapped
from ..parallel.default_modes import in_default_modes
from ..saving.saved_adapters import save_adapters
from ..saving.stored_model import named_tensors
from ..versions import converter_function
from .building import ModelBuilder, Stored, unsharded

_REFUSED = {
    "add_adapter": "call shardconv_runtime.add_adapter(model, config), which returns a model with both",
    "load_adapter": 'run `shardconv adapt`, and pass it too: load(..., adapter={"a": DIR, "b": DIR})',
    "add_weighted_adapter": "combine the adapters in one process with peft, and run `shardconv adapt`",
    "push_to_hub": "each rank has a part; call save_pretrained(DIR) on all ranks, then `hf upload`",
}
"""Methods of ``PeftModel`` that would take this rank's part for the model -> the remedy."""


_TOLERANCES = {torch.float64: 1e-9, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Of a layer's outputs with merged adapters, relative to the largest one."""


@in_default_modes
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
    known = {} if building.checked.adapters is None else building.checked.adapters.adapters
    _require_unsplit(model, "add_adapter")
    require_name(name)
    if name in known:
        raise PlanError(f"the model has an adapter {name!r}; give another name")
    adapter = Adapter(config, None, seed)
    text = _planned_by_rank_0(building, adapter)
    planned = PlannedAdapter(adapter, plan_json.loads(text), plan_json.sha256(text))
    build = partial(unsharded, building.checked, building.wanted)
    adapters = AdapterSet.of({**known, name: planned}, building.checked.plan, build)
    stored = None if loaded(model).packed else _with_present(model, adapters, building)
    return guard_adapters(building.with_adapters(adapters).model(stored))


def _planned_by_rank_0(building: ModelBuilder, adapter: Adapter) -> str:
    """The plan of the model with an adapter, as JSON."""

    def plan() -> str:
        if building.start.rank:
            return ""
        planned = converter_function("plan_adapter", "a new adapter needs a plan with its layers")
        return plan_json.dumps(planned(building.checked.directory, building.checked.plan, adapter))

    text: str = agreement.together(building.start, plan, agreement.READ_TIMEOUT_S)
    return agreement.exchange(building.start, text)[0]


def _with_present(model: nn.Module, adapters: AdapterSet, building: ModelBuilder) -> Stored:
    """The tensors of a model with more adapters: those of the present one are shared."""
    present, base = named_tensors(model), _base_tensors(model)
    known = building.checked.adapters.adapters if building.checked.adapters is not None else {}

    def stored(attached: Attached | None) -> Generator[tuple[str, Tensor]]:
        assert attached is not None, "the model has adapters"
        tensors = adapters.tensors(lambda rows: _each(base), attached, building.start, {})
        for name, tensor in tensors:
            is_present = any(is_of_adapter(name, each) for each in known)
            yield name, present[name].detach() if is_present else tensor

    return stored


def _each(tensors: Mapping[str, Tensor]) -> Generator[tuple[str, Tensor]]:
    yield from tensors.items()


def _base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's local tensors by their names without adapters, laid out as without; every rank calls it."""
    source = loaded(model)
    building: ModelBuilder = source.building
    before, entries = parameter_plans(building.checked.plan), parameter_plans(source.plan)
    names = source.attached.base_names if source.attached is not None else {}
    found = {}
    for name, tensor in named_tensors(model).items():
        old = names.get(name, name)
        if old in before and name in entries and (source.attached is None or name in names):
            is_term = entries[name].partial != before[old].partial
            found[old] = _summed(tensor.detach(), entries[name], source) if is_term else tensor.detach()
    return found


def _summed(tensor: Tensor, entry: ParameterPlan, source: Loaded) -> Tensor:
    """A term of a sum over ranks, as it is without adapters: the same on all ranks."""
    parts = agreement.exchange(source.launch, tensor.cpu())
    mesh, own = source.plan.mesh, coordinates(source.plan.mesh, source.launch.rank)
    wanted = tuple(0 if axis in entry.partial else own[axis] for axis in range(len(mesh)))
    holder = next(rank for rank in range(len(parts)) if coordinates(mesh, rank) == wanted)
    return parts[holder].to(tensor.device)


def guard_adapters(wrapper: Any) -> Any:
    """Have the methods of a ``PeftModel`` do what they say on sharded parameters, or refuse; in place.

    Args:
        wrapper: of a loaded model.
    """
    packed = loaded(wrapper).packed
    for name, remedy in _REFUSED.items():
        setattr(wrapper, name, partial(_refuse, name, remedy))
    wrapper.save_pretrained = MethodType(_save_pretrained, wrapper)
    for module in (wrapper, wrapper.base_model):
        module.merge_and_unload = partial(_merge_and_unload, wrapper, packed)
        module.unload = partial(_unload, wrapper)
        module.merge_adapter = partial(_merge_adapter, wrapper, packed)
    return wrapper


def _refuse(name: str, remedy: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise PlanError(f"{name} was called on a model whose parameters are sharded over ranks: {remedy}")


def _save_pretrained(
    wrapper: Any,
    save_directory: str | os.PathLike[str],
    safe_serialization: bool = True,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: bool | str = "auto",
    is_main_process: bool = True,
    **options: Any,
) -> None:
    """Write the adapters as peft does; every rank calls it.

    Raises:
        PlanError: another argument than these was given, or tensors of the model were asked for.
    """
    if options or not safe_serialization or save_embedding_layers is True:
        given = ", ".join(options) or (
            "safe_serialization" if not safe_serialization else "save_embedding_layers"
        )
        raise PlanError(
            f"save_pretrained: {given} is not supported for adapters of a sharded model; leave it out"
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
    """The model without adapters, with their products added to its weights; every rank calls it."""
    _merge_adapter(wrapper, packed, adapter_names, safe_merge)
    model = _rebuilt(wrapper)
    is_untied = loaded(model).plan.tied != loaded(wrapper).building.checked.plan.tied
    if is_untied and getattr(model.config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = False  # as peft does: what is saved now has a head of its own
    return model


def _unload(wrapper: Any) -> Any:
    """The model without adapters; every rank calls it."""
    if any(layer.merged for layer in _layers(wrapper)):
        raise PlanError("unload: adapters are merged into the weights; call unmerge_adapter() first")
    return _rebuilt(wrapper)


def _rebuilt(wrapper: Any) -> Any:
    """The model without adapters, but for the active ones' copies of modules, which stay, as peft has it."""
    source = loaded(wrapper)
    building: ModelBuilder = source.building
    _require_unsplit(wrapper, "unloading")
    copied = _active_copies(source.attached, wrapper.active_adapters)
    if source.packed:
        if copied:
            raise PlanError(
                f"unloading: the adapter has a copy of {min(copied.values())}, which would take its place, "
                "and the weights of the model stay packed; load it with dequantize=True"
            )
        return building.with_adapters(None).model()
    present, base = named_tensors(wrapper), _base_tensors(wrapper)
    plan = building.checked.plan
    entries = parameter_plans(plan)
    values = {alias: base[first] for alias, first in plan.tied} | base
    values |= {old: present[name] for name, old in copied.items()}
    # What was one tensor is several where a copy of one of the tied modules stays. They are laid out alike.
    together: dict[str, list[str]] = {name: [name] for name in entries}
    for alias, first in plan.tied:
        together[first].append(alias)
    parameters, tied = list(plan.parameters), []
    for first, names in together.items():
        own: dict[int, str] = {}
        for name in names:
            if (known := own.setdefault(id(values[name]), name)) != name:
                tied.append((name, known))
            elif name != first:
                _require_separable(building, first, name)
                parameters.append(replace(entries[first], names=(name,)))
    if tied != list(plan.tied):
        plan = replace(plan, parameters=tuple(parameters), tied=tuple(tied))
        building = replace(building, checked=replace(building.checked, plan=plan))
    tensors = {name: values[name].detach() for name in parameter_plans(plan)}
    return building.with_adapters(None).model(lambda attached: _each(tensors))


def _active_copies(attached: Attached, active: Collection[str]) -> dict[str, str]:
    """FQN of a tensor in an active adapter's copy of a module -> FQN, without adapters, of the one copied."""
    found: dict[str, str] = {}
    for module, original in attached.copied_modules().items():
        if any(is_of_adapter(module, adapter) for adapter in active):
            prefix = attached.base_names[original]
            found |= {
                n: prefix + n.removeprefix(module) for n in attached.copies if n.startswith(f"{module}.")
            }
    return found


def _require_separable(building: ModelBuilder, first: str, name: str) -> None:
    """Raises ``PlanError`` if the plan sums a gradient of tied parameters, which it does for both at once."""
    plan = building.checked.plan
    sequence = plan.training and plan.training.sequence
    summed = {n for e in plan.parameters if e.grad_axes for n in expand_all(e.names)}
    summed |= {n for e in (sequence.gradients if sequence else ()) for n in expand_all(e.names)}
    if building.wanted.form and first in summed:
        raise PlanError(
            f"unloading: {name} and {first} are tied, and are two tensors with the adapter's copy, whose "
            "gradients the plan does not know; load the model without training=True, or merge in one process "
            "with peft and convert the result"
        )


def _require_mergeable(wrapper: Any, names: Collection[str], *, packed: bool) -> None:
    """Try on a copy of each layer whether it computes the same with the adapters merged into its weight.

    Raises:
        PlanError: it does not on this rank's part, or it cannot be tried.
    """
    if packed:
        raise PlanError("merging: the weights are packed; load the model with dequantize=True")
    _require_unsplit(wrapper, "merging")
    wrong = []
    for fqn, layer in unwrapped(wrapper).named_modules():
        if isinstance(layer, _layer_class()):
            try:
                wrong += [] if _stays_the_same(layer, list(names)) else [fqn]
            except (PlanError, RuntimeError, AttributeError, TypeError, ValueError):
                wrong.append(fqn)
    if wrong:
        raise PlanError(
            f"merging: {wrong[0]} does not compute the same with its part of the weight and of the adapter "
            f"merged ({len(wrong)} such); merge in one process with peft, and convert the result"
        )


@torch.no_grad()
def _stays_the_same(layer: Any, names: list[str]) -> bool:
    """Whether a layer of adapters computes the same once they are merged."""
    base = layer.get_base_layer()
    if hasattr(layer, "parameter_name"):  # of a stack of experts: the shapes, whose layouts are pinned
        shape = getattr(base, layer.parameter_name).shape
        known = [name for name in names if name in layer.lora_A]
        return all(layer.get_delta_weight(name).shape == shape for name in known)
    trial = copy.deepcopy(layer)
    num_inputs = base.weight.shape[0 if getattr(layer, "fan_in_fan_out", False) else 1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, num_inputs, generator=generator).to(base.weight)
    before = type(trial).forward(trial, x)
    trial.merge(adapter_names=names)
    after = type(trial).forward(trial, x)
    largest = float(before.abs().max())
    return float((after - before).abs().max()) <= _TOLERANCES.get(base.weight.dtype, 1e-4) * largest


def _layer_class() -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return BaseTunerLayer


def _layers(wrapper: Any) -> Iterator[Any]:
    return (module for module in wrapper.modules() if isinstance(module, _layer_class()))


def _require_unsplit(model: nn.Module, what: str) -> None:
    if loaded(model).stage is not None:
        raise PlanError(
            f"{what} does not know stages yet; reshard the model to one without, or do it before converting"
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise PlanError(
            f"{what}: FSDP has sharded the parameters; do that before data_parallel, or save the adapter "
            "and load it"
        )
