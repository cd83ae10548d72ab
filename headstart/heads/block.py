"""Block drafters: DFlash, DFlash2 (z-lab 2026) and DSpark (DeepSeek 2026). A few layers over the trunk's streams at
several depths; one pass drafts a whole block.

Features of a committed position p: c_p = hidden_norm(fuse [tap_1 ; tap_2 ; ...]). Each layer stores
k = rope(k_norm(k_proj c_p), p) and v = v_proj c_p at slot p. Features have no queries. The rows of a block are at
positions n, n + 1, ...: row 0 is the embedding of the last token (the *anchor*), the others are mask tokens. They
attend to all features before n, and to each other as BlockSpec says. y = norm(layers(rows)).
DFlash2 convolves input and output of attention and MLP along the block; the input adds to the kernels.

Row k >= 1 predicts the token at n + k (DFlash); with `anchor_predicts` row k >= 0 predicts token n + 1 + k (DSpark).
logits = logit_scale (lm_head y + out . z). The Markov head reads e = embed[x] of the token x before the predicted one,
so tokens are sampled one by one. z is
  vanilla   e
  gated     sigmoid(G [y ; e]) * e
  rnn       tanh(o) with [g ; c ; o] = J [s ; e ; y]; the next row's s is sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
  selector  e * P y; out . z is added after scaling, and only the `top_k` tokens with the largest logits stay (DFlash2)
Confidence head: sigmoid(w [y ; e] + b) is the probability that the row's token is accepted.

Canonical tensors: `fuse.weight` [H, taps * H], `hidden_norm.weight`, `layers.{i}.`, `norm.weight`,
`mask_embedding` [H], `markov.embed.weight` [V, r], `markov.out.weight` [V', r], `markov.gate.`, `markov.joint.` or
`markov.row.weight`, `confidence.weight` [1, H + r] and `confidence.bias` [1]; of a convolution `base_kernel`
[2, taps, H] and `kernel_projection.weight`; a head may have `embed_tokens.weight` and `lm_head.weight`.

A checkpoint may hold a DSpark drafter in place of MTP modules (DeepSeek-V4-Flash-0731). Its layers are those of the
trunk, here with several residual streams: all start as the row's embedding, and `streams` sums them before `norm`. The
confidence head reads that sum. Canonical tensors are those above under `mtp.{i}` (`_in_checkpoint`).

The layers of Kimi-K3's drafter have latent attention: its features are the latents of positions.

Sources: deepseek-ai/DeepSpec `modeling/dspark/markov_head.py`; z-lab/dflash `model.py`; vLLM 0.33 `qwen3_dflash2.py`,
`models/deepseek_v4/nvidia/dspark.py`, `models/kimi_k3/nvidia/dspark_mla.py`.
"""

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise

import numpy as np

from headstart.core import Float32
from headstart.errors import ModelError, UsageError
from headstart.formats.sizes import Sizes, Unknown
from headstart.heads.base import BlockSpec, HeadSpec
from headstart.heads.kind import (
    HeadKind,
    Start,
    Training,
    ascend_below,
    plain_parts,
    published_layer,
    random_weights,
)
from headstart.heads.layouts import reading
from headstart.heads.published import (
    DeclaredShapes,
    DrafterFormat,
    Present,
    block_shapes,
    draft_vocabulary,
    latent_shapes,
)
from headstart.kernels.ops import Buffer, KVSpec, Ops, Pool, RawTensor, Weight
from headstart.layers.attention import Attention, AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.compressed import CompressedAttention
from headstart.layers.decoder import DecoderLayer, LayerConfig, tapped_layers
from headstart.layers.linear import Linear, LMHead, scale
from headstart.layers.mla import MLA, MLAConfig
from headstart.layers.norm import RMSNorm
from headstart.layers.rope import half_split
from headstart.layers.streams import StreamExpansion, build_last_sum
from headstart.layers.weights import Weights

GATES: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
    "gated": ("markov.gate", 1, ("row", "token")),
    "rnn": ("markov.joint", 3, ("state", "token", "row")),
    "selector": ("markov.row", 1, ("row",)),
}
"""Kind of Markov head -> (tensor name of its matrix, rows / markov_rank, parts of the input in column order)."""


