"""NaN, infinities, zeros, denormals and extreme values stay in their row, sequence or column."""

from typing import Any

import native_ops as nat
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from native_ops import FORMS, Array, Part, assert_same_bits, backend, random_matrix, run_native, single_rows, values_of

from headstart.kernels.ops import AttentionSpec, RopeSpec
from headstart.kernels.reference.backend import ReferenceBackend

SPECIAL = (np.nan, np.inf, -np.inf)
FINITE = (0.0, -0.0, 1e-45, -1e-40, 1e-38, 1e-30, 1e-20, 1e15, -1e18)
SIZES = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 70, 96, 100, 129])
SEEDS = st.integers(0, 2**31)
paths = pytest.mark.parametrize("path", nat.PATHS)
many = settings(max_examples=40)


def finite_rows(rows: int, width: int, rng: np.random.Generator) -> Array:
    """Rows of any magnitude with special finite numbers in single entries, groups or whole rows."""
    x = rng.standard_normal((rows, width)) * 10.0 ** rng.uniform(-10, 10, (rows, 1))
    x = np.where(rng.random((rows, width)) < rng.choice([0, 0.1, 0.9]), rng.choice(FINITE, (rows, width)), x)
    begin = rng.integers(0, width)
    x[rng.integers(0, rows), begin : begin + 32] = rng.choice(FINITE)
    x[rng.random(rows) < 0.2] = rng.choice(FINITE)
    return x.astype(np.float32)


@paths
@given(seed=SEEDS, name=st.sampled_from(list(FORMS)), rows=st.integers(1, 14), width=SIZES, out=SIZES)
@many
def test_products_keep_non_finite_rows_apart(path: str, seed: int, name: str, rows: int, width: int, out: int) -> None:
    """Rows with NaN or infinity become non-finite; other rows keep their bits."""
    rng, form = np.random.default_rng(seed), FORMS[name]
    w, bias = random_matrix(form, out, width, rng), rng.standard_normal(out).astype(np.float32)
    up, down = random_matrix(form, out, width, rng), random_matrix(FORMS["Q6-16-i8"], 5, out, rng)

    def code(ops: Any, step: Any) -> dict[str, Any]:
        x = step.hidden
        gated = ops.activate_mul(ops.linear(x, w), ops.linear(x, up, bias))
        return {"linear": ops.linear(x, w, bias), "gated": gated, "down": ops.linear(gated, down)}

    x, worker = finite_rows(rows, width, rng), backend(path)
    clean = run_native(worker, code, single_rows(range(rows)), x)
    check_finite_product(clean["linear"] - bias, nat.inputs_of(form, path, x), w, bias)
    poisoned, dirty = np.flatnonzero(rng.random(rows) < 0.4), x.copy()
    dirty[poisoned, rng.integers(0, width, len(poisoned))] = rng.choice(SPECIAL, len(poisoned))
    found = run_native(worker, code, single_rows(range(rows)), dirty)
    others = np.setdiff1d(np.arange(rows), poisoned)
    assert_same_bits({key: y[others] for key, y in found.items()}, {key: y[others] for key, y in clean.items()})
    affected = np.isnan(dirty).any(1) if not form.quantized else ~np.isfinite(dirty).all(1)
    for y in found.values():
        assert np.isnan(y[affected]).all()
    assert not np.isfinite(found["linear"][poisoned]).any() or not values_of(w).all()


FLOAT_SCALES = [name for name, form in FORMS.items() if form.quantized and form.scales < nat.E8M0]


def check_finite_product(found: Array, inputs: Array, w: Any, bias: Array) -> None:
    wide = values_of(w).astype(np.float64).T
    size = np.abs(inputs) @ (np.abs(wide) + np.abs(wide).max() * 4) + np.abs(bias)
    assert (np.abs(found - inputs @ wide) <= size * 1e-5 + 1e-36).all()


