"""Evaluation for `headstart adapt`: splits off held-out records, and compares two heads on the same requests.

The split is the same in every run. Prompts are compared by their *shingles* (runs of SHINGLE tokens); shingles that
many prompts share (a system prompt, a template) are ignored. A record is held out by the smallest hash of its other
shingles (Broder's min-hash), which similar prompts most likely share. Training also leaves out records that resemble a
held-out prompt, such as a later turn of the same conversation.
"""

import hashlib
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.api import LLM
from headstart.config import FIXED_DEPTH, EngineConfig
from headstart.core import Float32, SamplingParams
from headstart.engine.load import Model, attach_head
from headstart.server.records import TextRecord
from headstart.stats import DraftStats
from headstart.tools.bench.summary import bootstrap_interval, draw_resamples

SHINGLE = 6  # tokens
HELD_OUT_EVERY = 10  # about one record in this many is held out
MIN_HELD_OUT, MAX_RESTS = 8, 3  # wanted held-out records; of few records up to MAX_RESTS in ten are held out
COMMON = 0.1  # shingles that a larger share of the prompts have are ignored
SIMILAR = 0.5  # prompts are similar if they share at least this share of the smaller one's shingles
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class RecordSplit:
    training: list[TextRecord]
    held_out: list[TextRecord]
    num_similar: int  # records in neither list, since they resemble a held-out one


def split_records(records: Seq[TextRecord]) -> RecordSplit:
    """Splits records in their order, without duplicates. With very few records none is held out."""
    records = list({(each.prompt_ids, each.response_ids): each for each in records}.values())
    shingles = _rare_shingles([_hash_shingles(each.prompt_ids) for each in records])
    rests = np.array([int(each.min()) % HELD_OUT_EVERY for each in shingles])
    most = next((rest for rest in range(MAX_RESTS) if (rests <= rest).sum() >= MIN_HELD_OUT), MAX_RESTS - 1)
    held = (rests <= most).tolist()
    if not any(held):
        return RecordSplit(records, [], 0)
    out = [each for each, is_held in zip(shingles, held, strict=True) if is_held]
    place = {number: index for index, number in enumerate(np.flatnonzero(held).tolist())}
    training = [number for number in range(len(records)) if number not in place]
    similar = _SimilarPrompts(out)
    kept = [number for number in training if not similar.has(shingles[number])]
    return RecordSplit([records[i] for i in kept], [records[i] for i in place], len(training) - len(kept))


def _hash_shingles(ids: Seq[int]) -> Hashes:
    """Returns the distinct hashes [n] of all runs of SHINGLE tokens; a single hash for a shorter prompt."""
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


def _rare_shingles(shingles: list[Hashes]) -> list[Hashes]:
    """Removes shingles that many prompts have. A prompt with only such shingles keeps all of them."""
    if not shingles:
        return []
    values, counts = np.unique(np.concatenate(shingles), return_counts=True)
    common = values[counts > max(2, COMMON * len(shingles))]
    rares = [each[~np.isin(each, common, assume_unique=True)] for each in shingles]
    return [rare if len(rare) else each for rare, each in zip(rares, shingles, strict=True)]


class _SimilarPrompts:
    def __init__(self, prompts: Seq[Hashes]) -> None:
        self._sizes = np.array([len(each) for each in prompts])
        values = np.concatenate(prompts)
        order = np.argsort(values, kind="stable")
        self._values, self._owners = values[order], np.repeat(np.arange(len(prompts)), self._sizes)[order]

    def has(self, prompt: Hashes) -> bool:
        first, last = (np.searchsorted(self._values, prompt, side) for side in ("left", "right"))
        owners = [self._owners[low:high] for low, high in zip(first, last, strict=True) if low < high]
        shared = np.bincount(np.concatenate(owners), minlength=len(self._sizes)) if owners else np.zeros(1)
        return bool((shared >= SIMILAR * np.minimum(self._sizes, len(prompt))).any())


def record_seed(record: TextRecord) -> int:
    """Returns the seed for sampling a record's answer again; it is the same in every run."""
    return int.from_bytes(hashlib.sha256(str(record.prompt_ids).encode()).digest()[:6], "big")


# Comparison of two heads: both give the same texts, so each request is a pair.

MAX_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 1024, 96  # longer prompts lose their beginning
BATCH_SIZE = 16
MIN_REQUESTS = 4  # requests that an interval needs


