"""Triton kernels for rows times a matrix; the bits of a row do not depend on the number of rows.

A tile always has 16 rows, K is walked in steps of one size, and the P parts of K are summed in order. Masked rows of a
tile are zeros.

Shapes: R rows, N outputs, K inputs, U scale groups of a matrix row, P parts of K.
"""

import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # rows of a tile: the minimum of tensor cores
PLAIN, NIBBLES, FLOAT8, LEVELS = (tl.constexpr(i) for i in range(4))
"""Storage of codes (cuda/matrix.py): own dtype, two per byte, E4M3, or two per byte as indices into 16 levels."""


@triton.jit
def numbers(matrix, levels, rows, columns, inside, num_columns, KIND: tl.constexpr, ZERO: tl.constexpr):
    """Codes at (rows, columns), which broadcast, as float32; NIBBLES: minus ZERO; 0 outside."""
    if KIND == NIBBLES or KIND == LEVELS:
        pairs = tl.load(matrix + rows.to(tl.int64) * ((num_columns + 1) // 2) + columns // 2, mask=inside, other=0)
        codes = (pairs >> ((columns % 2) * 4).to(tl.uint8)) & 15
        if KIND == LEVELS:
            return tl.load(levels + codes.to(tl.int32), mask=inside, other=0.0)
        return tl.where(inside, codes.to(tl.float32) - ZERO, 0.0)
    stored = tl.load(matrix + rows.to(tl.int64) * num_columns + columns, mask=inside, other=0)
    if KIND == FLOAT8:  # E4M3 is float16 with a smaller exponent bias and fewer bits
        bits = stored.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return stored.to(tl.float32)


@triton.jit
def tile_product(
    x, row, is_row, matrix, scales, offsets, sums, levels, column, is_column, start, length, num_in, num_units,
    KIND: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, ROUND: tl.constexpr,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS]: rows of x [., K] times rows `column` of matrix [N, K], over K = start .. start + length.

    Codes of a GROUP share a scale and an offset, which multiplies the group's sum of x (`sums` [., U]). ROUND: x is
    rounded to bfloat16. WIDE: products in float32."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, length, STEP):
        k = start + begin + tl.arange(0, STEP)
        is_k = k < num_in
        left = tl.load(x + row[:, None] * num_in + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
        inside = is_column[None, :] & is_k[:, None]
        right = numbers(matrix, levels, column[None, :], k[:, None], inside, num_in, KIND, ZERO)
        if ROUND:
            left = left.to(tl.bfloat16)
        if WIDE:
            partial = tl.dot(left.to(tl.float32), right, input_precision="ieee")
        else:
            partial = tl.dot(left, right.to(tl.bfloat16))
        if GROUP:
            unit = (start + begin) // GROUP
            known = is_column & (unit < num_units)
            scale = tl.load(scales + column.to(tl.int64) * num_units + unit, mask=known, other=0.0).to(tl.float32)
            partial = partial * scale[None, :]
            if OFFSETS and begin % GROUP == 0:
                offset = tl.load(offsets + column.to(tl.int64) * num_units + unit, mask=known, other=0.0)
                summed = tl.load(sums + row * num_units + unit, mask=is_row & (unit < num_units), other=0.0)
                partial += summed[:, None] * offset[None, :]
        total += partial
    return total


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x, matrix, scales, offsets, sums, levels, bias, out, num_rows, num_out, num_in, num_units, part_length,
    KIND: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, BIAS: tl.constexpr,
    ROUND: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out [P, R, N] = x [R, K] times matrix [N, K], per part of K."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    is_row, is_column = row < num_rows, column < num_out
    total = tile_product(x, row, is_row, matrix, scales, offsets, sums, levels, column, is_column, part * part_length,
                   part_length, num_in, num_units, KIND, ZERO, GROUP, OFFSETS, ROUND, WIDE, COLUMNS, STEP)  # fmt: skip
    if BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0)[None, :]
    at = (part * num_rows + row[:, None]).to(tl.int64) * num_out + column[None, :]
    tl.store(out + at, total, mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["size"])
def join_parts(parts, bias, out, size, num_out, num_parts, BIAS: tl.constexpr, COUNT: tl.constexpr):
    """out [size]: the sum of parts [P, size] in order, plus bias [N]."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    inside = at < size
    total = tl.load(parts + at, mask=inside, other=0.0)
    for _ in range(1, num_parts):
        parts += size
        total += tl.load(parts + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at % num_out, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)


@triton.jit
def group_sums(x, sums, num_in, num_units, GROUP: tl.constexpr, WIDTH: tl.constexpr, UNITS: tl.constexpr,
               ROUND: tl.constexpr):  # fmt: skip
    """sums [R, U] of x [R, K] by groups. One program per row, so the position in a tile does not matter."""
    row = tl.program_id(0)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    inner = tl.arange(0, WIDTH)
    k = unit[:, None] * GROUP + inner[None, :]
    inside = (inner[None, :] < GROUP) & (k < num_in)
    values = tl.load(x + row * num_in + k, mask=inside, other=0.0)
    if ROUND:
        values = values.to(tl.bfloat16).to(tl.float32)
    tl.store(sums + row * num_units + unit, tl.sum(values, axis=1), mask=unit < num_units)


@triton.jit
def take(matrix, scales, offsets, levels, ids, out, num_in, num_units, KIND: tl.constexpr, ZERO: tl.constexpr,
         GROUP: tl.constexpr, OFFSETS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """out [R, K]: rows `ids` [R] of a matrix, float32."""
    row = tl.program_id(0)
    at = tl.load(ids + row)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = k < num_in
    values = numbers(matrix, levels, at, k, inside, num_in, KIND, ZERO).to(tl.float32)
    if GROUP:
        unit = at.to(tl.int64) * num_units + k // GROUP
        values = values * tl.load(scales + unit, mask=inside, other=0.0).to(tl.float32)
        if OFFSETS:
            values += tl.load(offsets + unit, mask=inside, other=0.0)
    tl.store(out + row * num_in + k, values, mask=inside)
