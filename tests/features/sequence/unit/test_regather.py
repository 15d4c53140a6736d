"""What is kept, in place of what a rank has gathered, to make it again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tp_transformers.features.sequence.region import _Regathered, remember


def normed(x: torch.Tensor) -> tuple[torch.Tensor, _Regathered]:
    norm = nn.LayerNorm(4)
    part = norm(x)
    remember(part, norm, x)
    return part, _Regathered(part, part, (3,), None, 1)  # type: ignore[arg-type]


def test_a_part_that_a_norm_made_is_made_again() -> None:
    x = torch.randn(2, 3, 4)
    part, regathered = normed(x)
    again = regathered._make()
    assert torch.equal(again, part)
    assert again.data_ptr() != part.data_ptr()
    assert not again.requires_grad


def test_a_norm_whose_input_has_changed_is_an_error_as_in_autograd() -> None:
    x = torch.randn(2, 3, 4)
    _, regathered = normed(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        regathered._make()


def test_a_part_that_could_come_out_otherwise_is_kept() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        part, regathered = normed(torch.randn(2, 3, 4))
    assert regathered._make().data_ptr() == part.data_ptr()
    dropout, x = nn.Dropout(0.5), torch.randn(2, 3, 4)
    part = dropout(x)
    remember(part, dropout, x)
    assert not hasattr(part, "_tp_made")


def test_views_of_what_is_gathered_are_told_from_other_tensors() -> None:
    whole = torch.randn(2, 3, 4)
    regathered = _Regathered(whole, whole, (3,), None, 1)  # type: ignore[arg-type]
    view = whole[:, 1:].transpose(1, 2)
    assert regathered.pack(view) == (view.shape, view.stride(), view.storage_offset())
    other = torch.randn(3)
    assert regathered.pack(other)[0].data_ptr() == other.data_ptr()  # type: ignore[union-attr]
    regathered._full, regathered._left = whole, 1  # as if it had been gathered
    assert torch.equal(regathered.unpack(regathered.pack(view)), view)


def test_what_has_changed_since_it_was_gathered_is_kept() -> None:
    full = torch.randn(2, 3, 4)
    regathered = _Regathered(full, full, (3,), None, 1)  # type: ignore[arg-type]
    full.add_(1)
    packed = regathered.pack(full)
    assert regathered._uses == 0
    assert torch.equal(regathered.unpack(packed), full)


def test_a_saved_tensor_that_has_changed_is_an_error_as_in_autograd() -> None:
    regathered = _Regathered(torch.randn(2, 3), torch.randn(2, 3), (3,), None, 1)  # type: ignore[arg-type]
    weight = nn.Parameter(torch.randn(3, 3))
    with torch.autograd.graph.saved_tensors_hooks(regathered.pack, regathered.unpack):
        loss = (torch.randn(2, 3, requires_grad=True) @ weight).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
