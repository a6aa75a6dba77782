"""TRL's trainers for a sharded model: supervised fine-tuning, preferences (DPO) and reward models.

    from shardconv_runtime.integrations import ShardedSFTTrainer

TRL replaces the forward pass of a model by one that multiplies hidden states with the weights of the head. A
sharded model has a shard of these. Here the model computes its logits itself, which ``load`` gathers, and
TRL's results are computed from them. It needs ``pip install trl``.
"""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainingArguments
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from ..errors import OptionError, RefusedCallError
from ..loaded import loaded
from ..training.loss_parallel import read_logits
from .trainer import ShardedTrainer

IGNORED = -100
"""Label of a position that has no loss."""

REFERENCE = "ref"
"""TRL's name of the adapter before training."""

MODELS = ("model", "ref_model")
"""Attributes of TRL's trainers that may have TRL's forward pass."""


class _Sharded(ShardedTrainer):
    """A ``ShardedTrainer`` before one of TRL's trainers."""

    def __init__(self, model: Any, args: TrainingArguments, **options: Any) -> None:
        models = {name: _base(each) for name, each in {"model": model, **options}.items() if name in MODELS}
        forwards = {name: each.forward for name, each in models.items() if each is not None}
        for name, each in models.items():
            if each is not None and loaded(each).building.options.gather_logits is False:
                raise RefusedCallError(
                    f"TRL reads logits of all tokens of {name}: load it without gather_logits=False"
                )
        if getattr(args, "sync_ref_model", False) or getattr(args, "precompute_ref_log_probs", False):
            raise OptionError(
                "sync_ref_model and precompute_ref_log_probs copy whole weights; leave them out"
            )
        if getattr(args, "use_liger_kernel", False) or getattr(args, "cast_lm_head_to_fp32", False):
            raise OptionError(
                "use_liger_kernel and cast_lm_head_to_fp32 bring a head of whole weights; leave them out"
            )
        super().__init__(model, args, **options)
        for name, forward in forwards.items():
            base = _base(getattr(self, name))
            if "forward" in vars(base):  # TRL has replaced it
                with_scores(base, forward, getattr(self, "temperature", 1.0))


class ShardedSFTTrainer(_Sharded, SFTTrainer):  # type: ignore[misc]  # TRL is not typed for mypy
    """An ``SFTTrainer`` of this process's part of a model, with or without an adapter."""


class ShardedDPOTrainer(_Sharded, DPOTrainer):  # type: ignore[misc]
    """A ``DPOTrainer``.

    The reference is ``ref_model``, the model loaded once more, or of a model with an adapter the same adapter
    before training: ``load(out, adapter={"default": adapter, "ref": adapter}, training=True, ...)``.
    """

    def __init__(self, model: Any, args: TrainingArguments, **options: Any) -> None:
        if options.get("ref_model") is not None:
            super().__init__(model, args, **options)
            return
        if _base(model) is model:
            raise RefusedCallError("without an adapter, DPO needs the model loaded once more, as ref_model=")
        if REFERENCE not in model.peft_config:
            raise RefusedCallError(
                "DPO compares with the adapter before training, which needs a second copy: load the "
                f'model with adapter={{"default": DIRECTORY, "{REFERENCE}": DIRECTORY}}'
            )
        refuse = model.add_adapter
        model.add_adapter = lambda name, config: None  # TRL adds the reference, which is there
        try:
            super().__init__(model, args, **options)
        finally:
            model.add_adapter = refuse


