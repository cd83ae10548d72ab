"""`headstart serve --replicas`: starts, watches, renews and ends engines and their router.

Between router and engines is the relay (relay.py), which runs in this process: requests of an engine that ends, is
silent, or is renewed go on at another one.
"""

import asyncio
import logging
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence as Seq
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from headstart.errors import UsageError
from headstart.server.process import listening
from headstart.server.replicas.group import CpuShare, ReplicaGroup, ReplicaId, ReplicaInfo, ReplicaState
from headstart.server.replicas.metrics import LOAD_METRICS, OWN_HEADER, total
from headstart.server.replicas.relay import HOST, Relay, RelayServer
from headstart.server.replicas.router import (
    CHECK_INTERVAL_S,
    RouterMembership,
    RouterProcess,
    register,
    registered,
    send,
)
from headstart.system import child_environment, describe_exit, free_port, handle_signals

log = logging.getLogger("headstart.server")

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds before a failed engine is started again, longer each time
STABLE_S = 60.0  # a process that ran for so long is started again at once
HEALTH_INTERVAL_S = 1.0
SILENCE_S = 5.0  # an engine that does not answer /health for so long gets no requests, and loses those that it has
MAX_SILENCE_S = 60.0  # after that it is killed
IDLE_POLL_S = 0.25  # time between two checks that a replaced engine is idle
KILL_GRACE_S = 10  # time after --shutdown-timeout before an engine is killed; more than run.LAST_RESPONSES_S
LOG_INTERVAL_S = 60.0
ENDED_EARLY = 1  # exit code where an engine was killed before it was ready
POLL_S = 0.2  # time between two checks that a new engine answers
HEALTH_TIMEOUT_S = 10.0


class ProcessEndedError(Exception):
    """A process ended before it was ready."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code  # negative: the signal


@dataclass(eq=False)
class ReplicaProcess:
    """The process of a replica. While a replica is renewed there are two."""

    number: int
    port: int
    share: CpuShare
    starts: int
    process: asyncio.subprocess.Process
    state: ReplicaState = "starting"
    since: float = field(default_factory=time.time)
    fingerprint: str = ""
    is_silent: bool = False

    @property
    def is_ready(self) -> bool:
        return self.state == "ready" and self.is_alive

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def info(self) -> ReplicaInfo:
        return ReplicaInfo(
            number=self.number, url=self.url, pid=self.process.pid, state=self.state, starts=self.starts,
            since=self.since, cpus=self.share.cpus,
        )  # fmt: skip

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def wait_ready(self) -> None:
        """Wait until the engine answers. Raises ProcessEndedError."""
        while not await self.is_healthy():
            if not self.is_alive:
                raise ProcessEndedError(self.process.returncode or 0)
            await asyncio.sleep(POLL_S)
        self.state = "ready"

    async def is_healthy(self, seconds: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether GET /health succeeds in time; also reads the fingerprint."""
        response = await send("GET", f"{self.url}/health", seconds)
        if response is None or response.status_code != 200:
            return False
        self.fingerprint = response.json()["fingerprint"]
        return True

    async def is_idle(self, token: str) -> bool:
        """Whether the engine has no requests; True if it does not answer."""
        response = await send("GET", f"{self.url}/metrics", HEALTH_TIMEOUT_S, {OWN_HEADER: token})
        if response is None or response.status_code != 200:
            return True
        return not any(total(response.text, metric) for metric in LOAD_METRICS.values())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()

    async def end(self, seconds: float) -> None:
        """Send SIGTERM; kill the process if it still runs after `seconds`."""
        self.state = "leaving"
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), seconds)
        except TimeoutError:
            self.kill()
            await self.process.wait()


def command(words: Seq[str], replica: ReplicaId, port: int, threads: int) -> list[str]:
    """The supervisor's command line with another address and number of threads: the last of an option counts."""
    own = ["--host", HOST, "--port", str(port), "--threads", str(threads), "--replica", str(replica)]
    end = list(words).index("--") if "--" in words else len(words)
    return [sys.executable, "-m", "headstart", *words[:end], *own, *words[end:]]


async def spawn(words: Seq[str], replica: ReplicaId, share: CpuShare, starts: int) -> ReplicaProcess:
    """A new process on a free port. It writes to the supervisor's stdout and stderr."""
    port = free_port()
    arguments, nothing = command(words, replica, port, share.threads), asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=nothing, start_new_session=True, env=child_environment()
    )
    return ReplicaProcess(replica.number, port, share, starts, process)


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """The replicas to be supervised."""

    words: tuple[str, ...]  # command line of `serve`, which replicas get
    shares: tuple[CpuShare, ...]  # one for each replica
    cache_bytes: int  # bytes for the caches of one replica
    origins: tuple[str, ...] = ()
    shutdown_timeout: int = 30
    join: str | None = None


