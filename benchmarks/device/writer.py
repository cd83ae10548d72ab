"""Batched text generation by a trunk in plain torch: one token per sequence and pass.

A slot is a row of static caches [slots, kv heads, length, head dim]. A pass runs entirely on the device, as one CUDA
graph on a GPU. Every few passes the host removes finished texts and fills free slots with prompts. Tokens are
deterministic for jobs, seed, sizes and device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from headstart.errors import UsageError
from headstart.kernels.ops import AttentionSpec, StepInputs
from headstart.kernels.specs import RopeSpec
from headstart.layers.attention import Attention
from headstart.layers.decoder import Decoder
from headstart.train.hidden_states import pad, to_device
from headstart.train.ops import TrainingKV, TrainOps

PASSES = 16
"""Passes between two checks by the host."""
HALVINGS = 12
"""Bisection steps for the lowest probability that top-p keeps."""
PREFILL_TOKENS = 32_768


@dataclass(frozen=True)
class Job:
    """A prompt to continue. `top_p` below 1 needs one of the writer's first slots."""

    ids: tuple[int, ...]
    kind: str
    temperature: float
    most: int
    top_p: float = 1.0


@dataclass(frozen=True)
class Written:
    """A finished text. `ended`: the last of `tokens` is an end token."""

    job: Job
    tokens: list[int]
    ended: bool


@dataclass(eq=False)
class Cache:
    """Keys and values of one layer [slots, K, length, D]."""

    keys: Tensor
    values: Tensor


class SlotOps(TrainOps):
    """Ops over one new row per slot [slots, 1, W]."""

    def __init__(self, ropes: dict[RopeSpec, tuple[Tensor, Tensor]], positions: Tensor, length: int) -> None:
        self._tables, self._positions = ropes, positions
        places = torch.arange(length, device=positions.device)
        dtype = next(iter(ropes.values()))[0].dtype
        seen = torch.zeros(len(positions), 1, 1, length, dtype=dtype, device=positions.device)
        self._mask = seen.masked_fill_(places > positions[:, :, None, None], float("-inf"))

    def _rope_table(self, positions: Tensor, spec: RopeSpec) -> tuple[Tensor, Tensor]:
        cos, sin = self._tables[spec]
        return cos[self._positions], sin[self._positions]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, num_parts: int = 1) -> Tensor:
        if num_parts > 1 or weight.shape[-1] != x.shape[-1]:
            return super().rms_norm(x, weight, eps, num_parts)
        return rms_norm(x, weight.shape, weight, eps)  # one kernel

    def store_kv(self, k: Tensor, v: Tensor, pool: Cache, spec: AttentionSpec) -> None:
        for kept, rows in ((pool.keys, k), (pool.values, v)):
            new = rows.unflatten(-1, (spec.num_kv_heads, -1)).transpose(1, 2)
            kept.scatter_(2, self._positions[:, None, :, None].expand_as(new), new)

    def attend(self, q: Tensor, pool: Cache, spec: AttentionSpec, sinks: Any = None, chosen: Any = None) -> Tensor:
        # query heads of a group are adjacent rows, so that keys need no repetition
        rows = q.view(len(q), spec.num_kv_heads, -1, spec.head_dim)
        mask = self._mask.expand(-1, -1, rows.shape[2], -1)
        out = scaled_dot_product_attention(rows, pool.keys, pool.values, attn_mask=mask, scale=spec.scale)
        return out.reshape(len(q), 1, -1)


