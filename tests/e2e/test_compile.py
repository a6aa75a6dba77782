"""``load(compile=True)`` in real processes: the numbers of the unsharded model, few graphs, few collectives.

The graphs are captured as always, and run as they are: generating code takes minutes (one test does that).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import captured
import pytest
import shardconv_runtime
import torch
import torch._dynamo
import transformers
from checkpoints import CONFIGS, ENCODER, HIDDEN, LAYERS, VOCAB, save
from distributed import run_processes
from shardconv_runtime import Communication, PlanError
from shardconv_runtime.inference.compiling import compile_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from warm_compiler import warm_up

import shardconv

TP = 2
NEW_TOKENS = 8
PROMPTS = (7, 9)
"""Lengths."""
LENGTHS = (7, 9, 20)
ONE_LENGTH = ("mixtral", "t5")
"""Of these one text is enough: olmo3 shows that a graph takes all further lengths."""

NAMES = ("llama", "gemma2", "gpt2", "mixtral", "olmo2", "olmo3", "t5", "bert")
"""Plain; with windows and soft caps; with fused weights; with experts; with norms over a sharded dim; with
these and windows; an encoder with a decoder; an encoder."""

SHOWN_ELSEWHERE = ("llama", "gemma2", "gpt2", "olmo2", "bert")
"""Slow tests: olmo3 has windows and norms over a sharded dim, code is generated for gpt2, and t5 has an
encoder."""

NUM_LAYERS = {"gemma2": LAYERS}
"""Where it is not one: each graph takes seconds to capture."""

SINGLE = ("gemma2", "mixtral")
"""Compared in float32: soft caps cast the mask's lowest float64 to infinity, and torch's product of experts
has no other kernel on CPUs."""

REDUCTIONS = {"olmo2": 4, "olmo3": 4, "t5": 6}
"""Of a layer, where they are not one for attention and one for the MLP: norms add their statistics, and a
decoder looks at an encoder, which has a layer and an embedding too."""

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make_model(name: str) -> Any:
    """A random model in float64."""
    layers = NUM_LAYERS.get(name, 1)
    if name == "bert":
        config = transformers.BertConfig(**ENCODER | {"num_hidden_layers": layers})
        return transformers.BertForMaskedLM._from_config(config, dtype=torch.float64)
    if name == "t5":
        config = transformers.T5Config(
            vocab_size=VOCAB, d_model=HIDDEN, d_kv=8, d_ff=128, num_layers=layers, num_heads=8,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration._from_config(config, dtype=torch.float64)
    depth = {"n_layer" if name == "gpt2" else "num_hidden_layers": layers}
    if name == "breaking":
        config = BreakingConfig(**CONFIGS["llama"] | depth | _TOKENS)
        return BreakingForCausalLM._from_config(config, dtype=torch.float64)
    if name == "olmo3":
        windows = {"sliding_window": 6, "layer_types": ["sliding_attention"] * layers}
        config = transformers.Olmo3Config(**CONFIGS["olmo2"] | depth | windows | _TOKENS)
    else:
        config = transformers.CONFIG_MAPPING[name](**CONFIGS[name] | depth | _TOKENS)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


@dataclass(frozen=True)
class Converted:
    """One model: where it was saved, and its converted directory."""

    source: Path
    out: Path

    def unsharded(self, dtype: torch.dtype) -> Any:
        """As transformers loads it."""
        config = transformers.AutoConfig.from_pretrained(self.source)
        model_class = getattr(transformers, config.architectures[0])
        return model_class.from_pretrained(self.source, dtype=dtype).eval()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Converted]:
    """Gives each model, converted once."""
    warm_up()
    root = tmp_path_factory.mktemp("compile")

    @cache
    def make(name: str) -> Converted:
        source = save(make_model(name), root / name)
        shardconv.convert(source, root / f"{name}-out", tp=TP, check=False)
        return Converted(source, root / f"{name}-out")

    return make


class BreakingConfig(transformers.LlamaConfig):
    """Of a type that transformers does not have."""

    model_type = "breaking"


class BreakingLinear(nn.Linear):
    """Does what no graph can hold."""

    def forward(self, input: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(input)


class BreakingForCausalLM(transformers.LlamaForCausalLM):
    """Its head cannot be captured."""

    config_class = BreakingConfig

    def __init__(self, config: BreakingConfig) -> None:
        super().__init__(config)
        self.lm_head = BreakingLinear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# What Dynamo captures -------------------------------------------------------------------------------


@dataclass
class Graphs(captured.Captured):
    """Collectives of each graph that was captured, by kind."""

    collectives: list[Counter[str]] = field(default_factory=list)

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        """Runs what it is given as it is."""
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        kinds = (name.split(".")[1] for name in names if name.startswith("_c10d_functional."))
        self.collectives.append(Counter(kind for kind in kinds if kind != "wait_tensor"))
        return super().backend(graph, inputs)

    def __len__(self) -> int:
        return len(self.collectives)


@contextmanager
def capturing() -> Iterator[Graphs]:
    """Let every ``torch.compile`` in this context capture graphs, and generate no code."""
    with captured.capturing(Graphs()) as graphs:
        counters.clear()
        yield graphs
    assert not counters["graph_break"]


def per_forward(name: str) -> dict[str, int]:
    """One reduction for the embeddings, those of the layers, and one gather of the logits.

    The head of the encoder has a layer before the logits, which is gathered too.
    """
    reductions = 1 + REDUCTIONS.get(name, 2) * NUM_LAYERS.get(name, 1)
    return {"all_reduce": reductions, "all_gather_into_tensor": 2 if name == "bert" else 1}


def text(length: int) -> dict[str, Tensor]:
    """Two prompts ``[2, length]``, the second one padded on the left."""
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
    mask = (torch.arange(length) >= torch.tensor([[0], [3]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert want.isfinite().all()
    return float((got - want).abs().max() / want.abs().max())


# Forward passes and generate -------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Of one rank, or (with no graphs) of the unsharded model."""

    logits: list[Tensor]
    """Of texts of some lengths, without a cache."""
    tokens: list[Tensor]
    """Greedy, of each prompt."""
    forward: list[int]
    """Number of graphs after each text."""
    generate: list[int]
    """Number of further graphs after each call of ``generate``."""
    collectives: list[Counter[str]]
    """Of each graph."""


