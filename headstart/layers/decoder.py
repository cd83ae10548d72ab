"""Decoder layers and the decoder; `LayerConfig` describes a layer, builds it and counts its costs."""

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

from headstart.kernels.ops import Buffer, KVSpec, Ops, Pool, StepInputs, Weight
from headstart.kernels.specs import StateSpec, StreamSpec
from headstart.layers import parts
from headstart.layers.costs import FeedForwardCost, LayerCost, num_elements, num_table_elements
from headstart.layers.linear import Linear, scale
from headstart.layers.ngram import NGramMemory, NGramMemoryConfig
from headstart.layers.norm import NoNorm, Norm, RMSNorm
from headstart.layers.per_layer import PerLayer, PerLayerConfig
from headstart.layers.shapes import shapes_of
from headstart.layers.streams import StreamExpansion, StreamMixer, build_hyper_connection
from headstart.layers.weights import Shapes, Weights

Tap = Literal["post_norm", "pre_norm", "streams"] | tuple[int, ...]
"""The trunk's hidden state that a head reads: after or before the final norm, all residual streams after the last
layer, or the inputs of these layers, concatenated; the number after the last layer's is its output. Of several residual
streams their mean is read, with attention residuals the mixture that the layer reads."""


class SumTaps(tuple[int, ...]):
    """Taps that read the newest sum of a trunk with attention residuals instead of the mixture."""

    __slots__ = ()


def tap_width(tap: Tap | None, hidden_size: int, num_streams: int = 1) -> int:
    """Columns of a stored hidden state; 0 without a tap."""
    if tap is None:
        return 0
    return hidden_size * (num_streams if tap == "streams" else max(len(tapped_layers(tap)), 1))


def tapped_layers(tap: Tap) -> tuple[int, ...]:
    """Indices of the layers whose inputs are tapped; empty for a final state."""
    return tap if isinstance(tap, tuple) else ()


@dataclass
class ForwardState:
    """Values that the layers of one pass hand on. The stream is delta + residual."""

    token_ids: Buffer  # [R]
    embedded: Buffer  # [R, H], input of the first layer
    residual: Buffer  # [R, H], or all residual streams [R, streams * H]
    delta: Buffer | None = None  # [R, H], output of the last part; None: 0. With several streams: see DecoderLayer
    pending: Buffer | None = None  # [R, H], output of a shortcut, added after the next layer
    tapped: Buffer | None = None  # [R, taps * H], inputs of tapped layers so far, if no pool stores them


