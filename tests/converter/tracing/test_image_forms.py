"""Images in the forms that models take: tiles, masked lists, patches with their grid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from made_inputs import make_inputs
from torch import Tensor, nn

VOCAB, WIDTH, PATCH, SIDE, PLACE = 64, 48, 4, 8, 60


@dataclass
class Vision:
    """An image of ``SIDE`` x ``SIDE`` in patches of ``PATCH``."""

    image_size: int = SIDE
    patch_size: int = PATCH
    num_channels: int = 3
    model_type: str = "vision"

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Config:
    """As much of a config as is looked at."""

    vocab_size: int = VOCAB
    image_token_id: int | None = PLACE
    model_type: str = "any"
    vision: Any = field(default_factory=Vision)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Seeing(nn.Module):
    """Puts the features of images, one for each patch, in the places of their tokens."""

    main_input_name = "input_ids"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.see = nn.Conv2d(3, WIDTH, PATCH, PATCH)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def patches(self, pixels: Tensor) -> Tensor:
        """``[N, C, H, W]`` to ``[N, patches, WIDTH]``."""
        return self.see(pixels).flatten(2).transpose(1, 2)

    def filled(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """The embeddings of tokens, with features ``[N, WIDTH]`` at the places of images."""
        places = input_ids == PLACE
        if int(places.sum()) != len(features):
            raise ValueError(f"tokens: {int(places.sum())}, features: {len(features)}")
        return self.embed(input_ids).masked_scatter(places[..., None], features)


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """What a model on meta is called with; nothing is left out."""
    inputs = make_inputs(model.to("meta"))
    assert inputs.left_out == {}
    return inputs.tensors


def test_tiles_are_as_many_as_the_size_needs() -> None:
    @dataclass
    class Sizes(Config):
        image_grid_pinpoints: Any = ((2 * SIDE, 2 * SIDE), (SIDE, 2 * SIDE), (2 * SIDE, SIDE))

    class Tiles(Seeing):
        def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor) -> list[Tensor]:
            tiles = [h // SIDE * (w // SIDE) + 1 for h, w in image_sizes.tolist()]
            assert pixel_values.shape[1] == max(tiles)
            images = zip(pixel_values, tiles, strict=True)
            return [self.patches(image[:count]).flatten(0, 1) for image, count in images]

        def forward(
            self, input_ids: Tensor, pixel_values: Tensor | None = None, image_sizes: Tensor | None = None
        ) -> Tensor:
            assert pixel_values is not None
            assert image_sizes is not None
            return self.filled(input_ids, torch.cat(self.get_image_features(pixel_values, image_sizes)))

    tensors = inputs_of(Tiles(Sizes()))
    assert tensors["pixel_values"].shape[1:] == (3, 3, SIDE, SIDE)
    assert tensors["image_sizes"].tolist() == [[SIDE, 2 * SIDE]] * len(tensors["pixel_values"])
    assert set((tensors["input_ids"] == PLACE).sum(1).tolist()) == {3 * (SIDE // PATCH) ** 2}


def test_tiles_with_the_number_of_a_ratio_and_what_tokens_see_of_them() -> None:
    @dataclass
    class Ratios(Config):
        image_token_id: int | None = None
        max_num_tiles: int = 3
        supported_aspect_ratios: Any = ((1, 1), (1, 3), (2, 1))

    class Tiles(Seeing):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.ratio = nn.Embedding(4, 3 * WIDTH)

        def forward(
            self,
            input_ids: Tensor,
            pixel_values: Tensor | None = None,
            aspect_ratio_ids: Tensor | None = None,
            aspect_ratio_mask: Tensor | None = None,
            cross_attention_mask: Tensor | None = None,
        ) -> Tensor:
            assert pixel_values is not None
            assert aspect_ratio_ids is not None
            assert aspect_ratio_mask is not None
            assert cross_attention_mask is not None
            batch, images, tiles = pixel_values.shape[:3]
            x = self.patches(pixel_values.flatten(0, 2)).view(batch, images, tiles, -1, WIDTH)
            x = x + self.ratio(aspect_ratio_ids).view(batch, images, tiles, 1, WIDTH)
            x = (x * aspect_ratio_mask[..., None, None]).sum(3)
            return self.embed(input_ids) + torch.einsum("bsnt,bntc->bsc", cross_attention_mask.to(x.dtype), x)

    tensors = inputs_of(Tiles(Ratios()))
    assert tensors["pixel_values"].shape[1:] == (1, 3, 3, SIDE, SIDE)
    assert tensors["aspect_ratio_ids"].unique().tolist() == [2]
    assert tensors["aspect_ratio_mask"].unique().tolist() == [1]
    assert tensors["cross_attention_mask"].shape == (*tensors["input_ids"].shape, 1, 3)
    assert tensors["cross_attention_mask"][:, :2].flatten(2).unique(dim=0).tolist() == [[[0] * 3, [1] * 3]]


def test_images_whose_patches_cannot_be_merged_are_smaller() -> None:
    @dataclass
    class Merged(Vision):
        image_size: int = 3 * PATCH
        scale_factor: int = 2

    class Merges(Seeing):
        def get_image_features(self, pixel_values: Tensor, pixel_attention_mask: Tensor) -> Tensor:
            assert pixel_attention_mask.shape[-2:] == pixel_values.shape[-2:]
            x = self.see(pixel_values.flatten(0, 1))
            n, _, height, width = x.shape
            return x.view(n, WIDTH, height // 2, 2, width // 2, 2).mean((3, 5)).flatten(2).transpose(1, 2)

        def forward(
            self,
            input_ids: Tensor,
            pixel_values: Tensor | None = None,
            pixel_attention_mask: Tensor | None = None,
        ) -> Tensor:
            assert pixel_values is not None
            assert pixel_attention_mask is not None
            features = self.get_image_features(pixel_values, pixel_attention_mask)
            return self.filled(input_ids, features.flatten(0, 1))

    tensors = inputs_of(Merges(Config(vision=Merged())))
    assert tensors["pixel_values"].shape[1:] == (1, 3, 2 * PATCH, 2 * PATCH)
    assert tensors["pixel_attention_mask"].shape[1:] == (1, 2 * PATCH, 2 * PATCH)


def test_patches_with_rows_and_columns_of_pixels() -> None:
    class Patches(Seeing):
        def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
            assert int(image_grid_thw.prod(-1).sum()) == len(pixel_values)
            return self.see(pixel_values).flatten(1)

        def forward(
            self, input_ids: Tensor, pixel_values: Tensor | None = None, image_grid_thw: Tensor | None = None
        ) -> Tensor:
            assert pixel_values is not None
            assert image_grid_thw is not None
            return self.filled(input_ids, self.get_image_features(pixel_values, image_grid_thw))

    assert inputs_of(Patches(Config()))["pixel_values"].shape[1:] == (3, PATCH, PATCH)


def test_every_parameter_that_types_tokens_gets_their_types() -> None:
    class Types(Seeing):
        def get_image_features(self, pixel_values: Tensor) -> Tensor:
            return self.patches(pixel_values)

        def forward(
            self,
            input_ids: Tensor,
            pixel_values: Tensor | None = None,
            mm_token_type_ids: Tensor | None = None,
            moe_mm_token_type_ids: Tensor | None = None,
        ) -> Tensor:
            assert pixel_values is not None
            return self.filled(input_ids, self.get_image_features(pixel_values).flatten(0, 1))

    tensors = inputs_of(Types(Config()))
    assert tensors["moe_mm_token_type_ids"].equal(tensors["mm_token_type_ids"])
    assert tensors["mm_token_type_ids"].bool().equal(tensors["input_ids"] == PLACE)
