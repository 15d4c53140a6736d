"""Inputs of models that see or hear, made by each family's own processor from a random image or a sine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from tp_transformers.features.command_line.models import generating_class
from tp_transformers.features.verify.small_models import model as probe
from tp_transformers.features.verify.small_models.config import shrink
from tp_transformers.features.verify.small_models.widths import levels_of

RATE = 16_000
TEXT = {
    "hidden_size": 576, "intermediate_size": 1000, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "projection_dim": 576,
}  # fmt: skip
PART = {
    "hidden_size": 192, "d_model": 192, "embed_dim": 192, "intermediate_size": 768, "num_heads": 3,
    "num_attention_heads": 3, "num_key_value_heads": 3, "attention_heads": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 500, "decoder_ffn_dim": 500, "projection_dim": 576, "head_dim": 64,
}  # fmt: skip
"""Odd numbers of heads, and widths that divide by little."""


def image(width: int = 60, height: int = 44) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def wave(seconds: float = 0.25) -> np.ndarray[Any, Any]:
    return np.sin(2 * math.pi * 440 * np.arange(int(seconds * RATE)) / RATE).astype(np.float32)


def tokenizer(special: dict[str, str], ids: dict[str, int | None]) -> PreTrainedTokenizerFast:
    """Words w48, w49, ...; special tokens, by their names as attributes, with the ids that a config has for them."""
    taken = {0: "<pad>", 1: "<unk>", 2: "<s>"}
    taken |= {found: special[name] for name in special if (found := ids.get(name)) is not None}
    free = iter(index for index in range(48) if index not in taken)
    taken |= {next(free): token for token in special.values() if token not in taken.values()}
    words = {taken.get(index, f"w{index}"): index for index in range(192)}
    built = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", padding_side="left",
        extra_special_tokens=special,
    )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of models, its processor, and a prompt."""

    model_type: str
    special: dict[str, str]
    """Special tokens of its tokenizer, by their names there."""
    make: Callable[[Any, Any], Callable[..., Any]]
    """(config, tokenizer) -> a function of the prompts that calls the processor."""
    prompt: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings of its config, beside the defaults."""

    def config(self) -> Any:
        kind = CONFIG_MAPPING[self.model_type]
        whole = kind(**self.changes).to_dict()
        for level in levels_of(whole):
            settings = TEXT if level is whole.get("text_config") else PART
            level.update({name: value for name, value in settings.items() if level.get(name) is not None})
            if level.get("kv_lora_rank"):  # latent attention has as many keys as queries
                level["num_key_value_heads"] = level["num_attention_heads"]
        return shrink(kind.from_dict(whole))

    def inputs(self, config: Any) -> dict[str, Tensor]:
        """Two prompts of different lengths about an image or a sound."""
        ids = {
            name: getattr(config, f"{name}_id", None) or getattr(config, f"{name}_index", None) for name in self.special
        }
        words = tokenizer(self.special, ids)
        prompts = [f"w60 w61 {self.prompt} w70 w71 w72", f"{self.prompt} w80 w81"]
        found = self.make(config, words)(prompts)
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def model(self) -> Any:
        config = self.config()
        return probe.make(generating_class(config), config)


def _llava(config: Any, words: Any) -> Any:
    size = config.vision_config.image_size
    sizes = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(**sizes), words, patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, image_token="<image>",
    )  # fmt: skip
    return lambda prompts: processor(images=[image()] * 2, text=prompts, padding=True, return_tensors="pt")


def _square(config: Any) -> dict[str, int]:
    size = config.vision_config.image_size
    size = size[0] if isinstance(size, list | tuple) else size
    return {"height": size, "width": size}


def _gemma3(config: Any, words: Any) -> Any:
    images = transformers.Gemma3ImageProcessorPil(size=_square(config))
    processor = transformers.Gemma3Processor(images, words, image_seq_length=config.mm_tokens_per_image)
    return lambda prompts: processor(images=[[image()], [image()]], text=prompts, padding=True, return_tensors="pt")


def _paligemma(config: Any, words: Any) -> Any:
    images = transformers.SiglipImageProcessorPil(size=_square(config))
    images.image_seq_length = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    processor = transformers.PaliGemmaProcessor(images, words)
    return lambda prompts: processor(images=[[image()], [image()]], text=prompts, padding=True, return_tensors="pt")


def _by_hand(images: Any, words: Any, token: str, count: Callable[[Any], int], prompts: list[str]) -> dict[str, Any]:
    """Two images by the family's image processor, and `count` tokens for each, as its processor would write them.

    The processor itself wants torchvision, for videos, or num2words.
    """
    seen = images(images=[image(), image()], return_tensors="pt")
    texts = [prompt.replace(token, " ".join([token] * count(seen))) for prompt in prompts]
    found = {**words(texts, padding=True, return_tensors="pt"), **seen}
    return {name: value for name, value in found.items() if not name.startswith("num_")}


def _mistral3(config: Any, words: Any) -> Any:
    patch, merge = config.vision_config.patch_size, config.spatial_merge_size
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 4 * patch}, patch_size=patch)

    def count(seen: Any) -> int:
        height, width = seen["image_sizes"][0]
        return int(height // (patch * merge)) * int(width // (patch * merge))

    return lambda prompts: _by_hand(images, words, "[IMG]", count, prompts)


def _mllama(config: Any, words: Any) -> Any:
    vision = config.vision_config
    images = transformers.MllamaImageProcessorPil(size=_square(config), max_image_tiles=vision.max_num_tiles)
    processor = transformers.MllamaProcessor(images, words)
    return lambda prompts: processor(images=[[image()], [image()]], text=prompts, padding=True, return_tensors="pt")


def _llama4(config: Any, words: Any) -> Any:
    """The image processor wants torchvision: an image of one tile, by hand."""
    side = config.vision_config.image_size
    tokens = int((side // config.vision_config.patch_size) ** 2 * config.vision_config.pixel_shuffle_ratio**2)
    return lambda prompts: _by_hand(_tiles(side), words, "<|patch|>", lambda _: tokens, prompts)


def _kimi(config: Any, words: Any) -> Any:
    """The image processor wants torchvision: patches in a row, by hand."""
    patch = config.vision_config.patch_size

    def patches(*, images: list[Any], **_: Any) -> dict[str, Tensor]:
        pixels = _tiles(4 * patch)(images=images)["pixel_values"].unfold(2, patch, patch).unfold(3, patch, patch)
        grid = torch.tensor([[1, 4, 4]] * len(images))
        return {"pixel_values": pixels.permute(0, 2, 3, 1, 4, 5).flatten(0, 2), "image_grid_thw": grid}

    return lambda prompts: _by_hand(patches, words, "<|media_pad|>", lambda _: 4, prompts)


def _tiles(side: int) -> Any:
    def tiles(*, images: list[Any], **_: Any) -> dict[str, Tensor]:
        pixels = [np.asarray(each.resize((side, side)), dtype=np.float32) / 127.5 - 1 for each in images]
        return {"pixel_values": torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()}

    return tiles


def _smolvlm(config: Any, words: Any) -> Any:
    size = config.vision_config.image_size
    processor = transformers.SmolVLMImageProcessorPil(
        size={"longest_edge": size}, max_image_size={"longest_edge": size}, do_image_splitting=False
    )
    tokens = (size // config.vision_config.patch_size // config.scale_factor) ** 2

    def one_each(*, images: list[Any], **options: Any) -> Any:
        return processor([[each] for each in images], **options)

    return lambda prompts: _by_hand(one_each, words, "<image>", lambda _: tokens, prompts)


def _internvl(config: Any, words: Any) -> Any:
    square = _square(config)
    images = transformers.GotOcr2ImageProcessorPil(size=square, crop_to_patches=False)
    patch = config.vision_config.patch_size
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    tokens = int((square["height"] // patch) ** 2 * config.downsample_ratio**2)
    return lambda prompts: _by_hand(images, words, "<IMG_CONTEXT>", lambda _: tokens, prompts)


def _grids(name: str, token: str) -> Any:
    def make(config: Any, words: Any) -> Any:
        vision = config.vision_config
        merge, pixels = vision.spatial_merge_size, (4 * vision.patch_size) ** 2
        images = getattr(transformers, name)(
            patch_size=vision.patch_size, merge_size=merge, temporal_patch_size=vision.temporal_patch_size,
            size={"shortest_edge": pixels, "longest_edge": 4 * pixels},
        )  # fmt: skip

        def inputs(prompts: list[str]) -> dict[str, Any]:
            found = _by_hand(
                images, words, token, lambda seen: int(seen["image_grid_thw"][0].prod()) // merge**2, prompts
            )
            return {**found, "mm_token_type_ids": (found["input_ids"] == config.image_token_id).long()}

        return inputs

    return make


def _gemma4(config: Any, words: Any) -> Any:
    vision = config.vision_config
    images = transformers.Gemma4ImageProcessorPil(
        patch_size=vision.patch_size, pooling_kernel_size=vision.pooling_kernel_size, max_soft_tokens=70
    )

    def inputs(prompts: list[str]) -> dict[str, Any]:
        found = _by_hand(images, words, "<|image|>", lambda seen: int(seen["num_soft_tokens_per_image"][0]), prompts)
        return {**found, "mm_token_type_ids": (found["input_ids"] == config.image_token_id).long()}

    return inputs


def _whisper(config: Any, words: Any) -> Any:
    features = transformers.WhisperFeatureExtractor(
        feature_size=config.num_mel_bins,
        chunk_length=1,
        n_fft=400,
        hop_length=RATE // (2 * config.max_source_positions),
    )
    return lambda prompts: {
        **features([wave(), wave(0.5)], sampling_rate=RATE, return_tensors="pt"),
        "decoder_input_ids": words(prompts, padding=True, return_tensors="pt")["input_ids"],
    }


def _voxtral(config: Any, words: Any) -> Any:
    """The processor wants mistral_common's tokenizer: tokens by hand."""
    audio = config.audio_config
    features = transformers.WhisperFeatureExtractor(
        feature_size=audio.num_mel_bins, chunk_length=1, hop_length=RATE // (2 * audio.max_source_positions)
    )
    tokens = audio.max_source_positions * audio.hidden_size // audio.intermediate_size

    def hear(**_: Any) -> Any:
        return features([wave(0.5), wave(1)], sampling_rate=RATE, return_tensors="pt")

    return lambda prompts: _by_hand(hear, words, "[AUDIO]", lambda _: tokens, prompts)


