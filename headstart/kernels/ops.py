"""The interface between model code and hardware: `Ops` inside a forward pass, `Backend` around it.

Model code is straight-line code that calls `Ops` on opaque buffers and branches on configuration only. The `reference`
backend runs each op at once; `native` and `cuda` record the ops once and replay them for any number of rows R.
Row i of every result depends only on row i's inputs and on its own sequence's KV cache and state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headstart.core import LoraFactors, Sampled, SamplingRows, StepPlan, TokenLogprob
from headstart.kernels.draft_loop import DraftLoop
from headstart.kernels.specs import (
    AttentionTemperature as AttentionTemperature,
    CompressSpec,
    ConvSpec,
    DeltaSpec,
    IndexSpec as IndexSpec,
    NGramSpec,
    RopeSpec as RopeSpec,
    RouterSpec as RouterSpec,
    ScanSpec,
    StateSpec,
    StreamSpec,
)

Buffer = Any  # opaque activations [R, width], float32, or per-row integers [R]
Weight = Any  # opaque weight owned by a backend: a float32 vector, or a matrix in the backend's own format
LoraTable = Any  # opaque LoRA factors of one matrix, by adapter slot (AdapterBackend.lora_table)
Pool = Any  # opaque paged storage with one row per slot: keys and values, hidden states, or recurrent states
Activation = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "identity", "clamped", "silu_7", "silu_16", "silu_of_10", "situ"
]
"""silu(x) = x / (1 + e^-x); gelu by erf or by the tanh approximation; relu2 = relu(x)^2. The last five are gated
products of gate g and up u:
clamped: min(g, 7) * sigmoid(1.702 * g) * (u + 1), u clamped to [-7, 7] (gpt-oss);
silu_7, silu_16: min(silu(g), limit) * u, u clamped to [-limit, limit];
silu_of_10: silu(min(g, 10)) * u, u clamped to [-10, 10];
situ: a tanh(g / a) * sigmoid(g) * b tanh(u / b) with (a, b) = SITU (Kimi-K3)."""
SITU = 4.0, 25.0

NEVER = -1e30  # logit of a token that is never sampled; finite, because logits must be finite
REFINED = 32  # columns in one block of `Ops.refine`: the native kernels compute that many outputs together


class RawTensor(Protocol):
    """A tensor as stored in a checkpoint file (see formats.base)."""

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
    """Shape and mask of one grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # features of a key
    scale: float  # multiplies q . k
    value_dim: int = 0  # features of a value; 0: head_dim
    latent: bool = False  # MLA: values are the first features of the keys, so a pool may store keys only
    window: int = 0  # a row sees the last `window` positions up to its own; 0: no sliding window
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: unchanged
    causal: bool = False  # never sees later positions, even where plan.visible_end allows it
    excludes_self: bool = False  # does not see its own position either
    chunk: int = 0  # a row sees positions from the start of its chunk of this size; 0: no chunks
    block_window: bool = False  # all rows of a sequence in a pass have the window of its first row there

    @property
    def value_width(self) -> int:
        """Features of one value."""
        return self.value_dim or self.head_dim


KVSpec = AttentionSpec | IndexSpec | CompressSpec  # entries of a layer in a KV pool, one per position


@dataclass(frozen=True, eq=False)
class Experts:
    """Weights of one layer's experts, by expert id."""

    gate: tuple[Weight, ...]  # [inner, in]; empty: the expert computes activate(up)
    up: tuple[Weight, ...]  # [inner, in]
    down: tuple[Weight, ...]  # [out, inner]
    activation: Activation = "silu"
    gate_bias: tuple[Weight, ...] = ()  # [inner]; empty: no biases
    up_bias: tuple[Weight, ...] = ()  # [inner]
    down_bias: tuple[Weight, ...] = ()  # [out]


@dataclass(frozen=True)
class StepInputs:
    """Handles of the step's inputs inside a program (see StepPlan)."""

    token_ids: Buffer  # [R] int
    positions: Buffer  # [R] int
    logit_rows: Buffer  # [L] int: rows whose logits are needed
    hidden: Buffer = None  # [R, width]: hidden states that a head reads; None for a trunk


