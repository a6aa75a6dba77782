"""Sounds that a model is called with: what its config says of them, and what its errors ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from made_inputs import make_inputs
from torch import Tensor, nn

from shardconv.inputs.input_forms import is_about_tokens, needed_count, needed_mask

VOCAB, WIDTH, BINS, PLACE = 64, 48, 10, 60


@dataclass
class Config:
    """Of a text model that hears."""

    vocab_size: int = VOCAB
    audio_token_id: int = PLACE
    max_position_embeddings: int = 128
    num_mel_bins: int = BINS
    model_type: str = "any"
    downsampling_ratios: list[int] = field(default_factory=lambda: [4, 8])

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Hearing(nn.Module):
    """Puts every eighth frame of a spectrum in the place of a token, where a mask ``[B, N]`` allows it."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.hear = nn.Linear(BINS, WIDTH)
        self.speak = nn.Linear(WIDTH, VOCAB)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def features(self, input_features: Tensor) -> Tensor:
        return self.hear(input_features[:, ::8])

    def put(self, input_ids: Tensor, features: Tensor) -> Tensor:
        places = input_ids == PLACE
        if features.dim() > 2 or int(places.sum()) != len(features):
            raise ValueError(f"do not match, tokens: {int(places.sum())}, features: {len(features)}")
        return self.speak(self.embed(input_ids).masked_scatter(places[..., None], features))

    def forward(
        self,
        input_ids: Tensor,
        input_features: Tensor | None = None,
        input_features_mask: Tensor | None = None,
    ) -> Tensor:
        if input_features is None:
            return self.speak(self.embed(input_ids))
        features = self.features(input_features)
        return self.put(input_ids, features[input_features_mask])


