"""What people do with a transformers model, as functions of a way to load it: a hundred habits.

Each is run with the unsharded model and with one rank's part of it, and returns tensors to compare.
``REFUSED`` lists those that cannot be right on parts.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 93, 2]])
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
RIGHT = LEFT.flip(1)

Load = Callable[..., Any]
Result = Iterable[Tensor]
HABITS: dict[str, Callable[[Load, Place], Result]] = {}
REFUSED: set[str] = set()


@dataclass(frozen=True)
class Place:
    """Where a habit may write, and what it may read."""

    scratch: Path
    """The same for all ranks."""
    plain: Path
    """An ordinary checkpoint of the model."""
    rank: int
    num_ranks: int


def habit(do: Callable[[Load, Place], Result]) -> Callable[[Load, Place], Result]:
    HABITS[do.__name__] = do
    return do


def refused(do: Callable[[Load, Place], Result]) -> Callable[[Load, Place], Result]:
    REFUSED.add(do.__name__)
    return habit(do)


def call(
    name: str,
    use: Callable[[Any], Result],
    *,
    is_refused: bool = False,
    changes: bool = False,
    **options: Any,
) -> None:
    """A habit that uses a model which was loaded with options.

    Those that load it without options and leave it as it was share one; with ``changes``, it has its own.
    """
    shares = not (options or changes or is_refused)

    def do(load: Load, place: Place) -> Result:
        with torch.no_grad():
            return list(use(load(shared=True) if shares else load(**options)))

    HABITS[name] = do
    if is_refused:
        REFUSED.add(name)


def logits(model: Any, **given: Any) -> list[Tensor]:
    return [model(**{"input_ids": IDS} | given).logits]


# Loading.
call("load", logits)
call("load_in_bfloat16", lambda m: [m(IDS).logits.float()], dtype="bfloat16")
call("load_in_float32", lambda m: [m(IDS).logits], dtype=torch.float32)
call("load_on_a_device", logits, device="cpu")
call("load_and_verify", logits, verify=True)
call("load_and_compare_inputs", lambda m: [m(IDS).logits, m(IDS + 1).logits], check_inputs=True)
call("load_for_training_and_infer", logits, training=True)
call("load_with_device_map", logits, is_refused=True, device_map="auto")
call("load_with_torch_dtype", logits, is_refused=True, torch_dtype="auto")
call("load_with_an_attention", logits, is_refused=True, attn_implementation="eager")
call("load_with_quantization", logits, is_refused=True, quantization_config=object())
call("load_with_a_typo", logits, is_refused=True, dtpye="float32")
call("load_with_no_such_dtype", logits, is_refused=True, dtype="float23")
call("load_with_sequence_parallelism_that_is_not_there", logits, is_refused=True, sequence_parallel=True)


@habit
def load_twice(load: Load, place: Place) -> Result:
    return [model(IDS).logits for model in (load(), load())]


# Calling.
call("call_by_position", lambda m: [m(IDS).logits])
call("call_forward", lambda m: [m.forward(IDS).logits])
call("one_token", lambda m: logits(m, input_ids=IDS[:1, :1]))
call("one_row", lambda m: logits(m, input_ids=IDS[:1]))
call("a_long_row", lambda m: logits(m, input_ids=torch.arange(90)[None]))
call("mask_of_ones", lambda m: logits(m, attention_mask=torch.ones_like(IDS)))
call("padding_on_the_right", lambda m: logits(m, attention_mask=RIGHT))
call("padding_on_the_left", lambda m: [logits(m, attention_mask=LEFT)[0][:, 2:]])
call("four_dims_of_mask", lambda m: logits(m, attention_mask=torch.zeros(2, 1, 6, 6).double().tril()))
call("position_ids", lambda m: logits(m, position_ids=torch.arange(6).flip(0)[None]))
call("token_type_ids", lambda m: logits(m, token_type_ids=torch.zeros_like(IDS)))
call("tuple_output", lambda m: [m(IDS, return_dict=False)[0]])
call("no_cache", lambda m: logits(m, use_cache=False))
call("last_logits", lambda m: logits(m, logits_to_keep=1))
call("labels", lambda m: [m(IDS, labels=IDS).loss])
call("ignored_labels", lambda m: [m(IDS, labels=IDS.masked_fill(IDS > 9, -100)).loss])
call("inputs_embeds", lambda m: [m(inputs_embeds=m.get_input_embeddings()(IDS)).logits])
call("embedding_of_ids", lambda m: [m.get_input_embeddings()(IDS)])
call("base_model", lambda m: [m.base_model(IDS).last_hidden_state])
call("head_of_hidden_states", lambda m: [m.lm_head(m.base_model(IDS).last_hidden_state)])
call("hidden_states", lambda m: m(IDS, output_hidden_states=True).hidden_states)
call("attentions", lambda m: attentions(m), changes=True)
call("log_probabilities", lambda m: [m(IDS).logits.log_softmax(-1).gather(-1, IDS[..., None])])
call("argmax", lambda m: [m(IDS).logits.argmax(-1)])
call("in_inference_mode", lambda m: [torch.inference_mode()(m)(IDS).logits.clone()])
call("autocast", lambda m: [torch.autocast("cpu", torch.bfloat16)(m)(IDS).logits.float()], dtype="float32")
call("under_grad", lambda m: [torch.enable_grad()(m)(IDS).logits.detach()])
call("hook_on_the_model", lambda m: hooked(m), changes=True)
call("pre_hook_on_the_model", lambda m: pre_hooked(m), changes=True)
call("functional_call", lambda m: [torch.func.functional_call(m, dict(m.named_parameters()), IDS).logits])
call("eager_attention", lambda m: [m.set_attn_implementation("eager"), m(IDS).logits][1:], changes=True)
call("sdpa_attention", lambda m: [m.set_attn_implementation("sdpa"), m(IDS).logits][1:], changes=True)


def attentions(model: Any) -> Result:
    model.set_attn_implementation("eager")
    return model(IDS, output_attentions=True).attentions


def resized(model: Any) -> Result:
    torch.manual_seed(3)
    table = model.resize_token_embeddings(300)
    return [table((IDS + 250) % 300), model((IDS + 250) % 300).logits]


def hooked(model: Any) -> Result:
    found: list[Tensor] = []
    model.register_forward_hook(lambda module, args, output: found.append(output.logits))
    model(IDS)
    return found


def pre_hooked(model: Any) -> Result:
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return [model(IDS).logits]


def by_hand(model: Any, choose: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Decode step by step with a cache."""
    out = model(IDS, use_cache=True)
    found = []
    for _ in range(4):
        token = choose(out.logits[:, -1])
        found.append(token)
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
    return [torch.cat(found, -1), out.logits]


