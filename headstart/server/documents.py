"""Choices as OpenAI's objects: whole, and in pieces of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Self

from headstart.api import Choice, Completion
from headstart.core import TokenLogprob
from headstart.server.passes import Passes
from headstart.server.schema import ChatRequest, Common, CompletionRequest
from headstart.text.parsers import Content, Event, Parser, Reasoning, ToolCall
from headstart.text.tokenizer import Tokenizer

Json = dict[str, Any]
SLICE = 64
"""Elements that are written as JSON at once; other threads run in between."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a body wants to be told. `logprobs`: of generated tokens. `passes`: what drafting did, in chunks.
    `may_be_kept`: by `serve --record`."""

    is_chat: bool
    echo: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    reasoning: bool = True
    usage: bool = False
    continuous_usage: bool = False
    passes: bool = False
    may_be_kept: bool = True

    @classmethod
    def of(cls, body: Common) -> Self:
        """All that is needed of a body once it is prepared; the rest of it can be freed."""
        chat = body if isinstance(body, ChatRequest) else None
        text = body if isinstance(body, CompletionRequest) else None
        options = body.stream_options
        return cls(
            is_chat=chat is not None,
            echo=text is not None and bool(text.echo),
            logprobs=(chat is not None and bool(chat.logprobs)) or (text is not None and text.logprobs is not None),
            prompt_logprobs=body.prompt_logprobs is not None,
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            reasoning=chat is not None and chat.include_reasoning,
            usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.include_usage and options.continuous_usage_stats,
            passes=body.speculation is not None and body.speculation.events,
            may_be_kept=body.store is not False,
        )

    @property
    def of_prompt(self) -> bool:
        """Are logprobs of the prompt's tokens told?"""
        return self.prompt_logprobs or (self.echo and self.logprobs)


@dataclass(eq=False)
class Answer:
    """One choice of one prompt while it grows. `index` numbers all choices of the HTTP request; `first`: of the same
    prompt, which has its logprobs."""

    index: int
    prompt: str  # echoed
    choice: Choice
    parser: Parser | None
    first: Answer | None = None
    passes: Passes | None = None  # where they are told
    events: list[Event] = field(default_factory=list)
    num_logprobs: int = 0  # already sent
    begun: bool = False
    offset: int = 0  # characters of tokens whose logprobs were sent
    call_ids: list[str] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def finish_reason(self) -> str | None:
        if self.completion is None:
            return None
        calls = any(isinstance(event, ToolCall) for event in self.events)
        return "tool_calls" if calls and self.completion.finish_reason == "stop" else self.completion.finish_reason

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        return (self.first or self).choice.prompt_logprobs

    @property
    def prompt_is_known(self) -> bool:
        """Has the engine gone through the prompt?"""
        return len(self.prompt_logprobs) >= len(self.choice.request.prompt_ids) - 1

    def new_logprobs(self) -> list[TokenLogprob]:
        new = self.choice.logprobs[self.num_logprobs :]
        self.num_logprobs = len(self.choice.logprobs)
        return new


@dataclass
class Step:
    """What one delta adds to an answer, or several do; `finish_reason` with the last one."""

    answer: Answer
    text: str
    events: list[Event]
    token_ids: list[int]
    finish_reason: str | None
    passes: list[Json] = field(default_factory=list)

    def join(self, later: Step) -> None:
        self.text += later.text
        self.events += later.events
        self.token_ids += later.token_ids
        self.passes += later.passes
        self.finish_reason = later.finish_reason


