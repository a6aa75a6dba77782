"""Quantize weights while they are copied: each one is computed when it is written.

transformers' quantizer of the format chooses the weights, and the format's library computes their stored
tensors from whole weights. So these do not depend on tp, and are the ones that transformers makes when it
quantizes the model while it loads it.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from shardconv_runtime.checkpoint.lazy_tensor import FileLeaf, LazyTensor, cast
from shardconv_runtime.checkpoint.quantized import PackedWeight, PackedWeights, header_of_packed
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import MissingPackageError, OptionError, SourceError, brief
from shardconv_runtime.files.manifest import FileEntry
from shardconv_runtime.files.model_config import CONFIG
from shardconv_runtime.files.small_files import config_with_quantization, entry_of
from shardconv_runtime.format.names import natural_key
from shardconv_runtime.format.plan import Packing, Plan, by_name
from shardconv_runtime.format.slices import ranges
from shardconv_runtime.format.stage_names import own_parameters
from shardconv_runtime.format.stored_layout import granularity, tensor_name
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.packed.formats import format_of_checkpoint, packing_format
from shardconv_runtime.packed.packed_format import Chosen, PackedFormat
from shardconv_runtime.packed.quantizers import missing_packages
from torch import nn

from .quantized_weights import Library, union
from .writing.writer import Origin

Weights = Mapping[str, LazyTensor | PackedWeight]


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """A model that is quantized when it is written.

    Attributes:
        spec: the model as one whose checkpoint is quantized.
        settings: its ``quantization_config``.
        weights: its global weights, packed or not, by FQN.
        notes: about layers that stay plain although the format packs such layers.
        library: computes the packed ones.
    """

    spec: ModelSpec
    settings: Mapping[str, Any]
    weights: Weights
    notes: tuple[str, ...]
    library: Library


def quantized_model(
    spec: ModelSpec,
    weights: Weights,
    settings: Mapping[str, Any],
    keep: Sequence[str] | None = None,
) -> QuantizedModel:
    """Return a model with the weights packed that its format's library would pack.

    Args:
        weights: its plain weights, global, by FQN.
        settings: the ``quantization_config``; it may leave out defaults.
        keep: patterns of modules that stay plain, besides the library's own choice. None: the settings come
            from a quantized model, and name all of them.

    Raises:
        MissingPackageError: the library of the format is not installed.
        SourceError: the format cannot pack the weights of this model.
    """
    packed_format = packing_format(settings)
    if missing := missing_packages(packed_format.packers):
        raise MissingPackageError(
            f"weights are quantized ({settings['quant_method']}) by {' and '.join(missing)}, which is not "
            f"installed: pip install {' '.join(missing)}"
        )
    chosen, stacks = _choose(spec, packed_format, settings)
    notes: tuple[str, ...] = ()
    unquantized = _kept(spec, chosen, stacks, keep or ())
    if keep is not None and (rest := [name for name in stacks if name.rpartition(".")[0] not in unquantized]):
        notes = (_told_of_stacks(spec, weights, chosen, rest, packed_format),)
    if unquantized := unquantized & {name.rpartition(".")[0] for name in chosen.weights}:
        skipped = sorted({*chosen.skipped, *unquantized}, key=natural_key)
        chosen, _ = _choose(spec, packed_format, {**chosen.settings, packed_format.skips: skipped})
    library = Library(format_of_checkpoint(chosen.settings, spec.name), chosen.quantizer)
    packed = _packed(spec, library, chosen, weights)
    if not packed:
        raise SourceError(
            f"no weight of {spec.name} consists of full blocks of {packed_format.method}; choose another "
            "--quantize"
        )
    if plain := {*chosen.weights} - packed.keys():
        owners = sorted({name.rpartition(".")[0] for name in plain}, key=natural_key)
        shape = list(weights[min(plain, key=natural_key)].shape)
        more = f" and {len(owners) - 1} others" if owners[1:] else ""
        reason = "they are not made of full blocks of the format"
        notes = (*notes, f"{owners[0]} {shape}{more} are not quantized: {reason}")
        skipped = sorted({*chosen.skipped, *owners}, key=natural_key)
        chosen, _ = _choose(spec, packed_format, {**chosen.settings, packed_format.skips: skipped})
        packed = {name: packed[name] for name in chosen.weights}
    return QuantizedModel(
        replace(spec, quantization=chosen.settings, dequantize=False),
        chosen.settings,
        {**weights, **packed},
        notes,
        library,
    )


def with_quantization(origin: Origin, model: QuantizedModel) -> Origin:
    """Return the origin of a model that is quantized when it is written."""

    def copy(directory: Path) -> list[FileEntry]:
        entries = [entry for entry in origin.copy_small_files(directory) if entry.path != CONFIG]
        config = directory / CONFIG
        parts = getattr(model.spec.config, "sub_configs", ())
        text = config_with_quantization(config.read_text(encoding="utf-8"), model.settings, parts)
        config.write_text(text, encoding="utf-8")
        return [*entries, entry_of(directory, Path(CONFIG))]

    packers = format_of_checkpoint(model.settings, model.spec.name).packers
    libraries = {name: metadata.version(name) for name in packers}
    identity = {**origin.identity, "quantized": {**model.settings, **libraries}}
    identify = origin.identify
    return replace(
        origin,
        copy_small_files=copy,
        identity=identity,
        identify=None if identify is None else lambda: {**identify(), "quantized": identity["quantized"]},
        errors=lambda: dict(model.library.errors),
    )


def tensors_for_ranks(
    model: QuantizedModel, plan: Plan, tensors: Mapping[str, LazyTensor], ranks: Collection[int]
) -> dict[str, LazyTensor]:
    """Return global stored tensors of which the parts that some ranks hold are computed alone.

    Args:
        plan: the plan of the model, or of the directory of a stage.
        tensors: all stored tensors, by name.
    """
    parameters = plan.parameters
    if plan.stages is not None and plan.stages.own is not None:
        parameters = own_parameters(plan, plan.stages.own)
    parts = dict(tensors)
    for name, entry in by_name("parameters", parameters).items():
        if name in model.library.weights and entry.packing is not None:
            spans = [union(span for r in ranks for span in ranges(dim, plan.mesh, r)) for dim in entry.dims]
            made = model.library.in_parts(name, spans)
            parts |= {tensor_name(name, part): tensor for part, tensor in made.items()}
    return parts


def _kept(spec: ModelSpec, chosen: Chosen, stacks: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Return the modules of chosen weights, or of stacks of matrices, that match a pattern."""
    owners = {name.rpartition(".")[0] for name in chosen.weights}
    plain = {name.rpartition(".")[0] for name in stacks}
    names: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(owners | plain, pattern)
        if not matches:
            raise OptionError(
                f"keep: {pattern!r} matches no module of {spec.name} whose weight would be quantized; there "
                f"is for example {min(owners, key=natural_key)}"
            )
        names |= set(matches)
    if patterns and names >= owners:
        raise OptionError("keep: the patterns match everything; leave out --quantize")
    return names


