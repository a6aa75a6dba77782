"""Hooks of a trainer on inner modules: noise on embeddings, a loss of what a norm returns.

NEFTune, as transformers and TRL install it, is a forward hook on the input embedding. Where ranks have terms
of a sum there, each added noise before the sum; with sequence parallelism each drew it for its part. A value
head's loss of the last norm was another one on each rank.
https://github.com/huggingface/transformers/pull/35799 is about such noise where samples are packed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import CONFIGS, save_causal
from one_and_ranks import Use, of_one, of_ranks, require_refused, require_same
from torch import Tensor
from transformers.integrations.neftune import activate_neftune

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35], [35, 8, 9, 7, 93, 2, 1]])
"""Of a length that two ranks do not divide."""


def trained(model: Any, more: Callable[[], Tensor] | None = None) -> Tensor:
    """The loss, and the gradients of the norms; the second of two passes, when all is known of hooks."""
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(IDS, labels=IDS).loss.double()
        loss = loss if more is None else loss + more()
        loss.backward()
    norms = [p.grad for name, p in model.named_parameters() if "norm" in name]
    return torch.cat([loss.detach().reshape(1), *(norm.double().flatten() for norm in norms)])


def on(model: Any, name: str, method: str, hook: Callable[..., Any], **options: Any) -> None:
    getattr(model.get_submodule(name), method)(hook, **options)


def kept(model: Any, name: str, *, before: bool = False) -> Callable[[], Tensor]:
    """A loss of what a module returns, or is given."""
    found: list[Tensor] = []

    def keep(module: Any, *given: Any) -> None:
        value = given[-1]
        found.append(value if isinstance(value, Tensor) else value[0])

    on(model, name, "register_forward_pre_hook" if before else "register_forward_hook", keep)
    return lambda: (found[-1].double() ** 2).mean()


def neftune(model: Any) -> Tensor:
    activate_neftune(model, 5.0)
    return trained(model)


def neftune_of_a_copy(model: Any) -> Tensor:
    other = copy.deepcopy(model)
    activate_neftune(other, 5.0)
    return trained(other)


def noise_that_is_prepended(model: Any) -> Tensor:
    noise = lambda module, args, output: output + torch.randn_like(output)  # noqa: E731
    on(model, "model.embed_tokens", "register_forward_hook", noise, prepend=True)
    return trained(model)


def noise_in_place(model: Any) -> Tensor:
    def add(module: Any, args: Any, output: Tensor) -> None:
        output += 0.5

    on(model, "model.embed_tokens", "register_forward_hook", add)
    return trained(model)


def inputs_that_require_gradients(model: Any) -> Tensor:
    model.get_input_embeddings().requires_grad_(False)
    model.enable_input_require_grads()
    return trained(model)


def loss_of_the_norm(model: Any) -> Tensor:
    return trained(model, kept(model, "model.norm"))


def loss_before_the_norm(model: Any) -> Tensor:
    return trained(model, kept(model, "model.norm", before=True))


def loss_of_an_inner_norm(model: Any) -> Tensor:
    return trained(model, kept(model, "model.layers.1.input_layernorm"))


def loss_of_the_base_model(model: Any) -> Tensor:
    return trained(model, kept(model, "model"))


def halved_before_the_head(model: Any) -> Tensor:
    on(model, "lm_head", "register_forward_pre_hook", lambda module, args: (args[0] * 0.5,))
    return trained(model)


def scaled_norm(model: Any) -> Tensor:
    on(model, "model.norm", "register_forward_hook", lambda module, args, output: output * 0.5)
    return trained(model)


def recomputed(model: Any) -> Tensor:
    """A layer whose hooks run again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return trained(model, kept(model, "model.layers.1.input_layernorm"))


def ids_of_the_embedding(model: Any) -> Tensor:
    found: list[Tensor] = []
    on(model, "model.embed_tokens", "register_forward_hook", lambda m, args, out: found.append(args[0]))
    return torch.cat((trained(model), found[0].double().flatten()))


def compiled(model: Any) -> Tensor:
    """Noise, and a loss, in a model that was never called before it is compiled."""
    activate_neftune(model, 5.0)
    more = kept(model, "model.norm")
    return trained(torch.compile(model, backend="aot_eager"), more)


