"""A model type of our own making, defined here alone: it converts without help.

Its weights are fused and interleaved in ways of their own, its reshapes are unusual, and nothing has a name
that any published model has. The ranks are real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.nn.functional as F
import transformers
from checkpoints import randomise
from distributed import run_processes
from shardconv_runtime.format.dims import to_text
from shardconv_runtime.format.plan import Plan, parameter_plans
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import shardconv
from shardconv.reporting.summary import summarize

WORDS, WIDTH, PATCHES, NAP, BATTING = 251, 64, 8, 8, 90
NEW_TOKENS = 8


class PatchworkConfig(PreTrainedConfig):
    """``patches`` counts query heads, ``seams`` key/value heads, ``nap`` the width of one."""

    model_type = "patchwork"

    def __init__(
        self,
        words: int = WORDS,
        breadth: int = WIDTH,
        patches: int = PATCHES,
        seams: int = 4,
        nap: int = NAP,
        batting: int = BATTING,
        layers: int = 2,
        **kwargs: Any,
    ) -> None:
        self.words, self.breadth, self.layers = words, breadth, layers
        self.patches, self.seams, self.nap, self.batting = patches, seams, nap, batting
        super().__init__(**{"tie_word_embeddings": True, **kwargs})

    @property
    def num_hidden_layers(self) -> int:
        """What the cache of ``generate`` asks for."""
        return self.layers


class Woven(nn.Module):
    """A linear map whose weight is ``[in, out]``; the bias is added inside of the product."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.warp = nn.Parameter(torch.empty(inner, outer))
        self.weft = nn.Parameter(torch.empty(outer))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.weft, x.flatten(0, -2), self.warp)
        return flat.unflatten(0, x.shape[:-1])


