"""``generate`` of a compiled model: the tokens of the ordinary one, few graphs, buffers that stay.

Graphs are captured as always, and run as they are, without generated code.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import transformers
from captured import Captured, capturing
from checkpoints import CONFIGS, VOCAB
from recorded_steps import record_all
from shardconv_runtime.comm.mesh import Launch
from shardconv_runtime.inference import decoding, replay
from shardconv_runtime.inference.compiling import compile_model, warm_up_decoding
from shardconv_runtime.inference.generation import DECODER, prepare_generation
from streamers import Streamer
from torch import Tensor
from warm_compiler import warm_up

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = 6
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": VOCAB, "num_attention_heads": 4}
STATES = {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16}
CASES: dict[str, dict[str, Any]] = {
    "llama": CONFIGS["llama"] | {"num_hidden_layers": 1},
    "gpt2": CONFIGS["gpt2"],
    "bloom": CONFIGS["bloom"] | {"n_layer": 1},
    "mistral": CONFIGS["mistral"],
    "gemma2": CONFIGS["gemma2"],
    "mamba2": {**SMALL, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "bamba": {**STATES, "mamba_n_groups": 2, "mamba_d_state": 16, "attn_layer_indices": [1]},
    "deepseek_v3": {
        **SMALL, "num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 32, "n_group": 1,
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip
"""Positions that rotate, that are learned, that are slopes; windows in all layers, in some; states alone,
states and attention; latent attention with experts."""

SHOWN_ELSEWHERE = ("llama", "gpt2", "mistral", "mamba2")
"""Slow tests: llama is the model of all other tests here, real processes have learned positions, gemma2
windows, and bamba states."""

REASON = "decodes in the ordinary way"
DROPS_MASKS = "_mask_length" in inspect.getsource(transformers.GenerationMixin.generate)
"""Whether this version of transformers leaves out masks of nothing but ones; others have a graph less."""


@pytest.fixture
def graphs() -> Iterator[Captured]:
    warm_up()
    with capturing() as found, warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{REASON}.*")
        yield found


def make(name: str = "llama", **changes: Any) -> Any:
    """A random model in float32: its soft caps, experts and states are not made for more."""
    config = transformers.CONFIG_MAPPING[name](**CASES[name] | TOKENS | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    return model


def compiled(model: Any) -> tuple[Any, decoding.Decoder]:
    """A copy that is compiled."""
    twin = copy.deepcopy(model)
    options = copy.deepcopy(model.generation_config)
    prepare_generation(twin, options, Launch(0, 1, torch.device("cpu")), gather_logits=True)
    compile_model(twin, cuda_graphs=False)
    return twin, vars(twin)[DECODER]


def prompt(rows: int, length: int, num_padded: int = 0) -> dict[str, Tensor]:
    """Ids, the first row padded on the left."""
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(rows * length))
    mask = torch.ones_like(ids)
    mask[0, :num_padded] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def same(twin: Any, model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Checks that both continue alike; returns the text."""
    torch.manual_seed(3)
    got: Tensor = twin.generate(**inputs, **options)
    torch.manual_seed(3)
    want = model.generate(**inputs, **options)
    assert torch.equal(got, want)
    return got


GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
SAMPLED: dict[str, Any] = {
    "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02,
    "repetition_penalty": 1.3,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SHOWN_ELSEWHERE else n for n in CASES]
)
def test_tokens_of_every_kind_of_cache(name: str, graphs: Captured) -> None:
    """One graph for a row, one for several, each with and without padding, whatever the lengths."""
    model = make(name)
    twin, decoder = compiled(model)
    for rows, length in ((1, 5), (1, 9), (2, 7), (2, 8)):
        same(twin, model, prompt(rows, length), **GREEDY)
    assert (graphs.count, decoder.num_recordings) == (2, 2)
    for length in (7, 9):
        same(twin, model, prompt(2, length, num_padded=3), **GREEDY)
    assert (graphs.count, decoder.num_recordings) == ((3, 3) if DROPS_MASKS else (2, 2))


