"""A block drafter in training: blocks of rows behind random anchors, all in one pass, teacher-forced on the text.

An anchor n is a token of an answer; its block has g rows at positions n, n + 1, ...: the token at n, then the mask.
They see the features of the positions before n, and each other. Rows come in N chunks of C anchors, each of one
sequence: [N, C * g, W]. At run time the token before each row is known when its turn comes, so the Markov head reads
the text's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, scaled_dot_product_attention

from headstart.errors import ModelError
from headstart.heads.base import BlockSpec
from headstart.heads.block import BlockModule
from headstart.kernels.ops import AttentionSpec, Pool
from headstart.train.batches import Batch
from headstart.train.features import on_device
from headstart.train.ops import DraftMemory, TrainOps

CHUNK = 16
"""Anchors that share the scores' matrix: their rows see nothing of each other, which is wasted."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """`source` [N] sequence; `anchors` [N, C] ascending positions; `valid` [N, C, g]: rows whose target, and those of
    the rows before it, carry loss (false for anchors that only fill a chunk); `rows`: their flat numbers."""

    source: Tensor
    anchors: Tensor
    valid: Tensor
    rows: Tensor

    def to(self, device: torch.device) -> Blocks:
        """The same there."""
        parts = (self.source, self.anchors, self.valid, self.rows)
        return Blocks(*(on_device(each.contiguous(), device) for each in parts))

    @property
    def positions(self) -> Tensor:
        """[N, C, g]"""
        return self.anchors[..., None] + torch.arange(self.valid.shape[-1], device=self.anchors.device)

    def at_rows(self, x: Tensor) -> Tensor:
        """x [B, T, ...] at each row's own position [N, C, g, ...]; zero past the end."""
        length, positions = x.shape[1], self.positions
        inside = positions < length
        rows = x[self.source[:, None, None], positions.clamp(max=length - 1)]
        return rows * inside.view(*inside.shape, *[1] * (rows.ndim - 3))


def choose(loss: Tensor, size: int, share: float, seed: int) -> Blocks:
    """Random anchors at this share of the possible ones of each sequence, with blocks of `size` rows. loss [B, T] on
    the host: row p predicts a token of an answer."""
    generator = torch.Generator().manual_seed(seed)
    starts = loss.clone()
    starts[:, 1:] &= loss[:, :-1]  # the anchor itself is a token of an answer, for only behind one does a draft start
    starts[:, 0] = False
    sources, anchors, real = [], [], []
    for number, row in enumerate(starts):
        places = row.nonzero()[:, 0]
        if not len(places):
            continue
        picked = places[torch.randperm(len(places), generator=generator)[: max(1, round(share * len(places)))]]
        picked = picked.sort().values
        filled = torch.cat((picked, picked[-1:].expand(-len(picked) % CHUNK))).view(-1, CHUNK)
        anchors.append(filled)
        real.append((torch.arange(filled.numel()) < len(picked)).view_as(filled))
        sources += [number] * len(filled)
    empty = torch.zeros(0, CHUNK, dtype=torch.int64)
    blocks = Blocks(
        torch.tensor(sources, dtype=torch.int64),
        torch.cat((empty, *anchors)),
        torch.cat((empty.bool(), *real))[..., None].expand(-1, -1, size),
        empty,
    )
    carries = blocks.at_rows(loss).cumprod(-1).bool()
    valid = blocks.valid & carries
    return replace(blocks, valid=valid, rows=valid.flatten().nonzero()[:, 0])


