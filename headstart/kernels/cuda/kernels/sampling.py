"""Triton kernels for sampling and verification; bit-identical to kernels/reference/sampling.py and to `native`.

Scores are float64. Probability mass is a fixed-point integer, so the order of its sums does not matter. Launched
without fused multiply-adds (see cuda/sampling.py).

Shapes: L rows, W logits of a row, T tiles of a row. `reals` [6, L] float64 and `ints` [4, L] int64: parameters of rows.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(float("-inf"))
INFINITE = tl.constexpr(float("inf"))
TEMPERATURE, FLOOR, TOP_P, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(i) for i in range(6))
SEED, POSITION, CHOICE, TOP_K = (tl.constexpr(i) for i in range(4))
GREEDY_BELOW = tl.constexpr(9.999999747378752e-06)  # core.GREEDY_BELOW as float32
GUMBEL_MIN, GUMBEL_MAX = tl.constexpr(-3.14), tl.constexpr(22.88)
NOTHING_LEFT, NOT_FINITE = tl.constexpr(-1), tl.constexpr(-2)
LN2_HIGH, LN2_LOW = tl.constexpr(0x2C5C85FDF47 * 2.0**-42), tl.constexpr(5.497923018708371e-14)
LOWEST = tl.constexpr(-9223372036854775808)  # the lowest sort key of a score
NO_COLUMN = tl.constexpr(2147483647)


@triton.jit
def exact_log(x):
    """philox.log of positive normal float64 numbers."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = (bits - (exponent << 52)).to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = z * (2.0 / 21)
    for i in tl.static_range(9):
        series = (series + 2.0 / (19 - 2 * i)) * z
    k = exponent.to(tl.float64)
    return k * LN2_HIGH + (k * LN2_LOW + (f - s * (f - series)))


