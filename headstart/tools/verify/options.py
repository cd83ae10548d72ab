"""Options of `headstart verify`, and the grid of cells that covers every pair of their levels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np

from headstart.config import AUTO, Depth, EngineConfig
from headstart.engine.load import Model
from headstart.errors import UsageError
from headstart.models.shipped_heads import shipped_heads
from headstart.tools.prompts import builtin_prompts

Prompt = str | list[int]
TRANSFORMERS = "transformers"
MAX_SEED = 2**43  # a prompt's seed is the cell's seed times about a million, and must fit 64 bits
DEPTHS: tuple[Depth, ...] = (0, 1, 3, 5, AUTO)
FULL_DEPTHS: tuple[Depth, ...] = (0, 1, 2, 3, 4, 5, AUTO)
LONG_LENGTHS = (1100, 700, 530)
FULL: Mapping[str, Any] = {
    "temperatures": (0.0, 0.7, 1.0, 1.5), "depths": FULL_DEPTHS, "batch_sizes": (1, 4, 16), "chunk_sizes": (1, 37, 512),
    "min_texts": 2000, "long_lengths": LONG_LENGTHS,
}  # fmt: skip
"""Fields of VerifyOptions for --full."""


def plain_config(config: EngineConfig) -> EngineConfig:
    """The config for plain decoding of one sequence at a time, from its first token on."""
    return replace(config, drafter="none", depth=0, max_num_seqs=1, enable_prefix_caching=False)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `headstart verify`. Every pair of levels of two factors is in at least one cell of the grid."""

    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    prompts: tuple[Prompt, ...] | None = None
    raw: bool = False
    max_tokens: int = 64
    min_texts: int = 0  # cells are added until at least this many (cell, prompt) pairs are compared
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    depths: tuple[Depth, ...] = DEPTHS  # default depths are lowered to each drafter's limit
    drafters: tuple[str, ...] = ()  # empty: default_drafters of the model
    batch_sizes: tuple[int, ...] = (1, 8)
    chunk_sizes: tuple[int, ...] = (32, 512)
    prefix_caching: tuple[bool, ...] = (True, False)
    preemption: tuple[bool, ...] = (True, False)  # True: so few KV blocks that running sequences are preempted
    thread_counts: tuple[int, ...] = ()  # empty: run.default_threads
    seeds: tuple[int, ...] = (0,)
    long_lengths: tuple[int, ...] = ()  # tokens of longer prompts, made of `texts`; see long_contexts
    against: str | None = None  # TRANSFORMERS, or a transcript's path
    transcript: Path | None = None  # file to write

    def __post_init__(self) -> None:
        if wrong := [seed for seed in self.seeds if not 0 <= seed <= MAX_SEED]:
            raise UsageError(f"--seeds has {wrong[0]}, but a seed is between 0 and {MAX_SEED}")

    def long_contexts(self, model: Model) -> "VerifyOptions | None":
        """Returns options of a few cells whose prompts have `long_lengths` tokens, two in a pass: where rows are few,
        contexts above 512 tokens are split between threads. None: the model's context holds no such prompt."""
        context = min(model.config.max_length, self.config.max_model_len or model.config.max_length)
        lengths = [length for length in self.long_lengths if length + self.max_tokens <= context]
        if not lengths:
            return None
        words = [each if isinstance(each, list) else model.tokenizer.encode(each) for each in self.texts]
        prompts = [list(islice(cycle(chain(*words)), index, index + length)) for index, length in enumerate(lengths)]
        return replace(
            self, prompts=tuple(prompts), raw=True, min_texts=0, temperatures=self.temperatures[:2],
            depths=(1, AUTO), batch_sizes=(2,), chunk_sizes=(max(self.chunk_sizes),),
            prefix_caching=(False,), preemption=(False,),
        )  # fmt: skip

    @property
    def texts(self) -> list[Prompt]:
        """The prompts; without any the built-in ones."""
        return list(self.prompts or [prompt for _, prompt in builtin_prompts()])

    @property
    def loras(self) -> list[str]:
        """Name of each prompt's adapter: the model as it is ("") and its adapters, in turns."""
        return list(islice(cycle(["", *dict(self.config.adapters)]), len(self.texts)))

    def factors(self) -> dict[str, tuple[Any, ...]]:
        return {
            "temperature": self.temperatures, "depth": self.depths, "drafter": self.drafters or (AUTO,),
            "batch": self.batch_sizes, "chunk": self.chunk_sizes, "cache": self.prefix_caching,
            "preemption": self.preemption, "threads": self.thread_counts, "seed": self.seeds,
        }  # fmt: skip


def prompt_seed(seed: int, index: int) -> int:
    """Returns the seed of prompt `index`; each prompt has its own."""
    return seed * 1_000_003 + index


def default_drafters(model: Model, config: EngineConfig) -> tuple[str, ...]:
    """Returns the drafters to verify: the model's head, lookup, both together, and unless `config` names a head the
    other heads in this package. Without a head: lookup."""
    if model.head is None:
        return ("ngram",)
    own, shipped = model.head.spec.kind, shipped_heads(model.checkpoint) if config.head is None else {}
    return (own, "ngram", "mixed", *(kind for kind in shipped if kind != own))


GridCell = dict[str, Any]  # factor -> level
LevelPair = tuple[int, int, int, int]  # factor, level, other factor, level
MAX_CANDIDATES, NUM_SAMPLED = 4096, 256


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0, at_least: int = 0) -> list[GridCell]:
    """Returns a greedy covering array of strength 2: repeatedly adds the cell that covers most uncovered pairs of
    levels. Then adds random cells until there are `at_least` cells, if so many exist."""
    names = list(factors)
    levels = [range(len(factors[name])) for name in names]
    rng = np.random.default_rng(seed)
    missing = {(i, a, j, b) for i, j in combinations(range(len(names)), 2) for a, b in product(levels[i], levels[j])}
    cells: list[tuple[int, ...]] = [] if missing else list(product(*levels))
    while missing:
        best = max(_candidates(levels, rng, missing), key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        cells.append(best)
    wanted = min(max(at_least, len(cells)), int(np.prod([len(each) for each in levels])))
    distinct = dict.fromkeys(cells)
    while len(distinct) < wanted:
        distinct[tuple(int(rng.integers(len(each))) for each in levels)] = None
    return [{name: factors[name][level] for name, level in zip(names, row, strict=True)} for row in distinct]


def _pairs(row: tuple[int, ...]) -> set[LevelPair]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def _candidates(levels: list[range], rng: np.random.Generator, missing: set[LevelPair]) -> list[tuple[int, ...]]:
    """Returns all cells in random order; if there are too many, random cells that each cover a missing pair."""
    total = int(np.prod([len(each) for each in levels]))
    if total <= MAX_CANDIDATES:
        rows = list(product(*levels))
        return [rows[i] for i in rng.permutation(len(rows))]
    sample = [list(map(int, (rng.integers(len(each)) for each in levels))) for _ in range(NUM_SAMPLED)]
    wanted = sorted(missing)
    for row in sample:
        i, a, j, b = wanted[rng.integers(len(wanted))]
        row[i], row[j] = a, b
    return [tuple(row) for row in sample]