class Ops(Protocol):
    """Operations of a forward pass. Buffers are float32 [R, width] unless stated; each op returns a new buffer."""

    def embed(self, table: Weight, ids: Buffer) -> Buffer:
        """Rows of table [vocab, width] at ids [R] -> [R, width]."""

    def token_values(self, ids: Buffer, numbers: Weight | None = None) -> Buffer:
        """Token ids [R] + 1 as floats [R, 1]; with numbers [V] (see Backend.index) the number of each id + 1. IMAGE_ROW
        for IMAGE_ROW."""

    def embed_ngrams(self, table: Weight, last: Buffer, spec: NGramSpec) -> Buffer:
        """Rows of table [rows, width] at hashes of each row's last tokens -> [R, hashes * width].

        last [R, n]: token_values, the row's own first, 0 before the text (n = spec.longest). A missing token is
        spec.end; so are IMAGE_ROW and all tokens before it, and with spec.cuts those before a spec.end that is not the
        row's own. The hash of the last k tokens is XOR of token_i * factors[i] over i < k, modulo the rows of each
        hash."""

    def signed_sqrt(self, x: Buffer, least: float) -> Buffer:
        """sign(x) * sqrt(max(|x|, least)); 0 for 0."""

    def linear(self, x: Buffer, weight: Weight, bias: Weight | None = None) -> Buffer:
        """x [R, in] @ weight [out, in]^T + bias [out] -> [R, out]."""

    def adapted_linear(self, x: Buffer, weight: Weight, bias: Weight | None, table: LoraTable) -> Buffer:
        """`linear`, plus B (A x) in the rows whose adapter (plan.adapter_slots) adapts this matrix -> [R, out]."""

    def refine(self, approximate: Buffer, x: Buffer, weight: Weight, count: int) -> Buffer:
        """Replace the most promising outputs of an approximate `linear` by exact ones -> [R, out].

        approximate [R, out]; x [R, in]; weight [out, in]. Columns form blocks of REFINED neighbours. The `count` blocks
        with the largest maximum (ties: the lower block) become exact. `approximate` may be changed in place."""

    def keep_groups(self, logits: Buffer, scores: Buffer, groups: Weight, count: int) -> Buffer:
        """Keep only the logits of tokens in the `count` best groups; all others become NEVER -> [R, V].

        logits [R, V]; scores [R, C] of groups (ties: the lower group); groups [V] int (see Backend.index): each token's
        group. `logits` may be changed in place."""

    def rms_norm(self, x: Buffer, weight: Weight, eps: float, num_parts: int = 1) -> Buffer:
        """x / sqrt(mean(x^2) + eps) * weight over groups of len(weight) / num_parts features -> [R, width].

        num_parts = 1: every group uses the same weight (per-head q/k norm when narrower than x). num_parts > 1: weight
        is as wide as x and group i uses part i."""

    def add(self, a: Buffer, b: Buffer) -> Buffer:
        """a + b."""

    def add_rms_norm(self, x: Buffer, residual: Buffer, weight: Weight, eps: float) -> tuple[Buffer, Buffer]:
        """(rms_norm(x + residual), x + residual)."""

    def activate(self, x: Buffer, kind: Activation) -> Buffer:
        """The activation of every element."""

    def activate_mul(self, gate: Buffer, up: Buffer, kind: Activation = "silu") -> Buffer:
        """activate(gate) * up, or one of the gated products of `Activation`."""

    def scale(self, x: Buffer, factor: float) -> Buffer:
        """factor * x."""

    def add_bias(self, x: Buffer, bias: Weight) -> Buffer:
        """x + bias [width]."""

    def center(self, x: Buffer) -> Buffer:
        """x - mean(x) of each row."""

    def scale_by_position(self, x: Buffer, positions: Buffer, spec: AttentionTemperature) -> Buffer:
        """x * spec's factor at each row's position [R]."""

    def softcap(self, x: Buffer, cap: float) -> Buffer:
        """cap * tanh(x / cap)."""

    def sigmoid_mul(self, gate: Buffer, x: Buffer) -> Buffer:
        """sigmoid(gate) * x; gate [R, G] is repeated for width / G neighbouring features of x."""

    def columns(self, x: Buffer, start: int, count: int) -> Buffer:
        """Columns start .. start + count - 1 of x."""

    def grouped_conv(self, x: Buffer, delta: Buffer, weight: Weight, taps: int) -> Buffer:
        """Depthwise causal convolution along each sequence's rows of this pass, zeros before its first -> [R, width].

        y_i = sum over t of (weight[t] + delta_i[t]) * x_(i - t). weight [taps * width]; delta [R, taps * groups], each
        value for width / groups neighbouring features."""

    def concat(self, a: Buffer, b: Buffer, num_heads: int = 1) -> Buffer:
        """Concatenate by head: [R, heads * n], [R, heads * m] -> [R, heads * (n + m)]."""

    def head_linear(self, x: Buffer, weights: Sequence[Weight]) -> Buffer:
        """One unquantized matrix [out, in] per head: [R, heads * in] -> [R, heads * out]."""

    def moe(
        self,
        x: Buffer,
        logits: Buffer,
        bias: Weight | None,
        experts: Experts,
        spec: RouterSpec,
        token_experts: tuple[Weight, Buffer] | None = None,
        image_bias: tuple[Weight, Buffer] | None = None,
    ) -> Buffer:
        """Mixture of experts: the weighted sum of each row's experts in ascending order of id -> [R, out].

        x [R, in]; logits [R, E] of the router; bias [E] (for the choice only). token_experts = (table [V * top_k] (see
        Backend.index), token ids [R]): the experts are looked up by token; logits only weigh them. image_bias = (bias
        [E], token ids [R]): rows with IMAGE_ROW for their token have this bias, and no experts by token."""

    def rope(self, x: Buffer, positions: Buffer, spec: RopeSpec, head_dim: int) -> Buffer:
        """Rotary embedding of each head of x [R, heads * head_dim] at positions [R]."""

    def store_kv(self, k: Buffer, v: Buffer, pool: Pool, spec: AttentionSpec) -> None:
        """Write k [R, kv_heads * head_dim] and v [R, kv_heads * value_width] at the rows' slots."""

    def store_index(self, k: Buffer, pool: Pool, spec: IndexSpec) -> None:
        """Write the indexer's keys [R, head_dim] at the rows' slots."""

    def select_positions(self, q: Buffer, weights: Buffer, pool: Pool, spec: IndexSpec) -> None:
        """Select the positions that each row attends to (lightning indexer).

        score = sum over heads of weight * max(q . k, 0); q [R, heads * head_dim], weights [R, heads], keys in the pool.
        Candidates are the positions up to plan.visible_end (with spec.causal the row's own) that end a window of
        spec.every, counted from plan.first_position. The spec.top_k best are selected (ties: the lower position; NaN
        last); with spec.whole all positions of their windows, and those after the last whole window. With spec.local
        the window of plan.visible_end is no candidate, and all its positions up to there are selected. Each of
        spec.groups groups of heads selects for as many KV heads.

        With spec.candidates the candidates, in order, form blocks of `size`; the last block may be shorter. Its source
        keeps the `count` blocks with the greatest scores (a block's: that of its best candidate; ties: the lower
        block), the last block always among them. Later selections by such a spec without `source` have these
        candidates only.

        The selection is used by `attend` with chosen=pool, until the next selection over the same pool."""

    def select_blocks(self, q: Buffer, pool: Pool, spec: IndexSpec) -> None:
        """Select the blocks of positions that each row attends to, a selection for each of spec.num_heads groups of
        equally many KV heads.

        q [R, heads * head_dim]. A block has spec.every positions, counted from
        plan.first_position. Its score for a head is its greatest q . k of positions up to plan.visible_end. The block
        of the last visible position is always selected; it is one of the spec.top_k best (ties: the lower block; NaN
        counts as -infinity). Used by `attend` as `select_positions` says."""

    def compress(self, values: Buffer, gates: Buffer, bias: Weight, pool: Pool, spec: CompressSpec) -> Buffer:
        """Store values and gates, and compress the window of each row that ends one -> [R, dim] (other rows: 0).

        values, gates [R, width]; bias [every * width] is added to the gates by position % every, with positions counted
        from plan.first_position. A row ends a window if (position + 1) % every == 0. Its entry is, per feature, the sum
        of the values of its last `span` positions, weighted by the softmax of their gates; missing positions have no
        weight. With `overlap` the older half of the positions gives its first `dim` columns, the newer half its
        last."""

    def stream_weights(self, mixes: Buffer, base: Weight, scale: Weight, spec: StreamSpec) -> Buffer:
        """Mixing weights of n residual streams (hyper-connections) -> [R, num_mixes].

        mixes [R, n + n + n * n]; base of that width; scale [3]: one per part. Input: sigmoid(scale * mix + base)
        + eps. Output: magnitude * sigmoid(...). Mixing matrix: softmax over its rows + eps, then columns and rows are
        divided in turn by their sums + eps, `iterations` times for columns (Sinkhorn). mixes [R, n] with scale [1]:
        input weights only, with spec.softmax softmax(...) + eps. Without a matrix (spec.mixed): mixes [R, 2 n],
        scale [2], output + eps."""

    def sum_streams(self, streams: Buffer, weights: Buffer | None, spec: StreamSpec) -> Buffer:
        """Sum of n streams by the first n weights; weights None: their mean. [R, n * H] -> [R, H]."""

    def mix_streams(self, streams: Buffer, x: Buffer, weights: Buffer, spec: StreamSpec) -> Buffer:
        """Stream k becomes weights[n + k] * x + sum over j of weights[2 n + j n + k] * stream j (without a matrix: +
        stream k); x [R, H]."""

    def attend_compressed(
        self,
        q: Buffer,
        pool: Pool,
        entries: Pool,
        spec: AttentionSpec,
        every: int,
        sinks: Weight | None = None,
        chosen: Pool = None,
    ) -> Buffer:
        """`attend` over `pool` and, in the same softmax, over compressed `entries`.

        Entries lie at the positions p with (p + 1) % every == 0, up to the row's own, even where plan.visible_end is
        later. chosen: only entries selected in that indexer pool."""

    def attend(
        self, q: Buffer, pool: Pool, spec: AttentionSpec, sinks: Weight | None = None, chosen: Pool = None,
        bias: Buffer | None = None,
    ) -> Buffer:  # fmt: skip
        """Attention of q [R, heads * head_dim] over its sequence's keys and values -> [R, heads * value_width].

        A row sees positions from max(plan.first_position, position - window + 1, start of its chunk) to
        plan.visible_end (with spec.causal to its own, with spec.excludes_self to the one before). A window reaches to
        plan.visible_start at least. With spec.block_window it is that of plan.block_starts. plan.paths and the block
        tables say where they lie; any layer may have written them, in this pass or before.
        sinks [heads]: one more logit in each head's softmax, without a value. chosen: an indexer's pool; the row sees
        only the positions selected there, and sums them in order as if they were consecutive from
        plan.first_position. bias [R, heads * E]: added to the scaled scores of the row's own position (a head's last
        number) and of the E - 1 positions before it; cannot be combined with `chosen`."""

    def causal_conv(self, x: Buffer, weight: Weight, pool: Pool, spec: ConvSpec, bias: Weight | None = None) -> Buffer:
        """Depthwise causal convolution along each sequence -> [R, channels].

        y_p = bias + sum over j of weight[j] * x_(p - width + 1 + j), zeros before the first row. weight [width *
        channels], oldest tap first; bias [channels]. States are read and written as plan.states says."""

    def softplus(self, x: Buffer, rate: Weight | None, bias: Weight) -> Buffer:
        """rate * ln(1 + e^(x + bias)), per column; rate None: 1. With rate < 0: log decay of a recurrent state."""

    def bounded_decay(self, x: Buffer, rate: Weight, bias: Weight, bound: float) -> Buffer:
        """bound * sigmoid(rate * (x + bias)), per column: log decay between `bound` < 0 and 0."""

    def gated_delta(self, qkv: Buffer, log_decay: Buffer, strength: Buffer, pool: Pool, spec: DeltaSpec) -> Buffer:
        """Gated delta rule, row by row even in prefill -> [R, heads * value_dim].

        q and k are L2-normalized (epsilon 1e-6), q divided by sqrt(key_dim). Per head:
        S = e^log_decay S;  S += k (sigmoid(strength) (v - S^T k))^T;  out = S^T q.
        qkv [R, channels]; log_decay [R, num_decays], of heads or of rows of S; strength [R, heads]. States are read and
        written as plan.states says."""

    def selective_scan(
        self, xbc: Buffer, step: Buffer, rate: Weight, skip: Weight, pool: Pool, spec: ScanSpec
    ) -> Buffer:
        """Mamba2's selective scan, row by row even in prefill -> [R, inner].

        Per head: S = e^(rate step) S;  S += B (step x)^T;  out = S^T C + skip x.
        xbc [R, channels]; step [R, heads]; rate, skip [heads]. States are read and written as plan.states says."""

    def take_rows(self, x: Buffer, rows: Buffer) -> Buffer:
        """x[rows], rows [L] int -> [L, width]."""

    def zero_where(self, x: Buffer, positions: Buffer, position: int) -> Buffer:
        """x with zeros in the rows at `position`."""

    def put_where(self, x: Buffer, token_ids: Buffer, token: int, row: Weight) -> Buffer:
        """x with `row` [width] in the rows whose token id is `token`."""

    def store(self, x: Buffer, pool: Pool, column: int = 0) -> None:
        """Write x [R, width] into columns column .. column + width of a hidden pool, at the rows' slots."""


