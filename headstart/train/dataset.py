"""Training and held-out examples with their hidden states, and their batches.

The order of batches depends on (examples, seed, epoch) only.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headstart.core import Progress, no_progress
from headstart.errors import UsageError
from headstart.layers.weights import weights_fingerprint
from headstart.train.frozen_model import FrozenModel
from headstart.train.hidden_states import FeatureCache, FeatureSource, group_by_tokens, pad, to_device
from headstart.train.options import check_amount
from headstart.train.progress import print_line
from headstart.train.records import Example, SkippedRecords, count_tokens, encode_records, read_records

BUCKET, SMALL_BATCH = 256, 4096
"""Examples that are sorted by length before they are cut into batches, for each SMALL_BATCH tokens of a batch: little
padding, yet random neighbours."""
HELD_OUT_TOKENS = 40_000  # upper bound of the tokens of one evaluation, all kinds of text together


@dataclass(frozen=True, eq=False)
class Batch:
    """B sequences padded on the right to T rows."""

    tokens: Tensor  # [B, T] int64
    tapped: Tensor  # [B, T, taps x W] streams, as many as the cache keeps
    final: Tensor  # [B, T, W] after the final norm
    best: Tensor  # [B, T] int64 argmax of the trunk at row p; -1 where not known
    loss: Tensor  # [B, T] bool, row p predicts a token that carries loss
    loss_on_host: Tensor  # the same in host memory: decisions that depend on it must not wait for a GPU
    kinds: tuple[str, ...]  # [B]
    num_tokens: int  # without padding
    seed: int = 0  # of random draws for this batch


def plan_epoch(lengths: Sequence[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of example numbers: similar lengths, at most `budget` padded tokens (or one example) each."""
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(lengths))
    batches: list[list[int]] = []
    bucket = BUCKET * max(1, budget // SMALL_BATCH)
    for start in range(0, len(order), bucket):
        numbers = sorted(order[start : start + bucket].tolist(), key=lambda n: (lengths[n], n))
        batches += group_by_tokens(numbers, lengths.__getitem__, budget, padded=True)
    return [batches[i] for i in rng.permutation(len(batches))]


def collate(
    examples: Sequence[Example], source: FeatureSource, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Batch:
    """A batch of these examples with their hidden states."""
    tokens = to_device(pad([torch.from_numpy(example.tokens).long() for example in examples]), device)
    loss = pad([torch.from_numpy(example.loss) for example in examples])
    hidden, best = source.batch_features(examples, tokens, loss, dtype)
    return Batch(
        tokens=tokens, tapped=hidden[..., : -source.hidden_size], final=hidden[..., -source.hidden_size :], best=best,
        loss=to_device(loss, device), loss_on_host=loss, kinds=tuple(example.kind for example in examples),
        num_tokens=sum(len(example) for example in examples), seed=seed,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Examples of a run and the source of their hidden states."""

    training: list[Example]
    held_out: list[Example]
    features: FeatureSource
    counts: dict[str, dict[str, int]]  # see `count_tokens`
    skipped: list[str]  # one line for each skipped record that is named

    @property
    def identity(self) -> str:
        """Names the training examples and their order."""
        return hashlib.sha256("".join(example.key for example in self.training).encode()).hexdigest()[:16]


def prepare_data(
    frozen_model: FrozenModel, files: Sequence[Path], work: Path, seed: int, label_seconds: float | None,
    max_tokens: int | None, min_text_tokens: int = 0, progress: Progress = no_progress,
) -> TrainingData:  # fmt: skip
    """Read, shuffle and split the records, and compute hidden states until `label_seconds` or `max_tokens` are used.
    Hidden states that an earlier run cached in `work` are used in any case. Raises UsageError for too few records, and
    for fewer than `min_text_tokens` tokens with loss."""
    skipped = SkippedRecords()
    examples = encode_records(read_records(files, skipped), frozen_model.text, skipped)
    for line in skipped.lines():
        print_line(line)
    check_amount(sum(int(example.loss.sum()) for example in examples), min_text_tokens)
    order = np.random.default_rng(seed).permutation(len(examples))
    held_out, training = _split_held_out([examples[i] for i in order])
    if max_tokens is not None:
        training = _first_tokens(training, max_tokens)
    features: FeatureSource = frozen_model.trunk
    if frozen_model.engine_config.device != "cuda":  # a GPU computes hidden states faster than a disk stores them
        features = cache = _open_cache(frozen_model, work)
        _fill_cache(cache, frozen_model, held_out, None, progress)
        _fill_cache(cache, frozen_model, training, label_seconds, progress)
        training = [example for example in training if example.key in cache]
    counts = count_tokens(training)
    for kind, row in counts.items():
        print_line(f"{kind}: {row['sequences']} sequences, {row['tokens']:,} tokens, loss on {row['loss']:,}")
    return TrainingData(training, held_out, features, counts, skipped.lines())


def _split_held_out(examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """(held out, training). Where the hash holds out none of few records, one in ten is held out."""
    held_out = [example for example in examples if example.held_out]
    training = [example for example in examples if not example.held_out]
    if not held_out:
        held_out, training = training[: -(-len(training) // 10)], training[-(-len(training) // 10) :]
    if not training:
        raise UsageError("one record is not enough to train and to evaluate", "add data")
    return _first_tokens(held_out, HELD_OUT_TOKENS), training


def _first_tokens(examples: list[Example], max_tokens: int) -> list[Example]:
    ends = np.cumsum([len(example) for example in examples])
    return examples[: max(1, int(np.searchsorted(ends, max_tokens, side="right")))]


def _open_cache(frozen_model: FrozenModel, work: Path) -> FeatureCache:
    tap = frozen_model.trunk.tap
    name = f"cache-{weights_fingerprint(frozen_model.tensors)}-{frozen_model.arithmetic}"
    return FeatureCache(work / "-".join((name, *map(str, tap))), frozen_model.config.hidden_size, len(tap))


def _fill_cache(
    cache: FeatureCache, frozen_model: FrozenModel, examples: list[Example], seconds: float | None, progress: Progress
) -> None:
    missing = [example for example in examples if example.key not in cache]
    if not missing:
        return
    total, finished, started = sum(map(len, missing)), 0, time.monotonic()
    for tokens in cache.fill(missing, frozen_model.feature_extractor()):
        finished += tokens
        spent = time.monotonic() - started
        share = finished / total if seconds is None else max(finished / total, spent / seconds)
        progress(min(round(100 * share), 100), 100, f"hidden states, {finished:,} tokens, {finished / spent:.0f} tok/s")
        if seconds is not None and spent > seconds:
            break
