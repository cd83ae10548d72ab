"""What all translations share: a body as a chat, and one answer as blocks of reasoning, text and calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from headstart.server.documents import Answer, Step
from headstart.server.intake import checked
from headstart.server.replies import Reply
from headstart.server.schema import Body, Common
from headstart.text.parsers import Arguments, Content, Event, Reasoning, ToolCall

Kind = Literal["reasoning", "text", "call"]
Model = TypeVar("Model", bound=Common)


def as_body(body: Body, given: Mapping[str, Any], model: type[Model]) -> Model:
    """The chat (or raw completion) that a body comes to: `given` has what it says in its API's words, and members that
    its API does not have are taken as those of a chat (`speculation`, `seed`, `guided_json`, ...). Raises BodyError."""
    said = {name: value for name, value in given.items() if value is not None}
    return checked({**(body.model_extra or {}), "stream_options": None, **said}, model)


@dataclass
class Block:
    """A part of an answer; those of one answer are numbered from 0. `id`: of random hexadecimal digits."""

    kind: Kind
    index: int
    name: str = ""  # of a call
    text: str = ""  # a call's arguments
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])

    @property
    def arguments(self) -> Any:
        """Of a call: an object. What breaks off in the middle stands as text under a name that says so."""
        try:
            value = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {"INVALID_JSON": self.text}


@dataclass(frozen=True)
class Change:
    """A block begins, grows by `text`, or is complete; `is_last`: none follows it."""

    what: Literal["open", "more", "close"]
    block: Block
    text: str = ""
    is_last: bool = False


class Blocks:
    """Blocks one after the other while an answer grows. White space that stands alone between two of them is none."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._current: Block | None = None
        self._held: tuple[Kind, str] = ("text", "")  # white space that may be the beginning of a block

    def push(self, step: Step) -> Iterator[Change]:
        """What a step adds."""
        plain: list[Event] = [Content(step.text)] if step.text else []
        for event in plain if step.answer.parser is None else step.events:
            yield from self._event(event)

    def finish(self) -> Iterator[Change]:
        """Of a whole answer; one of white space alone is that."""
        kind, text = self._held
        if text and not self.all:
            yield from self._more(self._open(kind), text, opened=True)
        if self._current is not None:
            yield Change("close", self._current, is_last=True)

    def of(self, kind: Kind) -> str:
        """All text of one kind."""
        return "".join(block.text for block in self.all if block.kind == kind)

    def _event(self, event: Event) -> Iterator[Change]:
        if isinstance(event, ToolCall):
            yield from self._begin("call", event.name)
        elif isinstance(event, Arguments):
            assert self._current is not None and self._current.kind == "call", "arguments follow their call"
            yield from self._more(self._current, event.text)
        else:
            yield from self._said("reasoning" if isinstance(event, Reasoning) else "text", event.text)

    def _said(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._current is None or self._current.kind != kind:
            before, held = self._held
            text = held + text if before == kind else text
            if not text.strip():
                self._held = (kind, text)
                return
            yield from self._begin(kind)
        assert self._current is not None
        yield from self._more(self._current, text)

    def _begin(self, kind: Kind, name: str = "") -> Iterator[Change]:
        if self._current is not None:
            yield Change("close", self._current)
        yield Change("open", self._open(kind, name))

    def _open(self, kind: Kind, name: str = "") -> Block:
        self._current, self._held = Block(kind, len(self.all), name), (kind, "")
        self.all.append(self._current)
        return self._current

    def _more(self, block: Block, text: str, *, opened: bool = False) -> Iterator[Change]:
        if opened:
            yield Change("open", block)
        block.text += text
        yield Change("more", block, text)


class Told:
    """The one choice of a reply in blocks: what each translation begins with."""

    def __init__(self, reply: Reply) -> None:
        self.reply, self.blocks = reply, Blocks()

    @property
    def answer(self) -> Answer:
        return self.reply.answers[0]

    async def changes(self) -> AsyncIterator[Change]:
        """As the engine goes on; to be iterated once."""
        async for step in self.reply.steps():
            for change in self.blocks.push(step):
                yield change
        for change in self.blocks.finish():
            yield change

    async def gather(self) -> None:
        """The same, all of it."""
        async for _ in self.changes():
            pass

    @property
    def num_thought(self) -> int:
        """Tokens of the reasoning's text."""
        text = self.blocks.of("reasoning")
        return len(self.reply.tokenizer.encode(text, parse_special=False)) if text else 0

    @property
    def was_cut(self) -> bool:
        """Did the text end for want of room?"""
        return self.answer.finish_reason == "length"
