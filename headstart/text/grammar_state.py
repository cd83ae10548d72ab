"""The state of one text in a grammar: masks of allowed tokens, advance and rollback.

Masks are uint32 words as in SamplingRows.allowed: bit v % 32 of word v // 32 is token v. Where the grammar forces the
text, a mask allows only the token that the tokenizer itself would use for it.
"""

import time
from collections.abc import Callable, Sequence as Seq
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from headstart.core import Mask
from headstart.text.grammar_spec import one_line

FORCED_LIMIT = 16
CACHED_MASKS = 32  # masks of the latest tokens that are kept; at least as many as a draft has tokens
LEXER_ERROR = "lexer error"  # start of llguidance's message when the shared lexer has failed
RESTARTS, RESTART_SECONDS = 3, 1.0
"""How often a text is read again with a new lexer after its lexer has failed, and the maximum seconds of each time."""
DEAD_END = "it demands an end-of-text token where the text cannot end, or ids that the model does not have"
LEXER_GROWTH = 100 * 2**20
"""Bytes that a lexer may grow by in a second of computing masks (at most 70 MB were measured)."""


@dataclass
class SharedLexer:
    """Statistics of llguidance's lexer, which all states of one compiled grammar share. It grows with each mask."""

    compiled_bytes: int  # memory after compiling
    seconds: float = 0.0  # time spent on computing masks
    compile_seconds: float = 0.0
    has_failed: bool = False  # it has reached a limit of llguidance, for all states that share it

    @property
    def num_bytes(self) -> int:
        """Estimated upper bound of the lexer's memory."""
        return self.compiled_bytes + int(self.seconds * LEXER_GROWTH)


