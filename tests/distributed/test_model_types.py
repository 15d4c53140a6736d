"""Model types that share a plan, and towers, each held against one process; models that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationMixin

from tests.support import proofs
from tests.support.architectures import ARCHITECTURES, GRADIENT_TOLERANCE, LOGITS_TOLERANCE
from tests.support.comparisons import gradient_errors, gradients, relative
from tests.support.models import by_shares, load, save_as_loaded
from tests.support.needs import uneven
from tests.support.tiers import sampled, wide
from tests.support.tiny import MODELS, TOWERS, Tiny, model_class
from tests.support.tiny_inputs import seed
from tp_transformers.plans.yaml_file import available_plans
from tp_transformers.verify import verify


def observe(model: Any, tiny: Tiny) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """What a model makes of its inputs, greedy tokens if it generates, and the gradients of a random part of it."""
    inputs = tiny.inputs()
    output = model(**inputs)[0]
    (output * torch.randn(output.shape, generator=seed())).sum().backward()
    grads = gradients(model)
    given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    generates = isinstance(model, GenerationMixin) and tiny.generates
    tokens = model.generate(**given, max_new_tokens=4, do_sample=False) if generates else None
    return output.detach(), tokens, grads


def compare_small_models(
    folders: dict[str, str], shares: Sequence[int] | None = None, options: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """Run on every rank: the largest differences from one process, of outputs and gradients, and what is cut."""
    found = {}
    for name, folder in folders.items():
        tiny = MODELS[name]
        kind = model_class(tiny)
        model, plain = load(folder, kind, **by_shares(shares), **options).eval(), kind.from_pretrained(folder).eval()
        own, tokens, grads = observe(model, tiny)
        expected, all_tokens, all_grads = observe(plain, tiny)
        params = dict(model.named_parameters())
        assert trained(model) == trained(plain), name
        found[name] = {
            "output": relative(own, expected),
            "tokens": tokens is None or torch.equal(tokens, all_tokens),
            "gradients": max(gradient_errors(model, grads, all_grads).values()),
            "cut": sum(param.tp_shard.layout is not None for param in params.values()),
        }
    return found


def trained(model: Any) -> dict[str, bool]:
    """The parameters of a model -> whether they have gradients."""
    return {name: param.requires_grad for name, param in model.named_parameters()}


def load_frozen(folders: dict[str, str]) -> None:
    """Run on every rank: the same parameters have gradients as in one process."""
    for name, folder in folders.items():
        kind = model_class(MODELS[name])
        assert trained(load(folder, kind)) == trained(kind.from_pretrained(folder)), name


@pytest.mark.parametrize("names", wide([["whisper", "roformer"], ["pegasus", "marian"]], 1))
def test_positions_that_a_class_freezes_are_trained_as_in_one_process(pool, tmp_path, names) -> None:
    folders = {name: str(tmp_path / name) for name in names}
    for name, folder in folders.items():
        MODELS[name].make().save_pretrained(folder)
    pool.run(2, load_frozen, folders)


def by_plan() -> dict[str, list[str]]:
    """Plan -> the tiny models that it cuts."""
    found: dict[str, list[str]] = {}
    for name, tiny in MODELS.items():
        if tiny.runs:
            found.setdefault(available_plans()[name.partition(",")[0]].stem, []).append(name)
    return found


RANKS = {"even2": [1, 1], "even3": [1, 1, 1], "shares31": [3, 1], "shares251": [2, 5, 1]}


CASES = [pytest.param(shares, id=name, marks=uneven(shares)) for name, shares in RANKS.items()]


@pytest.mark.parametrize("shares", wide(CASES, 1))
@pytest.mark.parametrize("plan", sampled(by_plan(), 30))
def test_model_types_match_one_process(pool, tmp_path, plan, shares) -> None:
    folders = {}
    for name in by_plan()[plan]:
        save_as_loaded(MODELS[name].make(), tmp_path / name)
        folders[name] = str(tmp_path / name / "checkpoint")
    for result in pool.run(len(shares), compare_small_models, folders, shares):
        for name, seen in result.items():
            print(name, shares, seen)
            assert seen["output"] < LOGITS_TOLERANCE, name
            assert seen["tokens"], name
            assert seen["gradients"] < GRADIENT_TOLERANCE, name
            # An encoder is cut as a whole; of others, older releases declare less.
            assert seen["cut"] >= (12 if name in TOWERS else 6), name


UNLIKE_OTHERS = [
    ("gemma4_text, keys as values", 3),
    ("gemma4_text, keys of other layers", 3),
    ("dbrx", 2),
    ("youtu", 3),
    ("roformer", 2),
    ("gemma4_text, keys as values", 2),
    ("gemma4_text, keys as values", 5),
    ("gemma4_text, keys of other layers", 5),
]


@pytest.mark.parametrize(("name", "size"), wide([case for case in UNLIKE_OTHERS if MODELS[case[0]].runs], 4))
def test_types_unlike_others(pool, tmp_path, name, size) -> None:
    """Experts that read a child's matrices, trained rotary positions, a load that writes to a padding row.

    Attention without a value projection, and without a key projection.
    """
    save_as_loaded(MODELS[name].make(), tmp_path)
    for result in pool.run(size, compare_small_models, {name: str(tmp_path / "checkpoint")}):
        assert result[name]["output"] < LOGITS_TOLERANCE
        assert result[name]["tokens"]
        assert result[name]["gradients"] < GRADIENT_TOLERANCE


COMPOSED = {"qwen3_vl": ("qwen3_vl_vision", "qwen3_vl_text"), "llava": ("clip_vision_model", "llama")}
"""Models without a plan of their own, by the types of their parts."""
WIDTHS: dict[str, Any] = {"qwen3_vl": {"vision_config": {"out_hidden_size": 4096}}}  # its defaults do not fit together


@pytest.mark.slow
@pytest.mark.parametrize("model_type", COMPOSED)
def test_models_are_cut_by_the_plans_of_their_parts(model_type) -> None:
    config = transformers.CONFIG_MAPPING[model_type](**WIDTHS.get(model_type, {}))
    for verdict in verify(config, sizes=(2, 3), grads=True):
        assert verdict.ok, verdict.faults


def test_every_plan_has_an_architecture_in_the_matrix() -> None:
    proven = {getattr(transformers, entry.config).model_type for entry in ARCHITECTURES.values()}
    parts = {name.partition(",")[0] for name in MODELS} | {part for parts in COMPOSED.values() for part in parts}
    alone = set(available_plans()) - (proven | parts)
    assert proven | parts <= set(available_plans())
    assert alone <= {name for name, proof in proofs.read().items() if len(proof.proven) == len(proofs.PROVEN_ON)}
