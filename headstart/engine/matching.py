"""Tokens that a trunk and a draft model share: by name, or by text where their tokenizers differ."""

import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.text.tokenizer import Tokenizer

log = logging.getLogger("headstart.engine")
MAX_UNSHARED = 0.01  # share of tokens that only one of the vocabularies may have: added later, or never used
MIN_SHARED = 0.1  # share of the trunk's tokens that a PARD model with another tokenizer must have


class Matching(NamedTuple):
    """Tokens that trunk and draft model share."""

    ids: range | list[int]  # ascending trunk ids
    rows: list[int] | None  # [shared] the draft model's id of each token; None: all ids of the draft model, 0, 1, ...
    reads: NDArray[np.int64] | None = None  # [V] `own_ids` of a draft model with another vocabulary

    def own_ids(self, size: int) -> NDArray[np.int64] | None:
        """[size] draft model id of each trunk id, 0 for unknown tokens; None: the ids are equal."""
        if self.reads is not None:
            return self.reads
        if len(self.ids) == size and self.rows is None:
            return None
        table = np.zeros(size, np.int64)
        table[self.ids] = self.ids if self.rows is None else self.rows
        return table


def match(
    trunk: Tokenizer, draft: Tokenizer, sizes: tuple[int, int], names: tuple[str, str], *, by_token: bool
) -> Matching | None:
    """Compares two vocabularies by the names of tokens. Where names differ: by texts, if the draft model drafts several
    tokens in one pass (by_token); else None: the trunk's tokenizer encodes its texts. sizes: rows of the embeddings,
    trunk's first. Raises ModelError for tokens that have little in common."""
    trunk_vocab, draft_vocab = trunk.vocabulary(), draft.vocabulary()
    if (found := match_names(trunk_vocab, draft_vocab, sizes)) is not None:
        return found
    if not by_token:
        log.warning("%s has another tokenizer than %s, which encodes the texts of its drafts", names[1], names[0])
        return None
    found = match_texts(trunk, draft, sizes)
    if len(found.ids) < MIN_SHARED * len(trunk_vocab):
        raise ModelError(
            f"the draft model {names[1]} has another vocabulary than {names[0]}: {len(draft_vocab)} tokens, not "
            f"{len(trunk_vocab)}{_first_difference(trunk_vocab, draft_vocab)}",
            "use a draft model of the same family",
        )
    text = "%s has other tokens than %s: it drafts the %d of %d tokens that both have"
    log.warning(text, names[1], names[0], len(found.ids), len(trunk_vocab))
    return found


def match_texts(trunk: Tokenizer, draft: Tokenizer, sizes: tuple[int, int]) -> Matching:
    """Matches tokens with equal bytes, and end-of-text tokens (TLI, arXiv 2502.05202). For a trunk token without a
    match the draft model reads the last token of its own tokenization of that token's text."""
    own: dict[bytes, int] = {}
    for index in range(min(draft.vocab_size, sizes[1])):
        if index not in draft.special_ids:
            own.setdefault(draft.token_bytes(index), index)
    end, starts = min(draft.eos_ids, default=None), {trunk.bos_id: draft.bos_id}
    ids, rows, reads = list[int](), list[int](), np.zeros(sizes[0], np.int64)
    for index in range(min(trunk.vocab_size, sizes[0])):
        data = trunk.token_bytes(index)
        found = end if index in trunk.eos_ids else None if index in trunk.special_ids else own.get(data)
        if found is not None and data:
            ids.append(index)
            rows.append(found)
        elif (found := starts.get(index)) is None:
            found = (draft.encode(data.decode("utf-8", "replace"), parse_special=False) or [0])[-1]
        reads[index] = found if found < sizes[1] else 0
    return Matching(ids, rows, reads)


def match_names(ours: Mapping[str, int], theirs: Mapping[str, int], sizes: tuple[int, int]) -> Matching | None:
    """Compares two vocabularies (token -> id), the trunk's first. Rows without a token and a few extra tokens are
    harmless; None for larger differences."""
    pairs = sorted((ours[token], theirs[token]) for token in ours.keys() & theirs.keys())
    pairs = [pair for pair in pairs if pair[0] < sizes[0] and pair[1] < sizes[1]]
    if len(pairs) < (1 - MAX_UNSHARED) * max(len(ours), len(theirs)):
        return None
    if all(trunk_id == draft_id for trunk_id, draft_id in pairs):  # equal ids mean the same token, or padding
        shared = min(sizes)
        return Matching(range(shared), None if sizes[1] == shared else list(range(shared)))
    return Matching([trunk_id for trunk_id, _ in pairs], [draft_id for _, draft_id in pairs])


def _first_difference(trunk_vocab: Mapping[str, int], draft_vocab: Mapping[str, int]) -> str:
    trunk_tokens, draft_tokens = (
        {index: token for token, index in each.items()} for each in (trunk_vocab, draft_vocab)
    )
    for index in sorted(trunk_tokens.keys() & draft_tokens.keys()):
        if trunk_tokens[index] != draft_tokens[index]:
            return f"; token {index} is {draft_tokens[index][:40]!r}, not {trunk_tokens[index][:40]!r}"
    return ""
