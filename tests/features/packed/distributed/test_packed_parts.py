"""Parts of a packed model, used by themselves: they do what they say, or say what to do instead."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, Trainer

import tp_transformers
from tests.support.float8 import quantize_folder
from tests.support.models import llama_config, load
from tests.support.on_ranks import on_ranks
from tests.support.training import arguments_of

TOKENS = torch.arange(3, 21).view(2, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint in FP8."""
    target = tmp_path_factory.mktemp("packed")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(8, 4, intermediate_size=96)).save_pretrained(target / "plain")
    quantize_folder(target / "plain", target / "float8", (16, 16))
    return str(target / "float8")


def full_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Ones for every parameter, in the full shape."""
    return {name: torch.ones(param.shape) for name, param in module.named_parameters()}


Use = Callable[[Any], Any]
"""A use of a packed model's part."""

REFUSED: dict[str, Use] = {
    "load_state_dict of a linear": lambda model: model.layers[0].self_attn.q_proj.load_state_dict(
        full_state(model.layers[0].self_attn.q_proj)
    ),
    "load_state_dict of a layer": lambda model: model.layers[0].load_state_dict(full_state(model.layers[0])),
    "load_state_dict of layers": lambda model: model.layers.load_state_dict(full_state(model.layers), strict=False),
    "state_dict of a layer": lambda model: model.layers[0].state_dict(),
    "zero_": lambda model: model.layers[0].mlp.up_proj.weight.zero_(),
    "mul_": lambda model: model.layers[0].mlp.down_proj.weight.mul_(7),
    "normal_": lambda model: nn.init.normal_(model.layers[1].mlp.down_proj.weight),
    "data": lambda model: model.layers[1].mlp.down_proj.weight.data.fill_(1),
    "an assignment to data": lambda model: setattr(model.layers[1].mlp.up_proj.weight, "data", torch.ones(96, 64)),
    "an assignment to rows": lambda model: model.layers[1].mlp.up_proj.weight.__setitem__(0, 1),
    "clone": lambda model: model.layers[0].mlp.up_proj.weight.clone().mul_(2),
    "a norm": lambda model: model.layers[0].mlp.up_proj.weight.norm(),
    "a product": lambda model: torch.ones(1, 64) @ model.layers[0].mlp.up_proj.weight.T,
    "full_tensor": lambda model: tp_transformers.full_tensor(model.layers[0].mlp.up_proj.weight),
    "half": lambda model: model.layers[0].half(),
    "to another dtype": lambda model: model.layers.to(torch.float64),
    "to another device": lambda model: model.layers[0].mlp.to("meta"),
}


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_parts_do_what_they_say_or_are_refused(folder) -> None:
    """What is refused changes nothing. Torch's methods are its own again afterwards."""
    methods = {name: getattr(nn.Module, name) for name in ("_apply", "load_state_dict", "state_dict")}
    model = load(folder, dtype=torch.float32, tp_dequantize=False)
    with torch.no_grad():
        before = model(TOKENS).logits
        for name, use in REFUSED.items():
            with pytest.raises(tp_transformers.UnsupportedError, match="tp_dequantize=True"):
                print(name, use(model.model))
            assert torch.equal(model(TOKENS).logits, before), name
        layer = model.model.layers[0]
        norms = {"input_layernorm.weight": layer.input_layernorm.weight * 2}
        assert not layer.load_state_dict(norms, strict=False).unexpected_keys
        plain = nn.Linear(2, 2)  # beside it, with torch's own names of arguments
        plain.load_state_dict(state_dict=plain.state_dict(), strict=True, assign=False)
        assert torch.equal(layer.input_layernorm.weight, norms["input_layernorm.weight"])
        layer.to("cpu").float().eval().requires_grad_(False)
        assert layer.mlp.up_proj.weight.numel() == 96 * 64
        assert layer.mlp.up_proj.weight.dtype == torch.float32
        assert not torch.equal(changed := model(TOKENS).logits, before)
        other = copy.deepcopy(model)
        del model
        assert torch.equal(other(TOKENS).logits, changed)
    for name in ("zero_", "load_state_dict of a layer"):
        with pytest.raises(tp_transformers.UnsupportedError, match="tp_dequantize=True"):
            REFUSED[name](other.model)
    del other, layer
    gc.collect()
    assert methods == {name: getattr(nn.Module, name) for name in methods}


def train(folder: str, scratch: str, what: str) -> int:
    model = load(folder, dtype=torch.float32, tp_dequantize=False)
    if what == "all but the embedding":
        model.get_input_embeddings().requires_grad_(False)
    if what == "adapters":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    arguments = arguments_of(scratch, per_device_train_batch_size=2, max_steps=1, save_strategy="no")
    data = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
    Trainer(model, arguments, train_dataset=data).train()
    return sum(param.requires_grad for param in model.parameters())


def test_trainer_does_not_leave_packed_weights_out_silently(pool, folder, tmp_path) -> None:
    error = pool.error(2, train, folder, str(tmp_path), "all")
    assert "Trainer without adapters: got packed weights, which it would leave as they are" in error
    assert "tp_dequantize=True" in error
    assert pool.run(2, train, folder, str(tmp_path), "all but the embedding") == [6, 6], "norms and the head"
    assert pool.run(2, train, folder, str(tmp_path), "adapters") == [4, 4]
