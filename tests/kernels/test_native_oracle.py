"""Native ops compared with float64: the reference backend, and the documented rounding of 8-bit activations."""

import math
from collections.abc import Callable
from typing import Any

import native_ops as nat
import numpy as np
import pytest
import torch
from native_ops import (
    FORMS,
    PATHS,
    Array,
    Part,
    backend,
    plan_of,
    random_matrix,
    reference_weight,
    run_native,
    single_rows,
    values_of,
)

from headstart.kernels.native.backend import NativeBackend
from headstart.kernels.native.program import ACTIVATIONS
from headstart.kernels.ops import Activation, AttentionSpec, RopeSpec
from headstart.kernels.reference.backend import ReferenceBackend
from headstart.kernels.reference.moe import ACTIVATIONS as REFERENCE, gated

ROWS = 7


def run_both(path: str, make: Any, weights: dict[str, Any], hidden: Array, position: int = 0) -> tuple[Any, Any]:
    """Results of make(weights) on the native and the reference backend."""
    plan = single_rows(range(len(hidden)), position)
    widened = {name: reference_weight(weight) for name, weight in weights.items()}
    return run_native(backend(path), make(weights), plan, hidden), nat.run_reference(make(widened), plan, hidden)


def assert_close(found: Array, expected: Array, scale: Array | float = 1.0, tolerance: float = 1e-5) -> None:
    error = np.abs(found - expected) / (scale + np.abs(expected))
    assert found.shape == expected.shape
    assert error.max() <= tolerance, error.max()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("rows", "cols"), [(45, 99), (16, 64), (1, 1), (33, 1090)])
def test_linear_matches_float64(path: str, name: str, rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows)
    w = random_matrix(FORMS[name], rows, cols, rng)
    bias = rng.standard_normal(rows).astype(np.float32)
    x = (rng.standard_normal((ROWS, cols)) * 10.0 ** rng.integers(-3, 4, (ROWS, 1))).astype(np.float32)

    def code(ops: Any, step: Any) -> dict[str, Any]:
        return {"y": ops.linear(step.hidden, w), "biased": ops.linear(step.hidden, w, bias)}

    found = run_native(backend(path), code, single_rows(range(ROWS)), x)
    check_product(found["y"], x, nat.inputs_of(FORMS[name], path, x), FORMS[name], values_of(w))
    np.testing.assert_array_equal(found["biased"], found["y"] + bias)


def check_product(found: Array, x: Array, inputs: Array, form: nat.Form, values: Array) -> None:
    """Compares with the product of rows as this form rounds them; quantized rows must be within half a step of x."""
    wide = values.astype(np.float64).T
    # a minimum and q * scale may cancel, so the summands are larger than the values
    spread = np.abs(wide) + (np.abs(values.T).max() * 2 if form.has_min else 0)
    assert_close(found, inputs @ wide, np.abs(inputs) @ spread + 1e-30, 2e-6)
    if form.quantized:
        bound = (0.5 * nat.quantized_rows(x)[1]) @ np.abs(wide) * 1.0001 + np.abs(inputs) @ spread * 2e-6
        assert (np.abs(found - x.astype(np.float64) @ wide) <= bound).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FORMS)
def test_embed_returns_table_rows(path: str, name: str) -> None:
    table = random_matrix(FORMS[name], 50, 99, np.random.default_rng(3))

    def code(ops: Any, step: Any) -> dict[str, Any]:
        return {"x": ops.embed(table, step.token_ids)}

    ids = np.random.default_rng(4).permutation(50)
    np.testing.assert_array_equal(run_native(backend(path), code, single_rows(ids))["x"], values_of(table)[ids])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.quantized])
def test_gated_products_match_float64(path: str, name: str) -> None:
    rng = np.random.default_rng(5)
    weights = {key: random_matrix(FORMS[name], 71, 99, rng) for key in ("gate", "up")}
    weights |= {"bias": rng.standard_normal(71).astype(np.float32)}

    def make(w: dict[str, Any]) -> nat.Code:
        def code(ops: Any, step: Any) -> dict[str, Any]:
            x = step.hidden
            return {
                "y": ops.activate_mul(ops.linear(x, w["gate"]), ops.linear(x, w["up"])),
                "biased": ops.activate_mul(ops.linear(x, w["gate"], w["bias"]), ops.linear(x, w["up"], w["bias"])),
            }

        return code

    x = nat.rounded_rows(rng.standard_normal((ROWS, 99)).astype(np.float32))  # exact on every path
    found, expected = run_both(path, make, weights, x)
    for each in expected:
        assert_close(found[each], expected[each], 10)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FORMS)