def top_p_mask(probs: Tensor, top_p: Tensor) -> Tensor:
    """Top-p mask of probs [N, V] for top_p [N], by bisection of the threshold."""
    low, high = torch.zeros_like(top_p), probs.amax(-1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = torch.where(probs >= middle[:, None], probs, 0).sum(-1) >= top_p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return probs >= low[:, None]


class Writer:
    """Generates `slots` sequences of at most `length` tokens; the first `narrow` slots support top-p. Raises UsageError
    for trunks with other state than KV, or with attention to a part of it."""

    def __init__(self, model: Decoder, ends: Sequence[int], slots: int, length: int, narrow: int) -> None:
        mixers = [layer.mixer for layer in model.layers]
        if not all(isinstance(mixer, Attention) and _plain(mixer) for mixer in mixers):
            raise UsageError("only trunks of plain attention can write text here", "headstart data can with all")
        self.model, self.slots, self.length, self.narrow = model, slots, length, narrow
        weight = model.embedding
        self.device, dtype = weight.device, weight.dtype
        self.caches = [
            Cache(*(torch.zeros(slots, spec.num_kv_heads, length, spec.head_dim, dtype=dtype, device=self.device)
                    for _ in range(2)))
            for spec in (m.config.spec for m in mixers)
        ]  # fmt: skip
        ops, places = TrainOps(self.device, dtype), torch.arange(length, device=self.device)
        self._ropes = {m.config.rope: ops._rope_table(places, m.config.rope) for m in mixers if m.config.rope}
        self._ends = frozenset(ends)
        self._program = model.program(self.caches)
        self._rows = torch.arange(slots, device=self.device)
        self.tokens, self.positions = (torch.zeros(slots, 1, dtype=torch.int64, device=self.device) for _ in range(2))
        self.temperature, self.warm, self.top_p = (torch.ones(slots, device=self.device) for _ in range(3))
        self.out = torch.zeros(slots, PASSES, dtype=torch.int64, device=self.device)
        self.cursor = torch.zeros(slots, 1, dtype=torch.int64, device=self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._jobs: list[Job | None] = [None] * slots
        self._texts: list[list[int]] = [[] for _ in range(slots)]

    @torch.inference_mode()
    def run(
        self, jobs: deque[Job], narrow: deque[Job], follow: Callable[[Written], None], late: Callable[[], bool]
    ) -> Iterator[Written]:
        """Yields texts as they finish. `follow` gets each first and may append jobs to the queues. If `late`,
        unfinished texts are dropped."""
        self._jobs = [None] * self.slots
        while not late():
            self._fill(jobs, narrow)
            if not any(self._jobs):
                return
            self._passes()
            for written in self._ended(self.out.cpu().numpy()):
                follow(written)
                yield written

    def _fill(self, jobs: deque[Job], narrow: deque[Job]) -> None:
        taken: list[tuple[int, Job]] = []
        for slot in range(self.slots):
            if self._jobs[slot] is None:
                queue = narrow if slot < self.narrow and narrow else jobs
                if queue:
                    taken.append((slot, queue.popleft()))
        group: list[tuple[int, Job]] = []
        for slot, job in sorted(taken, key=lambda each: len(each[1].ids)):
            if group and len(job.ids) * (len(group) + 1) > PREFILL_TOKENS:
                self._prefill(group)
                group = []
            group.append((slot, job))
        if group:
            self._prefill(group)

    def _prefill(self, group: list[tuple[int, Job]]) -> None:
        """Computes KV of all but the last token of each prompt, which the next pass reads."""
        slots = to_device(torch.tensor([slot for slot, _ in group]), self.device)
        prompts = [torch.tensor(job.ids) for _, job in group]
        if (longest := max(map(len, prompts)) - 1) > 0:
            ids = to_device(pad([each[:-1] for each in prompts]), self.device)
            memories = [TrainingKV() for _ in self.caches]
            places = torch.arange(longest, device=self.device)
            none = torch.empty(0, dtype=torch.int64, device=self.device)
            ops = TrainOps(self.device, self.model.embedding.dtype)
            self.model.program(memories)(ops, StepInputs(ids, places, none))
            for cache, memory in zip(self.caches, memories, strict=True):
                cache.keys[:, :, :longest].index_copy_(0, slots, memory.keys[0])
                cache.values[:, :, :longest].index_copy_(0, slots, memory.values[0])
        jobs = [job for _, job in group]
        columns = (
            (self.tokens, [[job.ids[-1]] for job in jobs]),
            (self.positions, [[len(job.ids) - 1] for job in jobs]),
            (self.temperature, [job.temperature or 1.0 for job in jobs]),
            (self.warm, [float(job.temperature > 0) for job in jobs]),
            (self.top_p, [job.top_p for job in jobs]),
        )
        for tensor, values in columns:
            tensor[slots] = to_device(torch.tensor(values, dtype=tensor.dtype), self.device)
        for slot, job in group:
            assert len(job.ids) + job.most <= self.length and (job.top_p == 1 or slot < self.narrow)
            self._jobs[slot], self._texts[slot] = job, []

    def _passes(self) -> None:
        if self.device.type != "cuda":
            for _ in range(PASSES):
                self._pass()
        else:
            if self._graph is None:
                self._capture()
            for _ in range(PASSES):
                self._graph.replay()
        self.cursor.zero_()

    def _capture(self) -> None:
        before = [each.clone() for each in (self.tokens, self.positions, self.cursor)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._pass()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._pass()
        for tensor, was in zip((self.tokens, self.positions, self.cursor), before, strict=True):
            tensor.copy_(was)

    def _pass(self) -> None:
        """One more token in every slot. Finished slots continue with unused tokens."""
        ops = SlotOps(self._ropes, self.positions, self.length)
        logits = self._program(ops, StepInputs(self.tokens, self.positions, self._rows))["logits"][:, 0]
        scores = logits.float() / self.temperature[:, None]
        if self.narrow:
            some = scores[: self.narrow]
            some.masked_fill_(~top_p_mask(some.softmax(-1), self.top_p[: self.narrow]), float("-inf"))
        noise = torch.empty_like(scores).exponential_().clamp_(min=1e-30).log_()
        token = scores.addcmul_(noise, self.warm[:, None], value=-1).argmax(-1, keepdim=True)
        self.out.scatter_(1, self.cursor, token)
        self.tokens.copy_(token)
        self.positions.add_(1).clamp_(max=self.length - 1)
        self.cursor.add_(1).clamp_(max=PASSES - 1)

    def _ended(self, out: np.ndarray) -> Iterator[Written]:
        stops = np.isin(out, list(self._ends))
        first = np.where(stops.any(1), stops.argmax(1), PASSES).tolist()
        for slot, job in enumerate(self._jobs):
            if job is None:
                continue
            text = self._texts[slot]
            count = min(first[slot] + 1, PASSES, job.most - len(text))
            text += out[slot, :count].tolist()
            if (ended := first[slot] < count) or len(text) == job.most:
                self._jobs[slot] = None
                yield Written(job, text, ended)


def _plain(mixer: Attention) -> bool:
    spec = mixer.config.spec
    return mixer.config.source_layer is None and mixer.sinks is None and not (spec.window or spec.chunk or spec.softcap)
