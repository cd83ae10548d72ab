"""The `headstart` program. Other modules are imported inside `main`, so that Ctrl-C prints one line from the start."""

import atexit
import gc
import os
import signal
import sys

TYPE_CHECKING = False  # importing typing takes longer than this module
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
GC_THRESHOLD = 50_000
"""New objects between garbage collections. Python's 700 takes a tenth of the start: modules and vocabularies are
searched again and again."""


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run one command; returns the exit code."""
    if arguments is None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup ignores it
            signal.signal(signal.SIGINT, _interrupt)
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the exit code is already decided
        gc.set_threshold(GC_THRESHOLD)
        arguments = sys.argv[1:]
    from headstart.cli import app

    return app.run(list(arguments))


def _interrupt(*_: object) -> None:
    """Ctrl-C before a command begins, or after its end."""
    sys.stderr.write("headstart: error: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
