"""Triton kernels for recurrent layers (see StateSteps of core.py).

A sequence is processed row by row, kept rows first, by the same code in prefill and decoding. States are read and
written by slot, so accepting a draft copies nothing. Rows of the pass are in `new` tensors, kept rows in `kept`
[owned, num_kept, W].
"""

import triton
import triton.language as tl

from headstart.kernels.cuda.kernels.rows import sigmoid

EPSILON = tl.constexpr(1e-6)  # epsilon of the L2 norms of q and k (Ops.gated_delta)


@triton.jit
def select_row(new, new_at, kept, kept_at, is_new, inside):
    """Elements of a new row if is_new, else of a kept row."""
    ours = tl.load(new + new_at, mask=inside & is_new, other=0.0)
    return tl.where(is_new, ours, tl.load(kept + kept_at, mask=inside & (is_new == 0), other=0.0))


@triton.jit
def sequence_start(sequence, row_starts, positions, starts):
    """(first row of a sequence in the pass, number of kept rows replayed before it)."""
    first = tl.load(row_starts + sequence)
    return first, tl.load(positions + first) - tl.load(starts + sequence)


@triton.jit
def input_of(at, x, states, kept, first, replayed, own, read, num_kept, channel, inside, CHANNELS: tl.constexpr,
             WIDTH: tl.constexpr):  # fmt: skip
    """Input of a convolution `at` rows after the state; at < 0: an input stored in the state."""
    row = (first + at - replayed).to(tl.int64)
    kept_row = own * num_kept + at
    value = select_row(x, row * CHANNELS + channel, kept, kept_row * CHANNELS + channel, at >= replayed,
                   inside & (at >= 0))  # fmt: skip
    before = (read * (WIDTH - 1) + WIDTH - 1 + at) * CHANNELS + channel
    return tl.where(at < 0, tl.load(states + before, mask=inside & (at < 0) & (read >= 0), other=0.0), value)


@triton.jit(do_not_specialize=["num_kept"])
def conv(
    x, weight, bias, states, kept, out, positions, sequences, row_starts, owns, reads, starts, num_kept,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out [R, C]: the sum of a row's last WIDTH inputs times taps [WIDTH, C], oldest first, plus bias [C]."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < CHANNELS
    sequence = tl.load(sequences + row)
    first, replayed = sequence_start(sequence, row_starts, positions, starts)
    own, read = tl.load(owns + sequence).to(tl.int64), tl.load(reads + sequence).to(tl.int64)
    total = tl.zeros((TILE,), tl.float32)
    for j in tl.static_range(WIDTH):
        at = row - first + replayed - (WIDTH - 1) + j
        tap = tl.load(weight + j * CHANNELS + channel, mask=inside, other=0.0)
        total += tap * input_of(at, x, states, kept, first, replayed, own, read, num_kept, channel, inside, CHANNELS,
                                WIDTH)  # fmt: skip
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64) * CHANNELS + channel, total, mask=inside)