def test_a_mask_of_features_is_as_long_as_the_error_demands() -> None:
    inputs = make_inputs(Hearing().to("meta"))
    frames, mask = inputs.tensors["input_features"], inputs.tensors["input_features_mask"]
    assert mask.dtype == torch.bool
    assert mask.shape == (len(frames), -(-frames.shape[1] // 8))
    assert (inputs.tensors["input_ids"] == PLACE).sum() == mask.numel()
    assert inputs.left_out == {}


def test_placeholders_are_those_that_the_error_counts() -> None:
    tries: list[int] = []

    class Counting(Hearing):
        def forward(  # type: ignore[override]
            self, input_ids: Tensor, input_features: Tensor | None = None
        ) -> Tensor:
            tries.append(input_ids.shape[1])
            if input_features is None or input_features.shape[2] != BINS:
                raise ValueError("bins last")
            return self.put(input_ids, self.features(input_features).flatten(0, 1))

    inputs = make_inputs(Counting().to("meta"))
    frames = inputs.tensors["input_features"].shape[1]
    assert set((inputs.tensors["input_ids"] == PLACE).sum(1).tolist()) == {frames // 8}
    assert len(tries) < 8


def test_chunks_are_as_long_as_their_spectra() -> None:
    @dataclass
    class Chunked(Config):
        hop_length: int = 6

    class Chunks(nn.Module):
        main_input_name = "input_features"

        def __init__(self) -> None:
            super().__init__()
            self.config = Chunked()
            self.hear = nn.Linear(BINS, WIDTH)

        def forward(self, input_features: Tensor, chunk_sample_lengths: Tensor) -> Tensor:
            lengths = (chunk_sample_lengths // 6).tolist()
            return self.hear(torch.cat([x[:n] for x, n in zip(input_features, lengths, strict=True)]))

    inputs = make_inputs(Chunks().to("meta"))
    batch, frames, _ = inputs.tensors["input_features"].shape
    assert inputs.tensors["chunk_sample_lengths"].tolist() == [6 * frames] * batch


def test_samples_last_as_long_as_convolutions_need() -> None:
    class Samples(nn.Module):
        main_input_name = "input_values"

        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.hear = nn.Sequential(nn.Conv1d(1, 4, 8, 4), nn.Conv1d(4, 4, 16, 8))

        def forward(self, input_values: Tensor) -> Tensor:
            return self.hear(input_values)

    inputs = make_inputs(Samples().to("meta"))
    assert inputs.tensors["input_values"].shape[1:] == (1, 23 * 32 + 8 + 80)


def test_an_input_that_is_read_where_it_has_a_place_gets_as_many_as_it_needs() -> None:
    """Code looks for a placeholder before it reads, and torch counts rows on numbers alone."""

    class Looking(Hearing):
        def forward(  # type: ignore[override]
            self,
            input_ids: Tensor,
            input_features: Tensor | None = None,
            audio_embed_sizes: Tensor | None = None,
        ) -> Tensor:
            x = self.embed(input_ids)
            if input_features is not None and audio_embed_sizes is not None and (input_ids == PLACE).any():
                heard = self.hear(input_features)
                rows = torch.cat([h[:n] for h, n in zip(heard, audio_embed_sizes, strict=True)])
                x = x.index_put(torch.nonzero(input_ids == PLACE, as_tuple=True), rows)
            return self.speak(x)

    inputs = make_inputs(Looking().to("meta"))
    assert inputs.left_out == {}
    assert (
        inputs.tensors["audio_embed_sizes"].tolist() == (inputs.tensors["input_ids"] == PLACE).sum(1).tolist()
    )
    assert set(inputs.tensors["audio_embed_sizes"].tolist()) == {inputs.tensors["input_features"].shape[1]}


def test_an_image_comes_with_its_crops() -> None:
    @dataclass
    class Cropped(Config):
        crop_size: int = 16
        image_size: int = 16
        patch_size: int = 4

    class Sees(nn.Module):
        main_input_name = "image_pixel_values"

        def __init__(self) -> None:
            super().__init__()
            self.config = Cropped()
            self.see = nn.Conv2d(3, WIDTH, 4, 4)

        def forward(
            self, image_pixel_values: Tensor, image_sizes: Tensor, image_attention_mask: Tensor
        ) -> Tensor:
            seen = self.see(image_pixel_values.flatten(0, 1)).unflatten(0, image_pixel_values.shape[:2])
            return (seen * image_attention_mask[:, :, None])[:, 1 : 1 + int(image_sizes[0].prod()) // 256]

    tensors = make_inputs(Sees().to("meta")).tensors
    batch, count, *_ = tensors["image_pixel_values"].shape
    assert tensors["image_sizes"].prod(1).tolist() == [(count - 1) * 256] * batch
    assert tensors["image_attention_mask"].shape == (batch, count, 4, 4)


def test_numbers_of_errors() -> None:
    told = ValueError("m: Audio features and audio tokens do not match, tokens: 105, features: 5")
    assert needed_count(told, 105) == 5
    assert needed_count(told, 21) is None
    assert needed_count(ValueError("shapes 105 and 5 differ"), 105) is None
    assert needed_count(ValueError("tokens: 5, features: 5"), 5) is None


def test_a_module_called_after_tokens_is_not_a_complaint_of_tokens() -> None:
    assert not is_about_tokens(ValueError("model.tokenizer.conv: too many indices"))
    assert is_about_tokens(ValueError("model.tokenizer.conv: too many tokens"))


def test_masks_of_errors() -> None:
    said = (
        "m: The shape of the mask [5, 104] at index 1 does not match "
        "the shape of the indexed tensor [5, 21, 9] at index 1"
    )
    chosen, counted = torch.ones(5, 104, dtype=torch.bool), torch.ones(5, 104, dtype=torch.long)
    assert needed_mask(IndexError(said), {"mask": chosen}) == ("mask", 21)
    assert needed_mask(IndexError(said), {"mask": counted}) is None
    assert needed_mask(IndexError("another"), {"mask": chosen}) is None
