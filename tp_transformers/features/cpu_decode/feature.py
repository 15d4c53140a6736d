"""Decoding on CPUs: kernels for the products and the attention of one token."""

from __future__ import annotations

from typing import Any

from ...seams import RAISES, Feature


class CpuDecode(Feature):
    """Linears and experts multiply one row by torch's own kernel; query heads of a group are rows of one product."""

    torch_names = {"torch.cpu._is_amx_tile_supported": RAISES}
    model_patches = (".attention.GROUPED_QUERIES",)

    def loaded(self, model: Any) -> None:
        if not model.tp_resolution.keeps_order:  # such a model has the bits of one process
            from .attention import attend_to_rows
            from .products import choose_kernels

            attend_to_rows(model)
            choose_kernels(model)


FEATURE = CpuDecode()
