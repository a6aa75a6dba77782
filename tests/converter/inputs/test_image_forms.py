"""Images in the forms that models take: tiles, masked lists, patches with their grid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from made_inputs import PATCH, SIDE, Vision, make_inputs
from torch import Tensor, nn

VOCAB, WIDTH, PLACE = 64, 48, 60


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


def test_patches_side_by_side_in_one_image() -> None:
    class Row(Seeing):
        def get_image_features(self, pixel_values: Tensor, **others: Tensor) -> Tensor:
            return self.see(pixel_values)[0, :, 0].T[::16]  # merged twice

        def forward(
            self, input_ids: Tensor, pixel_values: Tensor | None = None, target_sizes: Tensor | None = None
        ) -> Tensor:
            assert pixel_values is not None
            assert target_sizes is not None
            assert not (target_sizes % 4).any()
            assert int(target_sizes.prod(-1).sum()) * PATCH == pixel_values.shape[3]
            return self.filled(input_ids, self.get_image_features(pixel_values))

    assert inputs_of(Row(Config()))["pixel_values"].shape[:3] == (1, 3, PATCH)


def test_squares_of_patches_with_channels_last() -> None:
    class Squares(Seeing):
        def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
            count, frames, height, width, channels = pixel_values.shape
            assert (frames, height, width, channels) == (1, 2 * PATCH, 2 * PATCH, 3)
            assert int(image_grid_thw.prod(-1).sum()) == count
            return self.see(pixel_values[:, 0].permute(0, 3, 1, 2)).mean((2, 3))

        def forward(
            self, input_ids: Tensor, pixel_values: Tensor | None = None, image_grid_thw: Tensor | None = None
        ) -> Tensor:
            assert pixel_values is not None
            assert image_grid_thw is not None
            return self.filled(input_ids, self.get_image_features(pixel_values, image_grid_thw))

    inputs_of(Squares(Config()))


def test_frames_of_patches_with_channels_last() -> None:
    @dataclass
    class Frames(Vision):
        temporal_patch_size: int = 2

    class Folds(Seeing):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.fold = nn.Linear(2 * PATCH * PATCH * 3, WIDTH)

        def get_image_features(self, pixel_values: Tensor) -> Tensor:
            count, frames, height, width, channels = pixel_values.shape
            assert (frames, height, width, channels) == (2, PATCH, PATCH, 3)
            return self.fold(pixel_values.reshape(count, -1))

        def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
            assert pixel_values is not None
            return self.filled(input_ids, self.get_image_features(pixel_values))

    inputs_of(Folds(Config(vision=Frames())))


def test_features_that_are_pooled_from_given_patches() -> None:
    class Pools(Seeing):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.see_flat = nn.Linear(3 * PATCH * PATCH, WIDTH)

        def get_image_features(
            self, pixel_values: Tensor, image_token_pooling: Tensor, image_grids: Tensor
        ) -> tuple[Tensor, ...]:
            assert pixel_values.shape[1:] == ((SIDE // PATCH) ** 2, 3 * PATCH * PATCH)
            pooled = self.see_flat(pixel_values).flatten(0, 1)[image_token_pooling].mean(1)
            small, large = image_grids[:, :2].prod(-1), image_grids[:, 2:].prod(-1)
            return pooled.split((small + large).tolist())

        def forward(
            self,
            input_ids: Tensor,
            pixel_values: Tensor | None = None,
            image_token_pooling: Tensor | None = None,
            image_grids: Tensor | None = None,
        ) -> Tensor:
            assert pixel_values is not None
            assert image_token_pooling is not None
            assert image_grids is not None
            features = self.get_image_features(pixel_values, image_token_pooling, image_grids)
            return self.filled(input_ids, torch.cat(features))

    tensors = inputs_of(Pools(Config()))
    indices = tensors["image_token_pooling"]
    assert indices.shape[1] == 4
    assert sorted(indices.flatten().tolist()) == list(range(len(tensors["pixel_values"]) * 4))


def test_how_far_patches_are_merged_is_said_and_features_are_counted_with_all_arguments() -> None:
    """The method that makes features names few of its arguments."""

    class Merges(Seeing):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.see_flat = nn.Linear(3 * PATCH * PATCH, WIDTH)

        def get_image_features(
            self, pixel_values: Tensor, image_grid_thw: Tensor, **others: Tensor
        ) -> Tensor:
            merge = int(others["image_merge_sizes"][0])
            return self.see_flat(pixel_values).unflatten(0, (-1, merge * merge)).mean(1)

        def forward(
            self,
            input_ids: Tensor,
            pixel_values: Tensor | None = None,
            image_grid_thw: Tensor | None = None,
            image_merge_sizes: Tensor | None = None,
        ) -> Tensor:
            assert pixel_values is not None
            assert image_grid_thw is not None
            assert image_merge_sizes is not None
            others = {"image_merge_sizes": image_merge_sizes}
            return self.filled(input_ids, self.get_image_features(pixel_values, image_grid_thw, **others))

    assert inputs_of(Merges(Config()))["image_merge_sizes"].unique().tolist() == [2]


def test_images_of_another_tower_have_its_size_and_parts_of_the_model_count_features() -> None:
    @dataclass
    class Towers(Config):
        large_vision_config: Any = field(default_factory=lambda: Vision(image_size=2 * SIDE))

    class Inner(Seeing):
        def get_image_features(self, pixel_values: Tensor, large_pixel_values: Tensor) -> Tensor:
            return self.patches(pixel_values) + self.patches(large_pixel_values).mean(1, True)

    class Two(Seeing):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.inner = Inner(config)

        def forward(
            self,
            input_ids: Tensor,
            pixel_values: Tensor | None = None,
            large_pixel_values: Tensor | None = None,
        ) -> Tensor:
            assert pixel_values is not None
            assert large_pixel_values is not None
            features = self.inner.get_image_features(pixel_values, large_pixel_values)
            return self.filled(input_ids, features.flatten(0, 1))

    tensors = inputs_of(Two(Towers()))
    assert tensors["pixel_values"].shape[2:] == (SIDE, SIDE)
    assert tensors["large_pixel_values"].shape[2:] == (2 * SIDE, 2 * SIDE)


def test_images_have_as_many_patches_as_an_error_asks_for() -> None:
    class Wants(Seeing):
        def get_image_features(self, pixel_values: Tensor) -> Tensor:
            x = self.patches(pixel_values)
            if x.shape[1] not in (36, 49):
                raise ValueError(f"{x.shape[1]} patches, which is none of 36, 49")
            return x[:, :7]

        def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
            assert pixel_values is not None
            return self.filled(input_ids, self.get_image_features(pixel_values).flatten(0, 1))

    tensors = inputs_of(Wants(Config()))
    assert tensors["pixel_values"].shape[2:] == (6 * PATCH, 6 * PATCH)
    assert set((tensors["input_ids"] == PLACE).sum(1).tolist()) == {7}


def test_images_of_a_large_size_are_smaller_where_the_size_is_told() -> None:
    class Sized(Seeing):
        def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
            assert image_sizes.unique(dim=0).tolist() == [list(pixel_values.shape[2:])]
            return self.patches(pixel_values)

        def forward(
            self, input_ids: Tensor, pixel_values: Tensor | None = None, image_sizes: Tensor | None = None
        ) -> Tensor:
            assert pixel_values is not None
            assert image_sizes is not None
            return self.filled(input_ids, self.get_image_features(pixel_values, image_sizes).flatten(0, 1))

    assert inputs_of(Sized(Config()))["pixel_values"].shape[2:] == (SIDE, SIDE)
    large = Sized(Config(vision=Vision(image_size=2048)))
    assert inputs_of(large)["pixel_values"].shape[2:] == (4 * PATCH, 6 * PATCH)


def test_videos_of_frames_are_given_beside_images() -> None:
    @dataclass
    class Videos(Config):
        video_token_id: int = PLACE + 1

    class Watching(Seeing):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.watch = nn.Conv3d(3, WIDTH, (1, PATCH, PATCH), (1, PATCH, PATCH))

        def get_image_features(self, pixel_values: Tensor) -> Tensor:
            return self.patches(pixel_values)

        def get_video_features(self, pixel_values_videos: Tensor) -> Tensor:
            return self.watch(pixel_values_videos.transpose(1, 2)).flatten(2).transpose(1, 2)

        def forward(
            self,
            input_ids: Tensor,
            pixel_values: Tensor | None = None,
            pixel_values_videos: Tensor | None = None,
        ) -> Tensor:
            assert pixel_values is not None
            x = self.filled(input_ids, self.get_image_features(pixel_values).flatten(0, 1))
            if pixel_values_videos is None:
                return x
            features = self.get_video_features(pixel_values_videos).flatten(0, 1)
            places = input_ids == PLACE + 1
            if int(places.sum()) != len(features):
                raise ValueError("another number of tokens")
            return x.masked_scatter(places[..., None], features)

    tensors = inputs_of(Watching(Videos()))
    assert tensors["pixel_values"].shape[1:] == (3, SIDE, SIDE)
    assert tensors["pixel_values_videos"].shape[1:] == (2, 3, SIDE, SIDE)
