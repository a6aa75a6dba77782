"""``resize_token_embeddings`` of a loaded model: its vocabulary gets another size, in place.

transformers' own method runs twice: on the model on meta, which shows what changes, and on the parameters
that change, gathered from the ranks, which gives their values. The model is then built again with the plan of
the new size; all other parameters stay as they are.
"""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..adapters.attaching import Attached
from ..comm import agreement
from ..comm.mesh import Launch
from ..comm.rank_0 import share_rng_state
from ..default_modes import in_default_modes
from ..errors import InputsDifferError, RefusedCallError
from ..files.small_files import copy_small_files, entry_of, files_to_copy
from ..format import plan_json
from ..format.plan import Plan, parameter_plans
from ..format.resized_plan import BEFORE, Shapes, resized_plan
from ..loaded import Loaded, loaded, remember
from ..parallel.build import owner_of, retie, stored_tensors
from ..parallel.local_modules import local_view
from ..parallel.user_hooks import hook_of_user
from ..saving.gathering import gathered_on_rank_0, why_not_gathered
from ..training.checkpointing import FUNCTION
from .checked_source import CheckedSource, InMemory, LoadOptions
from .in_memory import CONFIG_FILES
from .transform import Stored

METHOD = "resize_token_embeddings"


def attach_resizing(model: nn.Module) -> None:
    """Make the method of transformers right for a model of which ranks have parts, in place."""
    if hasattr(model, METHOD):
        setattr(model, METHOD, partial(resize_vocabulary, model))  # a copy of the model has a copy of this


