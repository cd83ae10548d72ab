"""Triton: attention of rows over the paged keys and values of their own sequence.

A tile is the query heads of one kv head (or sixteen of them) for some rows of a sequence, sixteen queries in all. It
walks the positions in blocks from absolute position 0, a stretch of SPLIT positions per program; `join` puts the
stretches together in order. What a query does not see adds nothing, bit for bit, so no query notices the others of its
tile.
"""

import triton
import triton.language as tl

from headstart.kernels.cuda.kernels.rows import tanh

QUERIES = tl.constexpr(16)
SEES, CAUSAL, BEFORE = (tl.constexpr(i) for i in range(3))
"""The last position that a row sees: what the plan says, its own, the one before."""
ALL, ENDS, CHOSEN = (tl.constexpr(i) for i in range(3))
"""Which of the positions that a row sees it attends to: all, those that end a window, those of a list."""
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def seen(positions, sees, row, is_query, first_position, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
         MODE: tl.constexpr):  # fmt: skip
    """(first, last) positions that each query sees; none at all (first 0, last -1) where there is no query."""
    position = tl.load(positions + row, mask=is_query, other=0)
    last = tl.load(sees + row, mask=is_query, other=-1)
    if MODE == CAUSAL:
        last = tl.where(last < 0, -1, position)
    elif MODE == BEFORE:
        last = tl.where(last < 0, -1, position - 1)
    first = tl.zeros_like(position) + first_position
    if WINDOW:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK:
        first = tl.maximum(first, position - position % CHUNK)
    return first, last