def _told_of_stacks(
    spec: ModelSpec, weights: Weights, chosen: Chosen, stacks: Sequence[str], packed_format: PackedFormat
) -> str:
    """Return a note about stacks of matrices that stay plain; refuse if they are most of the model."""
    name = stacks[0]
    rest = f" and {len(stacks) - 1} others" if stacks[1:] else ""
    shown = f"{name} {list(weights[name].shape)}{rest}"
    plain, packed = (sum(math.prod(weights[n].shape) for n in names) for names in (stacks, chosen.weights))
    if plain <= packed:
        return f"{shown} are not quantized: the library packs no stacks of matrices"
    owner = re.sub(r"(^|\.)\d+(\.|$)", r"\1*\2", name.rpartition(".")[0])
    raise SourceError(
        f"{shown} of {spec.name} are stacks of matrices, which are not packed ({packed_format.method}), and "
        f"most of the model; choose another --quantize, or leave them as they are: --keep {owner!r}"
    )


def _choose(
    spec: ModelSpec, packed_format: PackedFormat, settings: Mapping[str, Any]
) -> tuple[Chosen, list[str]]:
    """Return the weights that the format's library quantizes, and stacks of matrices that stay plain."""
    model = build_model(spec.model_class, spec.config, getattr(torch, spec.dtype), spec.tied)
    modules = dict(model.named_modules())
    plain = dict(model.named_parameters(remove_duplicate=False))
    method = settings["quant_method"]
    try:
        chosen = packed_format.choose(model, settings)
    except Exception as error:  # each library has its own errors
        raise SourceError(
            f"{spec.model_class.__name__} of {spec.name} cannot be quantized ({method}): {brief(error)}; "
            "choose another --quantize"
        ) from error
    present = dict(model.named_parameters(remove_duplicate=False))
    replaced = {name for name, module in model.named_modules() if modules.get(name) is not module}
    for name, parameter in plain.items():
        fqn = name.rpartition(".")[0]
        owner = modules[fqn]
        is_matrix_of_other = parameter.dim() == 2 and not isinstance(owner, nn.Linear)  # perhaps as (in, out)
        if name not in present or (
            fqn in replaced and (is_matrix_of_other or present[name].shape != parameter.shape)
        ):
            raise SourceError(
                f"{name} {list(parameter.shape)} of {spec.name} belongs to a {type(owner).__name__}, whose "
                f"weights transformers does not quantize as they are ({method}); choose another --quantize"
            )
    if not chosen.weights:
        raise SourceError(
            f"{spec.model_class.__name__} of {spec.name} has no weight that transformers quantizes "
            f"({method}); leave out --quantize"
        )
    stacks = [
        name
        for name, parameter in plain.items()
        if name not in chosen.weights
        and (parameter.dim(), min(parameter.shape, default=0) > 1) == (3, True)  # [1, N, D] is one matrix
        and not type(modules[name.rpartition(".")[0]]).__module__.startswith("torch.")  # a convolution
    ]
    return chosen, stacks


