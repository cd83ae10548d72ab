"""Per-layer embeddings (Gemma 3n and 4): each layer has a small embedding of the token of its own, and adds to the
stream what a gate lets through of it. Formula: transformers 5.23, `modeling_gemma4.py`:

    p_i = (norm(W_i e / sqrt(H)) + sqrt(width) t_i) / sqrt(2);  x += norm(V activation(G x) * p_i)

with e the scaled embedding of the token, t_i its row in this layer's part of the table.

Canonical tensors of all layers: `embed_tokens_per_layer.weight` [V, layers * width],
`per_layer_model_projection.weight` [layers * width, H], `per_layer_projection_norm.weight` [width]; under `{layer}`:
`per_layer_input_gate`, `per_layer_projection`, `post_per_layer_input_norm`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headstart.kernels.ops import Activation, Buffer, Ops, Weight
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Shapes, Weights

TABLE, PROJECTION, NORM = (
    f"{name}.weight" for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
)


@dataclass(frozen=True, kw_only=True)
class PerLayerConfig:
    """Of layer `index` of `count`: `width` features for each of `vocab_size` tokens; of `beyond` more tokens those of
    token 0."""

    index: int
    count: int
    width: int
    vocab_size: int
    activation: Activation
    beyond: int = 0

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float) -> PerLayer:
        """From the layer's part of the shared tensors, and its own under `prefix` (no trailing dot)."""
        shapes, width = self.shapes(prefix, hidden), self.width
        table = weights.raw(TABLE, shapes[TABLE]).shaped(self.vocab_size * self.count, width)
        tokens = np.concatenate((np.arange(self.vocab_size), np.zeros(self.beyond, np.int64)))
        rows = tokens * self.count + self.index
        projection = weights.raw(PROJECTION, shapes[PROJECTION])
        part = np.arange(self.index * width, (self.index + 1) * width, dtype=np.int64)
        # The factors around the norm stand in its weight and in epsilon.
        norm = weights.raw(NORM, shapes[NORM]).affine(math.sqrt(0.5), 0)
        return PerLayer(
            table=weights.take(table.take_rows(rows)),
            projection=Linear(weights.take(projection.take_rows(part))),
            norm=RMSNorm(weights.take(norm), eps * hidden),
            scale=math.sqrt(width / 2),
            gate=weights.linear(f"{prefix}.per_layer_input_gate", width, hidden),
            output=weights.linear(f"{prefix}.per_layer_projection", hidden, width),
            output_norm=weights.norm(f"{prefix}.post_per_layer_input_norm", hidden, eps),
            activation=self.activation,
        )

    def shapes(self, prefix: str, hidden: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        return {
            TABLE: (self.vocab_size, self.count * self.width),
            PROJECTION: (self.count * self.width, hidden),
            NORM: (self.width,),
            f"{prefix}.per_layer_input_gate.weight": (self.width, hidden),
            f"{prefix}.per_layer_projection.weight": (hidden, self.width),
            f"{prefix}.post_per_layer_input_norm.weight": (hidden,),
        }


@dataclass(frozen=True)
class PerLayer:
    """What one layer adds. `table` [V, width]."""

    table: Weight
    projection: Linear
    norm: RMSNorm
    scale: float
    gate: Linear
    output: Linear
    output_norm: RMSNorm
    activation: Activation

    def __call__(self, ops: Ops, stream: Buffer, token_ids: Buffer, embedded: Buffer) -> Buffer:
        looked_up = ops.scale(ops.embed(self.table, token_ids), self.scale)
        given = ops.add(self.norm(ops, self.projection(ops, embedded)), looked_up)
        gated = ops.activate_mul(self.gate(ops, stream), given, self.activation)
        return self.output_norm(ops, self.output(ops, gated))
