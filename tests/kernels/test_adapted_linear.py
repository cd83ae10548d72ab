"""Products with LoRA adapters: values, row invariance, and rows without an adapter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from native_ops import (
    FORMS,
    PATHS,
    Array,
    backend,
    random_matrix,
    reference_weight,
    run_native,
    run_reference,
    single_rows,
)

from headstart.core import LoraFactors, StepPlan

IN, OUT = 600, 1100
"""More than one part of the inputs and one segment of the outputs (csrc/lora_steps.cpp)."""
SLOTS = np.array([0, -1, 2, 0, 1, 2, -1, 0, 0], np.int32)  # slot 1 has no adapter for the first matrix


def factors(num_in: int, num_out: int, rank: int, seed: int) -> LoraFactors:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((rank, num_in)), rng.standard_normal((num_out, rank))
    return LoraFactors((a / num_in**0.5).astype(np.float32), (b / rank**0.5).astype(np.float32))


ADAPTERS = [factors(IN, OUT, 8, 0), None, factors(IN, OUT, 40, 1)]
OTHERS = [factors(IN, OUT, 4, 2), factors(IN, OUT, 16, 3), None]


def plan_of_rows(rows: Array, *, slots: Array | None = SLOTS) -> StepPlan:
    return replace(single_rows(rows), adapter_slots=None if slots is None else slots[rows])


def gated_program(owner: Any, weights: tuple[Any, Any], *, adapted: bool = True) -> Any:
    tables = [owner.lora_table(IN, OUT, each) for each in (ADAPTERS, OTHERS)]

    def code(ops: Any, step: Any) -> dict[str, Any]:
        if adapted:
            parts = [ops.adapted_linear(step.hidden, w, None, table) for w, table in zip(weights, tables, strict=True)]
        else:
            parts = [ops.linear(step.hidden, w) for w in weights]
        return {"y": ops.activate_mul(*parts), "up": parts[1]}

    return code


def inputs() -> Array:
    return np.random.default_rng(9).standard_normal((len(SLOTS), IN)).astype(np.float32)


def two_matrices(form: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    return random_matrix(FORMS[form], OUT, IN, rng), random_matrix(FORMS[form], OUT, IN, rng)


@pytest.mark.parametrize("path", PATHS)
def test_adapted_product_matches_float64(path: str) -> None:
    x, rows, pair = inputs(), np.arange(len(SLOTS)), two_matrices("F32")
    native = backend(path)
    found = run_native(native, gated_program(native, pair), plan_of_rows(rows), x)["up"]
    plain = run_native(native, gated_program(native, pair, adapted=False), plan_of_rows(rows), x)["up"]
    for row, slot in enumerate(SLOTS):
        added = np.zeros(OUT)
        if slot >= 0 and (own := OTHERS[slot]) is not None:
            added = own.b.astype(np.float64) @ (own.a.astype(np.float64) @ x[row])
        np.testing.assert_allclose(found[row], plain[row] + added, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["F32", "BF16", "Q8-32-f16", "Q4-32-f16", "Q6-16-i8"])
def test_rows_are_independent_of_the_batch(path: str, form: str) -> None:
    """Holds for rows without an adapter as well, which other passes compute without these steps."""
    x, pair, native = inputs(), two_matrices(form), backend(path)
    everything = np.arange(len(SLOTS))
    whole = run_native(native, gated_program(native, pair), plan_of_rows(everything), x)["y"].copy()
    for rows in (np.array([4]), np.array([8, 2, 1]), np.array([1, 6]), np.array([3, 0, 7, 5])):
        np.testing.assert_array_equal(
            run_native(native, gated_program(native, pair), plan_of_rows(rows), x[rows])["y"], whole[rows]
        )
    plain = run_native(native, gated_program(native, pair, adapted=False), plan_of_rows(everything, slots=None), x)["y"]
    np.testing.assert_array_equal(whole[SLOTS < 0], plain[SLOTS < 0])
    without = run_native(native, gated_program(native, pair), plan_of_rows(everything, slots=None), x)["y"]
    np.testing.assert_array_equal(without, plain)


def test_adapted_lm_head_uses_the_adapters_of_logit_rows() -> None:
    """Also on the reference backend."""
    native, x = backend(PATHS[0]), inputs()
    weight = two_matrices("F32")[0]
    plan = replace(plan_of_rows(np.arange(len(SLOTS))), logit_rows=np.array([2, 4, 7], np.int32))

    def code(owner: Any, w: Any) -> Any:
        table = owner.lora_table(IN, OUT, ADAPTERS)
        return lambda ops, step: {"y": ops.adapted_linear(ops.take_rows(step.hidden, step.logit_rows), w, None, table)}

    found = run_native(native, code(native, weight), plan, x)["y"]
    whole = run_native(native, gated_program(native, (weight, weight)), plan_of_rows(np.arange(len(SLOTS))), x)
    assert found.shape == (3, OUT) and not np.array_equal(found[0], whole["up"][2])
    from headstart.kernels.reference.backend import ReferenceBackend

    reference = run_reference(code(ReferenceBackend(dtype="float64"), reference_weight(weight)), plan, x)["y"]
    np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-4)


def test_invalid_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"A must be \[rank, in\] and B \[out, rank\]"):
        backend(PATHS[0]).lora_table(IN, OUT, [factors(IN, OUT + 1, 8, 0)])
