"""Rank of `tp-transformers serve --elastic`: as of `serve`, with ranks that change while it runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

from ...errors import TensorParallelError
from ..run.errors import keep_errors
from ..run.launch import end_with_parent
from ..serve.rank import Rank, serve
from .agent import PARENT
from .member import Member


def main(arguments: Sequence[str]) -> None:
    """Run one rank; `arguments`: see `Rank`. The environment: see `Agent`."""
    end_with_parent(signal.SIGKILL, int(os.environ[PARENT]))
    is_first = os.environ["LOCAL_RANK"] == "0"
    rank = Rank(arguments)
    sockets = rank.bound() if is_first else []
    member = Member(rank, sockets[0].getsockname()[1] if is_first else None)
    thread = threading.Thread(target=member.run, daemon=True)
    thread.start()
    if is_first:
        member.serves.wait()
        if member.answers is not None:
            serve(member.answers, rank.name, rank.context, sockets, rank.own.drain)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 stops all ranks
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        thread.join()
    if member.error is not None:
        raise member.error


if __name__ == "__main__":
    with keep_errors(TensorParallelError):
        main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a thread may still wait for a rank that has ended
