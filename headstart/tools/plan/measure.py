"""This machine, measured with the model itself: passes of 1 and 8 rows, the engine's own time, a draft step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import cast

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import Progress, SamplingParams, Sequence, Span
from headstart.engine.load import Model as Loaded
from headstart.errors import UsageError
from headstart.kernels.ops import Backend
from headstart.tools.bench.step import affordable_repeats
from headstart.tools.meter import Meter
from headstart.tools.plan.roofline import Pass
from headstart.tools.prompts import builtin_prompts

BATCHES = (1, 8)
CONTEXTS = (128, 1024)
WORKS = (
    *(Pass(batch, 1, context) for context in CONTEXTS for batch in BATCHES),
    *(Pass(1, max(BATCHES), context) for context in CONTEXTS),
)
"""Passes that calibrate: 1 and 8 sequences, and 8 rows of one, at two contexts."""
PASSES_BUDGET_S = 6.0
ENGINE_STEPS, ENGINE_PROMPT = 24, 64
ENGINE_DEPTH = 3
MEMORY_SHARE = 0.5
"""Share of the free memory that the caches of a measurement may take."""


class Passes:
    """A loaded model with as many prefilled sequences as the works need; times single passes over them."""

    def __init__(self, loaded: Loaded, config: EngineConfig, works: Seq[Pass], progress: Progress) -> None:
        self.model, self.config = loaded, config
        self.meter = Meter(loaded.backend, waits=config.device != "cpu")
        length = max(int(work.context + work.rows) for work in works)
        batch = max(work.sequences for work in works)
        length, batch = max(length, 4 * ENGINE_PROMPT), max(batch, *BATCHES)
        if length > loaded.config.max_length:
            raise UsageError(f"{length} positions are more than the model's context of {loaded.config.max_length}")
        blocks = batch * -(-length // config.block_size)
        self._refuse_too_much(blocks)
        engine_config = replace(
            config,
            drafter="auto" if loaded.head else "none",
            depth=ENGINE_DEPTH,
            max_model_len=length,
            max_num_seqs=max(config.max_num_seqs, batch),
            kv_blocks=blocks,
            enable_prefix_caching=False,
        )
        self.llm = LLM(replace(loaded, backend=cast(Backend, self.meter)), engine_config)
        self.engine = self.llm.engine
        text = self.llm.encode(builtin_prompts()[0][1])
        self._tokens = (text * -(-length // len(text)))[:length]
        self._sequences: list[Sequence] = []
        self._prefill(works, progress)

    def _refuse_too_much(self, blocks: int) -> None:
        loaded, per_block = self.model, self.config.block_size
        needed = blocks * per_block * (loaded.config.hidden_size * 4 + cache_bytes(loaded))
        free = loaded.backend.free_memory()
        if needed > MEMORY_SHARE * free:
            raise UsageError(
                f"the caches of this measurement need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
                "measure fewer sequences or shorter contexts",
            )

    def _prefill(self, works: Seq[Pass], progress: Progress) -> None:
        """Real keys and values in every block: untouched memory would be read from one page."""
        wanted = [
            max(int(work.context) for work in works if work.sequences > index)
            for index in range(max(work.sequences for work in works))
        ]
        budget, longest = self.engine.scheduler.budget, max(int(work.context + work.rows) for work in works)
        for index, context in enumerate(wanted):
            progress(index, len(wanted), "filling caches")
            sequence = Sequence(self.llm.request(self._tokens, SamplingParams()), 0, self._tokens, index)
            reserved = self.engine.memory.reserve(sequence, longest)
            assert reserved
            for start in range(0, context, budget):
                self.engine.runner.forward([Span(sequence, start, min(budget, context - start), 1)])
            self._sequences.append(sequence)

    def seconds(self, work: Pass) -> float:
        """The backend's time for one pass with logits for every row."""
        start, rows = int(work.context), int(work.rows)
        self.engine.runner.forward([Span(each, start, rows, rows) for each in self._sequences[: work.sequences]])
        return self.meter.trunk[-1]

    def time(self, works: Seq[Pass], budget_s: float, progress: Progress) -> dict[Pass, float]:
        """Median seconds, taken in turns: what slows the machine down for a while slows all of them down."""
        for index, work in enumerate(works):
            progress(index, len(works), "warming up")
            self.seconds(work)
        samples = {work: [self.seconds(work)] for work in works}
        wanted = {work: affordable_repeats(samples[work][0], budget_s / len(works)) for work in works}
        for turn in range(1, max(wanted.values())):
            progress(turn, max(wanted.values()), "timing passes")
            for work in (work for work in works if turn < wanted[work]):
                samples[work].append(self.seconds(work))
        return {work: median(times) for work, times in samples.items()}

    def release(self) -> None:
        """Give the caches back to the engine."""
        for sequence in self._sequences:
            self.engine.memory.release(sequence)
        self._sequences = []

    def engine_seconds(self, batch: int, depth: int) -> dict[str, float]:
        """Median seconds of an engine step of `batch` greedy sequences outside the trunk's pass: host, draft."""
        params = SamplingParams(max_tokens=ENGINE_STEPS * (1 + depth) + 8, ignore_eos=True)
        requests = [self.llm.request(self._tokens[:ENGINE_PROMPT], params, depth=depth) for _ in range(batch)]
        sequences = [sequence for request in requests for sequence in self.engine.submit(request)]
        while any(not sequence.num_output for sequence in sequences):
            self.engine.step(lambda deltas: None)
        marks = [dict(self.engine.seconds)]
        for _ in range(ENGINE_STEPS):
            self.engine.step(lambda deltas: None)
            marks.append(dict(self.engine.seconds))
        for request in requests:
            self.engine.abort(request.request_id)
        return {name: median(after[name] - before[name] for before, after in pairwise(marks)) for name in marks[0]}


def cache_bytes(loaded: Loaded) -> int:
    """Bytes of keys and values of one position."""
    return sum(loaded.backend.kv_bytes(spec) for spec in loaded.decoder.kv_specs)
