"""Triton kernels for mixtures of experts.

Each row has TOP (row, place) pairs, which are sorted by expert into tiles of 16. Places are in ascending order of
expert id, so the order of a row's sum never changes. There are no atomics: the program of each expert finds its pairs
in order.

Shapes: R rows, E experts, P = R * TOP pairs.
"""

import triton
import triton.language as tl

from headstart.kernels.cuda.kernels.products import ROWS, tile_product
from headstart.kernels.cuda.kernels.rows import sigmoid, softplus_of

NOTHING = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-3.0e38)  # stands for NaN, which is chosen last
TINY = tl.constexpr(1e-20)  # WEIGHT_SUM_EPSILON of reference/moe.py: all sigmoids may be 0


@triton.jit
def scored(x, inside, SCORING: tl.constexpr):
    """Scores of one row's logits (see RouterSpec)."""
    if SCORING == "softmax":
        largest = tl.max(tl.where(inside, x, NOTHING), axis=0)
        small = tl.where(inside, tl.exp(tl.where(inside, x, largest) - largest), 0.0)
        return tl.div_rn(small, tl.sum(small, axis=0))
    elif SCORING == "sigmoid":
        return tl.where(inside, sigmoid(x), 0.0)
    else:
        tl.static_assert(SCORING == "softplus")
        return tl.where(inside, tl.sqrt_rn(softplus_of(x)), 0.0)


@triton.jit
def first_best(values, allowed, index, TILE: tl.constexpr):
    """The lowest index of the largest allowed value [TILE]; TILE if none is allowed."""
    best = tl.max(tl.where(allowed, values, NOTHING), axis=0)
    return tl.min(tl.where(allowed & (values == best), index, TILE), axis=0)


@triton.jit
def in_top_groups(choice, expert, inside, NUM: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
                  GROUP_TILE: tl.constexpr, TOP_GROUPS: tl.constexpr):  # fmt: skip
    """Which experts are in one of the TOP_GROUPS groups whose two best scores sum highest."""
    size: tl.constexpr = NUM // GROUPS
    own, group = expert // size, tl.arange(0, GROUP_TILE)
    sums = tl.full((GROUP_TILE,), NOTHING, tl.float32)
    for g in tl.static_range(GROUPS):
        members = inside & (own == g)
        at = first_best(choice, members, expert, TILE)
        best = tl.max(tl.where(members, choice, NOTHING), axis=0)
        if size > 1:
            best += tl.max(tl.where(members & (expert != at), choice, NOTHING), axis=0)
        sums = tl.where(group == g, best, sums)
    left, allowed = group < GROUPS, expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        at = first_best(sums, left, group, GROUP_TILE)
        left = left & (group != at)
        allowed = allowed | (inside & (own == at))
    return allowed


@triton.jit
def route(
    logits, bias, table, token_ids, visible_end, ids, weights, scale,
    NUM: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr, TOP_TILE: tl.constexpr, SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BIAS: tl.constexpr, TOKEN_EXPERTS: tl.constexpr,
):  # fmt: skip
    """ids, weights [R, TOP]: each row's experts in ascending order; unused places are -1, in padding rows all of
    them."""
    row = tl.program_id(0)
    expert = tl.arange(0, TILE)
    inside = expert < NUM
    scores = scored(tl.load(logits + row * NUM + expert, mask=inside, other=0.0), inside, SCORING)
    times = tl.zeros((TILE,), tl.int32)
    if TOKEN_EXPERTS:
        token = tl.load(token_ids + row).to(tl.int64)
        for i in range(TOP):
            times += (expert == tl.load(table + token * TOP + i)).to(tl.int32)
    else:
        choice = scores
        if BIAS:
            choice += tl.load(bias + expert, mask=inside, other=0.0)
        choice = tl.where(choice == choice, choice, LOWEST)
        left = inside
        if GROUPS > 1:
            left = in_top_groups(choice, expert, inside, NUM, TILE, GROUPS, GROUP_TILE, TOP_GROUPS)
        for _ in range(TOP):
            at = first_best(choice, left & (times == 0), expert, TILE)
            times += (expert == at).to(tl.int32)
    weight = scores * times.to(tl.float32)
    if NORMALIZE:
        weight = tl.div_rn(weight, tl.sum(weight, axis=0) + TINY)
    is_live = tl.load(visible_end + row) >= 0
    taken = (times > 0) & is_live
    place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(ids + row * TOP + place, expert, mask=taken)
    tl.store(weights + row * TOP + place, weight * scale, mask=taken)
    slot = tl.arange(0, TOP_TILE)
    tl.store(ids + row * TOP + slot, -1, mask=(slot < TOP) & (slot >= tl.sum(taken.to(tl.int32), axis=0)))