@triton.jit
def gumbel(ids, seed, position, choice):
    """Gumbel noise of token ids [N], float64 (philox.gumbel, stream 0)."""
    zero = tl.zeros_like(ids).to(tl.uint32)
    group = (ids >> 2).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero)
    place = ids & 3
    word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
    rest = ((4294967295 - word.to(tl.int64)).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -exact_log(-exact_log(rest))


@triton.jit
def mass(below):
    """e^x of float32 x <= 0 in units of 2^-40, int64 (reference.sampling.mass)."""
    clamped = tl.maximum(below, -87.0)
    k = (clamped * 1.4426950216293335 + 12582912.0) - 12582912.0  # rounded to even
    r = (clamped - k * 0.693145751953125) - k * 1.428606765330187e-06
    series = r * (1.0 / 5040)
    series = (series + 1.0 / 720) * r
    series = (series + 1.0 / 120) * r
    series = (series + 1.0 / 24) * r
    series = (series + 1.0 / 6) * r
    series = (series + 0.5) * r
    series = (series + 1.0) * r
    series = series + 1.0
    power = ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(below < -87.0, 0.0, series * power * 1099511627776.0).to(tl.int64)


@triton.jit
def columns_of(ids, token_ids, width, inside, MAPPED: tl.constexpr):
    """Columns of target ids; -1 where the id is not in the ascending token_ids [W]."""
    if MAPPED:
        low = tl.zeros_like(ids)
        high = low + width
        for _ in range(32):  # the first column whose id is not less
            middle = (low + high) // 2
            searching = low < high
            less = tl.load(token_ids + middle, mask=inside & searching, other=0) < ids
            low = tl.where(searching & less, middle + 1, low)
            high = tl.where(searching & (less == 0), middle, high)
        found = tl.load(token_ids + low, mask=inside & (low < width), other=-1)
        return tl.where(found == ids, low, -1)
    else:
        return tl.where((ids >= 0) & (ids < width), ids, -1)


@triton.jit
def edit(logits, allowed, token_ids, scores, width, stride, mask_stride, MASKED: tl.constexpr, MAPPED: tl.constexpr,
         TILE: tl.constexpr):  # fmt: skip
    """scores [L, W] float64: the logits; -inf where the mask forbids the token."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    values = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float64)
    if MASKED:
        ids = column
        if MAPPED:
            ids = tl.load(token_ids + column, mask=inside, other=0).to(tl.int32)
        words = tl.load(allowed + row * mask_stride + ids // 32, mask=inside, other=0)
        values = tl.where(((words >> (ids % 32)) & 1) != 0, values, NOTHING)
    tl.store(scores + row * width + column, values, mask=inside)


@triton.jit
def bias(scores, indptr, ids, values, token_ids, width, MAPPED: tl.constexpr, TILE: tl.constexpr):
    """Add values to the scores of ids, which are distinct within a row. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(indptr + row + 1)
    for begin in range(tl.load(indptr + row), end, TILE):
        at = begin + tl.arange(0, TILE)
        inside = at < end
        column = columns_of(tl.load(ids + at, mask=inside, other=-1), token_ids, width, inside, MAPPED)
        place = scores + row * width + column
        has = inside & (column >= 0)
        added = tl.load(values + at, mask=has, other=0.0).to(tl.float64)
        tl.store(place, tl.load(place, mask=has, other=0.0) + added, mask=has)


@triton.jit
def penalized(value, count, reals, row, num_rows):
    """Scores of tokens that occurred `count` times."""
    repetition = tl.load(reals + REPETITION * num_rows + row)
    value = tl.where(value > 0, value / repetition, value * repetition)
    presence = tl.where(count > 0, tl.load(reals + PRESENCE * num_rows + row), 0.0)
    return value - (tl.load(reals + FREQUENCY * num_rows + row) * count + presence)


@triton.jit(do_not_specialize=["num_rows", "num_drafted", "stride"])
def penalize(
    scores, indptr, ids, counts, reals, drafted, token_ids, width, num_rows, num_drafted, stride,
    MAPPED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Apply penalties to known tokens, then to drafted tokens [L, stride] that are not known. Drafted tokens count.
    One program per row."""
    row = tl.program_id(0).to(tl.int64)
    first, end = tl.load(indptr + row), tl.load(indptr + row + 1)
    own = drafted + row * stride
    for begin in range(first, end, TILE):
        at = begin + tl.arange(0, TILE)
        inside = at < end
        known = tl.load(ids + at, mask=inside, other=-1)
        count = tl.load(counts + at, mask=inside, other=0).to(tl.float64)
        for i in range(num_drafted):
            count += (tl.load(own + i) == known).to(tl.float64)
        column = columns_of(known, token_ids, width, inside, MAPPED)
        place, has = scores + row * width + column, inside & (column >= 0)
        value = tl.load(place, mask=has, other=0.0)
        tl.store(place, penalized(value, count, reals, row, num_rows), mask=has)
    lane = tl.arange(0, TILE)
    for i in range(num_drafted):
        token = tl.load(own + i)
        earlier, count = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.float64)
        for j in range(num_drafted):
            same = (tl.load(own + j) == token).to(tl.int32)
            count += same.to(tl.float64)
            earlier += tl.where(j < i, same, 0)
        for begin in range(first, end, TILE):
            at = begin + lane
            earlier += (tl.load(ids + at, mask=at < end, other=-1) == token).to(tl.int32)
        is_one = (lane == 0) & (token >= 0) & (tl.sum(earlier, axis=0) == 0)
        column = columns_of(token.to(tl.int32) + tl.zeros_like(lane), token_ids, width, is_one, MAPPED)
        place, has = scores + row * width + column, is_one & (column >= 0)
        value = tl.load(place, mask=has, other=0.0)
        tl.store(place, penalized(value, count, reals, row, num_rows), mask=has)


@triton.jit
def peak(scores, peaks, width, stride, TILE: tl.constexpr):
    """peaks [L, T]: the maximum of each tile; infinity where a score is NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    values = tl.load(scores + row * stride + column, mask=column < width, other=NOTHING).to(tl.float64)
    values = tl.where(values == values, values, INFINITE)
    tl.store(peaks + row * tl.num_programs(1) + tl.program_id(1), tl.max(values, axis=0))


@triton.jit
def highest(peaks, row, num_tiles, TILES: tl.constexpr):
    """The maximum score of a row."""
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(peaks + row * num_tiles + tile, mask=tile < num_tiles, other=NOTHING), axis=0)


@triton.jit
def key_of(score):
    """int64 keys that sort like the scores; 0 and -0 have the same key."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int64, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)


@triton.jit
def scaled_scores(scores, row, begin, width, stride, temperature, TILE: tl.constexpr):
    """(columns, which of them exist, score / temperature) of a tile."""
    column = begin + tl.arange(0, TILE)
    inside = column < width
    value = tl.load(scores + row * stride + column, mask=inside, other=0.0).to(tl.float64) / temperature
    return column, inside, value


@triton.jit
def is_kept(key, column, inside, least, cut, last):
    """Which tokens remain: key >= least, and key > cut or (key == cut and column <= last)."""
    return inside & (key >= least) & ((key > cut) | ((key == cut) & (column <= last)))


@triton.jit
def measured(
    scores, row, width, stride, temperature, best, least, cut, last, bounds, WAYS: tl.constexpr, WEIGHED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """[WAYS]: the number of remaining scores with keys >= each bound; WEIGHED: their mass."""
    total = tl.zeros((WAYS,), tl.int64)
    for begin in range(0, width, TILE):
        column, inside, value = scaled_scores(scores, row, begin, width, stride, temperature, TILE)
        key = key_of(value)
        has = is_kept(key, column, inside, least, cut, last)
        size = has.to(tl.int64)
        if WEIGHED:
            size = tl.where(has, mass(tl.where(has, value - best, 0.0).to(tl.float32)), 0)
        total += tl.sum(tl.where(key[:, None] >= bounds[None, :], size[:, None], 0), axis=0)
    return total


@triton.jit
def boundary(
    scores, row, width, stride, temperature, best, least, cut, last, goal, WEIGHED: tl.constexpr, TILE: tl.constexpr
):
    """(key, above): the highest key such that scores with at least that key reach `goal` in number or mass, LOWEST if
    all of them do not; `above`: number or mass of the scores above it. Searches by 16 bounds at a time."""
    found, above = tl.full((), LOWEST, tl.int64), tl.full((), 0, tl.int64)
    step, way = tl.full((), 1152921504606846976, tl.int64), tl.arange(0, 16)
    for _ in range(16):
        bounds = found + way.to(tl.int64) * step
        reached = measured(
            scores, row, width, stride, temperature, best, least, cut, last, bounds, 16, WEIGHED, TILE
        )  # fmt: skip
        most = tl.max(tl.where(reached.to(tl.float64) >= goal, way, 0), axis=0)
        above = tl.where(most < 15, tl.sum(tl.where(way == most + 1, reached, 0), axis=0), above)
        found = found + most.to(tl.int64) * step
        step = step >> 4
    return found, above


@triton.jit
def last_tie(
    scores, row, width, stride, temperature, best, least, cut, last, at, before, goal, WEIGHED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The last column among scores with key `at` that is still kept: number or mass before it is less than `goal`, or
    0. `before` counts the scores with higher keys."""
    found = tl.full((), -1, tl.int32)
    for begin in range(0, width, TILE):
        column, inside, value = scaled_scores(scores, row, begin, width, stride, temperature, TILE)
        key = key_of(value)
        is_tie = is_kept(key, column, inside, least, cut, last) & (key == at)
        size = is_tie.to(tl.int64)
        if WEIGHED:
            size = tl.where(is_tie, mass(tl.where(is_tie, value - best, 0.0).to(tl.float32)), 0)
        ahead = before + tl.cumsum(size, axis=0) - size
        belongs = is_tie & ((ahead.to(tl.float64) < goal) | (ahead == 0))
        found = tl.maximum(found, tl.max(tl.where(belongs, column, -1), axis=0))
        before += tl.sum(size, axis=0)
    return found


@triton.jit(do_not_specialize=["num_rows"])
def limit(scores, peaks, reals, ints, cuts, lasts, width, stride, num_rows, num_tiles, TILES: tl.constexpr,
          TILE: tl.constexpr):  # fmt: skip
    """cuts [3, L]: the least key of min-p, the cut keys of top-k and top-p; lasts [2, L]: the last column kept at each
    cut. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(reals + TEMPERATURE * num_rows + row)
    best = highest(peaks, row, num_tiles, TILES)
    least, cut = tl.full((), LOWEST, tl.int64), tl.full((), LOWEST, tl.int64)
    last, cut_p, last_p = tl.full((), NO_COLUMN, tl.int32), cut, tl.full((), NO_COLUMN, tl.int32)
    if (temperature >= GREEDY_BELOW) & (best > NOTHING) & (best < INFINITE):
        best = best / temperature
        least = key_of(best + tl.load(reals + FLOOR * num_rows + row))
        top = tl.load(ints + TOP_K * num_rows + row)
        if (top > 0) & (top < width):
            goal = top.to(tl.float64)
            found, above = boundary(scores, row, width, stride, temperature, best, least, cut, last, goal, False, TILE)
            last = last_tie(scores, row, width, stride, temperature, best, least, cut, NO_COLUMN, found, above, goal,
                            False, TILE)  # fmt: skip
            cut = found
        share = tl.load(reals + TOP_P * num_rows + row)
        if share < 1:
            all_of = tl.full((1,), LOWEST, tl.int64)
            whole = tl.sum(measured(scores, row, width, stride, temperature, best, least, cut, last, all_of, 1, True,
                                    TILE), axis=0)  # fmt: skip
            goal = share * whole.to(tl.float64)
            cut_p, above = boundary(scores, row, width, stride, temperature, best, least, cut, last, goal, True, TILE)
            last_p = last_tie(scores, row, width, stride, temperature, best, least, cut, last, cut_p, above, goal, True,
                              TILE)  # fmt: skip
    tl.store(cuts + row, least)
    tl.store(cuts + num_rows + row, cut)
    tl.store(cuts + 2 * num_rows + row, cut_p)
    tl.store(lasts + row, last)
    tl.store(lasts + num_rows + row, last_p)


@triton.jit(do_not_specialize=["num_rows", "before"])
def noisy(
    scores, peaks, reals, ints, cuts, lasts, token_ids, values, columns, width, stride, num_rows, num_tiles, before,
    LIMITED: tl.constexpr, MAPPED: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """values, columns [L, T]: the largest score + noise of each tile (greedy rows: without noise) and its column.

    The token's position is the row's + `before`. Tiles that cannot win draw no noise."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(reals + TEMPERATURE * num_rows + row)
    is_greedy = temperature < GREEDY_BELOW
    temperature = tl.where(is_greedy, 1.0, temperature)
    column, inside, value = scaled_scores(scores, row, tile * TILE, width, stride, temperature, TILE)
    alive = inside & (value == value)
    if LIMITED:
        key = key_of(value)
        cut, last = tl.load(cuts + num_rows + row), tl.load(lasts + row)
        alive = is_kept(key, column, alive, tl.load(cuts + row), cut, last)
        cut, last = tl.load(cuts + 2 * num_rows + row), tl.load(lasts + num_rows + row)
        alive = is_kept(key, column, alive, LOWEST, cut, last)
    value = tl.where(alive, value, NOTHING)
    best = highest(peaks, row, num_tiles, TILES) / temperature
    if (is_greedy == 0) & (tl.max(value, axis=0) + GUMBEL_MAX >= best + GUMBEL_MIN):
        ids = column
        if MAPPED:
            ids = tl.load(token_ids + column, mask=inside, other=0).to(tl.int32)
        position = tl.load(ints + POSITION * num_rows + row) + before
        noise = gumbel(ids, tl.load(ints + SEED * num_rows + row), position, tl.load(ints + CHOICE * num_rows + row))
        value = tl.where(alive, value + noise, NOTHING)
    top = tl.max(value, axis=0)
    tl.store(values + row * num_tiles + tile, top)
    tl.store(columns + row * num_tiles + tile, tl.min(tl.where(alive & (value == top), column, NO_COLUMN), axis=0))


@triton.jit(do_not_specialize=["stride", "number"])
def pick(
    values, columns, peaks, token_ids, drawn, num_tiles, stride, number, MAPPED: tl.constexpr, TILES: tl.constexpr
):
    """Write the token with the largest value (ties: the lowest column), or the error code, into column `number` of
    drawn [L, stride]."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < num_tiles
    value = tl.load(values + row * num_tiles + tile, mask=inside, other=NOTHING)
    column = tl.load(columns + row * num_tiles + tile, mask=inside, other=NO_COLUMN)
    best = highest(peaks, row, num_tiles, TILES)
    at = tl.min(tl.where(value == tl.max(value, axis=0), column, NO_COLUMN), axis=0)
    is_token = (best > NOTHING) & (best < INFINITE)
    token = at.to(tl.int64)
    if MAPPED:
        token = tl.load(token_ids + at, mask=is_token, other=0)
    token = tl.where(best == NOTHING, NOTHING_LEFT, tl.where(is_token, token, NOT_FINITE))
    tl.store(drawn + row * stride + number, token)


@triton.jit(do_not_specialize=["num_drawn", "number"])
def logprob(logits, drawn, token_ids, out, width, stride, num_drawn, number, MAPPED: tl.constexpr, TILE: tl.constexpr):
    """Write the raw log-softmax of column `number` of `drawn` into that column of out [L, num_drawn]; 0 without a
    token. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(drawn + row * num_drawn + number)
    lane = tl.arange(0, TILE)
    most = tl.full((TILE,), NOTHING, tl.float32)
    for begin in range(0, width, TILE):
        column = begin + lane
        most = tl.maximum(most, tl.load(logits + row * stride + column, mask=column < width, other=NOTHING))
    best = tl.max(most, axis=0).to(tl.float64)
    total = tl.zeros((TILE,), tl.int64)
    for begin in range(0, width, TILE):
        column = begin + lane
        inside = column < width
        value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float64)
        total += tl.where(inside, mass(tl.where(inside, value - best, 0.0).to(tl.float32)), 0)
    whole = tl.sum(total, axis=0).to(tl.float64) * 9.094947017729282e-13
    ids = token.to(tl.int32) + tl.zeros_like(lane)
    column = columns_of(ids, token_ids, width, (lane == 0) & (token >= 0), MAPPED)
    chosen = tl.load(logits + row * stride + column, mask=(lane == 0) & (column >= 0), other=0.0).to(tl.float64)
    value = tl.sum(tl.where(lane == 0, chosen, 0.0), axis=0) - best - exact_log(whole)
    tl.store(out + row * num_drawn + number, tl.where(token >= 0, value, 0.0).to(tl.float32))