@pytest.mark.skipif(not DROPS_MASKS, reason="masks go by position")
@pytest.mark.parametrize("name", [pytest.param("mistral", marks=pytest.mark.slow), "gemma2"])
def test_windows_are_rings(name: str, graphs: Captured) -> None:
    """The memory of a layer with a window is that of its window, and prompts may be longer."""
    model = make(name)
    twin, decoder = compiled(model)
    same(twin, model, prompt(1, 3), do_sample=False, max_new_tokens=20, min_new_tokens=20)
    same(twin, model, prompt(1, 17), do_sample=False, max_new_tokens=20, min_new_tokens=20)
    (state, _), *_ = decoder._recorded.values()
    slots = [layer.slots for layer in state.cache.layers]
    assert slots == ([WINDOW, WINDOW] if name == "mistral" else [WINDOW, decoding.LEAST_SLOTS])
    assert graphs.count == 1


def test_many_calls(graphs: Captured) -> None:
    """Other prompts, lengths, batch sizes and numbers of the processors: nothing new after the largest."""
    model = make()
    twin, decoder = compiled(model)
    same(twin, model, prompt(4, 40), do_sample=False, max_new_tokens=20)
    generator = torch.Generator().manual_seed(5)
    counts = []
    for _ in range(2):
        for rows in (1, 2, 3, 4):
            length, new = torch.randint(2, 20, (2,), generator=generator).tolist()
            same(twin, model, prompt(rows, length), do_sample=False, max_new_tokens=new)
        for temperature in (0.5, 1.5):
            options = SAMPLED | {"temperature": temperature, "top_k": int(20 + temperature)}
            same(twin, model, prompt(2, 5), **options, max_new_tokens=6)
        counts.append((graphs.count, decoder.num_recordings, decoder._buffers.num_bytes))
    assert counts[0] == counts[1]
    assert counts[0][0] == 4


def test_larger_buckets_move_the_buffers(graphs: Captured) -> None:
    model = make()
    twin, decoder = compiled(model)
    for length, new in ((4, 8), (100, 28), (4, 8)):
        same(twin, model, prompt(1, length), do_sample=False, max_new_tokens=new)
    assert decoder.num_recordings == 1
    larger = make(max_position_embeddings=512)
    twin, decoder = compiled(larger)
    for length, new in ((4, 8), (150, 20), (4, 8)):
        same(twin, larger, prompt(1, length), do_sample=False, max_new_tokens=new)
    assert decoder.num_recordings == 3, "the first one again, since its buffers moved"
    small = decoder._buffers.num_bytes
    same(twin, larger, prompt(1, 150), do_sample=False, max_new_tokens=20)
    assert decoder._buffers.num_bytes == small


@pytest.mark.parametrize("names", [[name] for name in SAMPLED if name != "do_sample"] + [list(SAMPLED)])
def test_sampling(names: list[str], graphs: Captured) -> None:
    """With the same random state, the tokens of transformers' own processors."""
    model = make()
    twin, decoder = compiled(model)
    options = {name: SAMPLED[name] for name in names} | {"do_sample": True, "max_new_tokens": 16}
    same(twin, model, prompt(2, 5), **options)
    assert decoder.num_recordings == 1


def test_rows_end_at_their_stop_tokens(graphs: Captured) -> None:
    """Each at its own step, several ids, with a least length before."""
    model = make()
    twin, decoder = compiled(model)
    free = model.generate(**prompt(2, 5), do_sample=False, max_new_tokens=12, eos_token_id=None)
    stops = [int(free[0, 8]), int(free[1, 11])]
    text = same(twin, model, prompt(2, 5), **GREEDY, eos_token_id=stops)
    assert text.shape[1] < free.shape[1]
    same(twin, model, prompt(2, 5), **GREEDY, eos_token_id=stops, min_new_tokens=6)
    same(twin, model, prompt(2, 5), **GREEDY, eos_token_id=stops, min_length=9)
    same(twin, model, prompt(2, 5), do_sample=False, max_new_tokens=1)
    assert decoder.num_recordings == 3


