"""An adapter of the peft library for a converted directory: planned with the model, which stays as it is."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardconv_runtime.adapters.adapter_names import (
    CONFIG_NAME,
    DEFAULT,
    PLAN_NAME,
    WEIGHTS_NAME,
    naming_errors,
)
from shardconv_runtime.errors import CheckpointError, SolveError, SourceError
from shardconv_runtime.format import fingerprint, manifest
from shardconv_runtime.format import plan_json as codec
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.format.small_files import stage_directories

from ..arguments import SolveOptions
from ..reporting.progress import Progress, Silent
from .derived import has_sequence_form
from .shards import read

if TYPE_CHECKING:
    from shardconv_runtime.adapters.attaching import Adapter
    from shardconv_runtime.checkpoint.resolve import ModelSpec
    from torch import Tensor

_OUTERMOST = "base_model."
"""What the names of tensors begin with in an adapter that peft saved."""

COPIED = (CONFIG_NAME, WEIGHTS_NAME, "README.md")


def adapt(
    out: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | Any,
    out_adapter: str | os.PathLike[str],
    *,
    seed: int = 0,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    check: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Plan a model with an adapter, for ``load(out, adapter=out_adapter)``.

    The adapter is put into the model on the meta device, and both are traced, solved and proven, forward and
    gradients. The shards of the model stay as they are. ``out_adapter`` has what peft saves, so that it loads
    in one process too, and the plan beside it.

    Args:
        out: a converted directory, or one of stages.
        adapter: a directory that peft saved; or the config of a new adapter, as a ``peft.PeftConfig`` or a
            file that is like ``adapter_config.json``.
        out_adapter: directory to make; it must not exist, or be empty.
        seed: of the initial weights of a new adapter, which are those that peft draws in one process after
            ``torch.manual_seed(seed)``.
        overwrite: replace ``out_adapter`` if it is one of an adapter, and nothing else.
        trust_remote_code: import the Python code in ``out``; needed where its plan was made so.
        check: compare simulated ranks with the unsharded model.
        progress: where to report to.

    Returns:
        The plan of the model with the adapter.

    Raises:
        SourceError: the adapter is not one for this model, or cannot be sharded with it.
        SolveError: the model with the adapter cannot be planned with these shards.
        ShardconvError: ``out`` is not a converted directory, or ``out_adapter`` is in use.
    """
    root, target = Path(out), Path(out_adapter)
    directory = next(iter(stage_directories(root)), root)
    found = manifest.read(directory)
    base = manifest.read_plan(directory, found)
    if base.stages is not None:
        if directory == root:
            raise SourceError(f"{out} is a stage of {base.stages.count}; name the directory of all of them")
        base = replace(base, stages=replace(base.stages, own=None))
    if base.model.trust_remote_code and not trust_remote_code:
        raise SourceError(f"{out} runs custom code; read its *.py files, then pass --trust-remote-code")
    fingerprint.check_code(base)
    _require_free(target, overwrite=overwrite)

    from shardconv_runtime.adapters.attaching import Adapter, read_config

    is_path = isinstance(adapter, str | os.PathLike)
    is_saved = is_path and Path(adapter).is_dir()
    config = read_config(adapter) if is_path else adapter
    tell = (progress or Silent()).stage
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as made:
        scratch = Path(made) / target.name
        scratch.mkdir()
        remarks = _copy(Path(adapter), scratch, config) if is_saved else ()
        if is_saved:
            given = Adapter(config, os.fspath(scratch), seed, os.fspath(adapter))
        else:
            given = Adapter(config, None, seed)
        plan = planned(directory, base, given, check=check, tell=tell)
        plan = replace(plan, notes=(*plan.notes, *remarks))
        if not is_saved:
            tell("initializing the adapter")
            _initialize(root, directory, base, given, scratch, found.source.name)
        codec.write(plan, scratch / PLAN_NAME)
        if target.exists():
            target.rename(Path(made) / "replaced")
        scratch.rename(target)
    return plan


