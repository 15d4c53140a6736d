"""Every gradient has its type on 2, 3 and 5 ranks; planted faults are found, and named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.support import proofs, typed
from tests.support.tiers import sampled
from tp_transformers.features.architectures import replicated as latent
from tp_transformers.features.architectures import sharded as sharded_norm
from tp_transformers.ranks import collectives
from tp_transformers.strategies import experts, linear
from tp_transformers.strategies.forward.block import Block
from tp_transformers.strategies.shards import shard

small_model = cache(lambda model_type: typed.small_model(CONFIG_MAPPING[model_type]()))


@pytest.mark.parametrize("model_type", sampled(typed.known(), 140))
def test_types_are_as_known(model_type) -> None:
    assert typed.check(model_type, proofs.types()[model_type]) == typed.known()[model_type]


Fault = AbstractContextManager[Any]


def put(owner: Any, name: str, instead: Any) -> Callable[[], Fault]:
    """A fault: another attribute of a module or a class."""
    return lambda: patch.object(owner, name, instead)


def nothing(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **named: function(function(x, *args), *args)


def without_key(self: Any, x: torch.Tensor, strategy: Any, mesh: Any) -> torch.Tensor:
    return x if "k_proj" in strategy.name else collectives.copy_to_region(x, mesh.get_group())


def unsummed_embedding(self: Any, module: Any, outputs: Any, mesh: Any) -> Any:
    return outputs if self.is_embedding else AFTER(self, module, outputs, mesh)


AFTER, VIEW = linear.RowwiseParallel.after, shard.ParamShard.view


def added_by_all(self: Any, param: torch.Tensor) -> torch.Tensor:
    return collectives.copy_to_region(param, self.group.process_group) if self.added_once else VIEW(self, param)


def unsummed(self: Any, param: torch.Tensor) -> torch.Tensor:
    return VIEW(replace(self, sums_gradients=False), param)


def uncopied(self: Any, param: torch.Tensor) -> torch.Tensor:
    rank = self.group.rank
    return VIEW(self, param) if not self.added_once else param * (0 if rank else 1)


def own_repeated(x: torch.Tensor, widths: Any, group: Any) -> torch.Tensor:
    return torch.cat([x] * (1 + group.size()), -1)[..., : sum(widths)]


def copy_nothing(self: Any, x: torch.Tensor, strategy: Any, mesh: Any) -> torch.Tensor:
    return x


def copy_twice(self: Any, x: torch.Tensor, strategy: Any, mesh: Any) -> torch.Tensor:
    return twice(collectives.copy_to_region)(x, mesh.get_group())


PAIR, SAME, SUM = collectives.apply_pair, collectives.same, collectives._sum


def paired(**instead: Any) -> Callable[[], Fault]:
    """A fault: another backward of a pair of collectives, by the name of the forward."""

    def apply(x: torch.Tensor, compute: Any, transpose: Any, *settings: Any) -> torch.Tensor:
        return PAIR(x, compute, instead.get(compute.__name__, transpose), *settings)

    return put(collectives, "apply_pair", apply)


def sum_of_own(x: torch.Tensor, *settings: Any) -> torch.Tensor:
    return collectives._scatter_sum(x, *settings)


SUM_OF_LINEAR, SUM_OF_EXPERTS = linear.reduce_from_region, experts.reduce_from_region
FAULTS: dict[str, tuple[str, str, Callable[[], Fault]]] = {
    "a copy whose backward sums nothing": ("llama", "model.norm.weight", paired(same=SAME)),
    "a sum whose backward sums again": ("llama", "down_proj: sum of", paired(_sum=SUM)),
    "a gather whose backward sums": ("llama", "lm_head: sum of", paired(all_gather_uneven=sum_of_own)),
    "a gather that repeats this rank": ("llama", "lm_head: output", put(linear, "gather_from_region", own_repeated)),
    "rowwise without a sum": ("llama", "o_proj: output", put(linear, "reduce_from_region", nothing)),
    "rowwise that sums twice": ("llama", "o_proj: sum of", put(linear, "reduce_from_region", twice(SUM_OF_LINEAR))),
    "rowwise whose bias every rank adds": ("opt", "fc2", put(linear.RowwiseParallel, "hidden", ())),
    "an embedding without a sum": (
        "llama",
        "embed_tokens: output",
        put(linear.RowwiseParallel, "after", unsummed_embedding),
    ),
    "colwise without a copy": ("llama", "layernorm", put(Block, "copy", copy_nothing)),
    "colwise that copies twice": ("llama", "sum of", put(Block, "copy", copy_twice)),
    "a key projection without a copy": ("llama", "input_layernorm", put(Block, "copy", without_key)),
    "a norm within heads without a sum": ("qwen3", "q_norm", put(shard.ParamShard, "view", unsummed)),
    "experts whose router lacks a sum": ("mixtral", "gate", put(experts, "copy_to_region", nothing)),
    "experts without a sum": ("mixtral", "mlp", put(experts, "reduce_from_region", nothing)),
    "experts that sum twice": ("mixtral", "mlp", put(experts, "reduce_from_region", twice(SUM_OF_EXPERTS))),
    "experts whose bias every rank adds": ("gpt_oss", "mlp", put(shard.ParamShard, "view", added_by_all)),
    "a bias of experts without a gradient on most ranks": ("gpt_oss", "bias", put(shard.ParamShard, "view", uncopied)),
    "replicated keys without a sum": ("gemma2", "k_proj", put(shard, "copy_shared", nothing)),
    "a sharded norm without a sum": ("olmo2", "q_norm: input", put(sharded_norm, "reduce_from_region", nothing)),
    "a sharded norm whose backward lacks a sum": (
        "olmo2",
        "q_norm: gradient",
        put(sharded_norm, "copy_to_region", nothing),
    ),
    "a latent key without a sum": ("deepseek_v3", "kv_a_proj", put(latent, "copy_to_region", nothing)),
}
"""Fault -> (model type, the module that is named, the fault); on 2 ranks, of Gemma 2 on 5, which share a head."""


@pytest.mark.parametrize("name", sampled(FAULTS, 3))
def test_a_planted_fault_is_found_and_named(name) -> None:
    model_type, module, fault = FAULTS[name]
    model, question, plan = small_model(model_type)
    with fault():
        found = typed.faults(model, plan, 5 if model_type == "gemma2" else 2, question)
    assert any(module in each for each in found), found
