"""Tiny models of those types that are parts of models: towers that see or hear."""

from __future__ import annotations

from tests.support.models import HEAD_DIM
from tests.support.tiny_inputs import (
    HEADS,
    IMAGE,
    PATCH,
    images,
    masked_sound,
    padded_patches,
    parakeet_sound,
    patches,
    queries,
    queries_and_text,
    sound,
    tiles,
)
from tests.support.tiny_model import FROM_IMAGES, HEARING, Tiny

WINDOWS = (("window_size", 8), ("fullatt_block_indexes", [1]), ("num_key_value_heads", 1))
IN_TWO = (("image_size", (IMAGE, IMAGE)), ("patch_size", (PATCH, PATCH)))
TOWERS = {
    "clip_vision_model": Tiny("CLIPVisionConfig", "CLIPVisionModel", images),
    "siglip_vision_model": Tiny("SiglipVisionConfig", "SiglipVisionModel", images),
    "siglip2_vision_model": Tiny("Siglip2VisionConfig", "Siglip2VisionModel", padded_patches),
    "idefics2_vision": Tiny("Idefics2VisionConfig", "Idefics2VisionTransformer", images),
    "idefics3_vision": Tiny("Idefics3VisionConfig", "Idefics3VisionTransformer", images),
    "smolvlm_vision": Tiny("SmolVLMVisionConfig", "SmolVLMVisionTransformer", images),
    "internvl_vision": Tiny("InternVLVisionConfig", "InternVLVisionModel", images, IN_TWO),
    "internvl_vision, normed": Tiny(
        "InternVLVisionConfig", "InternVLVisionModel", images, (*IN_TWO, ("use_qk_norm", True))
    ),
    "pixtral": Tiny("PixtralVisionConfig", "PixtralVisionModel", images),
    "llama4_vision_model": Tiny(
        "Llama4VisionConfig",
        "Llama4VisionModel",
        images,
        (
            ("intermediate_size", 4 * HEADS * HEAD_DIM),
            ("projector_input_dim", 24),
            ("projector_output_dim", 24),
        ),
    ),
    "qwen3_vl_vision": Tiny("Qwen3VLVisionConfig", "Qwen3VLVisionModel", patches),
    "qwen3_vl_moe_vision": Tiny("Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionModel", patches),
    "qwen3_5_vision": Tiny("Qwen3_5VisionConfig", "Qwen3_5VisionModel", patches),
    "qwen3_5_moe_vision": Tiny("Qwen3_5MoeVisionConfig", "Qwen3_5MoeVisionModel", patches),
    "glm4v_vision": Tiny("Glm4vVisionConfig", "Glm4vVisionModel", patches),
    "glm4v_moe_vision": Tiny("Glm4vMoeVisionConfig", "Glm4vMoeVisionModel", patches),
    "qwen2_5_vl_vision": Tiny("Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel", patches, WINDOWS),
    "exaone4_5_vision": Tiny("Exaone4_5_VisionConfig", "Exaone4_5_VisionModel", patches, WINDOWS),
    "glm_ocr_vision": Tiny("GlmOcrVisionConfig", "GlmOcrVisionModel", patches),
    "mllama_vision_model": Tiny(
        "MllamaVisionConfig",
        "MllamaVisionModel",
        tiles,
        (
            ("num_global_layers", 1),
            ("attention_heads", HEADS),
            ("intermediate_layers_indices", [1]),
            ("max_num_tiles", 2),
            ("supported_aspect_ratios", [[1, 1], [1, 2], [2, 1]]),
            ("vision_output_dim", 2 * HEADS * HEAD_DIM),
        ),
    ),
    "blip_vision_model": Tiny("BlipVisionConfig", "BlipVisionModel", images),
    "blip_2_vision_model": Tiny("Blip2VisionConfig", "Blip2VisionModel", images),
    "instructblip_vision_model": Tiny("InstructBlipVisionConfig", "InstructBlipVisionModel", images),
    "instructblipvideo_vision_model": Tiny("InstructBlipVideoVisionConfig", "InstructBlipVideoVisionModel", images),
    "blip_2_qformer": Tiny("Blip2QFormerConfig", "Blip2QFormerModel", queries, FROM_IMAGES),
    "instructblip_qformer": Tiny(
        "InstructBlipQFormerConfig", "InstructBlipQFormerModel", queries_and_text, FROM_IMAGES, since="5.23"
    ),
    "instructblipvideo_qformer": Tiny(
        "InstructBlipVideoQFormerConfig", "InstructBlipVideoQFormerModel", queries_and_text, FROM_IMAGES, since="5.23"
    ),
    "qwen2_audio_encoder": Tiny("Qwen2AudioEncoderConfig", "Qwen2AudioEncoder", sound),
    "voxtral_encoder": Tiny("VoxtralEncoderConfig", "VoxtralEncoder", sound),
    "audioflamingo3_encoder": Tiny("AudioFlamingo3EncoderConfig", "AudioFlamingo3Encoder", masked_sound),
    "parakeet_encoder": Tiny("ParakeetEncoderConfig", "ParakeetEncoder", parakeet_sound, tuple(HEARING.items())),
}