class Documents:
    """Makes them, as they were asked for."""

    def __init__(self, tokenizer: Tokenizer, asked: Asked) -> None:
        self._tokenizer, self._asked = tokenizer, asked
        self._prompts: dict[int, Written] = {}  # prompt logprobs, by the index of the first choice

    # Whole choices.

    def whole(self, answer: Answer) -> Json:
        asked, choice = self._asked, answer.choice
        content: Json
        if asked.is_chat:
            message = {"role": "assistant", "content": choice.text}
            content = {"message": self._parsed(answer) if answer.parser is not None else message}
            logprobs = {"content": self._chat_logprobs(choice.logprobs)} if asked.logprobs else None
        else:
            content = {"text": answer.prompt + choice.text}
            entries = [*self._echoed(answer), *choice.logprobs]
            logprobs = self._text_logprobs(answer, entries) if asked.logprobs else None
        document = _choice(answer, content, logprobs, answer.finish_reason)
        return document | self._ids(answer, choice.tokens, first=True)

    def _echoed(self, answer: Answer) -> list[TokenLogprob | None]:
        """Logprobs of the prompt's tokens; the first has none."""
        return [None, *answer.prompt_logprobs] if self._asked.echo and self._asked.logprobs else []

    def _parsed(self, answer: Answer) -> Json:
        content, reasoning, calls = "", "", list[Json]()
        for event in answer.events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, Reasoning):
                reasoning += event.text
            elif isinstance(event, ToolCall):
                calls.append(_call(answer, event))
            else:
                calls[event.index]["function"]["arguments"] += event.text
        message: Json = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning and self._asked.reasoning:
            message |= _thought(reasoning)
        if calls:
            message["tool_calls"] = calls
        return message

    # Pieces of choices.

    def pieces(self, step: Step) -> list[Json]:
        """Choices of a stream's chunks."""
        return self._message_deltas(step) if self._asked.is_chat else self._text_deltas(step)

    def _text_deltas(self, step: Step) -> list[Json]:
        answer, text, begins = step.answer, step.text, not step.answer.begun
        logprobs: list[TokenLogprob | None] = [*answer.new_logprobs()]
        if begins:
            answer.begun = True
            text = answer.prompt + text
            logprobs = [*self._echoed(answer), *logprobs]
        carried = self._carried(step, first=begins)
        if not (text or logprobs or step.finish_reason or any(carried.values())):
            return []
        shown = self._text_logprobs(answer, logprobs) if self._asked.logprobs else None
        return [_choice(answer, {"text": text}, shown, step.finish_reason) | carried]

    def _message_deltas(self, step: Step) -> list[Json]:
        answer, begins = step.answer, not step.answer.begun
        deltas: list[Json] = []
        if begins:
            answer.begun = True
            deltas.append({"role": "assistant", "content": ""})
        if answer.parser is None and step.text:
            deltas.append({"content": step.text})
        deltas += [each for event in step.events if (each := self._event(answer, event))]
        logprobs = answer.new_logprobs() if self._asked.logprobs else []
        carried = self._carried(step, first=begins)
        carries = step.finish_reason or logprobs or any(carried.values())
        if carries and (not deltas or "role" in deltas[-1]):  # what ends or counts goes with text, not with the role
            deltas.append({})
        choices = [_choice(answer, {"delta": delta}, None, None) for delta in deltas]
        if choices:
            last = choices[-1]
            last["finish_reason"] = step.finish_reason
            if logprobs:
                last["logprobs"] = {"content": self._chat_logprobs(logprobs)}
            last |= carried
        return choices

    def _event(self, answer: Answer, event: Event) -> Json | None:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return _thought(event.text) if self._asked.reasoning else None
        if isinstance(event, ToolCall):
            return {"tool_calls": [{"index": event.index, **_call(answer, event)}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    # Details.

    def _carried(self, step: Step, *, first: bool) -> Json:
        document = self._ids(step.answer, step.token_ids, first=first)
        return document | {"speculation": step.passes} if step.passes else document

    def _ids(self, answer: Answer, token_ids: Seq[int], *, first: bool) -> Json:
        document: Json = {}
        if self._asked.token_ids:
            document["token_ids"] = list(token_ids)
        if self._asked.token_ids and first:
            document["prompt_token_ids"] = list(answer.choice.request.prompt_ids)
        if self._asked.prompt_logprobs and first:
            document["prompt_logprobs"] = self._of_prompt(answer.first or answer)
        return document

    def _of_prompt(self, answer: Answer) -> Written:
        """Made once for all choices of a prompt."""
        if answer.index not in self._prompts:
            pieces = (_text(self._prompt_logprob(entry)) for entry in answer.prompt_logprobs)
            self._prompts[answer.index] = Written("[" + ",".join(["null", *pieces]) + "]")
        return self._prompts[answer.index]

    def _prompt_logprob(self, entry: TokenLogprob) -> Json:
        """vLLM's shape: token id -> its logprob and text, the token itself first."""
        pairs = dict([(entry.token, entry.logprob), *entry.top])
        text = self._tokenizer.token_text
        return {str(token): {"logprob": value, "decoded_token": text(token)} for token, value in pairs.items()}

    def _chat_logprobs(self, entries: Seq[TokenLogprob]) -> list[Json]:
        return [
            {**self._token(each.token, each.logprob),
             "top_logprobs": [self._token(token, value) for token, value in each.top]}
            for each in entries
        ]  # fmt: skip

    def _token(self, token: int, logprob: float) -> Json:
        return {"token": self._shown(token), "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token))}

    def _text_logprobs(self, answer: Answer, entries: Seq[TokenLogprob | None]) -> Json:
        """None stands for the prompt's first token, which has no logprob. Offsets go on from chunk to chunk."""
        tokens, values, tops, offsets = list[str](), list[float | None](), list[Json | None](), list[int]()
        for entry in entries:
            token = entry.token if entry else answer.choice.request.prompt_ids[0]
            tokens.append(self._shown(token))
            offsets.append(answer.offset)
            answer.offset += len(self._tokenizer.token_text(token))
            values.append(entry.logprob if entry else None)
            tops.append(self._top(entry) if entry else None)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprob) -> Json:
        """The token itself is among them, whether or not it is one of the most likely."""
        top = {self._shown(token): value for token, value in reversed(entry.top)}  # of equal texts the likeliest
        return {**dict(reversed(top.items())), self._shown(entry.token): entry.logprob}

    def _shown(self, token: int) -> str:
        return f"token_id:{token}" if self._asked.tokens_as_ids else self._tokenizer.token_text(token)


def _choice(answer: Answer, content: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": answer.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _call(answer: Answer, event: ToolCall) -> Json:
    if event.index == len(answer.call_ids):
        answer.call_ids.append(f"call_{uuid.uuid4().hex[:24]}")
    function = {"name": event.name, "arguments": ""}
    return {"id": answer.call_ids[event.index], "type": "function", "function": function}


def _thought(text: str) -> Json:
    """Under both names that clients read: DeepSeek's, and the newer one of vLLM and OpenRouter."""
    return {"reasoning_content": text, "reasoning": text}


class Written(str):
    """JSON text that stands for its value."""

    __slots__ = ()


def dumped(value: Any) -> str:
    """JSON, as one document's text."""
    return "".join(_dumped(value))


def _dumped(value: Any) -> Iterator[str]:
    """In small pieces: the library lets nobody run while it writes one."""
    if isinstance(value, Written):
        yield value
    elif isinstance(value, dict) and any(isinstance(each, dict | list | Written) for each in value.values()):
        for number, (name, each) in enumerate(value.items()):
            yield ("," if number else "{") + _text(name) + ":"
            yield from _dumped(each)
        yield "}"
    elif isinstance(value, list) and len(value) > SLICE:
        for start in range(0, len(value), SLICE):
            yield ("," if start else "[") + _text(value[start : start + SLICE])[1:-1]
        yield "]"
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for number, each in enumerate(value):
            yield "," if number else "["
            yield from _dumped(each)
        yield "]"
    else:
        yield _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
