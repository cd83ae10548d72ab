"""A decoder layer, which describes and builds itself, and the stack of layers that most families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from headstart.kernels.ops import Buffer, KVSpec, Ops, Pool, Program, StepInputs, Weight
from headstart.kernels.specs import StreamSpec
from headstart.kernels.states import StateSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import NoNorm, Norm, RMSNorm
from headstart.layers.streams import Spread, Streams, read_streams, stream_shapes
from headstart.layers.weights import Shapes, Weights

Tap = Literal["post_norm", "pre_norm", "streams"] | tuple[int, ...]
"""Which trunk hidden state a head reads: after or before the final norm, all residual streams behind the last layer,
or what enters these layers, side by side."""


def tap_width(tap: Tap, hidden_size: int, num_streams: int = 1) -> int:
    """Columns of a stored hidden state."""
    return hidden_size * (num_streams if tap == "streams" else max(len(tapped_layers(tap)), 1))


def together(pools: Seq[Pool]) -> Pool:
    """What a mixer or a module is called with: its one pool, or all of them."""
    return pools[0] if len(pools) == 1 else tuple(pools)


def tapped_layers(tap: Tap) -> tuple[int, ...]:
    """The layers whose streams are tapped; none for a final state."""
    return tap if isinstance(tap, tuple) else ()


class Mixer(Protocol):
    """What mixes positions in a layer: attention of one kind or another, or a recurrence over states."""

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """What it keeps of a position, a KV pool of its own each."""

    @property
    def shares(self) -> int | None:
        """The layer whose pools it reads as well."""

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Of the states it keeps, a pool each."""

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        """`pool`: its one pool, or a tuple: of keys and values, of states, what the layer has that it shares with."""


class MixerConfig(Protocol):
    """Describes a mixer; each kind has its file."""

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, reads: int) -> Mixer:
        """From the tensors of the layer `prefix` (no trailing dot). `reads`: columns of its input; `eps`: of norms."""

    def shapes(self, prefix: str, hidden: int, *, reads: int) -> Shapes:
        """Names and shapes of what `build` takes."""


class FeedForward(Protocol):
    """What works on each row by itself: one gated MLP, or a mixture of experts."""

    def __call__(self, ops: Ops, x: Buffer) -> Buffer: ...


@runtime_checkable
class ByToken(Protocol):
    """A feed-forward part that may read the token too."""

    table: Weight | None

    def __call__(self, ops: Ops, x: Buffer, token_ids: Buffer = None) -> Buffer: ...


@dataclass
class Passing:
    """What the layers of one pass hand on beside the stream: the token ids, what entered the first layer [R, H], and
    `due`, what a shortcut adds behind the next layer."""

    token_ids: Buffer
    embedded: Buffer
    due: Buffer | None = None


class Beside(Protocol):
    """What a layer does after its feed-forward part with the token's id again."""

    def __call__(self, ops: Ops, stream: Buffer, token_ids: Buffer, embedded: Buffer) -> Buffer:
        """What is added to the stream; `embedded` [R, H] entered the first layer."""


class BesideConfig(Protocol):
    """Describes such a part; each kind has its file."""

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float) -> Beside:
        """From the tensors under `prefix` (no trailing dot), and those that layers share."""

    def shapes(self, prefix: str, hidden: int) -> Shapes:
        """Names and shapes of what `build` takes."""


class FeedForwardConfig(Protocol):
    """Describes a feed-forward part; each kind has its file."""

    def build(self, weights: Weights, prefix: str, hidden: int) -> FeedForward:
        """From the tensors under `prefix` (no trailing dot)."""

    def shapes(self, prefix: str, hidden: int) -> Shapes:
        """Names and shapes of what `build` takes."""


