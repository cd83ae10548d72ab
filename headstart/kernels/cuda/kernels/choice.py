"""Triton: what an indexer chooses (Ops.choose). Scores of positions, then the best of them as a list, ascending."""

import triton
import triton.language as tl

from headstart.kernels.cuda.kernels.attention import QUERIES, SEES, seen, slots_of

LEAST = tl.constexpr(-3.4028234663852886e38)
"""What NaN, and all that is less, counts as: they come last."""


@triton.jit(do_not_specialize=["table_width", "context"])
def score(
    q, weights, keys, out, positions, sees, row_sequences, tables, path_starts, path_slots, first_position, table_width,
    block_size, context,
    HEADS: tl.constexpr, DIM: tl.constexpr, PATHS: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out [R, context]: sum over heads of weight * max(q . k, 0); of positions that a row does not see nothing."""
    row, block = tl.program_id(0), tl.program_id(1)
    _, last = seen(positions, sees, row, True, first_position, 0, 0, SEES)
    if block * BLOCK > last:
        return
    p = block * BLOCK + tl.arange(0, BLOCK)
    inside = (p <= last) & (p >= first_position)
    slot = slots_of(tables, tl.load(row_sequences + row), table_width, p, inside, block_size, row, positions,
                    path_starts, path_slots, first_position, PATHS)  # fmt: skip
    total = tl.zeros((BLOCK,), tl.float32)
    for h in range(0, HEADS, QUERIES):
        head = h + tl.arange(0, QUERIES)
        is_head = head < HEADS
        made = tl.zeros((QUERIES, BLOCK), tl.float32)
        for d0 in tl.static_range(0, DIM, STEP):
            d = d0 + tl.arange(0, STEP)
            is_d = d < DIM
            left = tl.load(q + row.to(tl.int64) * (HEADS * DIM) + head[:, None] * DIM + d[None, :],
                           mask=is_head[:, None] & is_d[None, :], other=0.0)  # fmt: skip
            right = tl.load(keys + slot[None, :] * DIM + d[:, None], mask=inside[None, :] & is_d[:, None], other=0.0)
            if ROUND:
                left = left.to(tl.bfloat16)
            if WIDE:
                made += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
            else:
                made += tl.dot(left, right)
        weight = tl.load(weights + row * HEADS + head, mask=is_head, other=0.0)
        total += tl.sum(weight[:, None] * tl.where(made <= 0, 0.0, made), axis=0)  # NaN stays
    tl.store(out + row.to(tl.int64) * context + p, total, mask=inside)


@triton.jit
def ranked(scores, row, begin, last, first_position, context, EVERY: tl.constexpr, TILE: tl.constexpr):
    """(positions, ranks) of a tile: ranks 0 .. 2^32 - 1 ascend with scores; -1 of what cannot be chosen."""
    p = begin + tl.arange(0, TILE)
    can = (p >= first_position) & (p <= last) & ((p + 1) % EVERY == 0)
    values = tl.load(scores + row.to(tl.int64) * context + p, mask=can, other=0.0)
    values = tl.where(values >= LEAST, values, LEAST)
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return p, tl.where(can, ordered, -1)


@triton.jit(do_not_specialize=["context", "list_width", "top"])
def choose(scores, chosen, counts, positions, sees, first_position, context, list_width, top,
           EVERY: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """chosen [R, list_width], counts [R]: the `top` positions of the highest scores, of equal ones the lowest.
    A program per row: the rank of the last one by four bits at a time, then a walk."""
    row = tl.program_id(0)
    _, last = seen(positions, sees, row, True, first_position, 0, 0, SEES)
    rank, above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    step, way = tl.full((), 268435456, tl.int64), tl.arange(0, 16)
    for _ in range(8):
        bounds = rank + way.to(tl.int64) * step
        reached = tl.zeros((16,), tl.int32)
        for begin in range(0, last + 1, TILE):
            _p, ranks = ranked(scores, row, begin, last, first_position, context, EVERY, TILE)
            reached += tl.sum((ranks[:, None] >= bounds[None, :]).to(tl.int32), axis=0)
        most = tl.max(tl.where(reached >= top, way, 0), axis=0)
        above = tl.where(most < 15, tl.sum(tl.where(way == most + 1, reached, 0), axis=0), above)
        rank = rank + most.to(tl.int64) * step
        step = step >> 4
    room = top - above
    taken, equal = 0, 0
    for begin in range(0, last + 1, TILE):
        p, ranks = ranked(scores, row, begin, last, first_position, context, EVERY, TILE)
        ties = (ranks == rank).to(tl.int32)
        takes = (ranks > rank) | ((ties > 0) & (equal + tl.cumsum(ties, axis=0) <= room))
        one = takes.to(tl.int32)
        tl.store(chosen + row.to(tl.int64) * list_width + taken + tl.cumsum(one, axis=0) - 1, p, mask=takes)
        taken += tl.sum(one, axis=0)
        equal += tl.sum(ties, axis=0)
    tl.store(counts + row, taken)
