"""What every rank holds whole is a plain parameter: code that reads it directly, optimizers, DTensor inputs, copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import tp_transformers
from tests.support.architectures import GRADIENT_TOLERANCE
from tests.support.comparisons import gradient_errors, gradients, relative
from tests.support.models import PROMPTS, VOCAB, load
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tp_transformers.features.verify.small_models import model as probe

TOLERANCE = 1e-4  # fp32 sums in another order

READERS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        {"hidden_size": 32, "lru_width": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "vocab_size": VOCAB, "attention_window_size": 16, "eos_token_id": None, "pad_token_id": 0},
        {"model.layers.*.temporal_block.conv_1d": "replicate", "model.layers.*.temporal_pre_norm": "replicate",
         "model.layers.*.mlp_block.gate_proj": "colwise", "model.layers.*.mlp_block.up_proj": "colwise",
         "model.layers.*.mlp_block.down_proj": "rowwise"},
    ),
    "siglip_vision_model": (
        "SiglipVisionModel",
        {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4,
         "image_size": 16, "patch_size": 8},
        {"encoder.layers.*.mlp.fc1": "colwise", "encoder.layers.*.mlp.fc2": "rowwise",
         "head.attention": "replicate", "head.attention.out_proj": "replicate", "head.layernorm": "replicate"},
    ),
}  # fmt: skip
"""model_type -> class, sizes, and a plan; its modules read the parameters of others that are whole."""


def observe(model: Any) -> dict[str, Any]:
    """Logits (or the pooled output) of a forward and of decoding, and the gradients of parameters that are whole."""
    model.zero_grad()
    if model.main_input_name == "input_ids":
        answer = model(PROMPTS).logits
        tokens = model.generate(PROMPTS, max_new_tokens=4, do_sample=False)
    else:
        images = torch.randn((2, 3, 16, 16), generator=torch.Generator().manual_seed(1))
        answer, tokens = model(images).pooler_output, PROMPTS
    (answer * torch.randn(answer.shape, generator=torch.Generator().manual_seed(2))).mean().backward()
    return {"answer": answer.detach(), "tokens": tokens, "grads": gradients(model)}


def reads_directly(name: str, prefix: str, folder: str, reference: str) -> dict[str, Any]:
    """Run on every rank: two loads and a deep copy against one process."""
    cls, _, rules = READERS[name]
    plan = {prefix + module: strategy for module, strategy in rules.items()}
    expected = torch.load(reference)
    models = [load(folder, getattr(transformers, cls), tp_plan=plan) for _ in range(2)]
    models.append(copy.deepcopy(models[0]))
    result: dict[str, Any] = {"answer": 0.0, "grads": 0.0, "tokens": True}
    for model in models:
        seen = observe(model)
        result["answer"] = max(result["answer"], relative(seen["answer"], expected["answer"]))
        result["tokens"] &= torch.equal(seen["tokens"], expected["tokens"])
        result["grads"] = max(result["grads"], *gradient_errors(model, seen["grads"], expected["grads"]).values())
    result["whole"] = {type(p) for p in models[0].parameters() if p.tp_shard.layout is None}
    return result


@pytest.mark.parametrize("name", READERS)
def test_modules_read_each_others_parameters(name, pool, tmp_path) -> None:
    cls, sizes, _ = READERS[name]
    model = probe.make(getattr(transformers, cls), transformers.CONFIG_MAPPING[name](**sizes))
    folder, reference = str(tmp_path / "checkpoint"), str(tmp_path / "reference.pt")
    model.save_pretrained(folder)
    torch.save(observe(model), reference)
    prefix = "vision_model." if hasattr(model, "vision_model") else ""  # until transformers 5.10 or so
    for result in pool.run(2, reads_directly, name, prefix, folder, reference):
        assert result["answer"] < TOLERANCE
        assert result["tokens"]
        assert result["grads"] < GRADIENT_TOLERANCE
        assert result["whole"] == {nn.Parameter}


# -- optimizers


@on_ranks(1)
def test_other_optimizers_step_as_before() -> None:
    """With the hook of all optimizers: what has nothing to do with us steps as ever."""
    from tp_transformers.features.full_parameters.optimizers.step import STEPS_ON_SHARDS

    STEPS_ON_SHARDS.hold()
    seen = []

    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            seen.append(closure)
            return super().step(closure)

    layer = nn.Linear(3, 3)
    layer(torch.ones(2, 3)).sum().backward()
    Own(layer.parameters()).step()
    assert seen == [None]
    lbfgs = torch.optim.LBFGS(layer.parameters())

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = layer(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    assert lbfgs.step(closure).item() > 0
    adam = torch.optim.AdamW(layer.parameters(), foreach=True)
    before = layer.weight.detach().clone()
    torch.compile(adam.step, backend="eager")()
    assert not torch.equal(before, layer.weight)
    STEPS_ON_SHARDS.release()


# -- hooks, and DTensors


class Between(tp_transformers.strategies.TensorParallelLayer):
    """Nothing is cut; the input becomes a DTensor that is cut along the sequence."""

    @staticmethod
    def _prepare_input_fn(*arguments: Any) -> Any:
        _, _, _, (x, *others), mesh = arguments
        return (
            DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)]),
            *others,
        )

    @staticmethod
    def _prepare_output_fn(*arguments: Any) -> Any:
        outputs = arguments[3]
        assert isinstance(outputs, DTensor)
        return outputs.full_tensor()


@on_ranks(3, heads=(8, 4))
def test_what_is_whole_has_no_hooks_and_still_takes_dtensors(folder) -> None:
    """Norms that compute with DTensors, in a plan and beside it."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    plan = {
        "model.layers.*.input_layernorm": Between(),
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    }
    model = load(folder)
    other = load(folder, tp_plan=plan)
    norm, expected = nn.LayerNorm(8), nn.LayerNorm(8)
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    mesh = model.tp_group.device_mesh
    parallelize_module(norm, mesh, tp_transformers.strategies.ReplicateParallel())
    cut = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
    (norm(cut).full_tensor() * x).sum().backward()
    (expected(x) * x).sum().backward()
    grads = []
    for each in (other, plain):
        each(PROMPTS, labels=PROMPTS).loss.backward()
        grads.append(each.model.layers[0].input_layernorm.weight.grad)
    pairs = (grads, (norm.weight.grad, expected.weight.grad), (norm.bias.grad, expected.bias.grad))
    assert max(relative(*pair) for pair in pairs) < TOLERANCE
    assert type(norm.weight.grad) is type(grads[0]) is torch.Tensor
    for module in (model.model.norm, model.model.layers[0].input_layernorm):
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


@needs("full_parameters")
@on_ranks(2, heads=(8, 4))
def test_replicated_dtensors_are_loaded_into_plain_parameters(folder) -> None:
    """A state dict in which what is whole is a replicated DTensor, as it was made once."""
    models = [load(folder) for _ in range(2)]
    mesh = models[0].tp_group.device_mesh
    state = {
        name: DTensor.from_local(value + 1, mesh, [Replicate()], run_check=False)
        if name.endswith("norm.weight")
        else value
        for name, value in models[0].state_dict().items()
    }
    for assign in (False, True):
        models[1].load_state_dict(state, assign=assign)
        norm = models[1].model.norm.weight
        assert type(norm) is nn.Parameter
        assert (norm - models[0].model.norm.weight).mean().item() == pytest.approx(1)