NUM_CONTROLS = 8
FIRST_ROW, NUM_DRAFTED, FIXED_ACCEPTED, FIRST_SAMPLE, BASE_POSITION, DEPTH, KNOWN_ROWS, ROPE_SHIFT = (
    tl.constexpr(i) for i in range(NUM_CONTROLS)
)
"""Rows of `controls` [NUM_CONTROLS, S], per sequence: its first row in the first pass; drafted tokens to verify (-1:
none); a fixed number of accepted tokens (-1: none fixed); index of its first sample; position of its first new token if
nothing is accepted; tokens to draft; rows of the first pass before the verified ones; rotary positions of new tokens
less their positions."""


@triton.jit(do_not_specialize=["num"])
def verify(
    controls, drafted, draws, token_ids, slots, visible_end, logit_rows, ints, num_accepted, num,
    MAX_VERIFIED: tl.constexpr,
):  # fmt: skip
    """Verify drafted tokens [S, MAX_VERIFIED] against samples. num_accepted [S]: length of the longest equal prefix, or
    the fixed number in `controls`; 0 for sequences without drafts (-1).

    Rows of accepted tokens and of the recovered or bonus token get their token ids; rows after them store and see
    nothing; logits come from the last valid row. One program per sequence."""
    sequence = tl.program_id(0)
    count = tl.load(controls + NUM_DRAFTED * num + sequence)
    accepted = tl.full((), 0, tl.int32)
    if count >= 0:
        i = tl.arange(0, MAX_VERIFIED)
        at = tl.load(controls + FIRST_SAMPLE * num + sequence)
        draft = tl.load(drafted + sequence * MAX_VERIFIED + i, mask=i < count, other=-1)
        drawn = tl.load(draws + at + i, mask=i <= count, other=-1).to(tl.int32)
        accepted = tl.min(tl.where((i < count) & (draft != drawn), i, count), axis=0)
        fixed = tl.load(controls + FIXED_ACCEPTED * num + sequence)
        accepted = tl.where(fixed >= 0, fixed, accepted)
        row = tl.load(controls + FIRST_ROW * num + sequence) + tl.load(controls + KNOWN_ROWS * num + sequence) + i
        tl.store(token_ids + row, tl.maximum(tl.where(i < accepted, draft, drawn), 0), mask=i <= accepted)
        nothing = tl.full((MAX_VERIFIED,), -1, tl.int32)
        dropped = (i > accepted) & (i <= count)
        tl.store(slots + row, nothing, mask=dropped)
        tl.store(visible_end + row, nothing, mask=dropped)
        tl.store(logit_rows + row * 0 + sequence, row, mask=i == accepted)
    tl.store(num_accepted + sequence, accepted)
    position = tl.load(controls + BASE_POSITION * num + sequence) + accepted
    tl.store(ints + POSITION * num + sequence, position.to(tl.int64))


