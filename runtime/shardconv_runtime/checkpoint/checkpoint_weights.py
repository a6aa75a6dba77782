"""The parameters of a model as lazy tensors over its checkpoint, converted as transformers converts them.

transformers renames, stacks, splits and transposes the tensors of a checkpoint on the way to the parameters.
Its own ``from_pretrained`` runs here on tensors that record these operations, so that each of them applies
and no weight is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import MODEL_MAPPING, PreTrainedModel

from ..errors import DamagedModelError, SourceError, brief
from ..format.names import natural_key
from ..meta.meta_model import for_older_transformers, tied_names
from ..packed.formats import quant_method
from .lazy_tensor import ComputedLeaf, LazyLeaf, LazyTensor
from .quantized import PackedWeight, PackedWeights, is_of_cache
from .recording_tensors import (
    InPlaceError,
    RecordedOperator,
    RecordedTensor,
    lazy_of,
    recording,
    small_ones_read,
)
from .resolve import ModelSpec
from .stored_leaves import lazy_tensors
from .wrapper_names import without_wrappers, wrapped_name

SHOWN = 3
"""Names that an error lists."""

_UNCONVERTED = re.compile(r"^(\S+) +\| +(?:\x1b\[\d+m)?CONVERSION", re.MULTILINE)
"""A row of transformers' loading report."""


_Loaded = tuple[PackedWeights | None, Mapping[str, LazyTensor], Any, dict[str, Any]]
"""Packed weights, a checkpoint's tensors with weights in their place, and transformers' model and report."""


@dataclass(frozen=True)
class CheckpointWeights:
    """The weights of a checkpoint, not read."""

    tensors: Mapping[str, LazyTensor | PackedWeight]
    """Global, by FQN, tied ones under each of their names."""
    tied: Mapping[str, str] | None
    """The ties for ``ModelSpec``; None, unless parameters that the class and its config tie have different
    values."""
    unused: Mapping[str, LazyTensor]
    """Tensors of the checkpoint that the model does not read, by name, if they were asked for."""


