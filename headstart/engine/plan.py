"""From rows wanted to the StepPlan of a pass; networks differ in two declared facts only.

Plain Python up to the arrays: a decode step has a handful of rows, for which numpy's calls cost more than their work.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from headstart.core import Rows, Span, StepPlan


def build_plan(rows: Seq[Rows], block_size: int, *, first_position: int = 0, behind: int | None = None) -> StepPlan:
    """Lay out the rows of a network (see layers.network). `behind`: the row at position q reads the hidden state stored
    at q - behind; None: rows read none."""
    tables = np.zeros((len(rows), max([len(part.sequence.block_table) for part in rows])), np.int32)
    row_starts, context_lens, reach = [0], [], behind or 0
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
        context_lens.append(end)
        logit_rows += range(len(positions) - part.num_logits, len(positions))
        places = [table[at // block_size] * block_size + at % block_size for at in range(start - reach, end)]
        slots += places[reach:]
        hidden_slots += places[: end - start]
    return StepPlan(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        row_starts=np.array(row_starts, np.int32),
        context_lens=np.array(context_lens, np.int32),
        block_tables=tables,
        logit_rows=np.array(logit_rows, np.int32),
        first_position=first_position,
        hidden_slots=None if behind is None else np.array(hidden_slots, np.int32),
        block_size=block_size,
    )


def span_rows(span: Span) -> Rows:
    """The trunk's rows of a scheduled span: committed tokens not yet computed, then the draft."""
    sequence, prompt_logprobs = span.sequence, span.sequence.request.params.prompt_logprobs
    pending = sequence.tokens[span.start : span.start + span.num_rows]
    token_ids = pending + sequence.draft.tokens[: span.num_rows - len(pending)]
    wants_all = prompt_logprobs is not None and sequence.num_prompt_logprobs < sequence.num_prompt - 1
    return Rows(sequence, span.start, token_ids, len(token_ids) if wants_all else span.num_sample)
