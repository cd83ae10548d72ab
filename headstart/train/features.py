"""Trunk hidden states: computed once and kept on disk for later epochs, or made for each batch where that is fast.

The cache is a folder of shards, each complete or absent (written aside, then renamed):
`shard-N/hidden.bin` bfloat16 [rows, W], `shard-N/best.npy` int32 [rows] (argmax of the trunk; -1 where no loss needs
it), `shard-N/index.json` {example key: [first row, rows]}.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headstart.kernels.ops import StepInputs
from headstart.layers.decoder import Decoder
from headstart.train.data import Example
from headstart.train.losses import chunk_of
from headstart.train.ops import DraftMemory, TrainOps

SHARD_TOKENS = 65_536
BATCH_TOKENS = 4_096
STALE_SECONDS = 3600


@dataclass(frozen=True, eq=False)
class Features:
    """Of one example: `hidden` [T, (taps + 1) x W] bfloat16, tapped streams and then the state after the final norm;
    `best` [T] int64."""

    hidden: Tensor
    best: Tensor


@dataclass(frozen=True, eq=False)
class Trunk:
    """A frozen model: `model` in the arithmetic of the forward, `lm_head` [V, W] in full precision for the argmax;
    `tap`: streams that are kept beside the final state."""

    model: Decoder
    lm_head: Tensor
    tap: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embedding.dtype  # type: ignore[no-any-return]

    def features(self, examples: Sequence[Example]) -> Iterator[Features]:
        """Of each example, in order; neighbours should be of like length."""
        for batch in _groups(examples, BATCH_TOKENS, padded=True):
            yield from _compute(batch, self)

    def padded(
        self, examples: Sequence[Example], tokens: Tensor, answers: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `States`: computed now."""
        hidden = trunk_hidden(self, tokens)
        best = torch.full(tokens.shape, -1, device=tokens.device)
        where = on_device(answers.flatten().nonzero()[:, 0], tokens.device)
        best.view(-1)[where] = trunk_argmax(self, hidden.flatten(0, 1)[where, -self.hidden_size :])
        return hidden.to(dtype), best

    @property
    def hidden_size(self) -> int:
        return self.lm_head.shape[1]


class States(Protocol):
    """Where the hidden states of a batch come from: `FeatureCache`, or a `Trunk` that computes them."""

    @property
    def hidden_size(self) -> int: ...

    def padded(
        self, examples: Sequence[Example], tokens: Tensor, answers: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Of B examples, their tokens [B, T] on the device and the rows that carry loss [B, T] on the host: hidden
        states [B, T, (taps + 1) x W] and the trunk's choice [B, T] (-1 where no loss needs it), on the device."""


class Labeller(Protocol):
    """What computes hidden states: `Trunk` (torch), or the native forward."""

    def features(self, examples: Sequence[Example]) -> Iterator[Features]: ...


@torch.no_grad()
def trunk_hidden(trunk: Trunk, tokens: Tensor) -> Tensor:
    """tokens [B, T], padded on the right -> tapped streams and states after the final norm [B, T, (taps + 1) x W]."""
    ops = TrainOps(tokens.device, trunk.dtype)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    no_rows = torch.empty(0, dtype=torch.int64, device=tokens.device)
    kv, states = [DraftMemory() for _ in trunk.model.kv_specs], [None] * len(trunk.model.state_specs)
    program = trunk.model.program(kv, None, trunk.tap or "post_norm", states)
    results = program(ops, StepInputs(tokens, positions, no_rows))
    hidden: Tensor = results["hidden"]
    return torch.cat((results["tapped"], hidden), dim=-1) if trunk.tap else hidden


@torch.no_grad()
def trunk_argmax(trunk: Trunk, hidden: Tensor) -> Tensor:
    """hidden [N, W] -> argmax token [N]. Fast in the model's arithmetic, then exact among what rounding leaves open."""
    coarse_head, chunk = trunk.model.lm_head.weight, chunk_of(hidden)
    tokens = [_refine(part, part @ coarse_head.T, trunk.lm_head) for part in hidden.split(chunk)]
    return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=hidden.device)


def _refine(hidden: Tensor, coarse: Tensor, lm_head: Tensor) -> Tensor:
    """Coarse logits [n, V]: those within four units in the last place of bfloat16 of the best are scored again."""
    best = coarse.amax(-1, keepdim=True)
    rows, tokens = (coarse >= best - best.abs() * 2**-6).nonzero(as_tuple=True)
    scores = (hidden[rows].to(lm_head.dtype) * lm_head[tokens]).sum(-1)
    top = scores.new_full((len(hidden),), -torch.inf).scatter_reduce(0, rows, scores, "amax")
    winners = torch.where(scores == top[rows], tokens, coarse.shape[1])
    return tokens.new_full((len(hidden),), coarse.shape[1]).scatter_reduce(0, rows, winners, "amin")


