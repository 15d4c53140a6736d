"""Real launches: torchrun, unedited scripts, a rank that is killed, and the wheel in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TIMEOUT = 180


def torchrun(
    ranks: int, *command: str, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    launch = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command]
    return subprocess.run(
        launch,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


UNEDITED = """
import sys
import torch
from helper import announce
from transformers import AutoModelForCausalLM

folder, plan = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan=plan)
with torch.no_grad():
    announce(model.tp_size, model(torch.tensor([[5, 17, 98]])).logits[0, -1].argmax().item(), __name__)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    # One write a rank: torchrun passes the ranks' outputs through as they come.
    (tmp_path / "helper.py").write_text(
        "import sys\ndef announce(*what):\n    sys.stdout.write(' '.join(map(str, what)) + '\\n')\n"
    )
    (tmp_path / "script.py").write_text(UNEDITED)
    return str(tmp_path / "script.py")


def one_process(folder: str) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return int(model(torch.tensor([[5, 17, 98]])).logits[0, -1].argmax())


def test_an_unedited_script_runs_with_the_hook_on(cases, script) -> None:
    folder = cases(9, 3).folder
    done = torchrun(2, "-m", "tp_transformers", script, folder, "auto")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"2 {one_process(folder)} __main__"] * 2
    assert "destroy_process_group" not in done.stderr, "the group that we started is ended"
    assert "Loading shard 1 of 2: 100%" in done.stderr
    quiet = torchrun(2, "-m", "tp_transformers", script, folder, "auto", HF_HUB_DISABLE_PROGRESS_BARS="1")
    assert "Loading shard" not in quiet.stderr


def test_an_error_ends_the_launch_with_one_message_a_rank(cases, script) -> None:
    started = time.monotonic()
    done = torchrun(2, "-m", "tp_transformers", script, cases(9, 3).folder, "no/such/plan.yaml")
    assert done.returncode != 0
    assert "PlanError: plan no/such/plan.yaml: got no such file" in done.stderr
    assert time.monotonic() - started < TIMEOUT


KILLED = """
import os, signal, sys
import tp_transformers
from tp_transformers.loading import request
from transformers import AutoModelForCausalLM

if os.environ["RANK"] == "1":
    request.read = lambda *arguments, **keywords: os.kill(os.getpid(), signal.SIGKILL)
tp_transformers.enable()
AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
"""


def test_a_killed_rank_ends_the_others(cases, tmp_path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    done = torchrun(3, str(tmp_path / "killed.py"), cases(9, 3).folder)
    assert done.returncode != 0
    assert "Signal 9" in done.stderr


def test_the_wheel_has_every_plan_and_loads(cases, script, tmp_path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    done = subprocess.run(build, check=False, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=TIMEOUT)
    # The dependencies are this environment's; its editable checkout of the package is not seen through a path.
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    program = (
        "import tp_transformers, pathlib; from tp_transformers.plans.yaml_file import available_plans; "
        "plans = sorted({path.name for path in available_plans().values()}); "
        "print(pathlib.Path(tp_transformers.__file__).parent, *plans)"
    )
    done = subprocess.run(
        [python, "-c", program], check=True, capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path
    )
    where, *plans = done.stdout.split()
    assert Path(where) == site / "tp_transformers"
    assert plans == sorted(path.name for path in (ROOT / "model_plans").glob("*.yaml"))
    assert (Path(where) / "py.typed").is_file()
    folder = cases(8, 2).folder
    done = torchrun(2, "-m", "tp_transformers", script, folder, "auto", python=python, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"2 {one_process(folder)} __main__"] * 2
