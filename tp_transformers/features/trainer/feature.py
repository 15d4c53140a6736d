"""transformers' Trainer, for models that are loaded with a plan."""

from __future__ import annotations

from ...seams import Feature


class Training(Feature):
    """Trainer trains, logs, evaluates and saves as in one process, and counts copies of a model, not ranks."""

    requires = ("dcp", "debug", "full_parameters", "machines")
    clients = model_patches = (".patch.TRAINER",)


FEATURE = Training()
