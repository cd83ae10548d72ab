"""`headstart serve --replicas`: engines and their router are started, watched, renewed and ended.

Who is in the router changes before who lives: an engine that dies is taken out at once, so that the router's next try
goes to another; one that is renewed leaves when its successor answers, and ends when it has nothing left to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import UsageError
from headstart.server.replicas.child import Child, EndedError, how, spawn
from headstart.server.replicas.join import Joined
from headstart.server.replicas.router import Policy, Router
from headstart.server.replicas.shares import Share
from headstart.server.replicas.state import Fleet, Known, Member
from headstart.system import HANG_UP, has_terminal, on_signal

log = logging.getLogger("headstart.server")

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds before an engine is started again, longer each time it fails."""
STEADY_SECONDS = 60.0
"""Who has run for so long is started at once when it fails."""
LOOK_SECONDS = 5.0
MOST_SILENCE = 60.0
"""Seconds that an engine may fail to answer /health before it is killed."""
IDLE_SECONDS = 0.25
LAST_SECONDS = 10
TELL_SECONDS = 60.0
ENDED_EARLY = 1
"""Exit code where an engine was killed before it was ready."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is supervised. `words`: the command line of `serve`, which replicas get; `room`: bytes of a replica's
    caches."""

    host: str
    port: int
    words: tuple[str, ...]
    shares: tuple[Share, ...]
    room: int
    origins: tuple[str, ...] = ()
    shutdown_timeout: int = 30
    join: str | None = None
    policy: Policy = "cache_aware"


