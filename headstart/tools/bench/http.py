"""HttpTarget: a BenchTarget for an OpenAI-compatible server."""

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from headstart.errors import UsageError
from headstart.tools import client
from headstart.tools.bench.document import DraftCounts
from headstart.tools.bench.measure import (
    AUTO,
    OFF,
    SERVER,
    AnswerSample,
    Notify,
    RequestLoad,
    RunOutcome,
    check_mode,
)
from headstart.tools.bench.workloads import Task
from headstart.tools.engine_metrics import EngineCounters

TOKENIZE = "/tokenize"
OWN = "headstart"  # `owned_by` of headstart's models; only these servers accept the request field `speculation`
CHARACTERS_PER_TOKEN = 4  # rough value for English; used for servers without /tokenize
FULL_COUNTERS = ("headstart", "vllm")  # engines whose metrics have all counts of a DraftCounts


class HttpTarget:
    """A server, and optionally a second server without a drafter for mode "off". Raises UsageError for a server that
    does not answer.

    Before each run every prompt is sent once, for one token, so that the prefix cache is equally warm in all modes. A
    headstart server also gets a cache salt for each run, so that lookup does not draft from earlier answers."""

    chunked_prefill: bool | None = None

    def __init__(self, server: client.Server, off: client.Server | None = None, *, model: str | None = None) -> None:
        self._server, self._off = server, off
        known = {each: client.find_model(each, model) for each in (server, off) if each is not None}
        self._is_own = known[server].get("owned_by") == OWN
        self._synthetic = known[server].get("synthetic_acceptance") if self._is_own else None
        self._names = {each: str(entry["id"]) for each, entry in known.items()}
        self.is_local, self._salt, self._counts_tokens = server.is_local, "", False
        with suppress(OSError, ValueError):
            tried = {"model": self._names[server], "prompt": "one two"}
            self._counts_tokens = asyncio.run(client.post(server, TOKENIZE, tried)).status == 200

    @property
    def modes(self) -> tuple[str, ...]:
        return (OFF, AUTO) if self._is_own else (OFF, SERVER) if self._off else (SERVER,)

    @property
    def description(self) -> Mapping[str, Any]:
        return {
            "runner": "HTTP", "url": str(self._server), "off_url": str(self._off) if self._off else None,
            "model": self._names[self._server], "is_headstart": self._is_own,
            **({"synthetic_acceptance": self._synthetic} if self._synthetic else {}),
        }  # fmt: skip

    def count_tokens(self, text: str) -> int:
        if not self._counts_tokens:
            return max(1, len(text) // CHARACTERS_PER_TOKEN)
        body = {"model": self._names[self._server], "prompt": text, "add_special_tokens": False}
        try:
            return int(json.loads(asyncio.run(client.post(self._server, TOKENIZE, body)).body)["count"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{self._server} no longer counts tokens: {client.error_reason(error)}"
            raise UsageError(what, "is it running?") from None

    def check(self, tasks: Seq[Task]) -> None:
        """Does nothing: only the server knows which tasks fit."""

    def settle(self, tasks: Seq[Task], mode: str) -> None:
        self._salt = secrets.token_hex(8)
        short = [replace(task, turns=task.turns[:1], max_tokens=1) for task in tasks]
        self.run(short, mode, RequestLoad(concurrency=8), lambda: None)

    def run(self, tasks: Seq[Task], mode: str, load: RequestLoad, notify: Notify) -> RunOutcome:
        server, extra = self._server_of(mode)
        if self._is_own and server == self._server:
            extra = {**extra, "cache_salt": self._salt or None}
        extra = {"model": self._names[server], **extra}
        return asyncio.run(_HttpRun(server, extra, notify).run(tasks, load))

    def is_alive(self) -> bool:
        try:
            for server in self._names:
                client.list_models(server)
        except UsageError:
            return False
        return True

    def _server_of(self, mode: str) -> tuple[client.Server, dict[str, Any]]:
        """Returns (server, request fields) for a mode. Raises UsageError for a mode that the server cannot run."""
        if mode == OFF and self._off is not None:
            return self._off, {}
        if mode == SERVER:  # as the server was started
            return self._server, {}
        if not self._is_own:
            hint = "leave --modes out; --off-url names a second server that does not draft"
            raise UsageError(f"--modes has {mode!r}, but {self._server} is not headstart's: its mode is fixed", hint)
        if mode in (OFF, AUTO):
            return self._server, {"speculation": {"mode": mode}}
        check_mode(mode)
        if not int(mode):
            raise UsageError("--modes has '0': the depth of a request is at least 1", f"use {OFF}")
        return self._server, {"speculation": {"mode": AUTO, "depth": int(mode)}}


class _HttpRun:
    """Sends the tasks of one run. Sends nothing more after a connection broke."""

    def __init__(self, server: client.Server, extra: Mapping[str, Any], notify: Notify) -> None:
        self._server, self._extra, self._notify = server, extra, notify
        self._samples: list[AnswerSample] = []
        self._lost = ""

    async def run(self, tasks: Seq[Task], load: RequestLoad) -> RunOutcome:
        before = await _metrics(self._server)
        started = time.perf_counter()
        due = [started + seconds for seconds in load.arrivals(len(tasks))] if load.rate else [None] * len(tasks)
        left = zip(tasks, due, strict=True)
        await asyncio.gather(*(self._client(left) for _ in range(load.concurrency or len(tasks))))
        seconds = time.perf_counter() - started
        after = await _metrics(self._server) if not self._lost else None
        spent = _difference(before, after)
        return RunOutcome(samples=self._samples, seconds=seconds, speculation=spent, lost=self._lost)

    async def _client(self, left: Iterator[tuple[Task, float | None]]) -> None:
        for task, due in left:
            if due is not None:
                await asyncio.sleep(due - time.perf_counter())
            await self._talk(task, due)

    async def _talk(self, task: Task, due: float | None = None) -> None:
        messages = [{"role": "system", "content": task.system}] if task.system else []
        for turn in task.turns:
            if self._lost:
                return
            messages.append({"role": "user", "content": turn})
            sample, text = await self._ask(task, messages, due)
            self._samples.append(sample)
            self._notify()
            if sample.error:
                return
            messages.append({"role": "assistant", "content": text})
            due = None

    async def _ask(self, task: Task, messages: list[dict[str, str]], due: float | None) -> tuple[AnswerSample, str]:
        late = 0.0 if due is None else max(0.0, time.perf_counter() - due)
        try:
            answer = await client.post(self._server, client.CHAT, {**body_of(task, messages), **self._extra})
        except OSError as error:
            self._lost = self._lost or f"{self._server}: {client.error_reason(error)}"
            return AnswerSample(error=self._lost), ""
        except ValueError as error:
            return AnswerSample(error=f"the answer cannot be read: {error}"), ""
        if answer.broken:
            self._lost = self._lost or f"{self._server} hung up in the middle of an answer"
        refused = "" if answer.status == 200 else f"HTTP {answer.status}: {client.error_message(answer.body)}"
        return sample_of(answer, late, error=self._lost if answer.broken else refused), answer.text


def body_of(task: Task, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Returns the body of a streamed chat completion. Fields that some servers refuse are included only if needed."""
    body: dict[str, Any] = {
        "messages": messages, "max_tokens": task.max_tokens, "temperature": task.temperature, "seed": task.seed,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if task.ignore_eos:
        body["ignore_eos"] = True
    if task.schema is not None:
        format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(task.schema)}}
        body["response_format"] = format_
    return body


def sample_of(answer: client.Response, late: float = 0.0, *, error: str = "") -> AnswerSample:
    """Converts a response to a sample. `late`: seconds between due and sent. Without usage in the response, each piece
    of text counts as one token."""
    times = [when for when, _ in answer.pieces] or [answer.seconds]
    details = answer.usage.get("prompt_tokens_details") or {}
    return AnswerSample(
        prompt_tokens=answer.usage.get("prompt_tokens", 0), cached_tokens=details.get("cached_tokens"),
        output_tokens=answer.usage.get("completion_tokens", len(answer.pieces)), ttft_s=late + times[0],
        seconds=late + times[-1], gaps_s=tuple(after - before for before, after in pairwise(times)), error=error,
    )  # fmt: skip


async def _metrics(server: client.Server) -> EngineCounters | None:
    """Returns the drafting counters; None if the server's metrics do not have all of them."""
    counted = await client.read_counters(server)
    return counted if counted and counted.engine in FULL_COUNTERS and counted.drafts is not None else None


def _difference(before: EngineCounters | None, after: EngineCounters | None) -> DraftCounts | None:
    """Returns the drafts between two readings, including those of other users of the server."""
    if before is None or after is None:
        return None
    spent = after.since(before)
    accepted = round(spent.accepted or 0)
    return DraftCounts(
        drafts=round(spent.drafts or 0),
        drafted=round(spent.drafted or 0),
        accepted=accepted,
        per_position=tuple(np.trim_zeros([round(count) for count in spent.per_position.values()], "b")),
        passes_saved=accepted if spent.saved is None else round(spent.saved),  # each accepted token saves a pass
    )