class ShardedGRPOTrainer(_Sharded, GRPOTrainer):  # type: ignore[misc]
    """A ``GRPOTrainer`` of one replica, whose answers ``generate`` writes with the weights that are trained.

    With several replicas, each would answer for another number of steps, and FSDP gathers weights at each.
    """

    def __init__(self, model: Any, args: TrainingArguments, *, mesh: DeviceMesh, **options: Any) -> None:
        if mesh.size() != mesh["tp"].size():
            raise RefusedCallError(
                f"{mesh}: GRPO writes answers in one replica; use as many processes as the tp"
            )
        if getattr(args, "use_vllm", False) or getattr(args, "use_transformers_paged", False):
            raise OptionError("use_vllm and use_transformers_paged keep other weights; leave them out")
        if getattr(args, "beta", 0.0):
            raise OptionError("beta= compares with a second model, which GRPO loads whole; leave it out")
        by_group = getattr(args, "multi_objective_aggregation", None) in (None, "sum_then_normalize")
        if getattr(args, "scale_rewards", "group") == "batch" or not by_group:
            raise RefusedCallError(
                "scale rewards by groups: TRL has the answers of a batch once for each rank"
            )
        args = copy.copy(args)
        # TRL counts the prompts of all processes, and the processes of one replica have the same prompts.
        args.generation_batch_size //= mesh.size()
        super().__init__(model, args, mesh=mesh, **options)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, but count each token and each answer once, since all ranks have the same."""
        tp, answers = self.get_tp_size(), self.args.generation_batch_size
        # A standard deviation divides by the number of values less one, of which there are tp times as many.
        once = math.sqrt((tp * answers - 1) / (tp * (answers - 1))) if answers > 1 else 1.0
        for metrics in self._metrics.values():
            for name, values in metrics.items():
                if name == "num_tokens":
                    metrics[name] = [self.state.num_input_tokens_seen // tp]
                elif name == "reward_std" or (name.startswith("rewards/") and name.endswith("/std")):
                    metrics[name] = [once * value for value in values]
        super().log(*args, **kwargs)


class ShardedRewardTrainer(_Sharded, RewardTrainer):  # type: ignore[misc]
    """A ``RewardTrainer`` of a model for sequence classification with one label."""


def _base(model: Any) -> Any:
    """Return the model of transformers in a ``PeftModel``; others as they are."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def with_scores(model: Any, forward: Callable[..., Any], temperature: float) -> None:
    """Let a model return the log-probabilities of labels if TRL asks for them, otherwise its own results.

    Args:
        model: a causal language model, whose logits are of all tokens of the vocabulary.
        forward: the forward method of the model, before TRL replaced it.
        temperature: the divisor of the logits.
    """

    @functools.wraps(type(model).forward)  # generate looks at the signature
    def scored(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        labels_given = {
            "labels": labels,
            "shift_labels": shift_labels,
            "num_items_in_batch": num_items_in_batch,
        }
        if not fused_lm_head:
            return forward(*args, **kwargs, **{k: v for k, v in labels_given.items() if v is not None})
        read_logits(self)
        outputs = forward(*args, **{**kwargs, "use_cache": False})
        logits = outputs.logits
        if shift_labels is None:
            assert labels is not None, "TRL gives labels, shifted or not"
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        result = scores(logits / temperature, shift_labels, num_items_in_batch)
        if kwargs.get("output_router_logits"):
            result.aux_loss = outputs.aux_loss
        return result

    model.forward = types.MethodType(scored, model)


def scores(logits: Tensor, labels: Tensor, num_items: Any = None) -> FusedCausalLMOutput:
    """Return the values that TRL's trainers read at each position; 0 for positions without a label.

    Args:
        logits: ``[B, T, V]``.
        labels: ``[B, T]``, of the tokens after them; -100 for none.
        num_items: the divisor of the sum of the losses; by default the number of labels.
    """
    mask = labels != IGNORED
    log_probs = torch.log_softmax(logits.float() if logits.dtype != torch.float64 else logits, dim=-1)
    targets = labels.clamp(min=0)[..., None]
    of_labels = log_probs.gather(-1, targets)[..., 0]
    with torch.no_grad():
        sum_of_squares = (2 * log_probs).logsumexp(-1)
        is_top1 = (log_probs.argmax(-1) == labels) & mask
        mean_logits = logits.to(log_probs.dtype).mean(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    masked = [x.masked_fill(~mask, 0) for x in (of_labels, entropy, sum_of_squares, mean_logits)]
    total = mask.sum().clamp(min=1) if num_items is None else num_items
    return FusedCausalLMOutput(
        loss=-masked[0].sum() / total,
        log_probs=masked[0],
        entropy=masked[1],
        log_sum_sq_probs=masked[2],
        mean_logits=masked[3],
        is_top1=is_top1,
        label_mask=mask,
    )