STREAM_PARTS = ("mixer_streams", "mlp_streams")
Norms = Literal["pre", "post", "sandwich", "open", "parallel", "late"]
NORM_NAMES: Mapping[Norms, tuple[str, str, str, str]] = {
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "parallel": ("input_layernorm", "", "", ""),
    "late": ("", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    "open": ("input_layernorm", "post_attention_layernorm", "", "post_feedforward_layernorm"),  # it norms by itself
}  # fmt: skip
"""Norms before and after the mixer, before and after the feed-forward part; empty: none. `parallel`: both parts read
the first."""


def norm_parts(biased: bool) -> tuple[str, ...]:
    """What names of a norm's tensors end with."""
    return ("weight", "bias") if biased else ("weight",)


@dataclass(frozen=True)
class NoPart:
    """In place of a mixer or a feed-forward part, in layers of one part each; that part has the first norm."""

    kv_specs: tuple[()] = ()
    state_specs: tuple[()] = ()
    shares: None = None

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float = 0.0, reads: int = 0) -> NoPart:
        return self

    def shapes(self, prefix: str, hidden: int, *, reads: int = 0) -> Shapes:
        return {}

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer = None, pool: Pool = None) -> Buffer:
        raise AssertionError("a part that is not there")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: its two parts, where norms stand (`centered`: of x - mean(x), `biased`: plus a bias), what each part's
    output is multiplied by, a part beside them. `scaled`: in the end the stream is multiplied by `layer_scalar` [1].
    `shortcut`: another feed-forward part, which reads what the first does and is added behind the next layer (experts
    of LongCat-Flash). `streams`: the stream is several, side by side (layers.streams)."""

    mixer: MixerConfig
    mlp: FeedForwardConfig
    eps: float
    norms: Norms = "pre"
    centered: bool = False
    biased: bool = False
    residual_scale: float = 1.0
    beside: BesideConfig | None = None
    scaled: bool = False
    shortcut: FeedForwardConfig | None = None
    streams: StreamSpec | None = None

    def build(self, weights: Weights, prefix: str, hidden: int, *, reads: int | None = None) -> DecoderLayer:
        """From the tensors under `prefix` (no trailing dot). `reads`: columns that the mixer reads, where they are not
        the hidden size."""
        norms: list[Norm] = [
            weights.norm(f"{prefix}.{name}", hidden, self.eps, centered=self.centered, biased=self.biased)
            if name
            else NoNorm()
            for name in self._norms
        ]
        return DecoderLayer(
            input_norm=norms[0],
            mixer=self.mixer.build(weights, prefix, hidden, eps=self.eps, reads=reads or hidden),
            mixer_norm=norms[1],
            post_norm=norms[2],
            mlp=self.mlp.build(weights, f"{prefix}.mlp", hidden),
            mlp_norm=norms[3],
            residual_scale=self.residual_scale,
            beside=self.beside.build(weights, prefix, hidden, eps=self.eps) if self.beside else None,
            stream_scale=weights.scalar(f"{prefix}.layer_scalar") if self.scaled else 1.0,
            parallel=self.norms == "parallel",
            shortcut=self.shortcut.build(weights, f"{prefix}.shortcut", hidden) if self.shortcut else None,
            streams=tuple(
                read_streams(weights, f"{prefix}.{part}", hidden, self.streams, self.eps) for part in STREAM_PARTS
            )
            if self.streams
            else (),
        )

    def shapes(self, prefix: str, hidden: int, *, reads: int | None = None) -> Shapes:
        """Names and shapes of what `build` takes."""
        return {
            **{f"{prefix}.{name}.{end}": (hidden,) for name in self._norms if name for end in norm_parts(self.biased)},
            **self.mixer.shapes(prefix, hidden, reads=reads or hidden),
            **self.mlp.shapes(f"{prefix}.mlp", hidden),
            **(self.beside.shapes(prefix, hidden) if self.beside else {}),
            **({f"{prefix}.layer_scalar": (1,)} if self.scaled else {}),
            **(self.shortcut.shapes(f"{prefix}.shortcut", hidden) if self.shortcut else {}),
            **self._stream_shapes(prefix, hidden),
        }

    def _stream_shapes(self, prefix: str, hidden: int) -> Shapes:
        shapes: Shapes = {}
        for part in STREAM_PARTS if self.streams else ():
            assert self.streams
            shapes |= stream_shapes(f"{prefix}.{part}", hidden, self.streams)
        return shapes

    @property
    def _norms(self) -> tuple[str, str, str, str]:
        names = NORM_NAMES[self.norms]
        if isinstance(self.mlp, NoPart):
            return names[0], names[1], "", ""
        return ("", "", names[0], names[3]) if isinstance(self.mixer, NoPart) else names


@dataclass(frozen=True)
class DecoderLayer:
    """x + mixer(norm(x)), then + mlp(norm(.)), each part's output normed and scaled or not; the second sum is left to
    the next layer's norm. `parallel`: x + mixer(norm(x)) + mlp(norm(x))."""

    input_norm: Norm
    mixer: Mixer
    mixer_norm: Norm
    post_norm: Norm
    mlp: FeedForward
    mlp_norm: Norm
    residual_scale: float = 1.0
    beside: Beside | None = None
    stream_scale: float = 1.0
    parallel: bool = False
    shortcut: FeedForward | None = None
    streams: tuple[Streams, ...] = ()

    def __call__(
        self,
        ops: Ops,
        delta: Buffer | None,
        residual: Buffer,
        positions: Buffer,
        pool: Pool,
        passing: Passing | None = None,
    ) -> tuple[Buffer | None, Buffer]:
        """(delta, residual) -> (delta, residual); the stream's value is their sum (None: nothing to add). With streams
        the residual is all of them, and nothing is left to add."""
        if self.streams:
            return None, self._in_streams(ops, residual, positions, pool, passing)
        mixed = delta
        if not isinstance(self.mixer, NoPart):
            x, residual = self.input_norm.add(ops, delta, residual)
            mixed = self._scaled(ops, self.mixer_norm(ops, self.mixer(ops, x, positions, pool)))
        if isinstance(self.mlp, NoPart):
            return mixed, residual
        if self.parallel:
            return ops.add(mixed, self._scaled(ops, self.mlp_norm(ops, self.mlp(ops, x)))), residual
        x, residual = self.post_norm.add(ops, mixed, residual)
        delta = self._scaled(ops, self.mlp_norm(ops, self.mlp(ops, x)))
        if passing:
            delta, passing.due = (
                delta if passing.due is None else ops.add(delta, passing.due),
                self.shortcut(ops, x) if self.shortcut else None,
            )
        if self.beside:
            assert passing, "a layer with a part beside stands in a trunk"
            residual = ops.add(delta, residual)
            delta = self.beside(ops, residual, passing.token_ids, passing.embedded)
        if self.stream_scale == 1:
            return delta, residual
        return None, ops.scale(ops.add(delta, residual), self.stream_scale)

    def _in_streams(self, ops: Ops, streams: Buffer, positions: Buffer, pool: Pool, passing: Passing | None) -> Buffer:
        around_mixer, around_mlp = self.streams
        x, weights = around_mixer.enter(ops, streams)
        mixed = self.mixer(ops, self.input_norm(ops, x), positions, pool)
        streams = around_mixer.leave(ops, streams, mixed, weights)
        x, weights = around_mlp.enter(ops, streams)
        x = self.post_norm(ops, x)
        by_token = isinstance(self.mlp, ByToken) and self.mlp.table is not None
        assert not by_token or passing, "a layer that reads tokens stands in a trunk"
        said = self.mlp(ops, x, passing.token_ids) if by_token else self.mlp(ops, x)  # type: ignore[union-attr, call-arg]
        return around_mlp.leave(ops, streams, said, weights)

    def _scaled(self, ops: Ops, x: Buffer) -> Buffer:
        return x if self.residual_scale == 1 else ops.scale(x, self.residual_scale)


