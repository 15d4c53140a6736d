"""`tp-transformers chat MODEL -n 2`: transformers' chat in a terminal, with a server on N ranks."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping

from ...errors import UsageError
from ..command_line.arguments import passed_on
from ..run.launch import ENDING, end_with_parent
from . import command

SUMMARY = "talk in the terminal to a model on N ranks of this machine, by transformers' own chat"
EXAMPLE = "tp-transformers chat HuggingFaceTB/SmolLM2-135M-Instruct -n 2"

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this machine, by no proxy."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables with which huggingface_hub, the chat's client, refuses every address."""


def configure(parser: argparse.ArgumentParser) -> None:
    command.configure(parser, passes_on_to="transformers chat")


def run(arguments: argparse.Namespace) -> int:
    """Start a server on a free local port, run transformers' chat, stop the server; returns the chat's exit code."""
    command.check(arguments)
    for number in ENDING:  # as PID 1 of a container, a process ignores signals without a handler
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python, url = [sys.executable, "-m"], f"http://127.0.0.1:{port}"
    serve = ["tp_transformers", "serve", arguments.model, "-n", str(arguments.ranks), *passed_on(arguments)]
    serve += [*command.own(arguments), "--host", "127.0.0.1", "--port", str(port)]
    with (
        tempfile.TemporaryFile() as log,  # the terminal belongs to the chat
        subprocess.Popen([*python, *serve], stdout=log, stderr=log, preexec_fn=end_with_parent) as server,
    ):
        try:
            while not answers(url):
                if server.poll() is not None:
                    log.seek(0)
                    print(log.read().decode(errors="replace"), file=sys.stderr)
                    raise UsageError("chat", got="a server that ended", expected="one", fix="Its error is above.")
                time.sleep(0.2)
            chat = [*python, "transformers.cli.transformers", "chat", arguments.model, url, *arguments.options]
            return subprocess.run(chat, env=reaching(os.environ), preexec_fn=end_with_parent).returncode
        finally:
            server.terminate()


def reaching(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which the chat reaches its server: by no proxy, and in the offline mode of the Hub, too."""
    hosts = [environment.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    direct = ",".join(filter(None, [*hosts, "127.0.0.1"]))
    kept = {name: value for name, value in environment.items() if name not in OFFLINE}
    return {**kept, "no_proxy": direct, "NO_PROXY": direct}


def answers(url: str) -> bool:
    """True if a server at `url` answers its health check."""
    try:
        with DIRECT.open(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False
