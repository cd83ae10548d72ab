"""The one interface between model code and a device: `Ops` inside a forward, `Backend` around it.

Family code is straight-line: it calls `Ops` on opaque buffers whose first dimension is the symbolic row count R, and
branches on configuration only. `reference` executes each call at once; a recording backend runs the code once and
replays the list for any R. Row i of every result depends on row i's inputs (and its own sequence's KV) only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headstart.core import Sampled, SamplingRows, StepPlan, TokenLogprob
from headstart.kernels.chain import Chain
from headstart.kernels.indexing import CompressSpec, IndexSpec as IndexSpec
from headstart.kernels.specs import RopeSpec as RopeSpec, RouterSpec as RouterSpec, StreamSpec, TemperSpec as TemperSpec
from headstart.kernels.states import ConvSpec, DeltaSpec, ScanSpec, StateSpec

Buffer = Any
"""Opaque activations [R, width] or per-row integers [R]."""
Weight = Any
"""Opaque weight owned by a backend."""
Pool = Any
"""Opaque paged storage: num_slots rows of keys and values, or of hidden states."""
Activation = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "identity", "clamped", "silu_7", "silu_16", "silu_of_10"
]
"""x / (1 + e^-x); x times the normal distribution's share below x, by erf or by its approximation with tanh; max(x, 0);
the square of that; x. `clamped` takes both factors of a gated product : with g and u within 7, g only from above,
g / (1 + e^(-1.702 g)) (u + 1). So do `silu_7` and `silu_16`: silu(g), at most 7 or 16, times u within that; and
`silu_of_10`: silu of g, at most 10, times u within that."""


NEVER = -1e30
"""A logit whose token is not drawn; finite, as logits must be."""
REFINED = 32
"""Columns that Ops.refine takes together: of as many the native kernels make the outputs at once."""


class RawTensor(Protocol):
    """A tensor as its file has it (see formats.base)."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def fingerprint(self) -> int: ...
    def float32(self) -> NDArray[np.float32]: ...
    def take_rows(self, rows: NDArray[np.int64]) -> RawTensor: ...
    def part(self, index: int) -> RawTensor: ...
    def shaped(self, *shape: int) -> RawTensor: ...
    def transposed(self) -> RawTensor: ...
    def plain(self) -> RawTensor: ...
    def affine(self, factor: float, offset: float) -> RawTensor: ...
    def exp(self) -> RawTensor: ...


@dataclass(frozen=True)
class AttentionSpec:
    """Shape of one grouped-query attention; `scale` multiplies q.k. Keys have `head_dim` features, values `value_dim`
    (0: as many). `latent`: values are the first features of the keys, and a pool may keep them once. A row sees the
    `window` positions up to its own (0: all of them), or those from the begin of its `chunk` on: position - position %
    chunk (0: no chunks); `causal`: and none behind it, whatever plan.sees says; `before`: nor its own. Scores become
    softcap * tanh(score / softcap), unless it is 0."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    value_dim: int = 0
    latent: bool = False
    window: int = 0
    softcap: float = 0.0
    causal: bool = False
    before: bool = False
    chunk: int = 0

    @property
    def value_width(self) -> int:
        """Features of one value."""
        return self.value_dim or self.head_dim


KVSpec = AttentionSpec | IndexSpec | CompressSpec
"""What a layer keeps of a position in a KV pool."""


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of one layer, by id: gate (or none: activate(up)) and up [inner, in], down [out, inner]; their
    biases, or none."""

    gate: tuple[Weight, ...]
    up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    activation: Activation = "silu"
    gate_bias: tuple[Weight, ...] = ()
    up_bias: tuple[Weight, ...] = ()
    down_bias: tuple[Weight, ...] = ()


@dataclass(frozen=True)
class StepInputs:
    """Handles of the step's inputs inside a program; see StepPlan for meanings."""

    token_ids: Buffer
    positions: Buffer
    logit_rows: Buffer
    hidden: Buffer = None  # [R, width] of a head: stored or recycled hidden states