def _gate_columns(block: BlockSpec, hidden: int) -> dict[str, int]:
    return {part: hidden if part == "row" else block.markov_rank for part in GATES[block.markov_kind][2]}


@dataclass(frozen=True)
class MarkovHead:
    """Changes a row's logits by the token before the predicted one (formulas in the module's docstring)."""

    spec: BlockSpec
    table: Weight  # [V, r] embeddings of the tokens before
    out: Linear  # [V', r]
    gates: Mapping[str, Linear]  # input part ("row", "token", "state") -> its columns of the matrix in GATES
    tokens: Weight | None  # [V'] 0, 1, ... for a selector, which keeps single tokens as groups

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of columns of a `row`: logits, gate inputs that depend on y, and the recurrent state."""
        rank, kind = self.spec.markov_rank, self.spec.markov_kind
        gates = GATES[kind][1] * rank if self.gates else 0
        return self.spec.draft_vocab_size, gates, rank if "state" in self.gates else 0

    def row(self, ops: Ops, logits: Buffer, y: Buffer) -> Buffer:
        """Logits [L, V'] and y [L, H] -> input rows of `step` [L, sum of widths], with state 0."""
        if not self.gates:
            return logits
        gates, (_, _, state) = self.gates["row"](ops, y), self.widths
        row = ops.concat(logits, gates)
        return ops.concat(row, ops.scale(ops.columns(gates, 0, state), 0.0)) if state else row

    def embed(self, ops: Ops, token_ids: Buffer) -> Buffer:
        """Token ids [R] -> embeddings [R, r]."""
        return ops.embed(self.table, token_ids)

    def step(self, ops: Ops, row: Buffer, e: Buffer) -> dict[str, Buffer]:
        """Corrects rows by the embeddings e [R, r] of the tokens before. Returns `logits` [R, V'] and, for an RNN,
        `carry` [R, r]: the state of the next row."""
        (size, width, rank), kind, found = self.widths, self.spec.markov_kind, dict[str, Buffer]()
        logits, z = (ops.columns(row, 0, size), ops.columns(row, size, width)) if width else (row, e)
        if "token" in self.gates:
            z = ops.add(z, self.gates["token"](ops, e))
        if kind == "gated":
            z = ops.sigmoid_mul(z, e)
        elif kind == "rnn":
            state = ops.columns(row, size + width, rank)
            z = ops.add(z, self.gates["state"](ops, state))
            gate, new, z = (ops.columns(z, i * rank, rank) for i in range(3))
            new, z = ops.softcap(new, 1.0), ops.softcap(z, 1.0)  # tanh
            found["carry"] = ops.add(new, ops.sigmoid_mul(gate, ops.add(state, ops.scale(new, -1.0))))
        elif kind == "selector":
            added = ops.add(logits, self.out(ops, ops.activate_mul(z, e, "identity")))
            return {"logits": ops.keep_groups(added, logits, self.tokens, self.spec.top_k)}
        return found | {"logits": ops.add(logits, scale(ops, self.out(ops, z), self.spec.logit_scale))}


@dataclass(frozen=True)
class DynamicConv:
    """Convolutions along the block around a part of a layer: the first on its input, the second on its output."""

    deltas: tuple[Linear, Linear]  # input -> addition to the kernels
    kernels: tuple[Weight, Weight]  # [taps * H] each
    taps: int

    def __call__(self, ops: Ops, x: Buffer, part: Callable[[Buffer], Buffer]) -> Buffer:
        """Input x [R, H] of the part -> output [R, H] of the second convolution."""
        read = ops.grouped_conv(x, self.deltas[0](ops, x), self.kernels[0], self.taps)
        return ops.grouped_conv(part(read), self.deltas[1](ops, x), self.kernels[1], self.taps)


@dataclass(frozen=True)
class Confidence:
    """Confidence head: the sum of both terms is the logit of the probability that a row's token is accepted."""

    of_row: Linear  # reads y, or the sum of the residual streams
    of_token: Linear | None  # reads the Markov embedding of the token before, which is known later than y


@dataclass(frozen=True)
class BlockModule:
    """The loaded drafter, for inference and training. `pools` of its methods: one KV pool for each layer."""

    spec: BlockSpec
    fuse: Linear
    hidden_norm: RMSNorm
    layers: Seq[DecoderLayer]
    convs: Seq[tuple[DynamicConv, DynamicConv]]  # around attention and MLP of each layer; empty: there are none
    norm: RMSNorm
    mask_embedding: Weight | None
    markov: MarkovHead | None
    confidence: Confidence | None
    streams: StreamExpansion | None = None  # sums the residual streams after the layers; None: there is one stream

    @property
    def kv_specs(self) -> list[KVSpec]:
        return [spec for layer in self.layers for spec in layer.mixer.kv_specs]

    def keep(self, ops: Ops, hidden: Buffer, positions: Buffer, pools: Seq[Pool]) -> Buffer:
        """Taps of committed positions [R, taps * H] -> features [R, H]; stores each layer's keys and values of them."""
        features = self.hidden_norm(ops, self.fuse(ops, hidden))
        for layer, pool in zip(self.layers, pools, strict=True):
            mixer = layer.mixer
            assert isinstance(mixer, Attention | CompressedAttention | MLA)
            mixer.store(ops, features, positions, pool)
        return features

    def draft(
        self, ops: Ops, embedded: Buffer, token_ids: Buffer, positions: Buffer, pools: Seq[Pool]
    ) -> tuple[Buffer, Buffer]:
        """Token ids [R] of blocks and their embeddings [R, H] -> y [R, H] for the LM head, and the confidence head's
        input [R, H]."""
        if self.mask_embedding is not None:
            embedded = ops.put_where(embedded, token_ids, self.spec.mask_token_id, self.mask_embedding)
        delta, residual = None, scale(ops, embedded, self.spec.embedding_scale)
        residual = self.streams.expand(ops, residual) if self.streams else residual
        for i, (layer, pool) in enumerate(zip(self.layers, pools, strict=True)):
            if not self.convs:
                delta, residual = layer(ops, delta, residual, positions, pool)
                continue
            of_mixer, of_mlp = self.convs[i]
            x, residual = layer.input_norm.add(ops, delta, residual)
            mixed = of_mixer(ops, x, partial(layer.mixer, ops, positions=positions, pool=pool))
            x, residual = layer.post_norm.add(ops, mixed, residual)
            delta = of_mlp(ops, x, partial(layer.mlp, ops))
        if self.streams:
            stream, _ = self.streams.collapse(ops, residual, delta)
            return self.norm(ops, stream), stream
        y, _ = self.norm.add(ops, delta, residual)
        return y, y

    def logits(self, ops: Ops, y: Buffer, lm_head: LMHead) -> Buffer:
        """y [L, H] -> logits [L, V'] before the Markov head."""
        logits, cap = scale(ops, lm_head(ops, y), self.spec.logit_scale), self.spec.logit_softcap
        return ops.softcap(logits, cap) if cap else logits


def modules(weights: Weights, spec: HeadSpec, hidden: int) -> Seq[BlockModule]:
    """The only module, in a list. Raises ModelError for missing tensors and other shapes."""
    block, configs, width = spec.block, layers_of(spec), len(tapped_layers(spec.tap)) * hidden
    assert spec.layer and block
    if block.interleaved:
        weights = weights.changed(partial(_half_split, configs[0]))
    if block.in_checkpoint:
        weights = weights.renamed(partial(_in_checkpoint, block=block))
    return [
        BlockModule(
            spec=block,
            fuse=weights.linear("fuse", hidden, width),
            hidden_norm=weights.norm("hidden_norm", hidden, spec.layer.eps),
            norm=weights.norm("norm", hidden, spec.layer.eps),
            layers=[config.build(weights, f"layers.{i}", hidden) for i, config in enumerate(configs)],
            mask_embedding=weights.get("mask_embedding", hidden) if block.mask_embedding else None,
            markov=_markov(weights, block, hidden) if block.markov_rank else None,
            convs=_convs(weights, block, hidden),
            confidence=_confidence(weights, block, hidden) if block.confidence else None,
            streams=build_last_sum(weights, hidden, spec.layer.streams, spec.layer.eps) if spec.layer.streams else None,
        )
    ]


def _in_checkpoint(name: str, block: BlockSpec) -> str:
    """Canonical name in the trunk's files of a drafter's tensor: layer i is `mtp.{i}.block`, the first `mtp.{i}` also
    has what reads the taps, the last one what follows the layers."""
    part, _, rest = name.partition(".")
    if part == "layers":
        layer, _, inner = rest.partition(".")
        return f"mtp.{layer}.block.{inner}"
    return f"mtp.{0 if part in ('fuse', 'hidden_norm') else block.num_layers - 1}.{name}"


def _parts(
    weights: Weights, name: str, rows: int, columns: Mapping[str, int], *, precise: bool, bias: bool
) -> dict[str, Linear]:
    """Splits the matrix `name` by columns. columns: input part -> its number of columns. bias: whether new heads have
    one; it goes to "row"."""
    matrix = weights.raw(f"{name}.weight", (rows, sum(columns.values())))
    given = weights.get(f"{name}.bias", rows) if weights.has(f"{name}.bias", usual=bias) else None
    turned = cache(lambda: matrix.transposed())

    def part(name: str, begin: int, end: int) -> Linear:
        taken = weights.take(lambda: turned().take_rows(np.arange(begin, end)).transposed(), precise=precise)
        return Linear(taken, given if name == "row" else None)

    ends = pairwise(accumulate(columns.values(), initial=0))
    return {name: part(name, *between) for name, between in zip(columns, ends, strict=True)}


def _markov(weights: Weights, block: BlockSpec, hidden: int) -> MarkovHead:
    table = weights.get("markov.embed.weight", block.vocab_size, block.markov_rank)
    out = weights.linear("markov.out", block.draft_vocab_size, block.markov_rank)
    gates, selects = dict[str, Linear](), block.markov_kind == "selector"
    if block.markov_kind in GATES:
        name, ranks, _ = GATES[block.markov_kind]
        columns = _gate_columns(block, hidden)
        gates = _parts(weights, name, ranks * block.markov_rank, columns, precise=False, bias=not selects)
    tokens = weights.index(lambda: np.arange(block.draft_vocab_size)) if selects else None
    return MarkovHead(block, table, out, gates, tokens)


def _confidence(weights: Weights, block: BlockSpec, hidden: int) -> Confidence:
    token = {"token": block.markov_rank} if block.markov_rank and block.confidence_markov else {}
    # a matrix with one row is too small to be worth rounding
    columns, bias = {"row": hidden, **token}, not block.in_checkpoint
    parts = _parts(weights, "confidence", 1, columns, precise=True, bias=bias)
    return Confidence(parts["row"], parts.get("token"))


def _convs(weights: Weights, block: BlockSpec, hidden: int) -> list[tuple[DynamicConv, DynamicConv]]:
    taps, groups = block.conv_taps, hidden // block.conv_group

    def conv(prefix: str) -> DynamicConv:
        kernels = weights.raw(f"{prefix}.base_kernel", (2, taps, hidden))
        deltas = weights.raw(f"{prefix}.kernel_projection.weight", (2 * taps * groups, hidden))
        size = taps * groups

        def delta(i: int) -> Linear:
            return Linear(weights.take(lambda: deltas.take_rows(np.arange(i * size, (i + 1) * size))))

        def kernel(i: int) -> Weight:
            return weights.constant(f"{prefix} {i}", lambda: kernels.float32()[i].reshape(-1))

        return DynamicConv((delta(0), delta(1)), (kernel(0), kernel(1)), taps)

    if not taps:
        return []
    at = [f"layers.{i}" for i in range(block.num_layers)]
    return [(conv(f"{each}.attention_conv"), conv(f"{each}.mlp_conv")) for each in at]


def _half_split(config: LayerConfig, name: str, tensor: RawTensor) -> RawTensor:
    """The rows of q and k in the order of Ops.rope: the first elements of all rotary pairs, then the second ones.
    Products of q and k do not change."""
    mixer = config.mixer
    assert isinstance(mixer, AttentionConfig) and mixer.rope
    if not name.startswith("layers.") or ".self_attn." not in name or name.split(".")[3][0] not in "qk":
        return tensor
    rotary = mixer.rope.rotary_dim
    head = np.concatenate((half_split(rotary, interleaved=True), np.arange(rotary, mixer.spec.head_dim)))
    starts = np.arange(0, tensor.shape[0], mixer.spec.head_dim)
    return tensor.take_rows((starts[:, None] + head).reshape(-1))


def layers_of(spec: HeadSpec) -> list[LayerConfig]:
    """Config of each layer: `spec.layer` with the layer's window, causality and sinks."""
    block, layer = spec.block, spec.layer
    assert block and layer
    if block.in_checkpoint or isinstance(layer.mixer, MLAConfig):
        return [layer] * block.num_layers
    mixer, _ = plain_parts(layer)

    def layer_at(i: int) -> LayerConfig:
        attention = replace(mixer.spec, window=block.window(i), causal=block.is_causal(i))
        return replace(layer, mixer=replace(mixer, spec=attention, sinks=block.sinks))

    return [layer_at(i) for i in range(block.num_layers)]


def fit(spec: HeadSpec, trunk: DecoderConfig) -> HeadSpec:
    """Returns the spec unchanged. Raises ModelError unless its taps are layers of the trunk in ascending order."""
    tap, layers = tapped_layers(spec.tap), trunk.num_layers
    if not tap or not ascend_below(tap, layers):
        raise ModelError(
            f"the block drafter taps the streams before the layers {list(tap)}, but they must ascend from 0 to "
            f"{layers - 1}",
            "is it a drafter of this model?",
        )
    return spec


# Published formats.


def _flash_tensors(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    block = block_shapes(f"layers.{index}.", s, present, qk_norm=True)
    if index:
        return block
    return {**block, **_around(s)}


def _around(s: Sizes) -> DeclaredShapes:
    """Tensors of a block drafter outside its layers."""
    hidden = s["hidden"]
    return {
        "fc.weight": (hidden, s["taps"] * s["target_hidden"]), "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,), **draft_vocabulary(s),
        "?embed_tokens.weight": (s["vocabulary"], Unknown("embedding")),
        "?lm_head.weight": (s["draft_vocabulary"], hidden), "?mask_embedding": (None,),
    }  # fmt: skip


def _latent_spark_tensors(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    """DSpark tensors with layers of latent attention."""
    at, hidden, inner = f"layers.{index}.", s["hidden"], s["inner"]
    return {
        **{f"{at}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")},
        **latent_shapes(f"{at}self_attn.", s),
        **{f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")},
        f"{at}mlp.down_proj.weight": (hidden, inner),
        **({} if index else {**_around(s), **_markov_tensors(s, present)}),
    }


def _spark_tensors(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    """DFlash tensors, and those of a Markov head."""
    return _flash_tensors(s, index, present) | ({} if index else _markov_tensors(s, present))


def _markov_tensors(s: Sizes, present: Present) -> DeclaredShapes:
    """Tensors of a Markov head, whose names end with `.weight` or not."""
    end = "" if "markov_head.markov_w1" in present else ".weight"
    rank, rows = Unknown("rank"), (s["vocabulary"], s["draft_vocabulary"])
    markov: DeclaredShapes = {f"markov_head.markov_w{i + 1}{end}": (rows[i], rank) for i in range(2)}
    for gate in ("gate_proj", "joint_proj"):
        markov |= {f"?markov_head.{gate}.weight": (None, None), f"?markov_head.{gate}.bias": (None,)}
    return markov


def _flash2_tensors(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    """DFlash tensors, convolutions around attention and MLP, and a selector."""
    found, hidden, rank = _flash_tensors(s, index, present), s["hidden"], Unknown("rank")
    for part in (f"layers.{index}.{kind}_conv." for kind in ("attention", "mlp")):
        found |= {f"{part}base_kernel": (2, None, hidden), f"{part}kernel_projection.weight": (None, hidden)}
    if index:
        return found
    end = ".weight" if "candidate_selector.predecessor_codebook.weight" in present else ""
    for name in (f"candidate_selector.{each}_codebook{end}" for each in ("predecessor", "successor")):
        found[name] = (s["vocabulary"], rank)
    return found | {"candidate_selector.hidden_projection.weight": (rank, hidden)}


DFLASH = DrafterFormat(
    key="dflash",
    title="DFlash",
    method="dflash",
    read=reading.read,
    tensors=_flash_tensors,
    speculators=("dflash",),
    model_types=("muse_glimmer_assistant",),
    gguf=("dflash",),
    architectures=("dflash",),
    keys=("dflash_config",),
    renamed=(("midlayer.", "layers.0."), ("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")),
    block=("block_size", "dflash_config.block_size"),
    anchored=True,
    count=("num_hidden_layers",),
    aux="output",
    reduced=True,
)
DFLASH2 = replace(
    DFLASH,
    key="dflash2",
    title="DFlash2",
    tensors=_flash2_tensors,
    speculators=("dflash2",),
    model_types=(),
    gguf=(),
    architectures=("dflash2",),
    keys=(),
    renamed=(),
)
DSPARK = replace(
    DFLASH2,
    key="dspark",
    title="DSpark",
    method="dspark",
    tensors=_spark_tensors,
    speculators=("dspark",),
    says={"dflash_config.projector_type": "dspark"},
    gguf_marker="markov_w1.weight",
    architectures=("dspark",),
    keys=("markov_rank",),
    anchored=False,
)
KIMI_DSPARK = replace(
    DSPARK,
    key="k3_dspark",
    title="DSpark (Kimi-K3's, latent attention)",
    tensors=_latent_spark_tensors,
    speculators=(),
    says={},
    gguf_marker="",
    model_types=("k3_dspark",),
    architectures=("k3dspark",),
    keys=(),
    renamed=(("context_proj.", "fc."), ("context_norm.", "hidden_norm."), ("final_norm.", "norm.")),
)


# Training.

NUM_TAPS, FEWEST_LAYERS, NUM_LAYERS, MARKOV_RANK = 5, 3, 2, 64


def trained_spec(layers: int, depth: int) -> HeadSpec:
    """Spec of a new DSpark drafter: causal, the anchor predicts, and no part that published layouts cannot hold.
    The training data set the vocabulary sizes later. Raises UsageError for a trunk with too few layers."""
    if layers < FEWEST_LAYERS:
        what = f"a block drafter reads several layers from the second on, but the model has {layers}"
        raise UsageError(what, "train --kind mtp")
    taps = np.unique((np.linspace(2, layers - 2, NUM_TAPS) + 0.5).astype(int))
    block = BlockSpec(
        block_size=depth, num_layers=NUM_LAYERS, mask_token_id=0, causal=True, anchor_predicts=True,
        mask_embedding=True, markov_rank=MARKOV_RANK, confidence=True,
    )  # fmt: skip
    return HeadSpec(kind="block", tap=tuple(taps.tolist()), block=block)


def initial(start: Start, spec: HeadSpec) -> dict[str, Float32]:
    """Random weights: small in matrices that add to the residual stream, zeros in Markov and confidence heads."""
    rng, block = np.random.default_rng(0), spec.block
    assert block
    first = random_weights(rng, HEAD.shapes(spec, len(start.norm)), divisor=2 * block.num_layers)
    for name in ("markov.out.weight", "confidence.weight"):
        if name in first:
            first[name][:] = 0
    if block.mask_embedding:
        first["mask_embedding"] = rng.standard_normal(len(start.norm), np.float32) * np.float32(0.1)
    first["norm.weight"] = np.float32(0.5) * start.norm
    return first


HEAD = HeadKind(
    title="block",
    modules=modules,
    fit=fit,
    drafter="block",
    formats=(KIMI_DSPARK, DSPARK, DFLASH2, DFLASH),
    training=Training(
        spec=trained_spec, initial=initial, depth=8, layer=partial(published_layer, qk_norm=True, biases=False)
    ),
)
