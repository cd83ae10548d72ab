"""InProcessTarget: a BenchTarget for engines in this process."""

import time
from collections import deque
from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from typing import Any

from headstart.api import LLM, Choice, Session
from headstart.config import EngineConfig
from headstart.core import DraftStats, Progress, Request, SamplingParams, no_progress
from headstart.engine.build import select_drafter
from headstart.engine.load import Model, load_model
from headstart.errors import CapacityError, UsageError
from headstart.text.grammar_spec import GrammarSpec
from headstart.tools.bench.document import DraftCounts
from headstart.tools.bench.measure import AUTO, OFF, AnswerSample, Notify, RequestLoad, RunOutcome, check_mode
from headstart.tools.bench.workloads import Task


class InProcessTarget:
    """Two engines that share one loaded model and have equally many KV blocks: one without a drafter for mode "off",
    one with `config` for all other modes. At most `config.max_num_seqs` requests run at a time. Raises what `LLM`
    raises."""

    is_local = True

    def __init__(
        self, model: str | Model | None, config: EngineConfig, *, chunked_prefill: bool = True,
        progress: Progress = no_progress,
    ) -> None:  # fmt: skip
        self.chunked_prefill: bool | None = chunked_prefill
        self.model = model if isinstance(model, Model) else load_model(model, config, progress)
        if not chunked_prefill:
            config = replace(config, enable_chunked_prefill=False)
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
    def description(self) -> Mapping[str, Any]:
        _, name = select_drafter(self.model, self._config)
        lookup = {"lookup": True} if name == "mixed" else {}  # `info` names only the head of a mixed drafter
        return {"runner": "in process", **self._drafting.info, **lookup, "kv_blocks": self.kv_blocks}

    def count_tokens(self, text: str) -> int:
        return len(self._drafting.tokenizer.encode(text, add_special=False))

    def check(self, tasks: Seq[Task]) -> None:
        for task in tasks:
            _Conversation(self._drafting, task, None)

    def settle(self, tasks: Seq[Task], mode: str) -> None:
        """Empties the prefix cache and the history that lookup drafts from."""
        llm, _ = self._mode(mode)
        llm.engine.memory.pool.clear()
        llm.engine.drafting.clear()

    def run(self, tasks: Seq[Task], mode: str, load: RequestLoad, notify: Notify) -> RunOutcome:
        llm, depth = self._mode(mode)
        with llm.session() as session:
            work = _InProcessRun(session, [_Conversation(llm, task, depth) for task in tasks], load, notify)
            llm.engine.reset_stats()
            started = time.perf_counter()
            work.run()
            seconds = time.perf_counter() - started
        return RunOutcome(samples=work.samples, seconds=seconds, speculation=speculation(llm.engine.stats))

    def _mode(self, mode: str) -> tuple[LLM, int | None]:
        """Returns (engine, depth of requests or None) for a mode. Raises UsageError for an impossible mode."""
        if mode == OFF:
            self._plain = self._plain or LLM(self.model, replace(self._config, drafter="none"))
            return self._plain, None
        check_mode(mode)
        limit = self.max_depth
        if not limit:
            raise UsageError(f"mode {mode} drafts, but the engine has no drafter", "leave --drafter none out")
        if mode != AUTO and not 1 <= int(mode) <= limit:
            raise UsageError(f"--modes has depth {mode}, but drafter {self._drafting.method} goes from 1 to {limit}")
        return self._drafting, None if mode == AUTO else int(mode)


def speculation(stats: DraftStats) -> DraftCounts:
    return DraftCounts(
        drafts=stats.drafts, drafted=stats.drafted, accepted=stats.accepted, per_position=tuple(stats.per_position),
        drafted_at=tuple(stats.drafted_at), passes_saved=stats.emitted - stats.passes,
        sources=dict(stats.sources),
    )  # fmt: skip


class _Conversation:
    def __init__(self, llm: LLM, task: Task, depth: int | None) -> None:
        self._llm, self._depth, self._left = llm, depth, list(task.turns)
        self._messages = [{"role": "system", "content": task.system}] if task.system else []
        self._params = SamplingParams(
            temperature=task.temperature, seed=task.seed, max_tokens=task.max_tokens, ignore_eos=task.ignore_eos
        )
        self._schema = GrammarSpec("json_schema", task.schema) if task.schema is not None else None
        self.next = self._request()

    def _request(self) -> Request | None:
        """Returns the next turn's request; None after the last. Raises CapacityError if the context is too short."""
        if not self._left:
            return None
        self._messages.append({"role": "user", "content": self._left.pop(0)})
        prompt = self._messages
        if not self._llm.has_chat_template:
            prompt = self._llm.tokenizer.encode("\n\n".join(each["content"] for each in prompt), add_special=True)  # type: ignore[assignment]
        request = self._llm.request(prompt, self._params, depth=self._depth, constraint=self._schema)
        needed, limit = len(request.prompt_ids) + self._params.max_tokens, self._llm.engine.max_length
        if needed > limit:
            raise CapacityError(
                f"a task takes {needed} tokens ({len(request.prompt_ids)} of prompt), but the context holds {limit}",
                "give shorter lengths (--input-tokens, --output-tokens, --scale)",
            )
        return request

    def answered(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})
        self.next = self._request()


def _sample(choice: Choice) -> AnswerSample:
    sequence, times = choice.sequence, choice.arrivals or [choice.started]
    assert sequence is not None
    return AnswerSample(
        prompt_tokens=sequence.num_prompt, cached_tokens=sequence.num_cached, output_tokens=len(choice.tokens),
        ttft_s=times[0] - choice.started, seconds=times[-1] - choice.started,
        gaps_s=tuple(after - before for before, after in pairwise(times)), error=choice.error,
    )  # fmt: skip


class _InProcessRun:
    def __init__(self, session: Session, conversations: list[_Conversation], load: RequestLoad, notify: Notify) -> None:
        self._session, self._load, self._notify = session, load, notify
        self._queue = deque(zip(load.arrivals(len(conversations)), conversations, strict=True))
        self._running: dict[str, _Conversation] = {}
        self.samples: list[AnswerSample] = []

    def run(self) -> None:
        started = time.perf_counter()
        while self._queue or self._running:
            self._admit(started)
            if not self._running:
                time.sleep(max(0.0, started + self._queue[0][0] - time.perf_counter()))
                continue
            for choice, piece in self._session.step():
                if piece.finish_reason is not None:
                    self._finish(choice)

    def _admit(self, started: float) -> None:
        most = self._load.concurrency or len(self._queue) + len(self._running)
        while self._queue and len(self._running) < most:
            due = started + self._queue[0][0]
            if due > time.perf_counter():
                return
            _, conversation = self._queue.popleft()
            self._send(conversation, due if self._load.rate is not None else None)

    def _send(self, conversation: _Conversation, since: float | None = None) -> None:
        request = conversation.next
        assert request is not None
        self._session.submit(request, since)
        self._running[request.request_id] = conversation

    def _finish(self, choice: Choice) -> None:
        conversation = self._running.pop(choice.request.request_id)
        self.samples.append(_sample(choice))
        self._notify()
        if choice.error:
            return
        try:
            conversation.answered(choice.text)
        except CapacityError as error:  # the next turn does not fit the context
            self.samples.append(AnswerSample(error=error.message))
            return
        if conversation.next is not None:
            self._send(conversation)