Program = Callable[[Ops, StepInputs], Mapping[str, Buffer]]
"""Straight-line model code; returns named results [R, width] or [L, width]."""
Handle = Any  # a program as prepared by its backend


class Backend(Protocol):
    """Owns weights and pools, runs programs and samples tokens."""

    name: str
    draws_leaves: bool  # its draft loops draw several candidates for a token (draft_loop.DraftLoop)

    @property
    def runs_on(self) -> Literal["cpu", "cuda"]:
        """The device whose memory and time the backend uses."""

    def weight(self, tensor: RawTensor, *, drafts: bool = False, precise: bool = False) -> Weight:
        """Convert a file's tensor to the backend's format.

        drafts: used for drafting only, so it may be rounded (drafts never change the text). precise: small and
        sensitive (a router), never rounded."""

    def reading(self, files: Sequence[Path]) -> AbstractContextManager[None]:
        """Context in which `weight` takes tensors of another checkpoint, stored in these files."""

    def loaded(self, *, partly: bool = False) -> None:
        """Called when all weights have been taken, and perhaps when those of the trunk have (partly)."""

    def prepare(self, program: Program, *, hidden_width: int = 0) -> Handle:
        """Prepare a program for `run`. The handle owns the program's pools and frees them when dropped.

        hidden_width > 0: the program reads hidden states of that width. Raises ModelError if this backend cannot run
        the program."""

    def kv_bytes(self, spec: KVSpec) -> int:
        """Bytes per position in a KV pool."""

    def kv_pool(self, num_slots: int, spec: KVSpec) -> Pool: ...

    def copy_rows(self, pools: Sequence[Pool], sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy slots sources [n] to slots targets [n] in each KV pool, as if all copies happened at once."""

    def hidden_bytes(self, width: int) -> int:
        """Bytes per position in a hidden pool."""

    def hidden_pool(self, num_slots: int, width: int) -> Pool: ...

    def state_bytes(self, spec: StateSpec, num_kept: int = 0) -> int:
        """Bytes of one recurrent state with `num_kept` kept rows."""

    def state_pool(self, num_slots: int, num_owned: int, num_kept: int, spec: StateSpec) -> Pool:
        """Pool of recurrent states; the first `num_owned` slots belong to sequences and keep `num_kept` rows each."""

    def read_slots(self, pool: Pool, first: int, count: int) -> NDArray[np.uint8]:
        """Bytes of `count` slots of a pool from `first` on (whole blocks of KV and hidden pools); a copy or a view.

        Any thread may call it for slots that no pass writes."""

    def write_slots(self, pool: Pool, first: int, content: NDArray[np.uint8]) -> None:
        """Restore bytes from `read_slots`. Any thread may call it for slots that no pass reads or writes."""

    def fingerprint(self) -> str:
        """Everything besides the model that the bits of results depend on."""

    def run(
        self, handle: Handle, plan: StepPlan, *, hidden_pool: Pool = None, hidden: Buffer = None
    ) -> Mapping[str, Buffer]:
        """Run one program for all rows. A head reads `hidden` [R, width], else hidden_pool at plan.hidden_slots."""

    def rows(self, x: Buffer, rows: NDArray[np.int32]) -> Buffer:
        """x[rows] outside a program (between draft steps)."""

    def buffer(self, values: NDArray[np.float32]) -> Buffer:
        """Rows [R, width] for `run`."""

    def numpy(self, x: Buffer) -> NDArray[np.float32]:
        """Copy x to the host."""

    def sample(
        self,
        logits: Buffer,
        rows: SamplingRows,
        *,
        vocab_size: int,
        token_ids: Weight | None = None,
        keep_probs: bool = False,
    ) -> Sampled:
        """Sample one token per row of logits [L, V'].

        token_ids [V'] (see `index`): target ids of a reduced draft vocabulary. keep_probs: also return the processed
        distribution over all `vocab_size` ids. A row that cannot be sampled fails alone (see Sampled)."""

    def prepare_draft_loop(
        self,
        steps: Sequence[tuple[Handle, int]],
        *,
        vocab_size: int,
        token_ids: Weight | None = None,
        is_block: bool = False,
    ) -> DraftLoop | None:
        """Prepare drafting of several tokens in one call; None if this backend drafts step by step.

        steps[i - 1] = (program, rows between the sequence's tokens and the program's row) runs step i >= 1; it reads
        token ids, positions and `hidden`. token_ids as in `sample`. is_block: the first pass gives the logits of all
        tokens; steps is empty, or one program (with -1) that reads each drafted token and the next row of logits, and
        returns the row to sample, and perhaps `carry` (see DraftLoop)."""

    def logprobs(self, logits: Buffer, tokens: NDArray[np.int64], num_top: int) -> list[TokenLogprob]:
        """Raw log-softmax of tokens [L] at logits [L, V], with the num_top most likely tokens."""

    def index(self, ids: NDArray[np.int64]) -> Weight:
        """Keep integers on the device: ascending ids of a draft vocabulary, groups of tokens, or expert tables."""

    def free_memory(self) -> int:
        """Bytes available for pools without swapping."""

    def read_bandwidth(self, num_bytes: int, runs: int) -> float:
        """Bytes per second at which all threads read a buffer of this size; the best of several runs."""


@runtime_checkable
class AdapterBackend(Protocol):
    """A backend that runs `Ops.adapted_linear`."""

    def lora_table(self, num_in: int, num_out: int, factors: Sequence[LoraFactors | None]) -> LoraTable:
        """Factors of a matrix [num_out, num_in], by adapter slot; None: that adapter leaves the matrix as it is."""


@runtime_checkable
class Profiler(Protocol):
    """A backend that measures where a program's time goes."""

    def profile(self, handle: Handle, on: bool) -> None:
        """Start or stop timing of all parts."""

    def times(self, handle: Handle, *, reset: bool = False) -> dict[str, float]:
        """Seconds per part of a program since profiling began or the last reset."""
