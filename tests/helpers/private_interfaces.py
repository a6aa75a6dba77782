"""The private interfaces of torch, transformers, TRL and vLLM that the two packages use, and a scan for them.

Private interfaces can change in any release. ``tests/test_private_interfaces.py`` checks that this list is
complete, and that everything on it exists in the installed versions; ``scripts/versions`` runs it with the
oldest, the pinned and the newest. ``shardconv/exports/vllm_calls.py`` also compares signatures of vLLM.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

from places import ROOT

PACKAGES = ("shardconv", "runtime/shardconv_runtime")
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "huggingface_hub", "safetensors", "vllm")
PUBLIC = {
    "_exit": "os", "_getframe": "sys", "_replace": "collections.namedtuple",
}  # fmt: skip
"""Documented names of the standard library that begin with an underscore."""

MODULES = {
    "torch._dynamo": "its config, its errors and its cache, for compiled models",
    "torch._inductor": "the options of compiler modes",
    "torch._ops": "OpOverload, the type of operators that a dispatch mode is given",
    "torch.distributed._functional_collectives": "collectives that can be compiled",
    "torch.distributed._symmetric_memory": "sums in symmetric memory",
    "torch.utils._python_dispatch": "TorchDispatchMode, which torch documents there",
    "torch.utils._pytree": "nested containers of tensors",
    "torch.ops._c10d_functional": "operators of collectives that can be compiled",
    "torch.testing._internal.distributed.fake_pg": "a process group of one process that appears to be many",
}
"""Modules and namespaces, with what is used in them."""

NAMES = {
    # torch: tensors, operators
    "torch.Tensor._make_wrapper_subclass": "tensors without bytes",
    "torch.ops.aten._local_scalar_dense": "the operator of item()",
    "torch.ops.aten._scaled_mm": "products of FP8 are kept by activation checkpointing",
    # torch: modes, autograd
    "torch._C.DisableTorchFunction": "code that a trace does not see",
    "torch._C._current_graph_task_id": "calls in a backward pass are no calls of the user",
    "torch._C._autograd._top_saved_tensors_default_hooks": "whether others keep activations in another way",
    "torch.utils._python_dispatch._disable_current_modes": "real tensors are made while a trace goes on",
    # torch: distributed checkpoints
    "torch.distributed.checkpoint.state_dict._verify_options": "refuses what takes parts for full tensors",
    "torch.distributed.checkpoint.state_dict_saver._stateful_to_state_dict": "the same for saving",
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict": "the same for loading",
    # torch: modules
    "torch.nn.Module._call_impl": "what a compiled model compiles",
    "torch.nn.Module._compiled_call_impl": "whether the user has compiled a model",
    "torch.nn.Module()._forward_hooks": "hooks of a user come after the steps of the plan",
    "torch.nn.Module()._forward_pre_hooks": "the same",
    "torch.nn.Module()._non_persistent_buffers_set": "buffers that are in no checkpoint",
    "torch.nn.init._no_grad_trunc_normal_": "initial weights are recorded",
    "torch.optim.optimizer._foreach_supported_types": "parameters that optimizers take all at once",
    "torch.nn.utils.clip_grad._get_total_norm": "accelerate and Trainer compute norms with it",
    # torch: process groups
    "torch.distributed.ProcessGroup._get_backend": "its time limit",
    "torch.distributed.distributed_c10d._new_process_group_helper": "a group that not all processes make",
    "torch.distributed.distributed_c10d._world.pg_group_ranks": "the same",
    "torch._dynamo.eval_frame._debug_get_cache_entry_list": "how many graphs were recorded",
    # transformers: models
    "transformers.PreTrainedConfig._attn_implementation": "the attention of a model",
    "transformers.PreTrainedConfig:_attn_implementation_internal": "the same, without its setter",
    "transformers.PreTrainedConfig:_experts_implementation": "how experts are run",
    "transformers.PreTrainedModel._init_weights": "initial weights",
    "transformers.initialization:_is_hf_initialized": "weights that were loaded are not drawn anew",
    "transformers.PreTrainedModel._keys_to_ignore_on_save": "tensors that a checkpoint lacks",
    "transformers.core_model_loading:_weight_conversions": "names of modules in checkpoints",
    # transformers: generate
    "transformers.utils.chat_template_utils._get_template_variables": "arguments of a chat template",
    "transformers.GenerationMixin._get_candidate_generator": "assistants propose on one rank",
    "transformers.GenerationMixin._get_logits_processor": "options that batches ignore are refused",
    "transformers.GenerationMixin._get_stopping_criteria": "rank 0 decides the time",
    "transformers.GenerationMixin._optimize_model_for_decode": "the loop of compiled decoding",
    "transformers.GenerationMixin._prefill": "the same",
    "transformers.GenerationMixin._prepare_generation_config": "the same",
    "transformers.GenerationMixin._sample": "the same",
    "transformers.GenerationMixin._update_model_kwargs_for_generation": "the same",
    # transformers: continuous batching
    "transformers.ContinuousMixin:_cached_continuous_batching_manager": "a manager that is kept",
    "transformers.ContinuousBatchingManager._fail_all_remaining_requests": "an error ends all requests",
    "trl.SFTTrainer:_metrics": "metrics of all replicas",
    # vLLM
    "vllm.distributed.parallel_state._NODE_COUNT": "the groups of one rank, without the others",
    "vllm.distributed.parallel_state._WORLD": "the same",
    "vllm.distributed.parallel_state._register_group": "the same",
    "vllm.model_executor.model_loader.sharded_state_loader.ShardedStateLoader._filter_subtensors": "names",
}
"""What is used for what. The attribute after a colon exists only on objects: the source has it."""

_BATCHING = "transformers.generation.continuous_batching"
MOVED = {
    "transformers.initialization": "transformers.initialization",
    "transformers.core_model_loading": "transformers.core_model_loading",
    "transformers.GenerationMixin": "transformers.generation.utils",
    "transformers.ContinuousMixin": f"{_BATCHING}.continuous_api",
    "transformers.ContinuousBatchingManager": f"{_BATCHING}.continuous_api",
    "transformers.DistributedHelper": f"{_BATCHING}.distributed",
    "transformers.PreTrainedModel": "transformers.modeling_utils",
}
"""Classes that are not exported, or whose attributes are those of a module, with the module."""


def exists(name: str) -> bool:
    """Whether an entry is in the installed version."""
    owner, colon, attribute = name.partition(":")
    if colon:
        module = importlib.import_module(MOVED.get(owner, owner.rpartition(".")[0]))
        if owner not in MOVED:
            module = inspect.getmodule(getattr(module, owner.rpartition(".")[2])) or module
        return attribute in inspect.getsource(module)
    return _resolved(name) is not _MISSING


_MISSING = object()


def _resolved(name: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            is_call = part.endswith("()")
            if not is_call and isinstance(found, type) and part in getattr(found, "__annotations__", {}):
                return part
            found = getattr(found, part.removesuffix("()"), _MISSING)
            if found is _MISSING:
                return _MISSING
            found = found() if is_call else found
        return found
    return _MISSING


@cache  # parses all files
def used() -> dict[str, set[str]]:
    """Private names that the packages use and do not define -> the files; a module is named in full."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    own = {name for tree in trees.values() for name in _defined(tree)} | set(PUBLIC)
    found: dict[str, set[str]] = defaultdict(set)
    for file, tree in trees.items():
        for name in _foreign(tree):
            if name.rpartition(".")[2] not in own:
                found[name].add(file)
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _foreign(tree: ast.Module) -> Iterator[str]:
    """Private modules that are imported, in full, and private attributes and names."""
    for node in ast.walk(tree):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.attr
        for name in imported:
            if name.split(".")[0] not in LIBRARIES:
                continue
            parts = name.split(".")
            first = next((i for i, part in enumerate(parts) if _is_private(part)), None)
            if first is not None:
                yield ".".join(parts[: first + 1])
                yield from (part for part in parts[first + 1 :] if _is_private(part))
