"""PEFT's combinations of adapters, and its swap of one for another, against one process."""

from __future__ import annotations

import copy
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, convert_to_lora, get_peft_model
from peft.tuners.lora import LoraModel
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tp_transformers
from tests.support.adapters import save_both
from tests.support.comparisons import assert_same_tensors, different_tensors, full_parameters, read_folder, relative
from tests.support.models import load, load_both, logits_of
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide

TOLERANCE = 1e-4  # fp32 sums in another order

COMBINATIONS = get_args(get_type_hints(LoraModel.add_weighted_adapter)["combination_type"])
TARGETS = ["q_proj", "k_proj", "up_proj", "o_proj", "down_proj", "embed_tokens", "lm_head"]
LAYOUTS = (((9, 3), 2), ((8, 4), 2), ((8, 2), 3))
"""Query and KV heads, and ranks: plain shards, DTensors, and KV heads that two ranks share."""


def adapters_of(model: Any, name: str) -> dict[str, torch.Tensor]:
    """The whole matrices of an adapter, by name."""
    return {key: param for key, param in full_parameters(model).items() if f".{name}" in key and "lora_" in key}


def same_adapters(ours: Any, theirs: Any, name: str) -> bool:
    mine, expected = adapters_of(ours, name), adapters_of(theirs, name)
    assert expected
    return not different_tensors(mine, expected)


def adapted(models: Any, **ranks: int) -> list[Any]:
    """Both models with random adapters of the given names and ranks; the second on fewer modules."""
    found = []
    for model in models:
        torch.manual_seed(11)
        for index, (name, r) in enumerate(ranks.items()):
            targets = TARGETS if not index else TARGETS[1::2]
            config = LoraConfig(r=r, lora_alpha=5 + index, target_modules=targets, init_lora_weights=False)
            if index:
                model.add_adapter(name, config)
            else:
                model = get_peft_model(model, config, adapter_name=name)
        found.append(model.eval())
    return found


def combine(folder: str) -> dict[str, str]:
    """Of every combination, the difference of logits from one process's, or how it was refused."""
    ours, theirs = adapted(load_both(folder), one=3, two=3)
    rank, rows = dist.get_rank(), {}
    for kind in COMBINATIONS:
        try:
            for each, seed in ((theirs, 7), (ours, 7 + rank)):  # the random masks are rank 0's
                torch.manual_seed(seed)
                each.add_weighted_adapter(["one", "two"], [0.7, -0.4], kind, kind, density=0.5, svd_clamp=0.99)
                each.set_adapter(kind)
        except tp_transformers.UnsupportedError as error:
            rows[kind] = f"refused: {error}"
        except Exception as error:  # of torch, or of PEFT, where one process has none
            rows[kind] = f"WRONG: {type(error).__name__}: {str(error)[:60]}"
        else:
            difference = relative(logits_of(ours), logits_of(theirs))
            right = difference < TOLERANCE and same_adapters(ours, theirs, kind)
            rows[kind] = f"{difference:.1e}" if right else f"WRONG: {difference:.1e}"
            ours.delete_adapter(kind), theirs.delete_adapter(kind)
    for name in ("one", "two"):  # as they were
        assert same_adapters(ours, theirs, name)
    return rows


@on_ranks(num_hidden_layers=1)
def test_combinations_of_dora(folder) -> None:
    """Combinations and a merge of two DoRA adapters: as one process has them, or refuses them."""
    both = []
    for model in load_both(folder):
        torch.manual_seed(11)
        configs = [LoraConfig(r=r, target_modules=["q_proj", "o_proj", "up_proj"], use_dora=True) for r in (2, 3)]
        both.append(get_peft_model(model, configs[0], adapter_name="one").eval())
        both[-1].add_adapter("two", configs[1])
    for kind in ("linear", "cat", "svd", "magnitude_prune"):
        outcomes = []
        for model in both:
            try:
                torch.manual_seed(7)
                model.add_weighted_adapter(["one", "two"], [0.7, -0.4], kind, kind, density=0.5)
                model.set_adapter(kind)
                outcomes.append(logits_of(model))
            except ValueError as error:
                outcomes.append(str(error))
        print(kind, outcomes[0] if isinstance(outcomes[0], str) else "combined")
        assert type(outcomes[0]) is type(outcomes[1])
        assert outcomes[0] == outcomes[1] if isinstance(outcomes[0], str) else relative(*outcomes) < TOLERANCE
    for model in both:
        model.set_adapter("two")
    assert relative(*map(logits_of, both)) < TOLERANCE
    assert relative(*(logits_of(model.merge_and_unload()) for model in both)) < TOLERANCE


