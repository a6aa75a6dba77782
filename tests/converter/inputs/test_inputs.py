"""What a model is called with: read off its forward method and its config, tried where that is not enough."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from made_inputs import PATCH, SIDE, Vision, make_inputs
from shardconv_runtime.errors import SolveError
from torch import Tensor, nn

from shardconv.dim_analysis.rules import RULES
from shardconv.inputs.trace_inputs import TraceInputs, trace_inputs

VOCAB, WIDTH, PLACE = 64, 48, 60


@dataclass
class Config:
    """As much of a config as is looked at."""

    vocab_size: int = VOCAB
    image_token_id: int | None = PLACE
    max_position_embeddings: int = 128
    eos_token_id: int = 2
    model_type: str = "any"
    vision: Any = None
    sounds: Any = None

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Sounds:
    """Spectra of ten bins."""

    num_mel_bins: int = 10
    max_source_positions: int = 15
    model_type: str = "sounds"

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Text(nn.Module):
    """Token ids to token scores."""

    main_input_name = "input_ids"

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self.config = config or Config()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.speak = nn.Linear(WIDTH, VOCAB)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = True
    ) -> Tensor:
        return self.speak(self.embed(input_ids))


class Seeing(Text):
    """Puts the features of images in the places of their tokens, as many as there are patches."""

    def __init__(self, images: str = "B C H W", says: str = "{places} places, {features} features") -> None:
        super().__init__(Config(vision=Vision()))
        self.images, self.says = images, says
        self.see = nn.Conv2d(3, WIDTH, PATCH, PATCH)

    def features(self, pixel_values: Tensor) -> Tensor:
        if pixel_values.dim() != len(self.images.split()):
            raise ValueError(f"images come as {self.images}")
        x = self.see(pixel_values.flatten(0, -4))
        return x.flatten(2).transpose(1, 2)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, pixel_values: Tensor | None = None
    ) -> Tensor:
        x = self.embed(input_ids)
        if pixel_values is not None:
            features = self.features(pixel_values).flatten(0, 1)
            places = input_ids == PLACE
            if int(places.sum()) != len(features):
                raise ValueError(self.says.format(places=int(places.sum()), features=len(features)))
            x = x.masked_scatter(places[..., None], features)
        return self.speak(x)


class SeeingAndSaying(Seeing):
    """Also says what it makes of an image."""

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return self.features(pixel_values)


def on_meta(model: nn.Module) -> nn.Module:
    """The model without numbers."""
    return model.to("meta")


def places(inputs: TraceInputs) -> list[int]:
    """Places for images in each row."""
    return (inputs.tensors["input_ids"] == PLACE).sum(1).tolist()


# Text ------------------------------------------------------------------------------------------------


def test_text() -> None:
    inputs = make_inputs(on_meta(Text()))
    ids, mask = inputs.tensors["input_ids"], inputs.tensors["attention_mask"]
    assert ids.shape == mask.shape
    assert ids.device.type == "cpu"
    assert int(ids.min()) >= 3
    assert int(ids.max()) < VOCAB
    assert mask[0, :3].tolist() == [0, 0, 1]
    assert int((mask == 0).sum()) == 2
    assert inputs.options == {"use_cache": True}
    assert inputs.left_out == {}


def test_sizes_coincide_with_no_size_of_a_parameter() -> None:
    model = Text()
    model.register_parameter("other", nn.Parameter(torch.zeros(24, 3, 26 * 5)))
    batch, length = make_inputs(on_meta(model)).tensors["input_ids"].shape
    assert not {batch, length, batch * length} & {VOCAB, WIDTH, 24, 3, 26 * 5}


def test_the_length_coincides_with_no_rotary_dims_and_no_attribute() -> None:
    """A buffer of 12 frequencies makes tensors of 24; the third counts layers, and is no size."""
    model = Text()
    model.register_buffer("frequencies", torch.zeros(12))
    model.chunk = 26  # type: ignore[assignment]
    model.counted = nn.ModuleList([Text(), Text()])
    model.counted[0].index, model.counted[1].index = 22, 21  # type: ignore[assignment]
    assert make_inputs(on_meta(model)).tensors["input_ids"].shape[1] == 22


def test_another_seed_has_other_sizes_and_values() -> None:
    model = on_meta(Text())
    first, second = make_inputs(model), make_inputs(model, seed=7)
    (a, b), (c, d) = first.tensors["input_ids"].shape, second.tensors["input_ids"].shape
    assert a != c
    assert b != d
    assert first.tensors["input_ids"][:c, :d].ne(second.tensors["input_ids"]).any()


def test_the_length_fits_the_positions() -> None:
    assert make_inputs(on_meta(Text(Config(max_position_embeddings=12)))).tensors["input_ids"].shape[1] < 12


@pytest.mark.parametrize("multiple", [2, 5, 16, 64])
def test_the_length_is_a_multiple_of_the_number_of_ranks(multiple: int) -> None:
    for model in (Text(), SeeingAndSaying("B C H W", says="wrong")):
        inputs, _ = trace_inputs(on_meta(model), RULES, multiple=multiple)
        assert inputs.tensors["input_ids"].shape[1] % multiple == 0


def test_streams_of_ids_are_stacked_in_the_batch() -> None:
    class Streams(Text):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(VOCAB, WIDTH) for _ in range(4))

        def get_input_embeddings(self) -> nn.Module:
            return self.tables

        def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            streams = input_ids.reshape(-1, 4, input_ids.shape[-1]).unbind(1)
            return self.speak(sum(table(ids) for table, ids in zip(self.tables, streams, strict=True)))

    assert make_inputs(on_meta(Streams())).tensors["input_ids"].shape[0] % 4 == 0


@pytest.mark.parametrize("decodes", [False, True])
def test_positions_of_several_ids_are_found_by_what_the_model_says(decodes: bool) -> None:
    """Codes of sounds: a row of a table for each of them, and one number of codes in the shared part."""

    @dataclass
    class Codes(Config):
        codebook_vocab_size: int = 16

    class Speaks(Text):
        def __init__(self) -> None:
            super().__init__(Codes())
            self.register_buffer("offsets", torch.arange(3) * 16)

        def forward(  # type: ignore[override]
            self, input_ids: Tensor, decoder_input_ids: Tensor | None = None
        ) -> Tensor:
            ids = input_ids if decoder_input_ids is None else decoder_input_ids
            return self.speak(self.embed(ids + self.offsets).sum(2))

    class Listens(Speaks):
        def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids)

    tensors = make_inputs(on_meta(Speaks() if decodes else Listens())).tensors
    codes = tensors["decoder_input_ids" if decodes else "input_ids"]
    assert codes.shape[2] == 3
    assert int(codes.max()) < 16


def test_a_decoder_gets_ids_of_its_own() -> None:
    class Both(Text):
        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:  # type: ignore[override]
            return self.speak(self.embed(decoder_input_ids) + self.embed(input_ids).mean(1, keepdim=True))

    tensors = make_inputs(on_meta(Both())).tensors
    assert tensors["input_ids"].shape[1] != tensors["decoder_input_ids"].shape[1]


def test_a_head_that_looks_for_the_end_gets_one_in_each_row() -> None:
    class Ends(Text):
        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:  # type: ignore[override]
            ends = input_ids == self.config.eos_token_id
            return self.speak(self.embed(decoder_input_ids)[ends].view(len(input_ids), -1, WIDTH)[:, -1])

    tensors = make_inputs(on_meta(Ends())).tensors
    assert tensors["input_ids"].eq(2).sum(1).tolist() == [1] * len(tensors["input_ids"])
    assert tensors["input_ids"].equal(tensors["decoder_input_ids"])


def test_a_model_of_one_row_gets_one() -> None:
    class Single(Text):
        def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            if len(input_ids) > 1:
                raise ValueError("one row, please")
            return super().forward(input_ids)

    assert len(make_inputs(on_meta(Single())).tensors["input_ids"]) == 1


def test_code_that_insists_on_float32_is_tried_in_float32() -> None:
    class Insists(Text):
        def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:  # type: ignore[override]
            return self.speak(self.embed(input_ids).float() + pixel_values.float().mean())

    inputs = make_inputs(Insists().double())
    assert inputs.tensors["pixel_values"].dtype == torch.float64


def test_what_the_model_says_first_is_the_error() -> None:
    class Broken(Text):
        def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            raise ValueError("never")

    with pytest.raises(SolveError, match="never"):
        make_inputs(on_meta(Broken()))


def test_unknown_arguments_are_named() -> None:
    class Strange(Text):
        def forward(self, input_ids: Tensor, weather: Tensor) -> Tensor:  # type: ignore[override]
            return self.speak(self.embed(input_ids) + weather)

    with pytest.raises(SolveError, match="Strange takes weather"):
        make_inputs(on_meta(Strange()))


@pytest.mark.parametrize("attends", [True, False])
def test_states_of_an_encoder_are_given_where_only_they_reach_weights(attends: bool) -> None:
    class Decodes(Text):
        def __init__(self) -> None:
            super().__init__(Known())
            self.attend = nn.Linear(WIDTH, WIDTH) if attends else None

        def forward(  # type: ignore[override]
            self, input_ids: Tensor, encoder_hidden_states: Tensor | None = None
        ) -> Tensor:
            x = self.embed(input_ids)
            if self.attend is not None and encoder_hidden_states is not None:
                x = x + self.attend(encoder_hidden_states).mean(1, keepdim=True)
            return self.speak(x)

    @dataclass
    class Known(Config):
        hidden_size: int = WIDTH

    inputs = make_inputs(on_meta(Decodes()))
    assert ("encoder_hidden_states" in inputs.tensors) is attends
    assert inputs.left_out == {}


def test_some_tokens_see_all_others() -> None:
    class Far(Text):
        def forward(  # type: ignore[override]
            self, input_ids: Tensor, attention_mask: Tensor, global_attention_mask: Tensor | None = None
        ) -> Tensor:
            assert global_attention_mask is not None
            return self.speak(self.embed(input_ids))

    tensors = make_inputs(on_meta(Far())).tensors
    far = tensors["global_attention_mask"]
    assert far.shape == tensors["input_ids"].shape
    assert far.sum(1).tolist() == [1] * (len(far) - 1) + [2]
    assert not (far * (1 - tensors["attention_mask"])).any()


@pytest.mark.parametrize("says", [True, False])
def test_entities_are_mentioned_in_the_text(says: bool) -> None:
    @dataclass
    class Known(Config):
        entity_vocab_size: int = 20
        max_mention_length: int = 4 if says else 0

    class Mentions(Text):
        def __init__(self) -> None:
            super().__init__(Known())
            self.entities = nn.Embedding(20, WIDTH)

        def forward(  # type: ignore[override]
            self,
            input_ids: Tensor,
            entity_ids: Tensor | None = None,
            entity_position_ids: Tensor | None = None,
        ) -> Tensor:
            if entity_ids is None or entity_position_ids is None:
                return self.speak(self.embed(input_ids))
            known = self.entities(entity_ids) * (entity_position_ids >= 0).any(2, keepdim=True)
            return self.speak(torch.cat([self.embed(input_ids), known], dim=1))

    tensors = make_inputs(on_meta(Mentions())).tensors
    ids, mentions = tensors["entity_ids"], tensors["entity_position_ids"]
    assert int(ids.max()) < 20
    assert mentions.shape == (*ids.shape, 4 if says else 5)
    assert mentions.ge(0).sum(2).unique().tolist() == [2]
    assert int(mentions.max()) < tensors["input_ids"].shape[1]


# Images and sounds -----------------------------------------------------------------------------------


def test_images_alone() -> None:
    class Eyes(nn.Module):
        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__()
            self.config = Vision()
            self.see = nn.Conv2d(3, WIDTH, PATCH, PATCH)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.see(pixel_values)

    inputs, tape = trace_inputs(on_meta(Eyes().to(torch.bfloat16)), RULES)
    assert list(inputs.tensors) == ["pixel_values"]
    pixels = inputs.tensors["pixel_values"]
    assert pixels.shape[1:] == (3, SIDE, SIDE)
    assert pixels.dtype == torch.bfloat16
    assert float(pixels.float().std()) > 0.5
    assert tape.tensors[tape.outputs[0]].shape == (len(pixels), WIDTH, SIDE // PATCH, SIDE // PATCH)


@pytest.mark.parametrize("images", ["B C H W", "B N C H W"])
def test_places_are_counted_by_the_model_s_features(images: str) -> None:
    inputs = make_inputs(on_meta(SeeingAndSaying(images, says="wrong")))
    assert inputs.tensors["pixel_values"].dim() == len(images.split())
    assert set(places(inputs)) == {(SIDE // PATCH) ** 2}
    assert inputs.left_out == {}
    assert (inputs.tensors["input_ids"] == PLACE)[inputs.tensors["attention_mask"] == 0].sum() == 0


@pytest.mark.parametrize("says", ["{places} places, {features} features", "tokens and features differ"])
def test_places_are_found_by_what_the_model_says(says: str) -> None:
    assert set(places(make_inputs(on_meta(Seeing(says=says))))) == {(SIDE // PATCH) ** 2}


def test_nothing_is_run_on_numbers_where_another_number_of_places_is_right() -> None:
    devices: list[str] = []

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Seeing(says="{places} tokens, {features} features")

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            devices.append(args[0].device.type)
            return self.inner(*args, **kwargs)

    class Around(Text):
        def __init__(self) -> None:
            super().__init__(Config(vision=Vision()))
            self.inside = Inside()

        def forward(  # type: ignore[override]
            self, input_ids: Tensor, attention_mask: Tensor | None = None, pixel_values: Tensor | None = None
        ) -> Tensor:
            return self.inside(input_ids, pixel_values=pixel_values)

    assert set(places(make_inputs(on_meta(Around())))) == {(SIDE // PATCH) ** 2}
    assert set(devices) == {"meta"}


def test_a_model_on_numbers_gets_the_same_as_one_on_meta() -> None:
    real, meta = make_inputs(SeeingAndSaying()), make_inputs(on_meta(SeeingAndSaying()))
    assert {n: t.shape for n, t in real.tensors.items()} == {n: t.shape for n, t in meta.tensors.items()}


def test_what_cannot_be_given_is_left_out_and_noted() -> None:
    class Blind(Seeing):
        def features(self, pixel_values: Tensor) -> Tensor:
            raise ValueError("it is dark")

    inputs = make_inputs(on_meta(Blind()))
    assert "pixel_values" not in inputs.tensors
    assert places(inputs) == [0] * len(places(inputs))
    assert list(inputs.left_out) == ["pixel_values"]
    assert "it is dark" in inputs.left_out["pixel_values"]


def test_what_is_not_read_is_left_out_and_noted() -> None:
    class Ignorant(Seeing):
        def forward(  # type: ignore[override]
            self, input_ids: Tensor, pixel_values: Tensor | None = None
        ) -> Tensor:
            return self.speak(self.embed(input_ids))

    inputs = make_inputs(on_meta(Ignorant()))
    assert list(inputs.tensors) == ["input_ids"]
    assert inputs.left_out == {"pixel_values": "pixel_values is not read"}


def test_patches_in_a_list_with_their_grid() -> None:
    class Patches(Seeing):
        def __init__(self) -> None:
            super().__init__()
            self.see_patch = nn.Linear(3 * PATCH * PATCH, WIDTH)

        def forward(  # type: ignore[override]
            self, input_ids: Tensor, pixel_values: Tensor | None = None, image_grid_thw: Tensor | None = None
        ) -> Tensor:
            assert pixel_values is not None
            assert image_grid_thw is not None
            assert int(image_grid_thw.prod(-1).sum()) == len(pixel_values)
            return self.speak(self.see_patch(pixel_values))

    tensors = make_inputs(on_meta(Patches())).tensors
    assert tensors["image_grid_thw"].shape == (len(tensors["input_ids"]), 3)
    assert int(tensors["image_grid_thw"].prod(-1).sum()) == len(tensors["pixel_values"])


@pytest.mark.parametrize("bins_first", [True, False])
def test_spectra(bins_first: bool) -> None:
    class Ears(nn.Module):
        main_input_name = "input_features"

        def __init__(self) -> None:
            super().__init__()
            self.config = Config(sounds=Sounds())
            self.hear = nn.Linear(10, WIDTH)

        def forward(self, input_features: Tensor, input_features_mask: Tensor | None = None) -> Tensor:
            x = input_features.transpose(1, 2) if bins_first else input_features
            return self.hear(x)

    tensors = make_inputs(on_meta(Ears())).tensors
    shape = tensors["input_features"].shape[1:]
    assert shape == ((10, 30) if bins_first else (30, 10))
    assert tensors["input_features_mask"].shape[1] == 30


def test_bins_that_are_a_size_of_a_parameter_come_first() -> None:
    @dataclass
    class Stacked(Sounds):
        input_size: int = 40

    class Ears(nn.Module):
        main_input_name = "input_features"
        tried: ClassVar[list[tuple[int, ...]]] = []

        def __init__(self) -> None:
            super().__init__()
            self.config = Config(sounds=Stacked())
            self.hear = nn.Linear(40, WIDTH)

        def forward(self, input_features: Tensor) -> Tensor:
            self.tried.append(tuple(input_features.shape[1:]))
            return self.hear(input_features)

    assert make_inputs(on_meta(Ears())).tensors["input_features"].shape[1:] == (30, 40)
    assert {10, 40} & {n for shape in Ears.tried for n in shape} == {40}


def test_samples_are_a_second_if_fewer_will_not_do() -> None:
    """The parameter that is the main one takes any form of a sound, and no tokens."""

    class Ears(nn.Module):
        main_input_name = "inputs"

        def __init__(self) -> None:
            super().__init__()
            self.config = Config(sounds=Sounds())
            self.hear = nn.Conv1d(1, WIDTH, 700, stride=500)

        def forward(
            self,
            inputs: Tensor | None = None,
            input_features: Tensor | None = None,
            input_values: Tensor | None = None,
        ) -> Tensor:
            if inputs is not None or input_features is not None:
                raise ValueError("samples, please")
            assert input_values is not None
            return self.hear(input_values[:, None])

    tensors = make_inputs(on_meta(Ears())).tensors
    assert list(tensors) == ["input_values"]
    assert tensors["input_values"].shape[1] == 16_000


def test_errors_of_earlier_attempts_hold_no_tensors() -> None:
    """A module that cannot be traced is run on numbers; the copy is gone when the next attempt begins."""
    held: list[weakref.ref[Tensor]] = []
    left: list[int] = []

    class Picky(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            if ids.device.type == "cpu":
                gc.collect()
                left.append(sum(ref() is not None for ref in held))
                held.append(weakref.ref(ids))
            if len(ids) > 1:
                raise ValueError(f"one row, please, after {len(left)} runs")
            return ids

    class Wants(Text):
        def __init__(self) -> None:
            super().__init__()
            self.picky = Picky()

        def forward(  # type: ignore[override]
            self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = True
        ) -> Tensor:
            return super().forward(self.picky(input_ids))

    make_inputs(on_meta(Wants()))
    assert len(left) > 1
    assert not any(left)


def test_states_for_a_decoder() -> None:
    @dataclass
    class Decoder(Config):
        is_decoder: bool = True
        hidden_size: int = WIDTH
        layers: list[int] = field(default_factory=list)

    class Attends(Text):
        def forward(  # type: ignore[override]
            self, input_ids: Tensor, encoder_hidden_states: Tensor | None = None
        ) -> Tensor:
            x = self.embed(input_ids)
            return self.speak(x if encoder_hidden_states is None else x + encoder_hidden_states.mean(1, True))

    model = on_meta(Attends(Decoder()))
    assert make_inputs(model).tensors["encoder_hidden_states"].shape[-1] == WIDTH
    model.config.is_decoder = False
    assert "encoder_hidden_states" not in make_inputs(model).tensors


def test_floating_point_inputs_can_be_cast() -> None:
    tensors = {"x": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.long)}
    inputs = TraceInputs(tensors, {}, {"pixel_values": "a reason"})
    cast = inputs.to(torch.float64)
    assert cast.tensors["x"].dtype == torch.float64
    assert cast.tensors["ids"].dtype == torch.long
    assert cast.left_out == inputs.left_out
