"""Triton: what is decided between a pass and the drafts behind it, on the device. Integers only; a program has one
sequence of S.

`told` [7, S]: of each sequence its place in the loop's first pass, what is judged, and how deep its draft goes.
"""

import triton
import triton.language as tl

FIRST, JUDGED, ACCEPTED, DRAW, BASE, DEPTH, ROWS = (tl.constexpr(i) for i in range(7))
"""As in cuda/loop.py."""
POSITION = tl.constexpr(1)
"""As in kernels/sampling.py, of `ints`."""


@triton.jit(do_not_specialize=["num"])
def judge(told, drafted, draws, token_ids, slots, sees, logit_rows, ints, taken, num, MOST: tl.constexpr):
    """taken [S]: how many drafted tokens [S, MOST] equal what was drawn, from the first on, or as many as `told` says.
    The row of each token that stands gets it; rows behind those store and see nothing; logits are those of the last
    that stands. Sequences that are not judged (-1) have taken none."""
    sequence = tl.program_id(0)
    count = tl.load(told + JUDGED * num + sequence)
    accepted = tl.full((), 0, tl.int32)
    if count >= 0:
        i = tl.arange(0, MOST)
        at = tl.load(told + DRAW * num + sequence)
        draft = tl.load(drafted + sequence * MOST + i, mask=i < count, other=-1)
        drawn = tl.load(draws + at + i, mask=i <= count, other=-1).to(tl.int32)
        accepted = tl.min(tl.where((i < count) & (draft != drawn), i, count), axis=0)
        known = tl.load(told + ACCEPTED * num + sequence)
        accepted = tl.where(known >= 0, known, accepted)
        row = tl.load(told + FIRST * num + sequence) + tl.load(told + ROWS * num + sequence) + i
        tl.store(token_ids + row, tl.maximum(tl.where(i < accepted, draft, drawn), 0), mask=i <= accepted)
        nothing = tl.full((MOST,), -1, tl.int32)
        dropped = (i > accepted) & (i <= count)
        tl.store(slots + row, nothing, mask=dropped)
        tl.store(sees + row, nothing, mask=dropped)
        tl.store(logit_rows + row * 0 + sequence, row, mask=i == accepted)
    tl.store(taken + sequence, accepted)
    tl.store(ints + POSITION * num + sequence, (tl.load(told + BASE * num + sequence) + accepted).to(tl.int64))


@triton.jit(do_not_specialize=["num", "stride", "number", "before", "table_width"])
def advance(
    told, taken, drawn, first_tokens, tables, token_ids, positions, slots, sees, num, stride, number, before,
    table_width, block_size, first_position,
):  # fmt: skip
    """Rows of step `number` of the drafts: the token before it (column number - 1 of drawn [S, stride]; of the first
    pass where there is none), `before` rows behind the true ones. Drafts that are done store and see nothing."""
    sequence = tl.program_id(0)
    going = number < tl.load(told + DEPTH * num + sequence)
    position = tl.load(told + BASE * num + sequence) + tl.load(taken + sequence) + before
    position = tl.where(going, position, first_position)
    block = tl.load(tables + sequence.to(tl.int64) * table_width + position // block_size)
    slot = block * block_size + position % block_size
    own = tl.load(first_tokens + tl.load(told + FIRST * num + sequence))
    token = tl.load(drawn + sequence * stride + tl.maximum(number - 1, 0)).to(tl.int32)
    tl.store(token_ids + sequence, tl.where(number > 0, tl.maximum(token, 0), own))
    tl.store(positions + sequence, position)
    tl.store(slots + sequence, tl.where(going, slot, -1))
    tl.store(sees + sequence, tl.where(going, position, -1))
