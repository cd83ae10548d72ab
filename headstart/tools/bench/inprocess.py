"""The Runner over engines of this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from headstart.api import LLM, Choice
from headstart.config import EngineConfig
from headstart.core import Delta, DraftStats, Progress, Request, SamplingParams, Sequence, no_progress
from headstart.engine.load import Model, load_model
from headstart.engine.make import context_length
from headstart.errors import CapacityError, UsageError
from headstart.text.grammar_spec import GrammarSpec
from headstart.text.output import TextOutput
from headstart.tools.bench.document import Speculation
from headstart.tools.bench.measure import AUTO, OFF, Load, Notify, Outcome, Sample
from headstart.tools.bench.workloads import Task


class InProcess:
    """Two engines over one loaded model: one without any drafter for mode "off", one as `config` says for the others,
    where a fixed depth is asked for request by request. Each is made when it is first needed, with as many KV blocks
    as the other. `config.max_num_seqs` bounds how many requests run at a time. Raises what `LLM` raises."""

    is_local = True

    def __init__(
        self,
        model: str | Model | None,
        config: EngineConfig,
        *,
        chunked_prefill: bool = True,
        progress: Progress = no_progress,
    ) -> None:
        self.chunked_prefill: bool | None = chunked_prefill
        self.model = model if isinstance(model, Model) else load_model(model, config, progress)
        if not chunked_prefill:  # the longest prompt is one chunk
            longest = context_length(self.model, config)
            config = replace(config, max_num_batched_tokens=max(config.max_num_batched_tokens, longest))
        first = LLM(self.model, config)
        self.kv_blocks = len(first.engine.memory.pool.blocks)
        self._config = replace(config, kv_blocks=self.kv_blocks)
        self._drafting, self._plain = first, None if first.engine.drafting.drafter else first

    @property
    def max_depth(self) -> int:
        return self._drafting.engine.drafting.max_depth

    @property
    def modes(self) -> tuple[str, ...]:
        return (OFF, AUTO) if self._drafting.engine.drafting.drafter else (OFF,)

    def is_alive(self) -> bool:
        return True

    @property
    def about(self) -> Mapping[str, Any]:
        return {"runner": "in process", **self._drafting.info, "kv_blocks": self.kv_blocks}

    def count_tokens(self, text: str) -> int:
        return len(self._drafting.tokenizer.encode(text, add_special=False))

    def check(self, tasks: Seq[Task]) -> None:
        for task in tasks:
            _Talk(self._drafting, task, None)

    def settle(self, tasks: Seq[Task], mode: str) -> None:
        """No prompt is cached at the start of a run."""
        llm, _ = self._mode(mode)
        llm.engine.memory.pool.forget()

    def run(self, tasks: Seq[Task], mode: str, load: Load, notify: Notify) -> Outcome:
        llm, depth = self._mode(mode)
        session = _Session(llm, [_Talk(llm, task, depth) for task in tasks], load, notify)
        llm.engine.reset_stats()
        started = time.perf_counter()
        try:
            session.run()
        finally:
            session.close()
        seconds = time.perf_counter() - started
        return Outcome(samples=session.samples, seconds=seconds, speculation=speculation(llm.engine.stats))

    def _mode(self, mode: str) -> tuple[LLM, int | None]:
        """The engine of a mode and the depth to ask it for. Raises UsageError."""
        if mode == OFF:
            self._plain = self._plain or LLM(self.model, replace(self._config, drafter="none"))
            return self._plain, None
        if mode != AUTO and not mode.isdigit():
            raise UsageError(f"--modes has {mode!r}, which is unknown", "modes are off, auto and depths such as 3")
        most = self._drafting.engine.drafting.max_depth
        if not most:
            raise UsageError(f"mode {mode} drafts, but the engine has no drafter", "leave --drafter none out")
        if mode != AUTO and not 1 <= int(mode) <= most:
            raise UsageError(f"--modes has depth {mode}, but drafter {self._drafting.method} goes from 1 to {most}")
        return self._drafting, None if mode == AUTO else int(mode)


def speculation(stats: DraftStats) -> Speculation:
    return Speculation(
        drafts=stats.drafts,
        drafted=stats.drafted,
        accepted=stats.accepted,
        per_position=tuple(stats.per_position),
        drafted_at=tuple(stats.drafted_at),
        passes_saved=stats.emitted - stats.passes,
    )


class _Talk:
    """A task while it runs: the messages so far, and the request that comes next."""

    def __init__(self, llm: LLM, task: Task, depth: int | None) -> None:
        self._llm, self._depth, self._left = llm, depth, list(task.turns)
        self._messages = [{"role": "system", "content": task.system}] if task.system else []
        self._params = SamplingParams(
            temperature=task.temperature, seed=task.seed, max_tokens=task.max_tokens, ignore_eos=task.ignore_eos
        )
        self._schema = GrammarSpec("json_schema", task.schema) if task.schema is not None else None
        self.next = self._request()

    def _request(self) -> Request | None:
        """Raises CapacityError when the context does not hold prompt and answer: a shorter one would be measured."""
        if not self._left:
            return None
        self._messages.append({"role": "user", "content": self._left.pop(0)})
        prompt = self._messages
        if not self._llm.has_chat_template:
            prompt = self._llm.tokenizer.encode("\n\n".join(each["content"] for each in prompt), add_special=True)  # type: ignore[assignment]
        request = self._llm.request(prompt, self._params, depth=self._depth, constraint=self._schema)
        wanted, room = len(request.prompt_ids) + self._params.max_tokens, self._llm.engine.max_length
        if wanted > room:
            raise CapacityError(
                f"a task takes {wanted} tokens ({len(request.prompt_ids)} of prompt), but the context holds {room}",
                "give shorter lengths (--input-tokens, --output-tokens, --scale)",
            )
        return request

    def answered(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})
        self.next = self._request()


@dataclass
class _Running:
    """A request in the engine. `since`: when it was sent or due."""

    talk: _Talk
    choice: Choice
    sequence: Sequence
    since: float
    stamps: list[tuple[float, Delta]] = field(default_factory=list)

    def sample(self, error: str) -> Sample:
        times = [when for when, delta in self.stamps if delta.tokens] or [self.since]
        return Sample(
            prompt_tokens=self.sequence.num_prompt,
            cached_tokens=self.sequence.num_cached,
            output_tokens=len(self.choice.tokens),
            ttft_s=times[0] - self.since,
            seconds=times[-1] - self.since,
            gaps_s=tuple(after - before for before, after in pairwise(times)),
            error=error,
        )


class _Session:
    """All tasks of a run through one engine."""

    def __init__(self, llm: LLM, talks: list[_Talk], load: Load, notify: Notify) -> None:
        self._llm, self._load, self._notify = llm, load, notify
        self._queue = deque(zip(load.arrivals(len(talks)), talks, strict=True))
        self._running: dict[str, _Running] = {}
        self._inbox: list[tuple[float, Delta]] = []
        self.samples: list[Sample] = []

    def run(self) -> None:
        started = time.perf_counter()
        while self._queue or self._running:
            self._admit(started)
            if self._running:
                self._llm.engine.step(self._stamp)
                self._take()
            else:
                time.sleep(max(0.0, started + self._queue[0][0] - time.perf_counter()))

    def close(self) -> None:
        """Leave nothing in the engine."""
        for request_id in list(self._running):
            self._llm.engine.abort(request_id)

    def _admit(self, started: float) -> None:
        most = self._load.concurrency or len(self._queue) + len(self._running)
        while self._queue and len(self._running) < most:
            due = started + self._queue[0][0]
            if due > time.perf_counter():
                return
            _, talk = self._queue.popleft()
            self._send(talk, due if self._load.rate is not None else time.perf_counter())

    def _send(self, talk: _Talk, since: float) -> None:
        request = talk.next
        assert request is not None
        (sequence,) = self._llm.engine.submit(request)
        choice = Choice(request, TextOutput(self._llm.tokenizer, request, False), since)
        self._running[request.request_id] = _Running(talk, choice, sequence, since)

    def _stamp(self, deltas: list[Delta]) -> None:
        """What a step delivers arrives now; it is read after the step."""
        now = time.perf_counter()
        self._inbox += [(now, delta) for delta in deltas]

    def _take(self) -> None:
        for now, delta in self._inbox:
            running = self._running[delta.request_id]
            running.stamps.append((now, delta))
            running.choice.push(delta)
            if delta.finish_reason is not None:
                self._finish(running, delta)
        self._inbox.clear()

    def _finish(self, running: _Running, delta: Delta) -> None:
        del self._running[delta.request_id]
        self.samples.append(running.sample(delta.error))
        self._notify()
        if delta.error:
            return
        try:
            running.talk.answered(running.choice.text)
        except CapacityError as error:  # the conversation has become too long
            self.samples.append(Sample(error=error.message))
            return
        if running.talk.next is not None:
            self._send(running.talk, time.perf_counter())
