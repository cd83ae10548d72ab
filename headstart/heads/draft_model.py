"""Draft model: a second, smaller model with the same tokens.

It has no modules and reads nothing of the trunk; engine/load.py loads it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headstart.heads.base import Head
from headstart.heads.kind import HeadKind
from headstart.layers.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class DraftModel(Head):
    """A head that is a whole model. Its logits belong to the tokens `draft_token_ids`."""

    decoder: Decoder
    max_length: int  # context length
    own_ids: NDArray[np.int64] | None = None  # [V] the draft model's id of each trunk id; None: the ids are equal


HEAD = HeadKind(
    title="draft model",
    modules=lambda weights, spec, hidden: (),
    shapes=lambda spec, hidden: {},
    drafter="draft_model",
    block=False,
)
