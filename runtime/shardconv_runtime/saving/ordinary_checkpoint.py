"""``save_pretrained`` of a loaded model: an ordinary checkpoint of the full model, written by all ranks.

The ranks save a converted directory next to the checkpoint's, which one process merges, tensor by tensor, and
removes. So no process holds more than its part of the model.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..comm import agreement
from ..errors import CheckpointError, PlanError
from ..format.manifest import MANIFEST_NAME, PLAN_NAME
from ..format.small_files import entry_of, plain_config, stages_in
from ..loaded import loaded, remember, unwrapped
from ..parallel.model_config import CONFIG, GENERATION_CONFIG
from ..versions import converter_function
from .replicas import mesh_of, replicas_of
from .save import save

_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
"""Files of an earlier checkpoint, which would be loaded in place of the new ones, or with them."""


def save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Any = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = "50GB",
    **other: Any,
) -> None:
    """Write the full model as transformers' method of this name does; every process of the model calls it.

    ``save_directory`` may exist; files of other names stay, and ``config.json`` is written last. It needs
    room for the model twice, on a file system that all processes share.

    Args:
        model: returned by ``load``, see ``save``.
        save_directory: directory to make, or to write to.
        is_main_process: ignored, as all processes take part.
        state_dict: None, since the model's own values are saved.
        push_to_hub: False.
        max_shard_size: bytes of a file, or text as ``"5GB"``.
        other: options that are refused, unless they are False or None.

    Raises:
        PlanError: an option is not supported, or the model is not as it was loaded; on all processes.
        CheckpointError: a file cannot be written; on all processes.
        LaunchError: another process failed, or did not call it; or the converter, which merges, is missing.
    """
    found = loaded(model)
    target = Path(save_directory).expanduser().resolve()
    is_whole = found.plan.tp == 1 and found.plan.stages is None
    if is_whole and not found.packed and mesh_of(model) is None:
        if (unfit := _unfit(target)) is not None:
            raise unfit
        arguments = {"state_dict": state_dict, "push_to_hub": push_to_hub, "max_shard_size": max_shard_size}
        type(model).save_pretrained(model, save_directory, is_main_process, **arguments, **other)  # type: ignore[attr-defined]
        _note_new_files(model, target)
        return
    _check_options(model, state_dict=state_dict, push_to_hub=push_to_hub, **other)
    sharded = _beside(target, "sharded")
    holders = replicas_of(model)
    merge = holders.together(_merging)
    holders.agree(_unfit(target))
    save(model, sharded, overwrite=True)
    error = None
    if holders.is_leader:
        error = _merge(merge, model, sharded, target, max_shard_size)
    holders.agree(error, agreement.READ_TIMEOUT_S)
    _note_new_files(model, target)


def _note_new_files(model: nn.Module, target: Path) -> None:
    """If the model was loaded from the target, record the new files other than weights in its manifest."""
    found = loaded(model)
    if target == found.directory.resolve():
        files = tuple(entry_of(target, Path(entry.path)) for entry in found.manifest.files)
        remember(unwrapped(model), replace(found, manifest=replace(found.manifest, files=files)))


def _check_options(model: nn.Module, **options: Any) -> None:
    allowed = {"save_peft_format": (True,), "save_original_format": (True,), "token": (options.get("token"),)}
    for name, value in options.items():
        if value is None or value is False or any(value is one for one in allowed.get(name, ())):
            continue
        remedy = "shardconv merge" if name != "push_to_hub" else "the hf command uploads the directory"
        raise PlanError(
            f"save_pretrained({name}=...) is not supported for a {type(model).__name__} whose parameters are "
            f"sharded over ranks; leave it out ({remedy}), or use shardconv_runtime.save"
        )


def _unfit(target: Path) -> Exception | None:
    if target.exists() and not target.is_dir():
        return CheckpointError(f"{target} is a file; name a directory")
    if all((target / name).is_file() for name in (MANIFEST_NAME, PLAN_NAME)) or stages_in(target):
        return CheckpointError(
            f"{target} is a converted directory, from which load would take its shards as before; name "
            "another directory, or use shardconv_runtime.save"
        )
    return None


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}")


def _merging() -> Callable[..., object]:
    """Return the converter's ``merge``."""
    remedy = ", or call shardconv_runtime.save and run `shardconv merge` elsewhere"
    merge: Callable[..., object] = converter_function(
        "merge", "save_pretrained merges the shards of all ranks", remedy
    )
    return merge


def _merge(
    merge: Callable[..., object], model: nn.Module, sharded: Path, target: Path, max_shard_size: int | str
) -> Exception | None:
    """Merge the converted directory into ``target``, and remove it; return the error, if any."""
    merged, plan = _beside(target, "merged"), loaded(model).plan
    try:
        shutil.rmtree(merged, ignore_errors=True)
        trust = plan.model.trust_remote_code
        merge(sharded, merged, max_file_size=max_shard_size, trust_remote_code=trust)
        _write_configs(unwrapped(model), plan.model.class_name.rpartition(":")[2], merged)
        # Move all files of ``merged`` to ``target``: the config, without which nothing loads it, last.
        target.mkdir(parents=True, exist_ok=True)
        (target / CONFIG).unlink(missing_ok=True)
        for pattern in _WEIGHTS:
            for file in target.glob(pattern):
                file.unlink()
        files = sorted(file.relative_to(merged) for file in merged.rglob("*") if file.is_file())
        for file in sorted(files, key=lambda file: file.name == CONFIG):
            (target / file).parent.mkdir(exist_ok=True)
            (merged / file).replace(target / file)
    except OSError as failure:
        return CheckpointError(f"{target} cannot be written: {failure.strerror or failure}")
    except Exception as failure:
        return failure
    finally:
        for made in (sharded, merged):
            shutil.rmtree(made, ignore_errors=True)
    return None


def _write_configs(model: Any, class_name: str, directory: Path) -> None:
    """Write the configs of the model as they are now, with the dtype of the weights in ``directory``."""
    path = directory / CONFIG
    config = copy.deepcopy(model.config)
    config.dtype = json.loads(path.read_text(encoding="utf-8")).get("dtype", config.dtype)
    config.architectures = [class_name]
    config.save_pretrained(directory)
    path.write_text(plain_config(path.read_text(encoding="utf-8")), encoding="utf-8")
    if getattr(model, "generation_config", None) is not None:
        try:
            model.generation_config.save_pretrained(directory)
        except ValueError:  # settings that contradict each other, with which the model was loaded
            model.generation_config.to_json_file(directory / GENERATION_CONFIG)