def readable_outputs(model: Any) -> Tensor:
    """What hooks are given on every module that takes one, by the unsharded model on the same modules."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def note(module: Any, args: Any, output: Any) -> None:
            first = output if isinstance(output, Tensor) else output[0]
            outputs[name] = first.detach().double().flatten()

        return note

    for name in HOOKED:
        on(model, name, "register_forward_hook", keep(name))
    return torch.cat((trained(model), *(outputs[name] for name in HOOKED)))


HOOKED = (
    "model",
    "model.embed_tokens",
    *(f"model.layers.1.{name}" for name in ("input_layernorm", "self_attn", "mlp")),
    "model.layers.1",
    "model.norm",
)
"""Modules whose outputs are replicated, or sharded over the sequence, in plans of Llama."""


RIGHT = (
    neftune,
    neftune_of_a_copy,
    noise_that_is_prepended,
    noise_in_place,
    inputs_that_require_gradients,
    loss_of_the_norm,
    loss_before_the_norm,
    loss_of_an_inner_norm,
    loss_of_the_base_model,
    halved_before_the_head,
    scaled_norm,
    recomputed,
    ids_of_the_embedding,
    compiled,
    readable_outputs,
)


OF_EACH_KIND = (neftune, loss_of_the_norm, halved_before_the_head, recomputed, ids_of_the_embedding)
"""What is added, kept, changed, done again and looked at. The slow tests, of Llama, use all of them."""


def loss_of_a_layer(model: Any) -> Tensor:
    return trained(model, kept(model, "model.layers.0"))


def loss_of_an_mlp(model: Any) -> Tensor:
    return trained(model, kept(model, "model.layers.1.mlp"))


def gradient_of_the_norm(model: Any) -> Tensor:
    found: list[Tensor] = []
    on(
        model,
        "model.norm",
        "register_full_backward_hook",
        lambda m, inputs, outputs: found.append(outputs[0]),
    )
    return torch.cat((trained(model), found[0].double().flatten()))


RIGHT_OR_REFUSED = (loss_of_a_layer, loss_of_an_mlp, gradient_of_the_norm)
"""By the plan of a model."""


def loss_of_queries(model: Any) -> Tensor:
    return trained(model, kept(model, "model.layers.1.self_attn.q_proj"))


def capped_logits(model: Any) -> Tensor:
    on(model, "lm_head", "register_forward_hook", lambda module, args, output: output.clamp(-1, 1))
    return trained(model)


def reads_parts(model: Any) -> Tensor:
    on(
        model,
        "model.layers.1.mlp",
        "register_forward_hook",
        lambda module, args, output: output + args[0].sum(),
    )
    return trained(model)


def unknown_tensor(model: Any) -> Tensor:
    """Attention weights, which the traced implementation does not return, are those of a rank's heads."""
    model.config._attn_implementation = "eager"
    return trained(model, kept(model, "model.layers.1.self_attn"))


REFUSED = (loss_of_queries, capped_logits)


def statistics(model: Any) -> Tensor:
    found: list[Tensor] = []
    on(model, "model.norm", "register_forward_hook", lambda m, args, out: found.append(out.mean().reshape(1)))
    on(model, "model.embed_tokens", "register_forward_hook", lambda m, args, out: found.append(out[0, 0]))
    logits = model(IDS).logits
    return torch.cat((*found, logits.flatten()))


def on_rank_0(model: Any) -> Tensor:
    """A log of one rank, of what all have: it goes on."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        on(model, "model.norm", "register_forward_hook", lambda module, args, output: None)
    return trained(model)


def both(one: list[Any], ranks: list[list[Any]], uses: tuple[Use, ...]) -> None:
    """Each use is right, or refused on all ranks."""
    for use, want, found in zip(uses, one, ranks, strict=True):
        if any(got.value is None for got in found):
            require_refused((use,), (found,), "a hook on model.")
        else:
            require_same((use,), (want,), (found,), 1e-5)


def test_parts_are_withheld(converted: Path) -> None:
    options = {"training": True, "sequence_parallel": True}
    ranks = of_ranks(converted / "out", (reads_parts, unknown_tensor), **options)
    require_refused((reads_parts,), ranks[:1], "reads input.x, of which a rank has a part")
    require_refused((unknown_tensor,), ranks[1:], "where the plan knows of none")


@pytest.fixture(scope="module", params=["llama", pytest.param("cohere", marks=pytest.mark.slow)])
def converted(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted for two ranks into "out"; the second one leaves terms of sums between its modules."""
    root = tmp_path_factory.mktemp(request.param)
    CONFIGS.setdefault("cohere", {**CONFIGS["llama"], "logit_scale": 0.5})
    plain = save_causal(request.param, root / "model")
    shardconv.convert(plain, root / "out", tp=2, sequence_parallel=True)
    return root


def test_hooks_see_what_one_process_has(converted: Path) -> None:
    all_uses = (*RIGHT, *RIGHT_OR_REFUSED)
    of_each = dict(zip(all_uses, of_one(converted / "model", all_uses, training=True), strict=True))
    for sequence_parallel in (False, True):
        right = RIGHT if "llama" in converted.name else OF_EACH_KIND
        uses = (*right, *RIGHT_OR_REFUSED)
        one = [of_each[use] for use in uses]
        options = {"training": True, "sequence_parallel": sequence_parallel}
        ranks = of_ranks(converted / "out", (*uses, *REFUSED), **options)
        require_same(right, one[: len(right)], ranks[: len(right)], 1e-5)
        both(one[len(right) :], ranks[len(right) : len(uses)], RIGHT_OR_REFUSED)
        require_refused(REFUSED, ranks[len(uses) :], "would be given a part of a tensor")


def test_for_inference_and_on_one_rank(converted: Path) -> None:
    require_same(
        (statistics,), of_one(converted / "model", (statistics,)), of_ranks(converted / "out", (statistics,))
    )
    uses = (on_rank_0,)
    one = of_one(converted / "model", uses, training=True)
    require_same(uses, one, of_ranks(converted / "out", uses, training=True), 1e-5)


def test_a_hook_on_one_rank_is_not_given_the_sequence(converted: Path) -> None:
    options = {"training": True, "sequence_parallel": True, "timeout_s": 6}
    ranks = of_ranks(converted / "out", (on_rank_0,), **options)
    require_refused((on_rank_0,), ranks, "with another list of hooks on inner modules on rank 1")


def with_stages(model: Any) -> Tensor:
    return kept(model, "model.norm")()


def test_stages_have_other_modules(converted: Path, tmp_path: Path) -> None:
    shardconv.convert(converted / "model", tmp_path / "out", tp=1, pp=2, check=False)
    require_refused((with_stages,), of_ranks(tmp_path / "out", (with_stages,)), "a model with stages")
