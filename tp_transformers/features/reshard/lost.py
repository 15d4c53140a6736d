"""Weights that no rank holds any more: read from the checkpoint, as the load read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import CheckpointError
from ...loading.from_pretrained import from_pretrained_with
from ...loading.hook import enable
from ...loading.request import LoadRequest, describe, open_together, read_together, split_reads
from ...plans.rules import Plan
from ...ranks.group import TensorParallelGroup
from ...slices.layout import Range
from ...slices.stored import Selection
from .described import Described
from .table import Table

_COMPARED = 64
"""Values of each tensor that are compared."""


class _FoundError(Exception):
    """Ends a load before the first weight."""


def _stop(model: PreTrainedModel, plan: Plan, request: LoadRequest) -> NoReturn:
    raise _FoundError(model, request)


class LostWeights:
    """An open checkpoint that slices of parameters are read from, by this process alone."""

    def __init__(
        self,
        described: Described,
        checkpoint: str | None,
        table: Table,
        values: Mapping[str, Callable[[], Tensor]],
        was: int,
        stack: ExitStack,
    ) -> None:
        """Open the `checkpoint`, by default that of the load; `stack` closes it.

        `values`: the shards of this rank, which was rank `was`. Raises CheckpointError if the checkpoint does not have
        the tensors of `table` in their shapes, or other values than this rank, of which a few are compared.
        """
        source = described.source if checkpoint is None else {"name": checkpoint}
        where = {"revision": source["commit_hash"]} if source.get("commit_hash") else {}
        given: dict[str, Any] = {**described.options, **described.loaded_with, **where, "dtype": described.dtype}
        given.pop("tp_shares", None)
        self.name = source.get("name")
        if self.name is None:
            raise self._lacks("weights that were given in memory")
        self.group = TensorParallelGroup(None, 0, 1, torch.device("cpu"))
        try:
            with enable():
                from_pretrained_with(_stop, described.cls, self.name, tp_plan=described.plan, **given)
        except _FoundError as found:
            model, self.request = found.args
        self.checkpoint = stack.enter_context(open_together(self.request, self.group))
        self.request = self.request.recognise(self.checkpoint, model)
        targets = describe(model, self.checkpoint, {}, self.request)
        self.tensors = targets.conversion.expressions
        for name, entry in table.items():
            if name not in self.tensors or tuple(self.tensors[name].shape) != entry.shape:
                raise self._lacks(f"no {name} of shape {list(entry.shape)}")
            held, local = entry.held({0: was})[0], values[name]()
            if held and local.numel():
                start, length = held[0][0], min(held[0][1] - held[0][0], _COMPARED)
                few: list[tuple[Range, ...]] = [((0, 1),)] * local.ndim
                few[entry.dim] = ((start, start + length),)
                for dim in range(local.ndim):
                    local = local.narrow(dim, 0, length if dim == entry.dim else 1)
                if not torch.equal(self.read(name, tuple(few)).to(local.dtype), local.cpu()):
                    raise self._lacks(f"other values of {name} than the ranks that are left")
        self.headers = self.checkpoint.bytes_read

    def _lacks(self, got: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.name or 'of the model'}",
            got=got,
            expected="the weights that a lost rank held",
            fix="Pass checkpoint=, the folder of a save with the same values.",
        )

    def read(self, name: str, selection: Selection) -> Tensor:
        """Read a slice of a parameter."""
        tensor = self.tensors[name]
        for dim, ranges in enumerate(selection):
            if ranges != ((0, tensor.shape[dim]),):
                tensor = tensor.select(dim, ranges)
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
        read_together(*split_reads({name: tensor}, {name: value}), self.checkpoint, self.group, self.request)
        return value

    @property
    def bytes_read(self) -> int:
        """Bytes that were read, without headers and comparisons."""
        return self.checkpoint.bytes_read - self.headers
