"""`generate` on devices of several kinds: all ranks take the tokens of rank 0.

Such devices may draw other tokens from equal logits: the numbers of a GPU's generator depend on the number of its
multiprocessors, and a softmax on the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from ...errors import MeshError
from ...ranks import direct
from ...ranks.group import TensorParallelGroup
from ...seams import Mixin

DRAFTING = ("assistant_model", "prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit")
"""Arguments of `generate` by which a step takes as many tokens as are drafted right."""


class UnequalModel(Mixin):
    """Methods of a loaded model by which ranks on devices of several kinds take the tokens of rank 0."""

    tp_group: TensorParallelGroup
    tp_kinds: tuple[str, ...] | None = None
    """Kinds of the devices of the ranks; None before the first `generate`, empty if all are of one kind."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.tp_kinds is None:
            kinds = sorted({*self.tp_group.gather(device_kind(self.tp_group.device))})
            self.tp_kinds = tuple(kinds) if len(kinds) > 1 else ()
        return super()._generate(*args, **kwargs)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        return _CriteriaOfFirst(criteria, self.tp_group) if self.tp_kinds else criteria

    def _get_top_k_continuations(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_top_k_continuations(*args, **kwargs)
        for each in found if self.tp_kinds else ():  # scores, tokens and origins of beams
            _take_first(each, self.tp_group)
        return found

    def _get_candidate_generator(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        if self.tp_kinds:
            drafts = [name for name in DRAFTING if kwargs.get(name) or getattr(generation_config, name, None)]
            raise MeshError(
                f"generate's {drafts[0]}",
                got=f"ranks on {' and '.join(self.tp_kinds)}",
                expected="devices of one kind: others may draft other tokens",
                fix="Leave it out.",
            )
        return super()._get_candidate_generator(generation_config, *args, **kwargs)


class _CriteriaOfFirst(StoppingCriteriaList):
    """Criteria that see the tokens of rank 0."""

    def __init__(self, criteria: StoppingCriteriaList, group: TensorParallelGroup) -> None:
        super().__init__(criteria)
        self.criteria, self.group = criteria, group

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        _take_first(input_ids[:, -1], self.group)
        return self.criteria(input_ids, scores, **kwargs)


def _take_first(x: Tensor, group: TensorParallelGroup) -> None:
    """Copy the values of rank 0 to `x`."""
    first = x.to(group.device, copy=True, memory_format=torch.contiguous_format)
    direct.broadcast(first, group.process_group, 0)
    x.copy_(first)


def device_kind(device: torch.device) -> str:
    """Name of a GPU, or the instructions of a CPU: others compute by other kernels."""
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    return str(torch.get_device_module(device.type).get_device_name(device))
