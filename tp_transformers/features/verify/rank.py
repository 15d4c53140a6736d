"""Rank of a verification: `torchrun -m tp_transformers.features.verify.rank FOLDER REPORTS DEADLINE`."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ...errors import error_text
from ...loading.hook import enable
from ...ranks.group import TP_AXIS
from ...strategies import STRATEGIES, full_tensor
from .differences import gradient_errors
from .small_models import model as probe


def run_rank(folder: Path, reports: Path, deadline: float) -> int:
    """Load the model, compute, and write an Observation to `reports`; exits with 1 after an exception."""
    with (folder / "request.pickle").open("rb") as file:
        sys.path[:] = pickle.load(file)
        cls, plan, custom, grads, dtype, tolerance = pickle.load(file)
    STRATEGIES.update(custom)
    questions, labels, expected = torch.load(folder / "questions.pt")
    observation, path = probe.Observation(), reports / f"{os.environ['RANK']}.pt"

    def report() -> None:
        torch.save(observation, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)  # atomic: torchrun ends the ranks when one has failed

    def fail(failure: str) -> None:
        observation.failure = failure
        report()
        os._exit(1)  # no shutdown: the other ranks may be in a collective

    late = threading.Timer(max(1.0, deadline - time.time()), fail, ["no end in time; do all collectives match?"])
    late.daemon = True
    late.start()
    try:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(TP_AXIS,))
        with enable():
            # allow_replicated: the full model was checked, not the small one; tp_watch: `fail` ends all ranks.
            plan = plan.with_options(allow_replicated=True)
            options = {"device_mesh": mesh, "dtype": dtype, "tp_watch": False}
            model = cls.from_pretrained(folder / "checkpoint", tp_plan=plan, **options)
        probe.convert(model, dtype)
        with probe.computing_in(dtype), probe.on_threads(1 if tolerance.is_exact else None):
            probe.observe(model, questions, observation, labels)
            if tolerance.is_exact:
                observation.doing = "answering further questions"
                observation.further = probe.further_answers(model, questions[0])
            if grads:
                observation.doing = "computing gradients"
                grown = probe.gradients(model, questions[0], labels)
        if grads:
            params = dict(model.named_parameters())
            gradients = {
                name: full_tensor(params[name], grown.get(name, torch.zeros_like(params[name]))) for name in expected
            }
            observation.errors = gradient_errors(gradients, expected, tolerance.noise)
            observation.gradients = {
                name: gradients[name] for name in gradients if observation.errors[name] > tolerance.gradient
            }
    except Exception as error:
        fail(error_text(error))
    late.cancel()
    report()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_rank(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])))
