"""Vision and audio towers, each by the plan for its own type, against one process; models around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.architectures import GRADIENT_TOLERANCE, LOGITS_TOLERANCE, gradient_errors
from tests.support.models import HEAD_DIM, load, relative, save_as_loaded
from tests.support.pool import Pool
from tests.support.tiers import wide
from tp_transformers.commands.verify.verify import verify

pytestmark = pytest.mark.distributed

HEADS = 5
IMAGE, PATCH, CHANNELS = 16, 4, 3


def images(count: int = 2) -> dict[str, Tensor]:
    """A batch of images."""
    return {"pixel_values": torch.randn(count, CHANNELS, IMAGE, IMAGE, generator=seed())}


def patches() -> dict[str, Tensor]:
    """Two images as Qwen takes them: all patches in a row, (patches, features), with their grids."""
    rows = (IMAGE // PATCH) ** 2
    features = torch.randn(2 * rows, CHANNELS * 2 * PATCH**2, generator=seed())
    return {"hidden_states": features, "grid_thw": torch.tensor([[1, IMAGE // PATCH, IMAGE // PATCH]] * 2)}


def padded_patches() -> dict[str, Tensor]:
    """Two images of different shapes as SigLIP 2 takes them, the second padded."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 8:] = 0
    return {
        "pixel_values": torch.randn(2, 16, CHANNELS * PATCH**2, generator=seed()),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [2, 4]]),
    }


def sound() -> dict[str, Tensor]:
    """Mel features, as many as the encoder's positions take."""
    return {"input_features": torch.randn(2, 12, 2 * 10, generator=seed())}


def masked_sound() -> dict[str, Tensor]:
    """The same, the second one's end masked."""
    mask = torch.ones(2, 2 * 10, dtype=torch.long)
    mask[1, 12:] = 0
    return {**sound(), "input_features_mask": mask}


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Tower:
    """How to make a tiny tower, and what to show it."""

    config: str
    """Name of the config class in transformers."""
    model: str
    """Name of the model class, in the module of models beside that of the config."""
    inputs: Callable[[], dict[str, Tensor]] = images
    settings: tuple[tuple[str, Any], ...] = ()

    def make(self) -> Any:
        """A random tower of two layers, whose norms and biases are random too."""
        kind = getattr(transformers, self.config)
        settings = {**SETTINGS, **dict(self.settings)}
        known = {*kind().to_dict(), *kind.attribute_map}
        config = kind(**{name: value for name, value in settings.items() if name in known})
        torch.manual_seed(0)
        model = model_class(self)(config).eval()
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim == 1:
                    param.add_(torch.randn_like(param) * 0.2)
                elif param.std() < 0.1:
                    param.normal_(std=0.2)
        return model


