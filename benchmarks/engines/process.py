"""Engines as child processes. One at a time runs; the others are stopped by SIGSTOP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headstart.system import free_port

BENCHMARKS = Path(__file__).parents[1]
END_SECONDS = 10
HEALTH_SECONDS = 5
LOG_LINES = 12


class EngineFailed(Exception):
    """An engine did not start or has ended; the message has the end of its log."""


class Engine(Protocol):
    """One row of a table. Prompts are token ids, equal for all engines. Decoding is greedy."""

    name: str
    weights: str  # Q4_1, Q8_0, int8, bf16
    about: dict[str, Any]  # version and other facts for the record

    def start(self) -> None:
        """Loads the model. Raises EngineFailed."""

    def turn(self) -> Any:
        """Context in which this engine runs."""

    def decode(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """One prompt to its natural end: `num_tokens`, `decode_s` from the first to the last token, `token_ids`."""

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """`num_tokens`, and `seconds` from the start of a prompt to its first token."""

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """All prompts at once: `num_tokens` of output and `seconds` of everything; `decode_tokens` and `decode_s`
        without the prompts."""

    def stop(self) -> None:
        """Ends the process."""


class ProcessGroup:
    """A child process with its children, which are stopped together. Output goes to `log`; with `piped`, stdin and
    stdout are pipes."""

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

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context in which these processes run."""
        self.resume()
        try:
            yield
        finally:
            self.halt()

    def failed(self, what: str) -> EngineFailed:
        """An error with `what` and the end of the log."""
        lines = self.log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return EngineFailed("\n".join([f"{what} (log: {self.log})", *lines]))

    def end(self) -> None:
        """Terminates the group, waits END_SECONDS, then kills the rest."""
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


class ServerProcess:
    """An HTTP server on a free local port, inserted for "{port}" in the command."""

    def __init__(
        self, name: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.name, self.url = name, f"http://127.0.0.1:{self.port}"
        words = [str(word).replace("{port}", str(self.port)) for word in command]
        self.group = ProcessGroup(words, log, environment, piped=False)

    def wait(self, seconds: float = 300, pause: float = 0.2) -> None:
        """Waits until the server is healthy. Raises EngineFailed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.group.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_SECONDS):
                    return
            except OSError:  # not listening, or 503 while loading
                time.sleep(pause)
        raise self.group.failed(f"{self.name} did not start")


class WorkerEngine:
    """An engine in a worker process (`worker_protocol`), which loads once and answers JSON lines."""

    def __init__(
        self, name: str, weights: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None
    ) -> None:
        self.name, self.weights, self.about = name, weights, {"command": " ".join(map(str, command))}
        self._command, self._log = command, log
        self._environment = {"PYTHONPATH": str(BENCHMARKS), **(environment or {})}
        self._group: ProcessGroup | None = None

    def start(self) -> None:
        self._group = ProcessGroup(self._command, self._log, self._environment)
        self.about |= self._read()
        self._group.halt()

    def turn(self) -> Any:
        assert self._group is not None
        return self._group.turn()

    def decode(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return self.ask("decode", prompt=list(prompt), max_tokens=max_tokens)

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        return self.ask("prefill", prompt=list(prompt))

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Measures prefill by a run with one output token per prompt, and subtracts it."""
        first = self.ask("batch", prompts=list(map(list, prompts)), max_tokens=1)
        whole = self.ask("batch", prompts=list(map(list, prompts)), max_tokens=max_tokens)
        tokens = whole["num_tokens"] - first["num_tokens"]
        return {**whole, "decode_tokens": tokens, "decode_s": whole["seconds"] - first["seconds"]}

    def stop(self) -> None:
        if self._group is not None:
            self._group.end()
            self._group = None

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Calls a handler of the worker. Raises EngineFailed if the worker has ended."""
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


Launched = tuple[ProcessGroup, Callable[[], None]]
"""(started process, function that waits for its first token)."""


@dataclass(frozen=True)
class Starter:
    """A way to start an engine."""

    name: str
    launch: Callable[[str, int], Launched]  # arguments: prompt, number of tokens
    ends: bool  # the process ends after one answer
