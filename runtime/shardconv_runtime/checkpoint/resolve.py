"""From the user's model to a ``ModelSpec``; models that cannot be converted are refused early."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.hf_api import RepoFile
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..errors import SourceError, brief
from ..files.hub_errors import bounded, explain
from ..files.model_config import CONFIG
from ..files.remote_files import RemoteFile, remote_files
from ..files.small_files import EXAMPLE_NAME, choose_files, sizes_in
from ..format.header import dtype_name
from ..hub_options import Hub
from .model_directory import (
    LAYOUTS,
    Index,
    index_of,
    model_directory,
    read_config_json,
    refuse_other_kinds,
    wanted_weights,
    weight_files,
)
from .quantized import quantization_of, require_supported, without_quantization
from .stored_leaves import WeightFile, stored_dtype, validate

# From ``config.json`` to a config object and the class to build.
#
# There is no table of architectures. The config names the class (``architectures``), which is looked up in
# transformers' public namespace or in the repository's own code, or is found in transformers' auto mappings.


FALLBACKS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_MAPPING",
)
"""The mappings for configs that do not name a usable class, in order."""


def read_config(directory: Path, *, trust_remote_code: bool) -> Any:
    """Return the config object of the model in ``directory``."""
    raw = read_config_json(directory)
    _require_known_type(raw, directory, trust_remote_code)
    try:
        return transformers.AutoConfig.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # config classes raise arbitrary errors on unexpected values
        raise SourceError(
            f"{directory / 'config.json'} is not a valid config: {brief(error)}; correct that field"
        ) from error


def _require_known_type(raw: dict[str, Any], directory: Path, trust_remote_code: bool) -> None:
    path = directory / "config.json"
    has_code = isinstance(raw.get("auto_map"), dict) and "AutoConfig" in raw["auto_map"]
    model_type = raw.get("model_type")
    if has_code and trust_remote_code:
        return
    if isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING:
        return
    version = f"transformers {transformers.__version__}"
    if has_code:
        raise SourceError(
            f"{path}: model type {model_type!r} is defined by the repository's own code; "
            "read that code, then pass --trust-remote-code"
        )
    if model_type is None:
        raise SourceError(f"{path} lacks model_type, by which {version} finds the class; add the field")
    raise SourceError(
        f"{path}: unknown architecture {model_type!r} in {version}; install a transformers that has it"
    )


def model_class_of(config: Any, directory: Path | None, *, trust_remote_code: bool) -> type:
    """Return the class to build for ``config``."""
    if trust_remote_code and directory is not None and getattr(config, "auto_map", None):
        remote = _class_from_repository(config, directory)
        if remote is not None:
            return remote
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        if _fits(cls, config):
            assert isinstance(cls, type)
            return cls
    for mapping_name in FALLBACKS:
        mapping = getattr(transformers, mapping_name, {})
        if type(config) in mapping:
            found = mapping[type(config)]
            cls = found[0] if isinstance(found, tuple) else found
            if _is_model(cls):  # not _fits: some types use the class of another one
                assert isinstance(cls, type)
                return cls
    raise SourceError(
        f"transformers {transformers.__version__} has no model class for {type(config).__name__} "
        f"(architectures: {getattr(config, 'architectures', None)}); name one in config.json"
    )


def _class_from_repository(config: Any, directory: Path) -> type | None:
    """Return the model class among ``auto_map``'s, the one that ``architectures`` names first."""
    named = list(getattr(config, "architectures", None) or ())
    references = [
        ref for auto, ref in config.auto_map.items() if auto.startswith("AutoModel") and isinstance(ref, str)
    ]
    references.sort(key=lambda ref: ref.rpartition(".")[2] not in named)
    if not references:
        return None
    try:
        cls: type = get_class_from_dynamic_module(references[0], str(directory), local_files_only=True)
    except Exception as error:  # the repository's code runs on import and raises arbitrary errors
        raise SourceError(
            f"the custom code {references[0]!r} of {directory} cannot be imported: {brief(error)}"
        ) from error
    return cls


def _is_model(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)


def _fits(cls: object, config: Any) -> bool:
    """Return whether ``cls`` is a model that is built from this config."""
    if not _is_model(cls):
        return False
    expected = getattr(cls, "config_class", None)
    return expected is None or isinstance(config, expected)


# The description of a model to convert, known before the model is built.


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that can be built and, if it has ``weight_files``, filled."""

    name: str
    """The user's path or Hub id, or the config's class."""
    config: Any
    """The transformers config object; to be copied before it is changed."""
    model_class: type
    """The concrete class; ``model_class(config)`` builds the model."""
    dtype: str
    """Default dtype of the parameters, such as ``"bfloat16"``."""
    trust_remote_code: bool = False
    """The class is the repository's own code, which the user trusts; False for classes of transformers."""
    directory: Path | None = None
    """Local directory with ``config.json``; None for a model given as a config object."""
    revision: str | None = None
    """Commit of a Hub repository; None for local directories."""
    weight_files: tuple[WeightFile, ...] = ()
    """Validated checkpoint files; empty if no weights are needed."""
    index: Index | None = None
    """The index of the checkpoint files, if there are several."""
    tied: Mapping[str, str] | None = None
    """Alias -> first name of parameters that are one tensor in the checkpoint or in a plan; None: all that
    the class and its config tie."""
    quantization: Mapping[str, Any] | None = None
    """The ``quantization_config`` of a quantized checkpoint; ``config`` describes the unquantized model."""
    dequantize: bool = False
    """Convert such a checkpoint to unquantized weights."""
    sizes: Mapping[str, int] | None = None
    """The files of a Hub repository -> bytes; None for those of the directory."""

    @property
    def class_name(self) -> str:
        """Return ``module:Class`` of the model.

        transformers imports custom code under a name that depends on the directory's path; its module is
        therefore relative to the directory: ``modeling_custom:CustomModel``.
        """
        module = self.model_class.__module__
        if is_custom(self.model_class):
            module = module.rpartition(".")[2]
        return f"{module}:{self.model_class.__qualname__}"