STREAM_PARTS = ("mixer_streams", "mlp_streams")
NormPlacement = Literal["pre", "post", "sandwich", "open", "parallel", "late", "none"]
NORM_NAMES: Mapping[NormPlacement, tuple[str, str, str, str]] = {
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "parallel": ("input_layernorm", "", "", ""),
    "late": ("", "", "post_attention_layernorm", ""),
    "none": ("", "", "", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    "open": ("input_layernorm", "post_attention_layernorm", "", "post_feedforward_layernorm"),  # the MLP has its own
}  # fmt: skip
"""Names of the norms before and after the mixer, before and after the feed-forward part; empty: no norm. `parallel`:
both parts read the first norm."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer."""

    mixer: parts.MixerConfig
    mlp: parts.FeedForwardConfig
    eps: float  # of the norms
    post_eps: float | None = None  # of norms after a part; None: eps
    norms: NormPlacement = "pre"
    centered: bool = False  # norms subtract the mean (LayerNorm)
    biased: bool = False  # norms add a bias
    residual_scale: float = 1.0  # multiplies the output of each part
    post_block: PerLayerConfig | None = None  # after the feed-forward part
    has_layer_scalar: bool = False  # the stream is multiplied by `layer_scalar` [1] at the end
    shortcut: parts.FeedForwardConfig | None = None  # reads the MLP's input, added after the next layer (LongCat-Flash)
    streams: StreamSpec | None = None  # several residual streams (layers/streams.py)
    memory: NGramMemoryConfig | None = None  # added to the streams before the mixer

    def build(self, weights: Weights, prefix: str, hidden: int, *, in_features: int | None = None) -> "DecoderLayer":
        """Builds the layer from the tensors under `prefix` (no trailing dot). `in_features`: columns of the mixer's
        input; None: the hidden size."""
        norms: list[Norm] = [
            weights.norm(f"{prefix}.{name}", hidden, eps, centered=self.centered, biased=self.biased)
            if name
            else NoNorm()
            for name, eps in zip(self._norms, (self.eps, self.post_eps or self.eps) * 2, strict=True)
        ]
        return DecoderLayer(
            input_norm=norms[0],
            mixer=self.mixer.build(weights, prefix, hidden, eps=self.eps, in_features=in_features or hidden),
            mixer_norm=norms[1],
            post_norm=norms[2],
            mlp=self.mlp.build(weights, f"{prefix}.mlp", hidden),
            mlp_norm=norms[3],
            residual_scale=self.residual_scale,
            post_block=self.post_block.build(weights, prefix, hidden, eps=self.eps) if self.post_block else None,
            stream_scale=weights.scalar(f"{prefix}.layer_scalar") if self.has_layer_scalar else 1.0,
            parallel=self.norms == "parallel",
            shortcut=self.shortcut.build(weights, f"{prefix}.shortcut", hidden) if self.shortcut else None,
            streams=tuple(
                build_hyper_connection(weights, f"{prefix}.{part}", hidden, self.streams, self.eps)
                for part in STREAM_PARTS
            )
            if self.streams
            else (),
            memory=self.memory.build(weights, f"{prefix}.memory", hidden, self.eps) if self.memory else None,
        )

    def shapes(self, prefix: str, hidden: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        return shapes_of(lambda weights: self.build(weights, prefix, hidden))

    def cost(self, hidden: int, source: parts.MixerConfig | None = None) -> LayerCost:
        """Costs of the layer, without tensors that several layers share. `source`: the mixer of its source layer."""
        shapes = {name: shape for name, shape in self.shapes("layer", hidden).items() if name.startswith("layer.")}
        of_mixer = shapes_of(
            lambda weights: self.mixer.build(weights, "layer", hidden, eps=self.eps, in_features=hidden)
        )
        mixer = self.mixer.cost(num_elements(of_mixer), source)
        if self.memory:
            own = sum(math.prod(each.state_shape) for each in self.memory.state_specs(hidden))
            mixer = replace(mixer, state=mixer.state + own)
        experts = self.mlp.routed_experts(hidden)
        if self.shortcut and not experts.count:
            experts = self.shortcut.routed_experts(hidden)
        tables = num_table_elements(shapes)
        feed_forward = FeedForwardCost(
            weights=num_elements(shapes) - mixer.weights - experts.count * experts.weights - tables,
            num_kernels=sum(part.num_kernels for part in (self.mlp, self.shortcut) if part) + self._stream_kernels,
            experts=experts.count, active=experts.active, expert_weights=experts.weights, tables=tables,
        )  # fmt: skip
        return LayerCost(mixer, feed_forward)

    @property
    def _stream_kernels(self) -> int:
        """Kernels that mix residual streams around both parts."""
        return 6 if self.streams else 0

    @property
    def _norms(self) -> tuple[str, str, str, str]:
        names = NORM_NAMES[self.norms]
        if isinstance(self.mlp, parts.EmptyFeedForward):
            return names[0], names[1], "", ""
        return ("", "", names[0], names[3]) if isinstance(self.mixer, parts.EmptyMixer) else names


@dataclass(frozen=True)
class DecoderLayer:
    """x + mixer(norm(x)), then + mlp(norm(.)); both outputs may be normed and scaled. The second sum is fused into the
    next layer's norm. `parallel`: x + mixer(norm(x)) + mlp(norm(x))."""

    input_norm: Norm
    mixer: parts.Mixer
    mixer_norm: Norm
    post_norm: Norm
    mlp: parts.FeedForward
    mlp_norm: Norm
    residual_scale: float = 1.0
    post_block: PerLayer | None = None
    stream_scale: float = 1.0
    parallel: bool = False
    shortcut: parts.FeedForward | None = None
    streams: tuple[StreamMixer, ...] = ()
    memory: NGramMemory | None = None

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """One state pool each: those of the mixer, then those of the memory."""
        return (*self.mixer.state_specs, *(self.memory.state_specs if self.memory else ()))

    def __call__(
        self, ops: Ops, delta: Buffer | None, residual: Buffer, positions: Buffer, pool: Pool,
        state: ForwardState | None = None,
    ) -> tuple[Buffer | None, Buffer]:  # fmt: skip
        """(delta, residual) -> (delta, residual), both [R, H]; the stream is their sum (delta None: 0). With several
        streams residual is [R, streams * H], and delta None or, if sums are delayed, the last part's weights."""
        if self.streams:
            return self._in_streams(ops, delta, residual, positions, pool, state)
        mixed = delta
        if not isinstance(self.mixer, parts.EmptyMixer):
            x, residual = self.input_norm.add(ops, delta, residual)
            mixed = self.mixer_norm(ops, self.mixer(ops, x, positions, pool))
            mixed = scale(ops, mixed, self.residual_scale)
        if isinstance(self.mlp, parts.EmptyFeedForward):
            return mixed, residual
        if self.parallel:
            return ops.add(mixed, scale(ops, self.mlp_norm(ops, self.mlp(ops, x)), self.residual_scale)), residual
        x, residual = self.post_norm.add(ops, mixed, residual)
        delta = scale(ops, self.mlp_norm(ops, self.mlp(ops, x)), self.residual_scale)
        if state:
            delta, state.pending = (
                delta if state.pending is None else ops.add(delta, state.pending),
                self.shortcut(ops, x) if self.shortcut else None,
            )
        if self.post_block:
            assert state, "layers with a post_block only work in a trunk"
            residual = ops.add(delta, residual)
            delta = self.post_block(ops, residual, state.token_ids, state.embedded)
        if self.stream_scale == 1:
            return delta, residual
        return None, ops.scale(ops.add(delta, residual), self.stream_scale)

    def _in_streams(
        self, ops: Ops, before: Buffer | None, streams: Buffer, positions: Buffer, pool: Pool,
        state: ForwardState | None,
    ) -> tuple[Buffer | None, Buffer]:  # fmt: skip
        around_mixer, around_mlp = self.streams
        if self.memory:
            assert state, "layers with a memory only work in a trunk"
            begin = len(self.mixer.kv_specs) + len(self.mixer.state_specs)
            end = begin + len(self.memory.state_specs)
            streams = self.memory(ops, streams, state.token_ids, pool[begin:end])
            pool = parts.join_pools(pool[:begin] + pool[end:])
        x, weights = around_mixer.collapse(ops, streams, before)
        mixed = self.mixer(ops, self.input_norm(ops, x), positions, pool)
        streams = around_mixer.distribute(ops, streams, mixed, weights)
        x, weights = around_mlp.collapse(ops, streams, weights)
        y = self.mlp(ops, self.post_norm(ops, x), state.token_ids if state else None)
        streams = around_mlp.distribute(ops, streams, y, weights)
        return weights if around_mlp.spec.delayed else None, streams


@dataclass(frozen=True)
class Decoder:
    """A whole trunk: embedding, layers, final norm, LM head."""

    embedding: Weight
    layers: list[DecoderLayer]
    norm: RMSNorm
    lm_head: Linear
    embedding_scale: float = 1.0  # multiplies embeddings
    embedding_norm: RMSNorm | None = None  # of embeddings that the first layer reads; heads read them without
    logit_scale: float = 1.0  # multiplies logits
    logit_softcap: float = 0.0  # softcap * tanh(logit / softcap); 0: none
    streams: StreamExpansion | None = None  # from one residual stream to several and back

    @property
    def kv_specs(self) -> list[KVSpec]:
        """One KV pool each."""
        return [spec for layer in self.layers for spec in layer.mixer.kv_specs]

    @property
    def state_specs(self) -> list[StateSpec]:
        """One state pool each."""
        return [spec for layer in self.layers for spec in layer.state_specs]

    def embed(self, ops: Ops, token_ids: Buffer) -> Buffer:
        """[R] ids -> [R, H], input of the first layer."""
        embedded = scale(ops, ops.embed(self.embedding, token_ids), self.embedding_scale)
        return self.embedding_norm(ops, embedded) if self.embedding_norm else embedded

    def logits(self, ops: Ops, x: Buffer) -> Buffer:
        """[L, H] after the final norm -> [L, V]."""
        logits = scale(ops, self.lm_head(ops, x), self.logit_scale)
        return ops.softcap(logits, self.logit_softcap) if self.logit_softcap else logits

    def program(
        self, kv_pools: Seq[Pool], hidden_pool: Pool = None, tap: Tap = "post_norm", state_pools: Seq[Pool] = ()
    ) -> "DecoderProgram":
        """The forward program over the pools of kv_specs and state_specs. `hidden_pool`: where the hidden states of
        `tap` are stored; None: nowhere."""
        return DecoderProgram(self, self.pools(kv_pools, state_pools), hidden_pool, tap)

    def pools(self, kv_pools: Seq[Pool], state_pools: Seq[Pool]) -> list[Pool]:
        """The `pool` argument of each layer's mixer."""
        kv, states = iter(kv_pools), iter(state_pools)
        pools: list[Pool] = []
        for layer in self.layers:
            mixer = layer.mixer
            own = [next(kv) for _ in mixer.kv_specs] + [next(states) for _ in layer.state_specs]
            if (source := mixer.config.source_layer) is not None:
                assert source < len(pools), "the source layer comes first"
                own.append(pools[source])
            pools.append(parts.join_pools(own))
        return pools


@dataclass(frozen=True)
class DecoderProgram:
    """One pass of a decoder. Results: `logits` [L, V]; `hidden` [R, H] after the final norm; `tapped` [R, taps x H] if
    layers are tapped and no pool stores them; `streams` [R, streams * H] after the last layer if these are the tap."""

    model: Decoder
    pools: list[Pool]
    hidden_pool: Pool = None
    tap: Tap = "post_norm"
    # columns of StepInputs.hidden: the input of the first layer [R, H], and for each of the first layers [R, H] that is
    # added to its output; 0: the input is made of token ids
    embedded_width: int = 0

    def __call__(self, ops: Ops, step: StepInputs) -> dict[str, Buffer]:
        state = self.begin(ops, step)
        for index in range(len(self.model.layers)):
            self.run_layer(ops, step, state, index)
        hidden, before, last = self.end(ops, state)
        if self.hidden_pool is not None and not isinstance(self.tap, tuple):
            ops.store({"post_norm": hidden, "pre_norm": before, "streams": last}[self.tap], self.hidden_pool)
        logits = self.model.logits(ops, ops.take_rows(hidden, step.logit_rows))
        results = {"logits": logits, "hidden": hidden}
        if state.tapped is not None:
            results["tapped"] = state.tapped
        return results | ({"streams": last} if self.model.streams and self.tap == "streams" else {})

    def begin(self, ops: Ops, step: StepInputs) -> ForwardState:
        """The input of the first layer."""
        width = len(self.model.norm.weight)
        if not self.embedded_width:
            embedded = self.model.embed(ops, step.token_ids)
        else:
            embedded = step.hidden if self.embedded_width == width else ops.columns(step.hidden, 0, width)
        streams = self.model.streams
        return ForwardState(step.token_ids, embedded, streams.expand(ops, embedded) if streams else embedded)

    def run_layer(self, ops: Ops, step: StepInputs, state: ForwardState, index: int) -> None:
        """Runs one layer, which changes `state`."""
        self._tap(ops, state, index)
        layer, pool = self.model.layers[index], self.pools[index]
        state.delta, state.residual = layer(ops, state.delta, state.residual, step.positions, pool, state)
        width = len(self.model.norm.weight)
        if (index + 2) * width <= self.embedded_width:
            state.residual = ops.add(state.residual, ops.columns(step.hidden, (index + 1) * width, width))

    def _tap(self, ops: Ops, state: ForwardState, index: int) -> None:
        """Keeps the input of layer `index`, if it is tapped."""
        taps, streams = tapped_layers(self.tap), self.model.streams
        if index not in taps:
            return
        if state.delta is not None and streams is None:  # the layer's norm must not add it again
            state.delta, state.residual = None, ops.add(state.delta, state.residual)
        layer = self.model.layers[index] if index < len(self.model.layers) else None
        sums = isinstance(self.tap, SumTaps)
        stream = streams.tapped(ops, state.residual, layer, sums=sums) if streams else state.residual
        if self.hidden_pool is None:
            state.tapped = stream if state.tapped is None else ops.concat(state.tapped, stream)
        else:  # concatenated in the pool
            ops.store(stream, self.hidden_pool, taps.index(index) * len(self.model.norm.weight))

    def end(self, ops: Ops, state: ForwardState) -> tuple[Buffer, Buffer, Buffer]:
        """The stream after [R, H] and before [R, H] the final norm, and the residual streams after the last layer."""
        self._tap(ops, state, len(self.model.layers))
        delta, residual, streams = state.delta, state.residual, self.model.streams
        if streams:
            (residual, _), delta = streams.collapse(ops, residual, delta), None
        return *self.model.norm.add(ops, delta, residual), state.residual