@triton.jit(do_not_specialize=["num_kept"])
def conv_states(
    x, states, kept, out, positions, row_starts, owns, reads, starts, store_sequences, store_positions, num_kept,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out [stores, WIDTH - 1, C]: the inputs before each stored position. Copied to their slots later: other programs
    still read the old states."""
    store, m = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = channel < CHANNELS
    sequence = tl.load(store_sequences + store)
    first, replayed = sequence_start(sequence, row_starts, positions, starts)
    own, read = tl.load(owns + sequence).to(tl.int64), tl.load(reads + sequence).to(tl.int64)
    at = tl.load(store_positions + store) - tl.load(starts + sequence) - (WIDTH - 1) + m
    value = input_of(at, x, states, kept, first, replayed, own, read, num_kept, channel, inside, CHANNELS, WIDTH)
    tl.store(out + (store.to(tl.int64) * (WIDTH - 1) + m) * CHANNELS + channel, value, mask=inside)


@triton.jit(do_not_specialize=["num_kept"])
def keep(x, owns, places, kept, num_kept, num_columns, offset, row_width, TILE: tl.constexpr):
    """Write row r into kept row places[r] of slot owns[r] (-1: not kept), from column `offset` on."""
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = tl.load(owns + row).to(tl.int64)
    inside = (column < num_columns) & (own >= 0)
    target = (own * num_kept + tl.load(places + row)) * row_width + offset + column
    values = tl.load(x + row.to(tl.int64) * num_columns + column, mask=inside, other=0.0)
    tl.store(kept + target, values, mask=inside)


@triton.jit
def segment_end(i, stores_end, store_positions, starts, sequence, end):
    """Row before which the state of store i is taken; behind the last store the end of the sequence's rows."""
    stored = tl.load(store_positions + i, mask=i < stores_end, other=0) - tl.load(starts + sequence)
    return tl.where(i < stores_end, stored, end)


@triton.jit
def delta_step(
    state, t, qkv, log_decay, strength, kept, out, first, replayed, kept_first, head, key_head, k, v, is_k, is_v,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """The state [KEY_TILE, VALUE_TILE] after row t; writes the output of a new row to `out`."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    decays: tl.constexpr = HEADS * KEY_DIM if BY_CHANNEL else HEADS
    width: tl.constexpr = channels + decays + HEADS
    is_new = t >= replayed
    row, kept_row = (first + t - replayed).to(tl.int64), (kept_first + t) * width
    q_at, v_at = key_head * KEY_DIM + k, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    k_at = KEY_HEADS * KEY_DIM + q_at
    query = select_row(qkv, row * channels + q_at, kept, kept_row + q_at, is_new, is_k)
    key = select_row(qkv, row * channels + k_at, kept, kept_row + k_at, is_new, is_k)
    value = select_row(qkv, row * channels + v_at, kept, kept_row + v_at, is_new, is_v)
    decay_at = head * KEY_DIM + k if BY_CHANNEL else head
    decay = select_row(log_decay, row * decays + decay_at, kept, kept_row + channels + decay_at, is_new,
                       is_k if BY_CHANNEL else head >= 0)  # fmt: skip
    power = select_row(strength, row * HEADS + head, kept, kept_row + channels + decays + head, is_new, head >= 0)
    query = tl.div_rn(query, tl.sqrt_rn(tl.sum(query * query, axis=0) + EPSILON)) * KEY_DIM**-0.5
    key = tl.div_rn(key, tl.sqrt_rn(tl.sum(key * key, axis=0) + EPSILON))
    state = state * (tl.exp(decay)[:, None] if BY_CHANNEL else tl.exp(decay))
    known = tl.sum(state * key[:, None], axis=0)
    state += key[:, None] * ((value - known) * sigmoid(power))[None, :]
    read = tl.sum(state * query[:, None], axis=0)
    tl.store(out + row * (HEADS * VALUE_DIM) + head * VALUE_DIM + v, read, mask=is_v & is_new)
    return state


@triton.jit(do_not_specialize=["num_kept"])
def gated_delta(
    qkv, log_decay, strength, states, kept, out, positions, row_starts, owns, reads, starts, store_starts,
    store_positions, store_slots, num_kept,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILED: tl.constexpr,
    BY_CHANNEL: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    """Ops.gated_delta; states [slots, HEADS, KEY_DIM, VALUE_DIM]. One program per sequence, head and tile of values."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    if tl.load(row_starts + sequence) == tl.load(row_starts + sequence + 1):
        return  # padding of the bucket
    first, replayed = sequence_start(sequence, row_starts, positions, starts)
    k, v = tl.arange(0, KEY_TILE), tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    is_k, is_v = k < KEY_DIM, v < VALUE_DIM
    inside = is_k[:, None] & is_v[None, :]
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    at = k[:, None] * VALUE_DIM + v[None, :]
    read = tl.load(reads + sequence).to(tl.int64)
    size: tl.constexpr = KEY_DIM * VALUE_DIM
    state = tl.load(states + (read * HEADS + head) * size + at, mask=inside & (read >= 0), other=0.0)
    kept_first = tl.load(owns + sequence).to(tl.int64) * num_kept
    num_done, end = 0, tl.load(row_starts + sequence + 1) - first + replayed
    stores_end = tl.load(store_starts + sequence + 1)
    for i in range(tl.load(store_starts + sequence), stores_end + 1):
        until = segment_end(i, stores_end, store_positions, starts, sequence, end)
        for t in range(num_done, until):
            state = delta_step(state, t, qkv, log_decay, strength, kept, out, first, replayed, kept_first, head,
                               key_head, k, v, is_k, is_v, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM,
                               BY_CHANNEL)  # fmt: skip
        slot = tl.load(store_slots + i, mask=i < stores_end, other=0).to(tl.int64)
        tl.store(states + (slot * HEADS + head) * size + at, state, mask=inside & (i < stores_end))
        num_done = until


@triton.jit
def scan_step(
    state, t, xbc, steps, kept, out, first, replayed, kept_first, head, group, rate, skip, n, p, is_n, is_p,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The state [STATE_TILE, TILE] of selective_scan after row t; writes the output of a new row to `out`."""
    inner: tl.constexpr = HEADS * DIM
    channels: tl.constexpr = inner + 2 * GROUPS * STATE
    is_new = t >= replayed
    row, kept_row = (first + t - replayed).to(tl.int64), (kept_first + t) * (channels + HEADS)
    x_at, b_at = head * DIM + p, inner + group * STATE + n
    c_at = b_at + GROUPS * STATE
    x = select_row(xbc, row * channels + x_at, kept, kept_row + x_at, is_new, is_p)
    b = select_row(xbc, row * channels + b_at, kept, kept_row + b_at, is_new, is_n)
    c = select_row(xbc, row * channels + c_at, kept, kept_row + c_at, is_new, is_n)
    step = select_row(steps, row * HEADS + head, kept, kept_row + channels + head, is_new, head >= 0)
    state = state * tl.exp(rate * step) + b[:, None] * (x * step)[None, :]
    read = tl.sum(state * c[:, None], axis=0) + skip * x
    tl.store(out + row * inner + x_at, read, mask=is_p & is_new)
    return state


@triton.jit(do_not_specialize=["num_kept"])
def selective_scan(
    xbc, steps, rates, skips, states, kept, out, positions, row_starts, owns, reads, starts, store_starts,
    store_positions, store_slots, num_kept,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr, STATE_TILE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Ops.selective_scan; states [slots, HEADS, STATE, DIM]. One program per sequence, head and tile of columns."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    if tl.load(row_starts + sequence) == tl.load(row_starts + sequence + 1):
        return
    first, replayed = sequence_start(sequence, row_starts, positions, starts)
    n, p = tl.arange(0, STATE_TILE), tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_n, is_p = n < STATE, p < DIM
    inside = is_n[:, None] & is_p[None, :]
    group, at = head // (HEADS // GROUPS), n[:, None] * DIM + p[None, :]
    read = tl.load(reads + sequence).to(tl.int64)
    size: tl.constexpr = STATE * DIM
    state = tl.load(states + (read * HEADS + head) * size + at, mask=inside & (read >= 0), other=0.0)
    kept_first = tl.load(owns + sequence).to(tl.int64) * num_kept
    rate, skip = tl.load(rates + head), tl.load(skips + head)
    num_done, end = 0, tl.load(row_starts + sequence + 1) - first + replayed
    stores_end = tl.load(store_starts + sequence + 1)
    for i in range(tl.load(store_starts + sequence), stores_end + 1):
        until = segment_end(i, stores_end, store_positions, starts, sequence, end)
        for t in range(num_done, until):
            state = scan_step(state, t, xbc, steps, kept, out, first, replayed, kept_first, head, group, rate, skip, n,
                              p, is_n, is_p, GROUPS, HEADS, STATE, DIM)  # fmt: skip
        slot = tl.load(store_slots + i, mask=i < stores_end, other=0).to(tl.int64)
        tl.store(states + (slot * HEADS + head) * size + at, state, mask=inside & (i < stores_end))
        num_done = until
