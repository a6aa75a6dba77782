"""The shared test suites of transformers, as a test case for each type of the zoo.

The source distribution has the suites that all models share, without the tests of single models, which say
what a suite runs on. ``TypeTester`` says it for any type: a tiny config, and inputs that are made up.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import subprocess
import sys
import tarfile
import types
import unittest
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from made_inputs import make_inputs
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from .models import build

PACKAGE = "transformers_suites"
"""The name under which the folder ``tests`` of the source distribution is imported."""
MISSING = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
"""Modules that the suites import and the source distribution lacks -> their class, which adds no tests."""

TYPES: Mapping[str, str] = {
    "bamba": "causal",
    "bart": "seq2seq",
    "bert": "masked",
    "bloom": "causal",
    "clip": "other",
    "deberta-v2": "masked",
    "dinov2": "other",
    "distilbert": "masked",
    "falcon": "causal",
    "gemma3_text": "causal",
    "gpt2": "causal",
    "gpt_neox": "causal",
    "jamba": "causal",
    "llama": "causal",
    "llava": "other",
    "mamba2": "causal",
    "mistral": "causal",
    "mixtral": "causal",
    "opt": "causal",
    "phi3": "causal",
    "qwen2_vl": "other",
    "qwen3": "causal",
    "qwen3_moe": "causal",
    "roberta": "masked",
    "segformer": "other",
    "siglip": "other",
    "t5": "seq2seq",
    "vit": "other",
    "wav2vec2": "other",
    "whisper": "other",
}
"""The types that the suites run on -> their family in the zoo."""


def pinned(root: Path) -> str:
    """Return the requirement of transformers in ``constraints.txt``, which is ``transformers==VERSION``."""
    lines = (root / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("transformers=="))


def download(cache: Path, requirement: str) -> Path:
    """Return the unpacked source distribution of transformers; download it if it is not in the cache.

    Args:
        cache: a folder that git ignores.
        requirement: ``transformers==VERSION``.

    Raises:
        subprocess.CalledProcessError: pip cannot get it.
    """
    folder = cache / requirement.replace("==", "-")
    if not (folder / "tests").is_dir():
        options = ["--no-binary", "transformers", "--no-deps", "-d", str(cache)]
        _pip("download", *options, requirement)
        with tarfile.open(next(cache.glob(f"{folder.name}.tar.gz"))) as archive:
            # Python before 3.11.4 has no filters.
            safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(cache, **safely)
    if not (cache / "packages" / "parameterized").is_dir():  # which the suites import
        _pip("install", "--target", str(cache / "packages"), "parameterized")
    return folder


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


def suite_modules(folder: Path) -> tuple[types.ModuleType, types.ModuleType]:
    """Import the suites of models and of training from the unpacked source distribution."""
    if PACKAGE not in sys.modules:
        sys.path.append(str(folder.parent / "packages"))
        package = types.ModuleType(PACKAGE)
        package.__path__ = [str(folder / "tests")]
        sys.modules[PACKAGE] = package
        for name, class_name in MISSING.items():
            parent = f"{PACKAGE}.{name.partition('.')[0]}"
            sys.modules[parent] = types.ModuleType(parent)
            module = types.ModuleType(f"{PACKAGE}.{name}")
            setattr(module, class_name, type(class_name, (), {}))
            sys.modules[module.__name__] = module
    # Marks of the suites, which this repository's settings of pytest do not list.
    with mock.patch.object(pytest, "mark", pytest.MarkGenerator(_ispytest=True)):
        common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
        return common, importlib.import_module(f"{PACKAGE}.test_training_mixin")


class TypeTester:
    """What a suite asks about the type that it runs on: a config, inputs, and sizes of both.

    Args:
        config: of a tiny model.
        inputs: of its forward method.
        main_class: which is trained.
    """

    is_training = True
    num_choices = 3

    def __init__(self, config: PreTrainedConfig, inputs: Mapping[str, Any], main_class: type) -> None:
        self._config, self._inputs = config, inputs
        self.causal_lm_class = main_class
        first = next(iter(inputs.values()))
        text = config.get_text_config()
        self.batch_size = first.shape[0]
        ids = inputs.get("input_ids", inputs.get("decoder_input_ids"))
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "pad_token_id"):
            setattr(self, name, getattr(text, name, None))
        for name in ("image_size", "patch_size"):
            if hasattr(config, name):
                setattr(self, name, getattr(config, name))
        num_patches = self._num_patches()
        if ids is not None:
            self.seq_length = ids.shape[1]
        elif num_patches is not None:
            self.seq_length, self.mask_length = num_patches, num_patches - 1
            self.num_masks = self.mask_length // 2
        else:
            self.seq_length = first.shape[1] if first.dim() == 2 else None  # samples of sound
        if "decoder_input_ids" in inputs:
            self.decoder_seq_length = inputs["decoder_input_ids"].shape[1]
            self.encoder_seq_length = self.seq_length

    def _num_patches(self) -> int | None:
        """Return the length of an image as a sequence with its class token, if it is one."""
        sides = [getattr(self, name, None) for name in ("image_size", "patch_size")]
        if not all(isinstance(side, int) for side in sides):
            return None
        return (sides[0] // sides[1]) ** 2 + 1

    def get_config(self) -> PreTrainedConfig:
        """Return a config that the test may change."""
        return copy.deepcopy(self._config)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Any]]:
        """Return a config, and keyword arguments of a call."""
        return self.get_config(), copy.deepcopy(dict(self._inputs))


def classes_of(model_type: str) -> Iterator[type[PreTrainedModel]]:
    """Yield the classes of a type that the suites run on: the one without a head, and its main one."""
    main = build(TYPES[model_type], model_type).model_class
    for name in dict.fromkeys((auto.MODEL_MAPPING_NAMES.get(model_type), main.__name__)):
        if isinstance(name, str) and hasattr(transformers, name):
            yield getattr(transformers, name)


def test_case(folder: Path, model_type: str) -> type[unittest.TestCase]:
    """Return the suites on one type; names of its methods are names of tests."""
    common, training = suite_modules(folder)
    zoo = build(TYPES[model_type], model_type)
    config = zoo.config
    if getattr(config, "pad_token_id", None) is None and hasattr(config, "vocab_size"):
        config.pad_token_id = 0  # heads that classify look for the end of a text
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = zoo.model_class(copy.deepcopy(config)).eval()
        inputs = dict(make_inputs(model).tensors)
    if "input_ids" in inputs and "decoder_input_ids" in inputs:
        # The suites take labels to be as long as both texts.
        length = min(inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids"))
        texts = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
        inputs |= {name: inputs[name][:, :length] for name in texts if name in inputs}
    for name in inputs.keys() & {"attention_mask", "decoder_attention_mask"}:
        inputs[name] = torch.ones_like(inputs[name])  # several tests compare all positions
    tester = TypeTester(config, inputs, zoo.model_class)
    if (
        next(iter(inputs.values())).dim() == 2 and "input_values" in inputs
    ):  # sound, of which a state has many
        with torch.no_grad():
            tester.encoder_seq_length = model(**inputs)[0].shape[1]
    inputs_of_all = set(inputs)
    accepted = {cls: set(inspect.signature(cls.forward).parameters) for cls in classes_of(model_type)}

    class Suites(common.ModelTesterMixin, training.TrainingTesterMixin, unittest.TestCase):  # type: ignore[name-defined,misc]
        model_tester = tester
        all_model_classes = tuple(accepted)
        _is_composite = bool(config.sub_configs)
        is_encoder_decoder = config.is_encoder_decoder
        maxDiff = 500

        def _prepare_for_class(self, inputs: Any, model_class: Any, return_labels: bool = False) -> Any:
            arguments = super()._prepare_for_class(inputs, model_class, return_labels)
            refused = inputs_of_all - accepted.get(model_class, inputs_of_all)
            return {name: value for name, value in arguments.items() if name not in refused}

    Suites.__name__ = Suites.__qualname__ = f"{model_type}ModelTest"
    return Suites


def tests_of(case: type[unittest.TestCase]) -> list[str]:
    """Return the names of the tests of a case."""
    return unittest.TestLoader().getTestCaseNames(case)  # type: ignore[return-value]
