"""Kernels of the Hub in place of forwards, with a stand-in for the package that fetches them."""

import contextlib
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from transformers import modeling_utils
from transformers.integrations import hub_kernels

import tp_transformers
from tests.support.architectures import ARCHITECTURES, LOGITS_TOLERANCE
from tests.support.comparisons import relative
from tests.support.models import PROMPTS


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
    register = mock.patch.object(hub_kernels, "register_kernel_mapping_transformers", create=True)
    return patches, register


def replace(folder: str) -> dict[str, Any]:
    cls, found = transformers.GptOssForCausalLM, {}
    norm.calls = 0
    expected = cls.from_pretrained(folder)(PROMPTS).logits.detach()
    patches, register = stand_in({"GptOssRMSNorm": norm})
    with tp_transformers.enable(), patches, register:
        model = cls.from_pretrained(folder, tp_plan="auto", use_kernels=True)
    with torch.no_grad():
        found["kept"] = relative(model(PROMPTS).logits, expected)
    found["calls"] = norm.calls
    said = []
    for kernels in (
        {"GptOssRMSNorm": norm, "GptOssMLP": mixture},
        {"GptOssExperts": mixture},
        {"GptOssMLP": mixture} if dist.get_rank() else {},
    ):
        patches, register = stand_in(kernels)
        with tp_transformers.enable(), patches, register:
            try:
                cls.from_pretrained(folder, tp_plan="auto", use_kernels=True)
            except tp_transformers.UnsupportedError as error:
                said.append(str(error))
            # Of a model that is loaded, nothing is changed.
            model = cls.from_pretrained(folder, tp_plan="auto")
            try:
                model.set_use_kernels(True)
                said.append("")
            except tp_transformers.UnsupportedError as error:
                said.append(str(error))
            assert not model.use_kernels
            with torch.no_grad():
                found["kept"] = max(found["kept"], relative(model(PROMPTS).logits, expected))
    return {**found, "said": said}


def test_a_kernel_that_leaves_out_what_ranks_communicate_is_refused(pool, tmp_path) -> None:
    ARCHITECTURES["gpt_oss"].make(8, 2).save_pretrained(tmp_path)
    for found in pool.run(2, replace, str(tmp_path)):
        assert found["kept"] < LOGITS_TOLERANCE
        assert found["calls"] == 5
        assert found["said"][::2] == found["said"][1::2]
        for said, name in zip(
            found["said"][::2], ("mlp (GptOssMLP)", "mlp.experts (GptOssExperts)", "mlp"), strict=True
        ):
            assert f"got kernels in place of model.layers.*.{name}" in said
        assert found["said"][4].startswith("rank 1: ")