def lazy_weights(
    spec: ModelSpec, tell: Callable[[str], object] = lambda remark: None, *, with_unused: bool = False
) -> CheckpointWeights:
    """Return the global tensors of all parameters and persistent buffers.

    Returns:
        Packed parameters of a quantized checkpoint are their stored tensors, unless it is to be dequantized.
    """
    tensors = lazy_tensors(spec.weight_files, spec.index)
    listed = {name: t for name, t in tensors.items() if spec.index is None or name in spec.index.weight_map}
    packed, plain, model, info = _loaded(spec, listed)
    if unlisted := sorted(tensors.keys() - listed.keys(), key=natural_key):
        # A repository that reuses a file of another one lists the tensors that it means. An index may also be
        # behind its files, and from_pretrained then takes the tensors of these.
        if is_behind := bool(info["missing_keys"]):
            packed, plain, model, info = _loaded(spec, tensors)
        done = "taken, since the model lacks some" if is_behind else "left out"
        tell(f"the index of the files does not list {_count(unlisted)} in them; {done}: {_some(unlisted)}")
    if info["missing_keys"]:
        packed, plain, model, info = _unwrapped(spec, tensors, tell) or (packed, plain, model, info)
    if packed is not None and packed.is_empty:
        tell(_only_plain(spec))
    if packed is not None:
        _refuse_transposed(spec, model, packed, {name for name, *_ in info["mismatched_keys"]})
    in_pairs = {n for n, t in plain.items() if t.dtype == "float4_e2m1fn_x2"} - set(info["unexpected_keys"])
    if in_pairs:
        raise SourceError(
            f"{_some(sorted(in_pairs, key=natural_key))} of {spec.name}: two values of 4 bits (F4) in a "
            "byte, which torch stores and does not compute with; convert the unquantized model"
        )
    mismatched = sorted(info["mismatched_keys"])
    if wrong := [f"{name} is {list(got)}, not {list(want)}" for name, got, want in mismatched]:
        raise SourceError(
            f"the checkpoint of {spec.name} disagrees with config.json: {_some(wrong, '; ')}; "
            "use the config.json that belongs to these weights"
        )
    _require_all(spec, info["missing_keys"], wrapped_name(plain))
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # patterns of old buffers
    expected_names = [name for name in plain if not any(re.search(pattern, name) for pattern in ignored)]
    _refuse_extra(spec, info["unexpected_keys"], expected_names)
    if extra := sorted(info["unexpected_keys"], key=natural_key):
        done = "carried along" if with_unused else "left out"
        of_cache = spec.quantization is not None and any(is_of_cache(n, spec.quantization) for n in extra)
        why = (
            "; factors of a quantized cache are among them, and the model has a plain one" if of_cache else ""
        )
        tell(
            f"the checkpoint has {_count(extra)} that {spec.model_class.__name__} does not use; {done}: "
            f"{_some(extra)}{why}"
        )
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state: dict[str, torch.Tensor] = model.state_dict()
    # Parameters that the model's code makes if the checkpoint lacks them are missing if they are random.
    # Others, such as a table of sines, have the same values each time the model is loaded.
    made = [name for name in parameters & state.keys() if not isinstance(state[name], RecordedTensor)]
    again = _load(spec, plain)[0].state_dict() if made else {}
    drawn = {name for name in made if not torch.equal(state[name], again[name])}
    weights = {name: None if name in drawn else lazy_of(tensor) for name, tensor in state.items()}
    _require_all(spec, [name for name, lazy in weights.items() if lazy is None])
    present_weights = {name: lazy for name, lazy in weights.items() if lazy is not None}
    # Parameters that the config ties, but that have different values in the checkpoint, are not tied.
    present = dict(model.named_parameters(remove_duplicate=False))
    declared = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    apart = [(alias, name) for alias, name in declared if present.get(alias) is not present.get(name)]
    for alias, name in apart:
        tell(
            f"{alias} and {name} have different values in the checkpoint of {spec.name}, and its config ties "
            "them; they are not tied, as from_pretrained has it"
        )
    tied = tied_names(model) if apart else None
    unused = _unused(plain, present_weights.values()) if with_unused else {}
    if packed is None or spec.dequantize:
        return CheckpointWeights(present_weights, tied, unused)
    stored = packed.as_stored(unused)
    return CheckpointWeights(
        {n: packed.of(n, lazy) or lazy for n, lazy in present_weights.items()}, tied, stored
    )