@dataclass(frozen=True)
class Decoder:
    """Embedding, layers, final norm, LM head: a whole trunk. Embeddings are multiplied by `embedding_scale`, logits by
    `logit_scale` and kept within `logit_softcap`, if there is one. `streams`: there are several between the layers."""

    embedding: Weight
    layers: list[DecoderLayer]
    norm: RMSNorm
    lm_head: Linear
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    streams: Spread | None = None

    @property
    def kv_specs(self) -> list[KVSpec]:
        """One KV pool each."""
        return [spec for layer in self.layers for spec in layer.mixer.kv_specs]

    @property
    def state_specs(self) -> list[StateSpec]:
        """One state pool each."""
        return [spec for layer in self.layers for spec in layer.mixer.state_specs]

    def embed(self, ops: Ops, token_ids: Buffer) -> Buffer:
        """[R] ids -> [R, H], as layers read them."""
        x = ops.embed(self.embedding, token_ids)
        return x if self.embedding_scale == 1 else ops.scale(x, self.embedding_scale)

    def logits(self, ops: Ops, x: Buffer) -> Buffer:
        """[L, H] after the final norm -> [L, V]."""
        logits = self.lm_head(ops, x)
        if self.logit_scale != 1:
            logits = ops.scale(logits, self.logit_scale)
        return ops.softcap(logits, self.logit_softcap) if self.logit_softcap else logits

    def program(
        self, kv_pools: Seq[Pool], hidden_pool: Pool = None, tap: Tap = "post_norm", state_pools: Seq[Pool] = ()
    ) -> Program:
        """The forward over the pools of kv_specs and state_specs; `hidden_pool` None keeps no hidden states."""
        return DecoderProgram(self, self.pools(kv_pools, state_pools), hidden_pool, tap)

    def pools(self, kv_pools: Seq[Pool], state_pools: Seq[Pool]) -> list[Pool]:
        """What each layer's mixer is called with."""
        kv, states = iter(kv_pools), iter(state_pools)
        pools: list[Pool] = []
        for mixer in [layer.mixer for layer in self.layers]:
            own = [next(kv) for _ in mixer.kv_specs] + [next(states) for _ in mixer.state_specs]
            if mixer.shares is not None:
                assert mixer.shares < len(pools), "a layer shares with one before it"
                own.append(pools[mixer.shares])
            pools.append(together(own))
        return pools


