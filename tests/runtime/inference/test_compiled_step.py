"""Steps whose guards are not evaluated: the right graph all the same, whatever was called in between."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from checkpoints import CONFIGS
from recorded_steps import record_all
from shardconv_runtime.comm.mesh import Launch
from shardconv_runtime.inference.compiling import compile_model
from shardconv_runtime.inference.generation import DECODER, prepare_generation
from shardconv_runtime.inference.replay import CompiledStep
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from warm_compiler import warm_up

CONFIG = CONFIGS["llama"] | {"num_hidden_layers": 1, "pad_token_id": 0, "eos_token_id": None}
GREEDY = {"do_sample": False, "max_new_tokens": 8}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "max_new_tokens": 8}


def run_as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend without generated code."""
    return graph.forward


def compile_it(function: Any, **_: Any) -> Any:
    return COMPILE(function, fullgraph=True, backend=run_as_it_is)


COMPILE = torch.compile


def grow(x: Tensor, by: dict[str, Tensor]) -> None:
    x.add_(by["a"])


@pytest.fixture(autouse=True)
def fresh() -> None:
    warm_up()
    torch._dynamo.reset()


def test_the_graph_whose_guards_hold() -> None:
    """Of two shapes, of two types, of two modes."""
    step = CompiledStep(grow, compile_it)
    cases = [
        (torch.zeros(size, dtype=dtype), {"a": torch.ones(size, dtype=dtype)})
        for dtype in (torch.float32, torch.int64)
        for size in (1, 3)
    ]
    for x, by in cases:
        assert step.captured(x, by) is None, "no graph"
        step(x, by)
    for _ in range(3):
        for x, by in cases:
            run = step.captured(x, by)
            assert run is not None
            run(x, by)
            with torch.inference_mode():
                assert step.captured(x, by) is None
    assert [x.unique().tolist() for x, _ in cases] == [[4]] * 4
    assert step.captured(torch.zeros(3, 3), {"a": torch.ones(3)}) is None


def test_a_graph_of_another_function_is_not_taken() -> None:
    """Both have the same code; each has a graph with a backend of its own."""
    others = CompiledStep(grow, lambda f: COMPILE(f, backend=lambda graph, inputs: lambda *_: 1 / 0))
    own = CompiledStep(grow, compile_it)
    x, by = torch.zeros(3), {"a": torch.ones(3)}
    with pytest.raises(ZeroDivisionError):
        others(x, by)
    assert own.captured(x, by) is None
    own(x, by)
    run = own.captured(x, by)
    assert run is not None
    torch._dynamo.reset()
    run(x, by)
    assert x.tolist() == [2, 2, 2]


# In generate ----------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Counts steps with and without guards."""
    found = {"guarded": 0, "free": 0}
    call, look_up = CompiledStep.__call__, CompiledStep.captured

    def counted(self: CompiledStep, *args: Any) -> None:
        found["guarded"] += 1
        call(self, *args)

    def counting(self: CompiledStep, *args: Any) -> Any:
        run = look_up(self, *args)

        def counted_run(*args: Any) -> None:
            found["free"] += 1
            assert run is not None
            run(*args)

        return counted_run if run else None

    monkeypatch.setattr(CompiledStep, "__call__", counted)
    monkeypatch.setattr(CompiledStep, "captured", counting)
    monkeypatch.setattr(torch, "compile", compile_it)
    return found


def models() -> tuple[Any, Any]:
    """A compiled model, and an ordinary one with the same weights."""
    torch.manual_seed(7)
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=torch.float32).eval()
    for parameter in plain.parameters():
        parameter.data.normal_(std=0.2)
    twin = copy.deepcopy(plain)
    start = Launch(0, 1, torch.device("cpu"))
    prepare_generation(twin, copy.deepcopy(plain.generation_config), start, gather_logits=True)
    compile_model(twin, cuda_graphs=False)
    return twin, plain


