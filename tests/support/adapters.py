"""Adapters of PEFT that are trained, saved, loaded and merged on ranks and in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import assert_same_tensors, gradient_differences, parameter_differences, relative
from tests.support.models import MASK, PROMPTS, load, load_both, logits_of

TOLERANCE = 1e-4  # fp32 sums in another order
EXACT = 1e-10  # the same of fp64


def adapter_parameters(model: Any) -> dict[str, Any]:
    return {
        name: param
        for name, param in model.named_parameters()
        if any(
            kind in name
            for kind in ("lora_", "hada_", "lokr_", "vera_", "ia3_", "oft_", "ln_tuning_", "trainable_tokens_")
        )
    }


def shake(ours: Any, theirs: Any) -> None:
    """Give both the same adapters of random values: those that are made add nothing."""
    mine = adapter_parameters(ours)
    whole = {}
    for index, (name, param) in enumerate(adapter_parameters(theirs).items()):
        error = relative(tp_transformers.full_tensor(mine[name]), param)
        assert error < TOLERANCE, f"{name}: initialised unlike one process"  # an SVD depends on the weight's alignment
        whole[name] = torch.randn(param.shape, generator=torch.Generator().manual_seed(index)) * 0.3
    for each in (ours, theirs):
        result = each.load_state_dict(whole, strict=False)
        assert not result.unexpected_keys


def adapt(models: Iterable[Any], config: Any, seed: int = 11) -> tuple[Any, Any]:
    """The model of ranks and that of one process with adapters of `config`, which both draw alike."""
    ours, theirs = (_seeded(seed, model, config) for model in models)
    return ours, theirs


def _seeded(seed: int, model: Any, config: Any) -> Any:
    torch.manual_seed(seed)
    return get_peft_model(model, copy.deepcopy(config))


def save_both(ours: Any, theirs: Any, folder: str | Path, **options: Any) -> None:
    """Run on every rank: save the model of ranks in `folder`/ours, and that of one process in `folder`/theirs."""
    ours.save_pretrained(f"{folder}/ours", **options)
    if dist.get_rank() == 0:
        theirs.save_pretrained(f"{folder}/theirs", **options)
    dist.barrier()


def trainable(model: Any) -> list[Any]:
    """Parameters for an optimizer."""
    return [param for param in model.parameters() if param.requires_grad]


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    torch.manual_seed(3)  # of what dropout drops
    model(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss.backward()


def lora(targets: Any, **options: Any) -> LoraConfig:
    return LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM", **options)


def train(folder: str, scratch: str | Path, config: Any, **options: Any) -> None:
    """Run on every rank: adapters of `config` do what they do in one process."""
    warnings.simplefilter("ignore")
    config = copy.deepcopy(config)
    config.task_type = "CAUSAL_LM"
    # Products of four matrices amplify the rounding of fp32.
    dtype, tolerance = (torch.float64, EXACT) if isinstance(config, LoHaConfig) else (torch.float32, TOLERANCE)
    adapted = adapt(load_both(folder, dtype=dtype, **options), config)
    ours, theirs = adapted
    shake(ours, theirs)
    scratch = f"{scratch}/{len(adapter_parameters(theirs))}"
    ours.eval(), theirs.eval()
    expected = logits_of(theirs)
    assert relative(logits_of(ours), expected) < tolerance
    with ours.disable_adapter(), theirs.disable_adapter():
        assert relative(logits_of(ours), logits_of(theirs)) < tolerance

    # gradients, and a few steps
    ours.train(), theirs.train()
    optimizers = [torch.optim.AdamW(trainable(model), lr=1e-2) for model in adapted]
    for _ in range(2):
        for model, optimizer in zip(adapted, optimizers, strict=True):
            step(model, optimizer)
        mine = dict(ours.named_parameters())
        for name, param in theirs.named_parameters():
            assert mine[name].requires_grad == param.requires_grad, name
        errors = gradient_differences(ours, theirs)
        assert errors.keys() == {name for name, param in mine.items() if param.requires_grad}
        assert max(errors.values()) < tolerance, errors
        for optimizer in optimizers:
            optimizer.step()
    for name, param in adapter_parameters(theirs).items():
        # AdamW divides by the root of squares: what is small differs more
        assert relative(tp_transformers.full_tensor(mine[name]), param) < 1e-2, name
    trained = {name: tp_transformers.full_tensor(param) for name, param in mine.items() if param.requires_grad}
    theirs.load_state_dict(trained, strict=False)

    # files
    ours.eval(), theirs.eval()
    expected = logits_of(theirs)
    save_both(ours, theirs, scratch)
    assert_same_tensors(f"{scratch}/theirs", f"{scratch}/ours")
    files = [sorted(path.name for path in Path(scratch, who).iterdir()) for who in ("ours", "theirs")]
    assert files[0] == files[1]
    torch.manual_seed(11)  # a randomised SVD subtracts the same from the weights again
    again = PeftModel.from_pretrained(load(folder, dtype=dtype, **options), f"{scratch}/ours")
    assert relative(logits_of(again), expected) < tolerance
    torch.manual_seed(11)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    alone = PeftModel.from_pretrained(plain, f"{scratch}/ours")
    assert relative(logits_of(alone), expected) < tolerance
    names = [[name for name, param in each.named_parameters() if param.requires_grad] for each in (again, alone)]
    assert names[0] == names[1]

    # merged, and taken apart
    for safe in (False, True):
        ours.merge_adapter(safe_merge=safe), theirs.merge_adapter(safe_merge=safe)
        assert relative(logits_of(ours), expected) < tolerance
        errors = parameter_differences(*(model.get_base_model() for model in (ours, theirs)))
        assert max(errors.values()) < tolerance, errors
        ours.unmerge_adapter(), theirs.unmerge_adapter()
        assert relative(logits_of(ours), expected) < tolerance
    merged = ours.merge_and_unload()
    assert tp_transformers.is_tensor_parallel(merged)
    assert not adapter_parameters(merged)
    merged.save_pretrained(f"{scratch}/merged")
    dist.barrier()
    alone = AutoModelForCausalLM.from_pretrained(f"{scratch}/merged", dtype=dtype)
    assert relative(logits_of(alone), expected) < tolerance
