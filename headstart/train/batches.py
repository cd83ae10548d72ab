"""Which examples make up a step, and their tensors. The order is a function of (examples, seed, epoch) only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.train.data import Example
from headstart.train.features import States, on_device, pad

BUCKET, SMALL_BATCH = 256, 4096
"""Examples sorted by length together before they are cut into batches (more where a batch has more tokens than the
second number): little padding, still random company."""


@dataclass(frozen=True, eq=False)
class Batch:
    """B sequences padded on the right to T rows."""

    tokens: Tensor  # [B, T] int64
    tapped: Tensor  # [B, T, taps x W] streams, as many as the cache keeps
    final: Tensor  # [B, T, W] after the final norm
    best: Tensor  # [B, T] int64 argmax of the trunk at row p; -1 where not known
    loss: Tensor  # [B, T] bool, row p predicts a token that counts
    on_host: Tensor  # the same in the host's memory: what it decides must not wait for a GPU
    kinds: tuple[str, ...]  # [B]
    num_tokens: int  # without padding
    seed: int = 0  # of what is drawn at random in it


def plan_epoch(lengths: Sequence[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of example numbers: similar lengths, at most `budget` padded tokens (or one example) each."""
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(lengths))
    batches: list[list[int]] = []
    bucket = BUCKET * max(1, budget // SMALL_BATCH)
    for start in range(0, len(order), bucket):
        batch: list[int] = []
        for number in sorted(order[start : start + bucket].tolist(), key=lambda n: (lengths[n], n)):
            if batch and lengths[number] * (len(batch) + 1) > budget:
                batches.append(batch)
                batch = []
            batch.append(number)
        batches.append(batch)
    return [batches[i] for i in rng.permutation(len(batches))]


def collate(
    examples: Sequence[Example], cache: States, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Batch:
    """Examples with their hidden states."""
    tokens = on_device(pad([torch.from_numpy(example.tokens).long() for example in examples]), device)
    answers = pad([torch.from_numpy(example.loss) for example in examples])
    hidden, best = cache.padded(examples, tokens, answers, dtype)
    return Batch(
        tokens=tokens,
        tapped=hidden[..., : -cache.hidden_size],
        final=hidden[..., -cache.hidden_size :],
        best=best,
        loss=on_device(answers, device),
        on_host=answers,
        kinds=tuple(example.kind for example in examples),
        num_tokens=sum(len(example) for example in examples),
        seed=seed,
    )


def places(where: Tensor, device: torch.device) -> Tensor:
    """where [...] bool in the host's memory -> the flat numbers of its true elements, on the device."""
    return on_device(where.flatten().nonzero()[:, 0], device)
