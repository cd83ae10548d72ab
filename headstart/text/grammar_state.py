"""Where one text stands in a grammar: masks of what may come next, steps forward, and back.

Masks are as in SamplingRows.allowed: bit v % 32 of word v // 32 is token v. Where the grammar leaves one text only, a
mask holds the one token that the tokenizer itself would write it with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from headstart.core import Mask
from headstart.text.grammar_spec import one_line

FORCED_LIMIT = 16
MASKS_KEPT = 32
"""Masks of the latest states: at least those that looking ahead comes by."""
LEXER_ERROR = "lexer error"
RENEWALS, RENEWAL_SECONDS = 3, 1.0
"""How often, and how long, a text whose lexer has failed is read again with a new one."""
NO_WAY_ON = "it demands an end-of-text token where the text cannot end, or ids that the model does not have"
GROWTH = 100 * 2**20
"""Bytes that a lexer may grow by in a second of making masks (70 MB were measured where every mask is a new state)."""


@dataclass
class Lexer:
    """What all states of one compiled grammar share: the library's lexer, which grows while masks are made."""

    compiled_bytes: int
    seconds: float = 0.0  # that masks took
    compile_seconds: float = 0.0
    has_failed: bool = False  # for all that share it: one text, or a look ahead, has met a limit

    @property
    def num_bytes(self) -> int:
        """About so much memory, at most."""
        return self.compiled_bytes + int(self.seconds * GROWTH)


