"""Checks of what ranks have to have in common, and a picture of what each holds: `tp_transformers.debug`."""

from __future__ import annotations

from typing import Any

from ...seams import Feature


class Debugging(Feature):
    """`check_inputs`, `check_replicas`, `partition`; with TP_TRANSFORMERS_DEBUG, the first of every loaded model.

    When ranks generate or save, they compare a few of the values that they have to hold alike.
    """

    requires = ("places",)
    public = {
        "debug.Partition": ".partition",
        "debug.check_inputs": ".same_inputs",
        "debug.check_replicas": ".replicas",
        "debug.head_counts": ".partition",
        "debug.partition": ".partition",
    }
    model_methods = (".replicas.DriftingModel",)

    def loaded(self, model: Any) -> None:
        from .same_inputs import check_if_enabled

        check_if_enabled(model)


FEATURE = Debugging()
