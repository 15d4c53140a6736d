"""`generate(use_mtp=True)` with sharded layers: tokens and drafts of one process, in fp64, and bytes of a rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, modeling_layers
from transformers.generation import candidate_generator

from tests.support.comparisons import read_folder
from tests.support.float8 import quantize_folder
from tests.support.models import load
from tests.support.tiers import wide
from tp_transformers import UnsupportedError, local_tensor

pytestmark = pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="MTP since transformers 5.24")

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 72,
    "intermediate_size": 100,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
MIXED = {"n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 2}
LATENT = {"num_key_value_heads": 9, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
KINDS = ["sliding_attention", "full_attention"]
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "glm4_moe": ("Glm4Moe", {**SIZES, **MIXED}),
    "deepseek_v3": ("DeepseekV3", {**SIZES, **MIXED, **LATENT, "qk_nope_head_dim": 8, "n_group": 2, "topk_group": 1}),
    "mellum": ("Mellum", {**SIZES, "num_experts": 6, "num_mtp_layers": 1, "sliding_window": 16, "layer_types": KINDS}),
}
"""Names of classes, and configs: two layers after the model's own two, or one below `mtp`."""
PROMPT = torch.tensor([[23, 9, 41, 198, 3, 77, 12]])
NEW = 40


def released(kind: str) -> Any:
    """Let a class of transformers find the layers after two; those of released checkpoints have larger numbers."""
    cls = getattr(transformers, f"{MODELS[kind][0]}ForCausalLM")
    name = "_keys_to_ignore_on_load_unexpected"
    return mock.patch.object(cls, name, getattr(cls, name) if kind == "mellum" else [r"model\.layers\.[23]\..*"])


def stored(kind: str, layers: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the layers, by their names in checkpoints."""
    for name, tensor in layers.state_dict().items():
        number, inner = re.fullmatch(r"layers\.(\d+)\.(.+)", name).groups()
        prefix = f"mtp.layers.{number}." if kind == "mellum" else f"model.layers.{2 + int(number)}."
        if kind != "mellum":
            inner = inner.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.", not inner.count("mtp_"))
        block, _, which = inner.partition("experts.")
        for expert in range(len(tensor)) if which in ("gate_up_proj", "down_proj") else ():
            halves = tensor[expert].chunk(2) if which == "gate_up_proj" else (tensor[expert],)
            for part, half in zip(("gate_proj", "up_proj") if len(halves) > 1 else ("down_proj",), halves, strict=True):
                yield f"{prefix}{block}experts.{expert}.{part}.weight", half.clone()
        if which not in ("gate_up_proj", "down_proj"):
            yield prefix + inner, tensor


def write(kind: str, folder: Path) -> str:
    """A checkpoint whose layers draft from the next token's embedding, as the model does, so some drafts are right."""
    name, settings = MODELS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings)).double()
    layers = modeling_layers.MtpModel(model, model.config.num_mtp_layers).double()
    with torch.no_grad():
        for part in (model, layers):
            for at, param in part.named_parameters():
                if "layers." in at or "norm" in at:
                    param.normal_(float("norm" in at), 0.1 if "norm" in at else 0.04)
        for layer in layers.layers:
            layer.eh_proj.weight[:, :72] += torch.eye(72)
        model.get_input_embeddings().weight.normal_()
        model.lm_head.weight.normal_(std=0.3)
    for shared in ("embed_tokens", "shared_head", "rotary_emb"):
        setattr(layers, shared, None)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **dict(stored(kind, layers))}, file, metadata={"format": "pt"})
    return str(folder)


def drafted(kind: str, model: Any, **settings: Any) -> dict[str, Any]:
    """The tokens of `generate`, how many of the drafts were right in each step, and the layers' bytes in memory."""
    matches, used, original = [], [], candidate_generator.MTPCandidateGenerator.get_candidates

    def get_candidates(self: Any, *args: Any, n_last_matches: Any, **kwargs: Any) -> Any:
        matches.append(int(n_last_matches))
        used[:] = [self.mtp_model]
        return original(self, *args, n_last_matches=n_last_matches, **kwargs)

    with mock.patch.object(candidate_generator.MTPCandidateGenerator, "get_candidates", get_candidates):
        torch.manual_seed(7)
        tokens = model.generate(PROMPT, max_new_tokens=NEW, use_mtp=True, **settings)
    layers = [*used[0].layers.parameters(), *used[0].layers.buffers()]
    return {
        "tokens": tokens[0].tolist(),
        "matches": matches,
        "bytes": sum(local_tensor(each).nbytes for each in layers),
    }


