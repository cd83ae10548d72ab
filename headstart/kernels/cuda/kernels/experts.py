"""Triton: mixtures of experts. A row takes TOP experts: pairs (row, place), which are dealt to tiles of sixteen by
expert. Places are in ascending order of the experts' ids, so that a row's sum has one order whatever else is there.

Shapes: R rows, E experts, P = R * TOP pairs. No atomics: each expert's program finds its pairs by itself, in order.
"""

import triton
import triton.language as tl

from headstart.kernels.cuda.kernels.products import ROWS, walked
from headstart.kernels.cuda.kernels.rows import sigmoid, softplus_of

NOTHING = tl.constexpr(float("-inf"))
LEAST = tl.constexpr(-3.0e38)
"""In place of NaN, which is chosen last."""
TINY = tl.constexpr(1e-20)
"""As in reference/moe.py: sigmoids may all be 0."""


@triton.jit
def scored(x, inside, SCORING: tl.constexpr):
    """Scores of a row's logits (see RouterSpec)."""
    if SCORING == "softmax":
        most = tl.max(tl.where(inside, x, NOTHING), axis=0)
        small = tl.where(inside, tl.exp(tl.where(inside, x, most) - most), 0.0)
        return tl.div_rn(small, tl.sum(small, axis=0))
    elif SCORING == "sigmoid":
        return tl.where(inside, sigmoid(x), 0.0)
    else:
        tl.static_assert(SCORING == "softplus")
        return tl.where(inside, tl.sqrt_rn(softplus_of(x)), 0.0)


@triton.jit
def first_best(values, among, index, TILE: tl.constexpr):
    """The lowest index of the largest of `values` [TILE] that are `among`; TILE where there is none."""
    best = tl.max(tl.where(among, values, NOTHING), axis=0)
    return tl.min(tl.where(among & (values == best), index, TILE), axis=0)


@triton.jit
def in_top_groups(choice, expert, inside, NUM: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
                  GROUP_TILE: tl.constexpr, TOP_GROUPS: tl.constexpr):  # fmt: skip
    """Which experts are in one of the groups whose two best choices sum highest."""
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
    left, among = group < GROUPS, expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        at = first_best(sums, left, group, GROUP_TILE)
        left = left & (group != at)
        among = among | (inside & (own == at))
    return among


@triton.jit
def route(
    logits, bias, table, token_ids, sees, ids, weights, scale,
    NUM: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr, TOP_TILE: tl.constexpr, SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BIAS: tl.constexpr, TOLD: tl.constexpr,
):  # fmt: skip
    """ids and weights [R, TOP] of what each row takes, ascending; -1 in places that are left, all of them in rows that
    see nothing: those fill up a bucket."""
    row = tl.program_id(0)
    expert = tl.arange(0, TILE)
    inside = expert < NUM
    scores = scored(tl.load(logits + row * NUM + expert, mask=inside, other=0.0), inside, SCORING)
    times = tl.zeros((TILE,), tl.int32)
    if TOLD:
        token = tl.load(token_ids + row).to(tl.int64)
        for i in range(TOP):
            times += (expert == tl.load(table + token * TOP + i)).to(tl.int32)
    else:
        choice = scores
        if BIAS:
            choice += tl.load(bias + expert, mask=inside, other=0.0)
        choice = tl.where(choice == choice, choice, LEAST)
        left = inside
        if GROUPS > 1:
            left = in_top_groups(choice, expert, inside, NUM, TILE, GROUPS, GROUP_TILE, TOP_GROUPS)
        for _ in range(TOP):
            at = first_best(choice, left & (times == 0), expert, TILE)
            times += (expert == at).to(tl.int32)
    weight = scores * times.to(tl.float32)
    if NORMALIZE:
        weight = tl.div_rn(weight, tl.sum(weight, axis=0) + TINY)
    is_live = tl.load(sees + row) >= 0
    taken = (times > 0) & is_live
    place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(ids + row * TOP + place, expert, mask=taken)
    tl.store(weights + row * TOP + place, weight * scale, mask=taken)
    slot = tl.arange(0, TOP_TILE)
    tl.store(ids + row * TOP + slot, -1, mask=(slot < TOP) & (slot >= tl.sum(taken.to(tl.int32), axis=0)))


@triton.jit(do_not_specialize=["size"])
def count(ids, counts, size, TILE: tl.constexpr):
    """counts [E]: pairs of each expert. A program per expert."""
    expert = tl.program_id(0)
    total = tl.zeros((TILE,), tl.int32)
    for begin in range(0, size, TILE):
        at = begin + tl.arange(0, TILE)
        total += (tl.load(ids + at, mask=at < size, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["size"])
def deal(ids, counts, pairs, owners, size, num_experts, TILE: tl.constexpr, EXPERT_TILE: tl.constexpr):
    """pairs [tiles, ROWS]: each expert's, in tiles of its own; owners [tiles]: whose they are. A program per expert;
    what nobody writes stays -1."""
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
    """out [P, N]: of each pair its row of x [P / per_row, K] times its expert's matrix [N, K]. codes, scales, offsets
    are those of expert 0; places [E, 3]: how many elements behind them those of each expert lie. biases [E, N]."""
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
    total = walked(x, pair // per_row, is_row, codes, scales, offsets, sums, levels, column, is_column, 0, num_in,
                   num_in, num_units, KIND, ZERO, GROUP, OFFSETS, ROUND, WIDE, COLUMNS, STEP)  # fmt: skip
    if BIAS:
        total += tl.load(biases + owner * num_out + column, mask=is_column, other=0.0)[None, :]
    at = pair[:, None].to(tl.int64) * num_out + column[None, :]
    tl.store(out + at, total, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def combine(said, x, ids, weights, out, num_columns, num_matrices, TOP: tl.constexpr, WEIGHS: tl.constexpr,
            IDENTITY: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """out [R, W]: the sum of what a row's experts said [P, W], place by place, by weight if WEIGHS; of experts without
    matrices x by weight."""
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_columns
    total = tl.zeros((TILE,), tl.float32)
    for place in range(TOP):
        pair = row * TOP + place
        expert = tl.load(ids + pair)
        weight = tl.load(weights + pair, mask=expert >= 0, other=0.0)
        has = (expert >= 0) & (expert < num_matrices)
        value = tl.load(said + pair.to(tl.int64) * num_columns + column, mask=inside & has, other=0.0)
        if WEIGHS:
            value = value * weight
        if IDENTITY:
            own = tl.load(x + row.to(tl.int64) * num_columns + column, mask=inside, other=0.0)
            value = tl.where(expert >= num_matrices, own * weight, value)
        total += value
    tl.store(out + row.to(tl.int64) * num_columns + column, total, mask=inside)
