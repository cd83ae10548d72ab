"""Servers that a tool starts for its measurements."""

import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from headstart.errors import UsageError
from headstart.system import describe_exit, stop_process_group

POLL_SECONDS = 0.3  # interval of checks of a starting server


def start_server(
    command: Sequence[str], answers: Callable[[], bool], environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Runs a command in a process group of its own and waits until `answers()` is true. environment: its variables;
    None: those of this process. Raises UsageError if the command cannot be run, or ends before; with the last line of
    its output. Its end is left to the caller."""
    shown = shlex.join(command)
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        except OSError as error:
            raise UsageError(f"cannot run {shown}: {error.strerror}", "is the program on the PATH?") from None
        try:
            while not answers():
                if process.poll() is not None:
                    log.seek(0)
                    last = (log.read().decode("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
                    raise UsageError(f"{shown} ended {describe_exit(process.returncode)}: {last}")
                time.sleep(POLL_SECONDS)
        except BaseException:
            stop_process_group(process)  # the command may have started processes of its own
            raise
    return process
