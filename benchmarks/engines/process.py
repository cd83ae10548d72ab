"""Engines as child processes of which one at a time may use the CPU: the others are stopped (SIGSTOP)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

BENCHMARKS = Path(__file__).parents[1]
END_SECONDS = 10
HEALTH_SECONDS = 5
LOG_LINES = 12


def free_port() -> int:
    """One that nobody listens on right now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class EngineFailed(Exception):
    """An engine did not start, or ended; the message holds the end of its log."""


class Engine(Protocol):
    """One row of the tables. Prompts are token ids, so that every engine reads the same; decoding is greedy."""

    name: str
    weights: str  # Q4_1, Q8_0, int8, bf16
    about: dict[str, Any]  # version and the like, for the record

    def start(self) -> None:
        """Load the model, for those that stay loaded. Raises EngineFailed."""

    def turn(self) -> Any:
        """Context in which this engine may use the CPU."""

    def decode(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """One prompt to its natural end: `num_tokens`, `decode_s` from the first to the last token, `token_ids`."""

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """`seconds` from the start of a prompt to its first token."""

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """All at once: `num_tokens` put out, `seconds` for everything, `decode_tokens` and `decode_s` without the
        prompts."""

    def stop(self) -> None:
        """End the process."""


N = TypeVar("N", bound="Named")
R = TypeVar("R")


class Group:
    """A child process with all of its own children: a process group that can be halted as one. What it says goes to
    `log`; with `piped`, its stdin and stdout are ours."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        piped: bool = True,
    ) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else errors,
                stderr=errors,
                text=True,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def halt(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def failed(self, what: str) -> EngineFailed:
        """What to raise: `what`, and the end of the log."""
        lines = self.log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return EngineFailed("\n".join([f"{what} (log: {self.log})", *lines]))

    def end(self) -> None:
        """Ask it to end, wait a little, then kill what is left of the group."""
        self.resume()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)
            self.process.wait()


class Server:
    """A process that answers HTTP on a free local port, which stands for "{port}" in its command."""

    def __init__(
        self, name: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.port = name, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = [str(word).replace("{port}", str(self.port)) for word in command]
        self.group = Group(words, log, environment, piped=False)

    def wait(self, seconds: float = 300, pause: float = 0.2) -> None:
        """Until it says that it is healthy. Raises EngineFailed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.group.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_SECONDS):
                    return
            except OSError:  # not listening yet, or 503 while it loads
                time.sleep(pause)
        raise self.group.failed(f"{self.name} did not start")


@contextmanager
def served(
    name: str, commands: Sequence[Sequence[str | Path]], log: Path, environment: Mapping[str, str], seconds: float
) -> Iterator[list[str]]:
    """The addresses of servers, all started at once, when all of them are healthy. Logs are `log` and a number.
    Raises EngineFailed."""
    with ExitStack() as stack:
        servers = []
        for number, command in enumerate(commands):
            server = Server(name, command, log.with_name(f"{log.name}{number}"), environment)
            stack.callback(server.group.end)
            servers.append(server)
        for server in servers:
            server.wait(seconds)
        yield [server.url for server in servers]


class Named(Protocol):
    """A setting of a server."""

    name: str


def in_turn(settings: Iterable[N], trial: Callable[[N, Path], R], row: Callable[[N, R], str], out: Path | None) -> None:
    """Try one setting after the other, with a place for logs: its row on stdout, all that was found in `out`, as JSON.
    Exits with what an engine said when it failed."""
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


class WorkerEngine:
    """An engine behind `protocol`: it loads once and answers JSON lines."""

    def __init__(
        self, name: str, weights: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None
    ) -> None:
        self.name, self.weights, self.about = name, weights, {"command": " ".join(map(str, command))}
        self._command, self._log = command, log
        self._environment = {"PYTHONPATH": str(BENCHMARKS), **(environment or {})}
        self._group: Group | None = None

    def start(self) -> None:
        self._group = Group(self._command, self._log, self._environment)
        self.about |= self._read()
        self._group.halt()

    @contextmanager
    def turn(self) -> Iterator[None]:
        assert self._group is not None
        self._group.resume()
        try:
            yield
        finally:
            self._group.halt()

    def decode(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return self._ask("decode", prompt=list(prompt), max_tokens=max_tokens)

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        return self._ask("prefill", prompt=list(prompt))

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """What the prompts cost is measured by a second run that puts out one token each."""
        first = self._ask("batch", prompts=list(map(list, prompts)), max_tokens=1)
        whole = self._ask("batch", prompts=list(map(list, prompts)), max_tokens=max_tokens)
        tokens = whole["num_tokens"] - first["num_tokens"]
        return {**whole, "decode_tokens": tokens, "decode_s": whole["seconds"] - first["seconds"]}

    def stop(self) -> None:
        if self._group is not None:
            self._group.end()
            self._group = None

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._group is not None and self._group.process.stdin is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=self._group.process.stdin, flush=True)
        except OSError as error:
            raise self._group.failed(f"{self.name} has ended") from error
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._group is not None and self._group.process.stdout is not None
        line = self._group.process.stdout.readline()
        if not line:
            raise self._group.failed(f"{self.name} has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer
