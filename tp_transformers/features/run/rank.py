"""A rank of `tp-transformers run`: it runs a script as `-m tp_transformers` does, and ends with torchrun."""

from __future__ import annotations

import os
import sys

from ...__main__ import main
from .command import AGENT, NUMA
from .errors import keep_errors
from .launch import end_with_parent
from .numa import bind_rank

if __name__ == "__main__":
    if agent := os.environ.pop(AGENT, None):  # the rank's own processes do not inherit the variable
        end_with_parent(parent=int(agent))
    if os.environ.get(NUMA) == "auto":
        bind_rank()
    with keep_errors():
        main(sys.argv[1:])
