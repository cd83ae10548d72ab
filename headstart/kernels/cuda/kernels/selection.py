"""Triton kernels of indexers (Ops.select_positions, Ops.select_blocks): scores of windows, and the choice of the best.

A window has EVERY positions, counted from the first position. Scores are float32 [R, selections, windows]; those of
windows that a row does not see are not written.
"""

import triton
import triton.language as tl

from headstart.kernels.cuda.kernels.attention import QUERIES, VISIBLE_END, products_of, slots_of, visible_range

INDEX, END, WHOLE = (tl.constexpr(i) for i in range(3))
"""What is listed of a chosen window: its index, its last position, all its positions."""
LOWEST = tl.constexpr(-3.4028234663852886e38)  # NaN and everything lower count as this score: they come last


@triton.jit(do_not_specialize=["table_width", "num_windows"])
def score(
    q, weights, keys, out, positions, visible_end, row_sequences, tables, path_starts, path_slots, first_position,
    table_width, block_size, num_windows,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, EVERY: tl.constexpr, DIM: tl.constexpr, PATHS: tl.constexpr,
    ROUND: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Scores of windows by the keys of their last positions: sum over a group's heads of weight * max(q . k, 0)."""
    row, block, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, last = visible_range(positions, visible_end, positions, row, True, first_position, 0, 0, VISIBLE_END)
    window = block * BLOCK + tl.arange(0, BLOCK)
    p = first_position + window * EVERY + (EVERY - 1)
    inside = p <= last
    if first_position + block * BLOCK * EVERY + (EVERY - 1) > last:
        return
    slot = slots_of(tables, tl.load(row_sequences + row), table_width, p, inside, block_size, row, positions,
                    path_starts, path_slots, first_position, PATHS)  # fmt: skip
    each: tl.constexpr = HEADS // GROUPS
    total = tl.zeros((BLOCK,), tl.float32)
    for h in range(0, each, QUERIES):
        of_group = h + tl.arange(0, QUERIES)
        is_head, head = of_group < each, group * each + of_group
        products = products_of(q, row.to(tl.int64) * (HEADS * DIM) + head * DIM, is_head, keys + slot * DIM, inside,
                               ROUND, WIDE, DIM, STEP, BLOCK)  # fmt: skip
        weight = tl.load(weights + row * HEADS + head, mask=is_head, other=0.0)
        total += tl.sum(weight[:, None] * tl.where(products <= 0, 0.0, products), axis=0)  # NaN stays
    tl.store(out + (row.to(tl.int64) * GROUPS + group) * num_windows + window, total, mask=inside)


@triton.jit(do_not_specialize=["table_width", "num_windows"])
def score_blocks(
    q, keys, out, positions, visible_end, row_sequences, tables, path_starts, path_slots, first_position, table_width,
    block_size, num_windows,
    HEADS: tl.constexpr, EVERY: tl.constexpr, DIM: tl.constexpr, PATHS: tl.constexpr, ROUND: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Scores of windows for each head: the greatest q . k of their visible positions."""
    row, window = tl.program_id(0), tl.program_id(1)
    _, last = visible_range(positions, visible_end, positions, row, True, first_position, 0, 0, VISIBLE_END)
    begin = first_position + window * EVERY
    if begin > last:
        return
    sequence = tl.load(row_sequences + row)
    for h in range(0, HEADS, QUERIES):
        head = h + tl.arange(0, QUERIES)
        best = tl.full((QUERIES,), LOWEST, tl.float32)
        for start in range(0, EVERY, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = (place < EVERY) & (begin + place <= last)
            slot = slots_of(tables, sequence, table_width, begin + place, inside, block_size, row, positions,
                            path_starts, path_slots, first_position, PATHS)  # fmt: skip
            products = products_of(q, row.to(tl.int64) * (HEADS * DIM) + head * DIM, head < HEADS, keys + slot * DIM,
                                   inside, ROUND, WIDE, DIM, STEP, BLOCK)  # fmt: skip
            counts = inside[None, :] & (products >= LOWEST)
            best = tl.maximum(best, tl.max(tl.where(counts, products, LOWEST), axis=1))
        tl.store(out + (row.to(tl.int64) * HEADS + head) * num_windows + window, best, mask=head < HEADS)


@triton.jit
def ranked(scores, kept, begin, count, NEWEST: tl.constexpr, KEPT: tl.constexpr, TILE: tl.constexpr):
    """(windows, ranks) of a tile: ranks 0 .. 2^32 - 1 ascend with scores; -1: cannot be chosen."""
    window = begin + tl.arange(0, TILE)
    can = window < count
    if KEPT:
        can = can & (tl.load(kept + window // KEPT, mask=can, other=0) > 0)
    values = tl.load(scores + window, mask=can, other=0.0)
    values = tl.where(values >= LOWEST, values, LOWEST)
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    if NEWEST:
        ordered = tl.where(window == count - 1, 4294967295, ordered)
    return window, tl.where(can, ordered, -1)


@triton.jit(do_not_specialize=["num_windows", "num_kept", "list_width", "top"])
def choose(
    scores, kept, chosen, counts, positions, visible_end, first_position, num_windows, num_kept, list_width, top,
    EVERY: tl.constexpr, MISSING: tl.constexpr, NEWEST: tl.constexpr, KEPT: tl.constexpr, LISTED: tl.constexpr,
    WINDOW_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """chosen [R, selections, list_width], counts [R]: the `top` windows with the highest scores, ascending (ties: the
    lowest). One program per row and selection: finds the rank of the last one, four bits at a time, then collects.

    A window can be chosen if MISSING of its positions, at most, are not visible; MISSING -1: if a position behind it
    is visible, too. NEWEST: the last such window is the best. KEPT > 0: only windows in blocks of KEPT windows that
    kept [R, num_kept] marks. LISTED: see WHOLE; with WHOLE also the visible positions after the last such window."""
    row, selection = tl.program_id(0), tl.program_id(1)
    _, last = visible_range(positions, visible_end, positions, row, True, first_position, 0, 0, VISIBLE_END)
    visible = tl.maximum(last + 1 - first_position, 0)
    count = tl.maximum(visible + MISSING, 0) // EVERY
    at = row.to(tl.int64) * tl.num_programs(1) + selection
    scores, chosen, kept = scores + at * num_windows, chosen + at * list_width, kept + row.to(tl.int64) * num_kept
    rank, above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    step, way = tl.full((), 268435456, tl.int64), tl.arange(0, 16)
    for _ in range(8):
        bounds = rank + way.to(tl.int64) * step
        reached = tl.zeros((16,), tl.int32)
        for begin in range(0, count, TILE):
            _window, ranks = ranked(scores, kept, begin, count, NEWEST, KEPT, TILE)
            reached += tl.sum((ranks[:, None] >= bounds[None, :]).to(tl.int32), axis=0)
        largest = tl.max(tl.where(reached >= top, way, 0), axis=0)
        above = tl.where(largest < 15, tl.sum(tl.where(way == largest + 1, reached, 0), axis=0), above)
        rank = rank + largest.to(tl.int64) * step
        step = step >> 4
    num_tied = top - above
    taken, equal = 0, 0
    for begin in range(0, count, TILE):
        window, ranks = ranked(scores, kept, begin, count, NEWEST, KEPT, TILE)
        ties = (ranks == rank).to(tl.int32)
        takes = (ranks > rank) | ((ties > 0) & (equal + tl.cumsum(ties, axis=0) <= num_tied))
        one = takes.to(tl.int32)
        place = taken + tl.cumsum(one, axis=0) - 1
        if LISTED == WHOLE:
            for i in range(EVERY):
                p = window * EVERY + i
                tl.store(chosen + place * EVERY + i, first_position + p, mask=takes & (p < visible))
        elif LISTED == END:
            tl.store(chosen + place, first_position + window * EVERY + (EVERY - 1), mask=takes)
        else:
            tl.store(chosen + place, window, mask=takes)
        taken += tl.sum(one, axis=0)
        equal += tl.sum(ties, axis=0)
    if LISTED == WHOLE:
        rest = visible - count * EVERY  # below 0: what the newest window lacks
        i = tl.arange(0, WINDOW_TILE)
        tl.store(chosen + taken * EVERY + i, first_position + count * EVERY + i, mask=i < rest)
        taken = taken * EVERY + rest
    tl.store(counts + row, taken)  # the same for all selections
