"""Inputs of tiny models: text, images, sound, and what encoders and decoders take of each other."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.models import HEAD_DIM, MASK, PROMPTS

HEADS = 5
IMAGE, PATCH, CHANNELS = 16, 4, 3


def images(count: int = 2) -> dict[str, Tensor]:
    """A batch of images."""
    return {"pixel_values": torch.randn(count, CHANNELS, IMAGE, IMAGE, generator=seed())}


def masked_images() -> dict[str, Tensor]:
    """The same, the lower half of the second one masked."""
    mask = torch.ones(2, IMAGE // PATCH, IMAGE // PATCH, dtype=torch.bool)
    mask[1, 2:] = False
    return {**images(), "patch_attention_mask": mask}


def plain_images() -> dict[str, Tensor]:
    """The same, under another name."""
    return {"hidden_states": images()["pixel_values"]}


def patches() -> dict[str, Tensor]:
    """Two images as Qwen takes them: all patches in a row, (patches, features), with their grids."""
    rows = (IMAGE // PATCH) ** 2
    features = torch.randn(2 * rows, CHANNELS * 2 * PATCH**2, generator=seed())
    return {"hidden_states": features, "grid_thw": torch.tensor([[1, IMAGE // PATCH, IMAGE // PATCH]] * 2)}


def grid_patches() -> dict[str, Tensor]:
    """The same, under another name."""
    given = patches()
    return {"pixel_values": given.pop("hidden_states"), **given}


def flat_images() -> dict[str, Tensor]:
    """The same, of one moment."""
    given = grid_patches()
    return {**given, "pixel_values": given["pixel_values"][:, ::2]}


def square_patches() -> dict[str, Tensor]:
    """The same, (1, patches, channels, rows, columns)."""
    given = flat_images()
    return {**given, "pixel_values": given["pixel_values"].view(1, -1, CHANNELS, PATCH, PATCH)}


def rows_of_patches() -> dict[str, Tensor]:
    """The patches of two images, (images, patches, features)."""
    return {"pixel_values": flat_images()["pixel_values"].view(2, -1, CHANNELS * PATCH**2)}


def tiles() -> dict[str, Tensor]:
    """Two images, of one tile and of two."""
    return {
        "pixel_values": torch.randn(2, 1, 2, CHANNELS, IMAGE, IMAGE, generator=seed()),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]),
    }


def queries() -> dict[str, Tensor]:
    """Queries of a Q-Former, and the states of two images."""
    return {
        "query_embeds": torch.randn(2, 4, HEADS * HEAD_DIM, generator=seed()),
        "encoder_hidden_states": torch.randn(2, 6, 24, generator=seed()),
    }


def queries_and_text() -> dict[str, Tensor]:
    """The same, and an instruction."""
    return {
        **queries(),
        "input_ids": PROMPTS,
        "attention_mask": torch.cat([torch.ones(2, 4, dtype=torch.long), MASK], 1),
    }


def seen_tokens() -> dict[str, Tensor]:
    """Two prompts, and the states of the image that each is about."""
    return {
        **tokens(),
        "cross_attention_states": torch.randn(2, 6, HEADS * HEAD_DIM, generator=seed()),
    }


def text_and_images() -> dict[str, Tensor]:
    """Two prompts, and two images."""
    return {**tokens(), **images()}


def flat_patches() -> dict[str, Tensor]:
    """Patches with their rows and columns, and tokens for a decoder."""
    places = torch.tensor([[row, column] for row in range(1, 4) for column in range(1, 5)]).expand(2, -1, -1)
    features = torch.randn(2, 12, CHANNELS * PATCH**2, generator=seed())
    return {"flattened_patches": torch.cat([places, features], -1), "decoder_input_ids": PROMPTS.flip(1)}


def placed_patches() -> dict[str, Tensor]:
    """The same for an encoder alone, the second image's end masked."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return {"flattened_patches": flat_patches()["flattened_patches"], "attention_mask": mask}


def sound() -> dict[str, Tensor]:
    """Mel features, as many as the encoder's positions take."""
    return {"input_features": torch.randn(2, 12, 2 * 10, generator=seed())}


def sounds_in_a_row() -> dict[str, Tensor]:
    """Mel features of two sounds, one after the other."""
    lengths = torch.tensor([20, 14])
    features = torch.randn(12, int(lengths.sum()), generator=seed())
    return {"input_features": features, "feature_lens": lengths, "aftercnn_lens": lengths // 2}


def tokens() -> dict[str, Tensor]:
    """Two prompts, the first padded on the left."""
    return {"input_ids": PROMPTS, "attention_mask": MASK}


def both_sides() -> dict[str, Tensor]:
    """The same for an encoder, and tokens for its decoder."""
    return {**tokens(), "decoder_input_ids": PROMPTS.flip(1)}


def speech() -> dict[str, Tensor]:
    """Mel features for an encoder, and tokens for its decoder."""
    return {**sound(), "decoder_input_ids": PROMPTS.flip(1)}


def frames() -> dict[str, Tensor]:
    """The same, (batch, frames, features)."""
    return {**speech(), "input_features": sound()["input_features"].mT}


def tokens_and_states() -> dict[str, Tensor]:
    """Tokens for a decoder, and the states of what they are about."""
    return {**tokens(), "encoder_hidden_states": seen_tokens()["cross_attention_states"]}


def parakeet_sound() -> dict[str, Tensor]:
    """Mel features, (batch, frames, features), of which an encoder joins eight frames."""
    return {"input_features": torch.randn(2, 48, 16, generator=seed())}


def codes() -> dict[str, Tensor]:
    """Tokens of text, each with three of a codec."""
    sound = torch.arange(2 * 7 * 3).view(2, 7, 3) % 20
    return {"input_ids": torch.cat([PROMPTS[..., None], sound], -1)}


def both_codes() -> dict[str, Tensor]:
    """Text for an encoder, and two channels of a codec for its decoder."""
    return {**tokens(), "decoder_input_ids": torch.arange(2 * 7 * 2).view(2, 7, 2)}


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)
