"""Small causal language models with names and shapes that no published model has.

Each is one decoder layer or two between an embedding and a head. ``build`` and ``spec`` make them usable
by ``shardconv.passes.solve_plan``; nothing in the package may know any name of this file.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.plan import Plan
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan


class OddConfig(PreTrainedConfig):
    """Sizes; ``zork`` counts query heads, ``blip`` key/value heads."""

    model_type = "odd"

    def __init__(
        self,
        width: int = 64,
        zork: int = 8,
        blip: int = 4,
        reach: int = 6,
        girth: int = 96,
        words: int = 101,
        repeats: int = 2,
        **kwargs: Any,
    ) -> None:
        self.width, self.zork, self.blip, self.reach = width, zork, blip, reach
        self.girth, self.words, self.repeats = girth, words, repeats
        super().__init__(**kwargs)

    @property
    def span(self) -> int:
        """Of all query heads together."""
        return int(float(self.zork * self.reach))


# Attention -----------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of ``[B, H, S, E]``, written out."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~causal, -1e30).softmax(-1) @ v


class Plain(nn.Module):
    """Head counts in views; config-held ints are read in ``forward``."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.config = config
        self.quux = config.zork
        self.alpha = nn.Linear(config.width, config.zork * config.reach)
        self.beta = nn.Linear(config.width, config.blip * config.reach, bias=False)
        self.gamma = nn.Linear(config.width, config.blip * config.reach, bias=False)
        self.omega = nn.Linear(config.zork * config.reach, config.width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.alpha(x).view(b, s, self.quux, self.config.reach).transpose(1, 2)
        k = self.beta(x).view(b, s, self.config.blip, self.config.reach).transpose(1, 2)
        v = self.gamma(x).view(b, s, self.config.blip, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.omega(y.transpose(1, 2).reshape(b, s, -1))


class FusedUnequal(nn.Module):
    """One weight for all three, cut by a tuple; the heads are then repeated by hand."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.reach, self.many, self.few = config.reach, config.zork, config.blip
        self.cuts = (config.zork * config.reach, config.blip * config.reach, config.blip * config.reach)
        self.everything = nn.Linear(config.width, sum(self.cuts))
        self.back = nn.Linear(config.zork * config.reach, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.everything(x).split(self.cuts, dim=-1)
        q = q.reshape(b, s, self.many, self.reach).permute(0, 2, 1, 3)
        k, v = (t.reshape(b, s, self.few, self.reach).permute(0, 2, 1, 3) for t in (k, v))
        k, v = (t.repeat_interleave(self.many // self.few, dim=1) for t in (k, v))
        return self.back(attend(q, k, v).permute(0, 2, 1, 3).flatten(2))


class Sliced(nn.Module):
    """One weight for all three, cut by slices; the count of query heads is read nowhere else."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.reach, self.many, self.few = config.reach, config.zork, config.blip
        self.everything = nn.Linear(config.width, (config.zork + 2 * config.blip) * config.reach)
        self.back = nn.Linear(config.zork * config.reach, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        fused = self.everything(x)
        first = self.many * self.reach
        second = first + self.few * self.reach
        q, k, v = fused[..., :first], fused[..., first:second], fused[..., second:]
        q, k, v = (t.view(b, s, -1, self.reach).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.back(y.transpose(1, 2).reshape(b, s, -1))


class Grouped(nn.Module):
    """A key and a value for each group of queries; of the counts, a view reads the quotient only."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.reach, self.many, self.few = config.reach, config.zork, config.blip
        self.everything = nn.Linear(config.width, (config.zork + 2 * config.blip) * config.reach)
        self.back = nn.Linear(config.zork * config.reach, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        fused = self.everything(x).view(b, s, -1, self.many // self.few + 2, self.reach)
        q = fused[:, :, :, :-2]
        k, v = (torch.broadcast_to(fused[:, :, :, [i]], q.shape) for i in (-2, -1))
        q, k, v = (t.flatten(2, 3).transpose(1, 2).reshape(b, self.many, s, self.reach) for t in (q, k, v))
        return self.back(attend(q, k, v).transpose(1, 2).reshape(b, s, self.many * self.reach))


class Interleaved(nn.Module):
    """``[heads, 3, reach]`` in one weight."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.horns, self.reach = config.zork, config.reach
        self.braid = nn.Linear(config.width, 3 * config.zork * config.reach)
        self.unbraid = nn.Linear(config.zork * config.reach, config.width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        strands = self.braid(x).view(b, s, self.horns, 3 * self.reach).transpose(1, 2)
        q, k, v = strands.chunk(3, dim=-1)
        return self.unbraid(attend(q, k, v).transpose(1, 2).reshape(b, s, self.horns * self.reach))


class Literal(nn.Module):
    """The head count is a number in the code: no attribute can change it."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        assert config.zork == 8
        self.alpha = nn.Linear(config.width, 8 * config.reach)
        self.omega = nn.Linear(8 * config.reach, config.width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.alpha(x).view(b, s, 8, -1).transpose(1, 2)
        return self.omega(attend(q, q, q).transpose(1, 2).reshape(b, s, -1))


# Feed-forward --------------------------------------------------------------------------------------


class GateUp(nn.Module):
    """Gate and up in one weight, halved by an attribute."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.half = config.girth
        self.both = nn.Linear(config.width, 2 * config.girth, bias=False)
        self.shut = nn.Linear(config.girth, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.both(x)
        return self.shut(F.silu(wide[..., : self.half]) * wide[..., self.half :])


class Dense(nn.Module):
    """A linear map of a class of its own: ``x @ weight + bias``, both biases used."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(inner, outer))
        self.offset = nn.Parameter(torch.empty(outer))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offset, x.flatten(0, -2), self.matrix).unflatten(0, x.shape[:-1])


class DenseMlp(nn.Module):
    """Row-parallel by a custom class: its bias must be added once."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.up, self.down = Dense(config.width, config.girth), Dense(config.girth, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Squares(nn.Module):
    """The square of a sum over ranks is not the sum of squares."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.girth, bias=False)
        self.weight = nn.Parameter(torch.empty(config.width, config.girth))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.up(x)) @ self.weight.transpose(0, 1)
        return y * y


class ByHead(nn.Module):
    """A projection whose weight has a dim for the heads, which its input has not."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.width, 8, config.girth // 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,dhk->bthk", x, self.weight).flatten(-2)


class HeadsMlp(nn.Module):
    """Two layers, of which the first has a weight of three dims."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.up = ByHead(config)
        self.down = nn.Linear(config.girth, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


# Norms over a sharded dim ----------------------------------------------------------------------------


class Rms(nn.Module):
    """``x / rms(x) * (offset + weight)``."""

    def __init__(self, size: int, offset: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(size))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (
            (wide * (self.offset + self.scale.float())).type_as(x)
            if self.offset
            else self.scale * wide.to(x.dtype)
        )


class UnitLength(nn.Module):
    """``x`` over its length, in float32, without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).type_as(x)


class NormedMlp(nn.Module):
    """Normalises its hidden values, which are sharded."""

    def __init__(self, config: OddConfig, norm: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.girth)
        self.norm = norm
        self.down = nn.Linear(config.girth, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


# Layers and models ---------------------------------------------------------------------------------


class GatedMlp(nn.Module):
    """Two projections; a norm over two groups of one, opened by the other."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.girth)
        self.side = nn.Linear(config.width, config.girth)
        self.norm = GatedNorm(config.girth, config.girth // 2)
        self.down = nn.Linear(config.girth, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x), self.side(x)))


class GatedNorm(nn.Module):
    """RMS norm of each group of ``x * silu(opener)``."""

    def __init__(self, size: int, group: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.group = group

    def forward(self, x: Tensor, opener: Tensor) -> Tensor:
        wide = x.float() * F.silu(opener.float())
        groups = wide.view(*x.shape[:-1], x.shape[-1] // self.group, self.group)
        y = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.scale * y.view(*x.shape).to(x.dtype)


class TwiceNormedMlp(nn.Module):
    """Two projections around a norm without weights, which also sees a table that is replicated."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.girth)
        self.norm = Tame()
        self.table = nn.Parameter(torch.ones(config.girth))
        self.down = nn.Linear(config.girth, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x))) * self.norm(self.table.cumsum(0)[None]).sum()


class Layer(nn.Module):
    """A residual layer, its two branches one after the other or side by side."""

    def __init__(self, config: OddConfig, mixer: nn.Module, mlp: nn.Module, parallel: bool) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.mixer, self.chewer = mixer, mlp
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel:
            y = self.before(x)
            return x + self.mixer(y) + self.chewer(y)
        x = x + self.mixer(self.before(x))
        return x + self.chewer(self.between(x))


class OddModel(PreTrainedModel):
    """Embedding, layers, head; the classes below choose the parts."""

    config_class = OddConfig
    parallel = False
    looped = False
    mixer: Any = Plain
    mlp: Any = GateUp

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.lookup = nn.Embedding(config.words, config.width)
        layers = [
            Layer(config, type(self).mixer(config), type(self).mlp(config), self.parallel)
            for _ in range(1 if self.looped else config.repeats)
        ]
        self.stack = nn.ModuleList(layers)
        self.rounds = config.repeats if self.looped else 1
        self.speak = nn.Linear(config.width, config.words, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        return None

    def get_input_embeddings(self) -> nn.Module:
        return self.lookup

    def get_output_embeddings(self) -> nn.Module:
        return self.speak

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        x = self.lookup(input_ids)
        for _ in range(self.rounds):
            for layer in self.stack:
                x = layer(x)
        return CausalLMOutput(logits=self.speak(x))


class FusedModel(OddModel):
    mixer = FusedUnequal


class SlicedModel(OddModel):
    mixer = Sliced


class GroupedModel(OddModel):
    mixer = Grouped


class InterleavedModel(OddModel):
    mixer = Interleaved


class LiteralModel(OddModel):
    mixer = Literal


class ParallelModel(OddModel):
    parallel = True


class LoopedModel(OddModel):
    looped = True


class DenseModel(OddModel):
    mlp = DenseMlp


class SquaresModel(OddModel):
    mlp = Squares


class HeadsModel(OddModel):
    mlp = HeadsMlp


class TiedModel(OddModel):
    """With ``tie_word_embeddings=True``."""

    _tied_weights_keys = {"speak.weight": "lookup.weight"}  # noqa: RUF012


class RmsModel(OddModel):
    @staticmethod
    def mlp(config: OddConfig) -> nn.Module:
        return NormedMlp(config, Rms(config.girth, 0.0))


class UnitLengthModel(OddModel):
    @staticmethod
    def mlp(config: OddConfig) -> nn.Module:
        return NormedMlp(config, UnitLength())


class OffsetRmsModel(OddModel):
    @staticmethod
    def mlp(config: OddConfig) -> nn.Module:
        return NormedMlp(config, Rms(config.girth, 1.0))


class LayerNormModel(OddModel):
    @staticmethod
    def mlp(config: OddConfig) -> nn.Module:
        return NormedMlp(config, nn.LayerNorm(config.girth))


class TwiceNormedModel(OddModel):
    mlp = TwiceNormedMlp


class GatedNormModel(OddModel):
    mlp = GatedMlp


class PlacedModel(OddModel):
    """Learned positions, and code that refuses more tokens than there are."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.places = nn.Embedding(128, config.width)
        self.post_init()

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        if input_ids.shape[1] > self.places.weight.shape[0]:
            raise ValueError("more tokens than places")
        x = self.lookup(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.stack:
            x = layer(x)
        return CausalLMOutput(logits=self.speak(x))


class Shouting(nn.Embedding):
    """An embedding of a class of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 3 * super().forward(input)


class PaddedModel(OddModel):
    """The row of padding is the last one of both tables, which no rank but the last holds."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.lookup = nn.Embedding(config.words, config.width, padding_idx=config.words - 1)
        self.louder = Shouting(config.words, config.width, padding_idx=-1)
        self.post_init()

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        x = self.lookup(input_ids) + self.louder(input_ids)
        for layer in self.stack:
            x = layer(x)
        return CausalLMOutput(logits=self.speak(x))


class AllPlacesModel(OddModel):
    """Reads every row of a table, and learns from the table how many there are."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.places = nn.Embedding(config.words, config.width)
        self.post_init()

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        places = self.places(torch.arange(self.places.num_embeddings, device=input_ids.device))
        x = self.lookup(input_ids) + places.mean(0)
        for layer in self.stack:
            x = layer(x)
        return CausalLMOutput(logits=self.speak(x))


class Tame(nn.Module):
    """An RMS norm without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class TwiceTamedModel(OddModel):
    """One norm before all layers and behind them; gradients would best be summed behind one of its calls."""

    mixer = Literal

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.tame = Tame()

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        x = self.tame(self.lookup(input_ids))
        for layer in self.stack:
            x = layer(x)
        return CausalLMOutput(logits=self.speak(self.tame(x)))


class Derived(Plain):
    """Reads a size that the class of the config computes."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.alpha(x).view(b, s, self.config.span)
        return self.omega(torch.tanh(q))


class DerivedModel(OddModel):
    mixer = Derived


def spec(model_class: type[OddModel], **sizes: Any) -> ModelSpec:
    """What ``solve_plan`` is given."""
    return ModelSpec(model_class.__name__, OddConfig(**sizes), model_class, "float32")


def plan_of(model_class: type[OddModel], tp: int, **sizes: Any) -> Plan:
    """The plan, proven on numbers."""
    return solve_plan(spec(model_class, **sizes), SolveOptions(tp))
