"""What the engine itself costs: microseconds a step, by part, over a backend that computes nothing.

    python benchmarks/host.py --steps 100

The backend's own time is taken off; its trunk pass reads some memory, as weights would be read, so that the engine
finds its caches as a real pass leaves them. Every fifth drafted position is wrong. Medians over the steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.config import EngineConfig
from headstart.core import Request, Sampled, SamplingParams, SamplingRows, StepPlan
from headstart.engine.engine import Engine
from headstart.engine.load import Model, load_model
from headstart.engine.make import make_engine
from headstart.kernels.ops import Program
from headstart.tools.tiny import write_tiny

VOCAB, PROMPT, WRONG_EVERY = 131, 200, 5
CACHE_LINE = 64
PARTS = ("schedule", "forward", "judge", "commit", "propose", "other", "total")
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "edits": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}},
}


class Clock:
    """Seconds spent in named parts since the last `take`; what a part's inner parts spend is theirs alone."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                taken = time.perf_counter() - started
                self.spent[name] = self.spent.get(name, 0.0) + taken - self._inner.pop()
                self._inner[-1] += taken

        return run

    def take(self) -> dict[str, float]:
        """Microseconds by part."""
        spent, self.spent = self.spent, {}
        return {name: seconds * 1e6 for name, seconds in spent.items()}


class NullBackend:
    """No arithmetic: the token of a position is a function of the position. A pass reads `num_bytes` of memory."""

    name = "null"
    runs_on = "cpu"

    def __init__(self, clock: Clock, num_bytes: int) -> None:
        self._drafting = False
        self._weights = np.ones(num_bytes, np.uint8)
        self.run = clock.timed("backend", self._run)
        self.rows = clock.timed("backend", lambda x, rows: x)
        self.sample = clock.timed("backend", self._sample)
        self.draft = clock.timed("backend", self._draft)

    def prepare_chain(self, steps: Any, **about: Any) -> NullBackend:
        return self

    def _draft(self, first: Any, plan: StepPlan, rows: SamplingRows, depths: list[int], *_: Any, **__: Any) -> Any:
        self._run(first, plan)
        return [
            ([self._token(at + i, True) for i in range(depth)], [])
            for at, depth in zip(rows.position.tolist(), depths, strict=True)
        ]

    def prepare(self, program: Program, *, hidden_width: int = 0) -> Program:
        return program

    def free_memory(self) -> int:
        return 1 << 30

    def _run(self, program: Program, plan: StepPlan, *, hidden_pool: Any = None, hidden: Any = None) -> dict[str, None]:
        self._drafting = plan.hidden_slots is not None or hidden is not None
        self._weights[:: CACHE_LINE * (16 if self._drafting else 1)].sum()  # a head is much smaller than a trunk
        return {"logits": None, "hidden": None}

    def _sample(self, logits: Any, rows: SamplingRows, **options: Any) -> Sampled:
        return Sampled(self._token(rows.position, self._drafting), [None] * len(rows))

    def _token(self, position: Any, drafting: bool) -> Any:
        return 3 + (position * 40503 + (drafting & (position % WRONG_EVERY == 0))) % (VOCAB - 3)

    def index(self, ids: NDArray[np.int64]) -> None: ...
    def kv_bytes(self, spec: Any) -> int:
        return 1

    hidden_bytes = kv_bytes

    def loaded(self) -> None: ...
    def kv_pool(self, num_slots: int, spec: Any) -> str:
        return "pool"

    hidden_pool = kv_pool


def make(model: Model, batch: int, depth: int, params: SamplingParams, num_bytes: int) -> tuple[Engine, Clock]:
    """An engine with `batch` sequences past their prompts."""
    clock = Clock()
    config = EngineConfig(threads=1, depth=depth, max_num_seqs=batch, kv_blocks=batch * 512)
    engine = make_engine(replace(model, backend=NullBackend(clock, num_bytes)), config)
    for i in range(batch):
        prompt = tuple(3 + (i + j) % (VOCAB - 3) for j in range(PROMPT))
        engine.submit(Request(request_id=str(i), prompt_ids=prompt, params=params, seed=i, stop_ids=frozenset({2})))
    while any(s.num_output < 4 for s in (*engine.scheduler.waiting, *engine.scheduler.running)):
        engine.step(lambda deltas: None)
    for owner, name, part in (
        (engine.scheduler, "schedule", "schedule"),
        (engine.runner, "forward", "forward"),
        (engine, "_judge", "judge"),
        (engine, "_commit", "commit"),
        (engine.drafting, "propose", "propose"),
        (engine, "step", "other"),
    ):
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
    return engine, clock


def measure(engine: Engine, clock: Clock, steps: int) -> dict[str, float]:
    """Median microseconds a step, by part, without the backend's."""
    taken: list[dict[str, float]] = []
    for _ in range(steps):
        clock.take()
        engine.step(lambda deltas: None)
        parts = clock.take()
        parts.pop("backend")
        taken.append({**parts, "total": sum(parts.values())})
    return {name: median(parts.get(name, 0.0) for parts in taken) for name in PARTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--megabytes", type=int, default=128, help="memory that a trunk pass reads")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 3])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny("mimo", Path(folder) / "tiny", max_position_embeddings=8192, vocab_size=VOCAB)
        model = load_model(str(path), EngineConfig(threads=1))
        print(f"{'sampling':9}{'batch':>6}{'depth':>6}" + "".join(f"{name:>10}" for name in PARTS))
        for name, fields in SAMPLING.items():
            params = SamplingParams(max_tokens=4096, **fields)
            for depth in args.depths:
                for batch in args.batches:
                    engine, clock = make(model, batch, depth, params, args.megabytes << 20)
                    found = measure(engine, clock, args.steps)
                    numbers = "".join(f"{found[part]:10.0f}" for part in PARTS)
                    print(f"{name:9}{batch:6}{depth:6}{numbers}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