class Press(nn.Module):
    """A norm and a scale in one parameter ``[2, breadth]``: gain, then a factor for the branch."""

    def __init__(self, breadth: int) -> None:
        super().__init__()
        self.irons = nn.Parameter(torch.empty(2, breadth))

    def forward(self, x: Tensor) -> Tensor:
        gain, factor = self.irons.unbind(0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (1 + gain) * (3 + factor)


class Braid(nn.Module):
    """Attention. One weight holds, for each key/value head, its key, its queries, its value."""

    def __init__(self, config: PatchworkConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.seams, self.nap = config.seams, config.nap
        self.crowd = config.patches // config.seams
        self.lengths = [config.nap, self.crowd * config.nap, config.nap]
        self.strands = nn.Parameter(torch.empty(config.seams * sum(self.lengths), config.breadth))
        self.tint = nn.Parameter(torch.empty(config.seams * sum(self.lengths)))
        self.pluck = nn.Parameter(torch.empty(config.patches))
        self.tie = Woven(config.patches * config.nap, config.breadth)

    def forward(self, x: Tensor, turn: Tensor, hidden: Tensor, cache: Any) -> Tensor:
        """``x``: [B, S, breadth]; ``turn``: angles [B, S, nap / 2]; ``hidden``: who sees whom."""
        woven = F.linear(x, self.strands, self.tint).unflatten(-1, (self.seams, -1)).movedim(2, 1)
        key, query, value = woven.split(self.lengths, dim=-1)  # [B, seams, S, ...]
        query = query.unflatten(-1, (self.crowd, self.nap)).movedim(-2, 2)  # [B, seams, crowd, S, nap]
        query = rotated(query, turn[:, None, None])
        key = rotated(key, turn[:, None])
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        scores = torch.einsum("bgcqd,bgkd->bgcqk", query, key) * self.nap**-0.5
        scores = scores.masked_fill(hidden[:, None, None], -1e30)
        mixed = torch.einsum("bgcqk,bgkd->bgcqd", scores.softmax(-1), value)
        mixed = mixed * self.pluck.view(self.seams, self.crowd, 1, 1)
        return self.tie(mixed.movedim(3, 1).flatten(2))


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    """Neighboring pairs of the last dim, turned by an angle each."""
    pairs = x.unflatten(-1, (-1, 2))
    a, b = pairs.unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Stuffing(nn.Module):
    """Feed-forward: gate and up interleaved element by element; two outputs in a transposed weight."""

    def __init__(self, config: PatchworkConfig) -> None:
        super().__init__()
        self.fluff = Woven(config.breadth, 2 * config.batting)
        self.squash = Woven(config.batting, config.breadth)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.fluff(x)
        return self.squash(F.gelu(wide[..., 0::2]) * wide[..., 1::2])


class Square(nn.Module):
    """One layer."""

    def __init__(self, config: PatchworkConfig, index: int) -> None:
        super().__init__()
        self.smooth, self.flat = Press(config.breadth), Press(config.breadth)
        self.braid, self.stuffing = Braid(config, index), Stuffing(config)

    def forward(self, x: Tensor, turn: Tensor, hidden: Tensor, cache: Any) -> Tensor:
        x = x + self.braid(self.smooth(x), turn, hidden, cache)
        return x + self.stuffing(self.flat(x))


def speeds(config: PatchworkConfig) -> Tensor:
    """Angles from one place to the next ``[nap / 2]``."""
    return 100.0 ** -torch.linspace(0, 1, config.nap // 2, dtype=torch.float32)


class PatchworkForCausalLM(PreTrainedModel, GenerationMixin):
    """Embedding, layers, and a head that is tied to the embedding and has a bias of its own."""

    config_class = PatchworkConfig
    _tied_weights_keys = {"shout.weight": "lexicon.weight"}  # noqa: RUF012

    def __init__(self, config: PatchworkConfig) -> None:
        super().__init__(config)
        self.lexicon = nn.Embedding(config.words, config.breadth)
        self.squares = nn.ModuleList(Square(config, i) for i in range(config.layers))
        self.finish = Press(config.breadth)
        self.shout = nn.Linear(config.breadth, config.words)
        self.register_buffer("speed", speeds(config), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """``from_pretrained`` asks for what no checkpoint holds."""
        if module is self:
            self.speed.copy_(speeds(self.config))

    def get_input_embeddings(self) -> nn.Module:
        return self.lexicon

    def get_output_embeddings(self) -> nn.Module:
        return self.shout

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        if use_cache and past_key_values is None:
            past_key_values = transformers.DynamicCache()
        known = past_key_values.get_seq_length() if past_key_values is not None else 0
        length = input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones(
                input_ids.shape[0], known + length, dtype=torch.long, device=input_ids.device
            )
        places = (attention_mask.cumsum(-1) - 1).clamp_min(0)[:, known:]
        order = torch.arange(known + length, device=input_ids.device)
        hidden = (order[None] > order[known:, None])[None] | (attention_mask == 0)[:, None]
        x = self.lexicon(input_ids)
        turn = (places[..., None] * self.speed).to(x.dtype)
        for square in self.squares:
            x = square(x, turn, hidden, past_key_values if use_cache else None)
        logits = self.shout(self.finish(x))
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values if use_cache else None)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Transformers knows the type while these tests run, as after an import of a package that has it."""
    transformers.AutoConfig.register("patchwork", PatchworkConfig)
    transformers.AutoModelForCausalLM.register(PatchworkConfig, PatchworkForCausalLM)
    yield
    CONFIG_MAPPING._extra_content.pop("patchwork")
    transformers.AutoModelForCausalLM._model_mapping._extra_content.pop(PatchworkConfig)


# Converting and running ------------------------------------------------------------------------------

CASES = [
    (4, 2),
    (3, 4),
    pytest.param((2, 4), marks=pytest.mark.slow),
    pytest.param((3, 8), marks=pytest.mark.slow),
]
"""(tp, key/value heads): fewer, uneven; as many or more, uneven without groups."""


@dataclass(frozen=True)
class Run:
    """What a model returns: of one rank, or of the unsharded model."""

    logits: Tensor
    padded: Tensor
    tokens: Tensor


def prompts() -> dict[str, Tensor]:
    """Two prompts, the second padded on the left: ``[2, 9]``."""
    ids = torch.tensor([[11, 250, 3, 77, 130, 9, 201, 0, 83], [0, 0, 0, 88, 5, 249, 19, 126, 125]])
    return {"input_ids": ids, "attention_mask": (torch.arange(9) >= torch.tensor([[0], [3]])).long()}


def run(model: Any) -> Run:
    """Logits without and with padding, and greedy tokens with a cache."""
    with torch.no_grad():
        logits = model(torch.arange(WORDS)[None, :200].flip(-1)).logits
        padded = model(**prompts()).logits
        tokens = model.generate(**prompts(), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return Run(logits, padded, tokens)


def run_rank(path: Path) -> Run:
    """On one rank of a converted directory."""
    return run(shardconv_runtime.load(path))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Run]]:
    """Gives a random float64 checkpoint with so many key/value heads, and its unsharded results."""

    @cache
    def make(seams: int) -> tuple[Path, Run]:
        path = tmp_path_factory.mktemp("own") / f"seams-{seams}"
        model = PatchworkForCausalLM._from_config(PatchworkConfig(seams=seams), dtype=torch.float64)
        randomise(model)
        model.save_pretrained(path)
        unsharded = PatchworkForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        return path, run(unsharded)

    return make


@dataclass(frozen=True)
class Case:
    """One conversion."""

    tp: int
    seams: int
    plan: Plan
    unsharded: Run
    ranks: list[Run]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"tp{case[0]}-kv{case[1]}")
def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Callable[[int], tuple[Path, Run]],
) -> Case:
    """Converts it, and runs it in as many processes as it has ranks."""
    tp, seams = request.param
    path, unsharded = checkpoint(seams)
    out = tmp_path_factory.mktemp("converted") / "out"
    plan = shardconv.convert(path, out, tp=tp, check=False)
    return Case(tp, seams, plan, unsharded, run_processes(tp, run_rank, out))


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert want.isfinite().all()
    return float((got - want).abs().max() / want.abs().max())


def test_logits(case: Case) -> None:
    assert len(case.ranks) == case.tp
    for rank in case.ranks:
        assert rank.logits.dtype == torch.float64
        assert error(rank.logits, case.unsharded.logits) < 1e-9
        assert error(rank.padded, case.unsharded.padded) < 1e-9


def test_tokens(case: Case) -> None:
    assert len(case.unsharded.tokens[:, -NEW_TOKENS:].unique()) > 4
    for rank in case.ranks:
        assert torch.equal(rank.tokens, case.unsharded.tokens)


def test_bytes(case: Case) -> None:
    """All matrices are sharded, and the plan has no notes: nothing was guessed or unknown."""
    summary = summarize(case.plan)
    assert summary.sharded_bytes >= 0.95 * summary.total_bytes
    replicated = {n for n, e in parameter_plans(case.plan).items() if e.reason}
    assert not [n for n in replicated if not n.endswith(("irons", "weft"))]
    assert case.plan.notes == ()


LAYOUTS = {
    (2, 4): ("4@0*32", "4@0*16", "90@0*2"),
    (4, 2): ("2@0*(8 + 4@1*8 + 8)", "2@0*4@1*8", "90@0.1*2"),
    (3, 4): ("4@0*32", "4@0*16", "90@0*2"),
    (3, 8): ("8@0*24", "8@0*8", "90@0*2"),
}
"""Of the fused rows, of the rows behind attention, and of the columns in which gate and up alternate."""


def test_layouts(case: Case) -> None:
    """Heads are not divided, and with fewer key/value heads than ranks only the queries are sharded again."""
    entries = parameter_plans(case.plan)
    strands, tie, fluff = (
        entries[f"squares.1.{name}"] for name in ("braid.strands", "braid.tie.warp", "stuffing.fluff.warp")
    )
    found = (to_text(strands.dims[0]), to_text(tie.dims[0]), to_text(fluff.dims[1]))
    assert found == LAYOUTS[case.tp, case.seams]


@pytest.mark.parametrize(
    ("tp", "seams"),
    [
        (12, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, 4), (6, 4), (8, 2), (16, 8))),
    ],
)
def test_more_ranks(tp: int, seams: int) -> None:
    """Proven on simulated ranks: numbers of ranks that divide nothing, and more ranks than heads."""
    plan = shardconv.plan(PatchworkConfig(seams=seams), tp, dtype="float64", check=True)
    summary = summarize(plan)
    assert summary.sharded_bytes >= 0.95 * summary.total_bytes
    assert plan.notes == ()
