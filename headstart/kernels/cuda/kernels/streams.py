"""Triton: residual streams side by side, and entries of compressed attention. A program has one row."""

import triton
import triton.language as tl

from headstart.kernels.cuda.kernels.attention import NOTHING, slots_of
from headstart.kernels.cuda.kernels.rows import sigmoid


@triton.jit
def stream_weights(
    mixes, base, scale, out, eps, iterations, COUNT: tl.constexpr, TILE: tl.constexpr, ALL: tl.constexpr
):
    """Ops.stream_weights of a row: COUNT weights that enter, and if ALL as many that leave and the mixing matrix."""
    row = tl.program_id(0)
    width: tl.constexpr = (2 + COUNT) * COUNT if ALL else COUNT
    i = tl.arange(0, TILE)
    own, is_one = mixes + row * width, i < COUNT
    entering = sigmoid(tl.load(own + i, mask=is_one, other=0.0) * tl.load(scale)
                       + tl.load(base + i, mask=is_one, other=0.0)) + eps  # fmt: skip
    tl.store(out + row * width + i, entering, mask=is_one)
    if ALL:
        leaving = sigmoid(tl.load(own + COUNT + i, mask=is_one, other=0.0) * tl.load(scale + 1)
                          + tl.load(base + COUNT + i, mask=is_one, other=0.0))  # fmt: skip
        tl.store(out + row * width + COUNT + i, 2.0 * leaving, mask=is_one)
        inside = is_one[:, None] & is_one[None, :]
        at = 2 * COUNT + i[:, None] * COUNT + i[None, :]
        square = (tl.load(own + at, mask=inside, other=0.0) * tl.load(scale + 2)
                  + tl.load(base + at, mask=inside, other=0.0))  # fmt: skip
        most = tl.max(tl.where(is_one[None, :], square, -3.0e38), axis=1)
        small = tl.where(inside, tl.exp(tl.where(inside, square - most[:, None], 0.0)), 0.0)
        summed = tl.where(is_one, tl.sum(small, axis=1), 1.0)
        square = tl.where(inside, tl.div_rn(small, summed[:, None]) + eps, 0.0)
        square = tl.div_rn(square, tl.sum(square, axis=0)[None, :] + eps)
        for _ in range(1, iterations):
            square = tl.div_rn(square, tl.sum(square, axis=1)[:, None] + eps)
            square = tl.div_rn(square, tl.sum(square, axis=0)[None, :] + eps)
        tl.store(out + row * width + at, square, mask=inside)


@triton.jit
def sum_streams(streams, weights, out, num_columns, stride, COUNT: tl.constexpr, WEIGHED: tl.constexpr,
                TILE: tl.constexpr):  # fmt: skip
    """out [R, H]: the sum of streams [R, COUNT * H] by the first weights of a row [R, stride], or their mean."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_columns
    total = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(COUNT):
        stream = tl.load(streams + (row * COUNT + i) * num_columns + column, mask=inside, other=0.0)
        if WEIGHED:
            total += stream * tl.load(weights + row * stride + i)
        else:
            total += stream
    if not WEIGHED:
        total = tl.div_rn(total, tl.zeros((TILE,), tl.float32) + COUNT)
    tl.store(out + row * num_columns + column, total, mask=inside)


@triton.jit
def mix_streams(streams, x, weights, out, num_columns, COUNT: tl.constexpr, TILE: tl.constexpr):
    """out [R, COUNT * H]: stream k is weights[COUNT + k] * x + the sum over j of weights[(2 + j) COUNT + k] * stream
    j."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(2)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_columns
    own = weights + row * ((2 + COUNT) * COUNT) + k
    total = tl.load(own + COUNT) * tl.load(x + row * num_columns + column, mask=inside, other=0.0)
    for j in tl.static_range(COUNT):
        stream = tl.load(streams + (row * COUNT + j) * num_columns + column, mask=inside, other=0.0)
        total += tl.load(own + (2 + j) * COUNT) * stream
    tl.store(out + (row * COUNT + k) * num_columns + column, total, mask=inside)


@triton.jit
def keep_gated(values, gates, bias, positions, slots, pool, EVERY: tl.constexpr, WIDTH: tl.constexpr,
               TILE: tl.constexpr):  # fmt: skip
    """Row r to its slot of pool [slots, 2 * WIDTH]: values, and gates + the bias of the place in its window."""
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + row).to(tl.int64)
    inside = (column < WIDTH) & (slot >= 0)
    at = row.to(tl.int64) * WIDTH + column
    tl.store(pool + slot * (2 * WIDTH) + column, tl.load(values + at, mask=inside, other=0.0), mask=inside)
    place = tl.load(positions + row) % EVERY
    told = (tl.load(gates + at, mask=inside, other=0.0)
            + tl.load(bias + place * WIDTH + column, mask=inside, other=0.0))  # fmt: skip
    tl.store(pool + slot * (2 * WIDTH) + WIDTH + column, told, mask=inside)


@triton.jit(do_not_specialize=["table_width"])
def compress(
    pool, out, positions, sees, row_sequences, tables, path_starts, path_slots, first_position, table_width, block_size,
    EVERY: tl.constexpr, DIM: tl.constexpr, OVERLAP: tl.constexpr, PATHS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out [R, DIM] of rows that end a window: the sum over its positions of values by the softmax of their gates, by
    feature, the oldest first; 0 of other rows."""
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < DIM
    span: tl.constexpr = 2 * EVERY if OVERLAP else EVERY
    width: tl.constexpr = 2 * DIM if OVERLAP else DIM
    position, sequence = tl.load(positions + row), tl.load(row_sequences + row)
    ends = ((position + 1) % EVERY == 0) & (tl.load(sees + row) >= 0)
    most = tl.full((TILE,), NOTHING, tl.float32)
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
                higher = tl.maximum(most, gate)
                older, newer = tl.exp(most - higher), tl.exp(gate - higher)
                total = total * older + newer
                summed = summed * older + newer * value
                most = higher
    made = tl.div_rn(summed, tl.where(total > 0, total, 1.0))
    tl.store(out + row.to(tl.int64) * DIM + column, made, mask=inside)
