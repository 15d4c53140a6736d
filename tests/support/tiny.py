"""Tiny models of those types that share a plan with others, or are parts of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from tests.support.models import HEAD_DIM, PAD, VOCAB
from tests.support.tiny_inputs import (
    CHANNELS,
    HEADS,
    IMAGE,
    PATCH,
    both_sides,
    flat_patches,
    frames,
    images,
    masked_sound,
    padded_patches,
    patches,
    queries,
    queries_and_text,
    seen_tokens,
    sound,
    speech,
    text_and_an_image,
    text_and_images,
    tiles,
    tokens,
)


@dataclass(frozen=True)
class Tiny:
    """How to make a tiny model, and what to show it."""

    config: str
    """Name of the config class in transformers."""
    model: str
    """Name of the model class, in the module of models beside that of the config."""
    inputs: Callable[[], dict[str, Tensor]]
    settings: tuple[tuple[str, Any], ...] = ()
    since: str = "5.6"
    """First release of transformers whose code takes a part of the heads; those before say that shapes do not fit."""

    @property
    def runs(self) -> bool:
        """True if the installed transformers has the model, as the plan takes it."""
        return hasattr(transformers, self.config) and Version(transformers.__version__) >= Version(self.since)

    def make(self) -> Any:
        """A random model of two layers, whose norms and biases are random too."""
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


WIDTHS = ("hidden_size", "d_model", "n_embd", "embedding_size")
INNER_WIDTHS = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "n_inner", "dff", "d_ff")
DEPTHS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers", "depth")
HEAD_COUNTS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads", "n_head")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(WIDTHS, HEADS * HEAD_DIM),
    **dict.fromkeys(INNER_WIDTHS, 50),
    **dict.fromkeys(DEPTHS, 2),
    **dict.fromkeys((*HEAD_COUNTS, "attention_heads", "n_heads", "num_key_value_heads"), HEADS),
    **dict.fromkeys(LENGTHS, 16),
    "head_dim": HEAD_DIM,
    "d_kv": HEAD_DIM,
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_patches": (IMAGE // PATCH) ** 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 24,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "num_mel_bins": 12,
    "input_feat_per_channel": 12,
    "max_source_positions": 10,
}
WINDOWS = (("window_size", 8), ("fullatt_block_indexes", [1]), ("num_key_value_heads", 1))
FROM_IMAGES = (("encoder_hidden_size", 24), ("cross_attention_frequency", 1))
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
}


LATENT: tuple[tuple[str, Any], ...] = (
    ("kv_lora_rank", 16),
    ("q_lora_rank", 16),
    ("qk_rope_head_dim", 4),
    ("qk_nope_head_dim", 8),
    ("v_head_dim", 12),
    ("head_dim", 4),
)
DECODES = (("is_decoder", True),)
EXPERTS: tuple[tuple[str, Any], ...] = (
    *dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4).items(),
    *dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2).items(),
    ("intermediate_size", 44),  # grouped matmuls want multiples of 16 bytes, also in one process
    ("moe_intermediate_size", 44),
)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SIGHT = {
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "d_kv": HEAD_DIM,
}
"""A config within a config."""
TWO_GROUPS = (
    ("hidden_size", 64),
    ("n_embd", 64),
    ("num_attention_heads", 8),
    ("n_head", 8),
    ("num_key_value_heads", 4),
)
STATE_SPACE = (
    ("mamba_n_heads", 2 * HEADS),
    ("mamba_d_ssm", 2 * HEADS * HEAD_DIM),
    ("mamba_d_head", HEAD_DIM),
    ("mamba_n_groups", 1),
    ("mamba_d_state", 16),
    ("mamba_chunk_size", 8),
)
TEXTS = {
    "xglm": Tiny("XGLMConfig", "XGLMForCausalLM", tokens),
    "biogpt": Tiny("BioGptConfig", "BioGptForCausalLM", tokens),
    "gptj": Tiny("GPTJConfig", "GPTJForCausalLM", tokens, (("rotary_dim", 4),)),
    "gpt_neo": Tiny("GPTNeoConfig", "GPTNeoForCausalLM", tokens, (("attention_types", [[["global", "local"], 1]]),)),
    "openai-gpt": Tiny("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", tokens),
    "ctrl": Tiny("CTRLConfig", "CTRLLMHeadModel", tokens, since="5.17"),
    "mpt": Tiny("MptConfig", "MptForCausalLM", tokens),
    "stablelm": Tiny("StableLmConfig", "StableLmForCausalLM", tokens, (("partial_rotary_factor", 0.5),)),
    "stablelm, parallel": Tiny("StableLmConfig", "StableLmForCausalLM", tokens, (("use_parallel_residual", True),)),
    "persimmon": Tiny("PersimmonConfig", "PersimmonForCausalLM", tokens),
    "modernbert": Tiny("ModernBertConfig", "ModernBertForMaskedLM", tokens, (("local_attention", 4),)),
    "modernbert-decoder": Tiny(
        "ModernBertDecoderConfig", "ModernBertDecoderForCausalLM", tokens, (("local_attention", 4),)
    ),
    "bert": Tiny("BertConfig", "BertLMHeadModel", tokens, DECODES),
    "bert, both ways": Tiny("BertConfig", "BertForMaskedLM", tokens),
    "roberta": Tiny("RobertaConfig", "RobertaForCausalLM", tokens, (*DECODES, ("pad_token_id", 1))),
    "xlm-roberta": Tiny("XLMRobertaConfig", "XLMRobertaForCausalLM", tokens, DECODES),
    "xlm-roberta-xl": Tiny("XLMRobertaXLConfig", "XLMRobertaXLForCausalLM", tokens, DECODES),
    "camembert": Tiny("CamembertConfig", "CamembertForCausalLM", tokens, DECODES),
    "data2vec-text": Tiny("Data2VecTextConfig", "Data2VecTextForCausalLM", tokens, DECODES),
    "ernie": Tiny("ErnieConfig", "ErnieForCausalLM", tokens, DECODES),
    "electra": Tiny("ElectraConfig", "ElectraForCausalLM", tokens, DECODES),
    "bert-generation": Tiny("BertGenerationConfig", "BertGenerationDecoder", tokens, DECODES),
    "megatron-bert": Tiny("MegatronBertConfig", "MegatronBertForCausalLM", tokens, DECODES),
    "roc_bert": Tiny("RoCBertConfig", "RoCBertForCausalLM", tokens, DECODES),
    "rembert": Tiny("RemBertConfig", "RemBertForCausalLM", tokens, DECODES),
    "roformer": Tiny("RoFormerConfig", "RoFormerForCausalLM", tokens, DECODES),
    "xmod": Tiny("XmodConfig", "XmodForCausalLM", tokens, (*DECODES, ("default_language", "en_XX"))),
    "roberta-prelayernorm": Tiny("RobertaPreLayerNormConfig", "RobertaPreLayerNormForCausalLM", tokens, DECODES),
    "mbart": Tiny("MBartConfig", "MBartForConditionalGeneration", both_sides),
    "m2m_100": Tiny("M2M100Config", "M2M100ForConditionalGeneration", both_sides),
    "pegasus": Tiny("PegasusConfig", "PegasusForConditionalGeneration", both_sides),
    "marian": Tiny("MarianConfig", "MarianMTModel", both_sides),
    "blenderbot": Tiny("BlenderbotConfig", "BlenderbotForConditionalGeneration", both_sides),
    "blenderbot-small": Tiny("BlenderbotSmallConfig", "BlenderbotSmallForConditionalGeneration", both_sides),
    "plbart": Tiny("PLBartConfig", "PLBartForConditionalGeneration", both_sides),
    "mvp": Tiny("MvpConfig", "MvpForConditionalGeneration", both_sides),
    "mt5": Tiny("MT5Config", "MT5ForConditionalGeneration", both_sides),
    "umt5": Tiny("UMT5Config", "UMT5ForConditionalGeneration", both_sides),
    "whisper": Tiny("WhisperConfig", "WhisperForConditionalGeneration", speech),
    "speech_to_text": Tiny("Speech2TextConfig", "Speech2TextForConditionalGeneration", frames),
    "granitemoe": Tiny("GraniteMoeConfig", "GraniteMoeForCausalLM", tokens, EXPERTS),
    "granitemoeshared": Tiny(
        "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", tokens, (*EXPERTS, ("shared_intermediate_size", 37))
    ),
    "granitemoehybrid": Tiny(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        tokens,
        (
            *EXPERTS,
            ("shared_intermediate_size", 37),
            ("layer_types", ["mamba", "attention"]),
            ("mamba_n_heads", 2 * HEADS),
        ),
    ),
    "phimoe": Tiny("PhimoeConfig", "PhimoeForCausalLM", tokens, EXPERTS),
    "jamba": Tiny(
        "JambaConfig",
        "JambaForCausalLM",
        tokens,
        (
            *EXPERTS,
            ("attn_layer_period", 2),
            ("attn_layer_offset", 1),
            ("expert_layer_offset", 1),
            ("mamba_dt_rank", 4),
        ),
    ),
    "hunyuan_v1_dense": Tiny("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", tokens),
    "hunyuan_v1_moe": Tiny("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", tokens, EXPERTS),
    "lfm2": Tiny("Lfm2Config", "Lfm2ForCausalLM", tokens, (("layer_types", ["conv", "full_attention"]),)),
    "lfm2_moe": Tiny(
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        tokens,
        (*EXPERTS, ("layer_types", ["conv", "full_attention"]), ("num_dense_layers", 1)),
    ),
    "afmoe": Tiny(
        "AfmoeConfig",
        "AfmoeForCausalLM",
        tokens,
        (*EXPERTS, ("num_dense_layers", 1), ("global_attn_every_n_layers", 2)),
    ),
    "glm4_moe_lite": Tiny("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", tokens, (*EXPERTS, *LATENT)),
    "gemma4_text": Tiny(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        tokens,
        (
            ("num_key_value_heads", 1),
            ("vocab_size_per_layer_input", VOCAB),
            ("hidden_size_per_layer_input", 8),
            ("num_kv_shared_layers", 0),
            ("global_head_dim", HEAD_DIM),
            ("layer_types", ["sliding_attention", "full_attention"]),
            ("sliding_window", 4),
        ),
    ),
    "mllama_text_model": Tiny(
        "MllamaTextConfig",
        "MllamaForCausalLM",
        seen_tokens,
        (("cross_attention_layers", [1]), ("rope_parameters", ROPE)),
    ),
    "blip_text_model": Tiny("BlipTextConfig", "BlipTextLMHeadModel", tokens, (*DECODES, *FROM_IMAGES)),
    "git": Tiny("GitConfig", "GitForCausalLM", text_and_images, (("vision_config", SIGHT),), since="5.23"),
    "idefics": Tiny(
        "IdeficsConfig",
        "IdeficsForVisionText2Text",
        text_and_an_image,
        (
            ("vision_config", {**SIGHT, "embed_dim": HEADS * HEAD_DIM}),
            ("cross_layer_interval", 1),
            ("additional_vocab_size", 3),
            ("use_resampler", False),
        ),
    ),
    "pix2struct": Tiny(
        "Pix2StructConfig",
        "Pix2StructForConditionalGeneration",
        flat_patches,
        (
            ("text_config", {**SIGHT, "vocab_size": VOCAB, "num_layers": 2, "num_heads": HEADS, "d_ff": 50}),
            ("vision_config", {**SIGHT, "d_ff": 50, "seq_len": 16, "patch_embed_hidden_size": CHANNELS * PATCH**2}),
        ),
        since="5.17",
    ),
    "lfm3": Tiny("Lfm3Config", "Lfm3ForCausalLM", tokens, (("layer_types", ["conv", "full_attention"]),)),
    "diffllama": Tiny("DiffLlamaConfig", "DiffLlamaForCausalLM", tokens, TWO_GROUPS),
    "bitnet": Tiny("BitNetConfig", "BitNetForCausalLM", tokens),
    "emu3_text_model": Tiny("Emu3TextConfig", "Emu3ForCausalLM", tokens, (("rope_parameters", ROPE),)),
    "trocr": Tiny("TrOCRConfig", "TrOCRForCausalLM", tokens),
    "codegen": Tiny("CodeGenConfig", "CodeGenForCausalLM", tokens, (*TWO_GROUPS, ("rotary_dim", 4))),
    "falcon_h1": Tiny("FalconH1Config", "FalconH1ForCausalLM", tokens, STATE_SPACE),
    "bamba": Tiny("BambaConfig", "BambaForCausalLM", tokens, (*STATE_SPACE, ("attn_layer_indices", [1]))),
    "big_bird": Tiny("BigBirdConfig", "BigBirdForCausalLM", tokens, (*DECODES, ("attention_type", "original_full"))),
    "youtu": Tiny("YoutuConfig", "YoutuForCausalLM", tokens, LATENT),
}
MODELS = {**TOWERS, **TEXTS}


def model_class(tiny: Tiny) -> Any:
    module = getattr(transformers, tiny.config).__module__.replace(".configuration_", ".modeling_")
    return getattr(__import__(module, fromlist=[tiny.model]), tiny.model)
