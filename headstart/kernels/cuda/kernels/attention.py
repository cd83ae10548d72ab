"""Triton kernels for attention over paged keys and values and compressed entries.

A tile has 16 queries: the query heads of one kv head (or 16 of them) for some rows of one sequence. It walks positions
in blocks from absolute position 0; a program covers a split of SPLIT positions, and `join` adds the splits in order.
Masked positions add exactly 0, so the bits of a query do not depend on the others in its tile.
"""

import triton
import triton.language as tl

from headstart.kernels.cuda.kernels.rows import tanh

QUERIES = tl.constexpr(16)
VISIBLE_END, CAUSAL, EXCLUDES_SELF = (tl.constexpr(i) for i in range(3))
"""Modes of the last visible position: plan.visible_end, the row's own, the one before."""
ALL, WINDOW_ENDS, CHOSEN = (tl.constexpr(i) for i in range(3))
"""Kinds of lists of positions to attend to: all visible, those that end a window, selected ones."""
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def visible_range(positions, visible_end, window_ends, row, is_query, first_position, WINDOW: tl.constexpr,
                  CHUNK: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """(first, last) visible position of each query; last is -1 where there is no query. window_ends [R]: position up
    to which a row's window is counted."""
    position = tl.load(positions + row, mask=is_query, other=0)
    last = tl.load(visible_end + row, mask=is_query, other=-1)
    if MODE == CAUSAL:
        last = tl.where(last < 0, -1, position)
    elif MODE == EXCLUDES_SELF:
        last = tl.where(last < 0, -1, position - 1)
    first = tl.zeros_like(position) + first_position
    if WINDOW:
        first = tl.maximum(first, tl.load(window_ends + row, mask=is_query, other=0) - WINDOW + 1)
    if CHUNK:
        first = tl.maximum(first, position - position % CHUNK)
    return first, last


@triton.jit
def slots_of(tables, sequence, table_width, p, inside, block_size, row, positions, path_starts, path_slots,
             first_position, PATHS: tl.constexpr):  # fmt: skip
    """Slots of positions p [BLOCK] of a sequence; PATHS: the last positions are those of the row's path."""
    block = tl.load(tables + sequence.to(tl.int64) * table_width + p // block_size, mask=inside, other=0)
    slot = block.to(tl.int64) * block_size + p % block_size
    if PATHS:
        begin, end = tl.load(path_starts + row), tl.load(path_starts + row + 1)
        place = p - (tl.load(positions + row) + 1 - (end - begin))
        on_path = inside & (place >= 0) & (place < end - begin)
        slot = tl.where(on_path, tl.load(path_slots + begin + place, mask=on_path, other=0).to(tl.int64), slot)
    return slot


@triton.jit
def products_of(q, q_at, is_query, key_at, inside, ROUND: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr,
                STEP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """q . k [QUERIES, BLOCK], summed over features in steps of STEP."""
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
    return scores


@triton.jit
def attention_scores(q, bias, row, head, is_query, p, positions, key_at, inside, scale, HEADS: tl.constexpr,
                     DIM: tl.constexpr, EXTENT: tl.constexpr, SOFTCAP: tl.constexpr, ROUND: tl.constexpr,
                     WIDE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Scores [QUERIES, BLOCK] of keys at positions p [BLOCK]. bias [R, HEADS, EXTENT]: see Ops.attend; EXTENT 0: there
    is none."""
    query = row.to(tl.int64) * HEADS + head
    scores = scale * products_of(q, query * DIM, is_query, key_at, inside, ROUND, WIDE, DIM, STEP, BLOCK)
    if EXTENT:
        own = tl.load(positions + row, mask=is_query, other=0)
        near = p[None, :] - own[:, None] + (EXTENT - 1)
        is_near = is_query[:, None] & (near >= 0) & (near < EXTENT)
        scores += tl.load(bias + query[:, None] * EXTENT + near, mask=is_near, other=0.0)
    if SOFTCAP > 0:
        scores = SOFTCAP * tanh(tl.div_rn(scores, SOFTCAP))
    return scores


@triton.jit
def list_length(row, is_query, last, counts, first_position, EVERY: tl.constexpr, LIST: tl.constexpr):
    """Number of positions in each query's list."""
    if LIST == CHOSEN:
        return tl.load(counts + row, mask=is_query, other=0)
    else:
        return tl.maximum(last + 1 - first_position, 0) // EVERY


@triton.jit
def add_block(scores, visible, right, largest, total, summed, ROUND: tl.constexpr, WIDE: tl.constexpr):
    """Add one block of positions to the online softmax: (maximum, sum of weights, weighted sum of values)."""
    scores = tl.where(visible, scores, NOTHING)
    higher = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(higher == NOTHING, 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    older = tl.where(largest == NOTHING, 0.0, tl.exp(largest - base))
    if ROUND:
        weights = weights.to(tl.bfloat16)
    if WIDE:
        result = tl.dot(weights.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(weights, right)
    sees_any = tl.max(visible.to(tl.int32), axis=1) > 0
    total = tl.where(sees_any, total * older + tl.sum(weights.to(tl.float32), axis=1), total)
    summed = tl.where(sees_any[:, None], summed * older[:, None] + result, summed)
    return higher, total, summed


@triton.jit(do_not_specialize=["table_width", "list_width", "num_splits", "first_split"])
def attend(
    q, keys, values, parts, maxima, totals,
    positions, visible_end, window_ends, row_sequences, tables, tile_rows, tile_counts, path_starts, path_slots,
    chosen, counts, bias, first_position, table_width, list_width, scale, block_size, num_splits, first_split,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, VALUE_HEAD: tl.constexpr, TILE_HEADS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, MODE: tl.constexpr, LIST: tl.constexpr, EVERY: tl.constexpr,
    GROUPS: tl.constexpr, EXTENT: tl.constexpr, PATHS: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, VALUE_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Online softmax of each query over one split, [R, HEADS, splits(, V)]: maxima, totals (sums of weights), parts
    (weighted sums of values).

    q [R, HEADS * DIM]; keys, values by slot; a tile has tile_counts rows from row tile_rows on. LIST: indices of a list
    are walked instead of positions; with CHOSEN a tile has one row, whose lists, one for each of GROUPS groups of kv
    heads, are in `chosen` [R, GROUPS, list_width]. bias: see attention_scores."""
    tile, split = tl.program_id(0), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    blocks: tl.constexpr = group // TILE_HEADS
    kv_head = tl.program_id(1) // blocks
    index = tl.arange(0, QUERIES)
    head = kv_head * group + tl.program_id(1) % blocks * TILE_HEADS + index % TILE_HEADS
    row0 = tl.load(tile_rows + tile)
    is_query = index // TILE_HEADS < tl.load(tile_counts + tile)
    row = row0 + index // TILE_HEADS
    first, last = visible_range(positions, visible_end, window_ends, row, is_query, first_position, WINDOW, CHUNK, MODE)
    sequence = tl.load(row_sequences + row0)
    if LIST:
        first = tl.zeros_like(first)
        last = list_length(row, is_query, last, counts, first_position, EVERY, LIST) - 1
    begin = tl.maximum(tl.min(tl.where(last >= 0, first, 2147483647), axis=0) // BLOCK * BLOCK, split * SPLIT)
    end = tl.minimum(tl.max(last, axis=0) + 1, (split + 1) * SPLIT)
    if begin >= end:
        return  # `join` does not read this split
    largest = tl.full((QUERIES,), NOTHING, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    summed = tl.zeros((QUERIES, VALUE_TILE), tl.float32)
    v = tl.arange(0, VALUE_TILE)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < end
        p = place
        if LIST == CHOSEN:
            selection = row0.to(tl.int64) * GROUPS + kv_head * GROUPS // KV_HEADS
            p = tl.load(chosen + selection * list_width + place, mask=inside, other=0)
        elif LIST == WINDOW_ENDS:
            p = first_position + place * EVERY + (EVERY - 1)
        slot = slots_of(tables, sequence, table_width, p, inside, block_size, row0, positions, path_starts, path_slots,
                        first_position, PATHS)  # fmt: skip
        key_at = keys + slot * KEY_STRIDE + kv_head * DIM
        scores = attention_scores(q, bias, row, head, is_query, p, positions, key_at, inside, scale, HEADS, DIM,
                                  EXTENT, SOFTCAP, ROUND, WIDE, STEP, BLOCK)  # fmt: skip
        visible = (place[None, :] >= first[:, None]) & (place[None, :] <= last[:, None]) & inside[None, :]
        right = tl.load(values + slot[:, None] * VALUE_STRIDE + kv_head * VALUE_HEAD + v[None, :],
                        mask=inside[:, None] & (v[None, :] < VALUE_DIM), other=0.0)  # fmt: skip
        largest, total, summed = add_block(scores, visible, right, largest, total, summed, ROUND, WIDE)
    at = (row.to(tl.int64) * HEADS + head) * num_splits + first_split + split
    tl.store(maxima + at, largest, mask=is_query)
    tl.store(totals + at, total, mask=is_query)
    tl.store(parts + at[:, None] * VALUE_DIM + v[None, :], summed, mask=is_query[:, None] & (v[None, :] < VALUE_DIM))


@triton.jit
def add_splits(largest, total, summed, parts, maxima, totals, row, head, v, is_head, inside, begin, end, num_splits,
               HEADS: tl.constexpr, VALUE_DIM: tl.constexpr):  # fmt: skip
    """Add splits begin .. end - 1 to an online softmax."""
    for split in range(begin, end):
        at = (row * HEADS + head) * num_splits + split
        peak = tl.load(maxima + at, mask=is_head, other=NOTHING)
        has = peak > NOTHING
        higher = tl.maximum(largest, peak)
        base = tl.where(higher == NOTHING, 0.0, higher)
        older, newer = tl.where(largest == NOTHING, 0.0, tl.exp(largest - base)), tl.exp(peak - base)
        value_sum = tl.load(parts + at[:, None] * VALUE_DIM + v[None, :], mask=inside, other=0.0)
        weight = tl.load(totals + at, mask=is_head, other=0.0)
        total = tl.where(has, total * older + weight * newer, total)
        summed = tl.where(has[:, None], summed * older[:, None] + value_sum * newer[:, None], summed)
        largest = higher
    return largest, total, summed


@triton.jit(do_not_specialize=["num_splits", "first_split"])
def join(
    parts, maxima, totals, sinks, out, positions, visible_end, window_ends, counts, first_position, num_splits,
    first_split,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, MODE: tl.constexpr,
    DENSE: tl.constexpr, LIST: tl.constexpr, EVERY: tl.constexpr, SINKS: tl.constexpr, HEAD_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """out [R, HEADS * V]: the splits of `attend` added in order: first those of positions (DENSE), then those of a list
    from first_split on. A query that sees nothing gives 0."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    v = tl.arange(0, VALUE_TILE)
    is_head = head < HEADS
    inside = is_head[:, None] & (v[None, :] < VALUE_DIM)
    largest = tl.full((HEAD_TILE,), NOTHING, tl.float32)
    total = tl.zeros((HEAD_TILE,), tl.float32)
    summed = tl.zeros((HEAD_TILE, VALUE_TILE), tl.float32)
    first, last = visible_range(positions, visible_end, window_ends, row, True, first_position, WINDOW, CHUNK, MODE)
    if DENSE:
        end = tl.where(last >= 0, last // SPLIT + 1, 0)
        largest, total, summed = add_splits(largest, total, summed, parts, maxima, totals, row, head, v, is_head,
                                            inside, first // SPLIT, end, num_splits, HEADS, VALUE_DIM)  # fmt: skip
    if LIST:
        length = list_length(row, True, last, counts, first_position, EVERY, LIST)
        list_end = first_split + (length + (SPLIT - 1)) // SPLIT
        largest, total, summed = add_splits(largest, total, summed, parts, maxima, totals, row, head, v, is_head,
                                            inside, first_split, list_end, num_splits, HEADS, VALUE_DIM)  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0)
        higher = tl.maximum(largest, sink)
        older = tl.where(largest == NOTHING, 0.0, tl.exp(largest - higher))
        total = total * older + tl.exp(sink - higher)
        summed = summed * older[:, None]
    result = tl.div_rn(summed, tl.where(total > 0, total, 1.0)[:, None])
    tl.store(out + row * (HEADS * VALUE_DIM) + head[:, None] * VALUE_DIM + v[None, :], result, mask=inside)


@triton.jit
def keep_gated(values, gates, bias, positions, slots, pool, first_position, EVERY: tl.constexpr, WIDTH: tl.constexpr,
               TILE: tl.constexpr):  # fmt: skip
    """Write values and gates + bias[(position - first_position) % EVERY] of row r to its slot of pool
    [slots, 2 * WIDTH]."""
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + row).to(tl.int64)
    inside = (column < WIDTH) & (slot >= 0)
    at = row.to(tl.int64) * WIDTH + column
    tl.store(pool + slot * (2 * WIDTH) + column, tl.load(values + at, mask=inside, other=0.0), mask=inside)
    place = tl.maximum(tl.load(positions + row) - first_position, 0) % EVERY
    gate = (tl.load(gates + at, mask=inside, other=0.0)
            + tl.load(bias + place * WIDTH + column, mask=inside, other=0.0))  # fmt: skip
    tl.store(pool + slot * (2 * WIDTH) + WIDTH + column, gate, mask=inside)


@triton.jit(do_not_specialize=["table_width"])
def compress(
    pool, out, positions, visible_end, row_sequences, tables, path_starts, path_slots, first_position, table_width,
    block_size, EVERY: tl.constexpr, DIM: tl.constexpr, OVERLAP: tl.constexpr, PATHS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out [R, DIM] of rows that end a window: per feature, the sum of its positions' values weighted by the softmax of
    their gates, oldest first; 0 in other rows."""
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < DIM
    span: tl.constexpr = 2 * EVERY if OVERLAP else EVERY
    width: tl.constexpr = 2 * DIM if OVERLAP else DIM
    position, sequence = tl.load(positions + row), tl.load(row_sequences + row)
    ends = ((position + 1 - first_position) % EVERY == 0) & (tl.load(visible_end + row) >= 0)
    largest = tl.full((TILE,), NOTHING, tl.float32)
    total, summed = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    if ends:
        for j in range(span):
            p = position - span + 1 + j
            if p >= first_position:
                slot = slots_of(tables, sequence, table_width, p, p >= 0, block_size, row, positions, path_starts,
                                path_slots, first_position, PATHS)  # fmt: skip
                part = column
                if OVERLAP:
                    part += tl.where(j >= EVERY, DIM, 0)
                kept = pool + slot * (2 * width) + part
                gate = tl.load(kept + width, mask=inside, other=0.0).to(tl.float32)
                value = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
                higher = tl.maximum(largest, gate)
                older, newer = tl.exp(largest - higher), tl.exp(gate - higher)
                total = total * older + newer
                summed = summed * older + newer * value
                largest = higher
    result = tl.div_rn(summed, tl.where(total > 0, total, 1.0))
    tl.store(out + row.to(tl.int64) * DIM + column, result, mask=inside)
