"""``generate_batch`` and the manager of continuous batching on every rank, see transformers' documentation.

``generate_batch`` is called alike on every rank, as ``generate`` is. A manager is made on every rank, too;
only rank 0 adds requests, and the others take the steps that these need until rank 0 stops.
"""

from __future__ import annotations

import copy
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

from torch import nn
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils.logging import tqdm

from ..comm.agreement import agree, exchange
from ..comm.call_agreement import brief_digest, require_same_call
from ..comm.mesh import Launch
from ..default_modes import in_default_modes
from ..errors import OptionError, PlanError, RefusedCallError
from ..pp.stage_link import StageLink
from .batching_manager import PAGE_SIZE, RankBatchingManager, require_idle
from .paged_model import (
    CachedHeads,
    PagedCheck,
    PagedModel,
    RequestCheck,
    attempt,
    cached_heads,
    kinds_of_layers,
    kinds_of_stages,
)
from .stage_batching import StagedBatchingManager

CPU_MEMORY = 0.6
"""Share of a machine's memory for the caches of all ranks on its CPUs; transformers' for one process."""

SAFETY_MARGIN = 0.15
"""Share of the cache that has to be free for a request to begin beside others, unless the caller sets another
one; transformers'."""

NOT_IN_BATCHES = {
    "num_beams": (None, 1),
    "stop_strings": (None,),
    "max_time": (None,),
    "prompt_lookup_num_tokens": (None,),
    "guidance_scale": (None, 1),
}
"""Options that transformers' continuous batching ignores, with the values that ask for nothing."""

NOT_ON_RANKS = ("use_cuda_graph", "use_async_batching")
"""Options of transformers' continuous batching that record collectives, or run ahead of a recorded call."""

NOT_ON_STAGES = (
    *NOT_ON_RANKS,
    "varlen_compile_config",
    "decode_compile_config",
    "default_compile_level",
)
"""Options of transformers' continuous batching that record or compile a call, in which stages send."""


def prepare_batches(
    model: nn.Module, start: Launch, gather_logits: bool, link: StageLink | None = None
) -> None:
    """Have continuous batching know that the model is one of several ranks, in place."""
    if hasattr(model, "init_continuous_batching"):
        make = MethodType(_manager_of_rank(start, gather_logits, link), model)
        model.init_continuous_batching = make  # type: ignore[assignment]
        model.continuous_batching_context_manager = MethodType(_context, model)  # type: ignore[assignment]
        model.generate_batch = MethodType(_generate_batch(start), model)  # type: ignore[assignment]


def _context(self: Any, *args: Any, num_microbatches: int | None = None, **kwargs: Any) -> Any:
    """Return transformers' context of a manager, made with the model's ``init_continuous_batching``."""
    make = partial(self.init_continuous_batching, num_microbatches=num_microbatches)
    maker = SimpleNamespace(init_continuous_batching=make)
    return type(self).continuous_batching_context_manager(maker, *args, **kwargs)