@triton.jit(do_not_specialize=["num", "stride", "number", "before", "table_width"])
def advance(
    controls, num_accepted, drawn, first_tokens, tables, token_ids, positions, slots, visible_end, num, stride, number,
    before, table_width, block_size, first_position, rope_positions, NUM_AXES: tl.constexpr,
):  # fmt: skip
    """Prepare the rows of draft step `number`: the token of the step before (column number - 1 of drawn [S, stride];
    for step 0 that of the first pass), its position (`before` rows after the sequence's tokens) and slot. Finished
    drafts store and see nothing. rope_positions [S, NUM_AXES]. One program per sequence."""
    sequence = tl.program_id(0)
    going = number < tl.load(controls + DEPTH * num + sequence)
    position = tl.load(controls + BASE_POSITION * num + sequence) + tl.load(num_accepted + sequence) + before
    position = tl.where(going, position, first_position)
    block = tl.load(tables + sequence.to(tl.int64) * table_width + position // block_size)
    slot = block * block_size + position % block_size
    own = tl.load(first_tokens + tl.load(controls + FIRST_ROW * num + sequence))
    token = tl.load(drawn + sequence * stride + tl.maximum(number - 1, 0)).to(tl.int32)
    tl.store(token_ids + sequence, tl.where(number > 0, tl.maximum(token, 0), own))
    tl.store(positions + sequence, position)
    for axis in tl.static_range(NUM_AXES):
        shift = tl.load(controls + ROPE_SHIFT * num + sequence)
        tl.store(rope_positions + sequence * NUM_AXES + axis, tl.maximum(position + shift, 0))
    tl.store(slots + sequence, tl.where(going, slot, -1))
    tl.store(visible_end + sequence, tl.where(going, position, -1))
