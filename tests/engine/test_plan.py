"""Step plans, compared with their definition row by row."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from headstart.core import Request, Rows, SamplingParams, Sequence
from headstart.engine.runner import build_plan

SIZE = 4


def rows_of(name: int, blocks: list[int], start: int, length: int, num_logits: int) -> Rows:
    request = Request(request_id="r", prompt_ids=(1,), params=SamplingParams(), seed=0, stop_ids=frozenset())
    sequence = Sequence(request, 0, list(range(100 * name, 100 * name + SIZE * len(blocks))), name)
    sequence.block_table.extend(blocks)
    return Rows(sequence, start, sequence.tokens[start : start + length], num_logits)


SHAPES = (([7], 1, 1, 1), ([5, 0, 9], 3, 9, 2), ([2, 3], 4, 2, 0), ([6], 2, 2, 2))
PARTS = tuple(rows_of(name, *shape) for name, shape in enumerate(SHAPES, 1))


@pytest.mark.parametrize("first_position", [0, 1])
@pytest.mark.parametrize("parts", [PARTS, PARTS[:1], PARTS[::-1]], ids=["four", "one", "reversed"])
def test_plan_has_slots_and_positions_of_every_row(parts: tuple[Rows, ...], first_position: int) -> None:
    plan = build_plan(parts, SIZE, first_position=first_position, hidden_offset=first_position or None)
    row, logit_rows = 0, []
    for i, part in enumerate(parts):
        blocks, last = part.sequence.block_table.tolist(), part.start + len(part.token_ids)
        assert plan.row_starts[i] == row
        assert plan.block_tables[i].tolist() == blocks + [0] * (plan.block_tables.shape[1] - len(blocks))
        for position in range(part.start, last):
            assert plan.token_ids[row] == part.sequence.tokens[position] and plan.positions[row] == position
            assert plan.slots[row] == blocks[position // SIZE] * SIZE + position % SIZE
            if first_position:
                before = position - 1
                assert plan.hidden_slots[row] == blocks[before // SIZE] * SIZE + before % SIZE
            row += 1
        logit_rows += range(row - part.num_logits, row)
    assert (plan.num_rows, plan.row_starts[-1]) == (row, row) and plan.logit_rows.tolist() == logit_rows
    assert (plan.hidden_slots is None) == (first_position == 0)
    assert (plan.first_position, plan.block_size) == (first_position, SIZE)
    assert {a.dtype for a in vars(plan).values() if isinstance(a, np.ndarray)} == {np.dtype(np.int32)}


def test_block_rows_see_the_end_of_the_block() -> None:
    first, block = PARTS[0], replace(PARTS[1], visible_end=14)
    plan = build_plan((first, block), SIZE)
    assert plan.paths is None and plan.visible_end.tolist() == [1, *[14] * 9]
    assert plan.positions.tolist() == [1, *range(3, 12)]


def test_tree_rows_have_the_paths_of_their_ancestors() -> None:
    """Two candidates follow position 2, and two more the first of these; slots are consecutive, positions are not."""
    chain, tree = PARTS[0], replace(rows_of(2, [5, 0, 9], 3, 5, 5), parents=(-1, -1, 0, 0, 2))
    plan = build_plan((tree, chain), SIZE)
    assert plan.positions.tolist() == [3, 3, 4, 4, 5, 1] and plan.slots.tolist()[:5] == [23, 0, 1, 2, 3]
    paths = [plan.paths.slots[a:b].tolist() for a, b in pairwise(plan.paths.starts)]
    assert paths == [[], [0], [23, 1], [23, 2], [23, 1, 3], []]  # the first row has the slot that a chain would use
    assert plan.visible_end.tolist() == plan.positions.tolist()