def _manager_of_rank(start: Launch, gather_logits: bool, link: StageLink | None) -> Callable[..., Any]:
    checks: dict[object, tuple[CachedHeads, PagedCheck]] = {}

    @in_default_modes  # the manager's thread writes to its tensors, and inherits no mode
    def init_continuous_batching(
        self: Any,
        generation_config: Any | None = None,
        continuous_batching_config: Any | None = None,
        workload_hints: Any | None = None,
        num_microbatches: int | None = None,
    ) -> RankBatchingManager:
        if not gather_logits:
            raise RefusedCallError(
                "continuous batching needs full logits; load the model with gather_logits=True"
            )
        require_idle(start)
        generation_config = copy.deepcopy(generation_config or self.generation_config)
        config = _with_memory_of_rank(continuous_batching_config, start)
        arguments = {"generation_config": generation_config, "continuous_batching_config": vars(config)}
        require_same_call(
            start, "init_continuous_batching", arguments | {"num_microbatches": num_microbatches}
        )
        if link is None:
            if num_microbatches is not None:
                raise OptionError("num_microbatches is about the stages of a pipeline; leave it out")
            in_flight = 1
        else:
            if num_microbatches is not None and num_microbatches < 1:
                raise OptionError(
                    f"num_microbatches={num_microbatches}: at least one group of requests is computed at a "
                    "time"
                )
            if name := _asked(config, NOT_ON_STAGES):
                raise OptionError(
                    f"{name} of the ContinuousBatchingConfig does not know stages yet; leave it out"
                )
            in_flight = link.count if num_microbatches is None else num_microbatches
        if start.world_size > 1:
            _record_nothing(config, generation_config)
        # What was found, and which prompts were compared, holds for this model until it is changed.
        state = (self.dtype, self.device, self.config._attn_implementation, len(list(self.modules())))
        if state not in checks:
            heads, error = attempt(lambda: cached_heads(self, link))
            agree(start, error)
            checks[state] = (heads, PagedCheck(link))
        heads, check = checks[state]
        kinds: list[str] = []
        if link is not None:
            kinds = kinds_of_stages(exchange(start, kinds_of_layers(self, heads.layers)), start.rank)
        paged = PagedModel(self, heads, check, link, kinds)
        attention = self.config._attn_implementation
        make = type(self).init_continuous_batching
        manager, error = attempt(lambda: make(paged, generation_config, config, workload_hints))
        if isinstance(manager, RankBatchingManager):
            # A manager that was kept must generate in the way that is asked for now.
            asked, error = (generation_config.to_dict(), in_flight), None
            if (manager.generation_config.to_dict(), manager.num_microbatches) != asked:
                error = PlanError(
                    "the manager of an earlier call was kept (persistent_manager=True), with another "
                    "generation config or num_microbatches; call "
                    "model.destroy_cached_continuous_batching_manager() first"
                )
        elif manager is not None:
            if link is None:
                manager = RankBatchingManager.adopt(manager, start, attention)
            else:
                manager = StagedBatchingManager.on_stage(manager, start, attention, link, in_flight)
            error = _dropped(manager, self, generation_config)
        try:
            agree(start, error)
        except Exception:
            if self.config._attn_implementation != attention:  # 5.17 changes it when a manager is made
                self.set_attn_implementation(attention)
            raise
        adopted: RankBatchingManager = manager
        if isinstance(workload_hints, KnownRequests) and start.device.type == "cpu":
            blocks = _enough_blocks(paged, config, workload_hints)
            if blocks is not None:
                adopted.most_blocks = max(exchange(start, blocks))
        return adopted

    return init_continuous_batching


@dataclass
class KnownRequests(WorkloadHints):  # type: ignore[misc]
    """The hints of a call that gives all of its requests."""

    lengths: Sequence[int] = ()
    """Tokens of each request, new ones included."""


def _enough_blocks(paged: PagedModel, config: Any, requests: KnownRequests) -> int | None:
    """Return a size of the cache with which no request waits for another one; None if the caller chose it."""
    margin = SAFETY_MARGIN if config.safety_margin is None else config.safety_margin
    if config.num_blocks is not None or margin >= 1 or PAGE_SIZE != "page_size":  # 5.17 counts other blocks
        return None
    return math.ceil(paged.blocks_for(requests.lengths, config.page_size) / (1 - margin))


_OF_MANAGER = {"continuous_batching_config", "persistent_manager", "warmup", "num_microbatches"}
"""Options of ``generate_batch`` that are for its manager."""