@dataclass(frozen=True)
class EvalPrompt:
    ids: Seq[int]
    params: SamplingParams

    @classmethod
    def of(cls, record: TextRecord) -> "EvalPrompt":
        """Returns the request of a record, with max_tokens set to the length of the recorded answer."""
        length = min(max(len(record.response_ids), 8), MAX_ANSWER_TOKENS)
        params = SamplingParams(max_tokens=length, temperature=record.temperature, seed=record_seed(record))
        return cls(record.prompt_ids[-MAX_PROMPT_TOKENS:], params)


@dataclass
class HeadComparison:
    """(drafts, accepted tokens) of each request with the old head (`before`) and the new one (`after`)."""

    before: list[tuple[int, int]] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)

    @property
    def lengths(self) -> tuple[float, float]:
        """Acceptance lengths (before, after)."""
        return _length(np.array(self.before)).item(), _length(np.array(self.after)).item()

    @property
    def difference(self) -> tuple[float, float] | None:
        """95 % interval of the acceptance lengths' difference, after - before: percentile bootstrap over requests. None
        for fewer than MIN_REQUESTS."""
        if len(self.before) < MIN_REQUESTS:
            return None
        drawn = draw_resamples(len(self.before))
        before, after = (_length(np.array(each)[drawn]) for each in (self.before, self.after))
        return bootstrap_interval(after - before)

    @property
    def is_better(self) -> bool:
        interval = self.difference
        return interval is not None and interval[0] > 0

    def line(self, what: str) -> str:
        if not self.before:
            return f"{what}: nothing measured"
        (before, after), interval = self.lengths, self.difference
        shown = f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else ""
        return f"{what}: acceptance length {before:.2f} -> {after:.2f}{shown}, {len(self.before)} requests"

    def data(self) -> dict[str, Any]:
        if not self.before:
            return {"requests": 0}
        (before, after), interval = self.lengths, self.difference
        names = {"requests": len(self.before), "before": round(before, 4), "after": round(after, 4)}
        return {**names, "difference": interval and [round(each, 4) for each in interval]}


def _length(counts: Float32) -> Float32:
    """Returns acceptance lengths: [..., n, 2] -> [...]."""
    total = counts.sum(-2)
    lengths: Float32 = 1 + total[..., 1] / np.maximum(total[..., 0], 1)
    return lengths


class HeadPair:
    """Two engines for a model: with its own head, and with the head in the folder `after`."""

    def __init__(self, model: Model, config: EngineConfig, after: Path) -> None:
        self._llms = [_make_llm(replace(model, head=head), config) for head in (model.head, attach_head(model, after))]

    def compare(self, prompts: Seq[EvalPrompt], done: Callable[[int], bool] = lambda count: True) -> HeadComparison:
        """Compares the heads on prompts in batches. Stops when `done`, called with the number so far, returns False."""
        found = HeadComparison()
        for start in range(0, len(prompts), BATCH_SIZE):
            part = prompts[start : start + BATCH_SIZE]
            pair = [_counts(llm, part) for llm in self._llms]
            both = [each for each in zip(*pair, strict=True) if all(drafts for drafts, _ in each)]
            found.before += [before for before, _ in both]
            found.after += [after for _, after in both]
            if not done(start + len(part)):
                break
        return found

    def encode(self, prompt: str) -> list[int]:
        return self._llms[0].encode(prompt)


def _make_llm(model: Model, config: EngineConfig) -> LLM:
    """Returns an engine with a fixed draft depth: the whole block if a draft is one pass, else FIXED_DEPTH."""
    assert model.head is not None
    llm = LLM(model, replace(config, drafter=model.head.spec.kind, depth=1, max_num_seqs=BATCH_SIZE))
    drafter = llm.engine.drafting.drafter
    assert drafter is not None
    whole = drafter.max_depth if drafter.costs_per == "pass" else FIXED_DEPTH
    llm.engine.drafting.depth = min(whole, drafter.max_depth)
    llm.engine.head_health.is_enabled = False
    return llm


def _counts(llm: LLM, prompts: Seq[EvalPrompt]) -> list[tuple[int, int]]:
    """Returns (drafts, accepted tokens) of each prompt; (0, 0) for a prompt that does not fit the context."""
    fits = [len(each.ids) + 1 < llm.engine.max_length for each in prompts]
    chosen = list(compress(prompts, fits))
    completions = iter(llm.generate([each.ids for each in chosen], [each.params for each in chosen]))
    stats = [next(completions).speculation if is_fitting else DraftStats() for is_fitting in fits]
    return [(each.drafts, each.accepted) for each in stats]
