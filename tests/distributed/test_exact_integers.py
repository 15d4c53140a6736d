"""Small integers in fp64: ranks compute the bits of one process, so that no wrong slice hides in a tolerance.

Linear layers are exact then, in any order of their sums. What is not linear has an exact stand-in: norms and softmax
cut integers off, rotary embeddings turn by quarters, and activations are ReLU6.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.architectures import ARCHITECTURES, inputs_of
from tests.support.comparisons import different_tensors, full_gradients, gradients
from tests.support.models import by_shares, load
from tests.support.needs import uneven
from tests.support.tiers import wide
from tests.support.tiny_inputs import seed

LARGEST = 2.0**53
"""The integers up to this one have a float64 each; here all numbers are multiples of 1/STEPS."""
STEPS = 2**4

GATED = {"hidden_act": "relu6", "head_dim": 4, "num_hidden_layers": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "mixtral": GATED,
    "phi3": GATED,
    "gpt2": {"activation_function": "relu6", "n_layer": 1},
    "qwen3": GATED,
    "gpt_neox": {"hidden_act": "relu6", "num_hidden_layers": 1},
    "opt": {"activation_function": "relu6", "num_hidden_layers": 1},
}
HEADS = {"gpt2": (9, 9), "gpt_neox": (9, 9), "opt": (9, 9), "phi3": (8, 2), "llama": (9, 3)}


def cut(x: Tensor, low: int, high: int) -> Tensor:
    """`x.clamp(low, high)`, with the gradient of the identity, so that all parameters have gradients."""
    return x + (x.clamp(low, high) - x).detach()


def norm(
    _: Any, x: Tensor, shape: Any = None, weight: Tensor | None = None, bias: Tensor | None = None, *__: Any
) -> Tensor:
    scaled = cut(x, -3, 3) * weight
    return scaled if bias is None else scaled + bias


def softmax(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return cut(x.masked_fill(x < -LARGEST, 0), 0, 2)


def turns(
    original: Callable[..., Any], self: Any, x: Tensor, position_ids: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    width = original(self, x, position_ids, *args)[0].shape[-1]
    angles = (position_ids[..., None] * (1 + torch.arange(width // 2).repeat(2))) % 4
    return tuple(torch.tensor(table, dtype=x.dtype)[angles] for table in ([1, 0, -1, 0], [0, 1, 0, -1]))


def route(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
    return logits, *torch.topk(cut(logits, -3, 3), self.top_k, dim=-1)


@contextmanager
def exact(name: str) -> Iterator[None]:
    """Stand-ins for all that is not exact in the classes of an architecture."""
    module = sys.modules[getattr(transformers, ARCHITECTURES[name].model).__module__]
    with ExitStack() as stack:
        for kind in list(vars(module).values()):
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                if kind.__name__.endswith("RMSNorm"):
                    stack.enter_context(patch.object(kind, "forward", lambda self, x: norm(x, x, weight=self.weight)))
                elif kind.__name__.endswith("RotaryEmbedding"):
                    forward = partial(turns, kind.forward)
                    stack.enter_context(
                        patch.object(kind, "forward", lambda *a, forward=forward, **named: forward(*a, **named))
                    )
                elif kind.__name__.endswith("TopKRouter"):
                    stack.enter_context(patch.object(kind, "forward", route))
        stack.enter_context(patch("torch.nn.functional.softmax", softmax))
        stack.enter_context(patch("torch.nn.functional.layer_norm", partial(norm, None)))
        yield


def make(name: str, folder: Path) -> None:
    """Write a model whose weights are -1, 0 and 1; scales of norms are 1 and 2."""
    architecture = ARCHITECTURES[name]
    config = getattr(transformers, architecture.config)(
        **architecture.settings(*HEADS.get(name, (6, 3)), True) | SETTINGS[name]
    )
    width = "n_embd" if name == "gpt2" else "hidden_size"
    setattr(config, width, 4 * config.num_attention_heads)
    model = getattr(transformers, architecture.model)(config).double()
    with torch.no_grad():
        for param in model.parameters():
            low, high = (1, 3) if "norm" in name and param.ndim == 1 else (-1, 2)
            param.copy_(torch.randint(low, high, param.shape, generator=seed()))
    model.save_pretrained(folder)


def observe(model: Any) -> Tensor:
    """Logits, and gradients of a sum of them that integers weigh."""
    logits = model(**inputs_of(model)[0], use_cache=False).logits
    (logits * torch.randint(-1, 2, logits.shape, generator=seed())).sum().backward()
    return logits.detach()


def compare(name: str, folder: str, shares: Sequence[int]) -> None:
    """Run on every rank: every bit is that of one process."""
    with exact(name):
        options = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
        model = load(folder, **by_shares(shares), **options).eval()
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        logits, expected = observe(model), observe(plain)
    grads = gradients(plain)
    for tensor in (expected, *grads.values()):
        steps = tensor * STEPS
        assert torch.equal(steps, steps.round())
        assert steps.abs().max() < LARGEST
    assert torch.equal(logits, expected)
    assert different_tensors(full_gradients(model), grads) == []
    assert len([grad for grad in grads.values() if grad.any()]) > 0.9 * len(grads)


CASES = [
    pytest.param(name, shares, id=f"{name}-{'_'.join(map(str, shares))}", marks=uneven(shares))
    for shares in ([2, 5, 1], [3, 1], [1, 1, 1, 1, 1], [1, 4, 2, 2, 3], [1, 1], [1, 1, 1])
    for name in SETTINGS
]


@pytest.mark.parametrize(("name", "shares"), wide(CASES, 4))
def test_integers_are_those_of_one_process_bit_by_bit(pool, tmp_path, name, shares) -> None:
    make(name, tmp_path)
    pool.run(len(shares), compare, name, str(tmp_path), shares)
