"""`serve --record`: texts that have ended go to a folder of records, in a thread of its own.

Whoever hands one over never waits: what finds the queue full is dropped and counted. A disk that is full, or a folder
that is gone, costs records and one line of the log.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue

from headstart.core import Request
from headstart.server.records import Record, RecordFiles

log = logging.getLogger("headstart.server")

QUEUE = 1024
"""Texts that may wait to be written."""
LAST_SECONDS = 5.0
"""What the end of the server leaves for them."""
TOLD_EVERY = 600.0
"""Seconds between two lines of the log: a disk that is almost full fails again and again."""


class Recorder:
    """Counts texts: `kept`, and `lost` because the queue or the disk was full (or the folder not there)."""

    def __init__(self, files: RecordFiles, size: int = QUEUE) -> None:
        self.kept = 0
        self.lost = {"queue": 0, "disk": 0}
        self._files = files
        self._queue: Queue[Record | None] = Queue(size)
        self._told = -math.inf
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    @property
    def folder(self) -> Path:
        """Where they go."""
        return self._files.folder

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what waits, within LAST_SECONDS."""
        with suppress(Full):
            self._queue.put(None, timeout=LAST_SECONDS)
            self._thread.join(LAST_SECONDS)

    def offer(self, request: Request, tokens: Seq[int]) -> None:
        """A text that has ended well."""
        if not tokens:
            return
        try:
            self._queue.put_nowait(Record(request.prompt_ids, tuple(tokens), request.params.temperature))
        except Full:
            self.lost["queue"] += 1

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._files.append(record.line())
                self.kept += 1
            except OSError as error:
                self.lost["disk"] += 1
                self._tell(error)
        self._files.close()

    def _tell(self, error: OSError) -> None:
        if time.monotonic() - self._told > TOLD_EVERY:
            log.error("cannot record to %s: %s; serving goes on", self.folder, error.strerror or error)
            self._told = time.monotonic()