class Ops(Protocol):
    """Operations of a forward."""

    def embed(self, table: Weight, ids: Buffer) -> Buffer:
        """[R] ids -> [R, width] rows of the table."""

    def linear(self, x: Buffer, weight: Weight, bias: Weight | None = None) -> Buffer:
        """[R, in] x [out, in] (+ [out]) -> [R, out]."""

    def refine(self, approximate: Buffer, x: Buffer, weight: Weight, count: int) -> Buffer:
        """x [R, in] times [out, in] where it matters: `approximate` [R, out], but exact in the `count` blocks of
        REFINED neighbouring columns whose largest value is largest (the lower of equal ones). `approximate` may be
        changed in place: nothing else reads it."""

    def keep_groups(self, logits: Buffer, scores: Buffer, groups: Weight, count: int) -> Buffer:
        """Logits [R, V], but NEVER for tokens of other groups than the `count` with the largest scores [R, C], the
        lower of equals. `groups` [V], see `Backend.index`: the group of each token. Logits may be changed in place."""

    def rms_norm(self, x: Buffer, weight: Weight, eps: float, num_parts: int = 1) -> Buffer:
        """x / sqrt(mean(x^2) + eps) * weight over the last `len(weight)` features; a weight narrower than x norms
        each group of that width by itself (per-head q/k norm), and one of `num_parts` as wide as x has a part for each
        of as many groups."""

    def add(self, a: Buffer, b: Buffer) -> Buffer:
        """a + b."""

    def add_rms_norm(self, x: Buffer, residual: Buffer, weight: Weight, eps: float) -> tuple[Buffer, Buffer]:
        """(rms_norm(x + residual), x + residual)."""

    def activate(self, x: Buffer, kind: Activation) -> Buffer:
        """The activation of each feature."""

    def activate_mul(self, gate: Buffer, up: Buffer, kind: Activation = "silu") -> Buffer:
        """activate(gate) * up, or what `clamped` says."""

    def scale(self, x: Buffer, factor: float) -> Buffer:
        """factor * x."""

    def shift(self, x: Buffer, bias: Weight) -> Buffer:
        """x + bias, by column."""

    def center(self, x: Buffer) -> Buffer:
        """x - mean(x), by row."""

    def temper(self, x: Buffer, positions: Buffer, spec: TemperSpec) -> Buffer:
        """Scale each row by its position, as the spec says."""

    def softcap(self, x: Buffer, cap: float) -> Buffer:
        """cap * tanh(x / cap)."""

    def sigmoid_mul(self, gate: Buffer, x: Buffer) -> Buffer:
        """sigmoid(gate) * x; each feature of a narrower gate serves width(x) / width(gate) features side by side."""

    def concat(self, a: Buffer, b: Buffer, num_heads: int = 1) -> Buffer:
        """[R, n], [R, m] -> [R, n + m]; with heads, [R, heads * n], [R, heads * m] -> [R, heads * (n + m)]."""

    def head_linear(self, x: Buffer, weights: Sequence[Weight]) -> Buffer:
        """One float matrix [out, in] for each head: [R, heads * in] -> [R, heads * out]."""

    def moe(
        self,
        x: Buffer,
        logits: Buffer,
        bias: Weight | None,
        experts: Experts,
        spec: RouterSpec,
        told: tuple[Weight, Buffer] | None = None,
    ) -> Buffer:
        """The weighted sum of the experts that each row takes, added in ascending order of their ids. logits [R, E] are
        the router's, bias [E]; x [R, in] -> [R, out]. `told`: a table [V * top_k] (see Backend.index) and token ids
        [R]; the table's row of a token names its experts, and scores only weigh them."""

    def rope(self, x: Buffer, positions: Buffer, spec: RopeSpec, head_dim: int) -> Buffer:
        """Rotate each head of [R, heads * head_dim]."""

    def store_kv(self, k: Buffer, v: Buffer, pool: Pool, spec: AttentionSpec) -> None:
        """Write k [R, kv_heads * head_dim] and v [R, kv_heads * value_width] at the rows' slots."""

    def store_index(self, k: Buffer, pool: Pool, spec: IndexSpec) -> None:
        """Write the indexer's keys [R, head_dim] at the rows' slots."""

    def choose(self, q: Buffer, weights: Buffer, pool: Pool, spec: IndexSpec) -> None:
        """Which positions each row attends to: of those up to plan.sees the spec.top_k (or all, where there are no
        more) with the highest sum over heads of weight * max(q . k, 0), for q [R, heads * head_dim], weights
        [R, heads] and the keys in the pool. Of equal scores the lowest position goes first; NaN comes last. The choice
        holds in this pass, for `attend`, until the next over the same pool."""

    def compress(self, values: Buffer, gates: Buffer, bias: Weight, pool: Pool, spec: CompressSpec) -> Buffer:
        """Keep values and gates + bias, both [R, width], at the rows' slots; bias [every * width] goes by position %
        every. A row that ends a window, with (position + 1) % every == 0, gives the sum over its last `span` positions
        of values, by feature, with the softmax of their gates as weights; positions before the first have none. With
        `overlap` the older half of them gives its first `dim` columns, the newer its last. -> [R, dim]."""

    def stream_weights(self, mixes: Buffer, base: Weight, scale: Weight, spec: StreamSpec) -> Buffer:
        """Of n streams, from mixes [R, n + n + n * n], base of that width, scale [3] by part: n weights of the input,
        sigmoid(scale * mix + base) + eps; n of the output, 2 sigmoid(.); and the mixing matrix: softmax over its rows
        + eps, its columns divided by their sums + eps, then rows and columns in turn, `iterations` columns in all.
        mixes [R, n] and scale [1]: the first n alone."""

    def sum_streams(self, streams: Buffer, weights: Buffer | None, spec: StreamSpec) -> Buffer:
        """[R, n * H] -> [R, H]: the sum of streams by the first n weights; None: their mean."""

    def mix_streams(self, streams: Buffer, x: Buffer, weights: Buffer, spec: StreamSpec) -> Buffer:
        """Stream k becomes weights[n + k] * x + sum over j of weights[2 n + j n + k] * stream j. x [R, H]."""

    def attend_beside(
        self,
        q: Buffer,
        pool: Pool,
        entries: Pool,
        spec: AttentionSpec,
        every: int,
        sinks: Weight | None = None,
        chosen: Pool = None,
    ) -> Buffer:
        """As `attend`, and in the same softmax over the pool `entries` at positions p up to the row's own that end a
        window, (p + 1) % every == 0. `chosen`: those only that were chosen in the pool of an indexer."""

    def attend(
        self, q: Buffer, pool: Pool, spec: AttentionSpec, sinks: Weight | None = None, chosen: Pool = None
    ) -> Buffer:
        """q [R, heads * head_dim] over the keys and values of the row's own sequence -> [R, heads * value_width].

        A row sees the positions from max(plan.first_position, its own - window + 1; with spec.chunk the begin of its
        chunk) to plan.sees (to its own with spec.causal, to the one before with spec.before), at least one; they are
        where plan.paths and the block table say, written in this pass or before, by this layer or another.
        `sinks` [heads]: one more logit in each head's softmax, which has no value.
        `chosen`: the pool of an indexer; a row sees only what was chosen for it there, and sums as if those positions,
        in their order, followed each other from plan.first_position on. Nothing else is hidden from such rows.
        """

    def causal_conv(self, x: Buffer, weight: Weight, pool: Pool, spec: ConvSpec, bias: Weight | None = None) -> Buffer:
        """y_p = bias + sum over j of weight[j] * x_(p - width + 1 + j) along each sequence, zeros before its first row;
        weight [width * channels], taps oldest first, bias [channels]. States are read and written as plan.states
        says."""

    def softplus(self, x: Buffer, rate: Weight | None, bias: Weight) -> Buffer:
        """rate * ln(1 + e^(x + bias)), by column (rate None: 1): with rate < 0 the log decay of a recurrent state."""

    def gated_delta(self, qkv: Buffer, log_decay: Buffer, strength: Buffer, pool: Pool, spec: DeltaSpec) -> Buffer:
        """The recurrence, row by row in prefill too: with q and k of length 1 (L2, epsilon 1e-6) and q / sqrt(key_dim),
        S = e^log_decay S;  S += k (sigmoid(strength) (v - S^T k))^T;  out = S^T q. qkv [R, channels]; log_decay and
        strength [R, heads] -> [R, heads * value_dim]. States are read and written as plan.states says."""

    def selective_scan(
        self, xbc: Buffer, step: Buffer, rate: Weight, skip: Weight, pool: Pool, spec: ScanSpec
    ) -> Buffer:
        """Mamba2's recurrence, row by row in prefill too: by head S = e^(rate step) S;  S += B (step x)^T;
        out = S^T C + skip x. xbc [R, channels]; step [R, heads]; rate and skip [heads] -> [R, inner]. States are read
        and written as plan.states says."""

    def take_rows(self, x: Buffer, rows: Buffer) -> Buffer:
        """x[rows]."""

    def zero_where(self, x: Buffer, positions: Buffer, position: int) -> Buffer:
        """x with the rows whose position equals `position` set to zero."""

    def put_where(self, x: Buffer, token_ids: Buffer, token: int, row: Weight) -> Buffer:
        """x with `row` [width] in place of the rows whose token is `token`."""

    def store(self, x: Buffer, pool: Pool, column: int = 0) -> None:
        """Keep row r of x in the hidden pool at the row's slot, in its columns from `column` on."""