class BlockOps(TrainOps):
    """Ops over the features of whole sequences first ([B, T, W], kept by each layer), over the rows of blocks then."""

    def __init__(self, blocks: Blocks, length: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._blocks, self._length = blocks, length
        self._masks: dict[tuple[int, bool], Tensor] = {}

    def attend(
        self, q: Tensor, pool: Pool, spec: AttentionSpec, sinks: Tensor | None = None, chosen: Pool = None
    ) -> Tensor:
        """q [N, C * g, H * D] -> [N, C * g, H * V]."""
        if sinks is not None or spec.softcap or spec.chunk:
            raise ModelError("a block drafter with attention sinks, a softcap or chunks cannot be trained yet")
        keys, values = (torch.cat((kept[0][self._blocks.source], kept[1]), dim=2) for kept in (pool.keys, pool.values))
        # query heads of a group side by side in one: the rows of their mask are the same
        heads = q.unflatten(-1, (spec.num_kv_heads, -1, spec.head_dim)).permute(0, 2, 3, 1, 4)
        groups = heads.shape[2]
        mask = self._mask(spec.window, spec.causal).repeat(1, 1, groups, 1)
        out: Tensor = scaled_dot_product_attention(heads.flatten(2, 3), keys, values, attn_mask=mask, scale=spec.scale)
        rows: Tensor = out.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4).flatten(2)
        return rows

    def _mask(self, window: int, causal: bool) -> Tensor:
        """[N, 1, C * g, T + C * g], added to scores."""
        if (window, causal) not in self._masks:
            blocks, size = self._blocks, self._blocks.valid.shape[-1]
            context = torch.arange(self._length, device=self._device)
            seen = (context < blocks.anchors[..., None])[:, :, None].expand(-1, -1, size, -1)
            rows = torch.arange(CHUNK * size, device=self._device)
            own = rows[:, None] // size == rows // size
            if causal:
                own = own & (rows[:, None] >= rows)
            if window:
                seen = seen & (context > blocks.positions[..., None] - window)
                own = own & (rows[:, None] - rows < window)
            both = torch.cat((seen.flatten(1, 2), own.expand(len(seen), -1, -1)), dim=-1)
            mask = torch.zeros(both.shape, dtype=self._dtype, device=self._device)
            self._masks[window, causal] = mask.masked_fill_(~both, float("-inf"))[:, None]
        return self._masks[window, causal]


@dataclass(frozen=True, eq=False)
class Drafted:
    """Of the rows of blocks: `y` [N, C, g, W], and embeddings of the tokens before for the Markov head [N, C, g, r]."""

    blocks: Blocks
    y: Tensor
    before: Tensor | None = field(default=None)


def draft(module: BlockModule, embedding: Tensor, batch: Batch, size: int, share: float) -> Drafted:
    """Blocks of `size` rows behind random anchors of a batch, run as they are at run time."""
    spec: BlockSpec = module.spec
    streams = batch.tapped
    if not spec.anchor_predicts:
        raise ModelError("a block drafter whose anchor does not predict cannot be trained yet")
    blocks = choose(batch.on_host, size, share, batch.seed).to(streams.device)
    ops = BlockOps(blocks, batch.tokens.shape[1], streams.device, streams.dtype)
    pools = [DraftMemory() for _ in module.layers]
    places = torch.arange(batch.tokens.shape[1], device=streams.device)
    module.keep(ops, streams, places, pools)
    before = blocks.at_rows(batch.tokens)  # of row k: the token that row k - 1 should have drafted
    ids = torch.full_like(before, spec.mask_token_id)
    ids[..., 0] = before[..., 0]
    rows, positions = ids.flatten(1), blocks.positions.flatten(1)
    y = module.draft(ops, ops.embed(embedding, rows), rows, positions, pools).view(*ids.shape, -1)
    return Drafted(blocks, y, module.markov.embed(ops, before) if module.markov else None)


def confidence_loss(module: BlockModule, y: Tensor, before: Tensor | None, shared: Tensor, weight: Tensor) -> Tensor:
    """Binary cross-entropy of the confidence head to the chance of acceptance; nothing but itself learns from it."""
    assert module.confidence
    logits = torch.nn.functional.linear(y.detach(), module.confidence.of_row.weight, module.confidence.of_row.bias)
    if module.confidence.of_token and before is not None:
        logits = logits + torch.nn.functional.linear(before.detach(), module.confidence.of_token.weight)
    return binary_cross_entropy_with_logits(logits[..., 0].float(), shared.float(), weight.float(), reduction="sum")
