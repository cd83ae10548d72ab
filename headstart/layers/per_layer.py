"""Per-layer embeddings (Gemma 3n and 4): each layer adds a small, gated token embedding of its own to the stream.

Formula: transformers 5.23, `modeling_gemma4.py`:

    p_i = (norm(W_i e / sqrt(H)) + sqrt(width) t_i) / sqrt(2);  x += norm(V activation(G x) * p_i)

with e the scaled embedding of the token and t_i its row in this layer's part of the table.

Canonical tensors of all layers: `embed_tokens_per_layer.weight` [V, layers * width],
`per_layer_model_projection.weight` [layers * width, H], `per_layer_projection_norm.weight` [width]; under `{layer}`:
`per_layer_input_gate`, `per_layer_projection`, `post_per_layer_input_norm`.
"""

import math
from dataclasses import dataclass

import numpy as np

from headstart.kernels.ops import Activation, Buffer, Ops, RawTensor, Weight
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Weights

TABLE, PROJECTION, NORM = (
    f"{name}.weight" for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
)


@dataclass(frozen=True, kw_only=True)
class PerLayerConfig:
    """The per-layer embedding of one layer."""

    index: int  # of the layer
    count: int  # number of layers
    width: int  # features of the embedding
    vocab_size: int  # rows of the table
    activation: Activation
    num_extra_tokens: int = 0  # tokens after the table's last, which have the embedding of token 0

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float) -> "PerLayer":
        """Builds it from its part of the shared tensors and its own tensors under `prefix` (no trailing dot)."""
        width, wide = self.width, self.count * self.width
        table = weights.raw(TABLE, (self.vocab_size, wide))
        projection, norm = weights.raw(PROJECTION, (wide, hidden)), weights.raw(NORM, (width,))

        def own_table() -> RawTensor:
            tokens = np.concatenate((np.arange(self.vocab_size), np.zeros(self.num_extra_tokens, np.int64)))
            return table.shaped(self.vocab_size * self.count, width).take_rows(tokens * self.count + self.index)

        def own_projection() -> RawTensor:
            return projection.take_rows(np.arange(self.index * width, (self.index + 1) * width, dtype=np.int64))

        return PerLayer(
            table=weights.take(own_table),
            projection=Linear(weights.take(own_projection)),
            # The factors around the norm are folded into its weight and epsilon.
            norm=RMSNorm(weights.take(lambda: norm.affine(math.sqrt(0.5), 0)), eps * hidden),
            scale=math.sqrt(width / 2),
            gate=weights.linear(f"{prefix}.per_layer_input_gate", width, hidden),
            output=weights.linear(f"{prefix}.per_layer_projection", hidden, width),
            output_norm=weights.norm(f"{prefix}.post_per_layer_input_norm", hidden, eps),
            activation=self.activation,
        )


@dataclass(frozen=True)
class PerLayer:
    """Computes the addition of one layer to the stream."""

    table: Weight  # [V, width]
    projection: Linear
    norm: RMSNorm
    scale: float
    gate: Linear
    output: Linear
    output_norm: RMSNorm
    activation: Activation

    def __call__(self, ops: Ops, stream: Buffer, token_ids: Buffer, embedded: Buffer) -> Buffer:
        """The addition to the stream [R, H]; `embedded` [R, H]: input of the first layer."""
        from_table = ops.scale(ops.embed(self.table, token_ids), self.scale)
        per_layer = ops.add(self.norm(ops, self.projection(ops, embedded)), from_table)
        gated = ops.activate_mul(self.gate(ops, stream), per_layer, self.activation)
        return self.output_norm(ops, self.output(ops, gated))
