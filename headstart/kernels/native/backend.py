"""The CPU backend: recorded programs in C++ (csrc/), without torch.

Bits do not depend on rows, batch, chunks or threads. Buffers are numpy arrays owned by their program, valid until it
runs again. Several Python threads may run engines: a call takes the thread pool and scratch memory for itself.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from headstart import machine
from headstart.config import KVDtype, Quantization
from headstart.core import (
    NOT_FINITE,
    NOTHING_LEFT,
    Float32,
    Int64,
    LoraFactors,
    Sampled,
    SamplingRows,
    StepPlan,
    TokenLogprob,
)
from headstart.errors import ModelError, UsageError
from headstart.kernels.draft_loop import DraftedTokens, GateRule
from headstart.kernels.native import _native
from headstart.kernels.native._native import (
    Arena,
    DraftLoop,
    HiddenPool,
    KVPool,
    LoraTable,
    Matrix,
    Program,
    RowPool,
    StatePool,
    ThreadPool,
    fastest_read,
    paths,
    place,
)
from headstart.kernels.native.packing import PackedCache, key_of, pack
from headstart.kernels.native.placement import FREE, ThreadPlacement
from headstart.kernels.native.program import record
from headstart.kernels.ops import KVSpec, Program as Code, RawTensor
from headstart.kernels.specs import CompressSpec, StateSpec
from headstart.wording import option

SlotPool = KVPool | RowPool | HiddenPool | StatePool
_instances: "WeakSet[NativeBackend]" = WeakSet()
_leaked_pools: list[ThreadPool] = []
BITS = "portable 1"
"""Name of the order of arithmetic with --portable-bits. A change of csrc/ that changes bits needs another number."""
_KV_FORMATS: Mapping[KVDtype, int] = {"float32": 0, "bfloat16": 1, "int8": 2, "fp8": 3}  # Store in csrc/kernels.h


class NativeBackend:
    """Weights in the file's precision or quantized, KV cache in float32, bfloat16, int8 or FP8, activations float32.

    On the paths `amx` and `avx512bf16`, activations that multiply bfloat16 or FP8 values are rounded to bfloat16. All
    other paths give the same bits. path: an instruction-set path of `paths()`; None: the best of this CPU.
    portable_bits: the best of those other paths; the fingerprint is then that of other machines.
    """

    name = "native"
    draws_leaves = True
    runs_on: Literal["cpu"] = "cpu"

    def __init__(
        self, *, threads: int, quantization: Quantization | None = None, kv_dtype: KVDtype | None = None,
        path: str | None = None, portable_bits: bool = False, cache: PackedCache | None = None,
        placement: ThreadPlacement = FREE,
    ) -> None:  # fmt: skip
        usable = paths(portable_bits)
        if path is not None and path not in usable:
            raise UsageError(f"the CPU cannot run the path {path!r}", f"it can run: {', '.join(usable)}")
        self.path = path or usable[0]
        self.bits = BITS if portable_bits else f"{self.path} {_build_hash()}"
        try:
            self.threads = ThreadPool(threads, placement.groups)
        except RuntimeError as error:
            raise UsageError(
                f"the system starts no {threads} threads: {error}", "use fewer: " + option("threads", "N")
            ) from None
        self.placement = placement
        _instances.add(self)
        self.quantization: Quantization | None = quantization
        self._kv_format = _KV_FORMATS[kv_dtype or "bfloat16"]
        self._cache = cache or PackedCache.open(None)
        self._caches = [self._cache]  # of the trunk's checkpoint, then of others
        self.arena = Arena()
        self.weight_bytes = 0
        self.wrote_weight_cache = False

    def share_threads(self, other: object) -> None:
        """See kernels.backend.SharesThreads."""
        if (
            isinstance(other, NativeBackend)
            and other.threads.size == self.threads.size
            and other.placement.groups == self.placement.groups
        ):
            self.threads = other.threads

    def weight(self, tensor: RawTensor, *, drafts: bool = False, precise: bool = False) -> Matrix | Float32:
        """A float32 vector or a packed matrix. Draft-only weights become int4: half of int8's time for 1 % of the
        acceptance length (docs/log)."""
        if len(tensor.shape) == 1:
            return np.array(tensor.float32(), np.float32)
        quantization = None if precise else self.quantization or ("int4" if drafts else None)
        matrix = self._cache.get(tensor) or self._cache.put(tensor, pack(tensor, self.threads, quantization))
        if self.placement.weights:
            matrix = place(self.threads, matrix, self.placement.weights)
        if not drafts:
            self.weight_bytes += matrix.num_bytes
        return matrix

    @contextmanager
    def reading(self, files: Sequence[Path]) -> Iterator[None]:
        own, key = self._cache, key_of(files, self.quantization) if self._cache.key else None
        self._cache = PackedCache.open(key, in_file=own.in_file)
        self._caches.append(self._cache)
        try:
            yield
            self.wrote_weight_cache |= self._cache.save()
        finally:
            self._cache = own

    def loaded(self, *, partly: bool = False) -> None:
        if not (partly and self._cache.in_file):  # that file is written already, and complete at the end only
            self.wrote_weight_cache |= self._cache.save()

    def prepare(self, program: Code, *, hidden_width: int = 0) -> Program:
        try:
            handle = record(program, self.path, hidden_width)
            handle.reads_ahead = self._cache.in_file
            return handle
        except ValueError as error:  # a size beyond the kernels' limits
            raise ModelError(
                f"the native backend cannot run this model: {error}", "use " + option("backend", "reference")
            ) from None

    def kv_bytes(self, spec: KVSpec) -> int:
        if isinstance(spec, CompressSpec):
            return spec.head_dim * (4 if self._stores_float32 else 2)
        scales = 8 if self._kv_format >= _KV_FORMATS["int8"] else 0
        return spec.num_kv_heads * ((spec.head_dim + spec.value_width) * (4, 2, 1, 1)[self._kv_format] + scales)

    def lora_table(self, num_in: int, num_out: int, factors: Sequence[LoraFactors | None]) -> LoraTable:
        return LoraTable(num_in, num_out, factors)

    def index(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.ascontiguousarray(ids, np.int64)

    @property
    def _stores_float32(self) -> bool:
        """Do row pools store float32? Else bfloat16, also with a KV cache of 8 bits: their gates need more."""
        return self._kv_format == _KV_FORMATS["float32"]

    def kv_pool(self, num_slots: int, spec: KVSpec) -> KVPool | RowPool:
        if isinstance(spec, CompressSpec):
            return RowPool(num_slots, spec.head_dim, self._stores_float32)
        return KVPool(num_slots, spec.num_kv_heads, spec.head_dim, spec.value_width, self._kv_format)

    def copy_rows(
        self, pools: Sequence[KVPool | RowPool], sources: NDArray[np.int32], targets: NDArray[np.int32]
    ) -> None:
        for pool in pools:
            pool.copy_rows(sources, targets)

    def hidden_bytes(self, width: int) -> int:
        return 4 * width

    def hidden_pool(self, num_slots: int, width: int) -> HiddenPool:
        return HiddenPool(num_slots, width)

    def state_bytes(self, spec: StateSpec, num_kept: int = 0) -> int:
        return 4 * (math.prod(spec.state_shape) + num_kept * spec.row_width)

    def state_pool(self, num_slots: int, num_owned: int, num_kept: int, spec: StateSpec) -> StatePool:
        return StatePool(num_slots, num_owned, num_kept, math.prod(spec.state_shape), spec.row_width)

    def read_slots(self, pool: SlotPool, first: int, count: int) -> NDArray[np.uint8]:
        return pool.slots(first, count)

    def write_slots(self, pool: SlotPool, first: int, content: NDArray[np.uint8]) -> None:
        slots = len(content) // pool.slot_bytes
        pool.slots(first, slots)[:] = content

    def fingerprint(self) -> str:
        return f"{self.name} {self.bits} {self.quantization} {self._kv_format}"

    def run(
        self, handle: Program, plan: StepPlan, *, hidden_pool: HiddenPool | None = None, hidden: Float32 | None = None
    ) -> Mapping[str, Float32]:
        for each in self._caches:
            each.check()
        return handle.run(self.threads, self.arena, plan, hidden_pool, hidden)

    def rows(self, x: Float32, rows: NDArray[np.int32]) -> Float32:
        return x[rows]

    def buffer(self, values: Float32) -> Float32:
        return np.ascontiguousarray(values, np.float32)

    def numpy(self, x: Float32) -> Float32:
        return x

    def sample(
        self, logits: Float32, rows: SamplingRows, *, vocab_size: int, token_ids: NDArray[np.int64] | None = None,
        keep_probs: bool = False,
    ) -> Sampled:  # fmt: skip
        return sample(
            self.threads, self.path, logits, rows, vocab_size=vocab_size, token_ids=token_ids, keep_probs=keep_probs
        )

    def prepare_draft_loop(
        self, steps: Sequence[tuple[Program, int]], *, vocab_size: int, token_ids: NDArray[np.int64] | None = None,
        is_block: bool = False,
    ) -> "NativeDraftLoop":  # fmt: skip
        programs, before = [step for step, _ in steps], [rows for _, rows in steps]
        return NativeDraftLoop(self, DraftLoop(self.path, programs, before, is_block, vocab_size, token_ids))

    def logprobs(self, logits: Float32, tokens: NDArray[np.int64], num_top: int) -> list[TokenLogprob]:
        return logprobs(self.threads, self.path, logits, tokens, num_top)

    def profile(self, handle: Program, on: bool) -> None:
        handle.profiling = on

    def times(self, handle: Program, *, reset: bool = False) -> dict[str, float]:
        """Seconds by part: matrices, head, attention, rows."""
        return handle.profile(reset)

    def free_memory(self) -> int:
        """Mapped weights count as used, though the system may drop their pages."""
        available = machine.memory().available
        return max(available - sum(each.mapped_bytes for each in self._caches), available // 8)

    def read_bandwidth(self, num_bytes: int, runs: int) -> float:
        buffer = np.ones(num_bytes, np.uint8)  # untouched pages would not be read from memory
        return num_bytes / fastest_read(self.threads, buffer, runs)


@dataclass(frozen=True)
class NativeDraftLoop:
    """A DraftLoop on a backend's threads."""

    backend: NativeBackend
    loop: DraftLoop

    def draft(
        self, first: Program, plan: StepPlan, rows: SamplingRows, depths: Sequence[int],
        gates: Sequence[GateRule | None], widths: Sequence[int], *, hidden_pool: HiddenPool | None = None,
    ) -> Sequence[DraftedTokens]:  # fmt: skip
        backend = self.backend
        return self.loop.draft(backend.threads, backend.arena, first, plan, hidden_pool, rows, depths, gates, widths)