def _packed(spec: ModelSpec, library: Library, chosen: Chosen, weights: Weights) -> dict[str, PackedWeight]:
    """Return the chosen weights, without those that cannot be packed for their sizes."""
    stored: dict[str, LazyTensor] = {}
    plain: dict[str, LazyTensor] = {}
    for name, dtype in chosen.weights.items():
        weight = weights[name]
        assert isinstance(weight, LazyTensor), "the source is not quantized"
        loaded = cast(weight, dtype)
        assert loaded is not None, "transformers casts a weight once"
        parts = library.stored_tensors(name, loaded)
        if len(parts) > 1:
            stored |= parts
            plain[name] = weight
    header = header_of_packed(chosen.settings, spec.name, stored, spec.dtype)
    packed_weights = PackedWeights(
        chosen.settings, stored, (), spec.name, spec.dtype, dequantize=False, metadata=header
    )
    for name, weight in plain.items():
        packed = packed_weights.of(name, packed_weights.plain[name])
        if packed is not None and not _is_divided(packed.packing, weight):
            library.weights[name] = packed
    return dict(library.weights)


def _is_divided(packing: Packing, weight: LazyTensor) -> bool:
    """Return whether a block of a weight would span several tensors of the checkpoint.

    transformers saves these apart. The rows of a matrix that is computed in parts are no such tensors.
    """
    steps = list(granularity(packing, len(weight.shape)))
    for tensor in packing.tensors:
        for index, dim in enumerate(tensor.dims if len(tensor.dims) == len(steps) else ()):
            if dim.of is None:  # one block
                steps[index] = weight.shape[index]
    pieces = [p for p in weight.pieces if isinstance(p.leaf, FileLeaf) or len(weight.shape) > 2]
    return any(
        start % step or ((start + extent) % step and start + extent != size)
        for piece in pieces
        for start, extent, size, step in zip(piece.start, piece.shape, weight.shape, steps, strict=True)
    )
