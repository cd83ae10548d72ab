"""Where the time of a pass and of an engine step goes, part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headstart.core import Sequence
from headstart.engine.engine import Engine
from headstart.errors import UsageError
from headstart.kernels.ops import Profiler
from headstart.tools.meter import Meter

PASS_REPEATS, PASS_SECONDS = 10, 1.0
"""So many passes are profiled, or as many as begin in this time."""
STEP_SECONDS = 4.0
"""No step of a profiled generation begins later."""


def require_profiler(meter: Meter) -> None:
    """Raises UsageError for a backend that does not know the parts of its passes."""
    if not isinstance(meter.backend, Profiler):
        raise UsageError(
            f"--profile: backend {meter.backend.name} does not tell parts of a pass apart",
            "use --backend native, or leave --profile out",
        )


@contextmanager
def profiling(meter: Meter) -> Iterator[None]:
    """The backend takes the time of every part meanwhile."""
    meter.profile(True)
    try:
        yield
    finally:
        meter.profile(False)


def profile_pass(meter: Meter, forward: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of one pass, from rows wanted to logits; `python` is what is not in the backend's parts."""
    forward()
    meter.reset()
    begin = time.perf_counter()
    count = 0
    while count < PASS_REPEATS and (count == 0 or time.perf_counter() - begin < PASS_SECONDS):
        forward()
        count += 1
    return _split(meter, time.perf_counter() - begin, count)


def profile_steps(meter: Meter, engine: Engine, sequence: Sequence) -> dict[str, Any]:
    """Milliseconds of one engine step after the prompt's, over the rest of a submitted sequence."""
    while engine.has_work and not sequence.num_output:
        engine.step(lambda deltas: None)
    meter.reset()
    tokens, count = sequence.num_output, 0
    begin = time.perf_counter()
    while engine.has_work and time.perf_counter() - begin < STEP_SECONDS:
        engine.step(lambda deltas: None)
        count += 1
    wall = time.perf_counter() - begin
    engine.abort(sequence.request.request_id)
    return {"steps": count, "tokens": sequence.num_output - tokens, **_split(meter, wall, max(count, 1))}


def _split(meter: Meter, wall: float, count: int) -> dict[str, Any]:
    parts = meter.parts()
    parts["python"] = max(wall - sum(parts.values()), 0.0)
    return {
        "wall_ms": wall / count * 1e3,
        "parts_ms": {part: seconds / count * 1e3 for part, seconds in parts.items()},
    }
