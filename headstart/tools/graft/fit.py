"""Checks whether the head of one checkpoint fits another, by configs, tensor headers, vocabulary and a few norms."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.sizes import text_config
from headstart.tools.export.heads import head_names

MUST_AGREE = (
    "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "kv_lora_rank", "q_lora_rank", "n_routed_experts", "num_experts",
)  # fmt: skip
SHOULD_AGREE = ("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "max_position_embeddings")
NORMS_READ = 8
Trunk = Mapping[str, Tensor]  # by name, without the prefixes of wrappers
_MIXER = re.compile(r"\.\d+\.((?:self_attn|attn|mixer)\..+)\.[^.]+$")
PLAIN = ("F32", "F16", "BF16")
HINT = "a head fits fine-tunes and quantizations of the model it was trained with, and nothing else"


def check_fit(target: Checkpoint, base: Checkpoint) -> list[str]:
    """Returns notes on differences that may lower acceptance. Raises ModelError for one that makes the head useless."""
    ours, theirs = text_config(target.config), text_config(base.config)
    types = [str(each.get("model_type", "")).removesuffix("_text") for each in (ours, theirs)]
    if types[0] != types[1]:
        raise ModelError(f"{target.name} is a {types[0]} model, {base.name} a {types[1]} model", HINT)
    for key in MUST_AGREE:
        if key in ours and key in theirs and ours[key] != theirs[key]:
            raise ModelError(f"{key} is {ours[key]} in {target.name}, but {theirs[key]} in {base.name}", HINT)
    trunks = _trunk(target), _trunk(base)
    _check_shapes(target, base, *trunks)
    _check_blocks(target, base, *trunks)
    _check_vocabulary(target, base)
    _check_norms(target, base, *trunks)
    return [
        f"{key} is {ours[key]!r} here, but {theirs[key]!r} in {base.name}: acceptance may be lower"
        for key in SHOULD_AGREE
        if key in ours and key in theirs and ours[key] != theirs[key]
    ]


def _trunk(directory: Checkpoint) -> Trunk:
    heads = head_names(directory.tensors, directory.config)
    names = (name for name in directory.tensors if name not in heads)
    return {name.replace("language_model.", "").removeprefix("model."): directory.tensors[name] for name in names}


def _check_shapes(target: Checkpoint, base: Checkpoint, ours: Trunk, theirs: Trunk) -> None:
    common = ours.keys() & theirs.keys()
    if not common:
        raise ModelError(f"{target.name} and {base.name} have no tensor of the trunk in common", HINT)
    for name in sorted(common):
        if ours[name].dtype in PLAIN and theirs[name].dtype in PLAIN and ours[name].shape != theirs[name].shape:
            shapes = f"{list(ours[name].shape)} in {target.name}, but {list(theirs[name].shape)} in {base.name}"
            raise ModelError(f"{name} is {shapes}", HINT)


def _check_blocks(target: Checkpoint, base: Checkpoint, ours: Trunk, theirs: Trunk) -> None:
    """Checks that trunk and head have the same attention modules: an indexer, for instance, needs the trunk's."""
    here, there = _mixers(ours), _mixers(theirs)
    head = _mixers(head_names(base.tensors, base.config)) & there
    if lacking := sorted(head - here):
        what = f"the head of {base.name} has {lacking[0]}, which no layer of {target.name} has"
        raise ModelError(what, HINT)
    if lacking := sorted(each for each in here - there if "indexer" in each):
        raise ModelError(f"{target.name} has {lacking[0]}, which no layer of {base.name} has", HINT)


def _mixers(names: Iterable[str]) -> set[str]:
    """Returns the names of attention modules, without layer number and tensor suffix."""
    found = (_MIXER.search(name) for name in names)
    return {match[1].removesuffix(".weight") for match in found if match}


def _check_vocabulary(target: Checkpoint, base: Checkpoint) -> None:
    """Raises ModelError if a token has different ids in the two tokenizers."""
    vocabularies = [_vocabulary(each) for each in (target, base)]
    if None in vocabularies or vocabularies[0] == vocabularies[1]:
        return
    ours, theirs = ({token: int(number) for token, number in (each or {}).items()} for each in vocabularies)
    if differing := [token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]]:
        where = f"{target.name} than in {base.name}, {differing[0]!r} for one"
        raise ModelError(f"{len(differing)} tokens have other ids in {where}", HINT)


def _vocabulary(directory: Checkpoint) -> dict[str, Any] | None:
    path = directory.path / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        vocabulary = json.loads(path.read_bytes()).get("model", {}).get("vocab")
    except (ValueError, AttributeError):
        return None
    return vocabulary if isinstance(vocabulary, dict) else None


def _check_norms(target: Checkpoint, base: Checkpoint, ours: Trunk, theirs: Trunk) -> None:
    """Raises ModelError if one checkpoint stores norm weights as w and the other as 1 + w, as a conversion may."""
    common = sorted(name for name in ours.keys() & theirs.keys() if _is_norm(ours[name]) and _is_norm(theirs[name]))
    if not common:
        return
    chosen = common[:: max(1, len(common) // NORMS_READ)]
    shift = float(np.median([_mean(ours[name]) - _mean(theirs[name]) for name in chosen]))
    if abs(abs(shift) - 1) < 0.25:
        hint = "convert one of them; a head with the other convention only drafts noise"
        off = f"{'above' if shift > 0 else 'below'} those of {base.name}: one stores w, the other 1 + w"
        raise ModelError(f"norm weights of {target.name} are about 1 {off}", hint)


def _is_norm(stored: Tensor) -> bool:
    return "norm" in stored.name and len(stored.shape) == 1 and stored.dtype in PLAIN


def _mean(stored: Tensor) -> float:
    return float(stored.float32().mean())
