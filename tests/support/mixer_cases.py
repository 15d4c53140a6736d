"""The strategies of mixers on the modules that they fit; see `strategy_cases`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from tests.support.modules import randn, randomized
from tests.support.strategy_cases import FLOAT32, Case, Cases
from tp_transformers.slices.layout import Ranks, heads


def gated_norm(groups: int, kv_heads: int, size: int) -> Case:
    """A norm over `groups` of 24 features, which 8 heads make; the gate is left out."""
    split = heads(8, kv_heads, Ranks(size))[0]
    norm, cut = Zamba2RMSNormGated(24, group_size=24 // groups), (-1, split.scaled(3))
    rules = {"": ("gated_norm", {"split": split})}
    return Case(randomized(norm), rules, (randn(2, 5, 24),), takes=cut, leaves=cut, tolerance=FLOAT32)


class Standing(nn.Module):
    """An MLP that keeps those features that stand out among all."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 11
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x = x - torch.mean(x, dim=-1, keepdim=True) - 0.3 * torch.std(x, dim=-1, keepdim=True, unbiased=False)
        y: Tensor = self.down(torch.relu(x))
        return y


class Products(nn.Module):
    """Heads that are made, and summed, by parameters of (features, heads, head size)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(randn(6, 5, 3)), nn.Parameter(randn(6, 5, 3))
        self.bias = nn.Parameter(randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(torch.einsum("bsh,hnd->bsnd", x, self.up) + self.bias)
        return x + torch.einsum("bsnd,hnd->bsh", made, self.down)


MIXER_CASES: dict[str, Cases] = {
    "gated_norm": {
        "4 groups": lambda size: gated_norm(4, 4, size),
        "2 groups": lambda size: gated_norm(2, 2, size),
        "1 group": lambda size: gated_norm(1, 1, size),
        "2 groups a group of heads": lambda size: gated_norm(8, 4, size),
    },
    "sharded_moments": {
        "an MLP": lambda size: Case(
            Standing(),
            {"": ("sharded_moments", {"widths": ("width",)}), "up": "colwise", "down": "rowwise"},
            (randn(2, 5, 6),),
        ),
    },
    "sharded_products": {
        "parameters with heads": lambda size: Case(
            Products(),
            {"": "sharded_products", **dict.fromkeys(("up", "down", "bias"), "local_colwise")},
            (randn(2, 5, 6),),
        ),
    },
    "channelwise": {
        "depthwise convolution": lambda size: Case(
            nn.Conv1d(10, 10, 3, groups=10),
            {"": "channelwise"},
            (randn(2, 10, 5),),
            takes=(1, Ranks(size).split(10)),
            leaves=(1, Ranks(size).split(10)),
        ),
    },
    "replicate_inner": {
        "before a linear that is cut": lambda size: Case(
            nn.Sequential(nn.Linear(10, 6), nn.Linear(6, 14)),
            {"0": "replicate_inner", "1": "channelwise"},
            (randn(2, 5, 10),),
            leaves=(-1, Ranks(size).split(14)),
        ),
    },
    "rowwise_inner": {
        "before a linear that is cut": lambda size: Case(
            nn.Sequential(nn.Linear(10, 6), nn.Linear(6, 14)),
            {"0": "rowwise_inner", "1": "channelwise"},
            (randn(2, 5, 10),),
            takes=(-1, Ranks(size).split(10)),
            leaves=(-1, Ranks(size).split(14)),
        ),
    },
}
