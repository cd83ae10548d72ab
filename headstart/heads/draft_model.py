"""Draft model: a second whole model of the same tokens, smaller than the trunk. It is loaded as trunks are
(engine/draft_model.py), has no modules, and reads nothing of the trunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headstart.heads.base import Head
from headstart.heads.kind import HeadKind
from headstart.layers.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class DraftModel(Head):
    """A head that is a whole model. `fed` [V]: its own id of each id of the trunk; None: they are the same. Its logits
    stand for `draft_token_ids`. `max_length`: positions that it was made for."""

    decoder: Decoder
    max_length: int
    fed: NDArray[np.int64] | None = None


HEAD = HeadKind(
    title="draft model",
    modules=lambda weights, spec, hidden: (),
    shapes=lambda spec, hidden: {},
    drafter="draft_model",
    block=False,
)
