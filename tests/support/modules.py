"""Small modules on which strategies are tried, and the loader's treatment of any module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, Llama4TextConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from tp_transformers.plans.bind import Resolution
from tp_transformers.strategies import STRATEGIES, ParamShard, TensorParallelLayer, attach, take

Rules = dict[str, Any]
"""Module or parameter -> its strategy, or its strategy's name, or either with options of `bind`."""


class FakeMesh:
    """As much of a DeviceMesh as slicing needs."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def shard_module(module: nn.Module, rules: Rules, group: Any) -> nn.Module:
    """What the loader does to a model, here to any module; "" names the module itself."""
    local = copy.deepcopy(module)
    modules = dict(local.named_modules())
    module_strategies, param_strategies = {}, {}
    for name, rule in rules.items():
        strategy, options = rule if isinstance(rule, tuple) else (rule, {})
        strategy = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
        if name in modules:
            module_strategies[name] = strategy.bind(modules[name], group.size, name=name, **options)
            module_strategies[name].check(modules[name])
        else:
            owner = name.rpartition(".")[0]
            param_strategies[name] = strategy.bind(modules[owner], group.size, name=name, **options)
            module_strategies.setdefault(owner, TensorParallelLayer())
    shards: dict[str, dict[str, ParamShard]] = {name: {} for name in modules}
    for name, param in list(local.named_parameters()):
        owner, _, param_type = name.rpartition(".")
        if owner in module_strategies:
            param_strategies.setdefault(name, module_strategies[owner])
        shard = Resolution({}, param_strategies, {}).shard(name, param.shape, group)
        own = take(param.detach(), shard.layout, group.rank).clone()
        modules[owner]._parameters[param_type] = shard.wrap(own, requires_grad=True)
        shards[owner][param_type] = shard
    for name, strategy in module_strategies.items():
        attach(modules[name], strategy, shards[name], group.device_mesh)
    return local


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Block(nn.Module):
    """down(relu(up(x)) * scale), as an MLP; `returns` says what else it returns."""

    def __init__(self, up: nn.Module, down: nn.Module, *, is_packed: bool = False, returns_more: bool = False) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.is_packed, self.returns_more = is_packed, returns_more

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.up(x))
        if self.is_packed:
            gate, up = y.chunk(2, -1)
            y = gate * up
        y = self.down(y)
        return (y, x.detach().sum()) if self.returns_more else y


class Decoder(nn.Module):
    """A layer of a norm and a block, and a norm after it; returns all that stands between them, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm, self.end = nn.Identity(), nn.LayerNorm(6), nn.LayerNorm(6)
        self.block = Block(nn.Linear(6, 11), nn.Linear(11, 6), returns_more=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        first = self.entry(x)
        second = first + self.block(self.norm(first))[0]
        last = self.end(second)
        return last, (first, second, last)


class States(nn.Module):
    """Everything that a decoder returns, as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, x: Tensor) -> Tensor:
        last, states = self.decoder(x)
        return torch.cat([last, *states], -1)


class LanguageModel(nn.Module):
    """An output embedding alone."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, vocabulary)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


class Scale(nn.Module):
    """x * weight + bias, feature by feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class Add(nn.Module):
    """x + weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class ByHead(nn.Module):
    """Apply a norm to every head of (batch, heads * width) features."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.width = norm, width

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.unflatten(-1, (-1, self.width)))
        return y.flatten(-2)


class Biased(nn.Module):
    """Scores of (batch, heads, queries, keys) with biases that are made for all heads, as in BLOOM and Falcon."""

    def forward(self, scores: Tensor, *, alibi: Any = None, attention_mask: Any = None) -> Tensor:
        batch, heads = scores.shape[:2]
        if alibi is not None:
            scores = scores * alibi.view(batch, heads, 1, -1)
        return scores if attention_mask is None else scores + attention_mask


class Sinks(nn.Module):
    """Scores of (batch, heads, keys), to which every head adds a parameter of its own."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, scores: Tensor) -> Tensor:
        return scores * self.sinks[:, None]


class Latent(nn.Module):
    """What is peculiar to latent attention: a rotary key for all heads, beside the latent that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.compress, self.expand = nn.Linear(6, 5 + 3), nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        latent, key = self.compress(x).split([5, 3], -1)
        y: Tensor = self.expand(latent) * key.square().sum(-1, keepdim=True)
        return y


class WithIdentity(nn.Module):
    """Two experts, one of which returns its input."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.expert, self.identity = expert, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 0.3 * self.expert(x) + 0.7 * self.identity(x)
        return y


class Routed(nn.Module):
    """A router and its experts."""

    def __init__(self, experts: nn.Module, hidden: int, count: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(hidden, count), experts

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        y: Tensor = self.experts(x, ids, weights)
        return y


class L2Norm(nn.Module):
    """Divides by the length, as nGPT's norms do, without a weight."""

    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "Olmo2RMSNorm": lambda: Olmo2RMSNorm(24),
    "RMSNorm": lambda: nn.RMSNorm(24, eps=1e-6),
    "LayerNorm": lambda: nn.LayerNorm(24),
    "L2Norm": L2Norm,
}
"""Norms over 24 features."""


def randomized(module: nn.Module) -> nn.Module:
    """Experts and norms leave their parameters empty, or at one."""
    with torch.no_grad():
        for param in module.parameters():
            param.normal_(std=0.5)
    return module


HIDDEN, TOKENS = 16, 7


def mixtral_experts(count: int = 5, width: int = 20, implementation: str = "eager") -> nn.Module:
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=width, num_local_experts=count)
    config._experts_implementation = implementation
    return randomized(MixtralExperts(config))


def gpt_oss_experts(implementation: str = "eager") -> nn.Module:
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=20, num_local_experts=5)
    config._experts_implementation = implementation
    return randomized(GptOssExperts(config))


def llama4_experts() -> nn.Module:
    config = Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=20, num_local_experts=5)
    return randomized(Llama4TextExperts(config))


def routed_inputs(dtype: torch.dtype, count: int = 5) -> tuple[Tensor, ...]:
    """(hidden states, expert ids, routing weights) of 7 tokens, two experts a token."""
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(TOKENS)])
    return torch.randn(TOKENS, HIDDEN, dtype=dtype), ids, torch.rand(TOKENS, 2, dtype=dtype)
