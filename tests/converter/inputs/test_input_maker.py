"""Inputs of which little is known: their names, the config's sizes and the model's errors tell the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from made_inputs import make_inputs
from shardconv_runtime.errors import SolveError
from torch import Tensor, nn

VOCAB, WIDTH, SIDE, PATCH = 64, 48, 8, 4


@dataclass
class Config:
    """As much of a config as is looked at."""

    vocab_size: int = VOCAB
    image_size: int | None = SIDE
    patch_size: int | None = PATCH
    model_type: str = "any"
    prompter_config: Any = None

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Model(nn.Module):
    """Has an embedding and a way to see images; a test gives it a forward method."""

    main_input_name = "input_ids"

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config or Config()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.see = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.measure = nn.Linear(20, WIDTH)
        self.to("meta")

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def features(self, images: Tensor) -> Tensor:
        """``[B, C, H, W]`` to ``[B, patches, WIDTH]``."""
        return self.see(images).flatten(2).transpose(1, 2)


# What a layer or the model says ------------------------------------------------------------------------


def test_an_unknown_input_gets_the_width_that_a_layer_needs() -> None:
    class Robot(Model):
        def forward(self, state: Tensor, input_ids: Tensor | None = None) -> Tensor:
            assert input_ids is not None
            return self.embed(input_ids) + self.measure(state)[:, None]

    tensors = make_inputs(Robot()).tensors
    assert tensors["state"].shape == (len(tensors["input_ids"]), 20)
    assert tensors["state"].is_floating_point()


def test_a_form_gets_a_length_that_the_model_can_divide() -> None:
    class Ears(Model):
        main_input_name = "input_values"

        def forward(self, input_values: Tensor, padding_mask: Tensor | None = None) -> Tensor:
            if input_values.shape[1] % 20:
                raise ValueError(f"length {input_values.shape[1]} is not a multiple of 20")
            assert padding_mask is not None
            return self.measure(input_values.view(len(input_values), -1, 20)) * padding_mask.sum()

    tensors = make_inputs(Ears()).tensors
    length = tensors["input_values"].shape[1]
    assert length % 20 == 0
    assert tensors["padding_mask"].shape[1] == length
    assert not tensors["padding_mask"].is_floating_point()
    assert tensors["padding_mask"].all()
    assert not {length, length // 20} & {n for p in Ears().parameters() for n in p.shape}


def test_stacked_frames_are_found_once_no_form_will_do() -> None:
    @dataclass
    class Sounds(Config):
        num_mel_bins: int = 5

    class Ears(Model):
        main_input_name = "input_features"

        def forward(self, input_features: Tensor) -> Tensor:
            return self.measure(input_features)

    shape = make_inputs(Ears(Sounds())).tensors["input_features"].shape
    assert shape[1:] == (104, 20)


def test_what_no_layer_tells_cannot_be_made_up() -> None:
    class Strange(Model):
        def forward(self, input_ids: Tensor, weather: Tensor) -> Tensor:
            return self.embed(input_ids) + weather

    class Named(Model):
        def forward(self, input_ids: Tensor, weather: str) -> Tensor:
            return self.embed(input_ids)

    for model in (Strange(), Named()):
        with pytest.raises(SolveError, match="takes weather, which cannot be made up"):
            make_inputs(model)


def test_the_error_of_a_model_that_needs_images_is_its_own() -> None:
    class Blind(Model):
        def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
            raise ValueError("it is dark")

    with pytest.raises(SolveError, match="it is dark"):
        make_inputs(Blind())


def test_a_model_without_a_forward_method_is_refused_with_its_parts() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thinker = Model()

    with pytest.raises(SolveError, match=r"no forward method.*thinker \(Model\)"):
        make_inputs(Wrapper())


# Ids and masks -----------------------------------------------------------------------------------------


def test_a_part_gets_ids_of_its_own_vocabulary() -> None:
    class Prompted(Model):
        def forward(self, prompter_input_ids: Tensor, input_ids: Tensor | None = None) -> Tensor:
            return self.embed(prompter_input_ids).sum() + self.embed(input_ids)

    for config, rows in ((Config(prompter_config=Config(vocab_size=9)), 9), (Config(), VOCAB)):
        ids = make_inputs(Prompted(config)).tensors["prompter_input_ids"]
        assert ids.dtype == torch.long
        assert 3 <= int(ids.min()) <= int(ids.max()) < rows


def test_ids_with_a_meaning_are_not_drawn() -> None:
    @dataclass
    class Special(Config):
        vocab_size: int = 6
        start_token_id: int = 3
        end_token_ids: int = 4
        stop_token_id: tuple[int, ...] = (5,)

    class Text(Model):
        def forward(self, input_ids: Tensor) -> Tensor:
            return self.embed(input_ids)

    model = Text(Special())
    model.embed = nn.Embedding(6, WIDTH, device="meta")
    assert make_inputs(model).tensors["input_ids"].unique().tolist() == [4]


def test_a_mask_may_say_where_the_features_go() -> None:
    @dataclass
    class Placed(Config):
        latent_query_num: int = 4

    class Places(Model):
        def forward(
            self,
            input_ids: Tensor,
            pixel_values: Tensor | None = None,
            image_embeds_position_mask: Tensor | None = None,
        ) -> Tensor:
            assert pixel_values is not None
            assert image_embeds_position_mask is not None
            x = self.embed(input_ids)
            features = self.features(pixel_values).flatten(0, 1)
            if int(image_embeds_position_mask.sum()) != len(features):
                raise ValueError("as many as there are features, please")
            return x.masked_scatter(image_embeds_position_mask[..., None], features)

    tensors = make_inputs(Places(Placed())).tensors
    assert tensors["image_embeds_position_mask"].sum(1).unique().tolist() == [4]


def test_a_mask_may_say_which_images_a_token_sees() -> None:
    class Looks(Model):
        def forward(
            self,
            input_ids: Tensor,
            pixel_values: Tensor | None = None,
            image_attention_mask: Tensor | None = None,
        ) -> Tensor:
            assert pixel_values is not None
            assert image_attention_mask is not None
            seen = self.features(pixel_values.flatten(0, 1)).mean(1).view(len(pixel_values), -1, WIDTH)
            return self.embed(input_ids) + image_attention_mask.to(seen.dtype) @ seen

    tensors = make_inputs(Looks()).tensors
    mask = tensors["image_attention_mask"]
    assert mask.shape == (*tensors["input_ids"].shape, tensors["pixel_values"].shape[1])
    assert mask[:, 0].sum() == 0
    assert mask[:, 1:].all()


def test_there_are_as_many_placeholders_as_the_config_says() -> None:
    """The code takes the first tokens away without counting them."""

    @dataclass
    class Queries(Config):
        image_token_id: int = 60
        num_query_tokens: int = 30

    class Drops(Model):
        def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
            return (
                self.embed(input_ids[:, 30:]).view(len(input_ids), -1, WIDTH) + self.see(pixel_values).mean()
            )

    ids = make_inputs(Drops(Queries())).tensors["input_ids"]
    assert (ids == 60).sum(1).unique().tolist() == [30]


# Images and videos -------------------------------------------------------------------------------------


def test_patches_behind_their_positions() -> None:
    class Patches(Model):
        main_input_name = "flattened_patches"

        def forward(self, flattened_patches: Tensor) -> Tensor:
            rows, columns = flattened_patches[..., :2].long().unbind(-1)
            return self.embed(rows) + self.embed(columns) + flattened_patches[..., 2:].sum()

    patches = make_inputs(Patches()).tensors["flattened_patches"]
    assert patches.shape[2] == 2 + 3 * PATCH**2
    positions = patches[0, :, :2].long()
    assert len(positions.unique(dim=0)) == len(positions)
    assert int(positions.min()) == 1


@pytest.mark.parametrize("name", ["pixel_values", "pixel_values_videos"])
def test_videos(name: str) -> None:
    @dataclass
    class Frames(Config):
        num_frames: int = 6

    class Watches(Model):
        main_input_name = "pixel_values"

        def forward(self, pixel_values: Tensor) -> Tensor:
            batch, frames, *_ = pixel_values.shape
            if frames != 6 or pixel_values.dim() != 5:
                raise ValueError("six frames, please")
            return self.features(pixel_values.flatten(0, 1)).reshape(batch, frames, -1)

    class WatchesVideos(Watches):
        def forward(self, pixel_values_videos: Tensor) -> Tensor:
            return super().forward(pixel_values_videos)

    model = Watches(Frames()) if name == "pixel_values" else WatchesVideos(Frames())
    assert make_inputs(model).tensors[name].shape[1:] == (6, 3, SIDE, SIDE)


def test_an_image_of_unknown_size_is_large_enough_for_a_few_strides() -> None:
    class Eyes(Model):
        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__(Config(image_size=None, patch_size=None))
            self.narrow = nn.Conv2d(WIDTH, WIDTH, 8, 8, device="meta")

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.narrow(self.see(pixel_values))

    assert make_inputs(Eyes()).tensors["pixel_values"].shape[2:] == (64, 64)


def test_code_that_needs_a_large_image_of_unknown_size_gets_one() -> None:
    class Detects(Model):
        main_input_name = "pixel_values"

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.features(pixel_values).max(-1).values.topk(300, dim=1).values

    model = Detects(Config(image_size=None, patch_size=None))
    assert make_inputs(model).tensors["pixel_values"].shape[2:] == (640, 640)


def test_pairs_of_images() -> None:
    class Matches(Model):
        main_input_name = "pixel_values"

        def forward(self, pixel_values: Tensor) -> Tensor:
            first, second = pixel_values.unbind(1)
            if pixel_values.dim() != 5:
                raise ValueError("pairs, please")
            return self.features(first) @ self.features(second).mT

    assert make_inputs(Matches()).tensors["pixel_values"].shape[1:] == (2, 3, SIDE, SIDE)


def test_patches_of_a_part_with_their_grid() -> None:
    class Tower(Model):
        main_input_name = "hidden_states"

        def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Tensor:
            if int(grid_thw.prod(-1).sum()) != len(hidden_states):
                raise ValueError("as many patches as the grids have, please")
            return hidden_states.view(-1, 3, PATCH, PATCH).mean(1)

    tensors = make_inputs(Tower()).tensors
    assert tensors["hidden_states"].shape[1] == 3 * PATCH**2
    assert tensors["grid_thw"].shape[1] == 3


# Others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [0, 3])
def test_measurements_over_time(channels: int) -> None:
    @dataclass
    class Series(Config):
        context_length: int = 20
        num_input_channels: int = channels

    class Forecasts(Model):
        main_input_name = "past_values"

        def forward(self, past_values: Tensor) -> Tensor:
            return self.measure(past_values.mT if channels else past_values)

    shape = make_inputs(Forecasts(Series())).tensors["past_values"].shape
    assert shape[1:] == ((20, channels) if channels else (20,))


def test_texts_of_which_one_is_chosen() -> None:
    class Chooses(Model):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            assert attention_mask is not None
            if input_ids.dim() != 3 or attention_mask.dim() != 3:
                raise ValueError("several texts for each row, please")
            return (self.embed(input_ids) * attention_mask[..., None]).sum((-1, -2))

    tensors = make_inputs(Chooses()).tensors
    assert tensors["input_ids"].shape[1] == 2
    assert tensors["input_ids"].shape == tensors["attention_mask"].shape
    assert tensors["input_ids"][:, 0].ne(tensors["input_ids"][:, 1]).any()


class WithPatchMask(Model):
    """Replaces masked patches by a learned one; without a mask, it replaces none."""

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None) -> Tensor:
        """See the class."""
        patches = self.features(pixel_values)
        if bool_masked_pos is None:
            return patches
        return torch.where(bool_masked_pos[..., None], self.embed.weight[0], patches)


class MasksVideos(Model):
    """Keeps the patches that are not masked, as many in each row."""

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor) -> Tensor:
        """See the class."""
        patches = self.features(pixel_values.flatten(0, 1)).unflatten(0, pixel_values.shape[:2]).flatten(1, 2)
        return patches[~bool_masked_pos].view(len(patches), -1, WIDTH)


def test_patches_are_masked() -> None:
    inputs = make_inputs(WithPatchMask())
    mask = inputs.tensors["bool_masked_pos"]
    assert mask.dtype == torch.bool
    assert mask.shape == (len(inputs.tensors["pixel_values"]), (SIDE // PATCH) ** 2)
    assert mask.sum(1).tolist() == [2] * len(mask)
    unmasked = inputs.without_patch_mask()
    assert unmasked is not None
    assert list(unmasked.tensors) == ["pixel_values"]
    assert unmasked.without_patch_mask() is None


def test_a_mask_that_a_model_cannot_take_is_left_out() -> None:
    class NeverMasked(Model):
        def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None) -> Tensor:
            if bool_masked_pos is not None:
                raise ValueError("there is no learned patch")
            return self.features(pixel_values)

    inputs = make_inputs(NeverMasked())
    assert list(inputs.tensors) == ["pixel_values"]
    assert "there is no learned patch" in inputs.left_out["bool_masked_pos"]


def test_a_mask_of_videos_that_is_needed() -> None:
    inputs = make_inputs(MasksVideos())
    frames = inputs.tensors["pixel_values"].shape[1]
    assert inputs.tensors["bool_masked_pos"].shape[1] == frames * (SIDE // PATCH) ** 2
