"""This machine, measured with the model itself: passes of 1, 8 and 128 rows, the engine's own time, a draft step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from statistics import median

from headstart.config import EngineConfig
from headstart.core import Progress, SamplingParams, Span
from headstart.engine.load import Model as Loaded
from headstart.errors import UsageError
from headstart.tools.plan.roofline import Pass
from headstart.tools.prefilled import Prefilled, in_turns

BATCHES = (1, 8)
CONTEXTS = (128, 1024)
PROMPT_ROWS = 128
WORKS = (
    *(Pass(batch, 1, context) for context in CONTEXTS for batch in BATCHES),
    *(Pass(1, max(BATCHES), context) for context in CONTEXTS),
    *(Pass(1, PROMPT_ROWS, context, logit_rows=1) for context in CONTEXTS),
)
"""Passes that calibrate: 1 and 8 sequences, 8 rows of one, and a part of a prompt, at two contexts. What rows cost when
there are many cannot be told from few: tiles are filled, and keys are read once for all of them."""
PASSES_BUDGET_S = 6.0
ENGINE_STEPS, ENGINE_PROMPT = 24, 64
ENGINE_DEPTH = 3
MEMORY_SHARE = 0.5
"""Share of the free memory that the caches of a measurement may take."""


class Passes(Prefilled):
    """A loaded model with as many prefilled sequences as the works need; times single passes over them."""

    def __init__(self, loaded: Loaded, config: EngineConfig, works: Seq[Pass], progress: Progress) -> None:
        self.config = config
        longest = max(int(work.context + work.rows) for work in works)
        most = max(work.sequences for work in works)
        length, batch = max(longest, 4 * ENGINE_PROMPT), max(most, *BATCHES)
        if length > loaded.config.max_length:
            raise UsageError(f"{length} positions are more than the model's context of {loaded.config.max_length}")
        blocks = batch * -(-length // config.block_size)
        _refuse_too_much(loaded, blocks * config.block_size)
        engine_config = replace(
            config,
            drafter="auto" if loaded.head else "none",
            depth=min(ENGINE_DEPTH, loaded.head.spec.depth_limit) if loaded.head else ENGINE_DEPTH,
            max_model_len=length,
            max_num_seqs=max(config.max_num_seqs, batch),
            kv_blocks=blocks,
            enable_prefix_caching=False,
        )
        super().__init__(loaded, engine_config)
        for index in range(most):
            progress(index, most, "filling caches")
            self.fill(max(int(work.context) for work in works if work.sequences > index), longest)

    def seconds(self, work: Pass) -> float:
        """The backend's time for one pass. Rows of a prompt see half of each other."""
        rows = int(work.rows)
        logits = int(work.num_logits) // work.sequences
        start = int(work.context) - (rows // 2 if logits < rows else 0)
        return self.seconds_of([Span(each, start, rows, logits) for each in self.sequences[: work.sequences]])

    def time(self, works: Seq[Pass], budget_s: float, progress: Progress) -> dict[Pass, float]:
        """Median seconds."""
        return {work: median(times) for work, times in in_turns(works, self.seconds, budget_s, progress).items()}

    def engine_seconds(self, batch: int, depth: int) -> dict[str, float]:
        """Median seconds of an engine step of `batch` greedy sequences outside the trunk's pass: host, draft."""
        params = SamplingParams(max_tokens=ENGINE_STEPS * (1 + depth) + 8, ignore_eos=True)
        requests = [self.llm.request(self.repeated_text(ENGINE_PROMPT), params, depth=depth) for _ in range(batch)]
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


def _refuse_too_much(loaded: Loaded, positions: int) -> None:
    needed, free = positions * (loaded.config.hidden_size * 4 + cache_bytes(loaded)), loaded.backend.free_memory()
    if needed > MEMORY_SHARE * free:
        what = f"the caches of this measurement need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        raise UsageError(what, "measure fewer sequences or shorter contexts")


def cache_bytes(loaded: Loaded) -> int:
    """Bytes of keys and values of one position."""
    return sum(loaded.backend.kv_bytes(spec) for spec in loaded.decoder.kv_specs)
