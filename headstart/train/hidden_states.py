"""Hidden states of the frozen trunk, by torch or by the native backend, cached on disk or computed for each batch.

The cache is a folder of shards. A shard is written aside and then renamed, so it is complete or absent:
`shard-N/hidden.bin` bfloat16 [rows, (taps + 1) x W], `shard-N/best.npy` int32 [rows] (argmax of the trunk; -1 at rows
without loss), `shard-N/index.json` {example key: [first row, rows]}.
"""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from headstart.core import NOT_FINITE_HINT, StepPlan
from headstart.engine.adapters import fit_to_program, lora_tables
from headstart.engine.load import Model
from headstart.engine.runner import whole_sequences_plan
from headstart.errors import ModelError
from headstart.formats.adapter import AdapterFile
from headstart.kernels.ops import Program
from headstart.layers.decoder import Decoder
from headstart.layers.lora import adapted
from headstart.train.losses import chunk_rows
from headstart.train.ops import trunk_outputs
from headstart.train.progress import print_line
from headstart.train.records import MAX_TOKENS, Example

Item = TypeVar("Item")
SHARD_TOKENS = 4_096
BATCH_TOKENS = 4_096
STALE_SECONDS = 3600
NATIVE_PASS_TOKENS = 512
"""Rows of a native pass, unless one example is longer. The logits of all rows exist at the same time."""


@dataclass(frozen=True, eq=False)
class Features:
    """The trunk's outputs for one example of T tokens."""

    hidden: Tensor  # [T, (taps + 1) x W] bfloat16: tapped streams, then the state after the final norm
    best: Tensor  # [T] int64: argmax of the trunk, -1 at rows without loss