@paths
@given(seed=SEEDS, name=st.sampled_from(FLOAT_SCALES), width=SIZES, out=SIZES)
@many
def test_non_finite_scales_stay_in_their_column(path: str, seed: int, name: str, width: int, out: int) -> None:
    """Extreme finite scales give correct products."""
    rng, form = np.random.default_rng(seed), FORMS[name]
    w, again = (random_matrix(form, out, width, np.random.default_rng(seed + 1)) for _ in range(2))
    column, group = int(rng.integers(0, out)), int(rng.integers(0, -(-width // form.group)))
    value = float(rng.choice([*SPECIAL, 0.0, 6e-8, 6e4, -6e4]))
    nat.set_scale(again, column, group, value)
    x = np.abs(rng.standard_normal((3, width))).astype(np.float32)
    codes = [lambda ops, step, w=w: {"y": ops.linear(step.hidden, w)} for w in (w, again)]
    clean, found = (run_native(backend(path), code, single_rows(range(3)), x)["y"] for code in codes)
    others = np.delete(np.arange(out), column)
    assert_same_bits({"y": found[:, others]}, {"y": clean[:, others]})
    if np.isfinite(value):
        check_finite_product(found, nat.quantized_rows(x)[0], again, np.zeros(out))
    else:
        assert not np.isfinite(found[:, column]).any()


@pytest.mark.slow
@paths
@given(seed=SEEDS, rows=st.integers(1, 9), groups=st.integers(1, 4), dim=st.sampled_from([2, 8, 16, 18, 34, 64]))
@many
def test_rowwise_ops_keep_non_finite_rows_apart(path: str, seed: int, rows: int, groups: int, dim: int) -> None:
    rng = np.random.default_rng(seed)
    norm = rng.standard_normal(dim).astype(np.float32)
    rope = RopeSpec(tuple(rng.uniform(0, 1, int(rng.integers(1, dim // 2 + 1)))), 0, 1.0)
    rope = RopeSpec(rope.inv_freq, 2 * len(rope.inv_freq))

    def make(weight: Any) -> nat.Code:
        def code(ops: Any, step: Any) -> dict[str, Any]:
            x = step.hidden
            normed, total = ops.add_rms_norm(x, x, weight, 1e-6)
            return {
                "norm": ops.rms_norm(x, weight, 1e-6), "rope": ops.rope(x, step.positions, rope, dim), "total": total,
                "normed": normed, "gated": ops.activate_mul(x, normed), "both": ops.concat(normed, ops.add(x, normed)),
                "kept": ops.zero_where(x, step.positions, 4), "zeroed": ops.zero_where(x, step.positions, 3),
            }  # fmt: skip

        return code

    x, plan = finite_rows(rows, groups * dim, rng), single_rows(range(rows), 3)
    worker, code = backend(path), make(norm)
    clean, expected = run_native(worker, code, plan, x), nat.run_reference(make(nat.reference_weight(norm)), plan, x)
    sizes = np.abs(x).max(1, keepdims=True)
    for name, values in expected.items():
        assert (np.abs(clean[name] - values) <= 1e-5 * (np.abs(values) + sizes + 1e-30)).all(), name
    poisoned, dirty = np.flatnonzero(rng.random(rows) < 0.4), x.copy()
    dirty[poisoned, rng.integers(0, groups * dim, len(poisoned))] = np.nan
    found = run_native(worker, code, plan, dirty)
    others = np.setdiff1d(np.arange(rows), poisoned)
    assert_same_bits({key: y[others] for key, y in found.items()}, {key: y[others] for key, y in clean.items()})
    for name, y in found.items():
        assert np.isnan(y[poisoned]).any(1).all() or name == "zeroed", name
    assert not found["zeroed"].any()


@paths
def test_silu_of_extreme_values_matches_float64(path: str) -> None:
    x = np.array([[-3e38, -1e38, -1e30, -1e10, -200, -89, -88, -87, -20, -1e-45, 0, 1e-45, 20, 88, 200, 3e38]])
    ones = random_matrix(FORMS["F32"], 1, 16, np.random.default_rng(0))
    ones.data.view(np.float32)[:] = 1

    def code(ops: Any, step: Any) -> dict[str, Any]:
        return {"y": ops.activate_mul(step.hidden, ops.embed(ones, step.token_ids))}

    with np.errstate(over="ignore"):
        expected = x / (1 + np.exp(-x))
    found = run_native(backend(path), code, single_rows([0]), x)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-33)


NUM_BLOCKS = 12
KINDS = ("q", "k", "v")


class AttentionHarness:
    """Queries, keys and values by token, and a pool that the sequences of a test share and reuse."""

    def __init__(self, path: str, kv_dtype: str, spec: AttentionSpec, tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.spec, self.worker = spec, backend(path, kv_dtype=kv_dtype)
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        self.tables = {key: random_matrix(FORMS["F32"], tokens, n * spec.head_dim, rng) for key, n in heads.items()}
        self.code = self.code_of(self.tables, self.worker.kv_pool(NUM_BLOCKS * 16, spec))

    def code_of(self, tables: dict[str, Any], pool: Any) -> nat.Code:
        def code(ops: Any, step: Any) -> dict[str, Any]:
            q, k, v = (ops.embed(tables[kind], step.token_ids) for kind in KINDS)
            return {"y": nat.attention(ops, q, k, v, pool, self.spec)}

        return code

    def entries(self, kind: str) -> Array:
        """A writable view of the table's values: [blocks, 16, columns]."""
        matrix = self.tables[kind]
        return matrix.data.view(np.float32).reshape(-(-matrix.rows // 16), -1, 16).swapaxes(1, 2)

    def write(self, kind: str, token: int, column: Any, value: Any) -> None:
        self.entries(kind)[token // 16, token % 16, column] = value

    def run(self, parts: list[Part], first: int) -> list[Array]:
        found = run_native(self.worker, self.code, nat.plan_of(parts, first_position=first))["y"]
        return np.split(found, np.cumsum([len(part.ids) for part in parts])[:-1])


def shared_blocks(lengths: list[int], first: int, rng: np.random.Generator) -> list[Part]:
    """Whole sequences with consecutive tokens, in shuffled blocks."""
    ids = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    counts = [(length + first + 15) // 16 for length in lengths]
    tables = np.split(rng.permutation(NUM_BLOCKS), np.cumsum(counts))
    return [Part(each, first, table) for each, table in zip(ids, tables, strict=False)]


def split_into_two_passes(parts: list[Part], rng: np.random.Generator) -> list[list[Part]]:
    """The parts in two passes: some rows of each, then the rest."""
    early, late = [], []
    for part in parts:
        cut = int(rng.integers(0, len(part.ids)))
        early += [Part(part.ids[:cut], part.start, part.table)] if cut else []
        late.append(Part(part.ids[cut:], part.start + cut, part.table))
    return [each for each in (early, late) if each]


def run_all(harness: AttentionHarness, passes: list[list[Part]], tokens: int, first: int) -> Array:
    """Outputs by token."""
    out = np.zeros((tokens, harness.spec.num_heads * harness.spec.head_dim), np.float32)
    for parts in passes:
        for part, found in zip(parts, harness.run(parts, first), strict=True):
            out[part.ids] = found
    return out


attention_world = {
    "seed": SEEDS, "kv_dtype": st.sampled_from(["float32", "bfloat16", "int8", "fp8"]),
    "heads": st.sampled_from([(1, 1, 2), (3, 1, 16), (4, 2, 18), (8, 2, 32), (5, 1, 8)]),
    "first": st.sampled_from([0, 1]), "lengths": st.lists(st.integers(1, 62), min_size=1, max_size=3),
}  # fmt: skip


@pytest.mark.slow
@paths
@given(**attention_world)
@many
def test_non_finite_sequences_do_not_affect_others(
    path: str, seed: int, kv_dtype: str, heads: tuple[int, int, int], first: int, lengths: list[int]
) -> None:
    """Blocks hold non-finite values of an earlier sequence, and another sequence of the pass has non-finite rows."""
    rng = np.random.default_rng(seed)
    spec, tokens, num_former = AttentionSpec(*heads, heads[2] ** -0.5), sum(lengths), NUM_BLOCKS * 16
    clean, dirty = (AttentionHarness(path, kv_dtype, spec, tokens + num_former, seed) for _ in range(2))
    passes = split_into_two_passes(shared_blocks(lengths, first, rng), rng)
    expected = run_all(clean, passes, tokens, first)
    for token in range(tokens, tokens + num_former):
        for kind in KINDS:
            dirty.write(kind, token, rng.integers(0, heads[2]), rng.choice(SPECIAL))
    dirty.run([Part(np.arange(tokens, tokens + num_former), 0, rng.permutation(NUM_BLOCKS))], 0)
    token, kind, value = int(rng.integers(0, tokens)), rng.choice(KINDS), rng.choice(SPECIAL)
    dirty.write(kind, token, rng.integers(0, heads[2]), value)
    found = run_all(dirty, passes, tokens, first)
    end = int(np.cumsum(lengths)[np.searchsorted(np.cumsum(lengths), token, side="right")])
    affected = np.arange(token, token + 1 if kind == "q" else end)
    others = np.setdiff1d(np.arange(tokens), affected)
    assert_same_bits({"y": found[others]}, {"y": expected[others]})
    if np.isnan(value):
        assert np.isnan(found[affected]).any(1).all()


@pytest.mark.slow
@paths
@given(**attention_world)
@many
def test_attention_of_extreme_values_matches_float64(
    path: str, seed: int, kv_dtype: str, heads: tuple[int, int, int], first: int, lengths: list[int]
) -> None:
    """Zeros, denormals, values of any magnitude, and scores so far apart that one key dominates."""
    rng = np.random.default_rng(seed)
    spec, tokens = AttentionSpec(*heads, heads[2] ** -0.5), sum(lengths)
    harness = AttentionHarness(path, kv_dtype, spec, tokens, seed)
    for kind, low, high in (("q", -6, 1), ("k", -6, 1), ("v", -20, 15)):
        harness.entries(kind)[:] *= np.float32(10.0 ** rng.uniform(low, high))
    for token in np.flatnonzero(rng.random(tokens) < 0.3).tolist():
        begin = rng.integers(0, heads[2])
        harness.write(rng.choice(KINDS), token, slice(begin, begin + heads[2]), rng.choice([0, 1e-45, -1e-39]))
    harness.entries("q")[:] = nat.rounded_rows(harness.entries("q"))  # some paths round queries and attention weights
    tolerance = nat.attention_tolerance(path, kv_dtype, 1e-4)
    passes = split_into_two_passes(shared_blocks(lengths, first, rng), rng)
    found = run_all(harness, passes, tokens, first)
    kept = {kind: nat.reference_weight(table) for kind, table in harness.tables.items()}
    for kind in ("k", "v"):
        kept[kind] = torch.from_numpy(nat.stored(values_of(harness.tables[kind]), kv_dtype, heads[2])).double()
    oracle = harness.code_of(kept, ReferenceBackend(dtype="float64").kv_pool(NUM_BLOCKS * 16, spec))
    largest = float(kept["v"].abs().max())
    for parts in passes:
        expected = nat.run_reference(oracle, nat.plan_of(parts, first_position=first))["y"]
        assert (np.abs(found[np.concatenate([part.ids for part in parts])] - expected) <= tolerance * largest).all()


@paths
def test_scores_of_minus_infinity_have_no_weight(path: str) -> None:
    """Keys beyond any float32 score have no weight, even if they fill all of the first positions."""
    harness = AttentionHarness(path, "float32", AttentionSpec(1, 1, 8, 1.0), 80, 0)
    harness.entries("q")[:] = 1e30
    harness.entries("k")[:] = -1e30
    for token in range(70, 80):
        harness.write("k", token, slice(None), 0)
    found = harness.run([Part(np.arange(80), 0, np.arange(5))], 0)[0]
    mean = values_of(harness.tables["v"])[70:].cumsum(0) / np.arange(1, 11)[:, None]
    np.testing.assert_allclose(found[70:], mean, rtol=1e-5, atol=1e-6)
