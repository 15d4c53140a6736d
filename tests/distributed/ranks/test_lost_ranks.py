"""Ranks that are killed or stopped, and errors that nobody catches, in real launches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_torchrun import torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
import tp_transformers
from transformers import AutoModelForCausalLM

folder, how, bad = sys.argv[1], sys.argv[2], int(sys.argv[3])
tp_transformers.enable()
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
rank, prompts = model.tp_group.rank, torch.tensor([[5, 17, 98]])
processes = model.tp_group.gather(os.getpid())
model(prompts)
began = time.monotonic()
if rank == bad:
    if how == "raise":
        raise ValueError("on this rank")
    os.kill(os.getpid(), getattr(signal, how))
try:
    for _ in range(3):
        model(prompts)
except tp_transformers.RemoteRankError as error:
    sys.stdout.write(f"raised after {time.monotonic() - began:.1f} s: {str(error).splitlines()[0]}\\n")
    sys.stdout.flush()
    if how == "SIGSTOP":  # torchrun waits for it
        time.sleep(1)
        try:
            os.kill(processes[bad], signal.SIGKILL)
        except ProcessLookupError:
            pass
    raise
"""


@pytest.mark.parametrize(
    ("how", "bad", "says", "bound"),
    [
        ("raise", 1, "rank 1 failed with ValueError: on this rank", 5),
        ("SIGKILL", 2, "rank 2 gave no sign of life", 5),
        ("SIGSTOP", 1, "rank 1 gave no sign of life", 15),
        ("SIGSTOP", 0, "rank 0 gave no sign of life", 15),
    ],
)
def test_all_ranks_name_the_one_that_is_lost(
    cases: Any, tmp_path: Path, how: str, bad: int, says: str, bound: int
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = torchrun(3, str(tmp_path / "script.py"), cases(9, 3).folder, how, str(bad), TORCHELASTIC_ERROR_FILE="")
    raised = re.findall(r"raised after ([\d.]+) s: (.*)", done.stdout)
    print(raised)
    assert done.returncode != 0
    # Torchrun may end the others first, where it sees that one has ended.
    assert len(raised) == 2 or (how != "SIGSTOP" and raised), done.stdout + done.stderr[-3000:]
    for seconds, message in raised:
        assert message.startswith(says), message
        assert float(seconds) < 4 * bound  # on a machine that is not overloaded, below the bound itself
