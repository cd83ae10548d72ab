"""Tokens of one choice to its text: complete characters only, cut exactly before a stop string.

Text is made token by token, so it does not depend on how many tokens a pass commits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headstart.core import Delta, FinishReason, Request
from headstart.text.detokenizer import Detokenizer, StopChecker
from headstart.text.tokenizer import Tokenizer


@dataclass
class Piece:
    """What one delta adds. `finish_reason` may be `stop` while the engine still runs the choice: abort it then."""

    text: str = ""
    num_tokens: int = 0  # tokens of the delta that count; fewer than it has when a stop string cut it
    finish_reason: FinishReason | None = None


@dataclass
class TextOutput:
    """The growing text of one choice."""

    tokenizer: Tokenizer
    request: Request
    continues: bool = False  # the output goes on in the middle of a text (raw prompts), so its first space counts
    skip_special: bool = True  # False: a parser of tool calls wants to see their marks
    keeps_stop: bool = False  # the text ends with its stop string or token, not before it
    num_tokens: int = 0
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopChecker = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, skip_special=self.skip_special, continues=self.continues)
        self._stops = StopChecker(self.request.params.stop, keeps=self.keeps_stop)

    @property
    def stop_string(self) -> str | None:
        """The one that has ended the text."""
        return self._stops.found

    def push(self, delta: Delta) -> Piece:
        """Add the tokens of a delta; on the last one also what was held back."""
        piece = Piece()
        for token in delta.tokens:
            piece.num_tokens += 1
            self.num_tokens += 1
            if self._push_token(token, piece):
                piece.finish_reason = "stop"
                return piece
        piece.finish_reason = delta.finish_reason
        if delta.finish_reason is not None:
            emitted, stopped = self._stops.push(self._detokenizer.flush())
            piece.text += emitted if stopped else emitted + self._stops.flush()
            piece.finish_reason = "stop" if stopped else delta.finish_reason
        return piece

    def _push_token(self, token: int, piece: Piece) -> bool:
        """True when this token completes a stop string."""
        if token in self.request.stop_ids and not self.keeps_stop:
            return False  # ends the text and is no part of it
        may_stop = self.num_tokens > self.request.params.min_tokens
        emitted, stopped = self._stops.push(self._detokenizer.push(token), may_stop=may_stop)
        piece.text += emitted
        return stopped
