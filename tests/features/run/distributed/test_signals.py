"""Signals to `tp-transformers run` in the foreground, under nohup, and as PID 1 of a container: ranks save first."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.waiting import until

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
def save(number, _):
    files[1].write_text(signal.Signals(number).name)
    time.sleep(2)
    files[2].touch()
    sys.exit(0)
files = [Path(sys.argv[1], f"{os.environ['RANK']}.{name}") for name in ("ready", "told", "saved")]
for name in ("TERM", "INT", "HUP"):
    signal.signal(getattr(signal, f"SIG{name}"), save)
files[0].touch()
time.sleep(300)
"""
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
WAYS: dict[str, list[str]] = {"foreground": [], "nohup": ["nohup"], "PID 1": CONTAINER}
TIMEOUT = 120.0

TABLE = [
    # way, signal, exit code of the launcher, what ranks were told, whether they had saved by its end (None: either)
    ("foreground", "TERM", 143, "SIGTERM", True),
    ("foreground", "INT", 130, "SIGINT", True),
    ("foreground", "HUP", 129, "SIGHUP", True),
    ("foreground", "KILL", -9, "SIGTERM", False),  # they save after it
    ("foreground", "KILL of torchrun", 137, "SIGTERM", None),
    ("nohup", "TERM", 143, "SIGTERM", True),
    ("nohup", "INT", 130, "SIGINT", True),
    ("nohup", "HUP", None, "", False),  # all go on
    ("nohup", "KILL", -9, "SIGTERM", False),
    ("PID 1", "TERM", 143, "SIGTERM", True),
    ("PID 1", "INT", 130, "SIGINT", True),
    ("PID 1", "HUP", 129, "SIGHUP", True),
    ("PID 1", "KILL", -9, "", False),  # the kernel kills all processes of the container
]


def processes(folder: str | Path, module: str = "") -> list[int]:
    """Processes that have `folder` among their arguments, in the order of their start; with `module` there as well."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_text(errors="replace").split("\0")
            if str(folder) in words and (not module or module in words):
                found.append(int(entry.name))
    return sorted(found)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's end")
@pytest.mark.parametrize(("way", "name", "code", "told", "has_saved"), TABLE)
def test_what_comes_of_the_launcher_and_its_ranks(tmp_path, way, name, code, told, has_saved) -> None:
    if way == "PID 1" and (not shutil.which("unshare") or subprocess.run([*CONTAINER, "true"], check=False).returncode):
        pytest.skip("no container can be made here")
    folder, script = tmp_path / "ranks", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(SCRIPT)
    command = [*WAYS[way], sys.executable, "-m", "tp_transformers", "run", "-n", "2", str(script), str(folder)]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        until(lambda: len(list(folder.glob("*.ready"))) == 2 or process.poll() is not None)
        target = process.pid
        if way == "PID 1":
            target = int(Path(f"/proc/{target}/task/{target}/children").read_text())
        if "torchrun" in name:
            (target,) = processes(folder, "tp_transformers.features.run.agent")
        os.kill(target, getattr(signal, f"SIG{name.split()[0]}"))
        if code is None:
            os.killpg(process.pid, signal.SIGHUP)  # as a terminal that closes
            time.sleep(3)
            assert process.poll() is None
        else:
            own = {1} if target != process.pid and name == "KILL" else set()  # an unshare that cannot kill itself
            assert process.wait(TIMEOUT) in {code, *own}, (tmp_path / "output").read_text()
        assert has_saved is None or len(list(folder.glob("*.saved"))) == 2 * has_saved
        if code is not None:
            until(lambda: not processes(folder))
        assert [path.read_text() for path in folder.glob("*.told")] == [told] * 2 * bool(told)
        assert len(list(folder.glob("*.saved"))) == 2 * bool(told)
        assert "Traceback" not in (tmp_path / "output").read_text()
    finally:
        for pid in processes(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