@cache
def _build_hash() -> str:
    """Hash of the compiled kernels: another compiler or version may round differently."""
    return hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()[:16]


def _after_fork() -> None:
    """Give a forked child new thread pools. The old ones have no threads and would block, even in their destructors."""
    for backend in list(_instances):
        _leaked_pools.append(backend.threads)
        backend.threads = ThreadPool(backend.threads.size, backend.placement.groups)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def instruction_paths(*, portable_bits: bool = False) -> list[str]:
    """Instruction-set paths that this CPU can run, the best one first. portable_bits: those with the bits of others."""
    return list(paths(portable_bits))


_REASONS = {_native.NOTHING_LEFT: NOTHING_LEFT, _native.NOT_FINITE: NOT_FINITE}


def sample(
    pool: _native.ThreadPool, path: str, logits: Float32, rows: SamplingRows, *, vocab_size: int,
    token_ids: Int64 | None = None, keep_probs: bool = False,
) -> Sampled:  # fmt: skip
    """Sample one token per row of logits [L, W] float32; rows may be strided, logits within a row may not.

    token_ids: ascending target ids [W] of a reduced draft vocabulary. keep_probs: also return the processed
    distribution as float64 [L, vocab_size] (greedy rows: one-hot). A row without a token fails alone (see Sampled).
    """
    tokens = np.empty(len(rows), np.int64)
    probs = np.zeros((len(rows), vocab_size)) if keep_probs else None
    _native.sample(pool, path, logits, rows, vocab_size, token_ids, tokens, probs)
    failures = {row: _REASONS[token] for row, token in enumerate(tokens.tolist()) if token < 0}
    num_top = rows.num_logprobs
    if failures:
        num_top = np.where(tokens < 0, -1, num_top)
        tokens = np.maximum(tokens, -1)
    if num_top.max(initial=-1) < 0:
        return Sampled(tokens, [None] * len(tokens), probs, failures)
    if token_ids is None:
        logits = logits[:, :vocab_size]
    return Sampled(tokens, _logprobs(pool, path, logits, token_ids, tokens, num_top.astype(np.int64)), probs, failures)