EAGER = {"dtype": torch.float64, "experts_implementation": "eager"}  # there is no grouped product in fp64


def on_ranks(kind: str, folder: str, options: Mapping[str, Any]) -> list[Any]:
    """Run on every rank: greedy and sampled; the tokens of greedy decoding without drafts."""
    with released(kind):
        model = load(folder, **EAGER, **options)
        try:
            found = [drafted(kind, model, do_sample=False), drafted(kind, model, do_sample=True)]
        except UnsupportedError as error:
            return [str(error)]
        return [*found, model.generate(PROMPT, max_new_tokens=NEW, do_sample=False)[0].tolist()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`made(kind)`: a checkpoint, and what one process makes of it."""

    @cache
    def make(kind: str) -> tuple[str, list[dict[str, Any]]]:
        folder = write(kind, tmp_path_factory.mktemp(kind))
        return folder, of_one_process(kind, folder)

    return make


def of_one_process(kind: str, folder: str) -> list[dict[str, Any]]:
    with released(kind):
        model = AutoModelForCausalLM.from_pretrained(folder, **EAGER)
        return [drafted(kind, model, do_sample=False), drafted(kind, model, do_sample=True)]


CASES = [
    ("glm4_moe", 2, {}),
    ("glm4_moe", 3, {}),
    ("glm4_moe", 3, {"tp_expert_parallel": True}),
    ("deepseek_v3", 2, {"tp_shares": [2, 1]}),
    ("deepseek_v3", 3, {}),
    ("mellum", 2, {}),
    ("mellum", 3, {}),
]


@pytest.mark.parametrize(("kind", "size", "options"), wide(CASES, 1))
def test_drafts_are_those_of_one_process(pool, made, kind, size, options) -> None:
    folder, (greedy, sampled) = made(kind)
    assert 0 < sum(greedy["matches"]) < NEW - len(greedy["matches"]) / 2, greedy["matches"]
    ranks = pool.run(size, on_ranks, kind, folder, options)
    for drafts, drawn, plain in ranks:
        assert drafts["tokens"] == plain == greedy["tokens"]
        assert drafts["matches"] == greedy["matches"]
        assert (drawn["tokens"], drawn["matches"]) == (sampled["tokens"], sampled["matches"])
    held = [drafts["bytes"] for drafts, _, _ in ranks]
    print(kind, size, options, "accepted", sum(greedy["matches"]), "of", NEW, "bytes", held, "whole", greedy["bytes"])
    assert max(held) < greedy["bytes"] * (0.75 if size == 2 else 0.5)


@pytest.mark.slow
def test_layers_in_float8_are_decoded(pool, made, tmp_path) -> None:
    folder, _ = made("glm4_moe")
    dense = tmp_path / "dense"
    tensors = quantize_folder(folder, tmp_path / "float8", (32, 32))
    AutoModelForCausalLM.from_pretrained(folder).config.save_pretrained(dense)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, dense / "model.safetensors")
    greedy, _ = of_one_process("glm4_moe", str(dense))
    assert len(tensors) == len(read_folder(folder))
    for drafts, _, plain in pool.run(2, on_ranks, "glm4_moe", str(tmp_path / "float8"), {}):
        assert drafts["tokens"] == plain == greedy["tokens"]
        assert drafts["matches"] == greedy["matches"]


@pytest.mark.slow
def test_sharded_sequences_are_refused(pool, made) -> None:
    for (message,) in pool.run(2, on_ranks, "glm4_moe", made("glm4_moe")[0], {"tp_sequence_parallel": True}):
        assert "tp_sequence_parallel" in message
