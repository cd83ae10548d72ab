"""Draft model: a second, smaller model and its own head, if any; with another tokenizer its text is tokenized again.

It has no modules and reads nothing of the trunk; engine/load.py loads it. A PARD model (arXiv 2504.18583; AMD-AGI/PARD
`pard/pard_infer.py`) names a mask token in config.json: it drafts several tokens in one pass, from the last token and
mask tokens after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError, UsageError
from headstart.formats.sizes import first_value
from headstart.heads.base import BlockSpec, Head
from headstart.heads.kind import HeadKind
from headstart.layers.build import DecoderConfig
from headstart.text.tokenizer import Tokenizer
from headstart.wording import option

MASK_KEYS = ("pard_token", "ptd_token_id")  # as vLLM reads them
NUM_DRAFTS = 12  # of a pass: PARD's own default


def no_draft_model() -> UsageError:
    """The error of drafter draft_model without a model that drafts."""
    return UsageError("drafter draft_model needs a second, smaller model", "name it: " + option("head", "MODEL"))


def parallel_block(document: Mapping[str, Any], config: DecoderConfig) -> BlockSpec | None:
    """The parallel block of a PARD model's config.json; None for a model that drafts token by token. Raises ModelError
    for a mask that is no token."""
    mask = first_value(document, MASK_KEYS)
    if mask is None:
        return None
    if type(mask) is not int or not 0 <= mask < config.vocab_size:
        what = f"the draft model's mask token is {mask!r}, but must be below {config.vocab_size}"
        raise ModelError(what, f"correct {MASK_KEYS[0]} in its config.json")
    return BlockSpec(block_size=NUM_DRAFTS, num_layers=1, mask_token_id=mask, causal=True, anchor_predicts=True)


@dataclass(frozen=True, kw_only=True)
class DraftModel(Head):
    """A head that is a whole model. Its logits belong to the tokens `draft_token_ids`."""

    own_ids: NDArray[np.int64] | None = None  # [V] what it reads for each trunk id (engine/matching.py); None: the same
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None  # the trunk's and its own, if drafts are tokenized again
    whole: Any  # the loaded model (engine.load.Model); its LM head has the rows of `draft_token_ids` only, and
    # `whole.head` is its own head, if it drafts with one

    @property
    def max_length(self) -> int:
        """Context length."""
        return int(self.whole.config.max_length)


HEAD = HeadKind(
    title="draft model",
    modules=lambda weights, spec, hidden: (),
    drafter="draft_model",
    block=False,
)
