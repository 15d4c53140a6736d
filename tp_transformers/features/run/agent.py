"""torchrun that ends with the exit code of a rank: `python -m tp_transformers.features.run.agent ARGUMENTS`.

The arguments are torchrun's. With the folder `errors.FOLDER`, torchrun's messages about failed ranks are left out, and
the exit codes of the ranks that failed first are written there.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from .command import AGENT
from .errors import FOLDER, keep_codes


def main(arguments: Sequence[str]) -> int:
    """Run the ranks; returns 0, the exit code of the rank that failed first, or 128 plus the number of a signal."""
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    os.environ[AGENT], is_quiet = str(os.getpid()), FOLDER in os.environ
    if is_quiet:
        logging.disable(logging.ERROR)
    try:
        run(parse_args(list(arguments)))
    except SignalException as ended:
        return 128 + int(ended.sigval)
    except ChildFailedError as failed:
        if is_quiet:
            keep_codes({rank: failure.exitcode for rank, failure in failed.failures.items()})
        else:
            traceback.print_exc()
        code = int(failed.get_first_failure()[1].exitcode)
        return code if code > 0 else 128 - code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
