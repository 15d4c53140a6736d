"""Images and sound for a small model: tensors by the names of the forward's arguments.

A class declares neither the shape of its images nor the number of tokens per image. So every usual shape is tried on
the model, and the first one that works is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Tensor]
Prompts = tuple[Arguments, Arguments]
"""(arguments of the forward, arguments of `generate`)."""

ORDINARY_IDS = range(48, 192)
"""Ids that are not special tokens in a small config."""
BEFORE = 3
"""Number of text tokens before an image or sound; equal to the padding of a text."""
MOST_TOKENS = 64
"""Most tokens of an image, if the model cannot compute their number."""
FRAMES = 64
"""Frames of sound for models that accept any number."""
SAMPLES = 6400
"""Samples of a waveform."""

SEEN, HEARD = {"pixel_values", "flattened_patches", "grid_thw"}, {"input_features", "input_values"}
KINDS = {"image": 1, "audio": 3}
"""Values of `mm_token_type_ids`."""
OF_TOKENS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask")
"""Arguments that mark the tokens of an image."""
VISION = ("vision_config", "encoder")
AUDIO = ("audio_config", "acoustic_tokenizer_encoder_config", "encoder_config", "encoder")
BINS = ("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_projection_input_dim", "input_size", "input_dim")
MASKS = ("feature_attention_mask", "input_features_mask")


@dataclass(frozen=True)
class Medium:
    """Two images or two sounds."""

    name: str
    """"image" or "audio"."""
    arguments: Arguments
    token: int | None
    """The placeholder token in the text; None if it has none."""
    tokens: int
    """Number of placeholder tokens of each image or sound."""


def media(model: Any) -> list[str]:
    """The media that a model accepts with or instead of text: "image", "audio"."""
    names, config = _accepted(model), model.config
    sees = names & SEEN and getattr(config, "vision_config", config) is not None
    hears = names & HEARD and getattr(config, "audio_config", config) is not None
    return ["image"] * bool(sees) + ["audio"] * bool(hears)


def untried(model: Any, question: Arguments) -> list[str]:
    """The media that a model accepts and the question lacks."""
    return [name for name in media(model) if not question.keys() & (SEEN if name == "image" else HEARD)]


def about(model: Any, text: Arguments, attached: Sequence[Medium]) -> Prompts:
    """(question, prompt) of a text with images and sounds inserted; `text` has `input_ids`, and maybe a mask."""
    config, ids, mask = model.config, text["input_ids"], text.get("attention_mask")
    decoded = {"decoder_input_ids": ids.flip(1)} if config.is_encoder_decoder else {}
    for medium in attached:
        if config.is_encoder_decoder and model.main_input_name in medium.arguments:
            return {**medium.arguments, "decoder_input_ids": ids}, medium.arguments
    kinds = torch.zeros_like(ids)
    for medium in attached:
        if medium.token is not None:
            ids = _inserted(ids, medium.token, medium.tokens)
            mask = None if mask is None else _inserted(mask, 1, medium.tokens)
            kinds = _inserted(kinds, KINDS[medium.name], medium.tokens)
    names = _accepted(model)
    prompt = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
    if attached and "input_ids" not in names:
        prompt = {}
    if kinds.any():
        prompt |= {name: kinds for name in OF_TOKENS if name in names}
    if "bbox" in names:
        prompt["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.long)
    if "lang_ids" in names:
        prompt["lang_ids"] = torch.zeros(len(ids), dtype=torch.long)
    if "image_attention_mask" in names and attached:
        prompt["image_attention_mask"] = torch.ones(*ids.shape, 1, dtype=torch.long)
    for medium in attached:
        prompt |= medium.arguments
    return {**prompt, **decoded}, prompt


def _inserted(values: Tensor, value: int, count: int) -> Tensor:
    """Insert `value` `count` times into `values: (batch, tokens)`, after BEFORE tokens."""
    between = torch.full((len(values), count), value)
    return torch.cat([values[:, :BEFORE], between, values[:, BEFORE:]], 1)


def candidates(model: Any, name: str) -> Iterator[Medium]:
    """Images or sounds of the shapes that a model may accept, each with possible numbers of tokens."""
    generator = torch.Generator().manual_seed(2)
    for shape in (_images if name == "image" else _sounds)(model, generator):
        arguments = {key: value for key, value in shape.items() if key in _accepted(model)}
        if name == "image" and "qformer_input_ids" in _accepted(model):
            words = torch.arange(ORDINARY_IDS.start, ORDINARY_IDS.start + 8).view(2, 4)
            arguments |= {"qformer_input_ids": words, "qformer_attention_mask": torch.ones_like(words)}
        token = _token(model, name)
        if token is None:
            yield Medium(name, arguments, None, 0)
            continue
        try:
            count = _tokens(model, arguments, f"get_{name}_features")
        except Exception:  # it needs another shape
            continue
        for tokens in dict.fromkeys((count or MOST_TOKENS, *range(MOST_TOKENS, 0, -1))):
            yield Medium(name, arguments, token, tokens)


def _token(model: Any, name: str) -> int | None:
    """The placeholder token of an image or sound; None if the config has none."""
    if name == "image" and "image_embeds_position_mask" in _accepted(model):
        return ORDINARY_IDS.start
    fields = (f"{name}_token_id", f"{name}_token_index", f"{name}_patch_id")
    return next((token for field in fields if isinstance(token := getattr(model.config, field, None), int)), None)


def _accepted(model: Any) -> set[str]:
    """Names of the arguments of a model's forward."""
    return set(inspect.signature(type(model).forward).parameters)