Program = Callable[[Ops, StepInputs], Mapping[str, Buffer]]
"""Straight-line model code: named results, each [R, ...] or [L, ...]."""
Handle = Any
"""A program as its backend runs it."""


class Backend(Protocol):
    """Owns weights and pools, runs programs, samples. `runs_on`: whose memory and time that takes."""

    name: str

    @property
    def runs_on(self) -> Literal["cpu", "cuda"]: ...

    def weight(self, tensor: RawTensor, *, drafts: bool = False, precise: bool = False) -> Weight:
        """Take a file's tensor into this backend's own form. `drafts`: it only makes drafts, which never change the
        text, so the backend may round it. `precise`: small and sensitive (a router); it is never rounded."""

    def reading(self, files: Sequence[Path]) -> AbstractContextManager[None]:
        """What is taken meanwhile is of another checkpoint, in these files."""

    def loaded(self) -> None:
        """All weights have been taken."""

    def prepare(self, program: Program, *, hidden_width: int = 0) -> Handle:
        """What `run` takes, which owns the program's pools: whoever drops it frees them. `hidden_width` > 0: the
        program reads hidden states of that width. Raises ModelError for what this backend cannot run."""

    def kv_bytes(self, spec: KVSpec) -> int:
        """Bytes of one token position in a KV pool."""

    def kv_pool(self, num_slots: int, spec: KVSpec) -> Pool: ...

    def copy_rows(self, pools: Sequence[Pool], sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Keys and values of slots `sources` to slots `targets` in each KV pool, as if all at once."""

    def hidden_bytes(self, width: int) -> int:
        """Bytes of one position in a hidden pool."""

    def hidden_pool(self, num_slots: int, width: int) -> Pool: ...

    def state_bytes(self, spec: StateSpec, num_kept: int = 0) -> int:
        """Bytes of one recurrent state, with as many kept rows."""

    def state_pool(self, num_slots: int, num_owned: int, num_kept: int, spec: StateSpec) -> Pool:
        """Recurrent states; the first `num_owned` slots belong to sequences and have `num_kept` rows each."""

    def read_slots(self, pool: Pool, first: int, count: int) -> NDArray[np.uint8]:
        """The bytes of so many slots of a pool, in whole blocks where those are of positions: a copy on the host, or a
        view. Any thread, for slots that no pass writes."""

    def write_slots(self, pool: Pool, first: int, content: NDArray[np.uint8]) -> None:
        """Put back what `read_slots` gave. Any thread, for slots that no pass reads or writes."""

    def fingerprint(self) -> str:
        """All that the bits of what it computes depend on, beside the model."""

    def run(
        self, handle: Handle, plan: StepPlan, *, hidden_pool: Pool = None, hidden: Buffer = None
    ) -> Mapping[str, Buffer]:
        """Run one program for all rows of the plan. A head's hidden input is `hidden` [R, width] when given, else
        hidden_pool at plan.hidden_slots."""

    def rows(self, x: Buffer, rows: NDArray[np.int32]) -> Buffer:
        """x[rows] outside a program (between draft steps)."""

    def numpy(self, x: Buffer) -> NDArray[np.float32]:
        """The values of x, on the host."""

    def sample(
        self,
        logits: Buffer,
        rows: SamplingRows,
        *,
        vocab_size: int,
        token_ids: Weight | None = None,
        keep_probs: bool = False,
    ) -> Sampled:
        """Process and draw, one token per row of logits [L, V']. `token_ids` [V'] maps a reduced draft vocabulary to
        target ids (see `index`); `keep_probs` also returns the processed distribution over all `vocab_size` ids. A
        row that has no token left, or NaN, fails alone (see Sampled)."""

    def prepare_chain(
        self,
        steps: Sequence[tuple[Handle, int]],
        *,
        vocab_size: int,
        token_ids: Weight | None = None,
        rows_given: bool = False,
    ) -> Chain | None:
        """Whole drafts, if this backend can make them. Step i >= 1 of a draft runs steps[i - 1]: a program that reads
        token ids, positions and `hidden`, and how many rows lie between the sequence's tokens and its own. `token_ids`
        as in `sample`. `rows_given`: the first pass makes the logits of all tokens, and steps is nothing, or the one
        program (-1 rows between) that reads each token and the row of logits behind it, and gives the row to draw."""

    def logprobs(self, logits: Buffer, tokens: NDArray[np.int64], num_top: int) -> list[TokenLogprob]:
        """Raw log-softmax of given tokens [L] at logits [L, V], with the top alternatives."""

    def index(self, ids: NDArray[np.int64]) -> Weight:
        """Keep a list of numbers on the device: a draft vocabulary (ascending token ids), or the groups of tokens."""

    def free_memory(self) -> int:
        """Bytes that pools may take where they lie, without swapping."""

    def read_bandwidth(self, num_bytes: int, runs: int) -> float:
        """Bytes per second at which all its threads read a buffer of this size, the best of several runs."""


@runtime_checkable
class Profiler(Protocol):
    """A backend that can tell where a program's time goes."""

    def profile(self, handle: Handle, on: bool) -> None:
        """Start or stop taking the time of every part."""

    def times(self, handle: Handle, *, reset: bool = False) -> dict[str, float]:
        """Seconds by part of one program since profiling began or the last reset."""
