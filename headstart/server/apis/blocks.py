"""Shared by the translated APIs: bodies as chat requests, and responses as blocks of reasoning, text and tool calls."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from headstart.server.body_reader import call_arguments, validate
from headstart.server.generation import ChoiceStep, GeneratedChoice, Generation, Json
from headstart.server.renderer import ResponseRenderer
from headstart.server.schema import Body, Common, check_refused
from headstart.text.parsers import Arguments, Content, Event, Reasoning, ToolCall

BlockKind = Literal["reasoning", "text", "call"]
Model = TypeVar("Model", bound=Common)


def as_body(body: Body, given: Mapping[str, Any], model: type[Model]) -> Model:
    """The chat or completion request of class `model` for a body of another API. `given`: the body's members under the
    names of that request. Others that the body's API does not declare (`seed`, ...) are copied. Raises BodyError."""
    set_members = {name: value for name, value in given.items() if value is not None}
    made = validate({**(body.model_extra or {}), "stream_options": None, **set_members}, model)
    made._left_out = [*body.unknown_members(), *((body.model_extra or {}).keys() & set_members.keys())]
    return made


def refuse(body: Body, unsupported: Mapping[str, tuple[tuple[Any, ...], str]], ignored: frozenset[str]) -> None:
    """Remove `ignored` and `unsupported` members of a body. `unsupported`: name -> values that change nothing, and a
    hint. Raises BodyError for an unsupported member with any other value."""
    extra = body.model_extra or {}
    check_refused(extra, unsupported)
    for name in (ignored | unsupported.keys()) & extra.keys():
        del extra[name]


@dataclass
class ResponseBlock:
    """A part of a response: reasoning, text, or a tool call."""

    kind: BlockKind
    index: int  # among the blocks of the response
    name: str = ""  # of the called function
    text: str = ""  # the call's arguments, for a call
    id: str = ""

    @property
    def arguments(self) -> Any:
        """The arguments of a call as an object."""
        return call_arguments(self.text)


@dataclass(frozen=True)
class BlockChange:
    """A block begins ("open"), grows by `text` ("more"), or is complete ("close")."""

    what: Literal["open", "more", "close"]
    block: ResponseBlock
    text: str = ""
    is_last: bool = False  # no block follows


def joined_text(blocks: Iterable[ResponseBlock], kind: BlockKind) -> str:
    """The text of all blocks of a kind."""
    return "".join(block.text for block in blocks if block.kind == kind)


class BlockBuilder:
    """Builds blocks while a response grows. Text between two blocks that is only white space is dropped."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.blocks: list[ResponseBlock] = []
        self._new_id = new_id
        self._current: ResponseBlock | None = None
        self._held: tuple[BlockKind, str] = ("text", "")  # white space that may be the beginning of a block

    def push(self, step: ChoiceStep) -> Iterator[BlockChange]:
        """Add a step; yields the resulting changes of blocks."""
        plain: list[Event] = [Content(step.text)] if step.text else []
        for event in plain if step.choice.parser is None else step.events:
            if isinstance(event, ToolCall):
                yield from self._begin("call", event.name)
            elif isinstance(event, Arguments):
                assert self._current is not None and self._current.kind == "call", "arguments follow their call"
                yield self._grow(self._current, event.text)
            else:
                yield from self._add_text("reasoning" if isinstance(event, Reasoning) else "text", event.text)

    def finish(self) -> Iterator[BlockChange]:
        """Close the last block. A response that is only white space becomes one block."""
        kind, text = self._held
        if text and not self.blocks:
            yield from self._begin(kind)
            yield self._grow(self.blocks[0], text)
        if self._current is not None:
            yield BlockChange("close", self._current, is_last=True)

    def _add_text(self, kind: BlockKind, text: str) -> Iterator[BlockChange]:
        if self._current is None or self._current.kind != kind:
            held_kind, held = self._held
            text = held + text if held_kind == kind else text
            if not text.strip():
                self._held = (kind, text)
                return
            yield from self._begin(kind)
        assert self._current is not None
        yield self._grow(self._current, text)

    def _begin(self, kind: BlockKind, name: str = "") -> Iterator[BlockChange]:
        if self._current is not None:
            yield BlockChange("close", self._current)
        self._current, self._held = ResponseBlock(kind, len(self.blocks), name, id=self._new_id()[:24]), (kind, "")
        self.blocks.append(self._current)
        yield BlockChange("open", self._current)

    def _grow(self, block: ResponseBlock, text: str) -> BlockChange:
        block.text += text
        return BlockChange("more", block, text)


class BlockRenderer(ResponseRenderer):
    """Base of the renderers that present their one choice as blocks."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._builder = BlockBuilder(generation.new_id)

    @property
    def blocks(self) -> list[ResponseBlock]:
        """The blocks so far."""
        return self._builder.blocks

    @property
    def choice(self) -> GeneratedChoice:
        """The only choice of the generation."""
        return self.generation.choices[0]

    def document(self) -> Json:
        whole = ChoiceStep(self.choice, self.choice.choice.text, self.choice.events, [], self.choice.finish_reason)
        for _ in (*self._builder.push(whole), *self._builder.finish()):
            pass
        return self.block_document()

    def render(self, step: ChoiceStep) -> list[str]:
        return [piece for change in self._builder.push(step) for piece in self.render_change(change)]

    def finish(self) -> Iterator[str]:
        for change in self._builder.finish():
            yield from self.render_change(change)
        yield from self.finish_blocks()

    @abstractmethod
    def block_document(self) -> Json:
        """The whole response, once all blocks are complete."""

    @abstractmethod
    def render_change(self, change: BlockChange) -> Iterator[str]:
        """Pieces for a change of a block."""

    @abstractmethod
    def finish_blocks(self) -> Iterator[str]:
        """Pieces after the last block."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens, counted by encoding the reasoning text again."""
        text = joined_text(self.blocks, "reasoning")
        return len(self.generation.tokenizer.encode(text, parse_special=False)) if text else 0

    @property
    def is_truncated(self) -> bool:
        """Whether the text ended at its maximum length."""
        return self.choice.finish_reason == "length"
