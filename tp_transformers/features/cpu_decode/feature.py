"""Decoding on CPUs: products and attention of one token at the speed of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...seams import RAISES, Feature

if TYPE_CHECKING:
    from ...patches import Patch


class CpuDecode(Feature):
    """Linears and experts multiply one row by torch's own kernel; query heads of a group are rows of one product."""

    torch_names: ClassVar[Mapping[str, str]] = {"torch.cpu._is_amx_tile_supported": RAISES}

    def loaded(self, model: Any) -> None:
        from .products import choose_kernels

        choose_kernels(model)

    def model_patches(self) -> Sequence[Patch]:
        from .attention import GROUPED_QUERIES

        return (GROUPED_QUERIES,)


FEATURE = CpuDecode()
