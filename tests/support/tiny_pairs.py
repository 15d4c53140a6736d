"""Tiny models of an encoder and a decoder, of text or of speech."""

from __future__ import annotations

from tests.support import tiny_inputs as given
from tests.support.models import HEAD_DIM, VOCAB
from tests.support.tiny_inputs import CHANNELS, HEADS, PATCH
from tests.support.tiny_model import SIGHT, WIDTH, Tiny

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
    "hidden_size": WIDTH,
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
    "cross_hidden_size": WIDTH,
}
SPOKEN = {
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": HEADS,
    "speech_encoder_intermediate_size": 50,
    "feature_projection_input_dim": 12,
    "adaptor_kernel_size": 4,
    "adaptor_stride": 4,
    "max_source_positions": 64,
}
PAIRS = {
    "pegasus": Tiny("Pegasus", inputs=given.both_sides, head="PegasusForConditionalGeneration"),
    "marian": Tiny("Marian", inputs=given.both_sides, head="MarianMTModel"),
    "whisper": Tiny("Whisper", inputs=given.speech, head="WhisperForConditionalGeneration"),
    "pix2struct": Tiny(
        "Pix2Struct",
        {
            "text_config": {**SIGHT, "vocab_size": VOCAB, "num_layers": 2, "num_heads": HEADS, "d_ff": 50},
            "vision_config": {**SIGHT, "d_ff": 50, "seq_len": 16, "patch_embed_hidden_size": CHANNELS * PATCH**2},
        },
        inputs=given.flat_patches,
        head="Pix2StructForConditionalGeneration",
        since="5.17",
    ),
    "longt5, global": Tiny(
        "LongT5",
        {"local_radius": 3, "global_block_size": 2, "encoder_attention_type": "transient-global"},
        inputs=given.both_sides,
        head="LongT5ForConditionalGeneration",
    ),
    "pop2piano": Tiny("Pop2Piano", inputs=given.both_sides, head="Pop2PianoForConditionalGeneration", generates=False),
    "prophetnet": Tiny("ProphetNet", inputs=given.both_sides, head="ProphetNetForConditionalGeneration"),
    "seamless_m4t, text": Tiny("SeamlessM4T", SPOKEN, inputs=given.both_sides, head="SeamlessM4TForTextToText"),
    "dia": Tiny(
        "Dia",
        {"encoder_config": DECODING, "decoder_config": SPEAKING, "delay_pattern": [0, 1]},
        inputs=given.both_codes,
        head="DiaForConditionalGeneration",
        generates=False,
    ),
    "kyutai_speech_to_text": Tiny(
        "KyutaiSpeechToText",
        {"codebook_vocab_size": 21, "num_codebooks": 3, "audio_pad_token_id": 262, "codec_config": CODEC},
        inputs=given.codes,
        head="KyutaiSpeechToTextForConditionalGeneration",
        generates=False,
    ),
    "pp_formulanet_text": Tiny(
        "PPFormulaNetText", inputs=given.tokens_and_states, head="PPFormulaNetTextModel", since="5.23"
    ),
}
