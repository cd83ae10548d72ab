"""Which records a head is judged by: never trained on, the same in every run, and nothing like them trained on.

Prompts are compared by their *shingles*, runs of tokens. Those that many prompts have (a system prompt, a template) say
nothing. The smallest hash of the others decides (Broder's min-hash): prompts alike most likely share it. What resembles
a held-out prompt nevertheless, a later turn of the same conversation say, is left out of the training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headstart.server.records import Record

SHINGLE = 6
HELD_OUT_EVERY = 10
FEWEST, MOST_RESTS = 8, 3
"""Requests to be judged by; of few records up to three in ten are held out for that."""
COMMON = 0.1
"""Share of the prompts that have a shingle from which on it says nothing."""
ALIKE = 0.5
"""Share of one prompt's shingles in another from which on they are alike."""
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Split:
    """`alike`: records left out, for they resemble one that is held out."""

    training: list[Record]
    held_out: list[Record]
    alike: int


def split(records: Seq[Record]) -> Split:
    """In the order given. Each text once."""
    records = list({(each.prompt_ids, each.response_ids): each for each in records}.values())
    shingles = _telling([_shingles(each.prompt_ids) for each in records])
    rests = np.array([int(each.min()) % HELD_OUT_EVERY for each in shingles])
    most = next((rest for rest in range(MOST_RESTS) if (rests <= rest).sum() >= FEWEST), MOST_RESTS - 1)
    held = (rests <= most).tolist()
    if not any(held):
        return Split(records, [], 0)
    out = [each for each, is_held in zip(shingles, held, strict=True) if is_held]
    place = {number: index for index, number in enumerate(np.flatnonzero(held).tolist())}
    training = [number for number in range(len(records)) if number not in place]
    alike = _Alike(out)
    kept = [number for number in training if not alike.has(shingles[number])]
    return Split([records[i] for i in kept], [records[i] for i in place], len(training) - len(kept))


def _shingles(ids: Seq[int]) -> Hashes:
    """[n] distinct hashes of all runs of SHINGLE tokens; of a shorter prompt one."""
    tokens = np.asarray(ids, np.uint64)
    width = min(SHINGLE, len(tokens))
    mixed = np.zeros(len(tokens) - width + 1, np.uint64)
    for offset in range(width):
        mixed = _mix(mixed ^ (tokens[offset : len(tokens) - width + 1 + offset] + np.uint64(1)))
    return np.unique(mixed)


def _mix(x: Hashes) -> Hashes:
    """splitmix64's finalizer."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def _telling(shingles: list[Hashes]) -> list[Hashes]:
    """Without those that many have; where nothing is left, all of them."""
    if not shingles:
        return []
    values, counts = np.unique(np.concatenate(shingles), return_counts=True)
    common = values[counts > max(2, COMMON * len(shingles))]
    told = [each[~np.isin(each, common, assume_unique=True)] for each in shingles]
    return [rare if len(rare) else each for rare, each in zip(told, shingles, strict=True)]


class _Alike:
    """Is a prompt like one of these?"""

    def __init__(self, prompts: Seq[Hashes]) -> None:
        self._sizes = np.array([len(each) for each in prompts])
        values = np.concatenate(prompts)
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._owners = np.repeat(np.arange(len(prompts)), self._sizes)[order]

    def has(self, prompt: Hashes) -> bool:
        """Does it hold most of one of them, or lie mostly in one?"""
        first, last = (np.searchsorted(self._values, prompt, side) for side in ("left", "right"))
        owners = [self._owners[low:high] for low, high in zip(first, last, strict=True) if low < high]
        if not owners:
            return False
        shared = np.bincount(np.concatenate(owners), minlength=len(self._sizes))
        return bool((shared >= ALIKE * np.minimum(self._sizes, len(prompt))).any())


def seed_of(record: Record) -> int:
    """A seed for drawing its answer anew, the same in every run."""
    return int.from_bytes(hashlib.sha256(str(record.prompt_ids).encode()).digest()[:6], "big")