def _qwen2_audio(config: Any, words: Any) -> Any:
    positions = config.audio_config.max_source_positions
    features = transformers.WhisperFeatureExtractor(
        feature_size=config.audio_config.num_mel_bins, chunk_length=1, hop_length=RATE // (2 * positions)
    )
    processor = transformers.Qwen2AudioProcessor(features, words)
    return lambda prompts: processor(
        text=prompts, audio=[wave(0.5), wave(1)], sampling_rate=RATE, padding=True, return_tensors="pt"
    )


IMAGE = {"image_token": "<image>"}
QWEN = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
SEEN = "<|vision_start|> <|image_pad|> <|vision_end|>"
GLM = {"image_token": "<|image|>", "video_token": "<|video|>"}
GEMMA = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
GEMMA4 = {"image_token": "<|image|>", "audio_token": "<|audio|>", "video_token": "<|video|>"}
LLAMA = {"image_token": "<|patch|>", "i": "<|image|>", "s": "<|image_start|>", "e": "<|image_end|>"}
HEARD = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
LARGE = {"mm_tokens_per_image": 256, "vision_config": {"image_size": 896, "patch_size": 14}}
QWEN_IMAGES = _grids("Qwen2VLImageProcessorPil", "<|image_pad|>")
GLM_IMAGES = _grids("Glm4vImageProcessorPil", "<|image|>")
FAMILIES = {
    family.model_type: family
    for family in (
        Family("llava", IMAGE, _llava, "<image>"),
        Family("gemma3", GEMMA, _gemma3, "<start_of_image>", LARGE),
        Family("paligemma", IMAGE, _paligemma, "<image>"),
        Family("mistral3", {"image_token": "[IMG]"}, _mistral3, "[IMG]"),
        Family("mllama", {"image_token": "<|image|>"}, _mllama, "<|image|>"),
        Family("llama4", LLAMA, _llama4, "<|image_start|> <|image|> <|patch|> <|image_end|>"),
        Family("kimi_k25", {"image_token": "<|media_pad|>"}, _kimi, "<|media_pad|>", {"projection_hidden_size": 192}),
        Family("smolvlm", IMAGE, _smolvlm, "<image>"),
        Family("internvl", {"image_token": "<IMG_CONTEXT>"}, _internvl, "<IMG_CONTEXT>"),
        Family("qwen3_vl", QWEN, QWEN_IMAGES, SEEN),
        Family("qwen3_5", QWEN, QWEN_IMAGES, SEEN),
        Family("glm4v", GLM, GLM_IMAGES, "<|image|>"),
        Family("gemma4", GEMMA4, _gemma4, "<|image|>", {"vision_config": {}}),
        Family("whisper", {}, _whisper, "w90"),
        Family("voxtral", {"audio_token": "[AUDIO]"}, _voxtral, "[AUDIO]"),
        Family("qwen2_audio", HEARD, _qwen2_audio, "<|audio_bos|> <|AUDIO|> <|audio_eos|>"),
    )
}
