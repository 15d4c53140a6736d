"""Collectives of CPU tensors through memory that the ranks of a machine share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...seams import RAISES, REFUSED, Feature

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ...ranks.direct import Transport


class SharedMemory(Feature):
    """Ranks sum through memory that all of them map, instead of by gloo."""

    requires = ("places",)
    torch_names = {
        "torch._inductor.ir.TensorBox": RAISES,  # operators of ours in compiled graphs, as all of Inductor below
        "torch._inductor.ir._CollectiveKernel.create_out_of_place": RAISES,
        "torch._inductor.lowering.add_layout_constraint": RAISES,
        "torch._inductor.lowering.constrain_to_fx_strides": RAISES,
        "torch._inductor.lowering.register_lowering": RAISES,
        "torch.utils._python_dispatch._disable_current_modes": RAISES,  # collectives below modes
        "torch.distributed.ProcessGroupGloo._Options._timeout": REFUSED,  # of groups in shared memory
    }

    def transport(self, group: ProcessGroup) -> Transport | None:
        from .joining import share

        return share(group)


FEATURE = SharedMemory()
