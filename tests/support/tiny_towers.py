"""Tiny models of those types that are parts of models: towers that see or hear."""

from __future__ import annotations

from tests.support.models import HEAD_DIM
from tests.support.tiny_inputs import (
    CHANNELS,
    HEADS,
    IMAGE,
    PATCH,
    flat_images,
    grid_patches,
    images,
    masked_images,
    parakeet_sound,
    patches,
    placed_patches,
    plain_images,
    queries,
    queries_and_text,
    rows_of_patches,
    sounds_in_a_row,
    square_patches,
    tiles,
)
from tests.support.tiny_model import FROM_IMAGES, HEARING, Tiny

WINDOWS = (("window_size", 8), ("fullatt_block_indexes", [1]))
IN_TWO = (("image_size", (IMAGE, IMAGE)), ("patch_size", (PATCH, PATCH)))
SEGMENTS = (("mlp_dim", 50), ("window_size", 2), ("global_attn_indexes", [1]), ("output_channels", 8))
CONVOLVING = (("num_hidden_layers", 3), ("layer_types", ["conv", "full_attention", "full_attention"]))
TOWERS = {
    "idefics2_vision": Tiny("Idefics2VisionConfig", "Idefics2VisionTransformer", images),
    "internvl_vision, normed": Tiny(
        "InternVLVisionConfig", "InternVLVisionModel", images, (*IN_TWO, ("use_qk_norm", True))
    ),
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
    "exaone4_5_vision": Tiny(
        "Exaone4_5_VisionConfig", "Exaone4_5_VisionModel", patches, (*WINDOWS, ("num_key_value_heads", 1))
    ),
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
    "parakeet_encoder": Tiny("ParakeetEncoderConfig", "ParakeetEncoder", parakeet_sound, tuple(HEARING.items())),
    "cosmos3_edge_vision": Tiny("Cosmos3EdgeVisionConfig", "Cosmos3EdgeVisionModel", flat_images),
    "kosmos_2_vision_model": Tiny("Kosmos2VisionConfig", "Kosmos2VisionModel", images),
    "kosmos_2_5_vision_model": Tiny(
        "Kosmos2_5VisionConfig",
        "Kosmos2_5VisionModel",
        placed_patches,
        (("patch_embed_hidden_size", CHANNELS * PATCH**2), ("max_num_patches", 16)),
    ),
    "paddleocr_vl_vision": Tiny("PaddleOCRVisionConfig", "PaddleOCRVisionModel", square_patches, since="5.17"),
    "molmo2_vision": Tiny(
        "Molmo2VisionConfig", "Molmo2VisionModel", rows_of_patches, (("image_size", [IMAGE, IMAGE]),)
    ),
    "got_ocr2_vision": Tiny("GotOcr2VisionConfig", "GotOcr2VisionEncoder", images, SEGMENTS, since="5.23"),
    "pp_formulanet_vision": Tiny(
        "PPFormulaNetVisionConfig",
        "PPFormulaNetVisionModel",
        images,
        (
            *SEGMENTS,
            ("post_conv_in_channels", 8),
            ("post_conv_mid_channels", 8),
            ("post_conv_out_channels", 8),
            ("decoder_hidden_size", 8),
        ),
        since="5.23",
    ),
    "florence_vision": Tiny(
        "Florence2VisionConfig",
        "Florence2VisionBackbone",
        plain_images,
        (
            ("depths", [1, 1, 1, 1]),
            ("patch_size", [7, 3, 3, 3]),
            ("embed_dim", [10, 20, 20, 40]),
            ("num_heads", [1, 2, 2, 5]),
            ("num_groups", [1, 2, 2, 5]),
            ("window_size", 2),
        ),
    ),
    "lfm3_vl_vision": Tiny(
        "Lfm3VlVisionConfig",
        "Lfm3VlVisionModel",
        grid_patches,
        CONVOLVING,
    ),
    "radio": Tiny("RadioConfig", "RadioModel", images, (("mlp_ratio", 1.25), ("max_img_size", 32)), since="5.23"),
    "qwen2_5_omni_vision_encoder": Tiny("Qwen2_5OmniVisionEncoderConfig", "Qwen2_5OmniVisionEncoder", patches, WINDOWS),
    "qwen2_5_omni_audio_encoder": Tiny(
        "Qwen2_5OmniAudioEncoderConfig", "Qwen2_5OmniAudioEncoder", sounds_in_a_row, (("n_window", 5),)
    ),
    "hunyuan_vl_vision": Tiny("HunYuanVLVisionConfig", "HunYuanVLVisionTransformer", flat_images),
    "muse_glimmer_vision": Tiny("MuseGlimmerVisionConfig", "MuseGlimmerVisionModel", grid_patches),
    "phi4_multimodal_vision": Tiny("Phi4MultimodalVisionConfig", "Phi4MultimodalVisionModel", masked_images),
}
