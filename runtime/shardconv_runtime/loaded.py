"""The record that a loaded model keeps of its loading; saving and training need it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils.generic import ModelOutput

from .comm.mesh import Launch
from .errors import PlanError
from .files.manifest import Manifest
from .format import stage_names
from .format.plan import Plan
from .format.plan_json import of_stage

if TYPE_CHECKING:

    class LoadedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """A model of transformers that one rank has loaded, with the methods that its own class has.

        It is for type checkers and editors: at run time the model keeps its original class.
        """

        @overload
        def generate(
            self,
            inputs: Tensor | None = None,
            generation_config: GenerationConfig | None = None,
            *,
            return_dict_in_generate: Literal[True],
            **options: Any,
        ) -> ModelOutput: ...
        @overload
        def generate(
            self,
            inputs: Tensor | None = None,
            generation_config: GenerationConfig | None = None,
            *,
            return_dict_in_generate: Literal[False] | None = None,
            **options: Any,
        ) -> Tensor: ...
        def generate(self, inputs: Any = None, generation_config: Any = None, **options: Any) -> Any:
            """Return the ids of the inputs with new tokens, int64 ``[batch, length]``, on every rank."""

else:
    LoadedModel = PreTrainedModel

LOADED_ATTRIBUTE = "_shardconv_loaded"


@dataclass(frozen=True)
class Loaded:
    """The directory, plan and ranks from which one rank's model was loaded."""

    directory: Path
    """The converted directory, absolute."""
    manifest: Manifest
    """The manifest as it was when the model was loaded."""
    plan: Plan
    launch: Launch
    """The ranks of the model, and this one among them."""
    packed: bool = False
    """Its packed parameters are held, and computed with, as they are stored."""
    building: Any = field(default=None, repr=False)
    """The ``loading.building.ModelBuilder`` that made it."""
    attached: Any = field(default=None, repr=False)
    """The ``adapters.attaching.Attached`` of its adapters, without their tensors; None without adapters."""
    stage: Any = field(default=None, repr=False)
    """The ``parallel.stage_model.StageModel`` of this process; None for a model without stages."""

    @property
    def rank(self) -> int:
        """Return the rank in the plan; the ranks of all stages have the same numbers."""
        return self.launch.rank % self.plan.tp

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages of this process; without stages, the only one."""
        return (0,) if self.stage is None else tuple(self.stage.link.stages)

    @property
    def place(self) -> int:
        """Return the position of this process among the processes that share the stages."""
        return 0 if self.stage is None else int(self.stage.link.place)

    @cached_property
    def held_plan(self) -> Plan:
        """Return the plan of the parameters that this process holds, by their names in its model."""
        if self.stage is None:
            return self.plan

        return of_stage(self.plan, self.stages)

    @cached_property
    def held_before(self) -> Mapping[str, str]:
        """Return the parameters that earlier stages hold too: first name -> name in this model."""
        if self.stage is None:
            return {}
        return stage_names.held_before(self.plan, self.place, self.stage.link.num_places)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this record: a copy of a model shares its origin and its process group."""
        return self


def remember(model: nn.Module, value: Loaded) -> None:
    """Record on a model where it came from."""
    setattr(model, LOADED_ATTRIBUTE, value)


def loaded(model: nn.Module) -> Loaded:
    """Return where a model came from."""
    value = getattr(unwrapped(model), LOADED_ATTRIBUTE, None)
    if not isinstance(value, Loaded):
        raise PlanError(
            f"this {type(model).__name__} was not loaded by shardconv_runtime.load, so it is not known "
            "how its parameters are sharded; pass the model that load returned"
        )
    return value


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of ``torch.compile``, ``DistributedDataParallel`` and peft."""
    peft = sys.modules.get("peft")
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        elif peft is not None and isinstance(model, peft.PeftModel):
            inner = model.get_base_model()
        if inner is None:
            return model
        model = inner