def logits_of(model: Any, length: int) -> Tensor:
    """Of the padded texts; an encoder's decoder gets texts, too."""
    inputs = text(length)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = text(length + 1)["input_ids"][:, :length]
    with torch.no_grad():
        logits: Tensor = model(**inputs, **({"use_cache": False} if model.can_generate() else {})).logits
    return logits


def run(model: Any, graphs: Graphs, lengths: tuple[int, ...]) -> Measured:
    """Logits of texts of these lengths, then tokens."""
    logits, forward, tokens, generate = [], [], [], []
    for length in lengths:
        logits.append(logits_of(model, length))
        forward.append(len(graphs))
    for length in PROMPTS if model.can_generate() else ():
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "min_new_tokens": NEW_TOKENS}
        tokens.append(model.generate(**text(length), **options))
        generate.append(len(graphs) - forward[-1])
    return Measured(logits, tokens, forward, generate, graphs.collectives)


def run_rank(path: Path, dtype: torch.dtype, lengths: tuple[int, ...]) -> Measured:
    with capturing() as graphs:
        return run(load(path, dtype=dtype, compile=True), graphs, lengths)


def load(path: Path, **options: Any) -> Any:
    """A hang would be an error after a while."""
    options.setdefault("communication", Communication(timeout_s=100))
    return shardconv_runtime.load(path, **options)


@dataclass(frozen=True)
class Case:
    """One model: what the unsharded one gives, and what each rank gives."""

    name: str
    unsharded: Measured
    ranks: list[Measured]


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.slow) if n in SHOWN_ELSEWHERE else n for n in NAMES],
)
def case(request: pytest.FixtureRequest, converted: Callable[[str], Converted]) -> Case:
    """One model after the other."""
    name = request.param
    dtype = torch.float32 if name in SINGLE else torch.float64
    lengths = lengths_of(name)
    model = converted(name)
    unsharded = run(model.unsharded(dtype), Graphs(), lengths)
    return Case(name, unsharded, run_processes(TP, run_rank, model.out, dtype, lengths))


