"""Tiny models of those types that are parts of models: towers that see or hear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from tests.support import tiny_inputs as given
from tests.support.tiny_inputs import CHANNELS, HEADS, IMAGE, PATCH
from tests.support.tiny_model import FROM_IMAGES, WIDTH, Tiny

WINDOWS = {"window_size": 8, "fullatt_block_indexes": [1]}
IN_TWO = {"image_size": (IMAGE, IMAGE), "patch_size": (PATCH, PATCH)}
SEGMENTS = {"mlp_dim": 50, "window_size": 2, "global_attn_indexes": [1], "output_channels": 8}
CONVOLVING = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "full_attention"]}
HEARING = {"num_mel_bins": 16, "subsampling_conv_channels": 8}


def tower(
    kind: str,
    inputs: Callable[[], dict[str, Tensor]],
    settings: Mapping[str, Any] = MappingProxyType({}),
    head: str = "",
    since: str = "5.6",
) -> Tiny:
    return Tiny(kind, settings, inputs, since, head=head or f"{kind}Model")


TOWERS = {
    "idefics2_vision": tower("Idefics2Vision", given.images, head="Idefics2VisionTransformer"),
    "internvl_vision, normed": tower("InternVLVision", given.images, {**IN_TWO, "use_qk_norm": True}),
    "llama4_vision_model": tower(
        "Llama4Vision",
        given.images,
        {"intermediate_size": 4 * WIDTH, "projector_input_dim": 24, "projector_output_dim": 24},
    ),
    "qwen3_vl_vision": tower("Qwen3VLVision", given.patches),
    "qwen3_vl_moe_vision": tower("Qwen3VLMoeVision", given.patches),
    "qwen3_5_vision": tower("Qwen3_5Vision", given.patches),
    "qwen3_5_moe_vision": tower("Qwen3_5MoeVision", given.patches),
    "glm4v_vision": tower("Glm4vVision", given.patches),
    "glm4v_moe_vision": tower("Glm4vMoeVision", given.patches),
    "qwen2_5_vl_vision": tower(
        "Qwen2_5_VLVision", given.patches, WINDOWS, head="Qwen2_5_VisionTransformerPretrainedModel"
    ),
    "exaone4_5_vision": tower("Exaone4_5_Vision", given.patches, {**WINDOWS, "num_key_value_heads": 1}),
    "glm_ocr_vision": tower("GlmOcrVision", given.patches),
    "mllama_vision_model": tower(
        "MllamaVision",
        given.tiles,
        {
            "num_global_layers": 1,
            "attention_heads": HEADS,
            "intermediate_layers_indices": [1],
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            "vision_output_dim": 2 * WIDTH,
        },
    ),
    "blip_vision_model": tower("BlipVision", given.images),
    "blip_2_vision_model": tower("Blip2Vision", given.images),
    "instructblip_vision_model": tower("InstructBlipVision", given.images),
    "instructblipvideo_vision_model": tower("InstructBlipVideoVision", given.images),
    "blip_2_qformer": tower("Blip2QFormer", given.queries, FROM_IMAGES),
    "instructblip_qformer": tower("InstructBlipQFormer", given.queries_and_text, FROM_IMAGES, since="5.23"),
    "instructblipvideo_qformer": tower("InstructBlipVideoQFormer", given.queries_and_text, FROM_IMAGES, since="5.23"),
    "parakeet_encoder": tower("ParakeetEncoder", given.parakeet_sound, HEARING, head="ParakeetEncoder"),
    "cosmos3_edge_vision": tower("Cosmos3EdgeVision", given.flat_images),
    "kosmos_2_vision_model": tower("Kosmos2Vision", given.images),
    "kosmos_2_5_vision_model": tower(
        "Kosmos2_5Vision", given.placed_patches, {"patch_embed_hidden_size": CHANNELS * PATCH**2, "max_num_patches": 16}
    ),
    "paddleocr_vl_vision": tower("PaddleOCRVision", given.square_patches, since="5.17"),
    "molmo2_vision": tower("Molmo2Vision", given.rows_of_patches, {"image_size": [IMAGE, IMAGE]}),
    "got_ocr2_vision": tower("GotOcr2Vision", given.images, SEGMENTS, head="GotOcr2VisionEncoder", since="5.23"),
    "pp_formulanet_vision": tower(
        "PPFormulaNetVision",
        given.images,
        {
            **SEGMENTS,
            "post_conv_in_channels": 8,
            "post_conv_mid_channels": 8,
            "post_conv_out_channels": 8,
            "decoder_hidden_size": 8,
        },
        since="5.23",
    ),
    "florence_vision": tower(
        "Florence2Vision",
        given.plain_images,
        {
            "depths": [1, 1, 1, 1],
            "patch_size": [7, 3, 3, 3],
            "embed_dim": [10, 20, 20, 40],
            "num_heads": [1, 2, 2, 5],
            "num_groups": [1, 2, 2, 5],
            "window_size": 2,
        },
        head="Florence2VisionBackbone",
    ),
    "lfm3_vl_vision": tower("Lfm3VlVision", given.grid_patches, CONVOLVING),
    "radio": tower("Radio", given.images, {"mlp_ratio": 1.25, "max_img_size": 32}, since="5.23"),
    "qwen2_5_omni_vision_encoder": tower(
        "Qwen2_5OmniVisionEncoder", given.patches, WINDOWS, head="Qwen2_5OmniVisionEncoder"
    ),
    "qwen2_5_omni_audio_encoder": tower(
        "Qwen2_5OmniAudioEncoder", given.sounds_in_a_row, {"n_window": 5}, head="Qwen2_5OmniAudioEncoder"
    ),
    "hunyuan_vl_vision": tower("HunYuanVLVision", given.flat_images, head="HunYuanVLVisionTransformer"),
    "muse_glimmer_vision": tower("MuseGlimmerVision", given.grid_patches),
    "phi4_multimodal_vision": tower("Phi4MultimodalVision", given.masked_images),
}
