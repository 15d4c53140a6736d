"""Cross entropy in one process, held against torch's and transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from tp_transformers.strategies import vocab_parallel_cross_entropy

TOKENS, VOCABULARY = 9, 17


def logits_and_target(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=dtype) * 5
    target = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return logits.requires_grad_(), target.index_fill(0, torch.tensor([2, 5]), -100)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradient_are_those_of_torch(reduction) -> None:
    logits, target = logits_and_target()
    whole = logits.detach().clone().requires_grad_()
    expected = cross_entropy(whole, target, reduction=reduction)
    loss = vocab_parallel_cross_entropy(logits, target, None, reduction=reduction)
    weights = torch.rand_like(expected)  # every token's gradient counts by itself
    (expected * weights).sum().backward()
    (loss * weights).sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, whole.grad)


def test_gradient_is_that_of_finite_differences() -> None:
    logits, target = logits_and_target()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(x, target, None)

    assert torch.autograd.gradcheck(loss, logits)


def test_bf16_is_computed_in_fp32_and_large_logits_do_not_overflow() -> None:
    logits, target = logits_and_target(torch.bfloat16)
    wide = logits.detach().float().requires_grad_()
    for scale in (1, 1024):
        loss = vocab_parallel_cross_entropy(logits * scale, target, None)
        expected = cross_entropy(wide * scale, target)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad.float(), wide.grad, rtol=1e-2, atol=1e-2)  # half a unit in bf16's last place


def test_a_batch_without_targets_and_one_that_fits_nothing() -> None:
    logits, target = logits_and_target()
    assert vocab_parallel_cross_entropy(logits, torch.full_like(target, -100), None).isnan()  # as torch's
    with pytest.raises(IndexError, match="Target 17 is out of bounds"):
        vocab_parallel_cross_entropy(logits, target.index_fill(0, torch.tensor([1]), VOCABULARY), None)
    with pytest.raises(IndexError, match="Target -100 is out of bounds"):
        vocab_parallel_cross_entropy(logits, target, None, ignore_index=-1)
    with pytest.raises(ValueError, match="not one of mean, sum, none"):
        vocab_parallel_cross_entropy(logits, target, None, reduction="average")
    with pytest.raises(ValueError, match=r"logits of shape \(9, 17\) do not fit targets of shape \(8,\)"):
        vocab_parallel_cross_entropy(logits, target[1:], None)
