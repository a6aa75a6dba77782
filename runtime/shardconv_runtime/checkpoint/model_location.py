"""From the user's path or Hub id to a local directory, downloading it if needed."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.hf_api import RepoFile

from ..errors import MissingModelError, SourceError, UnsupportedError
from ..files.manifest import MANIFEST_NAME
from ..files.model_config import CONFIG
from ..files.object_stores import object_directory
from ..files.small_files import EXAMPLE_NAME, choose_files
from ..hub_options import Hub, is_url
from ..storage.hub_errors import explain, hub_failure
from ..storage.hub_time_limits import bounded
from ..storage.remote_files import RemoteFile, remote_files
from .model_directory import (
    LAYOUTS,
    index_of,
    model_directory,
    refuse_other_kinds,
    wanted_weights,
)

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.spm", "tokenizer*", EXAMPLE_NAME)
"""Files of a model repository that are asked for if it cannot be listed, as the client may have them."""


@dataclass(frozen=True, slots=True)
class Located:
    """The location of a model."""

    directory: Path
    """Local, with at least the config."""
    commit: str | None = None
    """The commit of a Hub repository."""
    remote: tuple[RemoteFile, ...] = ()
    """The weight files that stay on the Hub or in an object store."""
    sizes: Mapping[str, int] | None = None
    """The files of the repository -> bytes; None for a local directory, or if it cannot be listed."""


def locate(
    model: str | os.PathLike[str], hub: Hub, *, code: bool, need_weights: bool, stream: bool = False
) -> Located:
    """Return the directory of the model and, for a Hub repository, its commit."""
    if is_url(model):
        return _in_store(os.fspath(model), code=code, need_weights=need_weights)
    if (local := model_directory(model, need_weights=need_weights)) is not None:
        return Located(local)
    text = os.fspath(model)
    sizes = _listed(text, hub)
    if sizes is None:
        small = SMALL_FILES + (("*.py",) if code else ())
    else:
        indices = [name for name in sizes if name.endswith(".index.json")]
        chosen = choose_files(sizes, code=code).copied
        small = tuple(map(glob.escape, {CONFIG, *chosen, *indices}))
    directory = _download(text, hub, small)
    commit = directory.name
    if not need_weights:
        return Located(directory, commit, sizes=sizes)
    names = wanted_weights(directory)
    if stream and not hub.local_files_only and (remote := _remote(text, commit, directory, names, hub)):
        return Located(directory, commit, remote, sizes)
    _download(text, replace(hub, revision=commit), names)
    return Located(directory, commit, sizes=sizes)


def _in_store(url: str, *, code: bool, need_weights: bool) -> Located:
    """Return a model in an object store: its small files are copied to the cache, its weights stay there."""
    there = object_directory(url)
    sizes = {name: each.num_bytes for name, each in there.objects.items()}
    if CONFIG not in sizes:
        raise MissingModelError(f"no config.json in {url}; name the directory of a transformers model")
    if need_weights and MANIFEST_NAME in sizes:
        raise SourceError(f"{url} is a converted directory; download it to reshard or export it")
    single, index = LAYOUTS[0]
    indices = {index} & sizes.keys() - ({index} if single in sizes else set())
    directory = there.local_copy({CONFIG, *choose_files(sizes, code=code).copied, *indices})
    refuse_other_kinds(directory, need_weights=False)
    if not need_weights:
        return Located(directory, sizes=sizes)
    weight_index = index_of(directory)
    names = (single,) if weight_index is None else weight_index.files
    if missing := [name for name in names if name not in sizes]:
        if missing == [single]:
            raise UnsupportedError(
                f"{url} has no {single} and no {index}; save the model in that format there"
            )
        raise MissingModelError(f"{url} lacks {missing[0]}, which {index} names; copy the model there again")
    return Located(directory, None, tuple(there.objects[name] for name in names), sizes)


def _listed(repo_id: str, hub: Hub) -> dict[str, int] | None:
    """Return the files of a repository -> bytes; None if it cannot be listed, as without a network.

    The client then reads its cache, or names the problem.
    """
    if hub.local_files_only:
        return None
    try:
        with bounded():
            entries = HfApi(token=hub.token).list_repo_tree(repo_id, recursive=True, revision=hub.revision)
            return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}
    except Exception:  # including errors of the HTTP library
        return None


def _remote(
    repo_id: str, commit: str, directory: Path, names: tuple[str, ...], hub: Hub
) -> tuple[RemoteFile, ...]:
    """Return the weight files on the Hub; none if all are in the cache, or they are of another format."""
    chosen = [name for name in names if name.endswith(".safetensors")]
    index = [name for single, name in LAYOUTS if (directory / name).is_file()]
    if index and len(chosen) > 1:
        chosen.remove(LAYOUTS[0][0])  # the single file next to the files of an index
    if not chosen or all((directory / name).is_file() for name in chosen):
        return ()
    weight_files = remote_files(repo_id, commit, chosen, hub, must_exist=bool(index))
    return weight_files if len(weight_files) == len(chosen) else ()


def _download(repo_id: str, hub: Hub, patterns: tuple[str, ...]) -> Path:
    try:
        with bounded():
            snapshot = snapshot_download(
                repo_id,
                revision=hub.revision,
                cache_dir=None if hub.cache_dir is None else Path(hub.cache_dir),
                local_files_only=hub.local_files_only,
                token=hub.token,
                allow_patterns=list(patterns),
            )
        return Path(snapshot)
    except Exception as error:  # including errors of the HTTP library
        raise hub_failure(explain(repo_id, hub.revision, error), error) from error