SETTINGS: dict[str, Any] = {
    "hidden_size": HEADS * HEAD_DIM,
    "d_model": HEADS * HEAD_DIM,
    "intermediate_size": 50,
    "encoder_ffn_dim": 50,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "depth": 2,
    "num_attention_heads": HEADS,
    "encoder_attention_heads": HEADS,
    "num_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_patches": (IMAGE // PATCH) ** 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 24,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "num_mel_bins": 12,
    "max_source_positions": 10,
}
IN_TWO = (("image_size", (IMAGE, IMAGE)), ("patch_size", (PATCH, PATCH)))
TOWERS = {
    "clip_vision_model": Tower("CLIPVisionConfig", "CLIPVisionModel"),
    "siglip_vision_model": Tower("SiglipVisionConfig", "SiglipVisionModel"),
    "siglip2_vision_model": Tower("Siglip2VisionConfig", "Siglip2VisionModel", padded_patches),
    "idefics2_vision": Tower("Idefics2VisionConfig", "Idefics2VisionTransformer"),
    "idefics3_vision": Tower("Idefics3VisionConfig", "Idefics3VisionTransformer"),
    "smolvlm_vision": Tower("SmolVLMVisionConfig", "SmolVLMVisionTransformer"),
    "internvl_vision": Tower("InternVLVisionConfig", "InternVLVisionModel", settings=IN_TWO),
    "internvl_vision, normed": Tower(
        "InternVLVisionConfig", "InternVLVisionModel", settings=(*IN_TWO, ("use_qk_norm", True))
    ),
    "pixtral": Tower("PixtralVisionConfig", "PixtralVisionModel"),
    "llama4_vision_model": Tower(
        "Llama4VisionConfig",
        "Llama4VisionModel",
        settings=(
            ("intermediate_size", 4 * HEADS * HEAD_DIM),
            ("projector_input_dim", 24),
            ("projector_output_dim", 24),
        ),
    ),
    "qwen3_vl_vision": Tower("Qwen3VLVisionConfig", "Qwen3VLVisionModel", patches),
    "qwen3_vl_moe_vision": Tower("Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionModel", patches),
    "qwen3_5_vision": Tower("Qwen3_5VisionConfig", "Qwen3_5VisionModel", patches),
    "qwen3_5_moe_vision": Tower("Qwen3_5MoeVisionConfig", "Qwen3_5MoeVisionModel", patches),
    "glm4v_vision": Tower("Glm4vVisionConfig", "Glm4vVisionModel", patches),
    "glm4v_moe_vision": Tower("Glm4vMoeVisionConfig", "Glm4vMoeVisionModel", patches),
    "qwen2_audio_encoder": Tower("Qwen2AudioEncoderConfig", "Qwen2AudioEncoder", sound),
    "voxtral_encoder": Tower("VoxtralEncoderConfig", "VoxtralEncoder", sound),
    "audioflamingo3_encoder": Tower("AudioFlamingo3EncoderConfig", "AudioFlamingo3Encoder", masked_sound),
}


def model_class(tower: Tower) -> Any:
    module = getattr(transformers, tower.config).__module__.replace(".configuration_", ".modeling_")
    return getattr(__import__(module, fromlist=[tower.model]), tower.model)


def observe(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What a tower makes of its inputs, and the gradients of a random part of it."""
    output = model(**inputs)[0]
    (output * torch.randn(output.shape, generator=seed())).sum().backward()
    return output.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def compare(folders: dict[str, str]) -> dict[str, dict[str, float]]:
    """Run on every rank: the largest differences from one process, of outputs and gradients, and what is cut."""
    found = {}
    for name, folder in folders.items():
        tower = TOWERS[name]
        kind = model_class(tower)
        model, plain = load(folder, kind).eval(), kind.from_pretrained(folder).eval()
        (own, grads), (expected, all_grads) = observe(model, tower.inputs()), observe(plain, tower.inputs())
        params = dict(model.named_parameters())
        # A class may freeze some, which transformers' own load makes trainable.
        assert grads.keys() == {key for key in all_grads if params[key].requires_grad}, name
        found[name] = {
            "output": relative(own, expected),
            "gradients": max(gradient_errors(model, grads, all_grads).values()),
            "cut": sum(param.tp_shard.layout is not None for param in params.values()),
        }
    return found


@pytest.mark.parametrize("size", wide([2, 3], 1))
def test_towers_match_one_process(pool: Pool, tmp_path: Path, size: int) -> None:
    folders = {}
    for name, tower in TOWERS.items():
        if hasattr(transformers, tower.config):  # older releases lack some
            save_as_loaded(tower.make(), tmp_path / name)
            folders[name] = str(tmp_path / name / "checkpoint")
    for result in pool.run(size, compare, folders):
        for name, seen in result.items():
            print(name, size, seen)
            assert seen["output"] < LOGITS_TOLERANCE, name
            assert seen["gradients"] < GRADIENT_TOLERANCE, name
            assert seen["cut"] >= 12, name


COMPOSED = {"qwen3_vl": ("qwen3_vl_vision", "qwen3_vl_text"), "llava": ("clip_vision_model", "llama")}
"""Models without a plan of their own, by the types of their parts."""
WIDTHS: dict[str, Any] = {"qwen3_vl": {"vision_config": {"out_hidden_size": 4096}}}  # its defaults do not fit together


@pytest.mark.slow
@pytest.mark.parametrize("model_type", COMPOSED)
def test_models_are_cut_by_the_plans_of_their_parts(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type](**WIDTHS.get(model_type, {}))
    for verdict in verify(config, sizes=(2, 3), grads=True):
        assert verdict.ok, verdict.faults
