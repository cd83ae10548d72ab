"""Triton kernels of row-wise and elementwise ops. Shapes: R rows, W columns."""

import triton
import triton.language as tl


@triton.jit
def norm(
    x, residual, weight, out, total, num_columns, eps, num_parts,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, TILE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """out [R, W] = x / rms(x) * weight, by groups of WIDTH columns. weight [num_parts, WIDTH]: group g uses part
    g % num_parts. RESIDUAL: of x + residual, which is written to `total`. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    group, column = tl.arange(0, GROUP_TILE), tl.arange(0, TILE)
    inside = (group[:, None] < GROUPS) & (column[None, :] < WIDTH)
    at = row * num_columns + group[:, None] * WIDTH + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0)
    if RESIDUAL:
        values += tl.load(residual + at, mask=inside, other=0.0)
        tl.store(total + at, values, mask=inside)
    mean = tl.sum(values * values, axis=1) / WIDTH
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    place = (group[:, None] % num_parts) * WIDTH + column[None, :]
    scaled = values * factor[:, None] * tl.load(weight + place, mask=inside, other=0.0)
    tl.store(out + at, scaled, mask=inside)


@triton.jit
def center(x, out, num_columns, TILE: tl.constexpr):
    """out [R, W] = x - mean(x) of each row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < num_columns
    values = tl.load(x + row * num_columns + column, mask=inside, other=0.0)
    mean = tl.sum(values, axis=0) / num_columns
    tl.store(out + row * num_columns + column, values - mean, mask=inside)


@triton.jit
def rope(
    x, positions, axes, cosines, sines, out, num_columns, shift,
    HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr,
    TRAILING: tl.constexpr, INVERSE: tl.constexpr, NUM_AXES: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of a row (see RopeSpec) by cosines and sines [positions, ROTARY / 2] of its position. NUM_AXES >
    0: of its positions [R, NUM_AXES] on the axes [ROTARY / 2] of each frequency. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, HEAD_TILE), tl.arange(0, TILE)
    inside = (head[:, None] < HEADS) & (d[None, :] < DIM)
    start = row * num_columns + head[:, None] * DIM
    own = tl.load(x + start + d[None, :], mask=inside, other=0.0)
    half = ROTARY // 2
    if TRAILING:  # neighbours rotate together, in the last columns
        place = d - (DIM - ROTARY)
        in_rotary = place >= 0
        angle, is_first = place // 2, place % 2 == 0
        other = tl.where(is_first, d + 1, d - 1)
    else:
        in_rotary = d < ROTARY
        angle, is_first = d % half, d < half
        other = tl.where(is_first, d + half, d - half)
    rotates = in_rotary & (d < DIM)
    pair = tl.load(x + start + other[None, :], mask=inside & rotates[None, :], other=0.0)
    if NUM_AXES:
        axis = tl.load(axes + angle, mask=rotates, other=0)
        position = tl.load(positions + row * NUM_AXES + axis, mask=rotates, other=0)
    else:
        position = tl.load(positions + row)
    table = tl.maximum(position - shift, 0).to(tl.int64) * half + angle
    cos = tl.load(cosines + table, mask=rotates, other=1.0)
    sin = tl.load(sines + table, mask=rotates, other=0.0)
    if INVERSE:
        sin = -sin
    signed = tl.where(is_first, -sin, sin)
    rotated = own * cos[None, :] + pair * signed[None, :]
    tl.store(out + start + d[None, :], tl.where(rotates[None, :], rotated, own), mask=inside)


@triton.jit
def scatter(x, slots, pool, num_columns, stride, TILE: tl.constexpr):
    """Write row r of x [R, W] to row slots[r] of pool [slots, W] (rows `stride` apart); slot -1: not written."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (column < num_columns) & (slot >= 0)
    values = tl.load(x + row.to(tl.int64) * num_columns + column, mask=inside, other=0.0)
    tl.store(pool + slot * stride + column, values, mask=inside)


@triton.jit
def sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.div_rn(tl.where(x < 0, small, 1.0), 1.0 + small)


@triton.jit
def tanh(x):
    """tanh by e^-2|x|, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = tl.div_rn(1.0 - small, 1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """An Activation of one input (see kernels/ops.py)."""
    if KIND == "silu":
        return x * sigmoid(x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        return tl.maximum(x, 0.0)
    elif KIND == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == "identity")
        return x


@triton.jit(do_not_specialize=["size"])
def activate(x, out, size, KIND: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = at < size
    tl.store(out + at, activated(tl.load(x + at, mask=inside, other=0.0), KIND), mask=inside)


@triton.jit
def limited(x, largest):
    return tl.minimum(tl.maximum(x, -largest), largest)


@triton.jit
def gated(g, u, KIND: tl.constexpr):
    """A gated product (see Activation in kernels/ops.py)."""
    if KIND == "clamped":
        g = tl.minimum(g, 7.0)
        return g * sigmoid(1.702 * g) * (limited(u, 7.0) + 1.0)
    elif KIND == "silu_of_10":
        return activated(tl.minimum(g, 10.0), "silu") * limited(u, 10.0)
    elif KIND == "situ":
        return 4.0 * tanh(g / 4.0) * sigmoid(g) * 25.0 * tanh(u / 25.0)
    elif KIND == "silu_7":
        return tl.minimum(activated(g, "silu"), 7.0) * limited(u, 7.0)
    elif KIND == "silu_16":
        return tl.minimum(activated(g, "silu"), 16.0) * limited(u, 16.0)
    else:
        return activated(g, KIND) * u


@triton.jit(do_not_specialize=["size"])
def activate_mul(gate, up, out, size, KIND: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = at < size
    g, u = tl.load(gate + at, mask=inside, other=0.0), tl.load(up + at, mask=inside, other=0.0)
    tl.store(out + at, gated(g, u, KIND), mask=inside)


@triton.jit(do_not_specialize=["size"])
def sigmoid_mul(gate, x, out, size, repeat, COUNT: tl.constexpr):
    """sigmoid(gate) * x; each gate is repeated for `repeat` neighbouring features."""
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = at < size
    factor = sigmoid(tl.load(gate + at // repeat, mask=inside, other=0.0))
    tl.store(out + at, factor * tl.load(x + at, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["size"])
def softcap(x, out, size, cap, COUNT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = at < size
    tl.store(out + at, cap * tanh(tl.div_rn(tl.load(x + at, mask=inside, other=0.0), cap)), mask=inside)


@triton.jit
def softplus_of(value):
    """ln(1 + e^value)."""
    small = tl.exp(-tl.abs(value))
    # ln(1 + y) without the rounding of 1 + y (Goldberg 1991): y ln(1 + y) / ((1 + y) - 1)
    whole = 1.0 + small
    log1p = tl.where(whole == 1.0, small, small * tl.div_rn(tl.log(whole), tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.maximum(value, 0.0) + log1p


@triton.jit(do_not_specialize=["size"])
def softplus(x, rate, bias, out, size, num_columns, RATE: tl.constexpr, COUNT: tl.constexpr):
    """rate * ln(1 + e^(x + bias)), per column."""
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = at < size
    column = at % num_columns
    result = softplus_of(tl.load(x + at, mask=inside, other=0.0) + tl.load(bias + column, mask=inside, other=0.0))
    if RATE:
        result = result * tl.load(rate + column, mask=inside, other=0.0)
    tl.store(out + at, result, mask=inside)


@triton.jit(do_not_specialize=["size"])
def bounded_decay(x, rate, bias, out, size, num_columns, bound, COUNT: tl.constexpr):
    """bound * sigmoid(rate * (x + bias)), per column."""
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = at < size
    column = at % num_columns
    shifted = tl.load(x + at, mask=inside, other=0.0) + tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + at, bound * sigmoid(tl.load(rate + column, mask=inside, other=0.0) * shifted), mask=inside)


@triton.jit
def stream_weights(
    mixes, base, scale, out, width, eps, iterations, magnitude, COUNT: tl.constexpr, TILE: tl.constexpr,
    OUTPUT: tl.constexpr, MIXED: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Ops.stream_weights of a row: COUNT input weights, if OUTPUT COUNT output weights, and if MIXED the matrix."""
    row = tl.program_id(0)
    i = tl.arange(0, TILE)
    own, is_one = mixes + row * width, i < COUNT
    scaled = (tl.load(own + i, mask=is_one, other=0.0) * tl.load(scale)
              + tl.load(base + i, mask=is_one, other=0.0))  # fmt: skip
    if SOFTMAX:
        small = tl.where(is_one, tl.exp(scaled - tl.max(tl.where(is_one, scaled, -3.0e38), axis=0)), 0.0)
        input_weight = tl.div_rn(small, tl.zeros_like(small) + tl.sum(small, axis=0)) + eps
    else:
        input_weight = sigmoid(scaled) + eps
    tl.store(out + row * width + i, input_weight, mask=is_one)
    if OUTPUT:
        output_weight = sigmoid(tl.load(own + COUNT + i, mask=is_one, other=0.0) * tl.load(scale + 1)
                          + tl.load(base + COUNT + i, mask=is_one, other=0.0))  # fmt: skip
        output_weight = magnitude * output_weight if MIXED else magnitude * output_weight + eps
        tl.store(out + row * width + COUNT + i, output_weight, mask=is_one)
    if MIXED:
        inside = is_one[:, None] & is_one[None, :]
        at = 2 * COUNT + i[:, None] * COUNT + i[None, :]
        square = (tl.load(own + at, mask=inside, other=0.0) * tl.load(scale + 2)
                  + tl.load(base + at, mask=inside, other=0.0))  # fmt: skip
        largest = tl.max(tl.where(is_one[None, :], square, -3.0e38), axis=1)
        small = tl.where(inside, tl.exp(tl.where(inside, square - largest[:, None], 0.0)), 0.0)
        summed = tl.where(is_one, tl.sum(small, axis=1), 1.0)
        square = tl.where(inside, tl.div_rn(small, summed[:, None]) + eps, 0.0)
        square = tl.div_rn(square, tl.sum(square, axis=0)[None, :] + eps)
        for _ in range(1, iterations):
            square = tl.div_rn(square, tl.sum(square, axis=1)[:, None] + eps)
            square = tl.div_rn(square, tl.sum(square, axis=0)[None, :] + eps)
        tl.store(out + row * width + at, square, mask=inside)


@triton.jit
def sum_streams(streams, weights, out, num_columns, stride, COUNT: tl.constexpr, WEIGHTED: tl.constexpr,
                TILE: tl.constexpr):  # fmt: skip
    """out [R, H]: the sum of streams [R, COUNT * H] by the first COUNT weights [R, stride]; not WEIGHTED: their
    mean."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_columns
    total = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(COUNT):
        stream = tl.load(streams + (row * COUNT + i) * num_columns + column, mask=inside, other=0.0)
        if WEIGHTED:
            total += stream * tl.load(weights + row * stride + i)
        else:
            total += stream
    if not WEIGHTED:
        total = tl.div_rn(total, tl.zeros((TILE,), tl.float32) + COUNT)
    tl.store(out + row * num_columns + column, total, mask=inside)


@triton.jit
def mix_streams(streams, x, weights, out, num_columns, width, COUNT: tl.constexpr, MIXED: tl.constexpr,
                TILE: tl.constexpr):  # fmt: skip
    """out [R, COUNT * H]: stream k = weights[COUNT + k] * x + sum over j of weights[(2 + j) COUNT + k] * stream j; not
    MIXED: + stream k. weights [R, width]."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(2)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_columns
    own = weights + row * width + k
    total = tl.load(own + COUNT) * tl.load(x + row * num_columns + column, mask=inside, other=0.0)
    if MIXED:
        for j in tl.static_range(COUNT):
            stream = tl.load(streams + (row * COUNT + j) * num_columns + column, mask=inside, other=0.0)
            total += tl.load(own + (2 + j) * COUNT) * stream
    else:
        total += tl.load(streams + (row * COUNT + k) * num_columns + column, mask=inside, other=0.0)
    tl.store(out + (row * COUNT + k) * num_columns + column, total, mask=inside)
