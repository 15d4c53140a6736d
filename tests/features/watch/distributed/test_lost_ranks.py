"""Ranks that are killed or stopped, and errors that nobody catches, in real launches."""

import re

import pytest

from tests.distributed.test_torchrun import torchrun
from tests.support.launched import launched

pytestmark = pytest.mark.slow

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
        ("SIGSTOP", 1, "rank 1 gave no sign of life", 15),
        ("SIGSTOP", 0, "rank 0 gave no sign of life", 15),
    ],
)
def test_all_ranks_name_the_one_that_is_lost(cases, tmp_path, how, bad, says, bound) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = torchrun(3, str(tmp_path / "script.py"), cases(9, 3).folder, how, str(bad))
    raised = re.findall(r"raised after ([\d.]+) s: (.*)", done.stdout)
    print(raised)
    assert done.returncode != 0
    # Torchrun may end the others, once it sees that one has ended.
    assert len(raised) == 2 or (how == "raise" and raised), done.stdout + done.stderr[-3000:]
    for seconds, message in raised:
        assert message.startswith(says), message
        assert float(seconds) < 4 * bound  # on a machine that is not overloaded, below the bound itself


def test_a_rank_that_is_killed_is_named_where_no_launcher_ends_the_others(cases, tmp_path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    *others, (killed, _) = launched(3, str(tmp_path / "script.py"), cases(9, 3).folder, "SIGKILL", "2")
    for code, output in others:
        assert re.fullmatch(r"raised after [\d.]+ s: rank 2 gave no sign of life .*\n", output)
        assert code == 1
    assert killed == -9


DURING_A_LOAD = """
import os, signal, sys
import tp_transformers
from transformers import AutoModelForCausalLM
from tp_transformers.loading.memory import Memory

tp_transformers.enable()
rank = int(os.environ["RANK"])
assert callable(Memory.fill)
if rank == int(sys.argv[2]):
    Memory.fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
except tp_transformers.RemoteRankError as error:
    print(error)
    sys.stdout.flush()
    if rank != int(sys.argv[2]) + 1:  # one that stays, so that no connection of the others ends with it
        raise
    import time
    time.sleep(20)
"""


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_is_killed_during_a_load_is_named(cases, tmp_path, bad) -> None:
    (tmp_path / "script.py").write_text(DURING_A_LOAD)
    ranks = launched(3, str(tmp_path / "script.py"), cases(9, 3).folder, str(bad))
    assert ranks.pop(bad)[0] == -9
    for _, output in ranks:
        assert re.match(rf"rank {bad} (gave no sign of life|or the launcher has ended)", output)


AFTER_THE_OTHERS = """
import sys, time
import tp_transformers
from transformers import AutoModelForCausalLM

tp_transformers.enable()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto", tp_watch=60)
if model.tp_group.rank == 1:
    time.sleep(float(sys.argv[2]))
    began = time.monotonic()
    try:
        with tp_transformers.fail_together(model):
            raise ValueError("on this rank")
    except Exception as error:
        print(repr(error))
    assert time.monotonic() - began < 30
else:
    time.sleep(1)
"""


@pytest.mark.parametrize("after", [3, 0])
def test_an_error_is_its_own_where_nobody_can_be_told(cases, tmp_path, after) -> None:
    """Rank 0, which keeps the store, has ended before rank 1 fails, or ends while rank 1 waits for the others."""
    (tmp_path / "script.py").write_text(AFTER_THE_OTHERS)
    ranks = launched(2, str(tmp_path / "script.py"), cases(8, 4).folder, str(after))
    assert ranks == [(0, ""), (0, "ValueError('on this rank')\n")]