def supervise(settings: Settings, sockets: list[socket.socket]) -> int:
    """Until SIGINT or SIGTERM; SIGHUP renews the engines one by one. `sockets`: from `listening`. The exit code; raises
    UsageError where the router cannot be started."""
    folder = Path(tempfile.mkdtemp(prefix="headstart-replicas-"))
    host, port = sockets[0].getsockname()[:2]
    try:
        with socket.socket() as metrics:
            metrics.bind(("127.0.0.1", 0))
            router = Router(host, port, metrics.getsockname()[1], settings.origins, settings.policy)
        return asyncio.run(Supervisor(settings, folder, router).run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(eq=False)
class Supervisor:
    """`children`: the one that counts, of each number; `leaving`: those that end what they have begun."""

    settings: Settings
    folder: Path
    router: Router
    children: dict[int, Child] = field(default_factory=dict)
    leaving: set[Child] = field(default_factory=set)
    starts: dict[int, int] = field(default_factory=dict)
    token: str = field(default_factory=secrets.token_hex, repr=False)
    stopping: bool = False
    joined: Joined | None = None
    _starting: dict[int, asyncio.Lock] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _renewing: asyncio.Task[None] | None = None
    _in_front: bool = False

    async def run(self) -> int:
        self._write()
        self._handle_signals()
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
        except EndedError as error:
            log.error("an engine ended %s before it was ready", how(error.code))
            return error.code if error.code > 0 else ENDED_EARLY
        finally:
            await self._end()

    async def _begin(self) -> None:
        """The first engine alone: it packs the weights, if nobody has, and the others map what it has written."""
        count = len(self.settings.shares)
        await self._started(0)
        await asyncio.gather(*(self._started(number) for number in range(1, count)))
        await self.router.start([child.url for child in self.children.values()])
        self._in_front = True
        self._do(self._keep_router())
        self._do(self._look())
        threads = {share.threads for share in self.settings.shares}
        said = f"{count} x {'/'.join(map(str, sorted(threads)))} threads"
        log.info("running on %s (Ctrl-C to stop): %s behind vllm-router", self.router.url, said)
        if self.settings.join is not None:
            self.joined = Joined(self.settings.join, self.router.host, self.router.port, tls=False)
            self.joined.start()

    async def _started(self, number: int) -> Child:
        """A new engine that answers and counts. One at a time of a number. Raises EndedError."""
        async with self._starting.setdefault(number, asyncio.Lock()):
            return await self._start(number)

    async def _start(self, number: int) -> Child:
        self.starts[number] = self.starts.get(number, 0) + 1
        child = await spawn(
            self.settings.words, Member(self.folder, number), self.settings.shares[number], self.starts[number]
        )
        before = self.children.get(number)
        if before is None or not before.alive:
            self.children[number] = child
            self._write()
        try:
            await child.ready()
        except BaseException:
            child.kill()
            raise
        if before is not None and before.alive:
            before.state = "leaving"
            self.leaving.add(before)
        self.children[number] = child
        self._write()
        if self._in_front:
            await self.router.add(child.url)
        self._do(self._watch(child))
        return child

    async def _watch(self, child: Child) -> None:
        """It is started again when it ends, unless it was told to."""
        code = await child.process.wait()
        if self.stopping or child.state == "leaving":
            return
        child.state = "down"
        await self.router.remove(child.url)
        lived = time.time() - child.since
        log.error("replica %d ended %s after %.0f s; it is started again", child.number, how(code), lived)
        self._write()
        failed = 0 if lived >= STEADY_SECONDS else 1 if child.starts > 1 else 0
        while not self.stopping:
            await asyncio.sleep(PAUSES[min(failed, len(PAUSES) - 1)])
            failed += 1
            if self.children[child.number].alive:
                return  # renewed meanwhile
            with contextlib.suppress(EndedError):
                await self._started(child.number)
                log.info("replica %d answers again", child.number)
                return
            log.error("replica %d cannot be started", child.number)

    async def _keep_router(self) -> None:
        failed = 0
        while self.router.process is not None:
            begun = time.monotonic()
            code = await self.router.process.wait()
            if self.stopping:
                return
            log.error("the router ended %s; it is started again: %s", how(code), "".join([*self.router.said][-1:]))
            failed = 0 if time.monotonic() - begun >= STEADY_SECONDS else failed + 1
            await asyncio.sleep(PAUSES[min(failed, len(PAUSES) - 1)])
            with contextlib.suppress(UsageError):
                await self.router.start(self._ready())

    async def _look(self) -> None:
        """Now and then: does the router know all engines, and do they answer?"""
        silent: dict[Child, float] = {}
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            known = await self.router.known()
            for url in self._ready() if known is not None else ():
                if url not in (known or ()):
                    log.warning("the router has forgotten %s; it is told again", url)
                    await self.router.add(url)
            for child in [each for each in self.children.values() if each.state == "ready"]:
                now = time.monotonic()
                if await child.healthy():
                    silent.pop(child, None)
                elif child.alive and now - silent.setdefault(child, now) > MOST_SILENCE:
                    log.error("replica %d does not answer for %.0f s; it is killed", child.number, MOST_SILENCE)
                    child.kill()

    def _ready(self) -> list[str]:
        return [child.url for child in self.children.values() if child.state == "ready"]

    def renew(self) -> None:
        """Engines one by one, each replaced when its successor answers. One round at a time."""
        if not self._in_front or (self._renewing is not None and not self._renewing.done()):
            log.info("engines are being started already")
            return
        self._renewing = self._do(self._renew_all())

    async def _renew_all(self) -> None:
        for number in sorted(self.children):
            old = self.children[number]
            if not old.alive:
                continue  # it is being started anyway
            try:
                new = await self._started(number)
            except EndedError as error:
                log.error("replica %d: its successor ended %s; all stay as they are", number, how(error.code))
                return
            await self.router.remove(old.url)
            self._do(self._retire(old))
            log.info("replica %d is renewed: process %d instead of %d", number, new.process.pid, old.process.pid)

    async def _retire(self, old: Child) -> None:
        """What it has begun may take as long as it wants."""
        told = time.monotonic()
        await asyncio.sleep(IDLE_SECONDS)  # requests on their way
        while old.alive and not await old.idle(self.token):
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                log.info("process %d of replica %d still has requests", old.process.pid, old.number)
            await asyncio.sleep(IDLE_SECONDS)
        await old.end(self.settings.shutdown_timeout + LAST_SECONDS)
        self.leaving.discard(old)

    def stop(self) -> None:
        """What runs may end within --shutdown-timeout; told twice, nothing may."""
        if self.stopping:
            self._kill()
            return
        log.info("shutting down: %d s for what runs", self.settings.shutdown_timeout)
        self.stopping = True
        self._stop.set()

    async def _end(self) -> None:
        """The router first: it takes nothing new, and passes on what runs."""
        self.stopping = True
        if self.joined is not None:
            await self.joined.leave()
        router = self.router.process
        if router is not None and router.returncode is None:
            router.terminate()
            await asyncio.sleep(IDLE_SECONDS)
        seconds = self.settings.shutdown_timeout + LAST_SECONDS
        everybody = {*self.children.values(), *self.leaving}
        await asyncio.gather(*(child.end(seconds) for child in everybody))
        if router is not None and router.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(router.wait(), LAST_SECONDS)
        self._kill()
        for task in self._tasks:
            task.cancel()

    def _kill(self) -> None:
        for child in {*self.children.values(), *self.leaving}:
            if child.alive:
                child.kill()
        if self.router.process is not None and self.router.process.returncode is None:
            self.router.process.kill()

    def _write(self) -> None:
        """For the replicas."""
        known = [self._known(number, share) for number, share in enumerate(self.settings.shares)]
        fleet = Fleet(room=self.settings.room, router=self.router.metrics, token=self.token, replicas=tuple(known))
        fleet.write(self.folder)

    def _known(self, number: int, share: Share) -> Known:
        if (child := self.children.get(number)) is not None:
            return child.known
        return Known(number=number, url="", pid=0, state="down", starts=0, since=0.0, cpus=share.cpus)

    def _do(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """In a task of its own, which is kept until it ends, and heard if it fails."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the supervisor failed", exc_info=error)
            self.stop()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        attached = HANG_UP is not None and has_terminal() and signal.getsignal(HANG_UP) is not signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM):
            on_signal(loop, number, self.stop)
        if HANG_UP is not None:
            on_signal(loop, HANG_UP, lambda: self.stop() if attached and not has_terminal() else self.renew())
