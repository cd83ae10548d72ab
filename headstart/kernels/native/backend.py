"""The CPU backend: recorded programs in C++ (csrc/), exact to the bit in rows, batch, chunking and threads. No torch.

Buffers are numpy arrays that belong to their program: valid until it runs again. Engines on one model may run in
several threads: whatever uses the pool's threads, and the arena of scratch, has them for itself meanwhile.
"""

from __future__ import annotations

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
from headstart.core import Sampled, SamplingRows, StepPlan, TokenLogprob
from headstart.errors import ModelError, UsageError
from headstart.kernels.chain import GateRule
from headstart.kernels.indexing import CompressSpec
from headstart.kernels.native import _native, sampling
from headstart.kernels.native._native import (
    Arena,
    Chain,
    HiddenPool,
    KVPool,
    Matrix,
    Program,
    RowPool,
    StatePool,
    ThreadPool,
    fastest_read,
    paths,
    place,
)
from headstart.kernels.native.packed_cache import PackedCache, key_of
from headstart.kernels.native.packing import pack
from headstart.kernels.native.placement import FREE, Placement
from headstart.kernels.native.program import record
from headstart.kernels.ops import KVSpec, Program as Code, RawTensor
from headstart.kernels.states import StateSpec

Array = NDArray[np.float32]
Stored = KVPool | RowPool | HiddenPool | StatePool
_alive: WeakSet[NativeBackend] = WeakSet()
_left_behind: list[ThreadPool] = []
_STORES: Mapping[KVDtype, int] = {"float32": 0, "bfloat16": 1, "int8": 2}


