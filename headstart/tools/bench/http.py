"""The System over an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from typing import Any

from headstart.errors import UsageError
from headstart.tools.bench.document import DraftCounts
from headstart.tools.bench.measure import AUTO, OFF, SERVER, Load, Notify, Outcome, Sample
from headstart.tools.bench.workloads import Task
from headstart.tools.client import Response, Server, counts, message, models, post, reason
from headstart.tools.engine_metrics import Counts

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
OWN = "headstart"
"""Owner of the models of headstart's servers, which take the request field `speculation`."""
CHARACTERS_PER_TOKEN = 4
"""Of English, about; for servers that do not count tokens."""
WITH_VLLM_NAMES = ("headstart", "vllm")
"""Engines whose counters say everything that a cell holds."""


class OverHttp:
    """A server, and for mode "off" perhaps a second one that has no drafter. Raises UsageError when one of them does
    not answer as such a server does.

    Prompts are sent once before each run, for one token: a server's prefix cache is then equally warm in all modes.
    Start it without one to measure prefill. headstart's own gets a salt for each run, too: what it has answered before
    is no draft."""

    chunked_prefill: bool | None = None

    def __init__(self, server: Server, off: Server | None = None, *, model: str | None = None) -> None:
        self._server, self._off = server, off
        known = {each: models(each) for each in (server, off) if each is not None}
        self._is_own = known[server][0].get("owned_by") == OWN
        self._synthetic = known[server][0].get("synthetic_acceptance") if self._is_own else None
        self._names = {each: _choose(each, listed, model) for each, listed in known.items()}
        self.is_local, self._salt = server.is_local, ""
        tried = {"model": self._names[server], "prompt": "one two"}
        self._counts = asyncio.run(_status(server, TOKENIZE, tried)) == 200

    @property
    def modes(self) -> tuple[str, ...]:
        """What can be asked for by default."""
        if self._is_own:
            return (OFF, AUTO)
        return (OFF, SERVER) if self._off else (SERVER,)

    @property
    def about(self) -> Mapping[str, Any]:
        return {
            "runner": "HTTP",
            "url": str(self._server),
            "off_url": str(self._off) if self._off else None,
            "model": self._names[self._server],
            "is_headstart": self._is_own,
            **({"synthetic_acceptance": self._synthetic} if self._synthetic else {}),
        }

    def count_tokens(self, text: str) -> int:
        if not self._counts:
            return max(1, len(text) // CHARACTERS_PER_TOKEN)
        body = {"model": self._names[self._server], "prompt": text, "add_special_tokens": False}
        try:
            return int(json.loads(asyncio.run(post(self._server, TOKENIZE, body)).body)["count"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self._server} no longer counts tokens: {reason(error)}", "is it running?") from None

    def check(self, tasks: Seq[Task]) -> None:
        """Only the server can tell."""

    def settle(self, tasks: Seq[Task], mode: str) -> None:
        self._salt = secrets.token_hex(8)
        short = [replace(task, turns=task.turns[:1], max_tokens=1) for task in tasks]
        self.run(short, mode, Load(concurrency=8), lambda: None)

    def run(self, tasks: Seq[Task], mode: str, load: Load, notify: Notify) -> Outcome:
        server, extra = self._server_of(mode)
        if self._is_own and server == self._server:
            extra = {**extra, "cache_salt": self._salt or None}
        extra = {"model": self._names[server], **extra}
        return asyncio.run(_Session(server, extra, notify).run(tasks, load))

    def is_alive(self) -> bool:
        """Do all servers still answer?"""
        try:
            for server in self._names:
                models(server)
        except UsageError:
            return False
        return True

    def _server_of(self, mode: str) -> tuple[Server, dict[str, Any]]:
        """Where a mode is measured, and the fields that ask for it. Raises UsageError."""
        if mode == OFF and self._off is not None:
            return self._off, {}
        if not self._is_own:
            if mode == SERVER:
                return self._server, {}
            hint = "leave --modes out; --off-url names a second server that does not draft"
            raise UsageError(f"--modes has {mode!r}, but {self._server} is not headstart's: it cannot be told", hint)
        if mode in (OFF, AUTO):
            return self._server, {"speculation": {"mode": mode}}
        if not mode.isdigit() or int(mode) < 1:
            raise UsageError(f"--modes has {mode!r}, which is unknown", "modes are off, auto and depths such as 3")
        return self._server, {"speculation": {"mode": AUTO, "depth": int(mode)}}


class _Session:
    """The tasks of a run. After the connection has broken nothing more is sent."""

    def __init__(self, server: Server, extra: Mapping[str, Any], notify: Notify) -> None:
        self._server, self._extra, self._notify = server, extra, notify
        self._samples: list[Sample] = []
        self._lost = ""

    async def run(self, tasks: Seq[Task], load: Load) -> Outcome:
        before = await _metrics(self._server)
        started = time.perf_counter()
        if load.rate is None:
            left = iter(tasks)
            await asyncio.gather(*(self._client(left) for _ in range(load.concurrency or 1)))
        else:
            due = [started + seconds for seconds in load.arrivals(len(tasks))]
            await asyncio.gather(*map(self._later, tasks, due))
        seconds = time.perf_counter() - started
        after = await _metrics(self._server) if not self._lost else None
        spent = _difference(before, after)
        return Outcome(samples=self._samples, seconds=seconds, speculation=spent, lost=self._lost)

    async def _client(self, left: Iterator[Task]) -> None:
        for task in left:
            await self._talk(task)

    async def _later(self, task: Task, due: float) -> None:
        await asyncio.sleep(due - time.perf_counter())
        await self._talk(task, due)

    async def _talk(self, task: Task, due: float | None = None) -> None:
        """All turns of a task, until one fails."""
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

    async def _ask(self, task: Task, messages: list[dict[str, str]], due: float | None) -> tuple[Sample, str]:
        late = 0.0 if due is None else max(0.0, time.perf_counter() - due)
        try:
            answer = await post(self._server, CHAT, {**body_of(task, messages), **self._extra})
        except OSError as error:
            self._lost = self._lost or f"{self._server}: {reason(error)}"
            return Sample(error=self._lost), ""
        except ValueError as error:
            return Sample(error=f"the answer cannot be read: {error}"), ""
        if answer.broken:
            self._lost = self._lost or f"{self._server} hung up in the middle of an answer"
            return sample_of(answer, late, error=self._lost), ""
        refused = "" if answer.status == 200 else f"HTTP {answer.status}: {message(answer.body)}"
        return sample_of(answer, late, error=refused), answer.text


def body_of(task: Task, messages: list[dict[str, str]]) -> dict[str, Any]:
    """A streamed chat completion; fields that not every server knows only where they are needed."""
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


def sample_of(answer: Response, late: float = 0.0, *, error: str = "") -> Sample:
    """`late`: seconds between when it was due and when it was sent. A server that tells no usage is taken to send one
    token per piece of text."""
    times = [when for when, _ in answer.pieces] or [answer.seconds]
    details = answer.usage.get("prompt_tokens_details") or {}
    return Sample(
        prompt_tokens=answer.usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens"),
        output_tokens=answer.usage.get("completion_tokens", len(answer.pieces)),
        ttft_s=late + times[0],
        seconds=late + times[-1],
        gaps_s=tuple(after - before for before, after in pairwise(times)),
        error=error,
    )


def _choose(server: Server, models: list[dict[str, Any]], name: str | None) -> str:
    names = [str(each["id"]) for each in models]
    if name is not None and name not in names:
        raise UsageError(f"{server} has no model {name!r}", f"it has {', '.join(names[:10])}")
    return name or names[0]


async def _status(server: Server, path: str, body: dict[str, Any]) -> int:
    try:
        return (await post(server, path, body)).status
    except (OSError, ValueError):
        return 0


async def _metrics(server: Server) -> Counts | None:
    """None for a server without metrics of speculation."""
    counted = await counts(server)
    return counted if counted and counted.engine in WITH_VLLM_NAMES and counted.drafts is not None else None


def _difference(before: Counts | None, after: Counts | None) -> DraftCounts | None:
    """What was drafted in between, by whoever used the server."""
    if before is None or after is None:
        return None
    spent = after.since(before)
    hits = [round(count) for count in spent.per_position.values()]
    while hits and not hits[-1]:
        hits.pop()
    accepted = round(spent.accepted or 0)
    return DraftCounts(
        drafts=round(spent.drafts or 0),
        drafted=round(spent.drafted or 0),
        accepted=accepted,
        per_position=tuple(hits),
        passes_saved=accepted if spent.saved is None else round(spent.saved),  # each accepted token saves a pass
    )