class GrammarState:
    """The state of one sequence in a grammar (a core.Constraint). Not thread-safe."""

    def __init__(
        self, matcher: Any, lexer: SharedLexer, end_ids: frozenset[int], with_text: Mask, ends: Mask, special: Mask,
        restart: "Callable[[SharedLexer], GrammarState | None]" = lambda _: None,
    ) -> None:  # fmt: skip
        """restart: returns a start state with another lexer than the given one, or None if compiling takes too long."""
        self.lexer = lexer
        self._restart, self._restarts_left = restart, RESTARTS
        self._start = matcher  # never advanced
        self._matcher = matcher.deep_copy()
        self._end_ids = end_ids
        self._with_text = with_text  # tokens with text, without end-of-text ids
        self._ends = ends  # end-of-text ids
        self._special = special  # special tokens with text
        self._dead_end_at: int | None = None  # number of tokens after which the mask was empty
        self._tokens: list[int] = []  # tokens that the matcher has consumed
        self._num_ends = 0  # end-of-text ids after `_tokens`; the matcher does not get them
        self._masks: dict[int, Mask] = {}  # number of tokens before -> mask
        self._undone: list[int] = []  # tokens of the latest look-ahead, after `_tokens`; their masks are kept

    def mask(self) -> Mask:
        """uint32 [ceil(vocab_size / 32)]: the allowed next tokens. End-of-text ids are allowed exactly where the text
        may end (`accepting`), and are the only ones once it is `done`. All zero after an `error`, and at the end of a
        text without end-of-text ids."""
        if not self._num_ends and not self._matcher.is_stopped():
            cached = self._masks.get(len(self._tokens))
            if cached is not None and not self._matcher.is_error():
                return cached
            bits = self._compute_mask()
            while self._matcher.is_error() and self._restart_lexer():
                bits = self._compute_mask()
            if not self._matcher.is_error():
                # a grammar may name an end-of-text token, which is allowed only where the text may end
                may_end = self._matcher.is_accepting()
                allowed: Mask = bits & (self._with_text | self._ends if may_end else self._with_text)
                if (allowed & self._special).any():
                    allowed &= ~self._refused(allowed & self._special)
                self._dead_end_at = None if allowed.any() or may_end else len(self._tokens)
                allowed.flags.writeable = False
                if self._dead_end_at is None:
                    self._masks[len(self._tokens)] = allowed
                return allowed
        return np.zeros_like(self._ends) if self._matcher.is_error() else self._ends.copy()

    def _compute_mask(self) -> Mask:
        started = time.perf_counter()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(self._with_text)]
        self.lexer.seconds += time.perf_counter() - started
        return bits

    def _refused(self, special: Mask) -> Mask:
        """The special tokens of a mask that the matcher refuses to consume. Complements such as `[^a]` let them into
        the mask, since they match llguidance's inner spelling of special tokens."""
        for token in np.flatnonzero(np.unpackbits(special.view(np.uint8), bitorder="little")).tolist():
            if self._matcher.validate_tokens([token]) == 1:
                special[token // 32] &= ~np.uint32(1 << token % 32)
        return special

    def _restart_lexer(self) -> bool:
        """After an error of the shared lexer, read the text again with a new lexer. Returns whether that worked."""
        if self._matcher.get_error().startswith(LEXER_ERROR):
            self.lexer.has_failed = True
        if not self.lexer.has_failed or not self._restarts_left:
            return False
        self._restarts_left -= 1
        start, begin = self._restart(self.lexer), time.perf_counter()
        if start is None:
            return False
        matcher = start._start.deep_copy()
        for token in self._tokens:
            matcher.compute_bitmask()  # the library limits work per step
            if matcher.try_consume_tokens([token]) != 1 or time.perf_counter() - begin > RESTART_SECONDS:
                return False
        self._start, self._matcher, self.lexer = start._start, matcher, start.lexer
        return True

    def masks(self, draft: Seq[int], count: int | None = None) -> Mask:
        """uint32 [k + 1, words]: the masks before each of k drafted tokens and after the last one, or the last `count`
        of them. The state does not change.

        Rows after a token that the grammar refuses allow all tokens. Verification rejects the refused token by its own
        row, so no later token can be emitted."""
        if not draft:
            return self.mask()[None]
        num_rows = len(draft) + 1 if count is None else count
        rows = np.full((num_rows, len(self._with_text)), 0xFFFFFFFF, np.uint32)
        for taken, row in enumerate(range(num_rows - len(draft) - 1, num_rows)):
            if row >= 0:
                rows[row] = self.mask()
            if taken == len(draft) or not self.advance(draft[taken]):
                break
        self._undo(taken)
        return rows

    def fitting(self, draft: Seq[int]) -> int:
        """The number of leading drafted tokens that the grammar accepts before the text ends. Keeps the state."""
        taken = 0
        while taken < len(draft) and not self.done and self.advance(draft[taken]):
            taken += 1
        self._undo(taken)
        return taken

    def advance(self, token: int) -> bool:
        """Consume `token`. Returns False if the grammar refuses it; the state is then unchanged or has an `error`.

        Every token in `mask` is accepted, and so is a token that spells a forced text unlike the tokenizer would."""
        if self._consume(token):
            return True
        known = self._masks.get(len(self._tokens))
        if self._num_ends or known is None or not 0 <= token < 32 * len(known) or not _has(known, token):
            return False
        del self._masks[len(self._tokens)]
        self.mask()  # the lexer has failed since the mask was computed: sets the error, or restarts the lexer
        return not self._matcher.is_error() and self._consume(token)

    def _consume(self, token: int) -> bool:
        if token in self._end_ids and (self._num_ends or self._matcher.is_accepting()):
            self._num_ends += 1
            return True
        if self._num_ends or not 0 <= token < 32 * len(self._with_text):
            return False
        if not _has(self._with_text, token) or self._matcher.is_stopped():
            return False
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        if self._undone and self._undone[0] != token:
            self._undone = []
            self._masks = {count: mask for count, mask in self._masks.items() if count <= len(self._tokens)}
        self._undone = self._undone[1:]
        self._tokens.append(token)
        self._masks.pop(len(self._tokens) - CACHED_MASKS, None)
        return True

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens, and an `error` after them. Raises ValueError if there are fewer tokens."""
        if not 0 <= count <= len(self):
            raise ValueError(f"cannot undo {count} of {len(self)} tokens")
        ends = min(count, self._num_ends)
        self._num_ends -= ends
        kept = len(self._tokens) - (count - ends)
        self._tokens, undone = self._tokens[:kept], self._tokens[kept:]
        self._undone = undone + self._undone
        stuck = self._matcher.is_error() or (undone and not self._matcher.rollback(len(undone)))
        if stuck and not self._restart_lexer():  # the library cannot roll back an error
            self._matcher = self._start.deep_copy()
            self._matcher.try_consume_tokens(self._tokens)

    def forced(self, limit: int = FORCED_LIMIT) -> list[int]:
        """The next tokens, at most `limit`, as long as exactly one token is allowed."""
        tokens: list[int] = []
        while len(tokens) < limit and not self.done:
            token = _single_token(self.mask())
            if token is None or not self.advance(token):
                break
            tokens.append(token)
        self._undo(len(tokens))
        return tokens

    def _undo(self, taken: int) -> None:
        """Undo a look-ahead. An error at its first token belongs to the state itself and stays."""
        if taken:
            self.rollback(taken)

    def copy(self) -> "GrammarState":
        """An independent copy."""
        twin = copy(self)
        twin._matcher, twin._tokens = self._matcher.deep_copy(), self._tokens.copy()
        twin._masks = self._masks.copy()
        return twin

    def __len__(self) -> int:
        """Number of accepted tokens."""
        return len(self._tokens) + self._num_ends

    @property
    def done(self) -> bool:
        """Whether only end-of-text can follow: the text is complete, or there is an `error`."""
        return bool(self._num_ends or self._matcher.is_stopped() or self._dead_end_at == len(self._tokens))

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self._num_ends or self._matcher.is_accepting())

    @property
    def error(self) -> str:
        """The reason why the text cannot be completed (no tokens spell the required text, or the grammar exceeds
        llguidance's limits); empty without an error. A state with an error is `done` and not `accepting`."""
        if not self._matcher.is_error():
            return DEAD_END if self._dead_end_at == len(self._tokens) else ""
        message = one_line(self._matcher.get_error())
        if message.startswith("NoExtension"):
            return "no text of this vocabulary can satisfy it"
        return f"it is too complex, or too long: {message}"


def _has(mask: Mask, token: int) -> bool:
    return bool(int(mask[token // 32]) >> token % 32 & 1)


def _single_token(mask: Mask) -> int | None:
    """The token of the only bit that is set; None if no bit or several are set."""
    if np.count_nonzero(mask) != 1:
        return None
    place = int(mask.argmax())
    word = int(mask[place])
    return None if word & (word - 1) else 32 * place + word.bit_length() - 1
