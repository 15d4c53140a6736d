"""A loop of a user's own goes on without a rank that was killed: `fail_together`, a new process group, `reshard`."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from tests.support.models import PROMPTS

pytestmark = pytest.mark.slow

WAIT = 300
"""Seconds, on a busy machine too."""
LOOP = """
import json, os, signal, sys, time
import torch
import tp_transformers
from transformers import AutoModelForCausalLM

folder, place = sys.argv[1:]
prompts = torch.tensor(json.loads(os.environ["PROMPTS"]))
tp_transformers.enable()
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
step, losses, me = 0, 0, os.environ["RANK"]


def left():
    while not os.path.exists(f"{place}/left"):
        time.sleep(0.1)
    said = json.load(open(f"{place}/left"))
    return {"RANK": str(said["ranks"].index(me)), "WORLD_SIZE": str(len(said["ranks"])), "MASTER_PORT": said["port"]}


while step < 3:
    try:
        with tp_transformers.fail_together(model):
            if step == 1 and me == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            tokens = model.generate(prompts, max_new_tokens=4, do_sample=False)
            step += 1
    except tp_transformers.RemoteRankError:
        losses += 1
        torch.distributed.destroy_process_group()
        os.environ |= left()
        model = tp_transformers.reshard(model, int(os.environ["WORLD_SIZE"]))
with open(f"{place}/said{me}", "w") as file:
    json.dump([losses, model.tp_size, tokens.tolist()], file)
sys.stdout.flush()
os._exit(0)
"""


def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def test_a_loop_goes_on_with_the_ranks_that_are_left(cases, tmp_path) -> None:
    folder = cases(9, 3).folder
    (tmp_path / "loop.py").write_text(LOOP)
    first, second = store(), store()
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(first.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "PROMPTS": json.dumps(PROMPTS.tolist())}
    command = [sys.executable, str(tmp_path / "loop.py"), folder, str(tmp_path)]
    environments = [{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)]
    ranks = [subprocess.Popen(command, env=each) for each in environments]
    try:
        assert ranks[1].wait(WAIT) < 0
        (tmp_path / "saying").write_text(json.dumps({"ranks": ["0", "2"], "port": str(second.port)}))
        (tmp_path / "saying").rename(tmp_path / "left")
        deadline = time.monotonic() + WAIT
        assert [ranks[each].wait(deadline - time.monotonic()) for each in (0, 2)] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = model.generate(torch.as_tensor(PROMPTS), max_new_tokens=4, do_sample=False).tolist()
    for rank in (0, 2):
        assert json.loads((tmp_path / f"said{rank}").read_text()) == [1, 2, tokens]
