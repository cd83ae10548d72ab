"""Mixtures of experts and head-wise matrices on the native backend: row invariance, and values of plain
computations."""

import ctypes
import mmap
from typing import Any

import native_ops as nat
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from native_ops import FORMS, PATHS, Array, backend, random_matrix, reference_weight, run_native, single_rows, values_of
from test_native_ops import assert_rows_independent, varied_rows

from headstart.formats.base import make_tensor
from headstart.kernels.native import packing
from headstart.kernels.native.backend import NativeBackend
from headstart.kernels.ops import Experts, RouterSpec
from headstart.kernels.reference.moe import route

WIDTH, INNER, OUT = 99, 71, 45
ROUTERS = {
    "softmax": RouterSpec(11, 3),
    "softmax as it is": RouterSpec(9, 9, normalize=False),
    "one expert": RouterSpec(5, 1, scale=0.5),
    "sigmoid": RouterSpec(7, 2, "sigmoid", scale=2.5),
    "groups": RouterSpec(24, 4, "sigmoid", scale=1.5, num_groups=8, top_groups=3),
    "some give back the row": RouterSpec(9, 4, normalize=False, num_identity=4),
    "groups of one": RouterSpec(6, 2, "sigmoid", num_groups=6, top_groups=4),
    "of what they read": RouterSpec(8, 3, "sigmoid", normalize=False, scales_inputs=True),
}
UNGATED = ("sigmoid", "one expert")


class Mixture:
    """Random experts with a router without near ties."""

    def __init__(self, spec: RouterSpec, form: str, seed: int, down: str | None = None, *, gated: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.out = WIDTH if spec.num_identity else OUT
        shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (self.out, INNER)}
        forms = {"gate": form, "up": form, "down": down or form}
        self.spec = spec
        gate, up, low = (
            tuple(random_matrix(FORMS[forms[name]], *shape, rng) for _ in range(spec.num_matrices))
            for name, shape in shapes.items()
        )
        self.experts = Experts(gate, up, low) if gated else Experts((), up, low, "relu2")
        self.router = random_matrix(FORMS["F32"], spec.num_experts, WIDTH, rng)
        self.bias = rng.standard_normal(spec.num_experts).astype(np.float32) * 0.3 if spec.num_groups > 1 else None

    def code(self, ops: Any, step: Any) -> dict[str, Any]:
        x = step.hidden
        mixed = ops.moe(x, ops.linear(x, self.router), self.bias, self.experts, self.spec)
        return {"mixed": mixed, "logits": ops.take_rows(mixed, step.logit_rows)}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
