"""Selections of an indexer: ties, NaN, many positions, and all positions. test_native_rows has the other tests."""

from typing import Any

import numpy as np
import pytest
from checkpoints import as_tensors
from native_ops import FORMS, PATHS, Array, Part, assert_same_bits, backend, plan_of, random_matrix, run_native
from test_native_rows import AttentionHarness

from headstart.kernels.ops import AttentionSpec
from headstart.kernels.reference.backend import ReferenceBackend
from headstart.kernels.specs import IndexSpec

TOP = 5
paths = pytest.mark.parametrize("path", PATHS)


def selected_positions(on: Any, scores: Array, first: int) -> list[list[int]]:
    """Positions that each of the rows first, first + 1, ... selects, where index keys are the scores."""
    count = len(scores)
    spec, index = AttentionSpec(1, 1, 4, 1.0, count), IndexSpec(1, 1, TOP)
    pools = [on.kv_pool((count + 40) // 16 * 16, each) for each in (spec, index)]
    arrays = {"q": np.zeros((count, 4)), "v": np.eye(count), "w": np.ones((count, 1)), "k": scores[:, None]}
    tables = [on.weight(tensor, precise=True) for tensor in as_tensors(arrays).values()]

    def code(ops: Any, step: Any) -> dict[str, Any]:
        q, v, weights, keys = (ops.embed(table, step.token_ids) for table in tables)
        ops.store_index(keys, pools[1], index)
        ops.store_kv(q, v, pools[0], spec)
        ops.select_positions(weights, weights, pools[1], index)
        return {"y": ops.attend(q, pools[0], spec, None, pools[1])}

    table = np.arange((count + 40) // 16)[::-1]
    plan = plan_of([Part(np.arange(count), first, table)], first_position=first)
    plan.hidden_slots = None
    found = on.run(on.prepare(code), plan)["y"]
    return [np.flatnonzero(np.asarray(row) > 0.5 / count).tolist() for row in found]


NUMBERS = {
    "a few values": np.tile([1.0, 3.0, 0.0, 2.0, 3.0, 1.0], 9), "equal": np.full(50, 2.0),
    "none above 0": -np.arange(50.0) - 1,  # each scores 0
    "signed zeros": np.tile([0.0, -0.0, -1.0], 17),
    "NaN": np.where(np.arange(50) % 3 == 0, np.nan, np.arange(50.0) % 7),
    "one number": np.where(np.arange(50) == 40, 1.0, np.nan),
    "infinite": np.where(np.arange(50) % 4 == 0, np.inf, np.arange(50.0)),
}  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", NUMBERS)
def test_ties_select_the_lowest_position(kind: str, first: int) -> None:
    scores = NUMBERS[kind]
    best = np.where(np.isnan(scores), -np.inf, np.maximum(scores, 0))
    expected = [sorted(np.argsort(-best[: row + 1], kind="stable")[:TOP].tolist()) for row in range(len(scores))]
    assert selected_positions(ReferenceBackend(dtype="float64"), scores, first) == expected
    for path in PATHS:
        assert selected_positions(backend(path, 2), scores, first) == expected, path


@pytest.mark.slow
@paths
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("first", [0, 1])
def test_selecting_all_positions_equals_dense_attention(path: str, kv_dtype: str, first: int) -> None:
    plain, selecting = (
        AttentionHarness(path, kv_dtype, sinks=True),
        AttentionHarness(path, kv_dtype, sinks=True, top_k=70),
    )
    plan = plan_of([Part(np.arange(90), first, plain.table())], first_position=first)
    plan.hidden_slots = None
    selecting.tables[:3], selecting.sinks = plain.tables, plain.sinks
    selecting.reset_pools()
    dense, found = plain.run(plan, 2), selecting.run(plan, 1)
    assert_same_bits({"y": found[:70]}, {"y": dense[:70]})
    assert not np.array_equal(found[70:], dense[70:])


@pytest.mark.slow
@paths
def test_selection_from_many_positions_is_independent_of_threads(path: str) -> None:
    """Scores of several segments, computed by several threads, equal those of one thread and other passes bit for
    bit."""
    rng, count = np.random.default_rng(0), 1100
    spec, index = AttentionSpec(50, 1, 20, 0.2, 16, latent=True), IndexSpec(9, 17, 130)
    widths = (50 * 20, 20, 9 * 17, 9, 17)
    tables = [random_matrix(FORMS["F32"], count, width, rng) for width in widths]

    def run(threads: int, spans: list[tuple[int, int]]) -> Array:
        worker = backend(path, threads)
        pools = [worker.kv_pool(80 * 16, each) for each in (spec, index)]

        def code(ops: Any, step: Any) -> dict[str, Any]:
            q, k, queries, weights, keys = (ops.embed(table, step.token_ids) for table in tables)
            ops.store_index(keys, pools[1], index)
            ops.select_positions(queries, weights, pools[1], index)
            ops.store_kv(k, ops.embed(values, step.token_ids), pools[0], spec)
            return {"y": ops.attend(q, pools[0], spec, None, pools[1])}

        plans = [plan_of([Part(np.arange(*span), span[0], blocks)]) for span in spans]
        return np.concatenate([run_native(worker, code, plan)["y"] for plan in plans])

    blocks, values = rng.permutation(80)[:70], random_matrix(FORMS["F32"], count, 16, rng)
    whole = run(3, [(0, count)])
    assert_same_bits({"y": run(1, [(0, 1020), (1020, 1021), (1021, 1030), (1030, count)])}, {"y": whole})