def check(twin: Any, plain: Any, rows: int, length: int, **options: Any) -> None:
    """Both continue alike."""
    ids = torch.randint(3, CONFIG["vocab_size"], (rows, length))
    seed = int(ids.sum())
    texts = []
    for model in (twin, plain):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options))
    assert torch.equal(*texts)


def test_buckets_and_samplings_in_turns(calls: dict[str, int]) -> None:
    twin, plain = models()
    for number in range(3):
        for rows in (1, 2, 4):
            for options in (GREEDY, SAMPLED, SAMPLED | {"temperature": 1.5 + number}):
                check(twin, plain, rows, 3 + number, **options)
    num_calls = 27
    num_recordings = 6 + 4  # larger batches move the buffers of smaller ones
    assert calls == {"guarded": num_recordings + num_calls, "free": num_calls * (8 - 2)}


def test_parameters_that_are_others(calls: dict[str, int]) -> None:
    """Other memory, another type, other modules in the place of the first ones."""
    twin, plain = models()
    check(twin, plain, 1, 5, **GREEDY)
    for one in (twin, plain):
        for parameter in one.parameters():
            parameter.data = parameter.data.flip(0).clone()
    check(twin, plain, 1, 5, **GREEDY)
    for one in (twin, plain):
        one.to(torch.float64)
    check(twin, plain, 1, 5, **GREEDY)
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn_like(plain.lm_head.weight))
    twin.lm_head.weight = plain.lm_head.weight = weight
    check(twin, plain, 1, 5, **GREEDY)
    assert calls["free"] == 4 * 6


def test_modes_in_turns(calls: dict[str, int]) -> None:
    twin, plain = models()
    for _ in range(3):
        with torch.inference_mode():
            check(twin, plain, 1, 5, **GREEDY)
        with torch.no_grad():
            check(twin, plain, 1, 6, **GREEDY)
        check(twin, plain, 1, 7, **GREEDY)
    assert calls["free"] == 9 * 6


class Streamer:
    """Calls a compiled function of its own, with another shape each time."""

    def __init__(self) -> None:
        self.double = COMPILE(lambda x: x * 2 + x.shape[0], backend=run_as_it_is, dynamic=False)
        self.num_given = 0

    def put(self, value: Tensor) -> None:
        """Tokens."""
        self.num_given += 1
        x = torch.ones(1 + self.num_given % 3)
        assert self.double(x).tolist() == [2 + len(x)] * len(x)

    def end(self) -> None:
        """No more."""


def test_what_a_caller_compiles_keeps_its_guards(calls: dict[str, int]) -> None:
    twin, plain = models()
    for _ in range(2):
        streamer = Streamer()
        check(twin, plain, 1, 5, **GREEDY, streamer=streamer)
        assert streamer.num_given == 2 * (1 + 8)
    assert calls["free"] == 2 * 6


# Recorded -------------------------------------------------------------------------------------------


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs."""
    monkeypatch.setattr(torch, "compile", compile_it)
    record_all(monkeypatch)


class Switch(torch.nn.Module):
    """What an adapter is: a layer that does something else once an attribute says so."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out.flip(-1) if self.is_on else out


@pytest.mark.usefixtures("recording")
def test_what_was_recorded_is_not_replayed_after_a_change() -> None:
    """Each of the two states is recorded once, and so is each mode of torch."""
    twin, plain = models()
    for one in (twin, plain):
        one.model.layers[0].mlp = Switch(one.model.layers[0].mlp)
    for number in range(3):
        for is_on in (True, False):
            for one in (twin, plain):
                one.model.layers[0].mlp.is_on = is_on
            check(twin, plain, 1, 5 + number, **GREEDY)
            check(twin, plain, 1, 6 + number, **GREEDY)
    assert vars(twin)[DECODER].num_recordings == 2
    with torch.inference_mode():
        check(twin, plain, 1, 5, **GREEDY)
    check(twin, plain, 1, 5, **GREEDY)
    assert vars(twin)[DECODER].num_recordings == 3
