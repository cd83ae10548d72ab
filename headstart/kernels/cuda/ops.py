"""`Ops` on the device: kernels, and of torch only what copies, adds or multiplies single elements.

Of torch: `+`, `*`, cat, where, index_select: each element is a copy, or one IEEE operation of elements at its own
place, so it is the same for any number of rows. Everything that sums, or takes a function, is a kernel. `refine` and
`keep_groups` make drafts only and are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.kernels.cuda import attending, recurrence
from headstart.kernels.cuda.angles import Angles
from headstart.kernels.cuda.kernels import rows as row_kernels, streams as stream_kernels
from headstart.kernels.cuda.launch import Launcher, tile_of
from headstart.kernels.cuda.matrix import Matrix
from headstart.kernels.cuda.mixing import Mixer, Told, uniform
from headstart.kernels.cuda.plan import DevicePlan
from headstart.kernels.indexing import CompressSpec, IndexSpec
from headstart.kernels.ops import NEVER, Activation, AttentionSpec, Experts, StepInputs
from headstart.kernels.reference.refine import best, largest
from headstart.kernels.specs import RopeSpec, RouterSpec, StreamSpec, TemperSpec
from headstart.kernels.states import ConvSpec, DeltaSpec, ScanSpec
from headstart.kernels.torch_backend import KVPool, StatePool


class CudaOps:
    """`Ops` over torch tensors, for the rows of one plan."""

    def __init__(self, launcher: Launcher, plan: DevicePlan, angles: Angles, mixer: Mixer) -> None:
        self._launch, self._plan, self._angles, self._mixer = launcher, plan, angles, mixer
        self._chosen: dict[KVPool, attending.Listed] = {}  # the last choice over each pool

    def inputs(self, hidden: Tensor | None) -> StepInputs:
        plan = self._plan
        return StepInputs(plan["token_ids"], plan["positions"], plan["logit_rows"], hidden)

    def embed(self, table: Matrix, ids: Tensor) -> Tensor:
        return self._launch.take(table, ids)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        return self._launch.product(x, weight, bias)

    def refine(self, approximate: Tensor, x: Tensor, weight: Matrix, count: int) -> Tensor:
        return torch.where(largest(approximate, count), self.linear(x, weight), approximate)

    def keep_groups(self, logits: Tensor, scores: Tensor, groups: Tensor, count: int) -> Tensor:
        return torch.where(best(scores, count)[..., groups], logits, NEVER)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, num_parts: int = 1) -> Tensor:
        return self._launch.norm(x, weight, eps, num_parts)[0]

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._launch.norm(x, weight, eps, 1, residual)

    def activate(self, x: Tensor, kind: Activation) -> Tensor:
        out = torch.empty_like(x)
        self._launch.each(row_kernels.activate, x.numel(), x, out, x.numel(), KIND=kind)
        return out

    def activate_mul(self, gate: Tensor, up: Tensor, kind: Activation = "silu") -> Tensor:
        out = torch.empty_like(gate)
        self._launch.each(row_kernels.activate_mul, out.numel(), gate, up, out, out.numel(), KIND=kind)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def shift(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    def center(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        row_kernels.center[(len(x),)](x, out, x.shape[1], TILE=tile_of(x.shape[1]))
        return out

    def temper(self, x: Tensor, positions: Tensor, spec: TemperSpec) -> Tensor:
        return x * self._angles.factors(spec).index_select(0, positions)[:, None]

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        out = torch.empty_like(x)
        self._launch.each(row_kernels.softcap, x.numel(), x, out, x.numel(), cap)
        return out

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        out, repeat = torch.empty_like(x), x.shape[1] // gate.shape[1]
        self._launch.each(row_kernels.sigmoid_mul, x.numel(), gate, x, out, x.numel(), repeat)
        return out

    def concat(self, a: Tensor, b: Tensor, num_heads: int = 1) -> Tensor:
        heads = [x.unflatten(-1, (num_heads, -1)) for x in (a, b)]
        return torch.cat(heads, dim=-1).flatten(-2)

    def head_linear(self, x: Tensor, weights: Sequence[Matrix]) -> Tensor:
        return self._mixer.by_heads(x, weights)

    def moe(
        self,
        x: Tensor,
        logits: Tensor,
        bias: Tensor | None,
        experts: Experts,
        spec: RouterSpec,
        told: Told | None = None,
    ) -> Tensor:
        return self._mixer.mixture(x, logits, bias, experts, spec, self._plan, told)

    def rope(self, x: Tensor, positions: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
        cosines, sines = self._angles.table(spec)
        out, heads = torch.empty_like(x), x.shape[1] // head_dim
        row_kernels.rope[(len(x),)](
            x, positions, cosines, sines, out, x.shape[1], spec.behind, HEADS=heads, HEAD_TILE=tile_of(heads),
            DIM=head_dim, ROTARY=spec.rotary_dim, TILE=tile_of(head_dim), TRAILING=spec.trailing, INVERSE=spec.inverse,
        )  # fmt: skip
        return out

    def store_kv(self, k: Tensor, v: Tensor, pool: KVPool, spec: AttentionSpec) -> None:
        self._launch.scatter(k, self._plan["slots"], pool.keys.flatten(1))
        if not pool.latent:
            self._launch.scatter(v, self._plan["slots"], pool.values.flatten(1))

    def attend(
        self, q: Tensor, pool: KVPool, spec: AttentionSpec, sinks: Tensor | None = None, chosen: KVPool | None = None
    ) -> Tensor:
        listed = None if chosen is None else self._chosen[chosen]
        return attending.attend(self._launch, q, pool, spec, self._plan, sinks, listed)

    def attend_beside(
        self,
        q: Tensor,
        pool: KVPool,
        entries: KVPool,
        spec: AttentionSpec,
        every: int,
        sinks: Tensor | None = None,
        chosen: KVPool | None = None,
    ) -> Tensor:
        listed = attending.ends_of(self._plan, every) if chosen is None else self._chosen[chosen]
        return attending.attend_beside(self._launch, q, (pool, entries), spec, self._plan, sinks, listed)

    def store_index(self, k: Tensor, pool: KVPool, spec: IndexSpec) -> None:
        self._launch.scatter(k, self._plan["slots"], pool.keys.flatten(1))

    def choose(self, q: Tensor, weights: Tensor, pool: KVPool, spec: IndexSpec) -> None:
        self._chosen[pool] = attending.choose(self._launch, q, weights, pool, spec, self._plan)

    def compress(self, values: Tensor, gates: Tensor, bias: Tensor, pool: KVPool, spec: CompressSpec) -> Tensor:
        return attending.compress(self._launch, values, gates, bias, pool, spec, self._plan)

    def stream_weights(self, mixes: Tensor, base: Tensor, scale: Tensor, spec: StreamSpec) -> Tensor:
        out = torch.empty_like(mixes)
        stream_kernels.stream_weights[(len(mixes),)](
            mixes, base, scale, out, spec.eps, spec.iterations, COUNT=spec.count, TILE=tile_of(spec.count),
            ALL=mixes.shape[1] > spec.count,
        )  # fmt: skip
        return out

    def sum_streams(self, streams: Tensor, weights: Tensor | None, spec: StreamSpec) -> Tensor:
        width, stride = streams.shape[1] // spec.count, 0 if weights is None else weights.shape[1]
        out, tile = self._launch.empty(len(streams), width), min(tile_of(width), self._launch.device.elements)
        stream_kernels.sum_streams[(len(streams), -(-width // tile))](
            streams, weights, out, width, stride, COUNT=spec.count, WEIGHED=weights is not None, TILE=tile
        )
        return out

    def mix_streams(self, streams: Tensor, x: Tensor, weights: Tensor, spec: StreamSpec) -> Tensor:
        out, width = torch.empty_like(streams), x.shape[1]
        tile = min(tile_of(width), self._launch.device.elements)
        stream_kernels.mix_streams[(len(streams), -(-width // tile), spec.count)](
            streams, x, weights, out, width, COUNT=spec.count, TILE=tile
        )
        return out

    def causal_conv(
        self, x: Tensor, weight: Tensor, pool: StatePool, spec: ConvSpec, bias: Tensor | None = None
    ) -> Tensor:
        return recurrence.conv(self._launch, x, weight, pool, spec, self._plan, bias)

    def gated_delta(self, qkv: Tensor, log_decay: Tensor, strength: Tensor, pool: StatePool, spec: DeltaSpec) -> Tensor:
        return recurrence.gated_delta(self._launch, (qkv, log_decay, strength), pool, spec, self._plan)

    def selective_scan(
        self, xbc: Tensor, step: Tensor, rate: Tensor, skip: Tensor, pool: StatePool, spec: ScanSpec
    ) -> Tensor:
        return recurrence.selective_scan(self._launch, (xbc, step), rate, skip, pool, spec, self._plan)

    def softplus(self, x: Tensor, rate: Tensor | None, bias: Tensor) -> Tensor:
        out = torch.empty_like(x)
        about = {"RATE": rate is not None}
        self._launch.each(row_kernels.softplus, x.numel(), x, rate, bias, out, x.numel(), x.shape[1], **about)
        return out

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def zero_where(self, x: Tensor, positions: Tensor, position: int) -> Tensor:
        return x.masked_fill((positions == position)[:, None], 0)

    def put_where(self, x: Tensor, token_ids: Tensor, token: int, row: Tensor) -> Tensor:
        return torch.where((token_ids == token)[:, None], row, x)

    def store(self, x: Tensor, pool: Tensor, column: int = 0) -> None:
        self._launch.scatter(x, self._plan["slots"], pool[:, column : column + x.shape[-1]])


class Probe:
    """Runs a program once without rows, to hear of weights that there are no kernels for. Raises ModelError."""

    def __getattr__(self, name: str) -> Any:
        return self._taken

    def moe(self, x: Any, logits: Any, bias: Any, experts: Experts, spec: RouterSpec, told: Any = None) -> None:
        for matrices in (experts.gate, experts.up, experts.down):
            uniform(matrices)

    def add_rms_norm(self, *arguments: Any) -> tuple[None, None]:
        return None, None

    def _taken(self, *arguments: Any, **about: Any) -> None:
        """An operation that there is."""
