"""Kernels of the Hub in place of forwards, with a stand-in for the package that fetches them."""

import contextlib
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import modeling_utils
from transformers.integrations import hub_kernels

import tp_transformers
from tests.support.architectures import LOGITS_TOLERANCE
from tests.support.comparisons import relative
from tests.support.models import PROMPTS
from tests.support.on_ranks import on_ranks


def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    norm.calls += 1
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def mixture(self: Any, x: torch.Tensor) -> Any:
    raise AssertionError("it would read the parameters of its router and its experts")


def stand_in(kernels: dict[str, Any]) -> Any:
    """Patches under which transformers finds `kernels`, by the names of the classes that they are for."""

    def kernelize(model: Any, *_: Any, **__: Any) -> None:
        for module in model.modules():
            if type(module).__name__ in kernels:
                module.forward = MethodType(kernels[type(module).__name__], module)
        model._use_kernels = True

    owner: Any = modeling_utils if hasattr(modeling_utils, "kernelize") else modeling_utils.PreTrainedModel
    patches = contextlib.ExitStack()  # before 5.17, it is a method
    patches.enter_context(mock.patch.object(modeling_utils, "is_kernels_available", return_value=True, create=True))
    patches.enter_context(mock.patch.dict("sys.modules", kernels=mock.MagicMock()))
    patches.enter_context(mock.patch.object(owner, "kernelize", kernelize))
    patches.enter_context(mock.patch.object(hub_kernels, "register_kernel_mapping_transformers", create=True))
    return patches


@on_ranks(model="gpt_oss", heads=(8, 2))
def test_a_kernel_that_leaves_out_what_ranks_communicate_is_refused(folder) -> None:
    cls, norm.calls = transformers.GptOssForCausalLM, 0
    expected = cls.from_pretrained(folder)(PROMPTS).logits.detach()

    def check(model: Any) -> None:
        with torch.no_grad():
            assert relative(model(PROMPTS).logits, expected) < LOGITS_TOLERANCE

    with tp_transformers.enable(), stand_in({"GptOssRMSNorm": norm}):
        check(cls.from_pretrained(folder, tp_plan="auto", use_kernels=True))
    assert norm.calls == 5
    for kernels, name in (
        ({"GptOssRMSNorm": norm, "GptOssMLP": mixture}, "mlp (GptOssMLP)"),
        ({"GptOssExperts": mixture}, "mlp.experts (GptOssExperts)"),
        ({"GptOssMLP": mixture} if dist.get_rank() else {}, "mlp"),
    ):
        with tp_transformers.enable(), stand_in(kernels):
            with pytest.raises(tp_transformers.UnsupportedError) as refused:
                cls.from_pretrained(folder, tp_plan="auto", use_kernels=True)
            # Of a model that is loaded, nothing is changed.
            model = cls.from_pretrained(folder, tp_plan="auto")
            with pytest.raises(tp_transformers.UnsupportedError) as again:
                model.set_use_kernels(True)
            assert not model.use_kernels
            check(model)
        assert str(again.value) == str(refused.value)
        assert f"got kernels in place of model.layers.*.{name}" in str(refused.value)
    assert str(refused.value).startswith("rank 1: ")
