"""Failures of one rank outside of collectives: all ranks raise."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ...seams import REFUSED, Feature, Option

if TYPE_CHECKING:
    from ...loading.options import Options
    from ...ranks.group import TensorParallelGroup


class WatchOption(Option):
    """False: ranks do not watch one another. A number: seconds until a silent rank counts as lost. None: 10."""

    name = "watch"
    expected, example = "False, or seconds above 0", "60.0"

    def fits(self, value: Any) -> bool:
        return value is None or (isinstance(value, bool | int | float) and (value is False or value > 0))

    def agreed(self, value: Any) -> object:
        return value is not False


class Watching(Feature):
    """Ranks of a model watch one another: `tp_watch`, `fail_together` and `renew_process_group`."""

    requires = ("places",)
    public = {"fail_together": ".calls", "renew_process_group": ".renew"}
    torch_names = {
        "torch._dynamo.eval_frame.OptimizedModule": "calls of compiled modules are not watched",
        "torch.distributed.ProcessGroupGloo._get_sequence_number_for_group": REFUSED,  # collectives of a rank
        "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": "meshes find a renewed group by themselves",
        "torch.distributed.device_mesh.DeviceMesh._pg_registry": "meshes find a renewed group by themselves",
    }
    options = (WatchOption(),)
    model_methods = (".calls.WatchedModel",)

    def around_load(self, group: TensorParallelGroup, options: Options) -> AbstractContextManager[None]:
        from .calls import load_watched

        return load_watched(group, options.get("tp_watch"))

    def loaded(self, model: Any) -> None:
        from .calls import keep_watching

        keep_watching(model)

    def around_call(self, caller: Any) -> AbstractContextManager[Any]:
        from .calls import around_call

        return around_call(caller)


FEATURE = Watching()
