"""Triton: what is done to rows one by one. Shapes: R rows, W columns."""

import triton
import triton.language as tl


@triton.jit
def norm(
    x, residual, weight, out, total, num_columns, eps, num_parts,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, TILE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """out [R, W] = x / rms(x) * weight by groups of WIDTH columns, of x + residual where there is one, whose sum goes
    to `total`. weight [num_parts, WIDTH]: group g has part g % num_parts. A program per row."""
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
    """out [R, W] = x less its row's mean."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < num_columns
    values = tl.load(x + row * num_columns + column, mask=inside, other=0.0)
    mean = tl.sum(values, axis=0) / num_columns
    tl.store(out + row * num_columns + column, values - mean, mask=inside)


@triton.jit
def rope(
    x, positions, cosines, sines, out, num_columns, behind,
    HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr,
    TRAILING: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Turn the heads of a row (see RopeSpec) by the row of cosines and sines [positions, ROTARY / 2] that is its
    position's. A program per row."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.maximum(tl.load(positions + row) - behind, 0)
    head, d = tl.arange(0, HEAD_TILE), tl.arange(0, TILE)
    inside = (head[:, None] < HEADS) & (d[None, :] < DIM)
    start = row * num_columns + head[:, None] * DIM
    own = tl.load(x + start + d[None, :], mask=inside, other=0.0)
    half = ROTARY // 2
    if TRAILING:  # neighbours turn together, in the last columns
        place = d - (DIM - ROTARY)
        turns = place >= 0
        angle, is_first = place // 2, place % 2 == 0
        other = tl.where(is_first, d + 1, d - 1)
    else:
        turns = d < ROTARY
        angle, is_first = d % half, d < half
        other = tl.where(is_first, d + half, d - half)
    turning = turns & (d < DIM)
    pair = tl.load(x + start + other[None, :], mask=inside & turning[None, :], other=0.0)
    table = position.to(tl.int64) * half + angle
    cos = tl.load(cosines + table, mask=turning, other=1.0)
    sin = tl.load(sines + table, mask=turning, other=0.0)
    if INVERSE:
        sin = -sin
    signed = tl.where(is_first, -sin, sin)
    turned = own * cos[None, :] + pair * signed[None, :]
    tl.store(out + start + d[None, :], tl.where(turning[None, :], turned, own), mask=inside)


@triton.jit
def scatter(x, slots, pool, num_columns, stride, TILE: tl.constexpr):
    """Row r of x [R, W] to row slots[r] of pool [slots, W], rows `stride` apart; a slot of -1 is nowhere."""
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
    """By e^-2|x|: nothing overflows."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = tl.div_rn(1.0 - small, 1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """An Activation of one factor."""
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
def limited(x, most):
    return tl.minimum(tl.maximum(x, -most), most)


@triton.jit
def gated(g, u, KIND: tl.constexpr):
    """An Activation of two factors (see kernels/ops.py)."""
    if KIND == "clamped":
        g = tl.minimum(g, 7.0)
        return g * sigmoid(1.702 * g) * (limited(u, 7.0) + 1.0)
    elif KIND == "silu_of_10":
        return activated(tl.minimum(g, 10.0), "silu") * limited(u, 10.0)
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
    """sigmoid(gate) * x; each gate serves `repeat` features side by side."""
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
    """rate * ln(1 + e^(x + bias)), by column."""
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = at < size
    column = at % num_columns
    made = softplus_of(tl.load(x + at, mask=inside, other=0.0) + tl.load(bias + column, mask=inside, other=0.0))
    if RATE:
        made = made * tl.load(rate + column, mask=inside, other=0.0)
    tl.store(out + at, made, mask=inside)
