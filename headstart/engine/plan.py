"""From rows wanted to the StepPlan of a pass; the trunk and a head's catch-up differ in two declared facts only."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from headstart.core import Int32, Int64, Rows, Span, StepPlan


def build_plan(rows: Seq[Rows], block_size: int, *, first_position: int = 0) -> StepPlan:
    """Lay out the rows. `first_position` 1 makes it a head's plan: row q reads the hidden state stored at q - 1."""
    lengths = np.array([len(part.token_ids) for part in rows])
    row_starts = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.concatenate([np.arange(part.start, part.start + len(part.token_ids)) for part in rows])
    tables = np.zeros((len(rows), max(len(part.sequence.block_table) for part in rows)), np.int32)
    for i, part in enumerate(rows):
        tables[i, : len(part.sequence.block_table)] = part.sequence.block_table
    owner = np.repeat(np.arange(len(rows)), lengths)

    def slots(at: Int64) -> Int32:
        found: Int32 = (tables[owner, at // block_size] * block_size + at % block_size).astype(np.int32)
        return found

    logits = [np.arange(end - part.num_logits, end) for part, end in zip(rows, row_starts[1:], strict=True)]
    return StepPlan(
        token_ids=np.concatenate([np.asarray(part.token_ids, np.int32) for part in rows]),
        positions=positions.astype(np.int32),
        slots=slots(positions),
        row_starts=row_starts.astype(np.int32),
        context_lens=(positions[row_starts[1:] - 1] + 1).astype(np.int32),
        block_tables=tables,
        logit_rows=np.concatenate(logits).astype(np.int32),
        first_position=first_position,
        hidden_slots=slots(positions - 1) if first_position else None,
        block_size=block_size,
    )


def span_rows(span: Span) -> Rows:
    """The trunk's rows of a scheduled span: committed tokens not yet computed, then the draft."""
    sequence, prompt_logprobs = span.sequence, span.sequence.request.params.prompt_logprobs
    pending = sequence.tokens[span.start : span.start + span.num_rows]
    token_ids = pending + sequence.draft.tokens[: span.num_rows - len(pending)]
    wants_all = prompt_logprobs is not None and sequence.num_prompt_logprobs < sequence.num_prompt - 1
    return Rows(sequence, span.start, token_ids, len(token_ids) if wants_all else span.num_sample)
