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
def test_types_are_as_known(model_type: str) -> None:
    assert typed.check(model_type, proofs.types()[model_type]) == typed.known()[model_type]


Plant = Callable[[], AbstractContextManager[Any]]


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


def nothing_of_block(self: Any, x: torch.Tensor, strategy: Any, mesh: Any) -> torch.Tensor:
    return x


def twice_of_block(self: Any, x: torch.Tensor, strategy: Any, mesh: Any) -> torch.Tensor:
    group = mesh.get_group()
    return collectives.copy_to_region(collectives.copy_to_region(x, group), group)


PAIR, SAME, SUM = collectives.apply_pair, collectives.same, collectives._sum


def paired(**instead: Any) -> AbstractContextManager[Any]:
    """Another backward of a pair of collectives, by the name of the forward."""

    def apply(x: torch.Tensor, compute: Any, transpose: Any, *settings: Any) -> torch.Tensor:
        return PAIR(x, compute, instead.get(compute.__name__, transpose), *settings)

    return patch.object(collectives, "apply_pair", apply)


def sum_of_own(x: torch.Tensor, *settings: Any) -> torch.Tensor:
    return collectives._scatter_sum(x, *settings)


FAULTS: dict[str, tuple[str, int, str, Plant]] = {
    "a copy whose backward sums nothing": (
        "llama",
        2,
        "model.norm.weight",
        lambda: paired(same=SAME),
    ),
    "a sum whose backward sums again": (
        "llama",
        2,
        "down_proj: sum of",
        lambda: paired(_sum=SUM),
    ),
    "a gather whose backward sums": (
        "llama",
        2,
        "lm_head: sum of",
        lambda: paired(all_gather_uneven=sum_of_own),
    ),
    "a gather that repeats this rank": (
        "llama",
        2,
        "lm_head: output",
        lambda: patch.object(linear, "gather_from_region", own_repeated),
    ),
    "rowwise without a sum": (
        "llama",
        2,
        "o_proj: output",
        lambda: patch.object(linear, "reduce_from_region", nothing),
    ),
    "rowwise that sums twice": (
        "llama",
        2,
        "o_proj: sum of",
        lambda: patch.object(linear, "reduce_from_region", twice(linear.reduce_from_region)),
    ),
    "rowwise whose bias every rank adds": ("opt", 2, "fc2", lambda: patch.object(linear.RowwiseParallel, "hidden", ())),
    "an embedding without a sum": (
        "llama",
        2,
        "embed_tokens: output",
        lambda: patch.object(linear.RowwiseParallel, "after", unsummed_embedding),
    ),
    "colwise without a copy": ("llama", 2, "layernorm", lambda: patch.object(Block, "copy", nothing_of_block)),
    "colwise that copies twice": ("llama", 2, "sum of", lambda: patch.object(Block, "copy", twice_of_block)),
    "a key projection without a copy": (
        "llama",
        2,
        "input_layernorm",
        lambda: patch.object(Block, "copy", without_key),
    ),
    "a norm within heads without a sum": (
        "qwen3",
        2,
        "q_norm",
        lambda: patch.object(shard.ParamShard, "view", unsummed),
    ),
    "experts whose router lacks a sum": (
        "mixtral",
        2,
        "gate",
        lambda: patch.object(experts, "copy_to_region", nothing),
    ),
    "experts without a sum": ("mixtral", 2, "mlp", lambda: patch.object(experts, "reduce_from_region", nothing)),
    "experts that sum twice": (
        "mixtral",
        2,
        "mlp",
        lambda: patch.object(experts, "reduce_from_region", twice(experts.reduce_from_region)),
    ),
    "experts whose bias every rank adds": (
        "gpt_oss",
        2,
        "mlp",
        lambda: patch.object(shard.ParamShard, "view", added_by_all),
    ),
    "a bias of experts without a gradient on most ranks": (
        "gpt_oss",
        2,
        "bias",
        lambda: patch.object(shard.ParamShard, "view", uncopied),
    ),
    "replicated keys without a sum": ("gemma2", 5, "k_proj", lambda: patch.object(shard, "copy_shared", nothing)),
    "a sharded norm without a sum": (
        "olmo2",
        2,
        "q_norm: input",
        lambda: patch.object(sharded_norm, "reduce_from_region", nothing),
    ),
    "a sharded norm whose backward lacks a sum": (
        "olmo2",
        2,
        "q_norm: gradient",
        lambda: patch.object(sharded_norm, "copy_to_region", nothing),
    ),
    "a latent key without a sum": (
        "deepseek_v3",
        2,
        "kv_a_proj",
        lambda: patch.object(latent, "copy_to_region", nothing),
    ),
}


@pytest.mark.parametrize("name", sampled(FAULTS, 3))
def test_a_planted_fault_is_found_and_named(name: str) -> None:
    model_type, size, module, plant = FAULTS[name]
    model, question, plan = small_model(model_type)
    with plant():
        found = typed.faults(model, plan, size, question)
    assert any(module in fault for fault in found), found
