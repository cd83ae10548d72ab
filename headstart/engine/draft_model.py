"""A second whole model beside the trunk: loaded as a trunk is, its vocabulary held against the trunk's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint
from headstart.heads.base import HeadSpec
from headstart.heads.draft_model import DraftModel
from headstart.kernels.ops import Backend
from headstart.layers.build import DecoderConfig, lm_head_name
from headstart.layers.decoder import Decoder
from headstart.layers.linear import Linear
from headstart.models.tensors import LoadedDecoder, load_decoder
from headstart.text.tokenizer import Tokenizer

DRAFT_MODEL = "draft_model"
MOST_FOREIGN = 0.01
"""Share of a vocabulary's tokens that the other may lack: what was added later, or is never said."""


class Trunk(Protocol):
    """What a draft model must fit."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> DecoderConfig: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


def load_draft_model(trunk: Trunk, checkpoint: Checkpoint) -> DraftModel:
    """Raises ModelError for a model of another vocabulary, naming sizes and the first token that differs, and for one
    with recurrent layers."""
    path = checkpoint.path
    with trunk.backend.reading(checkpoint.files):
        loaded = load_decoder(checkpoint, trunk.backend)
        if loaded.decoder.state_specs:
            raise ModelError(
                f"{path} has recurrent layers, which cannot draft yet", "use a draft model with attention alone"
            )
        ours, theirs = trunk.config.vocab_size, loaded.config.vocab_size
        known = _vocabulary(checkpoint, path, same_size=ours == theirs)
        words = Matching(range(min(ours, theirs)), None)
        if known is not None:
            words = match(trunk.tokenizer.vocabulary(), known, (ours, theirs), (trunk.name, str(path)))
        decoder = loaded.decoder if words.rows is None else _with_rows(loaded, words.rows)
    return DraftModel(
        spec=HeadSpec(kind=DRAFT_MODEL),
        modules=(),
        source=str(path),
        draft_token_ids=None if len(words.ids) == ours else np.array(words.ids, np.int64),
        decoder=decoder,
        max_length=loaded.config.max_length,
        fed=words.fed(ours),
    )


class Matching(NamedTuple):
    """Tokens that both know: ascending `ids` of the trunk; `rows`: the draft model's ids of the same tokens, None where
    they are its first ones and all of them."""

    ids: range | list[int]
    rows: list[int] | None

    def fed(self, size: int) -> NDArray[np.int64] | None:
        """The draft model's id of each of the trunk's `size` ids. What it does not know is its token 0."""
        if len(self.ids) == size and self.rows is None:
            return None
        table = np.zeros(size, np.int64)
        table[self.ids] = self.ids if self.rows is None else self.rows
        return table


def match(
    ours: Mapping[str, int], theirs: Mapping[str, int], sizes: tuple[int, int], names: tuple[str, str]
) -> Matching:
    """Hold two vocabularies (token -> id) against each other; `sizes`: rows of the embeddings, trunk's first. Rows that
    no token has, or a few tokens more, do no harm. Raises ModelError where more differs."""
    pairs = sorted((ours[token], theirs[token]) for token in ours.keys() & theirs.keys())
    pairs = [pair for pair in pairs if pair[0] < sizes[0] and pair[1] < sizes[1]]
    if len(pairs) < (1 - MOST_FOREIGN) * max(len(ours), len(theirs)):
        raise ModelError(
            f"the draft model {names[1]} has another vocabulary than {names[0]}: {len(theirs)} tokens, not "
            f"{len(ours)}{_first_difference(ours, theirs)}",
            "use a draft model of the same family",
        )
    if all(mine == its for mine, its in pairs):  # each id is the same token, or padding
        shared = min(sizes)
        return Matching(range(shared), None if sizes[1] == shared else list(range(shared)))
    return Matching([mine for mine, _ in pairs], [its for _, its in pairs])


def _first_difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    mine, its = ({index: token for token, index in each.items()} for each in (ours, theirs))
    for index in sorted(mine.keys() & its.keys()):
        if mine[index] != its[index]:
            return f"; token {index} is {its[index][:40]!r}, not {mine[index][:40]!r}"
    return ""


def _vocabulary(checkpoint: Checkpoint, path: Path, *, same_size: bool) -> Mapping[str, int] | None:
    """None: it brings no tokenizer, but as many tokens as the trunk."""
    try:
        return checkpoint.load_tokenizer().vocabulary()
    except ModelError:
        if same_size:
            return None
        raise


def _with_rows(loaded: LoadedDecoder, rows: list[int]) -> Decoder:
    """Its LM head has these rows only."""
    weights, config = loaded.weights, loaded.config
    whole = weights.raw(lm_head_name(weights, config), (config.vocab_size, config.hidden_size))
    return replace(loaded.decoder, lm_head=Linear(weights.take(whole.take_rows(np.array(rows)))))
