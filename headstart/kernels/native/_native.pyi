from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headstart.core import SamplingRows, StepPlan
from headstart.kernels.draft_loop import GateRule

class ThreadPool:
    """Worker threads; the caller is one of them. groups: (threads, NUMA node, CPUs they are bound to)."""

    def __init__(self, threads: int, groups: Sequence[tuple[int, int, tuple[int, ...]]] = ...) -> None: ...
    @property
    def size(self) -> int: ...

# packing.cpp

class Matrix:
    """A packed weight [rows, cols] (csrc/matrix.h) over `data` (uint8, 64-byte aligned), which it keeps alive."""

    def __init__(
        self,
        kind: int,
        rows: int,
        cols: int,
        group: int,
        zero: int,
        scales: int,
        offsets: int,
        data: NDArray[np.uint8],
        levels: int = 0,
    ) -> None: ...
    @property
    def kind(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def scales(self) -> int: ...
    @property
    def offsets(self) -> int: ...
    @property
    def levels(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def data(self) -> NDArray[np.uint8]: ...

def source_form(source: str) -> tuple[int, int, int, int, int, int] | None:
    """(kind, group, zero, scales, offsets, levels), numbers of csrc/matrix.h, of the matrix that rows of this type
    become; None for an unknown type. "int8" and "int4": float32 rows to quantize."""

def matrix_bytes(kind: int, rows: int, cols: int, group: int, scales: int, offsets: int) -> int:
    """Bytes of a matrix's data."""

def pack_rows(pool: ThreadPool, source: str, raw: NDArray[np.uint8], cols: int, out: NDArray[np.uint8]) -> None:
    """Pack raw [rows, bytes of a row] into out [matrix_bytes]."""

def place(pool: ThreadPool, matrix: Matrix, how: str) -> Matrix:
    """Copy a matrix to the NUMA nodes of the pool's threads: "share" (each part on the node that reads it),
    "interleave" or "replicate"."""

def dequantize_into(pool: ThreadPool, matrix: Matrix, out: NDArray[np.float32]) -> None:
    """Write the matrix's values to out [rows, cols]."""

# sampling_binding.cpp

NOTHING_LEFT: int
NOT_FINITE: int
"""Codes that `sample` writes for a row whose tokens are all banned, or whose logits hold NaN or infinity."""

def sample(
    pool: ThreadPool,
    path: str,
    logits: NDArray[np.float32],
    rows: SamplingRows,
    vocab_size: int,
    token_ids: NDArray[np.int64] | None,
    tokens: NDArray[np.int64],
    probs: NDArray[np.float64] | None,
) -> None:
    """Sample logits [L, W] into tokens [L] and, if given, the distribution into zeroed probs [L, vocab_size]."""

def logprobs(
    pool: ThreadPool,
    path: str,
    logits: NDArray[np.float32],
    token_ids: NDArray[np.int64] | None,
    tokens: NDArray[np.int64],
    num_top: NDArray[np.int64],
    values: NDArray[np.float32],
    top_ids: NDArray[np.int64],
    top_values: NDArray[np.float32],
    num_found: NDArray[np.int64],
) -> None:
    """Log-softmax of logits [L, W] at tokens [L] into values [L]; each row's num_found [L] <= num_top most likely
    tokens into top_ids and top_values [L, >= num_top]. Rows with a negative num_top are skipped."""

# cpu.cpp

def paths(portable_bits: bool = False) -> list[str]:
    """Instruction-set paths that this CPU can run, the best one first. portable_bits: only those with the same bits as
    the paths of other machines."""

# steps.cpp, *_steps.cpp, run.cpp, program.cpp

class KVPool:
    """Keys and values of one layer. store: 0 float32, 1 bfloat16, 2 int8, 3 FP8 (E4M3)."""

    def __init__(self, num_slots: int, num_heads: int, head_dim: int, value_dim: int, store: int) -> None: ...
    def copy_rows(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy slots `sources` to slots `targets`, as if all at once."""
    @property
    def slot_bytes(self) -> int: ...
    def slots(self, first: int, count: int) -> NDArray[np.uint8]:
        """View of these slots' memory. Raises ValueError for slots outside the pool."""

class RowPool:
    """Rows [num_slots, width] of a compressor, read one by one; wide: float32, else bfloat16."""

    def __init__(self, num_slots: int, width: int, wide: bool) -> None: ...
    def copy_rows(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None: ...
    @property
    def slot_bytes(self) -> int: ...
    def slots(self, first: int, count: int) -> NDArray[np.uint8]:
        """View of these slots' memory. Raises ValueError for slots outside the pool."""

class HiddenPool:
    """Hidden states [num_slots, width]."""

    def __init__(self, num_slots: int, width: int) -> None: ...
    @property
    def width(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    def slots(self, first: int, count: int) -> NDArray[np.uint8]:
        """View of these slots' memory. Raises ValueError for slots outside the pool."""

class StatePool:
    """Recurrent states of one layer [num_slots, state_size], and kept rows [num_owned, num_kept, row_size]."""

    def __init__(self, num_slots: int, num_owned: int, num_kept: int, state_size: int, row_size: int) -> None: ...
    def state(self, slot: int) -> NDArray[np.float32]:
        """A copy of one state."""
    @property
    def slot_bytes(self) -> int: ...
    def slots(self, first: int, count: int) -> NDArray[np.uint8]:
        """View of these slots' memory. Raises ValueError for slots outside the pool."""

class RopeTable:
    """Table of cos and sin of position * inv_freq, times scale. axes: column of StepPlan.rope_positions of each
    frequency; empty: all take the row's position."""

    def __init__(self, inv_freq: list[float], scale: float, axes: list[int]) -> None: ...

class LoraTable:
    """LoRA factors of one matrix by adapter slot: pairs of A [rank, num_in] and B [num_out, rank], or None. Raises
    ValueError for other shapes."""

    def __init__(
        self, num_in: int, num_out: int, pairs: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]] | None]
    ) -> None: ...

class Arena:
    """Scratch memory that the programs of a backend share."""

    def __init__(self) -> None: ...

class Program:
    """A recorded forward pass; recording methods return the index of the buffer they write."""

    profiling: bool
    reads_ahead: bool
    @property
    def num_experts_read(self) -> int: ...
    def __init__(self, path: str) -> None: ...
    def embed(self, table: Matrix, width: int) -> int: ...
    def hidden_input(self, width: int) -> int: ...
    def linear(self, x: int, matrix: Matrix | None, bias: NDArray[np.float32] | None, label: str) -> int: ...
    def lora_shrink(self, x: int, table: LoraTable) -> int:
        """Partial sums of A x, for `lora_expand`."""

    def lora_expand(self, y: int, sums: int, table: LoraTable) -> None:
        """Add B (A x) to y in place."""

    def refine(self, approximate: int, x: int, matrix: Matrix, count: int, label: str) -> int: ...
    def keep_groups(self, logits: int, scores: int, groups: NDArray[np.int64], count: int) -> int: ...
    def gated(
        self,
        x: int,
        gate: Matrix | None,
        up: Matrix | None,
        gate_bias: NDArray[np.float32] | None,
        up_bias: NDArray[np.float32] | None,
        kind: int,
        label: str,
    ) -> int: ...
    def norm(
        self, x: int, residual: int, weight: NDArray[np.float32], eps: float, parts: int = 1
    ) -> tuple[int, int]: ...
    def add(self, a: int, b: int) -> int: ...
    def activate(self, x: int, kind: int) -> int: ...
    def activate_mul(self, gate: int, up: int, kind: int) -> int: ...
    def scale(self, x: int, factor: float) -> int: ...
    def shift(self, x: int, bias: NDArray[np.float32]) -> int: ...
    def softcap(self, x: int, cap: float) -> int: ...
    def center(self, x: int) -> int: ...
    def temper(self, x: int, every: int, strength: float, ahead: int) -> int: ...
    def concat(self, a: int, b: int, heads: int) -> int: ...
    def sigmoid_mul(self, gate: int, x: int) -> int: ...
    def head_linear(self, x: int, matrices: list[Matrix]) -> int: ...
    def route(
        self,
        logits: int,
        bias: NDArray[np.float32] | None,
        top_k: int,
        num_groups: int,
        top_groups: int,
        scoring: int,
        normalize: bool,
        scale: float,
        num_identity: int,
        scales_inputs: bool,
        token_experts: NDArray[np.int64] | None,
        image_bias: NDArray[np.float32] | None,
    ) -> tuple[int, int]:
        """The selected experts, for `experts`."""

    def experts(
        self, x: int, chosen: tuple[int, int], gate: list[Matrix], up: list[Matrix], down: list[Matrix], kind: int
    ) -> int: ...
    def want(self, x: int, by: Matrix) -> None:
        """Pack a buffer's rows in the form that this matrix multiplies, at this point of the program."""

    def rope(self, x: int, table: RopeTable, head_dim: int, trailing: bool, inverse: bool, behind: int) -> int: ...
    def store_kv(self, k: int, v: int, pool: KVPool) -> None: ...
    def attend(
        self,
        q: int,
        pool: KVPool,
        num_heads: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: NDArray[np.float32] | None,
        causal: bool = False,
        before: bool = False,
        chunk: int = 0,
        bias: int = -1,
        block_window: bool = False,
    ) -> int: ...
    def select_positions(
        self,
        q: int,
        weights: int,
        pool: KVPool,
        heads: int,
        groups: int,
        top_k: int,
        window_size: int,
        whole: bool,
        local: bool,
        causal: bool,
        blocks: int = 0,
        block_size: int = 1,
        candidates: int = -1,
    ) -> int: ...
    def select_blocks(self, q: int, pool: KVPool, heads: int, top_k: int, block_size: int) -> int: ...
    def attend_selected(
        self,
        q: int,
        pool: KVPool,
        num_heads: int,
        scale: float,
        softcap: float,
        sinks: NDArray[np.float32] | None,
        selected: int,
    ) -> int: ...
    def compress(
        self, values: int, gates: int, bias: NDArray[np.float32], pool: RowPool, every: int, dim: int, overlap: bool
    ) -> int: ...
    def attend_compressed(
        self,
        q: int,
        pool: KVPool,
        entries: KVPool,
        num_heads: int,
        scale: float,
        softcap: float,
        window: int,
        every: int,
        sinks: NDArray[np.float32] | None,
        selected: int,
    ) -> int: ...
    def stream_weights(
        self,
        mixes: int,
        base: NDArray[np.float32],
        scale: NDArray[np.float32],
        count: int,
        iterations: int,
        eps: float,
        magnitude: float,
    ) -> int: ...
    def sum_streams(self, streams: int, weights: int, count: int) -> int: ...
    def mix_streams(self, streams: int, x: int, weights: int, count: int) -> int: ...
    def token_values(self, numbers: NDArray[np.int64] | None) -> int: ...
    def embed_ngrams(
        self, tokens: int, matrix: Matrix, factors: list[int], sizes: list[int], end: int, cuts: bool
    ) -> int: ...
    def signed_sqrt(self, x: int, least: float) -> int: ...
    def causal_conv(
        self, x: int, taps: NDArray[np.float32], pool: StatePool, width: int, bias: NDArray[np.float32] | None
    ) -> int: ...
    def softplus(self, x: int, rate: NDArray[np.float32] | None, bias: NDArray[np.float32]) -> int: ...
    def bounded_decay(self, x: int, rate: NDArray[np.float32], bias: NDArray[np.float32], bound: float) -> int: ...
    def selective_scan(
        self,
        xbc: int,
        step: int,
        rate: NDArray[np.float32],
        skip: NDArray[np.float32],
        pool: StatePool,
        num_groups: int,
        num_heads: int,
        state_dim: int,
        head_dim: int,
    ) -> int: ...
    def gated_delta(
        self,
        qkv: int,
        log_decay: int,
        strength: int,
        pool: StatePool,
        num_key_heads: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        tiled: bool,
        by_channel: bool,
    ) -> int: ...
    def take_logit_rows(self, x: int) -> int: ...
    def columns(self, x: int, start: int, count: int) -> int: ...
    def grouped_conv(self, x: int, delta: int, weight: NDArray[np.float32], taps: int) -> int: ...
    def zero_where(self, x: int, position: int) -> int: ...
    def put_where(self, x: int, token: int, row: NDArray[np.float32]) -> int: ...
    def store_hidden(self, x: int, pool: HiddenPool, column: int) -> None: ...
    def finish(self, outputs: list[tuple[str, int]]) -> None: ...
    def run(
        self,
        threads: ThreadPool,
        arena: Arena,
        plan: StepPlan,
        hidden_pool: HiddenPool | None,
        hidden: NDArray[np.float32] | None,
    ) -> dict[str, NDArray[np.float32]]:
        """Run the program. Raises ValueError if the plan points outside its pools or tables."""
    def profile(self, reset: bool) -> dict[str, float]:
        """Seconds per label since profiling began or the last reset."""

# draft_loop.cpp

class DraftLoop:
    """A draft loop over recorded programs (headstart/kernels/draft_loop.py)."""

    def __init__(
        self,
        path: str,
        steps: Sequence[Program],
        rows_before: Sequence[int],
        is_block: bool,
        vocab_size: int,
        token_ids: NDArray[np.int64] | None,
    ) -> None: ...
    def draft(
        self,
        threads: ThreadPool,
        arena: Arena,
        first: Program,
        plan: StepPlan,
        hidden_pool: HiddenPool | None,
        rows: SamplingRows,
        depths: Sequence[int],
        gates: Sequence[GateRule | None],
        widths: Sequence[int],
    ) -> list[tuple[list[int], list[float], list[tuple[int, int, int, float]]]]:
        """DraftLoop.draft. Raises ValueError if a plan points outside a program's pools or tables."""

# bandwidth.cpp

def fastest_read(pool: ThreadPool, buffer: NDArray[np.uint8], runs: int) -> float:
    """Seconds of the fastest of `runs` reads of the whole buffer by all threads."""

def barrier_seconds(pool: ThreadPool, count: int) -> float:
    """Average seconds of a barrier of all threads, over `count` barriers."""