def test_fused_gated_step_equals_separate_ops(path: str, name: str) -> None:
    """silu(gate) * up in one step, and its 8-bit form, equal the separate ops bit for bit."""
    rng = np.random.default_rng(6)
    gate, up = random_matrix(FORMS[name], 71, 99, rng), random_matrix(FORMS["Q8-32-f16"], 71, 99, rng)
    down, bias = random_matrix(FORMS["Q4-16-i8-min"], 21, 71, rng), rng.standard_normal(71).astype(np.float32)

    def code(ops: Any, step: Any) -> dict[str, Any]:
        x, results = step.hidden, {}
        for i, other in enumerate((gate, up)):
            a, b = ops.linear(x, gate, bias), ops.linear(x, other)
            fused = ops.activate_mul(a, b)
            results |= {f"fused {i}": fused, f"fused down {i}": ops.linear(fused, down)}
            both = ops.concat(a, b)  # reads both, so they are computed separately from here on
            parts = ops.activate_mul(a, b)
            results |= {f"parts {i}": parts, f"parts down {i}": ops.linear(parts, down), f"both {i}": both}
        return results

    x = rng.standard_normal((ROWS, 99)).astype(np.float32)
    found = run_native(backend(path), code, single_rows(range(ROWS)), x)
    for i in range(2):
        np.testing.assert_array_equal(found[f"fused {i}"], found[f"parts {i}"])
        np.testing.assert_array_equal(found[f"fused down {i}"], found[f"parts down {i}"])
        assert np.isfinite(found[f"both {i}"]).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("width", "head_dim"), [(66, 22), (64, 64), (24, 8), (160, 80)])