def supervise(settings: SupervisorSettings, sockets: list[socket.socket]) -> int:
    """Run until SIGINT or SIGTERM; SIGHUP renews the engines one by one. `sockets`: from `process.listening`. Returns
    the exit code; raises UsageError where the router cannot be started."""
    folder = Path(tempfile.mkdtemp(prefix="headstart-replicas-"))
    host, port = sockets[0].getsockname()[:2]
    try:
        router = RouterProcess(host, port, free_port(), settings.origins)
        with (
            ExitStack() as stack,
            asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner,
        ):
            relay_sockets = [each for _ in settings.shares for each in stack.enter_context(listening(HOST, 0))]
            return runner.run(ReplicaSupervisor(settings, folder, router, relay_sockets).run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(eq=False)
class ReplicaSupervisor:
    """Keeps the processes of a group running."""

    settings: SupervisorSettings
    folder: Path
    router: RouterProcess
    relay_sockets: list[socket.socket]  # by number of the replica
    children: dict[int, ReplicaProcess] = field(default_factory=dict)  # current process by number
    leaving: set[ReplicaProcess] = field(default_factory=set)  # replaced processes that end their requests
    starts: dict[int, int] = field(default_factory=dict)
    token: str = field(default_factory=secrets.token_hex, repr=False)
    relay: Relay = field(init=False)
    stopping: bool = False
    membership: RouterMembership | None = None
    _starting: dict[int, asyncio.Lock] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _renewing: asyncio.Task[None] | None = None
    _has_router: bool = False

    def __post_init__(self) -> None:
        self.relay = Relay(self.token, [each.getsockname()[1] for each in self.relay_sockets], self.children.values)
        self._relay_server = RelayServer(self.relay)

    async def run(self) -> int:
        """Run until `stop`; returns the exit code."""
        self._write()
        relaying = asyncio.create_task(self._relay_server.serve(self.relay_sockets))
        handle_signals(asyncio.get_running_loop(), self.stop, self.renew)
        try:
            begun = asyncio.create_task(self._begin())
            stop = asyncio.create_task(self._stop.wait())
            await asyncio.wait({begun, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not begun.done():
                begun.cancel()
                return 0
            await begun
            await stop
            return 0
        except ProcessEndedError as error:
            log.error("an engine ended %s before it was ready", describe_exit(error.code))
            return error.code if error.code > 0 else ENDED_EARLY
        finally:
            await self._end()
            self._relay_server.should_exit = self._relay_server.force_exit = True
            await relaying

    async def _begin(self) -> None:
        """The first engine starts alone: it writes packed weights where there are none, and the others map them."""
        count = len(self.settings.shares)
        await self._start_engine(0)
        await asyncio.gather(*(self._start_engine(number) for number in range(1, count)))
        await self.router.start(self.relay.urls)
        self._has_router = True
        self._create_task(self._keep_router_running())
        self._create_task(self._check_router())
        threads = {share.threads for share in self.settings.shares}
        what = f"{count} x {'/'.join(map(str, sorted(threads)))} threads"
        log.info("running on %s (Ctrl-C to stop): %s behind vllm-router", self.router.url, what)
        if self.settings.join is not None:
            self.membership = RouterMembership(self.settings.join, self.router.host, self.router.port, tls=False)
            self.membership.start()

    async def _start_engine(self, number: int) -> ReplicaProcess:
        """A new engine that answers and is current. One start at a time of each number. Raises ProcessEndedError."""
        async with self._starting.setdefault(number, asyncio.Lock()):
            return await self._start(number)

    async def _start(self, number: int) -> ReplicaProcess:
        self.starts[number] = self.starts.get(number, 0) + 1
        settings, replica = self.settings, ReplicaId(self.folder, number)
        child = await spawn(settings.words, replica, settings.shares[number], self.starts[number])
        before = self.children.get(number)
        if before is None or not before.is_alive:
            self.children[number] = child
            self._write()
        try:
            await child.wait_ready()
        except BaseException:
            child.kill()
            raise
        if before is not None and before.is_alive:
            before.state = "leaving"
            self.leaving.add(before)
        self.children[number] = child
        self._write()
        self._create_task(self._watch(child))
        self._create_task(self._monitor_health(child))
        return child

    async def _watch(self, child: ReplicaProcess) -> None:
        """Start the engine again when it ends by itself."""
        code = await child.process.wait()
        if self.stopping or child.state == "leaving":
            return
        child.state = "down"
        lived = time.time() - child.since
        log.error("replica %d ended %s after %.0f s; it is started again", child.number, describe_exit(code), lived)
        self._write()
        failed = 0 if lived >= STABLE_S else 1 if child.starts > 1 else 0
        while not self.stopping:
            await asyncio.sleep(PAUSES[min(failed, len(PAUSES) - 1)])
            failed += 1
            if self.children[child.number].is_alive:
                return  # renewed meanwhile
            with suppress(ProcessEndedError):
                await self._start_engine(child.number)
                log.info("replica %d answers again", child.number)
                return
            log.error("replica %d cannot be started", child.number)

    async def _keep_router_running(self) -> None:
        failed = 0
        while self.router.process is not None:
            begun = time.monotonic()
            code = await self.router.process.wait()
            if self.stopping:
                return
            said = "".join([*self.router.last_lines][-1:])
            log.error("the router ended %s; it is started again: %s", describe_exit(code), said)
            failed = 0 if time.monotonic() - begun >= STABLE_S else failed + 1
            await asyncio.sleep(PAUSES[min(failed, len(PAUSES) - 1)])
            with suppress(UsageError):
                await self.router.start(self.relay.urls)

    async def _check_router(self) -> None:
        """Checks that the router knows the relay."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if (known := await registered(self.router.url)) is None:
                continue
            for url in self.relay.urls:
                if url not in known:
                    log.warning("the router has forgotten %s; it is added again", url)
                    await register(self.router.url, url)

    async def _monitor_health(self, child: ReplicaProcess) -> None:
        """Poll /health. Move the requests of a silent engine to others; kill it after MAX_SILENCE_S."""
        silent_s = 0.0
        while child.is_alive and child.state == "ready":
            await asyncio.sleep(HEALTH_INTERVAL_S)
            asked = time.monotonic()
            is_healthy = await child.is_healthy(SILENCE_S)
            # Where all processes were stopped for a while, no engine was silent for so long.
            silent_s = 0.0 if is_healthy else silent_s + min(time.monotonic() - asked, SILENCE_S) + HEALTH_INTERVAL_S
            if child.is_silent != (silent_s > SILENCE_S):
                child.is_silent = not child.is_silent
                log.warning("replica %d %s", child.number, "is silent" if child.is_silent else "answers again")
                self.relay.engines_changed()
            if child.is_silent:
                self.relay.move_requests(child, "silent")
            if silent_s > MAX_SILENCE_S:
                log.error("replica %d does not answer for %.0f s; it is killed", child.number, MAX_SILENCE_S)
                child.kill()
                return

    def renew(self) -> None:
        """Replace engines one by one, each when its successor answers. One round at a time."""
        if not self._has_router or (self._renewing is not None and not self._renewing.done()):
            log.info("engines are being started already")
            return
        self._renewing = self._create_task(self._renew_all())

    async def _renew_all(self) -> None:
        for number in sorted(self.children):
            old = self.children[number]
            if not old.is_alive:
                continue  # it is being started again
            try:
                new = await self._start_engine(number)
            except ProcessEndedError as error:
                log.error("replica %d: its successor ended %s; all stay as they are", number, describe_exit(error.code))
                return
            if new.fingerprint == old.fingerprint:
                self.relay.move_requests(old, "renewed")
            self._create_task(self._retire(old))
            log.info("replica %d is renewed: process %d instead of %d", number, new.process.pid, old.process.pid)

    async def _retire(self, old: ReplicaProcess) -> None:
        """End a replaced process. Requests that no other engine can continue have no time limit."""
        logged = time.monotonic()
        await asyncio.sleep(IDLE_POLL_S)  # requests on their way
        while old.is_alive and not await old.is_idle(self.token):
            if time.monotonic() - logged > LOG_INTERVAL_S:
                logged = time.monotonic()
                log.info("process %d of replica %d still has requests", old.process.pid, old.number)
            await asyncio.sleep(IDLE_POLL_S)
        await old.end(self.settings.shutdown_timeout + KILL_GRACE_S)
        self.leaving.discard(old)

    def stop(self) -> None:
        """Let requests end within --shutdown-timeout; a second call kills all processes."""
        if self.stopping:
            self._kill()
            return
        log.info("shutting down: %d s for what runs", self.settings.shutdown_timeout)
        self.stopping = True
        self._stop.set()

    async def _end(self) -> None:
        """End the router first: it takes no new requests and finishes running ones."""
        self.stopping = True
        if self.membership is not None:
            await self.membership.leave()
        router = self.router.process
        if router is not None and router.returncode is None:
            router.terminate()
            await asyncio.sleep(IDLE_POLL_S)
        seconds = self.settings.shutdown_timeout + KILL_GRACE_S
        processes = {*self.children.values(), *self.leaving}
        await asyncio.gather(*(child.end(seconds) for child in processes))
        if router is not None and router.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(router.wait(), KILL_GRACE_S)
        self._kill()
        for task in self._tasks:
            task.cancel()

    def _kill(self) -> None:
        for child in {*self.children.values(), *self.leaving}:
            if child.is_alive:
                child.kill()
        if self.router.process is not None and self.router.process.returncode is None:
            self.router.process.kill()

    def _write(self) -> None:
        """Write the group's file."""
        self.relay.engines_changed()
        known = ReplicaGroup(
            cache_bytes=self.settings.cache_bytes, router=self.router.metrics, relay=self.relay.urls[0],
            token=self.token, replicas=tuple(self._info(*each) for each in enumerate(self.settings.shares)),
        )  # fmt: skip
        known.write(self.folder)

    def _info(self, number: int, share: CpuShare) -> ReplicaInfo:
        if (child := self.children.get(number)) is not None:
            return child.info
        return ReplicaInfo(number=number, url="", pid=0, state="down", starts=0, since=0.0, cpus=share.cpus)

    def _create_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task, which is kept until it ends; its failure stops the supervisor."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the supervisor failed", exc_info=error)
            self.stop()