@dataclass(frozen=True)
class DecoderProgram:
    """Results: `logits` [L, V]; `hidden` [R, H] after the final norm; `tapped` [R, taps x H] where there are taps and
    no pool that keeps them; `streams` [R, streams * H] behind the last layer where those are the tap."""

    model: Decoder
    pools: list[Pool]
    hidden_pool: Pool = None
    tap: Tap = "post_norm"

    def __call__(self, ops: Ops, step: StepInputs) -> dict[str, Buffer]:
        model = self.model
        embedded = model.embed(ops, step.token_ids)
        streams = model.streams
        delta, residual = None, streams.begin(ops, embedded) if streams else embedded
        passing = Passing(step.token_ids, embedded)
        wanted = tapped_layers(self.tap)
        tapped: Buffer | None = None
        width = len(model.norm.weight)
        for i, (layer, pool) in enumerate(zip(model.layers, self.pools, strict=True)):
            if i in wanted:
                if delta is not None:  # the layer's norm would add them once more
                    delta, residual = None, ops.add(delta, residual)
                stream = ops.sum_streams(residual, None, streams.spec) if streams else residual
                if self.hidden_pool is None:
                    tapped = stream if tapped is None else ops.concat(tapped, stream)
                else:  # joined where they are kept
                    ops.store(stream, self.hidden_pool, wanted.index(i) * width)
            delta, residual = layer(ops, delta, residual, step.positions, pool, passing)
        last = residual
        if streams:
            residual, _ = streams.enter(ops, residual)
        hidden, residual = model.norm.add(ops, delta, residual)
        if self.hidden_pool is not None and not isinstance(self.tap, tuple):
            states = {"post_norm": hidden, "pre_norm": residual, "streams": last}
            ops.store(states[self.tap], self.hidden_pool)
        logits = model.logits(ops, ops.take_rows(hidden, step.logit_rows))
        results = {"logits": logits, "hidden": hidden}
        if tapped is not None:
            results["tapped"] = tapped
        return results | ({"streams": last} if streams and self.tap == "streams" else {})
