"""BitNet checkpoints: the weights that transformers' own linears compute with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitNetConfig
from transformers.integrations import bitnet

import tp_transformers
from tests.support.comparisons import different_tensors, full_parameters, read_folder, relative
from tests.support.models import load
from tests.support.quantized import is_linear, rewrite
from tests.support.tiers import wide

TOKENS = torch.arange(3, 21).view(2, 9)
MODES: dict[str, dict[str, Any]] = {
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
    "offline": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "bitlinear": {},
}


@pytest.fixture(autouse=True, scope="module")
def _eagerly() -> Any:
    """transformers compiles its functions for BitNet, which takes seconds."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every mode."""
    root = tmp_path_factory.mktemp("bitnet")
    torch.manual_seed(0)
    sizes = {"hidden_size": 72, "intermediate_size": 92, "num_attention_heads": 6, "num_key_value_heads": 3}
    config = BitNetConfig(vocab_size=101, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(root / "plain")

    def pack(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not is_linear(name, tensor):
            return None
        values = torch.randint(-1, 2, tensor.shape)
        return {name: bitnet.pack_weights(values), f"{name}_scale": torch.tensor([37.0], dtype=torch.bfloat16)}

    for mode, settings in MODES.items():
        change = (lambda name, tensor: None) if mode == "online" else pack
        rewrite(root / "plain", root / mode, {"quant_method": "bitnet", **settings}, change)
    return {mode: root / mode for mode in MODES}


def reference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model, which rounds activations to integers; here it does not."""
    monkeypatch.setattr(bitnet.ActQuant, "apply", lambda activation: activation)
    ones = lambda self, input: (input, torch.ones(()))  # noqa: E731
    monkeypatch.setattr(bitnet.BitLinear, "activation_quant", ones)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    nn.Module.float(model)  # transformers leaves parts as they are stored
    for module in model.modules():
        if isinstance(module, bitnet.BitLinear):
            module.dtype = torch.float32
    return model


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that the linears of a model compute with, without biases: what they make of unit vectors."""
    with torch.no_grad():
        return {
            f"{name}.weight": module(torch.eye(module.in_features)).t()
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | bitnet.BitLinear)
        }


def loaded(folder: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Runs on every rank."""
    model = load(folder, dtype=torch.float32)
    with torch.no_grad():
        return full_parameters(model), model(TOKENS).logits


@pytest.mark.parametrize(("mode", "size"), wide([("online", 2), ("offline", 2), ("bitlinear", 3), ("online", 1)], 3))
def test_weights_are_those_that_transformers_computes_with(pool, folders, monkeypatch, mode, size) -> None:
    model = reference(folders[mode], monkeypatch)
    weights = weights_of(model)
    with torch.no_grad():
        logits = model(TOKENS).logits
    for parameters, found in pool.run(size, loaded, str(folders[mode])):
        same = {name: parameters[name] for name in weights}
        if mode == "online":
            assert different_tensors(same, weights) == []
        assert all(relative(same[name], weight) < 1e-6 for name, weight in weights.items())  # fp32
        assert relative(found, logits) < 1e-5  # fp32 sums in another order


def test_others_are_refused(folders, tmp_path) -> None:
    with pytest.raises(tp_transformers.UnsupportedError, match="Load it with tp_dequantize=True"):
        load(str(folders["offline"]), tp_dequantize=False)
    save_file(read_folder(folders["offline"]), tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folders["offline"] / "config.json").read_text())
    for changes, says in {
        "use_rms_norm": "BitNet with a norm in every autobitlinear",
        "quantization_mode": "got packed values",
    }.items():
        changed = {**config["quantization_config"], changes: "online" if "mode" in changes else True}
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": changed}))
        with pytest.raises(tp_transformers.TensorParallelError, match=says):
            load(str(tmp_path))
