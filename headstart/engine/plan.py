"""From rows wanted to the StepPlan of a pass; networks differ in two declared facts only.

Plain Python up to the arrays: a decode step has a handful of rows, for which numpy's calls cost more than their work.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from headstart.core import Paths, Rows, Span, StepPlan


def build_plan(rows: Seq[Rows], block_size: int, first_position: int = 0, behind: int | None = None) -> StepPlan:
    """Lay out the rows of a network (see layers.network). `behind`: the row at position q reads the hidden state stored
    at q - behind; None: rows read none."""
    tables = np.zeros((len(rows), max([len(part.sequence.block_table) for part in rows])), np.int32)
    row_starts, reach, bent = [0], behind or 0, False
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    hidden_slots: list[int] = []
    logit_rows: list[int] = []
    for i, part in enumerate(rows):
        table, start, end = part.sequence.block_table, part.start, part.start + len(part.token_ids)
        tables[i, : len(table)] = table
        token_ids += part.token_ids
        positions += range(start, end)
        row_starts.append(len(positions))
        bent = bent or part.sees is not None or part.parents is not None
        logit_rows += range(len(positions) - part.num_logits, len(positions))
        places = [table[at // block_size] * block_size + at % block_size for at in range(start - reach, end)]
        slots += places[reach:] if reach else places
        if behind is not None:
            hidden_slots += places[: end - start]
    plan = StepPlan(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        row_starts=np.array(row_starts, np.int32),
        block_tables=tables,
        logit_rows=np.array(logit_rows, np.int32),
        first_position=first_position,
        hidden_slots=None if behind is None else np.array(hidden_slots, np.int32),
        block_size=block_size,
    )
    if bent:
        _bend(plan, rows)
    return plan


def _bend(plan: StepPlan, rows: Seq[Rows]) -> None:
    """What differs where rows see further than themselves, or are a tree (see core.Rows)."""
    plan.sees = plan.positions.copy()
    starts, slots = [0], list[int]()
    for part, row in zip(rows, plan.row_starts.tolist(), strict=False):
        count = len(part.token_ids)
        if part.sees is not None:
            plan.sees[row : row + count] = part.sees
        lines: list[list[int]] = []  # a tree's rows from its root on
        for i, parent in enumerate(part.parents or ()):
            lines.append([*(lines[parent] if parent >= 0 else ()), row + i])
            slots += plan.slots[lines[i]].tolist()
            starts.append(len(slots))
            plan.sees[row + i] = plan.positions[row + i] = part.start + len(lines[i]) - 1
        starts += [len(slots)] * (count - len(lines))
    if slots:
        plan.paths = Paths(np.array(starts, np.int32), np.array(slots, np.int32))


def span_rows(span: Span) -> Rows:
    """The trunk's rows of a scheduled span: committed tokens not yet computed, then the draft."""
    sequence, prompt_logprobs = span.sequence, span.sequence.prompt_logprobs
    pending = sequence.tokens[span.start : span.start + span.num_rows]
    token_ids = pending + sequence.draft.tokens[: span.num_rows - len(pending)]
    wants_all = prompt_logprobs is not None and sequence.num_prompt_logprobs < sequence.num_prompt - 1
    return Rows(sequence, span.start, token_ids, len(token_ids) if wants_all else span.num_sample)
