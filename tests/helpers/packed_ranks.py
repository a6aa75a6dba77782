"""Ranks of a quantized checkpoint, made without the converter's files: for tests of its modules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from converted import local_part
from packed_cases import MemoryCheckpoint, part
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.format.plan import ParameterPlan, Plan, global_shape, parameter_plans
from shardconv_runtime.format.slices import ranges
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.packed.formats import format_of_checkpoint
from shardconv_runtime.packed.quantizers import Quantized
from shardconv_runtime.packed.stored_weights import Found, WeightSlice
from shardconv_runtime.parallel.build import parallelize, retie
from shardconv_runtime.parallel.packed_modules import PackedModules
from torch import nn

import shardconv

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Checkpoint:
    """A quantized checkpoint, and a plan in which its packed parameters are packed."""

    directory: Path
    plan: Plan
    found: Mapping[str, Found]
    stored: MemoryCheckpoint

    @classmethod
    def of(cls, directory: Path, tp: int) -> Checkpoint:
        """With the plan of the plain model beside it, whose shards must end between groups."""
        stored = MemoryCheckpoint.of(directory)
        found = format_of_checkpoint(settings_of(directory), directory.name).find(stored)
        plan = shardconv.plan(directory.with_name(f"{directory.name}-plain"), tp)
        return cls(directory, with_packings(plan, found), found, stored)

    def build(self, comm: Communicator, dtype: torch.dtype = torch.float32) -> tuple[Any, int]:
        """A rank's model, and the bytes of what it was given."""
        config = transformers.AutoConfig.from_pretrained(self.directory)
        del config.quantization_config
        cls = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        model: Any = build_model(cls, config, dtype)
        entries = parameter_plans(self.plan)
        packed = PackedModules(Quantized(settings_of(self.directory), CPU, dtype), entries, comm)
        parallelize(model, self.plan, comm, packed=packed)
        num_bytes = sum(
            self._fill(model, packed, name, entry, comm, dtype) for name, entry in entries.items()
        )
        retie(model, self.plan)
        packed.finish()
        return model.eval(), num_bytes

    def _fill(
        self,
        model: Any,
        packed: PackedModules,
        name: str,
        entry: ParameterPlan,
        comm: Communicator,
        dtype: torch.dtype,
    ) -> int:
        if entry.packing is None:
            local = local_part(
                self.stored.values[name],
                replace(entry, dtype=str(dtype).removeprefix("torch.")),
                comm.mesh,
                comm.rank,
            )
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            if attribute in module._parameters:
                module._parameters[attribute] = nn.Parameter(local, requires_grad=False)
            else:
                module._buffers[attribute] = local
            return local.nbytes
        held = WeightSlice(
            global_shape(entry), tuple(ranges(dim, comm.mesh, comm.rank) for dim in entry.dims)
        )
        full = self.stored.stored(self.found[name])
        tensors = {t.name: part(full[t.name], t, held) for t in entry.packing.tensors}
        packed.fill(name, tensors, held)
        return sum(tensor.nbytes for tensor in tensors.values())


def settings_of(directory: Path) -> dict[str, Any]:
    """How config.json says that the weights are quantized."""
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())["quantization_config"]
    return found


def with_packings(plan: Plan, found: Mapping[str, Found]) -> Plan:
    """A plan with an entry of its own for each parameter, packed where the checkpoint packs it."""
    entries = [
        replace(entry, names=(name,), packing=found[name].packing if name in found else None)
        for name, entry in parameter_plans(plan).items()
    ]
    return replace(plan, parameters=tuple(entries))


def held_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """All tensors of a model that hold weights, quantization states included."""
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None:
                continue
            yield getattr(tensor, "qdata", tensor)
            for state in (tensor, getattr(tensor, "quant_state", None)):
                parts = (getattr(state, name, None) for name in ("SCB", "scale", "absmax", "code", "offset"))
                yield from (value for value in parts if isinstance(value, torch.Tensor))
            nested = getattr(getattr(tensor, "quant_state", None), "state2", None)
            if nested is not None:
                yield from (nested.absmax, nested.code)


def held_bytes(model: nn.Module) -> int:
    """Bytes of all tensors of a model that hold weights."""
    return sum(tensor.nbytes for tensor in {id(t): t for t in held_tensors(model)}.values())


def in_float32(directory: Path) -> Any:
    """The model that transformers loads; it leaves some plain weights in the checkpoint's dtype."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return model.eval()
