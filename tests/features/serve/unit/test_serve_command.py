"""What `tp-transformers serve` and `chat` refuse before they start anything."""

import argparse
import socket
import sys

import pytest

from tp_transformers.commands import cli
from tp_transformers.errors import UsageError
from tp_transformers.features.serve import command as serve
from tp_transformers.features.serve.ports import bound


@pytest.mark.parametrize("name", ["serve", "chat"])
def test_a_server_without_its_packages_is_one_line(name, monkeypatch, capsys) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda package: None)
    monkeypatch.setattr("subprocess.Popen", None)  # nothing is started
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main([name, "model", "-n", "2"]))
    assert ended.value.code
    assert capsys.readouterr().err == (
        f"tp-transformers {name}: packages: got no fastapi, uvicorn, openai, expected all. "
        'pip install "transformers[serving]"\n'
    )


def test_a_port_in_use_is_told_before_anything_starts(monkeypatch, capsys) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda package: package)
    monkeypatch.setattr("subprocess.Popen", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "model", "-n", "2", "--host", "127.0.0.1", f"--port={port}"]) == 2
    assert capsys.readouterr().err == (
        f"tp-transformers serve: port {port} of 127.0.0.1: got address already in use, expected a free one. "
        "Give another with --port, or end the process that has it.\n"
    )
    (free,) = bound("127.0.0.1", port)
    assert free.getsockname() == ("127.0.0.1", port)
    free.close()
    with pytest.raises(UsageError, match=r"port 99999 of 127\.0\.0\.1: got"):
        bound("127.0.0.1", 99_999)


@pytest.mark.parametrize("packed", [[], ["--packed"]])
def test_ranks_get_the_own_options_of_the_command(packed) -> None:
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    given = parser.parse_args(["model", "-n", "2", "--drain", "3", *packed])
    assert serve.own(given) == ["--drain", "3.0", "--watch", "10.0", "--dtype", "auto", *packed]