def test_rowwise_ops_match_float64(path: str, width: int, head_dim: int) -> None:
    rng = np.random.default_rng(width)
    weights = {f"norm {n}": rng.standard_normal(n).astype(np.float32) for n in (width, head_dim, head_dim // 2)}
    dims = [dim for dim in (head_dim, head_dim // 2 // 2 * 2, 6, 2) if dim]
    ropes = {dim: RopeSpec(tuple(10000.0 ** -rng.uniform(0, 1, dim // 2)), dim, 1.25) for dim in dims}

    def make(w: dict[str, Any]) -> nat.Code:
        def code(ops: Any, step: Any) -> dict[str, Any]:
            x = step.hidden
            out = {name: ops.rms_norm(x, weight, 1e-5) for name, weight in w.items()}
            out |= {f"rope {dim}": ops.rope(x, step.positions, spec, head_dim) for dim, spec in ropes.items()}
            normed, total = ops.add_rms_norm(x, out[f"rope {dims[0]}"], w[f"norm {width}"], 0.1)
            narrow, _ = ops.add_rms_norm(x, normed, w[f"norm {head_dim}"], 1e-6)
            joined = ops.concat(ops.add(total, x), ops.activate_mul(x, normed))
            zeroed, kept = (ops.zero_where(joined, step.positions, at) for at in (300, 299))
            put = ops.put_where(x, step.token_ids, 3, w[f"norm {width}"])
            parts = ops.rms_norm(x, w[f"norm {width}"], 1e-6, width // head_dim)
            taken_rows = ops.rms_norm(ops.take_rows(joined, step.logit_rows), w[f"norm {width}"], 1e-6)
            out |= {"normed": normed, "total": total, "narrow": narrow, "joined": joined}
            return out | {"zeroed": zeroed, "kept": kept, "taken": taken_rows, "put": put, "parts": parts}

        return code

    x = (rng.standard_normal((ROWS, width)) * 10.0 ** rng.uniform(-3, 3, (ROWS, 1))).astype(np.float32)
    for position in (0, 300):
        found, expected = run_both(path, make, weights, x, position)
        sizes = np.abs(x).max(1, keepdims=True)
        for name in expected:
            assert_close(found[name], expected[name], sizes[::-1] if name == "taken" else sizes)


@pytest.mark.parametrize("threads", [1, 3])
def test_convolution_stays_within_its_sequence(threads: int) -> None:
    """Sequences of one row, of fewer rows and of more rows than taps, in one pass."""
    rng, width, groups, taps = np.random.default_rng(3), 12, 4, 3
    lengths = (1, 2, 7, 1, 5)
    x, delta = (rng.standard_normal((sum(lengths), n)).astype(np.float32) for n in (width, taps * groups))
    kernel = rng.standard_normal((taps, width)).astype(np.float32)
    parts = [Part(np.arange(length), 0, np.array([i])) for i, length in enumerate(lengths)]

    def make(weight: Any) -> nat.Code:
        def code(ops: Any, step: Any) -> dict[str, Any]:
            own, more = ops.columns(step.hidden, 0, width), ops.columns(step.hidden, width, taps * groups)
            return {"out": ops.scale(ops.grouped_conv(ops.scale(own, 1.0), more, weight, taps), 2.0)}

        return code

    rows, expected = np.concatenate((x, delta), 1), np.zeros((sum(lengths), width))
    for first, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
        for i in range(first, first + length):
            for tap in range(min(taps, i - first + 1)):
                kernels = kernel[tap] + delta[i].reshape(taps, groups)[tap].repeat(width // groups)
                expected[i] += 2 * kernels * x[i - tap]
    plan = plan_of(parts)
    assert_close(run_native(backend(threads=threads), make(kernel.reshape(-1)), plan, rows)["out"], expected)
    reference = nat.run_reference(make(reference_weight(kernel.reshape(-1))), plan, rows)["out"]
    assert_close(reference, expected, tolerance=1e-6)


EXACT: dict[Activation, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)), "gelu": np.vectorize(lambda x: x / 2 * math.erfc(-x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / (1 + np.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0), "relu2": lambda x: np.maximum(x, 0) ** 2,
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_activations_match_float64(path: str) -> None:
    """From the largest negative to the largest positive number, and gated in one step."""
    small = np.random.default_rng(8).standard_normal((20, 64)) * np.repeat([1e-6, 0.1, 1, 5], 5)[:, None]
    edges = [0, 1e-45, 0.0624, 0.0626, 0.62, 0.63, 1, 5, 9.99, 10.01, 13.9, 14.1, 40, 88, 1e3, 1e20, 3e38]
    x = np.vstack([small, np.array([*edges, *(-each for each in edges), np.nan] + [0] * 29)]).astype(np.float32)
    ones, up = random_matrix(FORMS["F32"], 64, 64, np.random.default_rng(0)), np.ones(64, np.float32)
    ones.data.view(np.float32)[:] = np.eye(64, dtype=np.float32).reshape(4, 16, 64).swapaxes(1, 2).reshape(-1)

    def code(ops: Any, step: Any) -> dict[str, Any]:
        found = {kind: ops.activate(step.hidden, kind) for kind in ACTIVATIONS}
        gate = {kind: ops.linear(step.hidden, ones) for kind in ACTIVATIONS}
        found |= {f"{k} x": ops.activate_mul(gate[k], ops.linear(step.hidden, ones, up), k) for k in ACTIVATIONS}
        return found | {"capped": ops.softcap(step.hidden, 30.0), "scaled": ops.scale(step.hidden, -0.3)}

    found = run_native(backend(path), code, single_rows(range(len(x))), x)
    with np.errstate(over="ignore"):
        for kind, of in EXACT.items():
            expected = of(x.astype(np.float64))
            np.testing.assert_allclose(found[kind], expected.astype(np.float32), rtol=2e-5, atol=1e-30)
            rows = slice(0, 20)  # NaN or 3e38 in a row affects its products
            np.testing.assert_allclose(found[f"{kind} x"][rows], (expected * (x + 1))[rows], rtol=2e-5, atol=1e-12)
            wide = REFERENCE[kind](torch.from_numpy(x[rows].astype(np.float64)))
            np.testing.assert_allclose(wide, expected[rows], rtol=1e-9, atol=1e-13)
    y, rows = x.astype(np.float64)[:20], slice(0, 20)
    for limit in (7, 16):
        expected = np.minimum(EXACT["silu"](y), limit) * np.clip(y + 1, -limit, limit)
        np.testing.assert_allclose(found[f"silu_{limit} x"][rows], expected, rtol=2e-5, atol=1e-12)
        wide = gated(torch.from_numpy(y), torch.from_numpy(y + 1), f"silu_{limit}")
        np.testing.assert_allclose(wide, expected, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(found["capped"], 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6, atol=1e-30)
    np.testing.assert_array_equal(found["scaled"], x * np.float32(-0.3))


# Attention.

HEADS = ((2, 2, 8), (3, 1, 16), (8, 2, 40), (8, 1, 64), (4, 1, 80), (3, 3, 128), (3, 1, 256))
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 128, 200, 300)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_matches_float64(path: str, kv_dtype: str, heads: tuple[int, int, int]) -> None:
    """Contexts of every length in one pass; half of each was stored by an earlier pass."""
    spec = AttentionSpec(*heads, scale=heads[2] ** -0.5)
    rng = np.random.default_rng(heads[2])
    total, narrow, first = sum(LENGTHS), heads[1] * heads[2], heads[2] // 8 % 2
    q = random_matrix(FORMS["BF16"], total, heads[0] * heads[2], rng)  # some paths round queries and attention weights
    k, v = (random_matrix(FORMS["F32"], total, narrow, rng) for _ in range(2))
    tolerance = nat.attention_tolerance(path, kv_dtype, 3e-6)

    kept = [torch.from_numpy(nat.stored(values_of(each), kv_dtype, heads[2])).double() for each in (k, v)]
    native, oracle = backend(path, kv_dtype=kv_dtype), ReferenceBackend(dtype="float64")
    num_slots = sum(length // 16 + 2 for length in LENGTHS) * 16
    on_native = code_of([q, k, v], native.kv_pool(num_slots, spec), spec)
    on_oracle = code_of([reference_weight(q), *kept], oracle.kv_pool(num_slots, spec), spec)
    for plan in attention_plans(rng.permutation(num_slots // 16), first):
        found, expected = run_native(native, on_native, plan)["y"], nat.run_reference(on_oracle, plan)["y"]
        assert_close(found, expected, 1.0, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_latent_attention_matches_float64(path: str, kv_dtype: str) -> None:
    """DeepSeek-V3's widths: values are the first 512 of 576 features of the single key, with its scale."""
    spec = AttentionSpec(5, 1, 576, 192**-0.5, 512, latent=True)
    rng, total = np.random.default_rng(1), sum(LENGTHS)
    q = random_matrix(FORMS["F32"], total, 5 * 576, rng)
    k = rng.standard_normal((total, 576)).astype(np.float32) * 0.3
    k[:, 7] = 2  # the maximum of key and value
    kept = nat.stored(k, kv_dtype, 576)

    native, oracle = backend(path, kv_dtype=kv_dtype), ReferenceBackend(dtype="float64")
    assert native.kv_bytes(spec) == {"float32": 1088 * 4, "bfloat16": 1088 * 2, "int8": 1096, "fp8": 1096}[kv_dtype]
    assert oracle.kv_bytes(spec) == 576 * 8
    num_slots = sum(length // 16 + 2 for length in LENGTHS) * 16
    on_native = code_of([q, nat.matrix_of(k), nat.matrix_of(k[:, :512])], native.kv_pool(num_slots, spec), spec)
    keys = torch.from_numpy(kept).double()
    on_oracle = code_of([reference_weight(q), keys, keys[:, :512]], oracle.kv_pool(num_slots, spec), spec)
    for plan in attention_plans(rng.permutation(num_slots // 16), 0):
        found, expected = run_native(native, on_native, plan)["y"], nat.run_reference(on_oracle, plan)["y"]
        assert_close(found, expected, 1.0, nat.attention_tolerance(path, kv_dtype, 3e-6))


def code_of(tables: list[Any], pool: Any, spec: AttentionSpec) -> nat.Code:
    def code(ops: Any, step: Any) -> dict[str, Any]:
        return {"y": nat.attention(ops, *(ops.embed(table, step.token_ids) for table in tables), pool, spec)}

    return code


def attention_plans(blocks: Array, first: int) -> list[Any]:
    """Two passes that together compute sequences of LENGTHS."""
    ids = np.split(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)[:-1])
    tables = np.split(blocks, np.cumsum([length // 16 + 2 for length in LENGTHS])[:-1])
    halves = [(each, len(each) // 2, table) for each, table in zip(ids, tables, strict=True)]
    early = [nat.Part(each[:half], first, table) for each, half, table in halves[1:]]
    late = [nat.Part(each[half:], first + half, table) for each, half, table in halves]
    return [nat.plan_of(parts, first_position=first) for parts in (early, late)]


def test_pass_without_logit_rows_gives_no_logits() -> None:
    """Such a pass only fills the cache."""
    w = random_matrix(FORMS["Q8-32-f16"], 33, 64, np.random.default_rng(7))

    def code(ops: Any, step: Any) -> dict[str, Any]:
        return {"logits": ops.linear(ops.take_rows(step.hidden, step.logit_rows), w)}

    worker: NativeBackend = backend()
    plan = nat.plan_of([nat.Part(np.array([1, 2]), 0, np.array([0]))])
    handle = worker.prepare(code, hidden_width=64)
    for _ in range(2):
        assert worker.run(handle, plan, hidden=np.ones((2, 64), np.float32))["logits"].shape == (0, 33)
