"""Products recomputed exactly where an approximation is large, and logits of selected groups of tokens."""

from typing import Any

import native_ops as nat
import numpy as np
import pytest
import torch
from native_ops import FORMS, PATHS, Array, backend, random_matrix, reference_weight, run_native, single_rows

from headstart.kernels.ops import NEVER, REFINED

COLS = 70


def refined(path: str, weights: tuple[Any, Any], x: Array, count: int, *, reference: bool = False) -> dict[str, Array]:
    """Approximate, refined and exact products; the approximation reads the first half of x."""
    narrow, wide = (reference_weight(each) for each in weights) if reference else weights

    def code(ops: Any, step: Any) -> dict[str, Any]:
        approximate, again = ops.linear(step.hidden, narrow), ops.linear(step.hidden, narrow)
        exact = ops.linear(step.hidden, wide)
        return {"y": ops.refine(approximate, step.hidden, wide, count), "promised": again, "exact": exact}

    plan = single_rows(range(len(x)))
    return nat.run_reference(code, plan, x) if reference else run_native(backend(path), code, plan, x)


def two_matrices(form: str, rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)
    return random_matrix(FORMS["Q4-32-f16-min"], rows, COLS, rng), random_matrix(FORMS[form], rows, COLS, rng)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["F32", "Q8-32-f16", "Q4-16-i8-min"])
@pytest.mark.parametrize(("rows", "count"), [(300, 3), (33, 1), (64, 9)])
def test_largest_blocks_are_exact(path: str, form: str, rows: int, count: int) -> None:
    x = np.random.default_rng(0).standard_normal((9, COLS)).astype(np.float32)
    found = refined(path, two_matrices(form, rows), x, count)
    for row in range(len(x)):
        approximate = found["promised"][row]
        peaks = [approximate[at : at + REFINED].max() for at in range(0, rows, REFINED)]
        best = sorted(range(len(peaks)), key=lambda block: (-peaks[block], block))[:count]
        expected = np.where(np.isin(np.arange(rows) // REFINED, best), found["exact"][row], approximate)
        np.testing.assert_array_equal(found["y"][row], expected)


@pytest.mark.parametrize("path", PATHS)
def test_rows_are_independent_of_the_batch(path: str) -> None:
    weights = two_matrices("Q8-32-f16", 300)
    x = np.random.default_rng(1).standard_normal((129, COLS)).astype(np.float32)
    all_rows = refined(path, weights, x, 4)["y"].copy()
    for count in (1, 2, 7, 64, 128):
        shuffled = np.random.default_rng(count).permutation(len(x))[:count]
        np.testing.assert_array_equal(refined(path, weights, x[shuffled], 4)["y"], all_rows[shuffled])


def test_ties_refine_the_lower_block_on_both_backends() -> None:
    narrow, wide = two_matrices("F32", 160)
    narrow.data[:] = 0
    x = np.random.default_rng(2).standard_normal((3, COLS)).astype(np.float32)
    native, reference = (refined(PATHS[0], (narrow, wide), x, 2, reference=each)["y"] for each in (False, True))
    assert (native[:, 2 * REFINED :] == 0).all() and (native[:, : 2 * REFINED] != 0).all()
    np.testing.assert_allclose(native, reference, rtol=1e-4, atol=1e-4)


GROUPS, KEPT = 23, 4


@pytest.mark.parametrize("path", PATHS)
def test_logits_of_the_best_groups_are_kept(path: str) -> None:
    """With tied scores, for each row alone, in a batch, and in the reference."""
    rng = np.random.default_rng(5)
    wide, scores = random_matrix(FORMS["F32"], 300, COLS, rng), random_matrix(FORMS["F32"], GROUPS, COLS, rng)
    scores.data[:3] = scores.data[3]
    groups = rng.permutation(np.arange(300) % GROUPS)
    x = rng.standard_normal((65, COLS)).astype(np.float32)

    def found(rows: Array, *, reference: bool = False) -> dict[str, Array]:
        w, s = (reference_weight(each) if reference else each for each in (wide, scores))
        given = torch.from_numpy(groups) if reference else groups

        def code(ops: Any, step: Any) -> dict[str, Any]:
            logits, group_scores = ops.linear(step.hidden, w), ops.linear(step.hidden, s)
            kept = ops.keep_groups(ops.linear(step.hidden, w), ops.linear(step.hidden, s), given, KEPT)
            return {"y": kept, "logits": logits, "scores": group_scores}

        plan = single_rows(range(len(rows)))
        return nat.run_reference(code, plan, rows) if reference else run_native(backend(path), code, plan, rows)

    all_rows = {name: values.copy() for name, values in found(x).items()}
    for row, group_scores in enumerate(all_rows["scores"]):
        best = sorted(range(GROUPS), key=lambda group: (-group_scores[group], group))[:KEPT]
        expected = np.where(np.isin(groups, best), all_rows["logits"][row], np.float32(NEVER))
        np.testing.assert_array_equal(all_rows["y"][row], expected)
    np.testing.assert_array_equal(found(x[[7]])["y"], all_rows["y"][[7]])
    np.testing.assert_array_equal(found(x, reference=True)["y"] > NEVER, all_rows["y"] > np.float32(NEVER))


def test_invalid_counts_are_refused() -> None:
    narrow, wide = two_matrices("F32", 160)

    def code(ops: Any, step: Any) -> dict[str, Any]:
        return {"y": ops.refine(ops.linear(step.hidden, narrow), step.hidden, wide, 0)}

    with pytest.raises(Exception, match="at least one block"):
        run_native(backend(PATHS[0]), code, single_rows(range(1)), np.zeros((1, COLS), np.float32))
