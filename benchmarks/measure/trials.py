"""Trials of servers of several engines, setting by setting."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from engines.process import EngineFailed, ServerProcess


class Setting(Protocol):
    name: str


S = TypeVar("S", bound=Setting)
R = TypeVar("R")


@contextmanager
def start_servers(
    name: str, commands: Sequence[Sequence[str | Path]], log: Path, environment: Mapping[str, str], seconds: float
) -> Iterator[list[str]]:
    """Starts servers together and yields their URLs when all are healthy. Logs are `log` plus a number.
    Raises EngineFailed."""
    with ExitStack() as stack:
        servers = []
        for number, command in enumerate(commands):
            server = ServerProcess(name, command, log.with_name(f"{log.name}{number}"), environment)
            stack.callback(server.group.end)
            servers.append(server)
        for server in servers:
            server.wait(seconds)
        yield [server.url for server in servers]


def run_trials(
    settings: Iterable[S], trial: Callable[[S, Path], R], row: Callable[[S, R], str], out: Path | None
) -> None:
    """Prints a table row per setting and writes all results to `out` as JSON. Exits with the error of a failed engine.
    `trial` takes a setting and a path for logs."""
    record: dict[str, R] = {}
    with tempfile.TemporaryDirectory(prefix="trials-") as folder:
        for setting in settings:
            try:
                record[setting.name] = trial(setting, Path(folder) / "log")
            except EngineFailed as error:
                sys.exit(str(error))
            print(row(setting, record[setting.name]), flush=True)
            if out:
                out.write_text(json.dumps(record, indent=1))
