"""Initial weights of a model that is trained from scratch, by transformers' own initialization.

Each weight is computed when it is written. The seed of a draw depends on the seed of the model, the name of
the parameter, and the number of the draw. So the weights do not depend on tp, on which ranks are written, or
on the order or number of threads. Only one weight, or a part of it, is in memory at a time.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import transformers
from shardconv_runtime.checkpoint.copying import num_workers
from shardconv_runtime.checkpoint.lazy_tensor import (
    ComputedLeaf,
    LazyTensor,
    concatenate,
    from_leaf,
)
from shardconv_runtime.checkpoint.model_directory import LAYOUTS
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import PlanError, ShardconvError, SourceError, brief
from shardconv_runtime.files.manifest import Source
from shardconv_runtime.format.header import dtype_name
from shardconv_runtime.meta.lazy_init import Step, memory_key
from shardconv_runtime.meta.recorded_construction import Construction, draw
from torch import Tensor

BLOCK = 1 << 22
"""Elements that one thread draws from one seed, if elements are drawn independently."""

PART = 1 << 25
"""Elements of such a parameter that are in memory at a time, if a row is not longer."""

_SOURCE = "{}, initialized at random with seed {}"
_SOURCE_PATTERN = re.compile(r".*, initiali[sz]ed at random with seed \d+", re.DOTALL)


def initial_weights(spec: ModelSpec, seed: int) -> dict[str, LazyTensor]:
    """Return the initial values of all parameters and persistent buffers, global, by FQN, under all tied
    names.

    They are drawn and computed in float32, in float64 for a model of that dtype.
    """
    seeds = _Seeds(seed)
    construction = Construction(seeds.of_step)
    # Build the model. Its state are meta tensors; the construction records how each gets its values.
    dtype = getattr(torch, drawn_dtype(spec))
    config = copy.deepcopy(spec.config)
    try:
        with construction.active():
            model = spec.model_class._from_config(config, dtype=dtype)  # type: ignore[attr-defined]
        if not any(getattr(module, "_is_hf_initialized", False) for module in model.modules()):
            raise SourceError(
                f"transformers {transformers.__version__} did not initialize {spec.model_class.__name__} on "
                "building it; this is a gap in shardconv, please report it with the model's config.json"
            )
    except ShardconvError:
        raise
    except Exception as error:  # constructors and custom code may raise anything
        raise SourceError(
            f"{spec.name}: {spec.model_class.__name__} cannot be built from its config: {brief(error)}; "
            "correct config.json"
        ) from error
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    weights: dict[object, _Weight] = {}
    names = {}
    for name, value in state.items():
        tensor = construction.meta(value)
        names[name] = memory_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
        weights.setdefault(names[name], _Weight(spec.name, name, tensor, construction))
    users = Counter(index for weight in weights.values() for index in weight.chain.indices)
    lazy = {key: weight.lazy(seeds, users) for key, weight in weights.items()}
    return {name: lazy[key] for name, key in names.items()}


def initialized_source(source: Source, seed: int) -> Source:
    """Return the source that the manifest of a randomly initialized model names."""
    return replace(source, name=_SOURCE.format(source.name, seed))


def is_initialized(source: Source) -> bool:
    """Return whether a manifest says that the weights were initialized at random."""
    return not source.files and _SOURCE_PATTERN.fullmatch(source.name) is not None


def drawn_dtype(spec: ModelSpec) -> str:
    """Return the dtype in which weights are drawn and computed. They are cast when they are written."""
    return "float64" if spec.dtype == "float64" else "float32"


def has_weights(spec: ModelSpec) -> bool:
    """Return whether there are weight files next to the config."""
    directory = spec.directory
    return directory is not None and any((directory / name).exists() for pair in LAYOUTS for name in pair)


class _Seeds:
    """Seeds of draws, all of them different.

    torch's CPU generator uses 32 bits of a seed. In a large model, two of the many draws would otherwise get
    the same seed.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._taken: set[int] = set()
        self._steps: dict[int, int] = {}

    def of_step(self, index: int) -> int:
        """Return the seed of a step. A step whose value was needed while the model was built has no name."""
        if index not in self._steps:
            self._steps[index] = self.take("", index)
        return self._steps[index]

    def has_step(self, index: int) -> bool:
        """Return whether a step has its seed."""
        return index in self._steps

    def name_step(self, index: int, name: str, number: int) -> None:
        """Name a step as draw ``number`` of a parameter. The first name counts."""
        if index not in self._steps:
            self._steps[index] = self.take(name, number)

    def take(self, name: str, *numbers: int) -> int:
        """Return a new seed. It depends on earlier ones only if it would equal one of them."""
        text = "\0".join(map(str, (self._seed, *numbers, name)))
        while True:
            digest = hashlib.sha256(text.encode()).digest()
            seed = int.from_bytes(digest[:4], "little")
            if seed not in self._taken:
                self._taken.add(seed)
                return seed
            text += "\0"