def is_custom(cls: type) -> bool:
    """Return whether transformers imported the class from a model repository."""
    return cls.__module__.startswith("transformers_modules.")


# From the user's path or Hub id to a local directory, downloading it if needed.

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
    """The weight files that stay on the Hub."""
    sizes: Mapping[str, int] | None = None
    """The files of the repository -> bytes; None for a local directory, or if it cannot be listed."""


def locate(
    model: str | os.PathLike[str], hub: Hub, *, code: bool, need_weights: bool, stream: bool = False
) -> Located:
    """Return the directory of the model and, for a Hub repository, its commit."""
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
    found = remote_files(repo_id, commit, chosen, hub, must_exist=bool(index))
    return found if len(found) == len(chosen) else ()


def _download(repo_id: str, hub: Hub, patterns: tuple[str, ...]) -> Path:
    try:
        with bounded():
            found = snapshot_download(
                repo_id,
                revision=hub.revision,
                cache_dir=None if hub.cache_dir is None else Path(hub.cache_dir),
                local_files_only=hub.local_files_only,
                token=hub.token,
                allow_patterns=list(patterns),
            )
        return Path(found)
    except Exception as error:  # including errors of the HTTP library
        raise SourceError(explain(repo_id, hub.revision, error)) from error


DTYPES = ("float64", "float32", "bfloat16", "float16")


def resolve(
    model: str | os.PathLike[str] | Any,
    hub: Hub | None = None,
    *,
    trust_remote_code: bool = False,
    dtype: str | None = None,
    need_weights: bool = True,
    stream: bool = False,
) -> ModelSpec:
    """Find the model, its class, its dtype and, if they are needed, its weight files.

    Args:
        dtype: the dtype of the parameters; by default the config's dtype, otherwise the checkpoint's.
    """
    if dtype is not None and dtype.removeprefix("torch.") not in DTYPES:
        raise SourceError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if isinstance(model, transformers.PreTrainedConfig):
        return _from_config(model, dtype, trust_remote_code=trust_remote_code, need_weights=need_weights)
    hub = hub or Hub()
    located = locate(model, hub, code=trust_remote_code, need_weights=need_weights, stream=stream)
    directory = located.directory
    if located.commit is not None:  # ``locate`` has checked the kind of a local directory
        refuse_other_kinds(directory, need_weights=need_weights and not located.remote)
    config = read_config(directory, trust_remote_code=trust_remote_code)
    quantization = quantization_of(config)
    if quantization is not None:
        require_supported(quantization, str(directory), dequantize=dtype is not None)
        config = without_quantization(config)
    files: tuple[WeightFile, ...] = located.remote or (weight_files(directory) if need_weights else ())
    validate(files)
    index = index_of(directory) if files else None
    model_class = model_class_of(config, directory, trust_remote_code=trust_remote_code)
    return ModelSpec(
        name=os.fspath(model),
        config=config,
        model_class=model_class,
        dtype=_dtype(dtype, config, files, {} if index is None else index.metadata),
        trust_remote_code=is_custom(model_class),
        directory=directory,
        revision=located.commit,
        weight_files=files,
        index=index,
        quantization=quantization,
        dequantize=quantization is not None and dtype is not None,
        sizes=located.sizes,
    )


def files_left_out(spec: ModelSpec) -> dict[str, str]:
    """Return the files of a model that are neither its weights nor copied with them -> why."""
    if spec.directory is None:
        return {}
    weights = {_path_in(spec.directory, file) for file in spec.weight_files}
    sizes = sizes_in(spec.directory) if spec.sizes is None else spec.sizes
    left_out = choose_files(sizes, code=spec.trust_remote_code).left_out
    return {path: why for path, why in left_out.items() if path not in weights}


def _path_in(directory: Path, file: WeightFile) -> str:
    return file.name if isinstance(file, RemoteFile) else file.relative_to(directory).as_posix()


def _from_config(config: Any, dtype: str | None, *, trust_remote_code: bool, need_weights: bool) -> ModelSpec:
    name = type(config).__name__
    if need_weights:
        raise SourceError(f"a config object ({name}) has no weights; name a directory or a Hub id")
    quantization = quantization_of(config)
    if quantization is not None:
        require_supported(quantization, name, dequantize=dtype is not None)
        config = without_quantization(config)
    model_class = model_class_of(config, None, trust_remote_code=trust_remote_code)
    return ModelSpec(
        name=name,
        config=config,
        model_class=model_class,
        dtype=_dtype(dtype, config, (), {}),
        trust_remote_code=is_custom(model_class),
        quantization=quantization,
    )


def _dtype(asked: str | None, config: Any, files: tuple[WeightFile, ...], metadata: Mapping[str, Any]) -> str:
    """Return the dtype in which ``from_pretrained`` loads the model: given, the config's, or the weights'."""
    if asked is not None:
        return asked.removeprefix("torch.")
    said = getattr(config, "dtype", None) or metadata.get("dtype")
    found = str(said) if said else files and stored_dtype(files[0])
    if not found and not files and hasattr(config, "get_text_config"):  # a guess, if no weights say it
        found = getattr(config.get_text_config(), "dtype", None)
    return dtype_name(found or "float32")
