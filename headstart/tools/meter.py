"""A backend that notes what every call costs; an engine runs on it as on the real one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.core import Sampled, SamplingRows, StepPlan
from headstart.kernels.chain import Chain
from headstart.kernels.ops import Backend, Buffer, Handle, Pool, Profiler, Program


class Meter:
    """Passes everything on to a backend; keeps the seconds of each pass of the trunk, of the head, of each draw. A step
    of a whole draft (Chain) counts as a pass of the head with its draw.

    `waits`: the backend returns before its device is done, so each pass is waited for.
    """

    def __init__(self, backend: Backend, *, waits: bool = False) -> None:
        self.backend, self._waits = backend, waits
        self.trunk: list[float] = []
        self.head: list[float] = []
        self.drafts: list[float] = []  # of the head's, those of whole drafts
        self.sampling: list[float] = []
        self._trunk: Handle = None
        self._handles: dict[int, tuple[Handle, bool]] = {}  # by id: is it the head's?
        self._profiles = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def profile(self, on: bool) -> None:
        """Start or stop taking the time of every part, for a backend that can."""
        assert isinstance(self.backend, Profiler)
        self._profiles = on
        for handle, _ in self._handles.values():
            self.backend.profile(handle, on)

    def prepare(self, program: Program, **more: Any) -> Handle:
        handle = self.backend.prepare(program, **more)
        self._trunk = self._trunk or handle  # its program is an engine's first; all others draft
        return handle

    def run(
        self, handle: Handle, plan: StepPlan, *, hidden_pool: Pool = None, hidden: Buffer = None
    ) -> Mapping[str, Buffer]:
        is_head = handle is not self._trunk
        if id(handle) not in self._handles:
            self._handles[id(handle)] = handle, is_head
            if self._profiles:
                self.profile(True)
        begin = time.perf_counter()
        results = self.backend.run(handle, plan, hidden_pool=hidden_pool, hidden=hidden)
        if self._waits:
            self.backend.numpy(results["hidden"])
        (self.head if is_head else self.trunk).append(time.perf_counter() - begin)
        return results

    def prepare_chain(self, steps: Sequence[tuple[Handle, int]], **more: Any) -> Chain | None:
        chain = self.backend.prepare_chain(steps, **more)
        return MeteredChain(self, chain) if chain else None

    def begin_sample(self, *arguments: Any, **more: Any) -> None:
        """Parts are timed one after the other."""

    def sample(self, logits: Buffer, rows: SamplingRows, **more: Any) -> Sampled:
        begin = time.perf_counter()
        sampled = self.backend.sample(logits, rows, **more)
        self.sampling.append(time.perf_counter() - begin)
        return sampled

    def reset(self) -> None:
        """Forget all times so far, the backend's own ones too."""
        for seconds in (self.trunk, self.head, self.drafts, self.sampling):
            seconds.clear()
        self.parts()

    def parts(self) -> dict[str, float]:
        """Seconds since the last reset by part of the trunk's pass, `draft` for all parts of the head's, `sampling`;
        only for a backend that is profiling."""
        assert isinstance(self.backend, Profiler)
        seconds_of: dict[str, float] = defaultdict(float)
        for handle, is_head in self._handles.values():
            for part, seconds in self.backend.times(handle, reset=True).items():
                if seconds:
                    seconds_of["draft" if is_head else part] += seconds
        if self.drafts:
            seconds_of["draft"] += sum(self.drafts)
        if self.sampling:
            seconds_of["sampling"] = sum(self.sampling)
        return dict(seconds_of)


@dataclass(frozen=True)
class MeteredChain:
    """A chain whose time goes to a meter."""

    meter: Meter
    chain: Chain

    def draft(self, *arguments: Any, **options: Any) -> Sequence[tuple[list[int], list[float]]]:
        begin = time.perf_counter()
        drafts = self.chain.draft(*arguments, **options)
        steps = max([len(tokens) for tokens, _ in drafts]) or 1
        found = [(time.perf_counter() - begin) / steps] * steps
        self.meter.head += found
        self.meter.drafts += found
        return drafts