def _images(model: Any, generator: torch.Generator) -> Iterator[Arguments]:
    """Two images in every usual shape, for the arguments that the forward accepts."""
    config = model.config
    vision = next((value for name in VISION if (value := getattr(config, name, None)) is not None), config)
    names = _accepted(model)
    patch = _first(vision, ("patch_size", "spatial_patch_size", "encoder_patch_size"), 4)
    channels = _first(vision, ("in_channels", "num_channels", "in_chans"), 3)
    times = _first(vision, ("temporal_patch_size", "patch_temporal"), 1)
    merge = _first(vision, ("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size"), 0)
    merge = merge or _first(config, ("spatial_merge_size", "merge_size", "downsample_factor"), 2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    side, count = 2 * merge, (2 * merge) ** 2
    grid = torch.tensor([[1, side, side]] * 2)
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).flatten(0, 1)
    grids: Arguments = {name: grid for name in ("image_grid_thw", "grid_thw") if name in names}  # grid_thw: of a tower
    if grids:
        first = "hidden_states" if "hidden_states" in names else "pixel_values"
        sizes = {"image_merge_sizes": torch.tensor([merge] * 2)} if "image_merge_sizes" in names else {}
        wide = channels * times * patch**2
        for shape in ((wide,), (channels * patch**2,), (channels, patch, patch), (times, channels, patch, patch)):
            yield {first: random(2 * count, *shape), **grids, **sizes}
    if "image_grid_hw" in names:
        yield {"pixel_values": random(2 * count, channels * patch**2), "image_grid_hw": grid[:, 1:]}
    if "spatial_shapes" in names:
        mask = torch.ones(2, count, dtype=torch.long)
        patches = {"pixel_values": random(2, count, channels * patch**2), "pixel_attention_mask": mask}
        yield {**patches, "spatial_shapes": grid[:, 1:]}
    if "image_position_ids" in names:
        for width in (channels * patch**2, channels * (patch * merge) ** 2):
            yield {"pixel_values": random(2, count, width), "image_position_ids": places.expand(2, -1, -1)}
    if "target_sizes" in names:
        yield {"pixel_values": random(1, channels, patch, 2 * count * patch), "target_sizes": grid[:, 1:]}
    if "flattened_patches" in names:
        tall = 1 + places.flip(-1).float().expand(2, -1, -1)
        width = _first(vision, ("patch_embed_hidden_size",), channels * patch**2)
        yield {"flattened_patches": torch.cat([tall, random(2, count, width)], -1)}
    for size in dict.fromkeys((_first(vision, ("image_size",), patch * side), patch * side)):
        image = random(2, channels, size, size)
        if "aspect_ratio_ids" in names:
            tiles = _first(vision, ("max_num_tiles",), 1)
            present = torch.zeros(2, 1, tiles, dtype=torch.long)
            present[..., 0] = 1
            tiled = image[:, None, None] * present[..., None, None, None]
            ratios = {"aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long), "aspect_ratio_mask": present}
            yield {"pixel_values": tiled, **ratios}
        extents: list[Arguments] = [{"image_sizes": torch.tensor([[size, size]] * 2)}, {}]
        for extent in extents["image_sizes" not in names :]:
            for count in (3, 2, 1):
                yield {"pixel_values": image[:, None].expand(-1, count, -1, -1, -1).clone(), **extent}
            yield {"pixel_values": image, **extent}
        if "high_res_pixel_values" in names:
            large = _first(getattr(config, "high_res_vision_config", vision), ("image_size",), size)
            yield {"pixel_values": image, "high_res_pixel_values": random(2, channels, large, large)}
        if "num_local_patches" in names:
            none = torch.zeros(2, dtype=torch.long)
            yield {"pixel_values": image, "num_local_patches": none}


def _sounds(model: Any, generator: torch.Generator) -> Iterator[Arguments]:
    """Two sounds in every usual shape, for the arguments that the forward accepts."""
    config, names = model.config, _accepted(model)
    audio = next((value for name in AUDIO if (value := getattr(config, name, None)) is not None), config)
    audio = getattr(audio, "asr_config", audio)
    if "input_features" in names:
        bins = (_first(audio, BINS, 0) or _first(config, BINS, 80)) * _first(audio, ("num_stacked_frames",), 1)
        positions = _first(audio, ("max_source_positions", "n_window"), 0)
        for frames in dict.fromkeys((2 * positions or FRAMES, positions or FRAMES, FRAMES, 4 * FRAMES)):
            sound = torch.randn((2, bins, frames), generator=generator)
            masks = {name: torch.ones(2, frames, dtype=torch.long) for name in MASKS if name in names}
            for features in (sound, sound.mT.contiguous()):
                yield {"input_features": features, **masks}
                yield {"input_features": features, **{name: mask.bool() for name, mask in masks.items()}}
                if masks:
                    yield {"input_features": features}
    if "input_values" in names:
        wave = torch.randn((2, SAMPLES), generator=generator)
        for shape in (wave, wave[:, None]):
            yield {"input_values": shape}
        yield {"input_values": wave[:, None], "padding_mask": torch.ones_like(wave).bool()}


def _tokens(model: Any, arguments: Arguments, features: str) -> int | None:
    """Number of tokens of one of two images or sounds, from the model's features; None if unknown.

    Args:
        features: the method that computes the features, such as `get_image_features`.

    Raises whatever the method raises for arguments that the model does not accept.
    """
    method = getattr(model, features, None)
    if method is None:
        return None
    parameters = inspect.signature(method).parameters
    if "input_ids" in parameters:
        return None
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    with torch.no_grad():
        output: Any = method(**arguments)
    output = getattr(output, "pooler_output", output)
    output = output[0] if isinstance(output, tuple) and isinstance(output[0], Tensor) and output[0].ndim > 2 else output
    if isinstance(output, list | tuple):
        output = torch.cat([item.flatten(0, -2) for item in output])
    return output.numel() // output.shape[-1] // 2 if isinstance(output, Tensor) else None


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    """The first of the config's fields `names` with a nonzero integer, or the first entry of a list."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and value:
            return value
    return default
