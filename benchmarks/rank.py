"""One rank of a benchmark that `processes.run_ranks` started: it meets the others, computes, and leaves its result."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import logging

import tp_transformers


def run(job: Any, compute: Callable[[], Any]) -> None:
    """Write the result of `compute`, with the hook on and without warnings, to the file `job.result`.

    Args:
        job: has the fields `store` (a file by which the ranks meet), `rank`, `size` and `result`.
    """
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.size)
    tp_transformers.enable()
    Path(job.result).write_text(json.dumps(compute()), encoding="utf-8")
    dist.destroy_process_group()
