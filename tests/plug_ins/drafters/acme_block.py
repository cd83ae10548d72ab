"""A block drafter with two layers over the trunk's hidden states of three layers: one pass drafts a block.

The features of a true position p, x_p = W [a_1 ; a_2 ; a_3] at p, are stored as keys and values at slot p. The rows of
a block at positions n, n + 1, ... are the last token and blanks; they see all features and each other. Weights are
random: its drafts are wrong, and must cost only time."""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np

from headstart.core import Draft, Rows, Sequence
from headstart.drafters.base import Drafter, DraftRequest, TargetModel
from headstart.formats.base import make_tensor
from headstart.kernels.ops import AttentionSpec, Buffer, KVSpec, Ops, Pool, RopeSpec, StepInputs, Weight
from headstart.kernels.specs import StateSpec
from headstart.layers.attention import Attention, AttentionConfig
from headstart.layers.decoder import DecoderLayer, LayerConfig
from headstart.layers.linear import Linear
from headstart.layers.mlp import MLPConfig
from headstart.layers.network import NetworkProgram, Pools
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Weights

LAYERS, TAPS, BLOCK, BLANK = 2, (0, 1, 2), 4, 0


@dataclass(frozen=True)
class BlockNetwork:
    fuse: Linear
    layers: Seq[DecoderLayer]
    norm: RMSNorm
    embedding: Weight
    lm_head: Linear
    hidden_size: int
    first_position: int = 0
    hidden_offset: int = 0
    state_specs: tuple[StateSpec, ...] = ()
    num_recomputed: int = 0

    @property
    def kv_specs(self) -> Seq[KVSpec]:
        return [spec for layer in self.layers for spec in layer.mixer.kv_specs]

    def programs(self, pools: Pools) -> Mapping[str, NetworkProgram]:
        return {
            "features": NetworkProgram(lambda ops, step: self._keep(ops, step, pools.kv), len(TAPS) * self.hidden_size),
            "block": NetworkProgram(lambda ops, step: self._draft(ops, step, pools.kv)),
        }

    def _keep(self, ops: Ops, step: StepInputs, pools: Seq[Pool]) -> dict[str, Buffer]:
        """Stores keys and values of rows of true positions."""
        x = self.fuse(ops, step.hidden)
        for layer, pool in zip(self.layers, pools, strict=True):
            mixer = layer.mixer
            assert isinstance(mixer, Attention) and mixer.k_proj and mixer.v_proj and mixer.config.rope
            k = ops.rope(mixer.k_proj(ops, x), step.positions, mixer.config.rope, mixer.config.spec.head_dim)
            ops.store_kv(k, mixer.v_proj(ops, x), pool, mixer.config.spec)
        return {"features": x}

    def _draft(self, ops: Ops, step: StepInputs, pools: Seq[Pool]) -> dict[str, Buffer]:
        delta, residual = None, ops.embed(self.embedding, step.token_ids)
        for layer, pool in zip(self.layers, pools, strict=True):
            delta, residual = layer(ops, delta, residual, step.positions, pool)
        y, _ = self.norm.add(ops, delta, residual)
        return {"logits": self.lm_head(ops, ops.take_rows(y, step.logit_rows))}


class AcmeBlock(Drafter):
    method, max_depth, tap, costs_per = "acme_block", BLOCK, TAPS, "pass"

    def __init__(self, target: TargetModel, network: BlockNetwork) -> None:
        self.runner, self.budget = target.runner, target.token_budget
        self.network = target.runner.open(network)

    @classmethod
    def attach(cls, target: TargetModel) -> Self:
        hidden, spec = target.config.hidden_size, AttentionSpec(2, 2, 16, 0.25)
        rope = RopeSpec(tuple(float(f) for f in 1e4 ** (-np.arange(8) / 8)), 16)
        config = LayerConfig(mixer=AttentionConfig(spec=spec, rope=rope), mlp=MLPConfig(inner=32), eps=1e-6)
        shapes = {"fuse.weight": (hidden, len(TAPS) * hidden), "norm.weight": (hidden,)}
        for i in range(LAYERS):
            shapes |= config.shapes(f"layers.{i}", hidden)
        rng, tensors = np.random.default_rng(0), {}
        for name, shape in shapes.items():
            values = rng.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) == 2 else np.ones(shape)
            tensors[name] = make_tensor(name, shape, "F32", values.astype(np.float32).reshape(-1).view(np.uint8))
        weights = Weights(tensors, target.backend, "random numbers", drafts=True)
        network = BlockNetwork(
            fuse=weights.linear("fuse", hidden, len(TAPS) * hidden),
            layers=[config.build(weights, f"layers.{i}", hidden) for i in range(LAYERS)],
            norm=weights.norm("norm", hidden, 1e-6),
            embedding=target.model.embedding,
            lm_head=target.model.lm_head,
            hidden_size=hidden,
        )
        return cls(target, network)

    def num_uncached(self, sequence: Sequence) -> int:
        return max(len(sequence.tokens) - 1 - self.runner.filled(self.network, sequence), 0)

    def propose(self, requests: Seq[DraftRequest]) -> None:
        for sequence in [request.sequence for request in requests]:
            while (rest := self.num_uncached(sequence)) > 0:
                start = self.runner.filled(self.network, sequence)
                tokens = sequence.tokens[start : start + min(rest, self.budget)]
                rows = [Rows(sequence, start, tokens, 0)]
                self.runner.run(self.network, "features", rows)
                self.runner.fill(self.network, rows)
        blocks = []
        for request in requests:
            start = len(request.sequence.tokens) - 1
            ids = [request.sequence.tokens[-1], *[BLANK] * request.depth]
            blocks.append(Rows(request.sequence, start, ids, request.depth, visible_end=start + request.depth))
        logits = self.runner.run(self.network, "block", blocks)["logits"]
        self._draw(requests, logits)

    def _draw(self, requests: Seq[DraftRequest], logits: Buffer) -> None:
        """Draws all tokens of a block at once, each row after blanks; a better drafter would draw token by token."""
        entries = [
            (request.sequence, len(request.sequence.tokens) + i, [BLANK] * i)
            for request in requests
            for i in range(request.depth)
        ]
        tokens = self.runner.draw(logits, entries).tokens.tolist()
        ends = list(accumulate([request.depth for request in requests], initial=0))
        for request, start in zip(requests, ends, strict=False):
            drawn = tokens[start : start + request.depth]
            request.sequence.draft = Draft(drawn[: drawn.index(-1)] if -1 in drawn else drawn, method=self.method)


DRAFTER = AcmeBlock