def logprobs(
    pool: _native.ThreadPool, path: str, logits: Float32, tokens: Int64, num_top: int | NDArray[np.integer]
) -> list[TokenLogprob]:
    """Raw log-softmax of logits [L, V] at tokens [L], and the num_top (a number or [L]) most likely tokens."""
    counts = np.full(len(tokens), num_top, np.int64)
    return [each for each in _logprobs(pool, path, logits, None, tokens, counts) if each is not None]


def _logprobs(
    pool: _native.ThreadPool, path: str, logits: Float32, token_ids: Int64 | None, tokens: Int64, num_top: Int64
) -> list[TokenLogprob | None]:
    """Logprobs of rows with num_top >= 0; None for the others."""
    count = len(tokens)
    max_top = max(int(num_top.max(initial=0)), 0)
    values, num_found = np.zeros(count, np.float32), np.zeros(count, np.int64)
    top_ids, top_values = np.empty((count, max_top), np.int64), np.empty((count, max_top), np.float32)
    _native.logprobs(pool, path, logits, token_ids, tokens, num_top, values, top_ids, top_values, num_found)
    entries = zip(
        num_top.tolist(), tokens.tolist(), values.tolist(), top_ids.tolist(), top_values.tolist(), num_found.tolist(),
        strict=True,
    )  # fmt: skip
    return [
        TokenLogprob(token, value, tuple(zip(ids[:num], tops[:num], strict=True))) if wanted >= 0 else None
        for wanted, token, value, ids, tops, num in entries
    ]