def _generate_batch(start: Launch) -> Callable[..., Any]:
    @in_default_modes
    def generate_batch(
        self: Any,
        inputs: Sequence[Sequence[int]],
        generation_config: Any | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        for name in sorted(options.keys() - _OF_MANAGER):
            if hasattr(self.generation_config, name):
                remedy = "set it in a GenerationConfig, and pass that as generation_config"
            else:
                remedy = "use generate (for grammars, or response_format of the server, docs/serving.md)"
            raise OptionError(f"generate_batch takes no {name}; {remedy}")
        prompts = [[int(token) for token in prompt] for prompt in inputs]
        arguments = {"inputs": brief_digest(prompts, "prompts"), "max_new_tokens": max_new_tokens}
        require_same_call(start, "generate_batch", arguments)
        if not prompts:
            return {}
        config = generation_config or self.generation_config
        limit = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        check = RequestCheck.of(self)
        for prompt in prompts:
            check.require(prompt, limit)
        num_each = config.num_return_sequences or 1
        hints = WorkloadHints(max(map(len, prompts)), limit or 0, len(prompts) * num_each)
        if limit is not None and not options.get("persistent_manager"):  # later calls have other requests
            lengths = [len(prompt) + limit for prompt in prompts for _ in range(num_each)]
            hints = KnownRequests(**vars(hints), lengths=lengths)
        managing = self.continuous_batching_context_manager(
            config,
            workload_hints=hints,
            **options,
        )
        with managing as manager:
            manager.answer_on_all_ranks()
            names = manager.add_requests(prompts, limit, record_timestamps=record_timestamps)
            names = [name for parent in names for name in _with_children(parent, config)]
            return _answers(manager, names, progress_bar and start.rank == 0)

    return generate_batch


def _with_children(name: str, config: Any) -> list[str]:
    """Return the names of the answers to a request, as transformers gives them."""
    return [*(f"{name}__child#{i}" for i in range((config.num_return_sequences or 1) - 1)), name]


def _answers(manager: RankBatchingManager, names: list[str], show_progress: bool) -> dict[str, Any]:
    """Return all answers in the order of ``names``; an error instead of a part of them."""
    answers: dict[str, Any] = {}
    with tqdm(total=len(names), disable=not show_progress, unit="request") as progress:
        while len(answers) < len(names):
            answer = manager.get_result(timeout=1)
            if answer is None:
                manager.require_running()
            elif answer.is_finished():
                if answer.error is not None:
                    manager.require_running()
                    raise RefusedCallError(f"request {answer.request_id} failed: {answer.error}")
                answers[answer.request_id] = answer
                progress.update(1)
    return {name: answers[name] for name in names}


def _with_memory_of_rank(config: Any | None, start: Launch) -> Any:
    """Return a copy of the config; ranks that share the memory of a machine each take their share of it."""
    config = ContinuousBatchingConfig() if config is None else copy.deepcopy(config)
    if start.device.type == "cpu" and config.max_memory_percent is None:
        hosts = exchange(start, platform.node())
        config.max_memory_percent = CPU_MEMORY / max(map(hosts.count, hosts))
    return config


def _record_nothing(config: Any, generation_config: Any) -> None:
    """Turn CUDA graphs off, in place, which transformers turns on by default if attention allows them."""
    name = _asked(config, NOT_ON_RANKS)
    if name is None:
        configs = {n: getattr(config, n, None) for n in ("varlen_compile_config", "decode_compile_config")}
        configs["compile_config"] = getattr(generation_config, "compile_config", None)
        name = next((n for n, compiling in configs.items() if compiling and _records(compiling)), None)
    if name is not None:
        raise OptionError(
            f"{name} asks for CUDA graphs, in which nothing ends the wait for a lost rank; "
            "leave it out for several ranks"
        )
    config.use_cuda_graph = config.use_async_batching = False


def _asked(config: Any, names: Sequence[str]) -> str | None:
    """Return the first of these options that asks for something."""
    nothing = (None, False, 0, (False, False))
    return next((name for name in names if getattr(config, name, None) not in nothing), None)


def _records(compiling: Any) -> bool:
    """Return whether a ``CompileConfig`` has the compiler record CUDA graphs."""
    from torch._inductor import list_mode_options  # takes seconds

    options = {**list_mode_options().get(compiling.mode or "default", {}), **(compiling.options or {})}
    return bool(options.get("triton.cudagraphs"))


def _dropped(manager: Any, model: Any, config: Any) -> PlanError | None:
    """Return an error if the manager would ignore an option of the generation config."""
    processors = list(manager.logit_processor.logits_processor)
    asked = list(model._get_logits_processor(config))
    if len(processors) < len(asked):
        kinds = {type(processor) for processor in processors}
        name = next((type(p).__name__ for p in asked if type(p) not in kinds), "one of them")
        return PlanError(f"continuous batching has no {name}; leave out what asks for it, or use generate")
    for name, nothing in NOT_IN_BATCHES.items():
        if getattr(config, name, None) not in nothing:
            return PlanError(f"continuous batching has no {name}; leave it out, or use generate")
    return None