def drawn(row: Tensor) -> Tensor:
    return torch.multinomial(row.softmax(-1), 1)


call("decode_by_hand", lambda m: by_hand(m, lambda row: row.argmax(-1, keepdim=True)))
call("sample_by_hand_with_a_seed", lambda m: [torch.manual_seed(3), *by_hand(m, drawn)][1:])
call("two_turns", lambda m: two_turns(m))
call("static_cache", lambda m: with_static_cache(m))


@refused
def sample_by_hand_without_a_seed(load: Load, place: Place) -> Result:
    model = load()
    torch.manual_seed(place.rank)  # as it is where nobody sets one
    with torch.no_grad():
        return by_hand(model, lambda row: torch.multinomial(torch.ones_like(row), 1))


@refused
def data_that_differs(load: Load, place: Place) -> Result:
    return [load()(IDS[place.rank][None]).logits]


def two_turns(model: Any) -> Result:
    first = model(IDS[:, :4], use_cache=True)
    return [model(IDS[:, 4:], past_key_values=first.past_key_values).logits]


def with_static_cache(model: Any) -> Result:
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    return [model(IDS, past_key_values=cache, cache_position=torch.arange(6)).logits]


# Generating.
SHORT: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0}


def generated(name: str, *, is_refused: bool = False, **options: Any) -> None:
    call(f"generate_{name}", lambda m: seeded(m, **options), is_refused=is_refused)


def seeded(model: Any, **options: Any) -> Result:
    torch.manual_seed(11)
    given = {"inputs": IDS, "attention_mask": torch.ones_like(IDS)} | SHORT | options
    return [model.generate(**given)]


generated("greedy", do_sample=False)
generated("sample", do_sample=True)
generated("top_k", do_sample=True, top_k=5, temperature=0.7)
generated("top_p", do_sample=True, top_p=0.6)
generated("min_p", do_sample=True, min_p=0.1)
generated("beams", do_sample=False, num_beams=3)
generated("beam_sample", do_sample=True, num_beams=2)
generated("several", do_sample=True, num_return_sequences=3)
generated("penalties", do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2)
generated("without_a_cache", do_sample=False, use_cache=False)
generated("static", do_sample=False, cache_implementation="static")
generated("prompt_lookup", do_sample=False, inputs=IDS[:1], attention_mask=None, prompt_lookup_num_tokens=2)
generated("padded", do_sample=False, attention_mask=LEFT)
generated("long_time", do_sample=False, max_time=100.0)
call("generate_scores", lambda m: scores(m))
call("generate_from_embeddings", lambda m: from_embeddings(m))
call("generate_by_config", lambda m: by_config(m), changes=True)
call(
    "generate_streamed",
    lambda m: seeded(m, inputs=IDS[:1], attention_mask=None, do_sample=False, streamer=Null()),
)


