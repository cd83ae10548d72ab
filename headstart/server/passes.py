"""What drafting did, pass by pass, in the chunks of a stream that asks for it (`speculation: {"events": true}`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from headstart.core import Delta, Draft
from headstart.text.detokenizer import Detokenizer
from headstart.text.tokenizer import Tokenizer

DIGITS = 4
"""Of scores."""


class Passes:
    """Tells of one choice's passes. The texts of its tokens, joined, are the text before stop strings and parsers."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int], continues: bool) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._detokenizer = Detokenizer(tokenizer, skip_special=False, continues=continues)

    def told(self, delta: Delta, token_ids: Seq[int]) -> list[dict[str, Any]]:
        """The pass that gave these tokens, which may be fewer than the delta has; none where it gave none."""
        if not token_ids:
            return []
        draft, accepted = delta.draft or Draft(), delta.num_accepted
        guesses = [(token, _score(draft, place)) for place, token in enumerate(draft.tokens)]
        tokens = []
        for place, token in enumerate(token_ids):
            text = "" if token in self._stop_ids else self._detokenizer.push(token)
            taken = place < accepted
            score = guesses[place][1] if taken else None
            tokens.append({"id": token, "text": text, "accepted": taken, "score": score})
        text_of = self._tokenizer.token_text
        rejected = [{"id": token, "text": text_of(token), "score": score} for token, score in guesses[accepted:]]
        drafter = draft.method if guesses else None
        return [
            {"drafter": drafter, "drafted": len(guesses), "accepted": accepted, "tokens": tokens, "rejected": rejected}
        ]


def _score(draft: Draft, place: int) -> float | None:
    return round(draft.scores[place], DIGITS) if place < len(draft.scores) else None
