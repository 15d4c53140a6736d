"""Clients: `pipeline(..., tp_plan="auto")`, lm_eval's `--model_args tp_plan=auto`, and saves of accelerate."""

from __future__ import annotations

from ...seams import Feature


class Clients(Feature):
    """Code that loads a model for a user, and is given a plan to pass on, or that saves one."""

    clients = (".pipelines.PIPELINE", ".pipelines.HARNESS")
    model_patches = (".accelerate_saves.ACCELERATOR",)


FEATURE = Clients()