def lengths_of(name: str) -> tuple[int, ...]:
    """Of the texts without a cache."""
    return LENGTHS[:1] if name in ONE_LENGTH else LENGTHS


def test_logits_and_tokens(case: Case) -> None:
    for rank in case.ranks:
        for got, want in zip(rank.logits, case.unsharded.logits, strict=True):
            assert error(got, want) < (1e-4 if case.name in SINGLE else 1e-6)
        for got, want in zip(rank.tokens, case.unsharded.tokens, strict=True):
            assert torch.equal(got, want)


def test_number_of_graphs(case: Case) -> None:
    """One for the first length, one for all others; one for all steps of decoding, and for later calls."""
    for rank in case.ranks:
        assert rank.forward == [1, 2, 2][: len(lengths_of(case.name))]
        assert rank.generate == graphs_of_generate(case)


def graphs_of_generate(case: Case) -> list[int]:
    """A decoder alone takes all lengths with one graph; a cache beside an encoder has its length."""
    if not case.unsharded.tokens:
        return []
    return [1, 2] if case.name == "t5" else [1, 1]


def test_collectives_of_each_graph(case: Case) -> None:
    for rank in case.ranks:
        decoding = max(graphs_of_generate(case), default=0)
        forward = rank.forward[-1]
        assert len(rank.collectives) == forward + decoding
        prefills, steps = rank.collectives[:forward], rank.collectives[forward:]
        assert prefills == [per_forward(case.name)] * forward
        # The encoder is run once: a step is that of the decoder, with an embedding as always.
        assert steps == [per_forward(case.name) if case.name != "t5" else per_step_of_decoder()] * len(steps)


def per_step_of_decoder() -> dict[str, int]:
    """Attention, attention to the encoder, the MLP, the embedding."""
    return {"all_reduce": 4, "all_gather_into_tensor": 1}


# Other ways to compile ------------------------------------------------------------------------------


def sum_of_gathered(x: Tensor, group: str) -> Tensor:
    """An all_reduce of the user's: of all parts, the sum."""
    functional = torch.ops._c10d_functional
    parts = functional.wait_tensor(functional.all_gather_into_tensor(x, TP, group))
    return parts.unflatten(0, (TP, -1)).sum(0)


def compiled_by_the_user(path: Path) -> tuple[Tensor, Graphs]:
    with capturing() as graphs:
        model = torch.compile(
            load(path, communication=Communication(all_reduce=sum_of_gathered)), fullgraph=True
        )
        return logits_of(model, 7), graphs


def test_a_model_that_the_user_compiles(converted: Callable[[str], Converted]) -> None:
    """With an all_reduce of the user's; as it is in ``tests/runtime/loading/test_load.py``."""
    want = logits_of(converted("llama").unsharded(torch.float64), 7)
    for logits, graphs in run_processes(TP, compiled_by_the_user, converted("llama").out):
        assert error(logits, want) < 1e-6
        assert graphs.collectives == [{"all_gather_into_tensor": 2 + 2}]


def with_own_all_reduce(path: Path) -> tuple[Tensor, Tensor]:
    model = load(path, communication=Communication(all_reduce=sum_of_gathered))
    return logits_of(model, 7), model.generate(**text(7), max_new_tokens=NEW_TOKENS, do_sample=False)


def test_an_all_reduce_of_the_users(converted: Callable[[str], Converted]) -> None:
    unsharded = converted("llama").unsharded(torch.float64)
    want = unsharded.generate(**text(7), max_new_tokens=NEW_TOKENS, do_sample=False)
    for logits, tokens in run_processes(TP, with_own_all_reduce, converted("llama").out):
        assert error(logits, logits_of(unsharded, 7)) < 1e-6
        assert torch.equal(tokens, want)


def copied(path: Path) -> tuple[Tensor, Tensor, int]:
    with capturing() as graphs:
        twin = copy.deepcopy(load(path, compile=True))
        logits = logits_of(twin, 7)
        tokens = twin.generate(**text(7), max_new_tokens=NEW_TOKENS, do_sample=False)
    return logits, tokens, len(graphs)


