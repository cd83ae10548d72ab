"""Converts tensor names of published block drafters to canonical names and back.

z-lab, SpecForge, DeepSpec and speculators use the same names. Spellings that only vLLM 0.32 (`models/qwen3_dflash.py`)
and transformers 5.23 (`muse_glimmer_assistant`) read are accepted, but not written.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.heads.kind import checked_draft_ids

ALIASES = (
    (r"^(?:model|draft_model)\.", ""),
    (r"^logit_head\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^(?:encoder\.fc|context_proj)\.", "fc."),
    (r"^(?:encoder\.output_norm_enc|context_norm)\.", "hidden_norm."),
    (r"^final_norm\.", "norm."),
    (r"^(markov_head\.markov_w[12])$", r"\1.weight"),
    (r"^(candidate_selector\.\w+_codebook)\.weight$", r"\1"),
)
"""(pattern, replacement): other spellings of published names, replaced in this order."""
OURS = {
    "fc.weight": "fuse.weight",
    "markov_head.markov_w1.weight": "markov.embed.weight",
    "markov_head.markov_w2.weight": "markov.out.weight",
    "markov_head.gate_proj.weight": "markov.gate.weight",
    "markov_head.gate_proj.bias": "markov.gate.bias",
    "markov_head.joint_proj.weight": "markov.joint.weight",
    "markov_head.joint_proj.bias": "markov.joint.bias",
    "candidate_selector.predecessor_codebook": "markov.embed.weight",
    "candidate_selector.successor_codebook": "markov.out.weight",
    "candidate_selector.hidden_projection.weight": "markov.row.weight",
    "confidence_head.proj.weight": "confidence.weight",
    "confidence_head.proj.bias": "confidence.bias",
}
SINKS = ("self_attn.attention_sink_bias", "self_attn.sinks")
THEIRS = {ours: theirs for theirs, ours in OURS.items() if not theirs.startswith("candidate_selector.")}
MAPS = ("d2t", "t2d")
NOT_DRAFTING = re.compile(r"^(?:verifier_\w+\.|rotary_emb\.)")
"""Tensors that only training uses."""


def canonical(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> name in the file, for all tensors that drafting uses."""
    found: dict[str, str] = {}
    for name in names:
        plain = name
        for pattern, spelling in ALIASES:
            plain = re.sub(pattern, spelling, plain)
        if plain not in MAPS and not NOT_DRAFTING.match(plain):
            found[OURS.get(plain, plain.replace(*SINKS))] = name
    return found


def theirs(name: str) -> str:
    """Published name of a canonical tensor."""
    return THEIRS.get(name, name.replace(SINKS[1], SINKS[0]))


def check_whole(found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raises ModelError, with the published name, for a missing, unexpected or wrongly shaped tensor."""
    if missing := [name for name in expected if name not in found]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = "download the drafter again, or its config.json"
        raise ModelError(f"{path} holds no {theirs(missing[0])}{more}", hint)
    for name, tensor in found.items():
        if name not in expected:
            hint = "it may change the drafter's formula, so it is not ignored"
            raise ModelError(f"{path} holds {theirs(name)}, which no DFlash, DFlash2 or DSpark drafter has here", hint)
        if tensor.shape != expected[name]:
            shapes = f"{list(tensor.shape)}, but config.json asks for {list(expected[name])}"
            raise ModelError(f"{path}: {theirs(name)} is {shapes}", "use the config.json published with these weights")


def draft_ids(d2t: Tensor | None, vocab_size: int, path: Path) -> NDArray[np.int64] | None:
    """Ascending target ids of a draft vocabulary: id + d2t[id]; None without one. Raises ModelError."""
    if d2t is None:
        return None
    offsets = d2t.numpy().astype(np.int64)
    return checked_draft_ids(offsets + np.arange(len(offsets)), vocab_size, f"{path}: d2t")


def vocabulary_maps(ids: NDArray[np.int64] | None, vocab_size: int) -> dict[str, Any]:
    """`d2t` and `t2d` of a draft vocabulary; nothing for the full one."""
    if ids is None:
        return {}
    mask = np.zeros(vocab_size, np.bool_)
    mask[ids] = True
    return {"d2t": ids - np.arange(len(ids)), "t2d": mask}