def test_moe_rows_are_independent_of_the_batch(path: str, form: str) -> None:
    index = list(FORMS).index(form)
    spec = list(ROUTERS.values())[index % len(ROUTERS)]
    mixture = Mixture(
        spec, form, index, down=list(FORMS)[index * 5 % len(FORMS)], gated=index % 3 > 0 or spec.scales_inputs
    )
    assert_rows_independent(
        path, mixture.code, varied_rows(WIDTH, np.random.default_rng(index)), index, (2, 3, 7, 31, 129)
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ROUTERS)
def test_moe_equals_weighted_sum_of_experts(path: str, name: str) -> None:
    """Compared with the experts run one by one, in several forms."""
    x = np.random.default_rng(3).standard_normal((9, WIDTH)).astype(np.float32)
    for form in ("F32", "BF16", "Q8-32-f16", "Q4-32-f16-min"):
        mixture = Mixture(ROUTERS[name], form, 4, gated=name not in UNGATED)

        def separate_experts(ops: Any, step: Any, experts: Experts = mixture.experts) -> dict[str, Any]:
            parts = {}
            for e, (up, down) in enumerate(zip(experts.up, experts.down, strict=True)):
                inner = ops.linear(step.hidden, up)
                if experts.gate:
                    inner = ops.activate_mul(ops.linear(step.hidden, experts.gate[e]), inner)
                else:
                    inner = ops.activate(inner, "relu2")
                parts[f"{e}"] = ops.linear(inner, down)
            return parts

        weights, ids = route(
            torch.from_numpy(x.astype(np.float64) @ values_of(mixture.router).T.astype(np.float64)),
            None if mixture.bias is None else torch.from_numpy(mixture.bias).double(),
            mixture.spec,
        )
        reads = mixture.spec.scales_inputs
        factors = weights.T.float().numpy()[..., None] if reads else [1]
        parts = [run_native(backend(path), separate_experts, single_rows(range(9)), x * factor) for factor in factors]
        expected = np.zeros((9, mixture.out))
        for row in range(9):
            for i, (weight, expert) in enumerate(zip(weights[row].tolist(), ids[row].tolist(), strict=True)):
                has = expert < mixture.spec.num_matrices
                expert_output = parts[i if reads else 0][f"{expert}"][row] if has else x[row]
                expected[row] += expert_output.astype(np.float64) * (1 if reads else weight)
        found = run_native(backend(path, 2), mixture.code, single_rows(range(9)), x)["mixed"]
        rounded = reads and FORMS[form].rounds_rows(path)  # rows are rounded before the factor is applied
        tolerance = 2e-2 if rounded else 1e-4
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def test_ties_select_the_lowest_expert() -> None:
    mixture = Mixture(RouterSpec(6, 3, "sigmoid", num_groups=3, top_groups=2), "F32", 5)
    mixture.router, mixture.bias = nat.matrix_of(np.zeros((6, WIDTH))), None
    hidden = np.ones((2, WIDTH), np.float32)
    found = run_native(backend(), mixture.code, single_rows(range(2)), hidden)["mixed"]
    parts = (mixture.experts.gate, mixture.experts.up, mixture.experts.down)
    gate, up, down = ([reference_weight(w) for w in each] for each in parts)
    x = torch.ones(WIDTH, dtype=torch.float64)
    expected = sum(down[e] @ (torch.nn.functional.silu(gate[e] @ x) * (up[e] @ x)) for e in range(3)) / 3
    np.testing.assert_allclose(found, np.stack([expected] * 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
def test_non_finite_rows_do_not_affect_others(path: str) -> None:
    """NaN and infinities stay in their row, and select experts that exist."""
    mixture = Mixture(ROUTERS["groups"], "Q8-32-f16", 6)
    x = np.random.default_rng(7).standard_normal((12, WIDTH)).astype(np.float32)
    clean = run_native(backend(path), mixture.code, single_rows(range(12)), x)["mixed"]
    x[3, 5], x[7, 0], x[9] = np.nan, np.inf, -np.inf
    found = run_native(backend(path, 2), mixture.code, single_rows(range(12)), x)["mixed"]
    others = [0, 1, 2, 4, 5, 6, 8, 10, 11]
    np.testing.assert_array_equal(found[others].view(np.uint32), clean[others].view(np.uint32))
    assert not np.isfinite(found[[3, 7, 9]]).any()


def unreadable_copy(matrix: packing.Matrix, kept: list[Any]) -> packing.Matrix:
    """The matrix over memory without read permission."""
    pages = mmap.mmap(-1, -(-matrix.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    data = np.frombuffer(pages, np.uint8)[: matrix.num_bytes]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert libc.mprotect(data.ctypes.data, len(pages), 0) == 0
    kept.append(pages)
    known = [getattr(matrix, name) for name in ("kind", "rows", "cols", "group", "zero", "scales", "offsets")]
    return packing.Matrix(*known, data, matrix.levels)


def test_unselected_experts_are_not_read() -> None:
    """Reading their weights would crash the process."""
    mixture = Mixture(ROUTERS["softmax"], "Q4-32-f16", 8)
    x = np.random.default_rng(9).standard_normal((2, WIDTH)).astype(np.float32)
    expected = run_native(backend(), mixture.code, single_rows(range(2)), x)["mixed"]
    _, ids = route(torch.from_numpy(x @ values_of(mixture.router).T), None, mixture.spec)
    selected, kept = set(ids.flatten().tolist()), []
    assert len(selected) < mixture.spec.num_experts
    parts = [getattr(mixture.experts, name) for name in ("gate", "up", "down")]
    mixture.experts = Experts(
        *(tuple(w if e in selected else unreadable_copy(w, kept) for e, w in enumerate(each)) for each in parts)
    )
    found = run_native(backend(threads=2), mixture.code, single_rows(range(2)), x)["mixed"]
    np.testing.assert_array_equal(found, expected)


POWERS = np.linspace(0.2, 4.0, 20)
"""Logits of which no two sums of sigmoids are nearly equal, so that arithmetic decides nothing."""


def weights_by_expert(path: str, spec: RouterSpec, logits: Array, bias: Array | None) -> Array:
    """Weights [R, E] that each row gives each expert; expert e outputs the unit vector of column e."""
    count, one = spec.num_experts, nat.matrix_of(np.ones((1, 1)))
    unit_outputs = tuple(nat.matrix_of(np.eye(count)[:, e : e + 1]) for e in range(count))
    experts = Experts((one,) * count, (one,) * count, unit_outputs)
    nothing, ones = nat.matrix_of(np.zeros((1, count))), np.ones(1, np.float32)

    def code(ops: Any, step: Any) -> dict[str, Any]:
        return {"said": ops.moe(ops.linear(step.hidden, nothing, ones), step.hidden, bias, experts, spec)}

    expert_output = run_native(backend(path), code, single_rows(range(len(logits))), logits)["said"]
    return expert_output / (1 / (1 + np.exp(-1)))  # silu(1) * 1


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=60)
def test_routing_matches_reference(path: str, seed: int) -> None:
    """Any numbers of experts and groups, with many ties."""
    rng = np.random.default_rng(seed)
    groups, size = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    top_groups = int(rng.integers(1, groups + 1))
    spec = RouterSpec(
        groups * size, int(rng.integers(1, top_groups * size + 1)), str(rng.choice(["softmax", "sigmoid"])),
        bool(rng.integers(2)), float(rng.uniform(0.5, 3)), groups, top_groups,
    )  # fmt: skip
    logits = rng.choice(POWERS, (5, spec.num_experts)).astype(np.float32)
    bias = rng.uniform(0, 1, spec.num_experts).astype(np.float32) if rng.integers(2) else None
    given_bias = None if bias is None else torch.from_numpy(bias).double()
    weights, ids = route(torch.from_numpy(logits).double(), given_bias, spec)
    expected = torch.zeros(5, spec.num_experts, dtype=torch.float64).scatter(1, ids, weights).numpy()
    np.testing.assert_allclose(weights_by_expert(path, spec, logits, bias), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_router_is_not_quantized(quantization: Any) -> None:
    tensor = make_tensor("gate", (7, 64), "BF16", np.zeros(7 * 64 * 2, np.uint8))
    worker = NativeBackend(threads=1, quantization=quantization)
    kinds = {worker.weight(tensor, drafts=drafts, precise=True).kind for drafts in (False, True)}
    assert kinds == {FORMS["BF16"].kind} and worker.weight(tensor).kind > FORMS["BF16"].kind


def head_linear_program(w: dict[str, Any]) -> nat.Code:
    def code(ops: Any, step: Any) -> dict[str, Any]:
        projected = ops.head_linear(step.hidden, w["heads"])
        joined = ops.concat(projected, step.hidden, 3)
        narrow = ops.sigmoid_mul(ops.linear(step.hidden, w["gate"]), joined)
        logits, gated = ops.take_rows(narrow, step.logit_rows), ops.sigmoid_mul(joined, joined)
        return {"turned": projected, "joined": joined, "gated": gated, "narrow": narrow, "logits": logits}

    return code


def heads_weights(form: str, rng: np.random.Generator) -> dict[str, Any]:
    """Three heads of 33 columns and 21 rows."""
    heads = [random_matrix(FORMS[form], 21, 33, rng) for _ in range(3)]
    return {"heads": heads, "gate": random_matrix(FORMS["F32"], 6, 99, rng)}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["F32", "F16", "BF16"])
def test_head_linear_matches_reference(path: str, form: str) -> None:
    rng = np.random.default_rng(10)
    weights, rows = heads_weights(form, rng), varied_rows(99, rng)
    assert_rows_independent(path, head_linear_program(weights), rows, 10, (3, 64, 129))
    x: Array = rng.standard_normal((7, 99)).astype(np.float32)
    wide = {"heads": [reference_weight(w) for w in weights["heads"]], "gate": reference_weight(weights["gate"])}
    found = run_native(backend(path), head_linear_program(weights), single_rows(range(7)), x)
    for name, expected in nat.run_reference(head_linear_program(wide), single_rows(range(7)), x).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-4)