@triton.jit(do_not_specialize=["size"])
def count(ids, counts, size, TILE: tl.constexpr):
    """counts [E]: pairs of each expert. One program per expert."""
    expert = tl.program_id(0)
    total = tl.zeros((TILE,), tl.int32)
    for begin in range(0, size, TILE):
        at = begin + tl.arange(0, TILE)
        total += (tl.load(ids + at, mask=at < size, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["size"])
def sort_into_tiles(ids, counts, pairs, owners, size, num_experts, TILE: tl.constexpr, EXPERT_TILE: tl.constexpr):
    """Sort pairs into tiles [tiles, ROWS] of one expert each; owners [tiles]: the expert. Unused entries stay -1. One
    program per expert."""
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERT_TILE)
    tiles = (tl.load(counts + other, mask=other < num_experts, other=0) + (ROWS - 1)) // ROWS
    first = tl.sum(tl.where(other < expert, tiles, 0), axis=0)
    for tile in range(tl.sum(tl.where(other == expert, tiles, 0), axis=0)):
        tl.store(owners + first + tile, expert)
    before = first * ROWS
    for begin in range(0, size, TILE):
        at = begin + tl.arange(0, TILE)
        is_own = (tl.load(ids + at, mask=at < size, other=-1) == expert).to(tl.int32)
        tl.store(pairs + before + tl.cumsum(is_own, axis=0) - 1, at, mask=is_own > 0)
        before += tl.sum(is_own, axis=0)


@triton.jit
def product(
    x, codes, scales, offsets, places, sums, levels, biases, pairs, owners, out, num_out, num_in, num_units, per_row,
    KIND: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, BIAS: tl.constexpr,
    ROUND: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out [P, N]: each pair's row of x [P / per_row, K] times its expert's matrix [N, K], plus biases [E, N].

    codes, scales, offsets are those of expert 0; places [E, 3]: distance in elements to those of each expert."""
    tile = tl.program_id(1)
    owner = tl.load(owners + tile).to(tl.int64)
    if owner < 0:
        return
    pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
    is_row = pair >= 0
    pair = tl.where(is_row, pair, 0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_out
    codes += tl.load(places + owner * 3)
    if GROUP:
        scales += tl.load(places + owner * 3 + 1)
    if OFFSETS:
        offsets += tl.load(places + owner * 3 + 2)
    total = tile_product(x, pair // per_row, is_row, codes, scales, offsets, sums, levels, column, is_column, 0, num_in,
                   num_in, num_units, KIND, ZERO, GROUP, OFFSETS, ROUND, WIDE, COLUMNS, STEP)  # fmt: skip
    if BIAS:
        total += tl.load(biases + owner * num_out + column, mask=is_column, other=0.0)[None, :]
    at = pair[:, None].to(tl.int64) * num_out + column[None, :]
    tl.store(out + at, total, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def combine(outputs, x, ids, weights, out, num_columns, num_matrices, TOP: tl.constexpr, WEIGHTED: tl.constexpr,
            IDENTITY: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """out [R, W]: the sum of a row's expert outputs [P, W] in order of places, times their weights if WEIGHTED.
    IDENTITY: experts without matrices give x times their weight."""
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_columns
    total = tl.zeros((TILE,), tl.float32)
    for place in range(TOP):
        pair = row * TOP + place
        expert = tl.load(ids + pair)
        weight = tl.load(weights + pair, mask=expert >= 0, other=0.0)
        has = (expert >= 0) & (expert < num_matrices)
        value = tl.load(outputs + pair.to(tl.int64) * num_columns + column, mask=inside & has, other=0.0)
        if WEIGHTED:
            value = value * weight
        if IDENTITY:
            own = tl.load(x + row.to(tl.int64) * num_columns + column, mask=inside, other=0.0)
            value = tl.where(expert >= num_matrices, own * weight, value)
        total += value
    tl.store(out + row.to(tl.int64) * num_columns + column, total, mask=inside)
