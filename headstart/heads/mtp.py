"""MTP modules (DeepSeek-V3 report, section 2.2): one for all draft steps, or several.

x = W [norm_e(e(t_{p+1})) ; norm_h(h_p)], x' = Block(x), y = norm(x'), logits = head(y); the next draft step reads the
*recycled* vector (y or x') in place of h. Canonical tensors: `mtp.{i}.` norm_embedding, norm_hidden, projection, block,
norm (without it y = x'), lm_head (without it the trunk's). With residual streams (DeepSeek-V4) h holds all streams of
the trunk: each stream gets its own x, the block mixes them, and `streams` sums them before the norm. In a chain
(HeadSpec.chained) modules after the first one read the recycled vectors at all pairs, never the trunk's states.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np

from headstart.core import Float32
from headstart.formats.sizes import Sizes
from headstart.heads.base import FIRST_PAIR_POSITION, HeadSpec
from headstart.heads.kind import HeadKind, Start, Training, random_weights
from headstart.heads.published import DeclaredShapes, DrafterFormat, Present
from headstart.kernels.ops import Buffer, KVSpec, Ops, Pool, StepInputs
from headstart.kernels.specs import StateSpec
from headstart.layers.decoder import DecoderLayer, LayerConfig
from headstart.layers.linear import Linear
from headstart.layers.norm import NoNorm, Norm, RMSNorm
from headstart.layers.streams import StreamMixer, build_hyper_connection, repeat_streams
from headstart.layers.weights import Weights


@dataclass(frozen=True)
class MTPModule:
    """One prediction module without its LM head."""

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    projection: Linear
    block: DecoderLayer
    norm: Norm
    streams: StreamMixer | None = None
    trunk_norm: RMSNorm | None = None  # of the trunk's embeddings

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        return self.block.mixer.kv_specs

    @property
    def state_specs(self) -> Seq[StateSpec]:
        return self.block.state_specs

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """See heads.base.Module. Recycled vectors and the trunk's hidden states are read alike."""
        if spec.mask_first:
            embedded = ops.zero_where(embedded, step.positions, FIRST_PAIR_POSITION)
        if self.trunk_norm:
            embedded = self.trunk_norm(ops, embedded)
        e, h = self.embedding_norm(ops, embedded), self.hidden_norm(ops, step.hidden)
        if self.streams:
            return self._in_streams(ops, spec, self.streams, e, h, step, pool)
        x = self.projection(ops, ops.concat(h, e) if spec.hidden_first else ops.concat(e, h))
        delta, residual = self.block(ops, None, x, step.positions, pool)
        y, stream = self.norm.add(ops, delta, residual)
        return y, y if spec.recycle == "post_norm" else stream

    def _in_streams(
        self, ops: Ops, spec: HeadSpec, streams: StreamMixer, e: Buffer, h: Buffer, step: StepInputs, pool: Pool
    ) -> tuple[Buffer, Buffer]:
        count = streams.spec.count
        wide = h if spec.tap == "streams" else repeat_streams(ops, h, count)
        pairs = ops.concat(repeat_streams(ops, e, count), wide, count)
        x = ops.head_linear(pairs, (self.projection.weight,) * count)
        _, mixed = self.block(ops, None, x, step.positions, pool)
        stream, _ = streams.collapse(ops, mixed)
        y = self.norm(ops, stream)
        return y, {"post_norm": y, "pre_norm": stream, "streams": mixed}[spec.recycle]


def _streams(weights: Weights, prefix: str, hidden: int, layer: LayerConfig) -> StreamMixer | None:
    if layer.streams is None:
        return None
    return build_hyper_connection(weights, prefix, hidden, layer.streams, layer.eps, last=True)


def _projection(weights: Weights, name: str, hidden: int, layer: LayerConfig) -> Linear:
    """The projection of [e ; h]. With residual streams it is not rounded, like the streams' other matrices."""
    if layer.streams is None:
        return weights.linear(name, hidden, 2 * hidden)
    matrix = weights.raw(f"{name}.weight", (hidden, 2 * hidden))
    return Linear(weights.take(lambda: matrix.plain(), precise=True))


def _block(weights: Weights, spec: HeadSpec, index: int, hidden: int) -> DecoderLayer:
    if spec.own_lm_head:  # random weights are drawn in this order; `lm_heads` converts it
        weights.raw(f"mtp.{index}.lm_head.weight", (spec.own_lm_head, hidden))
    return spec.block_of(index).build(weights, f"mtp.{index}.block", hidden)


def _hidden_norm(spec: HeadSpec, hidden: int) -> int:
    """Features that the norm of the trunk's hidden state normalizes together."""
    return hidden * (spec.num_streams if spec.joint_norm else 1)