def test_a_copy_is_not_compiled(converted: Callable[[str], Converted]) -> None:
    unsharded = converted("llama").unsharded(torch.float64)
    want = unsharded.generate(**text(7), max_new_tokens=NEW_TOKENS, do_sample=False)
    for logits, tokens, num_graphs in run_processes(TP, copied, converted("llama").out):
        assert error(logits, logits_of(unsharded, 7)) < 1e-9
        assert torch.equal(tokens, want)
        assert num_graphs == 0


class Repeats(nn.Module):
    """Takes what Dynamo makes a graph of its own for."""

    def forward(self, x: Tensor, word: str) -> Tensor:
        return x * len(word)


def test_more_kinds_of_calls_than_torch_allows() -> None:
    """And of two models, whose graphs belong to the same Python function."""
    words = [letter * n for n, letter in enumerate("abcdef", 1)]
    with torch._dynamo.config.patch(recompile_limit=4), capturing() as graphs, torch.no_grad():
        for model in (Repeats(), Repeats()):
            compile_model(model, cuda_graphs=False)
            for n, word in enumerate(words, 1):
                assert float(model(torch.ones(()), word)) == n
    # Up to 2.11, the second model's calls run the graphs of the first.
    shared = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
    assert len(graphs) == (1 if shared else 2) * len(words)


@pytest.mark.parametrize("same_bits", [False, True])
def test_kernels_of_several_ranks_are_not_chosen_by_measuring(
    same_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would choose for itself, and round differently."""
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    compile_model(nn.Linear(2, 2), cuda_graphs=True, same_bits=same_bits)
    for options in (given["options"] or {} for given in compiled):
        assert options.get("deterministic", False) is same_bits
        torch._inductor.config.patch(options)  # which knows these names


def test_hooks_of_the_model_are_part_of_its_graph() -> None:
    """Of steps at the model's own inputs and outputs, collectives included, there is no second graph."""
    model = nn.Linear(4, 4).eval()
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, output: 2 * output)
    x = torch.ones(3, 4)
    with torch.no_grad(), capturing() as graphs:
        want = model(x)
        compile_model(model, cuda_graphs=False)
        torch.testing.assert_close(model(x), want, rtol=1e-6, atol=1e-6)
    assert len(graphs) == 1


# A model that no graph can hold ---------------------------------------------------------------------


@pytest.fixture
def registered() -> Iterator[None]:
    """Transformers knows the type, as after an import of a package that has it."""
    transformers.AutoConfig.register("breaking", BreakingConfig)
    transformers.AutoModelForCausalLM.register(BreakingConfig, BreakingForCausalLM)
    yield
    CONFIG_MAPPING._extra_content.pop("breaking")
    transformers.AutoModelForCausalLM._model_mapping._extra_content.pop(BreakingConfig)


def break_it(path: Path) -> bool:
    plain = logits_of(load(path), 7)
    with capturing():
        model = load(path, compile=True)
        with pytest.raises(PlanError, match=r"compile=True makes one graph.*load without compile=True"):
            logits_of(model, 7)
        counters.clear()
    return bool(plain.isfinite().all())


@pytest.mark.usefixtures("registered")
def test_a_model_that_cannot_be_captured(converted: Callable[[str], Converted]) -> None:
    assert run_processes(TP, break_it, converted("breaking").out) == [True, True]


# With generated code --------------------------------------------------------------------------------


def generated(path: Path) -> Tensor:
    model = load(path, dtype="float32", compile=True)
    tokens: Tensor = model.generate(**text(7), max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokens


def test_generated_code(converted: Callable[[str], Converted], tmp_path: Path) -> None:
    """By Inductor, as torch.compile does unless told otherwise: one graph, since each takes long."""
    unsharded = converted("gpt2").unsharded(torch.float32)
    want = unsharded.generate(**text(7), max_new_tokens=NEW_TOKENS, do_sample=False)
    env = {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "ATEN_CPU_CAPABILITY": "default",  # else it is tried which instructions there are, by compiling
    }
    for tokens in run_processes(TP, generated, converted("gpt2").out, env=env):
        assert torch.equal(tokens, want)
    assert list(tmp_path.rglob("*.py")), "there is code"
