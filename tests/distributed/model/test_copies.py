"""Copies of a model, of what is put around it, and of its parts; what is not copied is refused by name."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import assert_same_tensors, equal_parameters, relative
from tests.support.models import load, load_both, logits_of
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.strategies import shard_of

TOLERANCE = 1e-4  # fp32 sums in another order


class Forwarding:
    """A wrapper that is no module, and has all that it lacks from a model."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.endswith("state__"):  # while it is copied; Python 3.10 asks the wrapper
            raise AttributeError(name)
        return getattr(self.inner, name)


def assert_apart(copied: Any, original: Any) -> None:
    """The copy has parameters of its own, which are the same shards."""
    assert equal_parameters(copied, original)
    pairs = zip(copied.named_parameters(), original.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        assert mine is not theirs, name
        before, after = shard_of(theirs), shard_of(mine)
        assert (after and after.layout) == (before and before.layout), name
        assert (after and after.shape) == (before and before.shape), name


@needs("activations")
@pytest.mark.parametrize("heads", wide([((9, 3),), ((8, 4),)], 1))
@on_ranks(2)
def test_a_copy_of_a_wrapper_is_of_its_own_class(folder, tmp_path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj", "embed_tokens"], init_lora_weights=False)
    ours, theirs = load_both(folder)
    torch.manual_seed(1)
    ours = get_peft_model(ours, copy.deepcopy(config)).eval()
    torch.manual_seed(1)
    theirs = get_peft_model(theirs, config).eval()
    expected = logits_of(theirs)
    copies = {
        "copy": copy.deepcopy(ours),
        "averaged": AveragedModel(ours).module,
        "compiled": copy.deepcopy(torch.compile(ours))._orig_mod,
        "shallow": copy.copy(ours),
        "tuner": copy.deepcopy(ours.base_model),
    }
    for name, copied in copies.items():
        assert type(copied) is type(ours if name != "tuner" else ours.base_model), name
        assert relative(logits_of(copied), expected) < TOLERANCE, name
        if name not in ("shallow", "tuner"):
            assert_apart(copied, ours)
    for param in ours.parameters():  # copies are apart
        tp_transformers.local_tensor(param).zero_()
    copied = copies["copy"]
    assert relative(logits_of(copied), expected) < TOLERANCE
    assert tp_transformers.is_tensor_parallel(copied.get_base_model())
    copied.save_pretrained(f"{tmp_path}/ours")
    if dist.get_rank() == 0:
        theirs.save_pretrained(f"{tmp_path}/theirs")
    dist.barrier()
    assert_same_tensors(f"{tmp_path}/theirs", f"{tmp_path}/ours")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), f"{tmp_path}/ours")
    assert relative(logits_of(again), expected) < TOLERANCE

    model = load(folder)
    expected = logits_of(model)
    for wrapper in (nn.Sequential(model), torch.compile(model), Forwarding(model), AveragedModel(model)):
        copied = copy.deepcopy(wrapper)
        assert type(copied) is type(wrapper)
        inner = next(
            vars(copied).get(name) or copied._modules[name]
            for name in ("inner", "_orig_mod", "module", "0")
            if name in vars(copied) or name in getattr(copied, "_modules", ())
        )
        assert type(inner) is type(model)
        assert inner is not model
        assert torch.equal(logits_of(inner), expected)
    shallow = copy.copy(model)
    assert type(shallow) is type(model)
    assert shallow.lm_head is model.lm_head
    assert torch.equal(logits_of(shallow), expected)
    compiled = load(folder)
    compiled.compile(backend="eager")
    copied = copy.deepcopy(compiled)
    tp_transformers.local_tensor(compiled.lm_head.weight).zero_()
    assert torch.equal(logits_of(copied), expected)


@pytest.mark.parametrize("heads", [(9, 3), (8, 4)])
@on_ranks(2)
def test_parts_of_a_model_are_copied_and_not_pickled(folder) -> None:
    model = load(folder)
    layer = model.model.layers[0]
    x = torch.randn(2, 5, layer.input_layernorm.weight.shape[0], generator=torch.Generator().manual_seed(0))
    for part in (layer, layer.mlp, layer.self_attn.k_proj, model.model.embed_tokens, model.lm_head, model.model.norm):
        copied = copy.deepcopy(part)
        assert_apart(copied, part)
        assert_apart(copy.deepcopy(copied), part)
    copied = copy.deepcopy(layer.mlp)
    expected = layer.mlp(x)
    for param in layer.mlp.parameters():
        tp_transformers.local_tensor(param).zero_()
    assert torch.equal(copied(x), expected)
    state = copy.deepcopy(layer.self_attn).state_dict()
    layer.self_attn.load_state_dict(state)

    for part, name in (
        (layer, "model.layers.0.self_attn.q_proj"),
        (layer.mlp.down_proj, "model.layers.0.mlp.down_proj"),
        (model.lm_head, "lm_head"),
    ):
        for pickled in (lambda part=part: pickle.dumps(part), lambda part=part: torch.save(part, io.BytesIO())):
            with pytest.raises(tp_transformers.UnsupportedError, match="pickle of a tensor-parallel module") as told:
                pickled()
            assert f"got {name}, as one rank holds it, expected its state. Call model.save_" in str(told.value)
