"""Child processes of engines and their router: start, wait until healthy, supervise, end."""

import asyncio
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from headstart.core import Progress
from headstart.errors import CheckFailed, HeadstartError, UsageError
from headstart.system import describe_exit, stop_process_group
from headstart.tools.client import Server, get
from headstart.tools.launch.launcher import EngineLauncher
from headstart.tools.launch.spec import LaunchSpec, LaunchStep

START_SECONDS = 3600  # large models take half an hour to load and compile
POLL_S = 0.5
HEALTH_TIMEOUT_S, HEALTH_INTERVAL_S = 5, 5.0
MAX_FAILED_CHECKS = 3  # consecutive failed health checks before a running process is restarted
MAX_RESTARTS, RESTART_WINDOW_S = 3, 600.0  # the command ends when a server needs more restarts within this window
Say = Callable[[str], None]


@dataclass
class ServerProcess:
    """One process of a launch: an engine or the router."""

    step: LaunchStep
    words: list[str]
    environment: Mapping[str, str]
    log: Path
    server: Server
    health: str  # URL path of the health check
    process: subprocess.Popen[bytes] | None = None  # None: not started yet
    starts: list[float] = field(default_factory=list)  # time.monotonic() of each start
    failed_checks: int = 0  # consecutive failed health checks
    is_loading: bool = False  # restarted and not healthy yet

    @property
    def name(self) -> str:
        return "the engine" if self.step.server == "server" else self.step.server

    def start(self) -> None:
        """Starts the process with its output appended to the log. Raises UsageError if it cannot be run."""
        self.starts.append(time.monotonic())
        with self.log.open("ab") as output:
            try:
                self.process = subprocess.Popen(
                    self.words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(self.environment),
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise UsageError(f"cannot run {self.words[0]}: {error.strerror}", "is --program right?") from None

    def exit_reason(self) -> str | None:
        """Returns how the process ended, as a phrase such as "ended with code 1"; None while it runs."""
        code = self.process.poll() if self.process else 0
        return None if code is None else f"ended {describe_exit(code)}"

    def is_healthy(self) -> bool:
        async def check() -> bool:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return (await get(self.server, self.health)).status == 200

        try:
            return asyncio.run(check())
        except OSError:
            return False  # not listening

    def last_error(self) -> str:
        """Returns the last error line of the log, else its last line; at most 300 characters."""
        lines = self.log.read_text("utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (errors or lines or [""])[-1].strip()[:300]

    def failed(self, what: str, kind: type[HeadstartError] = UsageError) -> HeadstartError:
        return kind(f"{what}: {self.last_error()}", f"its log is {self.log}")

    def end(self) -> None:
        if self.process is not None:
            stop_process_group(self.process)


@dataclass
class ServerGroup:
    processes: list[ServerProcess]
    folder: Path
    started_s: float = 0.0
    is_ending: bool = False  # the processes are being ended on purpose

    @property
    def engines(self) -> list[ServerProcess]:
        return [each for each in self.processes if each.step.role != "router"]

    @property
    def front(self) -> ServerProcess:
        """The process that takes requests: the router, else the only engine."""
        return self.processes[-1]

    @property
    def log(self) -> Path:
        """The log file of a single process; the folder of the logs of several."""
        return self.processes[0].log if len(self.processes) == 1 else self.folder

    def wait(self, progress: Progress) -> None:
        """Waits until all processes are healthy; starts the router after the engines. Raises UsageError if a process
        ends, or is not healthy after START_SECONDS."""
        begin = time.monotonic()
        for left in (self.engines, [each for each in self.processes if each.step.role == "router"]):
            for each in left:
                if each.process is None:
                    each.start()
            while left and (passed := time.monotonic() - begin) < START_SECONDS:
                for each in left:
                    if how := each.exit_reason():
                        raise each.failed(f"{each.name} {how} before it answered")
                left = [each for each in left if not each.is_healthy()]
                progress(int(passed), START_SECONDS, f"waiting for {', '.join(each.name for each in left)}")
                time.sleep(POLL_S if left else 0)
            if left:
                raise left[0].failed(f"{left[0].name} does not answer after {START_SECONDS} s")
        self.started_s = time.monotonic() - begin

    def supervise(self, say: Say) -> None:
        """Watches the processes until `is_ending`. With several processes, one that ends or fails its health checks is
        restarted. Raises CheckFailed if a single process fails, or one was restarted MAX_RESTARTS times."""
        checked = time.monotonic()
        while not self.is_ending:
            time.sleep(POLL_S)
            for each in self.processes:
                if (how := each.exit_reason()) and not self.is_ending:
                    self._restart(each, how, say)
            if time.monotonic() - checked >= HEALTH_INTERVAL_S:
                checked = time.monotonic()
                for each in self.processes:
                    self._check(each, say)

    def _check(self, process: ServerProcess, say: Say) -> None:
        if process.is_healthy():
            if process.is_loading:
                say(f"{process.name} answers again after {time.monotonic() - process.starts[-1]:.0f} s")
            process.is_loading, process.failed_checks = False, 0
        elif not process.is_loading:
            process.failed_checks += 1
            if process.failed_checks >= MAX_FAILED_CHECKS:
                self._restart(process, f"does not answer {process.health} any more", say)

    def _restart(self, process: ServerProcess, how: str, say: Say) -> None:
        process.end()  # ends workers that are still running
        if len(self.processes) == 1:
            raise process.failed(f"{process.name} {how}", CheckFailed)
        recent = sum(time.monotonic() - when < RESTART_WINDOW_S for when in process.starts[1:])
        if recent >= MAX_RESTARTS:
            often = f"was started again {recent} times in the last {RESTART_WINDOW_S:.0f} s"
            raise process.failed(f"{process.name} {how}, and {often}", CheckFailed)
        say(f"{process.name} {how}: {process.last_error()}; starting it again ({recent + 1} of {MAX_RESTARTS})")
        process.start()
        process.is_loading, process.failed_checks = True, 0


@contextmanager
def start(
    launcher: EngineLauncher, commands: Sequence[tuple[LaunchStep, list[str]]], files: Mapping[str, str],
    spec: LaunchSpec,
) -> Iterator[ServerGroup]:  # fmt: skip
    """Starts the engines, with `files` in a new temporary folder, and ends all process groups with the context. The
    router is started by ServerGroup.wait. Raises UsageError if a port is in use or a program cannot be run."""
    host = "127.0.0.1" if spec.host == "0.0.0.0" else spec.host
    key = spec.settings.get("api_key")
    key = key[0] if isinstance(key, tuple | list) else key
    folder = Path(tempfile.mkdtemp(prefix=f"headstart-{launcher.name}-"))
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    processes = []
    for step, words in commands:
        assert step.port is not None
        check_port_is_free(step.port, host)
        server = Server(host, step.port, bool(spec.settings.get("ssl_certfile")), api_key=key, skip_tls_check=True)
        health = "/health" if step.role == "router" else launcher.health
        local = [str(folder / word) if word in files else word for word in words]
        is_alone = step.server == "server"
        log = folder / ("log" if is_alone else f"{step.server}.log")
        # the user's variables win, except those that select devices and ports of one of several servers
        environment = {**step.environment, **os.environ, **({} if is_alone else step.environment)}
        processes.append(ServerProcess(step, local, environment, log, server, health))
    servers = ServerGroup(processes, folder)
    try:
        for each in servers.engines:
            each.start()
        yield servers
    finally:
        servers.is_ending = True
        for each in reversed(processes):
            each.end()


def check_port_is_free(port: int, host: str) -> None:
    """Raises UsageError if the port is in use: answers of that program would be mistaken for the engine's."""
    with suppress(OSError), socket.create_connection((host, port), timeout=2):
        raise UsageError(f"--port {port} is in use on {host}", "choose another one")
