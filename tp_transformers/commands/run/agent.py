"""torchrun without its messages about failed ranks: `python -m tp_transformers.commands.run.agent ARGUMENTS`.

The arguments are torchrun's. Exit codes of the ranks that failed first are written to the folder `errors.FOLDER`.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from .errors import keep_codes


def main(arguments: Sequence[str]) -> int:
    """Run the ranks; returns 0, the exit code of the rank that failed first, or 128 plus the number of a signal."""
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    logging.disable(logging.ERROR)
    try:
        run(parse_args(list(arguments)))
    except SignalException as ended:
        return 128 + int(ended.sigval)
    except ChildFailedError as failed:
        keep_codes({rank: failure.exitcode for rank, failure in failed.failures.items()})
        code = int(failed.get_first_failure()[1].exitcode)
        return code if code > 0 else 128 - code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