def _unused(stored: Mapping[str, LazyTensor], weights: Iterable[LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors of a checkpoint of which no weight has an element."""
    read: set[LazyLeaf] = set()
    todo = list(weights)
    while todo:
        for piece in todo.pop().pieces:
            if piece.leaf in read:
                continue
            read.add(piece.leaf)
            if isinstance(piece.leaf, ComputedLeaf) and isinstance(piece.leaf.compute, RecordedOperator):
                arguments = tree_leaves((piece.leaf.compute.args, dict(piece.leaf.compute.kwargs)))
                todo += [value for value in arguments if isinstance(value, LazyTensor)]
    return {name: t for name, t in stored.items() if read.isdisjoint(piece.leaf for piece in t.pieces)}


def _unwrapped(
    spec: ModelSpec, tensors: Mapping[str, LazyTensor], tell: Callable[[str], object]
) -> _Loaded | None:
    """Load the checkpoint of a wrapped model, if it is complete under the model's names."""
    for names in without_wrappers(tensors):
        try:
            renamed = _loaded(spec, {names[name]: tensor for name, tensor in tensors.items()})
        except SourceError:
            continue
        if not renamed[3]["missing_keys"]:
            old, new = next((old, new) for old, new in names.items() if old != new)
            tell(
                f"the checkpoint is that of a wrapped model; its names are read without that: {old} is {new}"
            )
            return renamed
    return None


def _loaded(spec: ModelSpec, tensors: Mapping[str, LazyTensor]) -> _Loaded:
    """Return the packed weights, all tensors with plain weights in their place, and the result of loading."""
    packed = _packed_weights(spec, tensors)
    plain = tensors if packed is None else packed.plain
    return packed, plain, *_load(spec, plain)


def _packed_weights(spec: ModelSpec, tensors: Mapping[str, LazyTensor]) -> PackedWeights | None:
    """Return the packed weights of a quantized checkpoint; None for others."""
    if spec.quantization is None:
        return None
    packed = PackedWeights(
        spec.quantization, tensors, spec.weight_files, spec.name, spec.dtype, dequantize=spec.dequantize
    )
    if packed.is_empty and not spec.dequantize:
        # from_pretrained would not compute with these values either: it quantizes them, or fails.
        raise SourceError(
            f"{_only_plain(spec)}; quantize it first (from_pretrained, save_pretrained), or take the plain "
            "weights: convert with --dtype, or remove quantization_config from config.json"
        )
    return packed


def require_packed(spec: ModelSpec) -> None:
    """Refuse a checkpoint whose config says that it is quantized, and whose weights are plain.

    Raises:
        SourceError: no weight is packed, or stored tensors are malformed.
    """
    _packed_weights(spec, lazy_tensors(spec.weight_files, spec.index))


def _only_plain(spec: ModelSpec) -> str:
    """Return that a checkpoint is not quantized, as its config says."""
    assert spec.quantization is not None, "asked of a config that says so"
    method = quant_method(spec.quantization)
    return f"config.json of {spec.name} says that the weights are quantized ({method}), and all are plain"


def select(
    spec: ModelSpec,
    weights: Mapping[str, LazyTensor | PackedWeight],
    names: Collection[str],
    tied: Iterable[tuple[str, str]] = (),
) -> dict[str, LazyTensor | PackedWeight]:
    """Return the weights that a plan names."""
    for alias, name in tied:
        if alias in weights and name in weights and not are_equal(weights[alias], weights[name]):
            raise SourceError(
                f"{alias} and {name} are one tensor in the plan, but have different values in the checkpoint "
                f"of {spec.name}; make the plan from the directory of this checkpoint"
            )
    absent = sorted(set(names) - weights.keys())
    if absent:
        raise SourceError(
            f"{_count(absent, 'weight')} of the plan {'is' if len(absent) == 1 else 'are'} missing from the "
            f"model of {spec.name}: {_some(absent)}; plan it again"
        )
    return {name: weights[name] for name in names}


def are_equal(one: LazyTensor | PackedWeight, other: LazyTensor | PackedWeight) -> bool:
    """Return whether two weights have the same values, which are read if they are stored twice."""
    if isinstance(one, LazyTensor) and isinstance(other, LazyTensor):
        return torch.equal(RecordedTensor(one), RecordedTensor(other))
    return one == other


def _refuse_transposed(spec: ModelSpec, model: Any, packed: PackedWeights, mismatched: set[str]) -> None:
    """Refuse packed weights of layers that may have their plain weight as (in, out).

    Some formats store each weight as (out, in), in any kind of layer. Nothing in the checkpoint says so; a
    square one would be mistaken for its transpose.
    """
    for fqn, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or isinstance(module, torch.nn.Linear):
            continue
        name = f"{fqn}.weight"
        if packed.is_of_linear_layers(weight) or (name in mismatched and name in packed.of_linear_layers):
            raise SourceError(
                f"{name} of {spec.name} is packed, and belongs to a {type(module).__name__}, not to a linear "
                "layer: which of its dims is which is not known; convert the unquantized model"
            )


def _load(spec: ModelSpec, tensors: Mapping[str, LazyTensor]) -> tuple[Any, dict[str, Any]]:
    """Return the model, as transformers loads it, and its report.

    The code of some models writes into parameters that are loaded; small ones are then read to allow it.
    """
    try:
        return _load_from(spec, tensors)
    except InPlaceError:
        pass
    try:
        return _load_from(spec, small_ones_read(tensors))
    except InPlaceError as error:
        raise SourceError(f"the weights of {spec.name} cannot be read: {error}; it is large") from error


def _load_from(
    spec: ModelSpec, tensors: Mapping[str, LazyTensor | torch.Tensor]
) -> tuple[Any, dict[str, Any]]:
    reports: list[str] = []
    try:
        with _loading_reports() as reports, recording(tensors) as checkpoint:
            loaded: tuple[Any, dict[str, Any]] = spec.model_class.from_pretrained(  # type: ignore[attr-defined]
                None,
                config=spec.config,
                state_dict=checkpoint,
                dtype=getattr(torch, spec.dtype),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (SourceError, InPlaceError):
        raise
    except Exception as error:  # unpicklers, converters and custom code may raise anything
        # Name the parameters whose conversion failed; only transformers' log has them.
        names = [match[1] for report in reports for match in _UNCONVERTED.finditer(report)]
        if names:
            raise DamagedModelError(
                f"the checkpoint of {spec.name} lacks tensors of matching shapes that these parameters "
                f"consist of: {_some(names)}; download it again, or correct config.json"
            ) from error
        if change := for_older_transformers(spec.model_class, error):
            raise SourceError(change) from error
        raise SourceError(f"the weights of {spec.name} cannot be read: {brief(error)}") from error
    return loaded


@contextmanager
def _loading_reports() -> Iterator[list[str]]:
    """Collect transformers' log messages of a load instead of printing them."""
    reports: list[str] = []
    logger = logging.getLogger(PreTrainedModel.__module__)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: reports.append(record.getMessage())  # type: ignore[method-assign]
    previous_settings = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING - 1)  # at WARNING, transformers checks its own plan and logs the result
    logger.propagate = False
    try:
        yield reports
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous_settings[0])
        logger.propagate = previous_settings[1]


def _require_all(spec: ModelSpec, missing: Iterable[str], wrapped: str | None = None) -> None:
    names = sorted(missing, key=natural_key)
    if names and wrapped is not None:
        raise SourceError(
            f"the checkpoint of {spec.name} was saved of a wrapped model, as the name {wrapped} shows, and "
            f"without the wrapper's part it lacks {_count(names)}, or has a name twice: {_some(names)}; save "
            "the state dict of the model inside of the wrapper"
        )
    if names:
        remedy = "download it again, or correct config.json"
        inner = f"{getattr(spec.model_class, 'base_model_prefix', '')}."
        base = MODEL_MAPPING.get(type(spec.config), None)
        if isinstance(base, type) and base is not spec.model_class and not any(map(_starts(inner), names)):
            remedy = (
                f"if it was saved without its head, name {base.__name__}, the class without one, in "
                f"config.json; otherwise {remedy}"
            )
        raise SourceError(f"the checkpoint of {spec.name} lacks {_count(names)}: {_some(names)}; {remedy}")


def _starts(prefix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix)


def _refuse_extra(spec: ModelSpec, unexpected: Iterable[str], tensors: Collection[str]) -> None:
    """Refuse tensors without which others are incomplete: biases, scales and the like.

    transformers leaves out tensors that the model does not use. Whole modules may be left out, such as
    another task's head. But if only part of a module is left out, the config or the code belongs to another
    checkpoint.
    """
    extra = set(unexpected)
    used = {name.rpartition(".")[0] for name in tensors if name not in extra}
    settings = spec.quantization
    names = sorted((name for name in extra if name.rpartition(".")[0] in used), key=natural_key)
    names = [name for name in names if settings is None or not is_of_cache(name, settings)]
    if names:
        pronoun = "it" if len(names) == 1 else "them"
        raise SourceError(
            f"the checkpoint of {spec.name} holds {_count(names)} that {spec.model_class.__name__} does not "
            f"use, although it uses others of the same module: {_some(names)}; remove {pronoun}, or correct "
            "config.json"
        )


def _count(names: list[str], noun: str = "tensor") -> str:
    return f"{len(names)} {noun}{'s' if len(names) > 1 else ''}"


def _some(texts: list[str], separator: str = ", ") -> str:
    rest = len(texts) - SHOWN
    return separator.join(texts[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
