"""Tiny models of an encoder and a decoder, of text or of speech."""

from __future__ import annotations

from tests.support.models import HEAD_DIM, VOCAB
from tests.support.tiny_inputs import (
    CHANNELS,
    HEADS,
    PATCH,
    both_codes,
    both_sides,
    codes,
    flat_patches,
    frames,
    long_both_sides,
    parakeet_speech,
    placed_text,
    speech,
    tokens_and_states,
    voice,
    waves,
)
from tests.support.tiny_model import HEARING, SIGHT, Tiny

LONG = (("max_encoder_position_embeddings", 16), ("max_decoder_position_embeddings", 16))
CODEC = {
    "model_type": "mimi",
    "hidden_size": 40,
    "num_filters": 4,
    "upsample_groups": 40,
    "codebook_size": 8,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 20,
}
DECODING = {
    "vocab_size": VOCAB,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 16,
}
SPEAKING = {
    **DECODING,
    "num_channels": 2,
    "num_key_value_heads": 1,
    "cross_num_attention_heads": HEADS,
    "cross_num_key_value_heads": HEADS,
    "cross_head_dim": HEAD_DIM,
    "cross_hidden_size": HEADS * HEAD_DIM,
}
SPLIT_DEPTHS = tuple(
    (f"{side}_{name}", count)
    for side in ("encoder", "decoder")
    for name, count in (("num_hidden_layers", 2), ("num_attention_heads", HEADS))
)
SPOKEN = (
    ("speech_encoder_layers", 2),
    ("speech_encoder_attention_heads", HEADS),
    ("speech_encoder_intermediate_size", 50),
    ("feature_projection_input_dim", 12),
    ("adaptor_kernel_size", 4),
    ("adaptor_stride", 4),
    ("max_source_positions", 64),
)
PAIRS = {
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
    "led": Tiny("LEDConfig", "LEDForConditionalGeneration", both_sides, (("attention_window", 4), *LONG)),
    "bigbird_pegasus": Tiny(
        "BigBirdPegasusConfig",
        "BigBirdPegasusForConditionalGeneration",
        long_both_sides,
        (("block_size", 2), ("num_random_blocks", 1)),
    ),
    "pegasus_x": Tiny(
        "PegasusXConfig", "PegasusXForConditionalGeneration", both_sides, (("block_size", 4), ("num_global_tokens", 2))
    ),
    "fsmt": Tiny(
        "FSMTConfig",
        "FSMTForConditionalGeneration",
        both_sides,
        (("src_vocab_size", VOCAB), ("tgt_vocab_size", VOCAB), ("max_length", 16)),
    ),
    "longt5": Tiny("LongT5Config", "LongT5ForConditionalGeneration", both_sides, (("local_radius", 3),)),
    "longt5, global": Tiny(
        "LongT5Config",
        "LongT5ForConditionalGeneration",
        both_sides,
        (("local_radius", 3), ("global_block_size", 2), ("encoder_attention_type", "transient-global")),
    ),
    "pop2piano": Tiny("Pop2PianoConfig", "Pop2PianoForConditionalGeneration", both_sides, generates=False),
    "nllb-moe": Tiny(
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        both_sides,
        (("num_experts", 4), ("encoder_sparse_step", 2), ("decoder_sparse_step", 2)),
    ),
    "switch_transformers": Tiny(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        both_sides,
        (
            ("num_experts", 4),
            ("num_decoder_layers", 2),
            ("num_sparse_encoder_layers", 1),
            ("num_sparse_decoder_layers", 1),
        ),
    ),
    "prophetnet": Tiny("ProphetNetConfig", "ProphetNetForConditionalGeneration", both_sides),
    "seamless_m4t": Tiny("SeamlessM4TConfig", "SeamlessM4TForSpeechToText", voice, SPOKEN),
    "seamless_m4t, text": Tiny("SeamlessM4TConfig", "SeamlessM4TForTextToText", both_sides, SPOKEN),
    "seamless_m4t_v2": Tiny("SeamlessM4Tv2Config", "SeamlessM4Tv2ForSpeechToText", voice, SPOKEN),
    "canary": Tiny(
        "CanaryConfig",
        "CanaryForConditionalGeneration",
        parakeet_speech,
        (("encoder_config", HEARING), ("decoder_config", DECODING)),
    ),
    "cohere_asr": Tiny(
        "CohereAsrConfig", "CohereAsrForConditionalGeneration", parakeet_speech, (("encoder_config", HEARING),)
    ),
    "moonshine": Tiny("MoonshineConfig", "MoonshineForConditionalGeneration", waves, (*SPLIT_DEPTHS,)),
    "moonshine_streaming": Tiny(
        "MoonshineStreamingConfig",
        "MoonshineStreamingForConditionalGeneration",
        waves,
        (("encoder_config", HEARING), ("num_key_value_heads", HEADS)),
    ),
    "dia": Tiny(
        "DiaConfig",
        "DiaForConditionalGeneration",
        both_codes,
        (("encoder_config", DECODING), ("decoder_config", SPEAKING), ("delay_pattern", [0, 1])),
        generates=False,
    ),
    "kyutai_speech_to_text": Tiny(
        "KyutaiSpeechToTextConfig",
        "KyutaiSpeechToTextForConditionalGeneration",
        codes,
        (("codebook_vocab_size", 21), ("num_codebooks", 3), ("audio_pad_token_id", 262), ("codec_config", CODEC)),
        generates=False,
    ),
    "speecht5": Tiny(
        "SpeechT5Config",
        "SpeechT5ForSpeechToText",
        waves,
        (
            ("num_conv_pos_embedding_groups", 5),
            ("num_conv_pos_embeddings", 8),
            ("conv_dim", [8] * 7),
            ("max_text_positions", 16),
        ),
    ),
    "udop": Tiny(
        "UdopConfig",
        "UdopForConditionalGeneration",
        placed_text,
        (("max_2d_position_embeddings", 64), ("decoder_start_token_id", 2)),
    ),
    "pp_formulanet_text": Tiny("PPFormulaNetTextConfig", "PPFormulaNetTextModel", tokens_and_states, since="5.23"),
}