def planned(
    directory: Path,
    base: Plan,
    adapter: Adapter,
    *,
    check: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Plan:
    """The plan of a converted model with an adapter; errors are those of ``adapt``.

    Args:
        directory: with the config of the model.
        base: its plan.
        adapter: saved, or new.
        check: compare simulated ranks with the unsharded model.
        tell: is called with the name of each stage.
    """
    from ..pipeline.adapted_plan import Adaptation
    from ..pipeline.stages import solve_plan

    stages = () if base.stages is None else base.stages.layers
    text = ",".join(f"{first}-{last}" for first, last in stages)
    options = SolveOptions(
        base.tp, base.experts, has_sequence_form(base), check, pp=max(1, len(stages)), stages=text
    )
    spec = _spec(directory, base)
    adaptation = Adaptation(base, adapter)
    try:
        plan = solve_plan(spec, options, progress=tell, adaptation=adaptation)
    except SolveError:
        if not options.sequence_parallel:
            raise
        plan = solve_plan(
            spec, replace(options, sequence_parallel=False), progress=tell, adaptation=adaptation
        )
        why = plan.inference_only or "with the adapter, activations cannot be sharded over the sequence"
        plan = replace(plan, notes=(*plan.notes, f"no form for sequence parallelism: {why}"))
    if plan.stages is not None and base.stages is not None:
        plan = replace(plan, stages=replace(plan.stages, memory=base.stages.memory))
    return replace(plan, fused=(), memory=base.memory)


def _spec(directory: Path, base: Plan) -> ModelSpec:
    from shardconv_runtime.checkpoint.resolve import resolve

    trust = base.model.trust_remote_code
    spec = resolve(directory, trust_remote_code=trust, dtype=base.model.dtype, need_weights=False)
    return replace(spec, tied=dict(base.tied))


def _require_free(target: Path, *, overwrite: bool) -> None:
    """Raises ``CheckpointError`` if a directory has something that is not to be replaced."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file; name a directory to make")
    names = {path.name for path in target.iterdir()}
    if names and not (overwrite and PLAN_NAME in names):
        remedy = "name another, or pass --overwrite" if PLAN_NAME in names else "name a directory to make"
        raise CheckpointError(f"{target} is not empty; {remedy}")


def _copy(source: Path, target: Path, config: Any) -> tuple[str, ...]:
    """The files of a saved adapter, in the form that peft saves: safetensors, with the names that peft gives.

    Returns:
        Remarks for the user.
    """
    from peft.utils import load_peft_weights
    from safetensors.torch import save_file

    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    with naming_errors(os.fspath(source)):
        tensors = load_peft_weights(os.fspath(source), device="cpu")
    names = _names_of_peft(tensors, config)
    changed = next(((old, new) for old, new in names.items() if old != new), None)
    if changed is not None or not (target / WEIGHTS_NAME).is_file():
        own = {names[name]: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(own, target / WEIGHTS_NAME, metadata={"format": "pt"})
    if changed is None:
        return ()
    return (f"the adapter's names are read as peft would have saved them: {changed[0]} is {changed[1]}",)


def _names_of_peft(names: Collection[str], config: Any) -> Mapping[str, str]:
    """Names of an adapter's tensors, without the parts of wrappers and without the adapter's own name.

    Trainers that save a state dict of their own leave them in, and peft then takes the adapter for one
    that is new, with a warning.
    """
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
    from shardconv_runtime.checkpoint.stored_leaves import without_wrappers, wrapped_name

    found: Mapping[str, str] = {name: name for name in names}
    if wrapped_name(names) is not None or any(f".{_OUTERMOST}" in name for name in names):
        candidates = without_wrappers(names)
        found = next((c for c in candidates if all(n.startswith(_OUTERMOST) for n in c.values())), found)
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type)
    if not prefix:
        return found
    own_name = re.compile(rf"(\.{re.escape(prefix)}[^.]*)\.{DEFAULT}(?=\.|$)")
    return {old: own_name.sub(r"\1", new) for old, new in found.items()}


def _initialize(
    root: Path, directory: Path, base: Plan, adapter: Adapter, target: Path, base_name: str
) -> None:
    """Write the files of a new adapter of a converted model, whose config is in a directory of its root."""
    import torch
    from shardconv_runtime.adapters.adapter_files import write_adapter
    from shardconv_runtime.adapters.attaching import attach
    from shardconv_runtime.parallel.meta_model import build_model

    spec = _spec(directory, base)
    model = build_model(spec.model_class, spec.config, getattr(torch, spec.dtype), spec.tied)
    attached = attach(model, {DEFAULT: adapter}, trainable=True)
    tensors = {**_copies(root, attached.copies), **attached.tensors}
    write_adapter(attached.wrapper, DEFAULT, tensors, target, base_name)


def _copies(directory: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Global tensors of the converted directory under the names that copies of them have."""
    if not names:
        return {}
    import torch
    from shardconv_runtime.tensors.copying import read_into

    converted = read(directory)
    entries = parameter_plans(converted.plan)
    out = {}
    for name, old in names.items():
        lazy = converted.weight(old, entries[old])
        out[name] = torch.empty(lazy.shape, dtype=getattr(torch, lazy.dtype))
        read_into([lazy], [out[name]])
    return out
