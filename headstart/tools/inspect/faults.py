"""What names and shapes do not say of a drafter: ids outside the vocabulary, maps that are missing or wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.mtp_families import Layout, symbols
from headstart.formats.symbols import Sizes, as_size, lookup

MASK_KEYS = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "ptd_token_id")
"""The token that stands for one to be drafted, in configs of drafters of a whole block."""


class Fault(NamedTuple):
    """Why a drafter whose tensors are in shape does not work. `missing`: `text` is a tensor that is not there."""

    text: str
    missing: bool = False


def faults(checkpoint: Checkpoint, layout: Layout, sizes: Sizes) -> Iterator[Fault]:
    """All that is found. Raises ModelError for a file that ends early."""
    tensors = {layout.canonical(name): tensor for name, tensor in checkpoint.tensors.items()}
    whole, draft = sizes.value("V"), sizes.value("DV")
    reduced = layout.reduced and whole and draft and draft < whole
    if reduced and "d2t" not in tensors:
        yield Fault("d2t (the draft vocabulary's tokens)", missing=True)
    if whole and draft and draft > whole:
        yield Fault(f"the draft vocabulary has {draft} tokens, the target's {whole}")
    if "d2t" in tensors and whole:
        yield from _map_faults(tensors["d2t"], tensors.get("t2d"), whole)
    if (ids := tensors.get("draft_token_ids")) and ids.here and len(ids.shape) == 1 and ids.dtype in ("I64", "I32"):
        tokens = ids.numpy().astype(np.int64)
        if len(tokens) and ((np.diff(tokens) <= 0).any() or tokens[0] < 0 or tokens[-1] >= (whole or tokens[-1] + 1)):
            yield Fault("draft_token_ids must be ascending tokens of the vocabulary")
    yield from _mask_faults(layout, sizes, whole)
    listed = aux_layers(sizes)
    if any(layer < 0 for layer in listed) or len({*listed}) < len(listed):
        yield Fault(f"the layers that it reads are {listed}")


def aux_layers(sizes: Sizes) -> list[int]:
    """The layers of the target that it reads."""
    for key in symbols()["aux"]["keys"]:
        value = lookup(sizes.config, key)
        if isinstance(value, list):
            return [each for each in value if isinstance(each, int)]
    return []


def _map_faults(d2t: Tensor, t2d: Tensor | None, whole: int) -> Iterator[Fault]:
    """d2t [DV]: what is added to an id of the draft vocabulary; t2d [V]: which tokens it has."""
    if not d2t.here or len(d2t.shape) != 1 or d2t.dtype not in ("I64", "I32"):
        return
    try:
        ids = d2t.numpy().astype(np.int64) + np.arange(d2t.shape[0])
        mask = t2d.numpy() if t2d is not None and t2d.here and t2d.dtype == "BOOL" else None
    except ModelError as error:
        yield Fault(error.message)
        return
    if len(ids) and (ids.min() < 0 or ids.max() >= whole):
        yield Fault(f"d2t leads to token {ids.max() if ids.max() >= whole else ids.min()} of {whole}")
    elif len(np.unique(ids)) < len(ids):
        yield Fault("d2t leads from two draft tokens to one")
    elif mask is not None and mask.shape == (whole,) and not (mask[ids].all() and mask.sum() == len(ids)):
        yield Fault("t2d and d2t are of different draft vocabularies")


def _mask_faults(layout: Layout, sizes: Sizes, whole: int | None) -> Iterator[Fault]:
    for key in MASK_KEYS if layout.block else ():
        value = lookup(sizes.config, key)
        if value is not None and not (_is_id(value) and (whole is None or value < whole)):
            yield Fault(f"{key} is {value!r}, but the vocabulary has {whole} tokens")
    for key in layout.block:
        value = lookup(sizes.config, key)
        if value is not None and not (_is_id(value) and value > 0):
            yield Fault(f"{key} is {value!r}, not a number of tokens")


def _is_id(value: object) -> bool:
    return not isinstance(value, list) and as_size(value) is not None
