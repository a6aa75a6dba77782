"""From ``config.json`` to a config object and the class to build, named there or found in auto mappings.

There is no table of architectures. The config names the class (``architectures``), which is looked up in
transformers' public namespace or in the repository's own code, or is found in transformers' auto mappings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..errors import SourceError, UnsupportedError, brief
from .model_directory import (
    read_config_json,
)

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
    raise UnsupportedError(
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
            entry = mapping[type(config)]
            cls = entry[0] if isinstance(entry, tuple) else entry
            if _is_model(cls):  # not _fits: some types use the class of another one
                assert isinstance(cls, type)
                return cls
    raise UnsupportedError(
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