@pytest.mark.slow
def test_every_combination_is_that_of_one_process(pool, cases) -> None:
    columns = {}
    for heads, size in LAYOUTS:
        folder = cases(*heads, num_hidden_layers=1).folder
        columns[f"{heads[0]}/{heads[1]}, {size} ranks"] = pool.run(size, combine, folder)[0]
    assert len(COMBINATIONS) > 10
    width = max(map(len, COMBINATIONS))
    lines = ["combination".ljust(width) + " | " + " | ".join(columns)]
    for kind in COMBINATIONS:
        cells = [rows[kind].ljust(len(head)) for head, rows in columns.items()]
        lines.append(f"{kind.ljust(width)} | {' | '.join(cells)}")
    print("\nadd_weighted_adapter: difference of logits from one process\n" + "\n".join(lines))
    assert "WRONG" not in "".join(lines), "\n".join(lines)


@on_ranks(num_hidden_layers=1)
def test_combinations_go_on_as_those_of_one_process(folder, tmp_path) -> None:
    """What comes after a combination, and combinations of other adapters and layers."""
    ours, theirs = adapted(load_both(folder), one=2, two=4)
    both = (theirs, ours)
    for each in both:
        each.add_weighted_adapter(["one", "two"], [1.0, -1.0], "less", "cat")  # one of two subtracted
        each.add_weighted_adapter(["one", "less"], [0.5, 2.0], "again", "svd", svd_rank=5, svd_full_matrices=False)
        each.add_weighted_adapter(["two"], [-0.3], "single", "svd")  # linear, as PEFT has it
    before = [logits_of(each.set_adapter(name) or each) for name in ("less", "again", "single") for each in both]
    for expected, found in zip(before[::2], before[1::2], strict=True):
        assert relative(found, expected) < TOLERANCE
    for each in both:
        each.delete_adapter("one")
        each.set_adapter("again")
        each.add_weighted_adapter(["again"], [1.0], "renamed", "linear")
        each.delete_adapter("again")
        each.set_adapter("renamed")
    expected = logits_of(theirs)
    assert relative(logits_of(ours), expected) < TOLERANCE
    save_both(ours, theirs, tmp_path, selected_adapters=["renamed"])
    assert_same_tensors(tmp_path / "theirs" / "renamed", tmp_path / "ours" / "renamed")
    again = PeftModel.from_pretrained(load(folder), f"{tmp_path}/ours/renamed")
    assert relative(logits_of(again), expected) < TOLERANCE
    assert relative(logits_of(copy.deepcopy(ours)), expected) < TOLERANCE
    steps = []
    for each in both:
        each.set_adapter("renamed")
        each(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
        steps.append({key: (param, param.grad) for key, param in each.named_parameters() if ".renamed" in key})
    for key, (_, grad) in steps[0].items():
        assert relative(tp_transformers.full_tensor(*steps[1][key]), grad) < TOLERANCE, key
    with pytest.raises(tp_transformers.UnsupportedError, match="got path_initial_model_for_weight_conversion"):
        ours.save_pretrained(f"{tmp_path}/less", path_initial_model_for_weight_conversion=f"{tmp_path}/ours/renamed")
    with pytest.raises(tp_transformers.UnsupportedError, match="convert_to_lora on a tensor-parallel model: got"):
        convert_to_lora(ours, rank=2, progressbar=False)
    assert relative(logits_of(ours.merge_and_unload()), expected) < TOLERANCE

    # what PEFT refuses leaves nothing behind
    ours, theirs = adapted(load_both(folder), one=2, two=4)
    names = [key for key, _ in ours.named_parameters()]
    expected = logits_of(ours)
    for arguments, message in (
        ((["one", "two"], [1.0, 1.0], "mixed", "linear"), "must have the same r value"),
        ((["one", "none"], [1.0, 1.0], "mixed", "svd"), "Adapter none does not exist"),
        ((["one", "two"], [1.0, 1.0], "mixed", "ties_svd"), "not supported between"),  # no density
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            ours.add_weighted_adapter(*arguments)
        assert [key for key, _ in ours.named_parameters()] == names
        assert list(ours.peft_config) == ["one", "two"]
        assert torch.equal(logits_of(ours), expected)
    ours.add_weighted_adapter(["one"], [2.0], "two", "linear")  # a name that there is: PEFT changes nothing
    assert same_adapters(ours, theirs, "two")

    # a layer that every rank holds whole, and a head that is trained beside
    pair = load_both(folder, AutoModelForSequenceClassification, num_labels=3)
    pair[1].score.weight.data.copy_(tp_transformers.full_tensor(pair[0].score.weight))
    found = []
    for model in pair:
        torch.manual_seed(5)
        config = LoraConfig(r=2, target_modules=["score", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, config, adapter_name="one")
        model.add_adapter("two", LoraConfig(r=2, target_modules=["score", "up_proj"], init_lora_weights=False))
        torch.manual_seed(6)
        for kind in ("dare_ties_svd", "magnitude_prune"):
            model.add_weighted_adapter(["one", "two"], [0.7, 0.4], kind, kind, density=0.4)
        model.set_adapter("magnitude_prune")
        found.append(model.eval())
    ours, theirs = found
    for name in ("dare_ties_svd", "magnitude_prune"):
        assert same_adapters(ours, theirs, name)
    assert relative(logits_of(ours), logits_of(theirs)) < TOLERANCE


@on_ranks()
def test_combinations_on_fused_projections(fused) -> None:
    found = []
    for model in load_both(fused):
        torch.manual_seed(5)
        options = {"r": 2, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
        model = get_peft_model(model, LoraConfig(**options, init_lora_weights=False), adapter_name="one")
        model.add_adapter("two", LoraConfig(**options, init_lora_weights=False))
        for kind in ("ties_svd", "dare_ties"):
            torch.manual_seed(6)
            model.add_weighted_adapter(["one", "two"], [0.7, 0.4], kind, kind, density=0.4)
        model.set_adapter("ties_svd")
        found.append(model.eval())
    for name in ("ties_svd", "dare_ties"):
        assert same_adapters(*found, name)
    assert relative(*map(logits_of, found)) < TOLERANCE


@pytest.mark.parametrize("heads", wide([((9, 3),), ((8, 4),)], 1))
@on_ranks(num_hidden_layers=1)
def test_adapters_are_swapped(folder, tmp_path) -> None:
    """Swaps for adapters of the same, a smaller and a larger rank, on other modules, and for one that does not fit."""
    ours, theirs = load_both(folder)
    kinds = {"same": (3, TARGETS[:-2]), "small": (2, TARGETS[:-2]), "large": (5, TARGETS[:4]), "other": (2, TARGETS)}
    for name, (r, targets) in kinds.items():
        torch.manual_seed(r)
        config = LoraConfig(r=r, lora_alpha=7, target_modules=targets, init_lora_weights=False)
        alone = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
        if dist.get_rank() == 0:
            alone.save_pretrained(f"{tmp_path}/{name}")
    dist.barrier()
    ours, theirs = (PeftModel.from_pretrained(each, f"{tmp_path}/same") for each in (ours, theirs))
    kept = {key: param for key, param in ours.named_parameters() if "lora_" in key}
    for name in ("small", "same", "large"):
        for each in (theirs, ours):
            hotswap_adapter(each, f"{tmp_path}/{name}", adapter_name="default", torch_device="cpu")
        assert relative(logits_of(ours), logits_of(theirs)) < TOLERANCE, name
        assert same_adapters(ours, theirs, "default")
        if name != "large":  # the shapes are those that were there
            assert all(param is kept[key] for key, param in ours.named_parameters() if key in kept)
    ours.save_pretrained(f"{tmp_path}/swapped")
    dist.barrier()
    saved = read_folder(f"{tmp_path}/swapped")
    for key, value in read_folder(f"{tmp_path}/large").items():
        assert torch.equal(saved[key], value), key
    assert relative(logits_of(ours.merge_and_unload()), logits_of(theirs)) < TOLERANCE

    # padded, so that a compiled graph stays the same
    pair = load_both(folder)
    ours, theirs = (PeftModel.from_pretrained(each, f"{tmp_path}/small") for each in pair)
    for each in (theirs, ours):
        prepare_model_for_compiled_hotswap(each, target_rank=5)
    assert same_adapters(ours, theirs, "default")
    assert relative(logits_of(ours), logits_of(theirs)) < TOLERANCE
    compiled = torch.compile(ours, backend="eager")
    for name in ("same", "large"):
        hotswap_adapter(theirs, f"{tmp_path}/{name}", adapter_name="default", torch_device="cpu")
        hotswap_adapter(compiled, f"{tmp_path}/{name}", adapter_name="default", torch_device="cpu")
        assert same_adapters(ours, theirs, "default")
        assert relative(logits_of(compiled), logits_of(theirs)) < TOLERANCE, name

    expected = logits_of(ours)
    with pytest.raises(RuntimeError, match="unexpected keys found"):
        hotswap_adapter(ours, f"{tmp_path}/other", adapter_name="default", torch_device="cpu")
    assert torch.equal(logits_of(ours), expected)