class _Weight:
    """One tensor of the model."""

    def __init__(self, model: str, name: str, tensor: Tensor, construction: Construction) -> None:
        self._model, self._name, self._tensor = model, name, tensor
        self._construction = construction
        try:
            self.chain = construction.chain(tensor)
        except PlanError as error:
            raise SourceError(f"{self._described()} cannot be initialized: {error}") from error
        if not self.chain.is_written and tensor.numel():
            raise self._lacks("a value")

    def lazy(self, seeds: _Seeds, users: Mapping[int, int]) -> LazyTensor:
        """Return the tensor, to be computed when it is written."""
        step = self._construction.elementwise(self._tensor, self.chain)
        random = [index for index in self.chain.indices if self._construction.steps[index].is_random]
        alone = all(users[index] == 1 and not seeds.has_step(index) for index in random)
        if step is not None and alone and self._tensor.numel() > 0 and self._tensor.dim() > 0:
            return self._drawn(step, seeds)
        for number, index in enumerate(random):
            seeds.name_step(index, self._name, number)
        return from_leaf(self._leaf(self._computed, self._tensor.numel()), self._tensor.shape)

    def _drawn(self, step: Step, seeds: _Seeds) -> LazyTensor:
        """Draw in parts of complete rows, which consist of blocks."""
        rows, row = self._tensor.shape[0], self._tensor.numel() // self._tensor.shape[0]
        parts = []
        for start in range(0, rows, max(PART // row, 1)):
            shape = (min(max(PART // row, 1), rows - start), *self._tensor.shape[1:])
            count = shape[0] * row
            taken = [seeds.take(self._name, start, block) for block in range(0, count, BLOCK)]
            parts.append(
                from_leaf(self._leaf(_drawing(step, self._tensor.dtype, shape, taken), count), shape)
            )
        return concatenate(parts, 0)

    def _computed(self) -> Tensor:
        value = self._construction.value(self._tensor, self.chain)
        if self.chain.blank and value.isnan().any():
            raise self._lacks("values of some elements")
        return value

    def _leaf(self, compute: Callable[[], Tensor], count: int) -> ComputedLeaf:
        return ComputedLeaf(self._name, compute, dtype_name(self._tensor.dtype), count)

    def _described(self) -> str:
        return f"{self._model}: {self._name} {list(self._tensor.shape)}"

    def _lacks(self, what: str) -> SourceError:
        return SourceError(
            f"{self._described()} lacks {what} after the model's own initialization; add it to the "
            "_init_weights of the model's class, or convert a checkpoint"
        )


def _drawing(
    step: Step, dtype: torch.dtype, shape: Sequence[int], seeds: Sequence[int]
) -> Callable[[], Tensor]:
    """Return a computation that draws a tensor in blocks, in parallel."""

    def compute() -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        blocks = torch.split(tensor.view(-1), BLOCK)
        if len(blocks) == 1:
            draw(step, blocks[0], seeds[0])
            return tensor
        with ThreadPoolExecutor(num_workers(), "draw") as pool:
            list(pool.map(lambda block, seed: draw(step, block, seed), blocks, seeds))
        return tensor

    return compute
