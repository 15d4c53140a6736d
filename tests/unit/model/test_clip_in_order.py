"""The norm of gathered gradients has every bit of torch's, also where dtypes are mixed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tp_transformers.model.clip import _norm_of_full


@pytest.mark.parametrize("seed", range(8))
def test_norms_are_added_up_in_the_order_of_torch(seed: int) -> None:
    torch.manual_seed(seed)
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32] * 3
    params = [nn.Parameter(torch.randn(7, 9, dtype=dtype)) for dtype in dtypes]
    grads = [torch.randn_like(param) for param in params]
    norm = _norm_of_full(params, grads, 2.0, torch.device("cpu"))
    assert torch.equal(norm, nn.utils.get_total_norm(grads, 2.0))
