"""The `headstart` program. Everything else is imported inside `main`: Ctrl-C is one line from the first moment on."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys

TYPE_CHECKING = False  # the one of typing takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
UNSEEN = 50_000
"""New objects before some are looked for that nobody needs. Python's 700 have it look through all modules and a whole
vocabulary, of which nothing ever goes, again and again: a tenth of a start."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (the `headstart` script exits with it)."""
    if arguments is None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as after nohup
            signal.signal(signal.SIGINT, _end_at_once)
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # all is said: the exit code is that of it
        gc.set_threshold(UNSEEN)
        arguments = sys.argv[1:]
    from headstart.cli import edge  # with all commands: a third of a second

    return edge.run(list(arguments))


def _end_at_once(*_: object) -> None:
    """Ctrl-C while nothing is begun, or when all is done."""
    sys.stderr.write("headstart: error: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