class FeatureSource(Protocol):
    """Gives the hidden states of a batch: `FeatureCache` reads them, `TorchTrunk` computes them."""

    @property
    def hidden_size(self) -> int: ...

    def batch_features(
        self, examples: Seq[Example], tokens: Tensor, loss: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Of B examples with tokens [B, T] (device) and rows with loss [B, T] (host): hidden states
        [B, T, (taps + 1) x W] in `dtype` and the trunk's argmax [B, T] (-1 without loss), both on the device."""


class FeatureExtractor(Protocol):
    """Computes features for the cache: `TorchTrunk` or `NativeTrunk`."""

    def features(self, examples: Seq[Example]) -> Iterator[Features]:
        """Features of each example, in order; neighbours should have similar lengths."""


@dataclass(frozen=True, eq=False)
class TorchTrunk:
    """The frozen trunk in torch."""

    model: Decoder  # in the dtype of the forward
    lm_head: Tensor  # [V, W] in full precision, for the argmax
    tap: tuple[int, ...] = ()  # layers whose input streams are kept beside the final state

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embedding.dtype  # type: ignore[no-any-return]

    @property
    def hidden_size(self) -> int:
        return self.lm_head.shape[1]

    def features(self, examples: Seq[Example]) -> Iterator[Features]:
        """See `FeatureExtractor`."""
        device = self.lm_head.device
        for batch in group_by_tokens(examples, len, BATCH_TOKENS, padded=True):
            tokens = pad([torch.from_numpy(example.tokens).long() for example in batch]).to(device)
            for example, rows in zip(batch, trunk_hidden(self, tokens), strict=True):
                states = rows[: len(example)]
                best, wanted = torch.full((len(example),), -1), torch.from_numpy(example.loss)
                best[wanted] = trunk_argmax(self, states[wanted.to(device), -self.hidden_size :]).cpu()
                yield Features(states.to(torch.bfloat16).cpu(), best)

    def batch_features(
        self, examples: Seq[Example], tokens: Tensor, loss: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `FeatureSource`."""
        hidden = trunk_hidden(self, tokens)
        best = torch.full(tokens.shape, -1, device=tokens.device)
        rows = true_positions(loss, tokens.device)
        best.view(-1)[rows] = trunk_argmax(self, hidden.flatten(0, 1)[rows, -self.hidden_size :])
        return hidden.to(dtype), best


@torch.no_grad()
def trunk_hidden(trunk: TorchTrunk, tokens: Tensor) -> Tensor:
    """tokens [B, T], padded on the right -> tapped streams and states after the final norm [B, T, (taps + 1) x W]."""
    results = trunk_outputs(trunk.model, tokens, trunk.dtype, trunk.tap or "post_norm")
    hidden: Tensor = results["hidden"]
    return torch.cat((results["tapped"], hidden), dim=-1) if trunk.tap else hidden


@torch.no_grad()
def trunk_argmax(trunk: TorchTrunk, hidden: Tensor) -> Tensor:
    """hidden [N, W] -> argmax token [N]: in the forward's dtype first, then exactly among the near-best tokens."""
    coarse_head, chunk = trunk.model.lm_head.weight, chunk_rows(hidden)
    tokens = [_exact_argmax(part, part @ coarse_head.T, trunk.lm_head) for part in hidden.split(chunk)]
    return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=hidden.device)


def _exact_argmax(hidden: Tensor, coarse: Tensor, lm_head: Tensor) -> Tensor:
    """hidden [n, W], coarse logits [n, V] -> argmax [n]. Tokens within four bfloat16 units in the last place of the
    best are scored again with `lm_head`."""
    best = coarse.amax(-1, keepdim=True)
    rows, tokens = (coarse >= best - best.abs() * 2**-6).nonzero(as_tuple=True)
    scores = (hidden[rows].to(lm_head.dtype) * lm_head[tokens]).sum(-1)
    top = scores.new_full((len(hidden),), -torch.inf).scatter_reduce(0, rows, scores, "amax")
    winners = torch.where(scores == top[rows], tokens, coarse.shape[1])
    return tokens.new_full((len(hidden),), coarse.shape[1]).scatter_reduce(0, rows, winners, "amin")


class NativeTrunk:
    """The trunk on the native backend: the same bits as at run time, and several times faster than torch on a CPU."""

    def __init__(self, model: Model, tap: tuple[int, ...], adapter: AdapterFile | None = None) -> None:
        self._backend, self._tap, self._is_adapted = model.backend, tap, adapter is not None
        slots = 2 * max(NATIVE_PASS_TOKENS, MAX_TOKENS)
        decoder = model.decoder
        pools = [self._backend.kv_pool(slots, spec) for spec in decoder.kv_specs]
        states = [self._backend.state_pool(0, 0, 0, spec) for spec in decoder.state_specs]
        code: Program = decoder.program(pools, None, tap or "post_norm", states)
        if adapter is not None:
            code = adapted(code, lora_tables(model, [fit_to_program(adapter, model, code)]))
        self._handle = self._backend.prepare(code)

    def features(self, examples: Seq[Example]) -> Iterator[Features]:
        """See `FeatureExtractor`."""
        for group in group_by_tokens(examples, len, NATIVE_PASS_TOKENS):
            plan = _whole_sequences_plan(group)
            if self._is_adapted:
                plan.adapter_slots = np.zeros(plan.num_rows, np.int32)
            output = self._backend.run(self._handle, plan)
            states = [output[name] for name in (("tapped", "hidden") if self._tap else ("hidden",))]
            hidden = torch.from_numpy(np.concatenate(states, axis=1)).to(torch.bfloat16)
            best = np.full(plan.num_rows, -1)
            if len(plan.logit_rows):
                best[plan.logit_rows] = output["logits"].argmax(-1)
            for first, last in zip(plan.row_starts, plan.row_starts[1:], strict=False):
                yield Features(hidden[first:last], torch.from_numpy(best[first:last]))


def _whole_sequences_plan(examples: Seq[Example]) -> StepPlan:
    """One pass over whole sequences, with logits at the rows that carry loss."""
    wanted = np.flatnonzero(np.concatenate([example.loss for example in examples]))
    plan = whole_sequences_plan([example.tokens.tolist() for example in examples])
    return replace(plan, logit_rows=wanted.astype(np.int32))


class FeatureCache:
    """Features of examples by key, in `folder`, which is named after the trunk."""

    def __init__(self, folder: Path, hidden_size: int, num_taps: int = 0) -> None:
        self.folder, self.hidden_size, self.num_taps = folder, hidden_size, num_taps
        self.width = (num_taps + 1) * hidden_size
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("writing-*"):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:  # left by a killed process
                shutil.rmtree(path, ignore_errors=True)
        self._where: dict[str, tuple[int, int, int]] = {}  # key -> shard, first row, rows
        self._hidden: list[Tensor] = []
        self._best: list[Tensor] = []
        for path in sorted(folder.glob("shard-*")):
            try:
                self._open(path)
            except (FileNotFoundError, ValueError, RuntimeError, EOFError):  # a power cut, or half a copy
                print_line(f"{path} is damaged; its hidden states are computed again")
                shutil.rmtree(path)

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

    def batch_features(
        self, examples: Seq[Example], tokens: Tensor, loss: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `FeatureSource`."""
        features = [self[example.key] for example in examples]
        hidden, best = pad([part.hidden for part in features]), pad([part.best for part in features])
        return to_device(hidden, tokens.device).to(dtype), to_device(best, tokens.device)

    def fill(self, examples: Seq[Example], trunk: FeatureExtractor) -> Iterator[int]:
        """Compute missing features shard by shard; yields the tokens of each. Can be stopped at any point."""
        missing = {example.key: example for example in examples if example.key not in self}
        for group in group_by_tokens(list(missing.values()), len, SHARD_TOKENS):
            group = sorted(group, key=len)
            self.add(group, list(trunk.features(group)))
            yield sum(len(example) for example in group)

    def add(self, examples: Seq[Example], features: Seq[Features]) -> None:
        """Write the features of examples as one shard. Raises ModelError for hidden states that are not finite."""
        hidden = torch.cat([part.hidden for part in features]).to(torch.bfloat16)
        if not hidden.isfinite().all():
            raise ModelError("the model's hidden states hold NaN or infinity", NOT_FINITE_HINT)
        index, first = {}, 0
        for example in examples:
            index[example.key] = (first, len(example))
            first += len(example)
        # named by content: several processes may fill the same cache
        name = "shard-" + hashlib.sha256("".join(index).encode()).hexdigest()[:16]
        aside = Path(tempfile.mkdtemp(prefix="writing-", dir=self.folder))
        try:
            (aside / "hidden.bin").write_bytes(hidden.view(torch.int16).numpy().tobytes())
            np.save(aside / "best.npy", torch.cat([part.best for part in features]).int().numpy())
            (aside / "index.json").write_text(json.dumps(index))
            if not (self.folder / name).exists():
                aside.rename(self.folder / name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._open(self.folder / name)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor copied to the device without waiting for the copy."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def true_positions(mask: Tensor, device: torch.device) -> Tensor:
    """mask [...] bool on the host -> flat indices of its true elements, on the device."""
    return to_device(mask.flatten().nonzero()[:, 0], device)


def pad(parts: Seq[Tensor]) -> Tensor:
    """[T_i, ...] -> [B, T, ...], zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def group_by_tokens(
    items: Seq[Item], length: Callable[[Item], int], budget: int, *, padded: bool = False
) -> Iterator[list[Item]]:
    """Consecutive items of at most `budget` tokens together (with `padded`, padded to the longest), or one. length: of
    an item, in tokens."""
    group: list[Item] = []
    longest = total = 0
    for item in items:
        longest, total = max(longest, length(item)), total + length(item)
        if group and (longest * (len(group) + 1) if padded else total) > budget:
            yield group
            group, longest, total = [], length(item), length(item)
        group.append(item)
    if group:
        yield group
