"""PEFT's LoRA on tensor-parallel models; references are the same adapters in one process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.models import MASK, PROMPTS, read_folder, relative

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-4  # fp32 sums in another order


def load(folder: str, auto: Any = AutoModelForCausalLM, **arguments: Any) -> tuple[Any, Any]:
    """The tensor-parallel model, and that of one process."""
    with tp_transformers.enable():
        model = auto.from_pretrained(folder, tp_plan="auto", **arguments)
    return model, auto.from_pretrained(folder, **arguments)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPTS, attention_mask=MASK).logits


def adapter_parameters(model: Any) -> dict[str, Any]:
    return {name: param for name, param in model.named_parameters() if "lora_" in name}


def shake(ours: Any, theirs: Any) -> None:
    """Give both the same adapters of random values: those that are made add nothing."""
    mine = adapter_parameters(ours)
    whole = {}
    for index, (name, param) in enumerate(adapter_parameters(theirs).items()):
        assert torch.equal(tp_transformers.full_tensor(mine[name]), param), f"{name}: initialised unlike one process"
        whole[name] = torch.randn(param.shape, generator=torch.Generator().manual_seed(index)) * 0.3
    for each in (ours, theirs):
        result = each.load_state_dict(whole, strict=False)
        assert not result.unexpected_keys


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    torch.manual_seed(3)  # of what dropout drops
    model(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss.backward()


def train(folder: str, scratch: str, targets: Any, options: dict[str, Any]) -> None:
    models = load(folder)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM", **options)
    adapted = []
    for model in models:
        torch.manual_seed(11)
        adapted.append(get_peft_model(model, copy.deepcopy(config)).train())
    ours, theirs = adapted
    shake(ours, theirs)
    rank, scratch = dist.get_rank(), f"{scratch}/{len(adapter_parameters(theirs))}"
    ours.eval(), theirs.eval()
    expected = logits_of(theirs)
    assert relative(logits_of(ours), expected) < TOLERANCE
    assert relative(logits_of(models[1].base_model if False else theirs.get_base_model()), expected) < TOLERANCE
    with ours.disable_adapter(), theirs.disable_adapter():
        assert relative(logits_of(ours), logits_of(theirs)) < TOLERANCE

    # gradients, and a few steps
    ours.train(), theirs.train()
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in adapted]
    for _ in range(2):
        for model, optimizer in zip(adapted, optimizers, strict=True):
            step(model, optimizer)
        mine = dict(ours.named_parameters())
        for name, param in theirs.named_parameters():
            assert mine[name].requires_grad == param.requires_grad, name
            if param.requires_grad:
                assert relative(tp_transformers.full_tensor(mine[name], mine[name].grad), param.grad) < TOLERANCE, name
        for optimizer in optimizers:
            optimizer.step()
    for name, param in adapter_parameters(theirs).items():
        # AdamW divides by the root of squares: what is small differs more
        assert relative(tp_transformers.full_tensor(mine[name]), param) < 1e-2, name
    theirs.load_state_dict({n: tp_transformers.full_tensor(p) for n, p in adapter_parameters(ours).items()}, strict=False)

    # files
    ours.eval(), theirs.eval()
    expected = logits_of(theirs)
    ours.save_pretrained(f"{scratch}/ours")
    if rank == 0:
        theirs.save_pretrained(f"{scratch}/theirs")
    dist.barrier()
    saved, reference = read_folder(f"{scratch}/ours"), read_folder(f"{scratch}/theirs")
    assert saved.keys() == reference.keys()
    assert all(torch.equal(saved[name], value) for name, value in reference.items())
    files = [sorted(path.name for path in Path(scratch, who).iterdir()) for who in ("ours", "theirs")]
    assert files[0] == files[1]
    again = PeftModel.from_pretrained(load(folder)[0], f"{scratch}/ours")
    assert relative(logits_of(again), expected) < TOLERANCE
    assert not any(param.requires_grad for param in again.parameters())
    if rank == 0:
        alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), f"{scratch}/ours")
        assert relative(logits_of(alone), expected) < TOLERANCE

    # merged, and taken apart
    for safe in (False, True):
        ours.merge_adapter(safe_merge=safe), theirs.merge_adapter(safe_merge=safe)
        assert relative(logits_of(ours), expected) < TOLERANCE
        bases = [model.get_base_model() for model in (ours, theirs)]
        for (name, mine), param in zip(bases[0].named_parameters(), bases[1].parameters(), strict=True):
            assert relative(tp_transformers.full_tensor(mine), param) < TOLERANCE, name
        ours.unmerge_adapter(), theirs.unmerge_adapter()
        assert relative(logits_of(ours), expected) < TOLERANCE
    merged = ours.merge_and_unload()
    assert tp_transformers.is_tensor_parallel(merged)
    assert not adapter_parameters(merged)
    merged.save_pretrained(f"{scratch}/merged")
    dist.barrier()
    assert relative(logits_of(AutoModelForCausalLM.from_pretrained(f"{scratch}/merged")), expected) < TOLERANCE


def train_all(folder: str, scratch: str) -> None:
    warnings.simplefilter("ignore")
    train(folder, scratch, "all-linear", {})
    train(folder, scratch, ["q_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"], {"lora_dropout": 0.3})


@pytest.mark.parametrize(("heads", "size"), [((9, 3), 2), ((8, 2), 3), ((8, 4), 2)])
def test_lora_is_that_of_one_process(pool: Any, cases: Any, tmp_path: Path, heads: tuple[int, int], size: int) -> None:
    pool.run(size, train_all, cases(*heads).folder, str(tmp_path))
