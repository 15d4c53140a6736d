"""nnsight on ranks: it shows and edits the activations of one process."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor

import tp_transformers
from tests.support.comparisons import relative_errors
from tests.support.models import PROMPTS, load, load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.pool import Pool
from tests.support.tiers import wide

nnsight = pytest.importorskip("nnsight")
TOLERANCE = 1e-4


def trace(model: Any) -> dict[str, Tensor]:
    """Activations, with edits of some, and the logits that follow."""
    tree, seen = nnsight.NNsight(model), {}
    layers = tree.model.layers
    with torch.no_grad(), tree.trace(PROMPTS):
        query = layers[0].self_attn.q_proj.output.save()
        keys = layers[0].self_attn.k_proj.output.save()
        heads = layers[0].self_attn.o_proj.input.save()
        added = layers[0].self_attn.o_proj.output.save()
        layers[0].mlp.gate_proj.output[..., 1::7] = 3
        layers[0].mlp.down_proj.output = layers[0].mlp.down_proj.output * 2
        other_query = layers[1].self_attn.q_proj(layers[0].output).save()
        other_added = layers[1].self_attn.o_proj(other_query).save()
        lens = tree.lm_head(tree.model.norm(layers[0].output)).save()
        logits = tree.lm_head.output.save()
    seen |= {"query": query, "keys": keys, "heads": heads, "added": added, "lens": lens, "logits": logits}
    seen |= {"other query": other_query, "other added": other_added}
    return {name: value.detach().clone() for name, value in seen.items()}


def trace_between(model: Any) -> dict[str, Tensor]:
    """Activations of modules without weights and of PEFT's layers, edited and skipped."""
    tree = nnsight.NNsight(
        get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    )
    layers = tree.base_model.model.model.layers
    with torch.no_grad(), tree.trace(PROMPTS):
        query = layers[0].self_attn.q_proj.output.save()
        values = layers[0].self_attn.v_proj.output
        heads = layers[0].self_attn.o_proj.input.save()
        layers[0].mlp.act_fn.output[..., 1::7] = 3
        active = layers[0].mlp.act_fn.output.save()
        layers[1].self_attn.q_proj.skip(query * 2)
        layers[1].self_attn.v_proj.skip(values)
        logits = tree.base_model.model.lm_head.output.save()
    seen = {"query": query, "heads": heads, "active": active, "logits": logits}
    return {f"between, {name}": value.detach().clone() for name, value in seen.items()}


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of activations, those of shared KV heads too."""
    tree = nnsight.NNsight(model)
    layer = tree.model.layers[1]
    with tree.trace(PROMPTS):
        keys, gate = layer.self_attn.k_proj.output, layer.mlp.gate_proj.output
        loss = tree.lm_head.output[..., 5].sum()
        with loss.backward():
            of_gate = gate.grad.save()
            of_keys = keys.grad.save()
    return {"gate": of_gate.detach().clone(), "keys": of_keys.detach().clone()}


@needs("peft")
@pytest.mark.parametrize(("heads", "size"), wide([((9, 3), 2), ((8, 2), 4), ((9, 3), 3)], 1))
@on_ranks()
def test_nnsight_sees_one_process(folder) -> None:
    ours, plain = load_both(folder)
    found = relative_errors(trace(ours), trace(plain))
    between = []
    for model in load_both(folder):
        torch.manual_seed(5)
        between.append(trace_between(model))
    found |= relative_errors(*between)
    found |= {f"gradient of {key}": x for key, x in relative_errors(gradients(ours), gradients(plain)).items()}
    assert len(found) == 14
    assert max(found.values()) < TOLERANCE, found


@needs("sequence")
@on_ranks()
def test_shards_of_the_sequence_are_refused(folder) -> None:
    with pytest.raises(tp_transformers.UnsupportedError, match="tp_sequence_parallel"):
        nnsight.NNsight(load(folder, tp_sequence_parallel=True))


@pytest.fixture
def gpt_neo(tmp_path: Path) -> str:
    """A model whose attention weights have as many keys as a rank has features."""
    settings = {"hidden_size": 24, "num_heads": 2, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    config = transformers.GPTNeoConfig(vocab_size=64, **settings, bos_token_id=1, eos_token_id=2)
    transformers.GPTNeoForCausalLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


@on_ranks()
def test_attention_weights_are_refused(gpt_neo) -> None:
    tree, ids = nnsight.NNsight(load(gpt_neo)), torch.arange(3, 15)[None]
    says = "or of attention weights"
    with pytest.raises(tp_transformers.UnsupportedError, match=says), torch.no_grad(), tree.trace(ids):
        tree.transformer.h[0].attn.attention.attn_dropout.output.save()


def test_a_name_is_loaded_on_any_number_of_ranks() -> None:
    loader = import_module("nnsight.modeling.huggingface").HuggingFaceModel
    original = loader._refuse_impossible_tp
    with tp_transformers.enable():
        assert loader._refuse_impossible_tp(None, "a name", {"tp_plan": "auto"}) is None
        assert loader._refuse_impossible_tp.__wrapped__ is original
    assert loader._refuse_impossible_tp is original


def import_again() -> int:
    """Run in a process that has imported nnsight: import all modules of the package, as if for the first time."""
    names = [name for name in sys.modules if name.partition(".")[0] == "tp_transformers"]
    for name in names:
        for value in vars(sys.modules.pop(name)).values():
            if isinstance(value, torch.library.Library):
                value._destroy()
    for name in names:
        import_module(name)
    return len(names)


def test_it_may_be_imported_first() -> None:
    """nnsight adds a method `save` to `object`."""
    pool = Pool()
    try:
        assert pool.run(1, import_again)[0] > 50
    finally:
        pool.close()