class FeatureCache:
    """Features of examples by key, in `folder`, which is named after the trunk."""

    def __init__(self, folder: Path, hidden_size: int, num_taps: int = 0) -> None:
        self.folder, self.hidden_size, self.num_taps = folder, hidden_size, num_taps
        self.width = (num_taps + 1) * hidden_size
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("writing-*"):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:  # of a process that was killed
                shutil.rmtree(path, ignore_errors=True)
        self._where: dict[str, tuple[int, int, int]] = {}
        self._hidden: list[Tensor] = []
        self._best: list[Tensor] = []
        for path in sorted(folder.glob("shard-*")):
            self._open(path)

    def _open(self, path: Path) -> None:
        index = json.loads((path / "index.json").read_text())
        best = torch.from_numpy(np.load(path / "best.npy", mmap_mode="c"))
        size = len(best) * self.width
        hidden = torch.from_file(str(path / "hidden.bin"), shared=False, size=size, dtype=torch.bfloat16)
        for key, (first, count) in index.items():
            self._where[key] = (len(self._hidden), first, count)
        self._hidden.append(hidden.view(-1, self.width))
        self._best.append(best)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def __getitem__(self, key: str) -> Features:
        shard, first, count = self._where[key]
        rows = slice(first, first + count)
        return Features(self._hidden[shard][rows], self._best[shard][rows].long())

    def padded(
        self, examples: Sequence[Example], tokens: Tensor, answers: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `States`: those that are kept."""
        features = [self[example.key] for example in examples]
        hidden, best = pad([part.hidden for part in features]), pad([part.best for part in features])
        return on_device(hidden, tokens.device).to(dtype), on_device(best, tokens.device)

    def fill(self, examples: Sequence[Example], trunk: Labeller) -> Iterator[int]:
        """Compute what is missing, shard by shard, giving the tokens of each. Safe to stop at any point."""
        missing = {example.key: example for example in examples if example.key not in self}
        for group in _groups(list(missing.values()), SHARD_TOKENS):
            group = sorted(group, key=len)
            self.add(group, list(trunk.features(group)))
            yield sum(len(example) for example in group)

    def add(self, examples: Sequence[Example], features: Sequence[Features]) -> None:
        """Keep the features of examples as one shard."""
        index, first = {}, 0
        for example in examples:
            index[example.key] = (first, len(example))
            first += len(example)
        # named by content: processes may fill the same cache
        name = "shard-" + hashlib.sha256("".join(index).encode()).hexdigest()[:16]
        aside = Path(tempfile.mkdtemp(prefix="writing-", dir=self.folder))
        try:
            hidden = torch.cat([part.hidden for part in features]).to(torch.bfloat16)
            (aside / "hidden.bin").write_bytes(hidden.view(torch.int16).numpy().tobytes())
            np.save(aside / "best.npy", torch.cat([part.best for part in features]).int().numpy())
            (aside / "index.json").write_text(json.dumps(index))
            if not (self.folder / name).exists():
                aside.rename(self.folder / name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._open(self.folder / name)


def _compute(batch: list[Example], trunk: Trunk) -> Iterator[Features]:
    device = trunk.lm_head.device
    hidden = trunk_hidden(trunk, pad([torch.from_numpy(example.tokens).long() for example in batch]).to(device))
    for example, rows in zip(batch, hidden, strict=True):
        states = rows[: len(example)]
        best = torch.full((len(example),), -1)
        wanted = torch.from_numpy(example.loss)
        best[wanted] = trunk_argmax(trunk, states[wanted.to(device), -trunk.lm_head.shape[1] :]).cpu()
        yield Features(states.to(torch.bfloat16).cpu(), best)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host there; nobody waits for the copy."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def pad(parts: Sequence[Tensor]) -> Tensor:
    """[T_i, ...] -> [B, T, ...], zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def _groups(examples: Sequence[Example], budget: int, *, padded: bool = False) -> Iterator[list[Example]]:
    """Consecutive examples, up to `budget` tokens (with padding: to the longest of the group) or one example."""
    group: list[Example] = []
    longest = total = 0
    for example in examples:
        longest, total = max(longest, len(example)), total + len(example)
        if group and (longest * (len(group) + 1) if padded else total) > budget:
            yield group
            group, longest, total = [], len(example), len(example)
        group.append(example)
    if group:
        yield group