def modules(weights: Weights, spec: HeadSpec, hidden: int) -> Seq[MTPModule]:
    assert spec.layer is not None
    norm = partial(weights.norm, size=hidden, eps=spec.layer.eps, centered=spec.layer.centered)
    trunk_norm = weights.take(lambda: weights.unlisted("embed_norm.weight", hidden)) if spec.embed_norm else None
    return [
        MTPModule(
            embedding_norm=norm(f"mtp.{i}.norm_embedding"),
            hidden_norm=norm(f"mtp.{i}.norm_hidden", size=_hidden_norm(spec, hidden)),
            norm=norm(f"mtp.{i}.norm") if spec.output_norm else NoNorm(),
            projection=_projection(weights, f"mtp.{i}.projection", hidden, spec.layer),
            block=_block(weights, spec, i, hidden),
            streams=_streams(weights, f"mtp.{i}.streams", hidden, spec.layer),
            trunk_norm=RMSNorm(trunk_norm, spec.layer.eps) if spec.embed_norm else None,
        )
        for i in range(spec.num_modules)
    ]


def lm_heads(weights: Weights, spec: HeadSpec, hidden: int, rows: int) -> Seq[Linear]:
    """LM head of each module; empty if modules have none."""
    count = spec.num_modules if spec.own_lm_head else 0
    return [weights.linear(f"mtp.{i}.lm_head", rows, hidden) for i in range(count)]


LAST = ("self_attn.gate_proj", "mlp.", "q_norm", "k_norm", "norm_embedding", "norm_hidden", "projection", ".norm.")
"""Parts of names of the tensors that come last in a module, in this order. The order decides which random numbers a
tensor gets and how gradients are summed."""


def initial(start: Start, spec: HeadSpec) -> dict[str, Float32]:
    """Initial weights: random matrices; norms from the trunk's last layer and the rms of its input (`Start`)."""

    def order(name: str) -> tuple[int, int]:
        return int(name.split(".")[1]), next((i for i, part in enumerate(LAST, 1) if part in name), 0)

    width = len(start.norm)
    scale, every = np.full(width, start.scale, np.float32), HEAD.shapes(spec, width)
    ordered = {name: every[name] for name in sorted(every, key=order)}
    first = random_weights(np.random.default_rng(0), ordered, start.layer)
    for i in range(spec.num_modules):
        first |= {f"mtp.{i}.{name}.weight": scale for name in ("norm_embedding", "norm_hidden")}
        first[f"mtp.{i}.norm.weight"] = np.float32(0.5) * start.norm  # small logits, since early predictions are wrong
    return first


# Formats of separately published MTP modules, which headstart identifies but does not run.


def _in_speculators(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    at, hidden = f"mtp_layers.{index}.", s["hidden"]
    norms = (f"{at}{name}_layernorm.weight" for name in ("token", "hidden", "final"))
    return {f"{at}input_proj.weight": (hidden, 2 * hidden), **dict.fromkeys(norms, (hidden,))}


SPECULATORS = DrafterFormat(
    key="speculators_mtp",
    title="MTP (speculators)",
    method="mtp",
    tensors=_in_speculators,
    speculators=("mtp",),
    count=("num_nextn_predict_layers",),
    of_family="block",
)
LINKING = {
    "eh_proj.weight": ("enorm", "hnorm", "shared_head.norm"),
    "mtp.fc.weight": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "mtp_layers.0.input_proj.weight": (
        "mtp_layers.0.token_layernorm", "mtp_layers.0.hidden_layernorm", "mtp_layers.0.final_layernorm",
    ),
}  # fmt: skip
"""Name of a module's projection -> names of its norms, in three naming styles."""


def _cut_out(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    """DrafterFormat.tensors for an unknown family."""
    hidden, vocabulary = s["hidden"], s["vocabulary"]
    projection = next((each for each in LINKING if each in present), "eh_proj.weight")
    return {
        projection: (hidden, 2 * hidden),
        **{f"{name}.weight": (hidden,) for name in LINKING[projection]},
        "?embed_tokens.weight": (vocabulary, hidden),
        "?shared_head.head.weight": (vocabulary, hidden),
    }


XLLM = DrafterFormat(
    key="xllm_mtp",
    title="MTP module exported for xLLM",
    method="mtp",
    tensors=_cut_out,
    model_types=("*_mtp",),
    architectures=("mtpforcausallm",),
    of_family="module",
)
HEAD = HeadKind(
    title="MTP",
    formats=(SPECULATORS, XLLM),
    modules=modules,
    lm_heads=lm_heads,
    # the stream before the final norm, as in the one dense family that vLLM drafts for (vllm_mimo)
    training=Training(spec=lambda layers, depth: HeadSpec(tap="pre_norm"), initial=initial, stacks=True),
)
