"""Selections of indexers on the cuda backend: compared with `reference`, and row-invariant bit for bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_ops import REFERENCE, Code, floats, plan_of, rng, run, single_row

from headstart.core import StepPlan
from headstart.kernels.ops import AttentionSpec, Ops, StepInputs
from headstart.kernels.specs import CandidateSpec, IndexSpec

pytestmark = pytest.mark.slow
SPEC = AttentionSpec(4, 2, 8, 0.35)
SLOTS, WIDTH = 256, 8
SELECTIONS = {
    "windows": IndexSpec(3, 8, 2, 3, whole=True),
    "local windows for two groups": IndexSpec(4, 8, 2, 4, whole=True, local=True, groups=2),
    "blocks": IndexSpec(2, 8, 3, 4),
    "among candidates": IndexSpec(3, 8, 4, 2, candidates=CandidateSpec(3, 3, False)),
    "fewer candidates than are selected": IndexSpec(3, 8, 9, 1, candidates=CandidateSpec(2, 4, False)),
}


def selection_program(on: Any, spec: IndexSpec, plan: StepPlan, *, blocks: bool) -> Code:
    """A program with attention to selected positions over earlier keys and values; one key of the indexer is NaN."""
    sizes = (4 * 8, spec.num_heads * 8, spec.num_heads * 8, spec.num_heads)
    q, index_queries, others, shares = (on.weight(floats(size, WIDTH), precise=True) for size in sizes)
    pools = [on.kv_pool(SLOTS, each) for each in (SPEC, spec)]
    stored = (pools[0].keys, pools[0].values, pools[1].keys)
    for kept in stored:
        kept.copy_(torch.from_numpy(rng().standard_normal(kept.shape)))
    pools[1].keys[plan.block_tables[0][2] * plan.block_size + 1] = torch.nan

    def code(ops: Ops, step: StepInputs) -> dict[str, Any]:
        queries, weights = ops.linear(step.hidden, index_queries), ops.linear(step.hidden, shares)
        if blocks:
            ops.select_blocks(queries, pools[1], spec)
        else:
            if spec.candidates:
                source = replace(spec, candidates=replace(spec.candidates, source=True))
                ops.select_positions(ops.linear(step.hidden, others), weights, pools[1], source)
            ops.select_positions(queries, weights, pools[1], spec)
        return {"y": ops.attend(ops.linear(step.hidden, q), pools[0], SPEC, None, pools[1])}

    return code


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_match_reference(name: str, first: int, cuda: Any) -> None:
    """Two sequences, one with more windows than can be selected and one with few; positions start at 0 or 1."""
    spec, plan = SELECTIONS[name], plan_of([(33, 5), (2, 4)], first_position=first)
    hidden = rng().standard_normal((plan.num_rows, WIDTH)).astype(np.float32)
    codes = [selection_program(on, spec, plan, blocks=name == "blocks") for on in (REFERENCE, cuda)]
    wanted, outputs = (run(on, code, plan, hidden)["y"] for on, code in zip((REFERENCE, cuda), codes, strict=True))
    assert np.allclose(outputs, wanted, rtol=2e-4, atol=1e-5)
    alone = single_row(plan, 3)
    alone.first_position = first
    assert np.array_equal(run(cuda, codes[1], alone, hidden[3:4])["y"][0], outputs[3])
