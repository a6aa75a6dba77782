"""Transforms in few lines: adapters, fused products, tensor parallelism, generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..adapters.adapter_set import AdapterSet
from ..comm.mesh import Launch
from ..errors import PlanError
from ..format.plan import Plan
from ..format.stage_names import absent_modules
from ..inference.generation import prepare_generation
from ..parallel.build import parallelize, stored_tensors
from ..parallel.layers import with_local_logits
from ..training.prepare import TrainingForm, parallelize_for_training
from .checked_source import LoadOptions
from .load_options import require_form
from .transform import RankModel, ReadTensors, Transform


@dataclass(frozen=True)
class Adapters(Transform):
    """Adapters are put into the model; ``reads_all``: the tensors that are given have them already."""

    adapters: AdapterSet
    training: bool
    reads_all: bool

    def shape(self, rank: RankModel) -> RankModel:
        """Attach the adapters, whose layers may have taken the names of the model's."""
        return replace(rank, attached=self.adapters.attach(rank.model, trainable=self.training))

    def fill(self, rank: RankModel, read: ReadTensors) -> ReadTensors:
        """Read the adapters' own tensors, and the model's under their new names."""
        assert rank.attached is not None, "`shape` attached them"
        if self.reads_all:
            return read
        adapters, attached = self.adapters, rank.attached
        if rank.place is not None:
            adapters, attached = adapters.of_stages(rank.place.link.stages, attached)
        return partial(adapters.tensors, read, attached, rank.start)


@dataclass(frozen=True)
class Dtypes(Transform):
    """Tensors are cast while they are read, if the caller asked for a dtype or an adapter needs another."""

    is_asked_for: bool
    base: Plan

    def shape(self, rank: RankModel) -> RankModel:
        """Note the dtypes. The model was built in the one that was asked for: others are kept by its code."""
        dtypes: dict[str, torch.dtype] = {}
        if self.is_asked_for:
            dtypes = {name: tensor.dtype for name, tensor in stored_tensors(rank.model)}
        if rank.attached is not None:
            dtypes |= rank.attached.dtypes_of_model(self.base, dtypes)
        return replace(rank, dtypes=dtypes)


@dataclass(frozen=True)
class Fusing(Transform):
    """Products of one input become one product, or stay apart."""

    options: LoadOptions

    def shape(self, rank: RankModel) -> RankModel:
        """Keep the plan's groups of layers, or drop them."""
        fuse = self.options.fuse
        if fuse is None:
            # On a GPU, fused products save kernels: a fifth to a third of a compiled step. On a CPU they
            # save nothing, and splitting their results makes a compiled prefill 7% slower.
            fuse = self.options.compiling is not None and rank.start.device.type != "cpu"
        if fuse and not self.options.form:
            return rank
        return replace(rank, held_plan=replace(rank.held_plan, fused=()))


@dataclass(frozen=True)
class TensorParallel(Transform):
    """The modules of the plan get their local shapes and steps, for inference or for training."""

    options: LoadOptions
    stays_packed: bool
    is_adapted: bool

    def check(self, plan: Plan) -> None:
        """Check that the plan has the wanted form."""
        options = self.options
        if options.form:
            in_parts = options.data_parallel is not None
            require_form(
                plan,
                **options.form,
                stays_packed=self.stays_packed,
                in_parts=in_parts,
                adapted=self.is_adapted,
            )
        if options.gather_logits is False and plan.logits is None:
            raise PlanError(f"{options.path}: gather_logits=False, but the plan does not shard the logits")
        if options.gather_logits is False and plan.stages is not None:
            with_local_logits(plan)

    def shape(self, rank: RankModel) -> RankModel:
        """AttributeOverride, replace and wrap modules."""
        options, model = self.options, rank.model
        plan = replace(rank.plan, fused=rank.held_plan.fused)
        heads: Sequence[str] = ()
        if rank.attached is not None and plan.logits is not None:
            heads = rank.attached.in_place_of(plan.logits.module)
        if not options.form:
            parallelize(model, plan, rank.comm, options.gather_logits, rank.packed, heads)
            return rank
        stages = () if rank.place is None else rank.place.link.stages
        parallelize_for_training(
            model,
            plan,
            rank.comm,
            TrainingForm(**options.form, regather=options.regather, gather_logits=options.gather_logits),
            rank.packed,
            absent=[absent_modules(rank.plan, stage) for stage in stages] or (frozenset(),),
            heads=heads,
        )
        return rank


@dataclass(frozen=True)
class Generation(Transform):
    """``generate`` keeps the ranks in step."""

    config: Any
    all_stages: Launch
    gathers_logits: bool

    def finish(self, rank: RankModel) -> None:
        """Replace ``generate`` and the methods that belong to it."""
        link = None if rank.place is None else rank.place.link
        prepare_generation(rank.model, self.config, self.all_stages, self.gathers_logits, link)