@triton.jit
def slots_of(tables, sequence, table_width, p, inside, block_size, row, positions, path_starts, path_slots,
             first_position, PATHS: tl.constexpr):  # fmt: skip
    """Where positions p [BLOCK] of a sequence lie; with PATHS the last ones of a row where its path says."""
    block = tl.load(tables + sequence.to(tl.int64) * table_width + p // block_size, mask=inside, other=0)
    slot = block.to(tl.int64) * block_size + p % block_size
    if PATHS:
        begin, end = tl.load(path_starts + row), tl.load(path_starts + row + 1)
        place = p - (tl.load(positions + row) + 1 - (end - begin))
        on_path = inside & (place >= 0) & (place < end - begin)
        slot = tl.where(on_path, tl.load(path_slots + begin + place, mask=on_path, other=0).to(tl.int64), slot)
    return slot


@triton.jit
def scored(q, q_at, is_query, key_at, inside, scale, SOFTCAP: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr,
           DIM: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """scale * q . k for queries [QUERIES] and the keys of a block [BLOCK], in steps of one size."""
    scores = tl.zeros((QUERIES, BLOCK), tl.float32)
    for d0 in tl.static_range(0, DIM, STEP):
        d = d0 + tl.arange(0, STEP)
        left = tl.load(q + q_at[:, None] + d[None, :], mask=is_query[:, None] & (d[None, :] < DIM), other=0.0)
        right = tl.load(key_at[None, :] + d[:, None], mask=inside[None, :] & (d[:, None] < DIM), other=0.0)
        if ROUND:
            left = left.to(tl.bfloat16)
        if WIDE:
            scores += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
        else:
            scores += tl.dot(left, right)
    scores = scores * scale
    if SOFTCAP > 0:
        scores = SOFTCAP * tanh(tl.div_rn(scores, SOFTCAP))
    return scores


@triton.jit
def listed(row, is_query, last, counts, EVERY: tl.constexpr, LIST: tl.constexpr):
    """How many positions the list of each query has."""
    if LIST == CHOSEN:
        return tl.load(counts + row, mask=is_query, other=0)
    else:
        return (last + 1) // EVERY


@triton.jit
def added(scores, visible, right, most, total, summed, ROUND: tl.constexpr, WIDE: tl.constexpr):
    """Maxima and sums of weights, and weighted values, with those of a block of positions."""
    scores = tl.where(visible, scores, NOTHING)
    higher = tl.maximum(most, tl.max(scores, axis=1))
    base = tl.where(higher == NOTHING, 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    older = tl.where(most == NOTHING, 0.0, tl.exp(most - base))
    if ROUND:
        weights = weights.to(tl.bfloat16)
    if WIDE:
        made = tl.dot(weights.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        made = tl.dot(weights, right)
    sees_any = tl.max(visible.to(tl.int32), axis=1) > 0
    total = tl.where(sees_any, total * older + tl.sum(weights.to(tl.float32), axis=1), total)
    summed = tl.where(sees_any[:, None], summed * older[:, None] + made, summed)
    return higher, total, summed


@triton.jit(do_not_specialize=["table_width", "list_width", "num_splits", "first_split"])
def attend(
    q, keys, values, parts, maxima, totals,
    positions, sees, row_sequences, tables, tile_rows, tile_counts, path_starts, path_slots, chosen, counts,
    first_position, table_width, list_width, scale, block_size, num_splits, first_split,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, VALUE_HEAD: tl.constexpr, TILE_HEADS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, MODE: tl.constexpr, LIST: tl.constexpr, EVERY: tl.constexpr,
    PATHS: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    VALUE_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Of each query and split, [R, HEADS, splits(, V)]: maximum and sum of its weights, and its weighted values.
    q [R, HEADS * DIM]; keys and values by slot; a tile has tile_counts rows from tile_rows on. With a LIST its places
    are walked as positions are: those of `chosen` [R, list_width] are of a tile's one row."""
    tile, split = tl.program_id(0), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    blocks: tl.constexpr = group // TILE_HEADS
    kv_head = tl.program_id(1) // blocks
    index = tl.arange(0, QUERIES)
    head = kv_head * group + tl.program_id(1) % blocks * TILE_HEADS + index % TILE_HEADS
    row0 = tl.load(tile_rows + tile)
    is_query = index // TILE_HEADS < tl.load(tile_counts + tile)
    row = row0 + index // TILE_HEADS
    first, last = seen(positions, sees, row, is_query, first_position, WINDOW, CHUNK, MODE)
    sequence = tl.load(row_sequences + row0)
    if LIST:
        first = tl.zeros_like(first)
        last = listed(row, is_query, last, counts, EVERY, LIST) - 1
    begin = tl.maximum(tl.min(tl.where(last >= 0, first, 2147483647), axis=0) // BLOCK * BLOCK, split * SPLIT)
    end = tl.minimum(tl.max(last, axis=0) + 1, (split + 1) * SPLIT)
    if begin >= end:
        return  # `join` does not look here
    most = tl.full((QUERIES,), NOTHING, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    summed = tl.zeros((QUERIES, VALUE_TILE), tl.float32)
    v = tl.arange(0, VALUE_TILE)
    q_at = row.to(tl.int64) * (HEADS * DIM) + head * DIM
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < end
        p = place
        if LIST == CHOSEN:
            p = tl.load(chosen + row0.to(tl.int64) * list_width + place, mask=inside, other=0)
        elif LIST == ENDS:
            p = place * EVERY + (EVERY - 1)
        slot = slots_of(tables, sequence, table_width, p, inside, block_size, row0, positions, path_starts, path_slots,
                        first_position, PATHS)  # fmt: skip
        key_at = keys + slot * KEY_STRIDE + kv_head * DIM
        scores = scored(q, q_at, is_query, key_at, inside, scale, SOFTCAP, ROUND, WIDE, DIM, STEP, BLOCK)
        visible = (place[None, :] >= first[:, None]) & (place[None, :] <= last[:, None]) & inside[None, :]
        right = tl.load(values + slot[:, None] * VALUE_STRIDE + kv_head * VALUE_HEAD + v[None, :],
                        mask=inside[:, None] & (v[None, :] < VALUE_DIM), other=0.0)  # fmt: skip
        most, total, summed = added(scores, visible, right, most, total, summed, ROUND, WIDE)
    at = (row.to(tl.int64) * HEADS + head) * num_splits + first_split + split
    tl.store(maxima + at, most, mask=is_query)
    tl.store(totals + at, total, mask=is_query)
    tl.store(parts + at[:, None] * VALUE_DIM + v[None, :], summed, mask=is_query[:, None] & (v[None, :] < VALUE_DIM))


@triton.jit
def joined(most, total, summed, parts, maxima, totals, row, head, v, is_head, inside, begin, end, num_splits,
           HEADS: tl.constexpr, VALUE_DIM: tl.constexpr):  # fmt: skip
    """What was summed, and splits begin .. end - 1 after it."""
    for split in range(begin, end):
        at = (row * HEADS + head) * num_splits + split
        peak = tl.load(maxima + at, mask=is_head, other=NOTHING)
        has = peak > NOTHING
        higher = tl.maximum(most, peak)
        base = tl.where(higher == NOTHING, 0.0, higher)
        older, newer = tl.where(most == NOTHING, 0.0, tl.exp(most - base)), tl.exp(peak - base)
        added = tl.load(parts + at[:, None] * VALUE_DIM + v[None, :], mask=inside, other=0.0)
        weight = tl.load(totals + at, mask=is_head, other=0.0)
        total = tl.where(has, total * older + weight * newer, total)
        summed = tl.where(has[:, None], summed * older[:, None] + added * newer[:, None], summed)
        most = higher
    return most, total, summed


@triton.jit(do_not_specialize=["num_splits", "first_split"])
def join(
    parts, maxima, totals, sinks, out, positions, sees, counts, first_position, num_splits, first_split,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, MODE: tl.constexpr,
    DENSE: tl.constexpr, LIST: tl.constexpr, EVERY: tl.constexpr, SINKS: tl.constexpr, HEAD_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """out [R, HEADS * V] of what `attend` left, stretch by stretch from the first; those of a list, from first_split
    on, after those of positions (DENSE). A query that saw nothing gives 0."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    v = tl.arange(0, VALUE_TILE)
    is_head = head < HEADS
    inside = is_head[:, None] & (v[None, :] < VALUE_DIM)
    most = tl.full((HEAD_TILE,), NOTHING, tl.float32)
    total = tl.zeros((HEAD_TILE,), tl.float32)
    summed = tl.zeros((HEAD_TILE, VALUE_TILE), tl.float32)
    first, last = seen(positions, sees, row, True, first_position, WINDOW, CHUNK, MODE)
    if DENSE:
        end = tl.where(last >= 0, last // SPLIT + 1, 0)
        most, total, summed = joined(most, total, summed, parts, maxima, totals, row, head, v, is_head, inside,
                                     first // SPLIT, end, num_splits, HEADS, VALUE_DIM)  # fmt: skip
    if LIST:
        stretches = (listed(row, True, last, counts, EVERY, LIST) + (SPLIT - 1)) // SPLIT
        most, total, summed = joined(most, total, summed, parts, maxima, totals, row, head, v, is_head, inside,
                                     first_split, first_split + stretches, num_splits, HEADS, VALUE_DIM)  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0)
        higher = tl.maximum(most, sink)
        older = tl.where(most == NOTHING, 0.0, tl.exp(most - higher))
        total = total * older + tl.exp(sink - higher)
        summed = summed * older[:, None]
    made = tl.div_rn(summed, tl.where(total > 0, total, 1.0)[:, None])
    tl.store(out + row * (HEADS * VALUE_DIM) + head[:, None] * VALUE_DIM + v[None, :], made, mask=inside)