@in_default_modes
@agreement.named_call(METHOD)
@torch.no_grad()
def resize_vocabulary(
    model: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Resize the vocabulary of a loaded model, in place; every rank calls it, with transformers' arguments.

    Returns:
        The input embeddings.
    """
    source = loaded(model)
    building = source.building
    start: Launch = building.start
    arguments = agreement.exchange(building.all_ranks, (new_num_tokens, pad_to_multiple_of, mean_resizing))
    if len(set(arguments)) > 1:
        raise InputsDifferError(f"{METHOD} was called with other arguments on some ranks: {arguments}")
    if new_num_tokens is None and pad_to_multiple_of is None:
        return model.get_input_embeddings()  # type: ignore[no-any-return]
    _require_plain(model, source, building.options)

    def resize(part: Any, mean: bool) -> None:
        part.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing=mean)

    twin, change = agreement.together(start, lambda: _change(model, source, resize))
    if not change.shapes:
        return model.get_input_embeddings()  # type: ignore[no-any-return]
    tensors = dict(stored_tensors(model))
    plans = parameter_plans(source.plan)
    full = {name: gathered_on_rank_0(tensors[name].detach(), plans[name], source) for name in change.shapes}
    values = {name: tensors[name].new_empty(shape) for name, shape in change.shapes.items()}

    def compute() -> None:
        values.update(_resized_values(twin, full, lambda part: resize(part, mean_resizing)))

    _on_rank_0(start, compute)
    for value in values.values():
        if start.group is not None:
            dist.broadcast(value, group_src=0, group=start.group)

    checked = agreement.together(start, lambda: _source(source, change.plan, change.twin))

    def stored(attached: Attached | None) -> Generator[tuple[str, Tensor]]:
        entries = parameter_plans(change.plan)
        for name, entry in entries.items():
            tensor = tensors[name].detach()
            if name in values:
                part = local_view(entry, values[name], change.plan.mesh, source.rank)
                tensor = part.to(tensor.dtype).contiguous()
            yield name, tensor

    _build_again(model, source, checked, stored)
    return model.get_input_embeddings()  # type: ignore[no-any-return]


def _require_plain(model: nn.Module, source: Loaded, options: LoadOptions) -> None:
    """Check that the model is in a form that can be built again."""
    if options.compiling is not None:
        why = "the model is compiled; load it without compile=True"
    elif options.data_parallel is not None:
        why = "FSDP has sharded the parameters; resize before data_parallel"
    elif not (why := why_not_gathered(model, source)) and (hook := hook_of_user(model)):
        why = f"the module {hook} has a hook; register hooks afterwards"
    if why:
        raise RefusedCallError(f"{METHOD}: {why}, or {BEFORE}")


@dataclass(frozen=True)
class _Change:
    """What a new size of the vocabulary changes."""

    shapes: Shapes
    """New global shapes, by FQN in the plan."""
    plan: Plan
    twin: Any
    """The unsharded model on meta, with the new size."""


def _change(model: Any, source: Loaded, resize: Callable[[Any, bool], None]) -> tuple[Any, _Change]:
    """Return the unsharded model on meta as it was, and what changes in it."""
    twin: Any = source.building.unsharded_model()
    carry_settings(model, twin)
    before, names = _shapes(twin), dict(source.plan.tied)
    other = copy.deepcopy(twin)
    resize(other, False)
    after = _shapes(other)
    if before.keys() != after.keys():
        raise RefusedCallError(f"{METHOD}: parameters of the model would come or go; {BEFORE}")
    shapes = {n: shape for n, shape in after.items() if shape != before[n] and n not in names}
    if not shapes:
        return twin, _Change({}, source.plan, twin)
    num_parameters = sum(p.numel() for p in other.parameters())
    owners = {id(owner_of(twin, name)[0]) for name in shapes}
    modules = twin.named_modules(remove_duplicate=False)
    owner_names = {name for name, module in modules if id(module) in owners}
    owner_names |= {alias.rpartition(".")[0] for alias, name in source.plan.tied if name in shapes}
    plan = resized_plan(source.plan, shapes, owner_names, num_parameters)
    return twin, _Change(
        shapes, plan_json.loads(plan_json.dumps(plan)), _with_sizes(twin, other, source.plan)
    )


def _with_sizes(twin: nn.Module, other: nn.Module, plan: Plan) -> nn.Module:
    """Return a model on meta with the sizes of another one.

    transformers may put one embedding in place of several that share a weight. The plan is for the modules as
    they were, so these get the new tensors, numbers and configs.
    """
    resized, like = copy.deepcopy(twin), dict(other.named_modules(remove_duplicate=False))
    for name, module in resized.named_modules():
        for key, value in vars(like[name]).items():
            if isinstance(value, int) or key == "config":
                vars(module)[key] = value
    tensors = dict(stored_tensors(other))
    for name, tensor in stored_tensors(resized):
        if tensor.shape != tensors[name].shape:
            owner, attribute = owner_of(resized, name)
            table = owner._parameters if attribute in owner._parameters else owner._buffers
            table[attribute] = tensors[name]  # type: ignore[assignment]
    retie(resized, plan)
    return resized


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in stored_tensors(model)}


def carry_settings(model: Any, twin: Any) -> None:
    """Give the model on meta the settings that a user may have changed since loading."""
    for name, value in vars(model.config).items():
        if isinstance(value, bool | int | float | str | None) and getattr(twin.config, name, value) != value:
            setattr(twin.config, name, value)
    for kind in ("attn", "experts"):
        chosen = getattr(model.config, f"_{kind}_implementation", None)
        if chosen is not None and chosen != getattr(twin.config, f"_{kind}_implementation", None):
            getattr(twin, f"set_{kind}_implementation")(chosen)
    if getattr(model, "generation_config", None) is not None:
        twin.generation_config = model.generation_config


def _on_rank_0(start: Launch, compute: Callable[[], None]) -> None:
    """Call a function on rank 0; ranks with the same state of random numbers have the same one afterwards."""
    is_cuda = start.device.type == "cuda"
    before = [torch.get_rng_state(), *([torch.cuda.get_rng_state(start.device)] if is_cuda else [])]
    states = agreement.exchange(start, [state.numpy().tobytes() for state in before])
    agreement.together(start, compute if start.rank == 0 else lambda: None, agreement.DOWNLOAD_TIMEOUT_S)
    has_other = states[start.rank if start.group is not None else 0] != states[0]
    devices = [start.device] if is_cuda else []
    with torch.random.fork_rng(devices, enabled=has_other):  # such a rank keeps its state
        share_rng_state(start)


def _resized_values(
    twin: nn.Module, full: Mapping[str, Tensor], resize: Callable[[Any], None]
) -> dict[str, Tensor]:
    """Return the resized parameters, as transformers computes them from their old values."""
    shell = copy.deepcopy(twin)
    for name, tensor in full.items():
        owner, attribute = owner_of(shell, name)
        if attribute in owner._parameters:
            owner._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[attribute] = tensor
    shell.tie_weights()  # type: ignore[operator]  # a method of transformers' models
    resize(shell)
    tensors = dict(stored_tensors(shell))
    return {name: tensors[name].detach().contiguous() for name in full}


def _source(source: Loaded, plan: Plan, twin: Any) -> CheckedSource:
    """Return the resized model as a source, with the files of the old one and the new config."""
    directory = Path(tempfile.mkdtemp(prefix=CONFIG_FILES))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    copy_small_files(source.directory, source.manifest, directory)
    twin.config.save_pretrained(directory)
    entries = tuple(entry_of(directory, path) for path in files_to_copy(directory, code=True))
    digest = plan_json.sha256(plan_json.dumps(plan))
    described = replace(source.manifest, plan_sha256=digest, files=entries)
    return CheckedSource(directory, described, plan, in_memory=InMemory(twin, {}))


def _build_again(model: Any, source: Loaded, checked: CheckedSource, stored: Stored) -> None:
    """Make a model the rank's model of another source; it stays the same object."""
    assert checked.in_memory is not None
    before, training = dict(vars(model)), {n: m.training for n, m in model.named_modules()}
    trained = {name: tensor.requires_grad for name, tensor in stored_tensors(model)}
    checkpointing = {n: _checkpointing(m) for n, m in model.named_modules() if _checkpointing(m)}
    takes_gradients = hasattr(model, "_require_grads_hook") or bool(
        getattr(model, "_require_grads_hooks", ())
    )
    vars(model).clear()
    vars(model).update(vars(copy.deepcopy(checked.in_memory.twin)))
    own_source = replace(checked, in_memory=replace(checked.in_memory, twin=model, is_own=True))
    try:
        replace(source.building, checked=own_source).model(stored)
    except BaseException:
        vars(model).clear()
        vars(model).update(before)
        raise
    # Later operations build the model once more, from a form of it that is on meta.
    remember(model, replace(loaded(model), building=replace(source.building, checked=checked)))
    for name, module in model.named_modules():
        module.training = training.get(name, module.training)
        vars(module).update(checkpointing.get(name, {}))
    for name, tensor in stored_tensors(model):
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(trained[name])
    if takes_gradients:
        model.enable_input_require_grads()


def _checkpointing(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that transformers sets on modules for activation checkpointing."""
    names = ("gradient_checkpointing", FUNCTION)
    return {name: vars(module)[name] for name in names if name in vars(module)}