class Null:
    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@refused
def generate_from_other_prompts(load: Load, place: Place) -> Result:
    return [load().generate(IDS + place.rank, **SHORT)]


def scores(model: Any) -> Result:
    options = {
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    found = model.generate(IDS, **SHORT, **options)
    return [found.sequences, *found.scores, *found.logits]


def from_embeddings(model: Any) -> Result:
    return [model.generate(inputs_embeds=model.get_input_embeddings()(IDS), do_sample=False, **SHORT)]


def by_config(model: Any) -> Result:
    model.generation_config.max_new_tokens = 3
    model.generation_config.pad_token_id = 0
    return [model.generate(IDS, do_sample=False)]


# Looking.
call(
    "num_parameters",
    lambda m: [torch.tensor([m.num_parameters(), m.num_parameters(exclude_embeddings=True)])],
)
call("names_of_parameters", lambda m: [torch.tensor(sum(map(hash, sorted(m.state_dict()))) % 2**31)])
call("config_sizes", lambda m: [torch.tensor([m.config.hidden_size, m.config.vocab_size, m.config.n_head])])
call("dtype_and_device", lambda m: [torch.zeros(1, dtype=m.dtype, device=m.device)])
call("print", lambda m: [torch.tensor(len(repr(m)) > 100)])


# Changing.
call("cast_to_bfloat16", lambda m: [m.bfloat16()(IDS).logits.float()], changes=True)
call("cast_to_float32", lambda m: [m.to(torch.float32)(IDS).logits], changes=True)
call("move_to_a_device", lambda m: [m.to("cpu")(IDS).logits], changes=True)
call("freeze", lambda m: [m.requires_grad_(False)(IDS).logits], changes=True)
call("deep_copy", lambda m: [copy.deepcopy(m)(IDS).logits])
call("compile", lambda m: [torch.compile(m, backend="eager")(IDS).logits], changes=True)
call("scale_all_weights", lambda m: [[p.mul_(1.1) for p in m.parameters()], m(IDS).logits][1:], changes=True)
call("tie_weights", lambda m: [m.tie_weights(), m(IDS).logits][1:], changes=True)
call("load_own_state", lambda m: [m.load_state_dict(m.state_dict()), m(IDS).logits][1:], changes=True)
call("average_of_models", lambda m: [torch.optim.swa_utils.AveragedModel(m).module(IDS).logits], changes=True)
call("resize_the_vocabulary", lambda m: resized(m), changes=True)
call("draw_new_weights", lambda m: [m.init_weights(), m(IDS).logits][1:])
call("add_an_adapter", lambda m: [m.add_adapter(None)], is_refused=True)
call("replace_the_head", lambda m: [setattr(m, "lm_head", nn.Linear(32, 256))], is_refused=True)
call("replace_the_head_of_a_copy", lambda m: [with_other_head(copy.deepcopy(m))], is_refused=True)
call("drop_layers", lambda m: [setattr(m.transformer, "h", m.transformer.h[:1])], is_refused=True)
call("push", lambda m: [m.push_to_hub("user/model")], is_refused=True)
call("pickle", lambda m: [pickle.dumps(m)], is_refused=True)
call("torch_save", lambda m: [torch.save(m, io.BytesIO())], is_refused=True)


def with_other_head(model: Any) -> Any:
    model.lm_head = nn.Linear(32, 256)
    return model


@refused
def load_full_state(load: Load, place: Place) -> Result:
    full = transformers.AutoModelForCausalLM.from_pretrained(place.plain).state_dict()
    return [load().load_state_dict(full)]


@refused
def wrap_in_ddp(load: Load, place: Place) -> Result:
    return [nn.parallel.DistributedDataParallel(load(training=True))]


# Saving.
def words() -> Any:
    """A tokenizer of forty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    found = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, pad_token="w0", padding_side="left")


def answered(model: Any) -> Result:
    """Texts in a batch, of other lengths."""
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=words(), batch_size=2)
    texts = ["w3 w14 w15 w9 w26", "w5 w35", "w8"]
    for (one,) in pipe(texts, max_new_tokens=4, do_sample=False, return_tensors=True):
        yield torch.tensor(one["generated_token_ids"])


call("pipeline_of_texts", answered, changes=True)
call(
    "pipeline_of_features",
    lambda m: [
        transformers.pipeline("feature-extraction", model=m.base_model, tokenizer=words())(
            "w3 w14 w15", return_tensors=True
        )
    ],
    changes=True,
)


@habit
def save_and_load(load: Load, place: Place) -> Result:
    model = load()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    target = place.scratch / "saved"
    model.save_pretrained(target)
    return [transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)(IDS).logits]


@habit
def save_state_of_a_rank(load: Load, place: Place) -> Result:
    first, second = load(), load()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    return [second(IDS).logits]


@refused
def save_given_tensors(load: Load, place: Place) -> Result:
    model = load()
    return [model.save_pretrained(place.scratch / "given", state_dict=model.state_dict())]


# Training.
def trained(
    name: str, step: Callable[[Any, Any], object], make: Any = torch.optim.AdamW, *, is_refused: bool = False
) -> None:
    """A habit of training: two steps of an optimizer, then the losses and the logits."""

    def do(load: Load, place: Place) -> Result:
        model = load(training=True)
        optimizer = make(model.parameters(), lr=1e-2)
        losses = []
        for shift in (0, 1):
            loss = step(model, IDS + shift)
            losses.append(torch.as_tensor(loss).detach())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            return [*losses, model(IDS).logits]

    HABITS[f"train_{name}"] = do
    if is_refused:
        REFUSED.add(f"train_{name}")


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """In float64: that of the model is in float32 where it is not sharded."""
    logits = model(ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def backward(model: Any, ids: Tensor) -> Tensor:
    loss = loss_of(model, ids)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def then(change: Callable[[Any], object]) -> Callable[[Any, Tensor], Tensor]:
    """A step that changes the gradients afterwards; what the change returns is part of the loss."""

    def step(model: Any, ids: Tensor) -> Tensor:
        loss = backward(model, ids).detach()
        found = change(model)
        return torch.stack((loss, found)) if isinstance(found, Tensor) else loss

    return step


def twice(model: Any, ids: Tensor) -> Tensor:
    return backward(model, ids) + backward(model, ids + 2)


def frozen(model: Any, ids: Tensor) -> Tensor:
    model.get_input_embeddings().requires_grad_(False)
    return backward(model, ids)


def recomputed(model: Any, ids: Tensor) -> Tensor:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return backward(model, ids)


def copied(model: Any, ids: Tensor) -> Tensor:
    """A step of a copy, whose gradients are clipped and taken over."""
    other = copy.deepcopy(model)
    loss = backward(other, ids)
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05)
    for parameter, theirs in zip(model.parameters(), other.parameters(), strict=True):
        parameter.grad = theirs.grad
    return loss


def own_gradients(model: Any, ids: Tensor) -> Tensor:
    loss = loss_of(model, ids)
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    return loss


def scaled(model: Any, ids: Tensor) -> Tensor:
    loss = loss_of(model, ids)
    (loss * 128).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.grad /= 128
    return loss


trained("adamw", backward)
trained("adam", backward, torch.optim.Adam)
trained("sgd", backward, torch.optim.SGD)
trained("momentum", backward, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1))
trained("adagrad", backward, torch.optim.Adagrad)
trained("rmsprop", backward, torch.optim.RMSprop)
trained("foreach", backward, lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=True))
trained("accumulated", twice)
trained("frozen", frozen)
trained("recomputed", recomputed)
trained("own_gradients", own_gradients)
trained("scaled_loss", scaled)
trained("clipped", then(lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05)))
trained("clipped_in_part", then(lambda m: torch.nn.utils.clip_grad_norm_(list(m.parameters())[3:9], 0.05)))
trained(
    "largest_gradient", then(lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05, float("inf")))
)
trained("clipped_values", then(lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.01)))
trained("copy", copied)
trained("norm_alone", then(lambda m: torch.nn.utils.get_total_norm([p.grad for p in m.parameters()])))
trained("adafactor", backward, torch.optim.Adafactor, is_refused=True)
trained("lbfgs", backward, torch.optim.LBFGS, is_refused=True)
trained("sampler_over_ranks", lambda m, ids: 0, is_refused=True)


@refused
def train_a_model_loaded_for_inference(load: Load, place: Place) -> Result:
    model = load()
    model.requires_grad_(True)
    return [backward(model, IDS)]


def _different(load: Load, place: Place) -> Result:
    model = load(training=True)
    return [backward(model, IDS[place.rank][None])]


HABITS["train_sampler_over_ranks"] = _different
