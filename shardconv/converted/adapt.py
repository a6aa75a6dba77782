"""Plan an adapter of the peft library together with a converted model, which does not change."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardconv_runtime.adapters.adapter_names import PLAN_NAME
from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.errors import OptionError, OutputExistsError, SourceError
from shardconv_runtime.files import fingerprint, manifest
from shardconv_runtime.files.converted_files import parts_of
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.hub_options import is_url

from ..reporting.progress import Progress, Silent
from .derived_directory import require_trusted


@in_default_modes
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

    The adapter is put into the model on the meta device, and both are traced, solved and checked, including
    gradients. The shards of the model do not change. ``out_adapter`` contains the files of peft, so one
    process can load it too, and the plan.

    Args:
        out: a converted directory, or the directory of all stages; or its URL in an object store.
        adapter: directory that peft saved; or the config of a new adapter, as a ``peft.PeftConfig`` or a
            file in the format of ``adapter_config.json``.
        out_adapter: directory to create. It must not exist or must be empty.
        seed: seed of the initial weights of a new adapter. They are the weights that peft draws in one
            process after ``torch.manual_seed(seed)``.
        overwrite: replace ``out_adapter`` if it holds an adapter.
        trust_remote_code: import the Python code in ``out``; necessary if its plan was made with it.
        check: compare simulated ranks with the unsharded model.
        progress: where to report progress.

    Returns:
        The plan of the model with the adapter.

    Raises:
        SourceError: if the adapter is not for this model, or cannot be sharded with it.
        SolveError: if the model with the adapter cannot be planned with these shards.
        ShardconvError: if ``out`` is not a converted directory, or ``out_adapter`` is in use.
    """
    for place in (adapter, out_adapter):
        if isinstance(place, str | os.PathLike) and is_url(place):
            raise OptionError(f"{place} is in an object store; name a directory, the files are small")
    parts, target = parts_of(out), Path(out_adapter)
    directory = parts[0].directory
    manifest_of_base = manifest.read(directory)
    base = manifest.read_plan(directory, manifest_of_base)
    if base.stages is not None:
        if len(parts) == 1:
            raise SourceError(f"{out} is a stage of {base.stages.count}; name the directory of all of them")
        base = replace(base, stages=replace(base.stages, own=None))
    require_trusted(out, base, trust_remote_code=trust_remote_code)
    fingerprint.check_code(base)
    _require_free(target, overwrite=overwrite)

    # torch and transformers are imported once the arguments are known to be right.
    from .adaptation import BaseModel, adapt_model

    tell = (progress or Silent()).stage
    model = BaseModel(out, directory, base, manifest_of_base.source.name)
    return adapt_model(model, adapter, target, seed, check=check, tell=tell)


def _require_free(target: Path, *, overwrite: bool) -> None:
    """Raise ``CheckpointError`` if a directory has something that is not to be replaced."""
    if not target.exists():
        return
    if not target.is_dir():
        raise OutputExistsError(f"{target} is a file; name a directory to make")
    names = {path.name for path in target.iterdir()}
    if names and not (overwrite and PLAN_NAME in names):
        remedy = "name another, or pass --overwrite" if PLAN_NAME in names else "name a directory to make"
        raise OutputExistsError(f"{target} is not empty; {remedy}")