class GrammarState:
    """Where one sequence stands in a grammar: a core.Constraint. One thread at a time."""

    def __init__(
        self,
        matcher: Any,
        lexer: Lexer,
        end_ids: frozenset[int],
        with_text: Mask,
        ends: Mask,
        special: Mask,
        renewed: Callable[[Lexer], GrammarState | None] = lambda _: None,
    ) -> None:
        """renewed: a start of this grammar with another lexer than the given one, if that costs little."""
        self.lexer = lexer
        self._renewed, self._renewals_left = renewed, RENEWALS
        self._start = matcher  # stays there
        self._matcher = matcher.deep_copy()
        self._end_ids = end_ids
        self._with_text = with_text  # without the end-of-text ids
        self._ends = ends
        self._special = special
        self._dead: int | None = None  # the number of tokens after which a mask was found to be empty
        self._tokens: list[int] = []  # that the matcher has consumed
        self._num_ends = 0  # end-of-text ids after them, which the matcher does not see: it would not count them
        self._masks: dict[int, Mask] = {}  # by the number of tokens before; looking ahead comes by again

    def mask(self) -> Mask:
        """[ceil(vocab_size / 32)] tokens that may come next. End-of-text ids are allowed exactly where the text may
        end (`accepting`), and alone once it is `done`; then the mask is empty if the tokenizer has no such id. An
        `error` leaves nothing."""
        if not self._num_ends and not self._matcher.is_stopped():
            known = self._masks.get(len(self._tokens))
            if known is not None and not self._matcher.is_error():
                return known
            bits = self._computed()
            while self._matcher.is_error() and self._renew():
                bits = self._computed()
            if not self._matcher.is_error():
                # A grammar may name an end-of-text token. It ends the text, so it is allowed where the text may end.
                may_end = self._matcher.is_accepting()
                allowed: Mask = bits & (self._with_text | self._ends if may_end else self._with_text)
                if (allowed & self._special).any():
                    allowed &= ~self._refused(allowed & self._special)
                self._dead = None if allowed.any() or may_end else len(self._tokens)
                allowed.flags.writeable = False
                self._masks[len(self._tokens)] = allowed
                return allowed
        return np.zeros_like(self._ends) if self._matcher.is_error() else self._ends.copy()

    def _computed(self) -> Mask:
        started = time.perf_counter()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(self._with_text)]
        self.lexer.seconds += time.perf_counter() - started
        return bits

    def _refused(self, special: Mask) -> Mask:
        """Those that the library's masks allow, but its steps do not take: complements match their inner spelling."""
        for token in np.flatnonzero(np.unpackbits(special.view(np.uint8), bitorder="little")).tolist():
            if self._matcher.validate_tokens([token]) == 1:
                special[token // 32] &= ~np.uint32(1 << token % 32)
        return special

    def _renew(self) -> bool:
        """Go on with a lexer that knows this text only, if it is the shared one that has failed."""
        if self._matcher.get_error().startswith(LEXER_ERROR):
            self.lexer.has_failed = True
        if not self.lexer.has_failed or not self._renewals_left:
            return False
        self._renewals_left -= 1
        start, begun = self._renewed(self.lexer), time.perf_counter()
        if start is None:
            return False
        matcher = start._start.deep_copy()
        for token in self._tokens:
            matcher.compute_bitmask()  # gives the next step its share of work
            if matcher.try_consume_tokens([token]) != 1 or time.perf_counter() - begun > RENEWAL_SECONDS:
                return False
        self._start, self._matcher, self.lexer = start._start, matcher, start.lexer
        return True

    def masks(self, draft: Seq[int], count: int | None = None) -> Mask:
        """[k + 1, words] masks of the row after the context and of the rows after each of k drafted tokens; only the
        last `count` of them. The state stays where it is.

        Rows behind a token that the grammar refuses allow everything: that token is not allowed in its own row, so
        nothing behind it can be emitted."""
        num_rows = len(draft) + 1 if count is None else count
        rows = np.full((num_rows, len(self._with_text)), 0xFFFFFFFF, np.uint32)
        for taken, row in enumerate(range(num_rows - len(draft) - 1, num_rows)):
            if row >= 0:
                rows[row] = self.mask()
            if taken == len(draft) or not self.advance(draft[taken]):
                break
        self._leave(taken)
        return rows

    def fitting(self, draft: Seq[int]) -> int:
        """How many of the first drafted tokens the grammar takes, up to the end of the text."""
        taken = 0
        while taken < len(draft) and not self.done and self.advance(draft[taken]):
            taken += 1
        self._leave(taken)
        return taken

    def advance(self, token: int) -> bool:
        """Take `token`. False if the grammar refuses it; the state is then as it was, or it has an `error`.

        Every token of `mask` is taken. So is a token that spells a forced text in another way than the tokenizer."""
        if self._taken(token):
            return True
        known = self._masks.get(len(self._tokens))
        if self._num_ends or known is None or not 0 <= token < 32 * len(known) or not _has(known, token):
            return False
        del self._masks[len(self._tokens)]
        self.mask()  # the lexer has failed since: finds the error, or another lexer
        return not self._matcher.is_error() and self._taken(token)

    def _taken(self, token: int) -> bool:
        if token in self._end_ids and (self._num_ends or self._matcher.is_accepting()):
            self._num_ends += 1
            return True
        if self._num_ends or not 0 <= token < 32 * len(self._with_text):
            return False
        if not _has(self._with_text, token) or self._matcher.is_stopped():
            return False
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._tokens.append(token)
        self._masks.pop(len(self._tokens) - MASKS_KEPT, None)
        return True

    def rollback(self, count: int) -> None:
        """Give back the last `count` tokens, and an `error` that came after the rest. Raises ValueError if there were
        not so many."""
        if not 0 <= count <= len(self):
            raise ValueError(f"cannot give back {count} of {len(self)} tokens")
        ends = min(count, self._num_ends)
        self._num_ends -= ends
        kept = len(self._tokens) - (count - ends)
        self._tokens, given_back = self._tokens[:kept], self._tokens[kept:]
        self._masks = {count: mask for count, mask in self._masks.items() if count <= kept}
        stuck = self._matcher.is_error() or (given_back and not self._matcher.rollback(len(given_back)))
        if stuck and not self._renew():  # the library cannot go back from an error
            self._matcher = self._start.deep_copy()
            self._matcher.try_consume_tokens(self._tokens)

    def forced(self, limit: int = FORCED_LIMIT) -> list[int]:
        """The tokens, at most `limit`, that are each the only one allowed after those before, up to the end of the
        text."""
        tokens: list[int] = []
        while len(tokens) < limit and not self.done:
            token = _only(self.mask())
            if token is None or not self.advance(token):
                break
            tokens.append(token)
        self._leave(len(tokens))
        return tokens

    def _leave(self, taken: int) -> None:
        """Go back to where a look ahead began. An error that was met at once is that state's own, and stays."""
        if taken:
            self.rollback(taken)

    def copy(self) -> GrammarState:
        """A state of its own at the same place."""
        twin = copy(self)
        twin._matcher, twin._tokens = self._matcher.deep_copy(), self._tokens.copy()
        twin._masks = self._masks.copy()
        return twin

    def __len__(self) -> int:
        """Tokens taken."""
        return len(self._tokens) + self._num_ends

    @property
    def done(self) -> bool:
        """Nothing but end-of-text can follow, because the text is complete or there is an `error`."""
        return bool(self._num_ends or self._matcher.is_stopped() or self._dead == len(self._tokens))

    @property
    def accepting(self) -> bool:
        """May the text end here?"""
        return bool(self._num_ends or self._matcher.is_accepting())

    @property
    def error(self) -> str:
        """Why the text stopped before it was complete, else empty: the vocabulary cannot spell what must follow, or
        the grammar is too complex for the library's limits. Such a state is `done` and not `accepting`."""
        if not self._matcher.is_error():
            return NO_WAY_ON if self._dead == len(self._tokens) else ""
        message = one_line(self._matcher.get_error())
        if message.startswith("NoExtension"):
            return "no text of this vocabulary can satisfy it"
        return f"it is too complex, or too long: {message}"


def _has(mask: Mask, token: int) -> bool:
    return bool(int(mask[token // 32]) >> token % 32 & 1)


def _only(mask: Mask) -> int | None:
    """The id whose bit is the only one set."""
    (words,) = np.nonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]])
    return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1
