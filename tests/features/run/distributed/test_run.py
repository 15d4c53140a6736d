"""`tp-transformers run`: errors of ranks, and what ranks are given."""

import json
import os
import re
import subprocess
import sys

import pytest

import tp_transformers
from tests.support.tiers import wide
from tp_transformers import RemoteRankError, TensorParallelError
from tp_transformers.__main__ import main
from tp_transformers.features.run.errors import error_lines, keep_errors
from tp_transformers.features.run.launch import start


def command(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    program = [sys.executable, "-m", "tp_transformers", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=timeout, check=False)


FAILING = """
import os, signal, sys, time
rank = os.environ["RANK"]
how = sys.argv[1]
if how == "all":
    raise ValueError("the same")
if how == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "said":
    sys.exit("enough")
if how == "code":
    sys.exit(3)
time.sleep(60)
"""


WITH_ERROR = "tp-transformers run: ranks? (0|1|0-1) ended with this error"


@pytest.mark.parametrize(
    ("how", "code", "says", "ranks"),
    wide(
        [
            ("all", 1, ["ValueError: the same", WITH_ERROR], 0),
            ("all", 1, ["ValueError: the same", WITH_ERROR], 1),
            ("all", 1, ["ValueError: the same", WITH_ERROR], 2),
            ("killed", 137, ["tp-transformers run: rank 1 ended by SIGKILL"], 2),
            ("said", 1, ["enough", WITH_ERROR], 2),
            ("code", 3, ["tp-transformers run: ranks? (0|1|0-1) ended with exit code 3"], 2),
        ],
        2,
    ),
)
def test_an_error_is_printed_once(tmp_path, capfd, how, code, says, ranks) -> None:
    """By 2 ranks that import no torch, or by the command, of which one start is quick: on 1 rank."""
    script = tmp_path / "script.py"
    if not ranks:
        kept = "from tp_transformers.features.run.errors import keep_errors as keep; kept = keep(); kept.__enter__()"
        script.write_text(kept + FAILING)
        assert start([str(script), how], ranks=2, command="run", verbose=False) == code
        printed, told = capfd.readouterr()
    else:
        script.write_text(FAILING)
        ended = command("run", "-n", str(ranks), str(script), how)
        assert ended.returncode == code
        printed, told = ended.stdout, ended.stderr
    assert printed == ""
    lines = told.splitlines()
    where = ["Traceback (most recent call last):", f'  File "{script}", line 6, in <module>']
    trace = [*map(re.escape, where), "    raise .*"] if how == "all" else []
    for line, expected in zip(lines, [*trace, *says], strict=True):
        assert re.fullmatch(expected, line)


def test_errors_of_ranks_that_differ_are_all_told(tmp_path) -> None:
    for rank, text in (("0", "RemoteRankError: rank 1 failed"), ("1", "ValueError: b"), ("2", "ValueError: c\nd")):
        (tmp_path / f"{rank}.rank").write_text(json.dumps([text, f"Traceback ...\n{text}\n"]))
    (tmp_path / "codes.json").write_text(json.dumps({"1": 1, "3": -15, "4": -9}))
    assert list(error_lines(tmp_path, "run")) == [
        "Traceback ...\nValueError: b",
        "tp-transformers run: rank 1 ended with this error",
        "tp-transformers run: rank 2 ended with ValueError: c",
        "tp-transformers run: rank 4 ended by SIGKILL",
        "tp-transformers run: --verbose prints every rank's own traceback",
    ]


class _RefusedError(TensorParallelError):
    """An error that says all in its text."""


@pytest.mark.parametrize("first", [RemoteRankError("rank 1 failed"), _RefusedError("a model: got none")])
def test_a_refusal_is_its_text_and_hides_no_other_error(tmp_path, monkeypatch, first) -> None:
    monkeypatch.setenv("TP_TRANSFORMERS_ERRORS", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended, keep_errors(TensorParallelError):
        raise first
    assert ended.value.code == 2
    (tmp_path / "1.rank").write_text(json.dumps(["ValueError: b", "Traceback ...\nValueError: b\n"]))
    said = list(error_lines(tmp_path, "serve"))
    own = [] if isinstance(first, RemoteRankError) else ["tp-transformers serve: a model: got none"]
    trace = ["Traceback ...\nValueError: b", "tp-transformers serve: rank 1 ended with this error"]
    assert said[: len(own) + 2] == own + trace


@pytest.mark.slow
def test_verbose_prints_all(tmp_path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    ended = command("run", "-n", "2", "--verbose", str(tmp_path / "script.py"), "all")
    assert ended.returncode == 1
    assert "ChildFailedError" in ended.stderr


def as_rank(*arguments: str) -> object:
    """Run on every rank: the exit code of a script, run as `-m tp_transformers` runs it."""
    argv, path = sys.argv, sys.path.copy()
    try:
        main([*arguments])
    except SystemExit as ended:
        return ended.code
    finally:
        sys.argv, sys.path[:] = argv, path
        tp_transformers.disable()
    return None


@pytest.mark.parametrize("by_command", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_scripts_run_with_the_hook_on(pool, tmp_path, by_command) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from transformers import PreTrainedModel\n"
        "hooked = hasattr(PreTrainedModel.from_pretrained, '__wrapped__')\n"
        "text = f\"{os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]} {hooked}\"\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(text)\n"
        "sys.exit(int(sys.argv[-1]))\n"
    )
    for arguments, code in ((["3"], 3), (["--flag", "0"], 0)):
        if by_command:
            assert command("run", "-n", "2", str(script), *arguments).returncode == code
        else:
            assert pool.run(2, as_rank, str(script), *arguments) == [code, code]
    for rank in "01":
        assert (tmp_path / rank).read_text() == f"{rank} of 2 ['--flag', '0'] True"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [("run", "-n", "2"), ()])
def test_full_copies_on_ranks_are_told(cases, tmp_path, launcher) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from transformers import LlamaForCausalLM as L\nL.from_pretrained({cases(9, 3).folder!r})\n")
    torchrun = [] if launcher else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [sys.executable, *torchrun, "-m", "tp_transformers", *launcher, str(script)]
    said = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True).stderr
    assert said.count("from_pretrained without tp_plan: each of 2 ranks loads the full model") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "-n", "0", __file__], "-n: got 0"),
        (["run", "-n", "2", os.devnull + "/script.py"], "no such file"),
    ],
)
def test_a_wrong_request_is_told_on_stderr(arguments, says, printed) -> None:
    assert says in printed(*arguments, code=2)
