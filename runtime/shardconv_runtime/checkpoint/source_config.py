"""From ``config.json`` to a config object and the class to build.

There is no table of architectures: the class is named by the config (``architectures``) and looked up in
transformers' public namespace or in the repository's own code, or is found in transformers' auto mappings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..errors import SourceError, brief
from ..parallel.model_config import unsafe_entry

FALLBACKS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_MAPPING",
)
"""The mappings for configs that do not name a usable class, in order."""


def read_config(directory: Path, *, trust_remote_code: bool) -> Any:
    """The config object of the model in ``directory``.

    Raises:
        SourceError: the file is missing, is not JSON, or has a type that transformers does not know.
    """
    raw = _read_json(directory)
    _require_known_type(raw, directory, trust_remote_code)
    try:
        return transformers.AutoConfig.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # config classes raise arbitrary errors on unexpected values
        raise SourceError(
            f"{directory / 'config.json'} is not a valid config: {brief(error)}; correct that field"
        ) from error


def _read_json(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise SourceError(f"no config.json in {directory}; name the directory of a transformers model")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read as JSON: {brief(error)}; restore the file") from error
    if not isinstance(raw, dict):
        raise SourceError(f"{path} does not hold a JSON object; restore the file")
    if problem := unsafe_entry(raw):
        raise SourceError(f"{path}: {problem}; remove it")
    return raw


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
    """The class to build for ``config``.

    Raises:
        SourceError: neither the config nor the repository's code nor transformers' mappings name a class.
    """
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
        cls = _from_mapping(mapping_name, config)
        if cls is not None:
            return cls
    raise SourceError(
        f"transformers {transformers.__version__} has no model class for {type(config).__name__} "
        f"(architectures: {getattr(config, 'architectures', None)}); name one in config.json"
    )


def _class_from_repository(config: Any, directory: Path) -> type | None:
    """The model class among ``auto_map``'s, the one that ``architectures`` names first."""
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
    """Whether ``cls`` is a model that is built from this config."""
    if not _is_model(cls):
        return False
    expected = getattr(cls, "config_class", None)
    return expected is None or isinstance(config, expected)


def _from_mapping(mapping_name: str, config: Any) -> type | None:
    mapping = getattr(transformers, mapping_name, {})
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    cls = found[0] if isinstance(found, tuple) else found
    return cls if _is_model(cls) else None  # not _fits: some types use the class of another one