@pytest.mark.parametrize("name", ["gemma2", "bamba"])
def test_what_was_recorded_is_looked_at_before_each_call(
    name: str, graphs: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guards hold: of caches with windows and with states, too."""
    record_all(monkeypatch)
    model = make(name)
    twin, decoder = compiled(model)
    for length in (5, 9, 7):
        same(twin, model, prompt(1, length), **GREEDY)
    assert decoder.num_recordings == 1
    ((_, (made,)),) = decoder._recorded.values()
    assert made._recorded is not None


def test_embeddings_in_place_of_ids(graphs: Captured) -> None:
    model = make()
    twin, decoder = compiled(model)
    embedded = model.get_input_embeddings()(prompt(2, 5)["input_ids"]).detach()
    got = twin.generate(inputs_embeds=embedded, **GREEDY)
    assert torch.equal(got, model.generate(inputs_embeds=embedded, **GREEDY))
    assert decoder.num_recordings == 1


def test_streamers(graphs: Captured) -> None:
    model = make()
    twin, decoder = compiled(model)
    got, want = Streamer(), Streamer()
    twin.generate(**prompt(1, 5), **GREEDY, streamer=got)
    model.generate(**prompt(1, 5), **GREEDY, streamer=want)
    assert got.given == want.given
    assert decoder.num_recordings == 1


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 2},
        {"return_dict_in_generate": True, "output_scores": True},
        {"no_repeat_ngram_size": 2},
        {"use_cache": False},
        {"max_time": 1000.0},
        {"cache_implementation": "dynamic", "logits_processor": [lambda ids, scores: scores]},
    ],
    ids=lambda options: "-".join(options),
)
def test_other_ways_to_generate(options: dict[str, Any], graphs: Captured) -> None:
    """They take transformers' own loops; what these call is captured for one of them."""
    model = make()
    twin, decoder = compiled(model)
    if "prompt_lookup_num_tokens" not in options:
        twin._compiled_call_impl = None
    inputs = prompt(1, 6)
    few = GREEDY | {"max_new_tokens": 6} | options
    got, want = twin.generate(**inputs, **few), model.generate(**inputs, **few)
    assert torch.equal(getattr(got, "sequences", got), getattr(want, "sequences", want))
    assert decoder.num_recordings == 0


def test_a_cache_of_the_callers_is_continued(graphs: Captured) -> None:
    """A second turn, with what the first one left."""
    model = make()
    twin, decoder = compiled(model)
    texts = []
    for one in (twin, model):
        cache = transformers.DynamicCache(config=model.config)
        first = one.generate(**prompt(1, 5), **GREEDY, past_key_values=cache)
        more = torch.cat([first, first[:, :3]], dim=1)
        texts.append(
            one.generate(more, attention_mask=torch.ones_like(more), **GREEDY, past_key_values=cache)
        )
    assert torch.equal(*texts)
    assert decoder.num_recordings == 0


def test_chunks_of_a_prompt(graphs: Captured) -> None:
    model = make()
    twin, decoder = compiled(model)
    same(twin, model, prompt(1, 20), **GREEDY, prefill_chunk_size=8)
    assert decoder.num_recordings == 1


def test_modes_of_gradients(graphs: Captured) -> None:
    """Buffers made in inference mode can be written outside of it, and the other way round."""
    model = make()
    twin, _ = compiled(model)
    with torch.inference_mode():
        same(twin, model, prompt(1, 5), **GREEDY)
    same(twin, model, prompt(1, 6), **GREEDY)


def test_a_model_whose_step_is_not_its_own(graphs: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are right all the same, and the user is told, once."""
    model = make()
    twin, decoder = compiled(model)
    logits = decoding._logits_of_step
    monkeypatch.setattr(decoding, "_logits_of_step", lambda *args: logits(*args).flip(-1))
    with pytest.warns(UserWarning, match=REASON):
        got = twin.generate(**prompt(1, 5), **GREEDY)
    assert torch.equal(got, model.generate(**prompt(1, 5), **GREEDY))
    same(twin, model, prompt(1, 5), **GREEDY)
    assert not decoder._recorded


def test_a_step_that_fails(graphs: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    twin, decoder = compiled(model)

    def failing(*args: Any) -> Tensor:
        raise RuntimeError("no such shape")

    monkeypatch.setattr(decoding, "_logits_of_step", failing)
    with pytest.warns(UserWarning, match=rf"{REASON}.*no such shape"):
        got = twin.generate(**prompt(1, 5), **GREEDY)
    assert torch.equal(got, model.generate(**prompt(1, 5), **GREEDY))
    assert not decoder._recorded


def test_a_step_that_is_not_one_graph(graphs: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    twin, decoder = compiled(model)
    append = decoding.StepState.append

    def breaking(self: Any, tokens: Tensor) -> None:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        append(self, tokens)

    monkeypatch.setattr(decoding.StepState, "append", breaking)
    with pytest.warns(UserWarning, match=rf"{REASON}.*not one graph"):
        got = twin.generate(**prompt(1, 5), **GREEDY)
    assert torch.equal(got, model.generate(**prompt(1, 5), **GREEDY))
    assert not decoder._recorded


def test_warm_up(graphs: Captured) -> None:
    """Afterwards nothing is captured, and random numbers are those that were to come."""
    model = make()
    twin, decoder = compiled(model)
    state = torch.get_rng_state()
    warm_up_decoding(twin, [(2, 60), (1, 60)])
    assert torch.equal(torch.get_rng_state(), state)
    before = (graphs.count, decoder.num_recordings, decoder._buffers.num_bytes)
    for rows in (2, 1):
        same(twin, model, prompt(rows, 40), **GREEDY)
        same(twin, model, prompt(rows, 40, num_padded=2), **GREEDY)
    assert (graphs.count, decoder.num_recordings, decoder._buffers.num_bytes) == before


class Event:
    """Of a device that works on its own."""

    def record(self) -> None:
        """Now."""

    def synchronize(self) -> None:
        """What was copied is there."""


@pytest.mark.parametrize("stop_after", [1, 5, 12, 30])
def test_a_stop_that_is_seen_one_step_late(
    stop_after: int, graphs: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: one step too many runs, and leaves no trace."""
    init = replay.StopFlag.__init__

    def late(self: Any, tensors: tuple[Tensor, ...]) -> None:
        init(self, tensors)
        self._is_late, self._turn = True, 0
        self._pinned = [[torch.empty_like(t) for t in tensors] for _ in range(2)]
        self._events = [Event(), Event()]

    monkeypatch.setattr(replay.StopFlag, "__init__", late)
    model = make()
    free = model.generate(**prompt(1, 5), do_sample=False, max_new_tokens=40, eos_token_id=None)[
        0, 5:
    ].tolist()
    stop = next((t for t in free[stop_after - 1 :] if t not in free[: stop_after - 1]), free[0])
    got, want = Streamer(), Streamer()
    twin, _ = compiled(model)
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": stop}
    text = twin.generate(**prompt(1, 5), **options, streamer=got)
    assert torch.equal(text, model.generate(**prompt(1, 5), **options, streamer=want))
    assert got.given == want.given


def test_parameters_that_move(graphs: Captured) -> None:
    """What was recorded knows where they were."""
    model = make()
    twin, decoder = compiled(model)
    same(twin, model, prompt(1, 5), **GREEDY)
    other = make()
    for one in (twin, model):
        for parameter, new in zip(one.parameters(), other.parameters(), strict=True):
            parameter.data = new.data.flip(0).clone()
    same(twin, model, prompt(1, 5), **GREEDY)
    assert decoder.num_recordings == 2


def test_what_a_caller_keeps(graphs: Captured) -> None:
    """Texts of earlier calls are not memory that later ones write."""
    model = make()
    twin, _ = compiled(model)
    texts = [twin.generate(**prompt(1, length), **GREEDY) for length in (4, 6)]
    for length, text in zip((4, 6), texts, strict=True):
        assert torch.equal(text, model.generate(**prompt(1, length), **GREEDY))


@pytest.mark.parametrize(
    ("number", "want"), [(1, 128), (128, 128), (129, 256), (2048, 2048), (2049, 4096), (5000, 6144)]
)
def test_rounded_lengths(number: int, want: int) -> None:
    assert decoding._rounded(number, decoding.LEAST_SLOTS, decoding.SLOTS_STEP) == want
