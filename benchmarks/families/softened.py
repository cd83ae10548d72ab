"""Changes weights of random models so that some of their drafts are accepted."""

from __future__ import annotations

import re

import numpy as np

from headstart.models.small import Arrays

SOFT = 0.1  # factor of tensors in DAMPED
MARKOV_SCALE = 2.0  # scale of a Markov head's logits, which are added to random logits of mask rows
DAMPED = (
    "o_proj.weight", "wo_b.weight", "out_proj.weight", "down_proj.weight", "w2.weight", "experts.down_proj",
    "wo_ud.weight", "w2_md.weight", "w2_weight", "down_proj_bias", "ple.value_proj.weight", "engram.wkv.weight",
    "routed_expert_up_proj.weight",
)  # fmt: skip
PROJECTIONS = {
    "mtp.fc.weight": False, "eh_proj.weight": False, "input_proj.weight": True, "mtp_linear_proj.0.weight": False,
}  # fmt: skip
"""Ending of the name of an MTP module's projection -> whether the hidden state comes first in its input."""
SUMMED = {
    ".e_proj.weight": 1.0, ".h_proj.weight": 0.0, "mtp.fc_embedding.weight": 1.0, "mtp.fc_hidden.weight": 0.0,
}  # fmt: skip
"""Endings of the names of two projections whose results are added -> factor of the identity."""
MIXER = "mtp.hyper_connection_mixer."
"""The module's weighted sum of streams, which gets the trunk's weights."""
MARKOV = tuple(
    tuple(f"markov_head.{name}.weight" for name in names) for names in (("markov_w1", "embed"), ("markov_w2", "head"))
)
"""Tables of a DSpark drafter's Markov head, with hidden size as number of columns; names in V4 and V4.1."""
INPUT_NORMS = (
    r"pre_fc_norm_embedding\.weight|enorm(\.m)?\.weight|token_layernorm\.weight|layers\.\d\.embed_norm\.weight"
)
OUTPUT_NORMS = r"mtp\.(\d\.)?norm\.weight|shared_head\.norm\.weight|final_layernorm\.weight|mtp_emb_norm"
LAST_NORMS = ("model.norm.weight", "backbone.norm_f.weight", "model.final_layernorm.weight", "norm.weight")
"""Names of the trunk's final norm."""


def kind_of_head(arrays: Arrays) -> str:
    """Kind of the native head, `mtp` or `block`; empty: none that `agreeing` supports."""
    if any(name.endswith(MARKOV[0]) for name in arrays):
        return "block"
    return "mtp" if any(name.endswith(ending) for name in arrays for ending in {**PROJECTIONS, **SUMMED}) else ""


def agreeing(arrays: Arrays) -> Arrays:
    """Scales down the outputs of blocks. An MTP module then passes its token's embedding to the final norm, and a
    Markov head gives the trunk's logits of the previous token."""
    damped = {name: array * np.float32(SOFT if name.endswith(DAMPED) else 1) for name, array in arrays.items()}
    arrays = {name: damped[name.replace(MIXER, "model.hyper_connection_mixer.")] for name in damped}
    folded = any("pre_fc_norm" in name for name in arrays)  # norms stored as w of 1 + w
    last = next((name for name in LAST_NORMS if name in arrays), "")
    for name, array in arrays.items():
        if name.endswith(MARKOV[0]):
            embedded = arrays["embed.weight"]
            normed = embedded / np.sqrt(np.square(embedded).mean(-1, keepdims=True)) * arrays[last]
            arrays[name] = (MARKOV_SCALE * normed).astype(np.float32)
        elif name.endswith(MARKOV[1]):
            arrays[name] = arrays["head.weight"]
        for ending, hidden_first in PROJECTIONS.items():
            if name.endswith(ending):
                halves = [np.eye(len(array)), np.zeros((len(array),) * 2)]
                arrays[name] = np.hstack(halves[::-1] if hidden_first else halves).astype(np.float32)
        for ending, share in SUMMED.items():
            if name.endswith(ending):
                arrays[name] = np.float32(share) * np.eye(len(array), dtype=np.float32)
        if re.search(INPUT_NORMS, name):
            arrays[name] = np.full_like(array, 0.0 if folded else 1.0)
        elif re.search(OUTPUT_NORMS, name) and name != last:
            arrays[name] = arrays[last]
    return arrays
