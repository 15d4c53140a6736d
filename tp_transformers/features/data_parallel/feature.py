"""Copies of a model on different batches: `data_parallel(model, mesh)`, transformers' `DistributedConfig`, FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...seams import Feature, Planned


class DataParallelism(Feature):
    """Copies of a model train on different batches."""

    requires = ("watch",)
    public = {"data_parallel": ".data_parallel"}  # noqa: RUF012

    def planned(self, arguments: Mapping[str, Any]) -> Planned | None:
        if arguments.get("distributed_config") is None or arguments.get("tp_plan") is not None:
            return None
        from .distributed_config import read_distributed_config

        parallelism = read_distributed_config(arguments)
        return None if parallelism is None else parallelism.load


FEATURE = DataParallelism()