class NativeBackend:
    """Weights in the file's precision (or quantized), KV in bfloat16 or int8, activations float32 (on the paths
    `amx` and `avx512bf16` rounded to bfloat16 where bfloat16 or FP8 matrices or keys and values multiply them).

    `path` is an instruction-set path of `paths()`, None the best one of this CPU. Bits are the same on one path.
    """

    name = "native"
    runs_on: Literal["cpu"] = "cpu"

    def __init__(
        self,
        *,
        threads: int,
        quantization: Quantization | None = None,
        kv_dtype: KVDtype | None = None,
        path: str | None = None,
        cache: PackedCache | None = None,
        placement: Placement = FREE,
    ) -> None:
        if path is not None and path not in paths():
            raise UsageError(f"the CPU cannot run the path {path!r}", f"it can run: {', '.join(paths())}")
        self.path = path or paths()[0]
        try:
            self.threads = ThreadPool(threads, placement.groups)
        except RuntimeError as error:
            raise UsageError(f"the system starts no {threads} threads: {error}", "use fewer: --threads N") from None
        self.placement = placement
        _alive.add(self)
        self.quantization: Quantization | None = quantization
        self._kv_store = _STORES[kv_dtype or "bfloat16"]
        self._cache = cache or PackedCache.open(None)
        self.arena = Arena()
        self.weight_bytes = 0
        self.could_map = False

    def take_turns(self, other: object) -> None:
        """See kernels.backend.TakesTurns."""
        if isinstance(other, NativeBackend):
            alike = other.threads.size == self.threads.size and other.placement.groups == self.placement.groups
            self.threads = other.threads if alike else self.threads

    def weight(self, tensor: RawTensor, *, drafts: bool = False, precise: bool = False) -> Matrix | Array:
        """A vector as float32, a matrix packed; what only drafts is rounded to int4: half of int8's time, and
        costs 1 % of the acceptance length (docs/LOG.md)."""
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
        own, self._cache = self._cache, PackedCache.open(key_of(files, self.quantization) if self._cache.key else None)
        try:
            yield
            self.could_map |= self._cache.save()
        finally:
            self._cache = own

    def loaded(self) -> None:
        self.could_map |= self._cache.save()

    def prepare(self, program: Code, *, hidden_width: int = 0) -> Program:
        try:
            return record(program, self.path, hidden_width)
        except ValueError as error:  # a size beyond what the kernels are made for
            raise ModelError(f"the native backend cannot run this model: {error}", "use --backend reference") from None

    def kv_bytes(self, spec: KVSpec) -> int:
        if isinstance(spec, CompressSpec):
            return spec.head_dim * (4 if self._kept_wide else 2)
        scales = 8 if self._kv_store == _STORES["int8"] else 0
        return spec.num_kv_heads * ((spec.head_dim + spec.value_width) * (4, 2, 1)[self._kv_store] + scales)

    def index(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.ascontiguousarray(ids, np.int64)

    @property
    def _kept_wide(self) -> bool:
        """Are kept rows floats? They are bfloat16 where keys are less: gates are no keys, which integers serve."""
        return self._kv_store == _STORES["float32"]

    def kv_pool(self, num_slots: int, spec: KVSpec) -> KVPool | RowPool:
        if isinstance(spec, CompressSpec):
            return RowPool(num_slots, spec.head_dim, self._kept_wide)
        return KVPool(num_slots, spec.num_kv_heads, spec.head_dim, spec.value_width, self._kv_store)

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

    def read_slots(self, pool: Stored, first: int, count: int) -> NDArray[np.uint8]:
        return pool.slots(first, count)

    def write_slots(self, pool: Stored, first: int, content: NDArray[np.uint8]) -> None:
        slots = len(content) // pool.slot_bytes
        pool.slots(first, slots)[:] = content

    def fingerprint(self) -> str:
        return f"{self.name} {self.path} {self.quantization} {self._kv_store} {_build()}"

    def run(
        self, handle: Program, plan: StepPlan, *, hidden_pool: HiddenPool | None = None, hidden: Array | None = None
    ) -> Mapping[str, Array]:
        return handle.run(self.threads, self.arena, plan, hidden_pool, hidden)

    def rows(self, x: Array, rows: NDArray[np.int32]) -> Array:
        return x[rows]

    def numpy(self, x: Array) -> Array:
        return x

    def sample(
        self,
        logits: Array,
        rows: SamplingRows,
        *,
        vocab_size: int,
        token_ids: NDArray[np.int64] | None = None,
        keep_probs: bool = False,
    ) -> Sampled:
        return sampling.sample(
            self.threads, self.path, logits, rows, vocab_size=vocab_size, token_ids=token_ids, keep_probs=keep_probs
        )

    def prepare_chain(
        self,
        steps: Sequence[tuple[Program, int]],
        *,
        vocab_size: int,
        token_ids: NDArray[np.int64] | None = None,
        rows_given: bool = False,
    ) -> NativeChain:
        programs, before = [step for step, _ in steps], [rows for _, rows in steps]
        return NativeChain(self, Chain(self.path, programs, before, rows_given, vocab_size, token_ids))

    def logprobs(self, logits: Array, tokens: NDArray[np.int64], num_top: int) -> list[TokenLogprob]:
        return sampling.logprobs(self.threads, self.path, logits, tokens, num_top)

    def profile(self, handle: Program, on: bool) -> None:
        handle.profiling = on

    def times(self, handle: Program, *, reset: bool = False) -> dict[str, float]:
        """Of the parts matrices, head, attention, rows."""
        return handle.profile(reset)

    def free_memory(self) -> int:
        return machine.memory().available

    def read_bandwidth(self, num_bytes: int, runs: int) -> float:
        buffer = np.ones(num_bytes, np.uint8)  # written: memory never touched is not read from memory
        return num_bytes / fastest_read(self.threads, buffer, runs)


@dataclass(frozen=True)
class NativeChain:
    """A chain (kernels.ops.Chain) on a backend's threads."""

    backend: NativeBackend
    chain: Chain

    def draft(
        self,
        first: Program,
        plan: StepPlan,
        rows: SamplingRows,
        depths: Sequence[int],
        gates: Sequence[GateRule | None],
        *,
        hidden_pool: HiddenPool | None = None,
    ) -> list[tuple[list[int], list[float]]]:
        backend = self.backend
        return self.chain.draft(backend.threads, backend.arena, first, plan, hidden_pool, rows, depths, gates)


@cache
def _build() -> str:
    """Of the compiled kernels: another compiler, or another version, may round elsewhere."""
    return hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()[:16]


def _after_fork() -> None:
    """A child process has none of the threads: those pools would wait for them for ever, also where they end."""
    for backend in list(_alive):
        _left_behind.append(backend.threads)
        backend.threads = ThreadPool(backend.threads.size, backend.placement.groups)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def instruction_paths() -> list[str]:
    """Paths that this CPU can run, the best one first."""
    return list(paths())
