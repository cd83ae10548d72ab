"""Row invariance of the native ops: a row has the same output bits alone and in any batch."""

from collections.abc import Sequence as Seq
from typing import Any

import native_ops as nat
import numpy as np
import pytest
from native_ops import (
    FORMS,
    PAIRED,
    PATHS,
    Part,
    assert_same_bits,
    backend,
    plan_of,
    random_matrix,
    run_native,
    single_rows,
)

from headstart.kernels.native.program import ACTIVATIONS
from headstart.kernels.ops import AttentionSpec, RopeSpec

COUNTS = (2, 3, 4, 5, 6, 7, 13, 31, 64, 127, 128, 129, 512)
VARIETY = 40
"""Different rows; longer passes repeat them."""


def assert_rows_independent(path: str, code: nat.Code, hidden: nat.Array, seed: int, counts: Seq[int] = COUNTS) -> None:
    """Compares every row alone with passes of other rows, and with the portable path: results [R, ...] and logits [R,
    ...] in reverse order."""
    rng = np.random.default_rng(seed)
    workers = [backend(path, threads) for threads in (1, 2, 3)]
    rows = np.arange(len(hidden))
    alone = [run_native(workers[0], code, single_rows([row]), hidden[[row]]) for row in rows]
    passes = [(workers[i % 3], rng.integers(0, len(hidden), count)) for i, count in enumerate(counts)]
    if path not in (*PAIRED, "portable"):
        passes.append((backend("portable"), rows))
    for i, (worker, chosen) in enumerate(passes):
        expected = {name: np.concatenate([alone[row][name] for row in chosen]) for name in alone[0]}
        expected["logits"] = expected["logits"][::-1]
        found = run_native(worker, code, single_rows(chosen), hidden[chosen])
        assert_same_bits(found, expected, f"{len(chosen)} rows, pass {i} of {len(passes)}; the last by plain C++")


def varied_rows(width: int, rng: np.random.Generator) -> nat.Array:
    """Rows of many magnitudes, some with groups of zeros."""
    rows = rng.standard_normal((VARIETY, width)) * 10.0 ** rng.uniform(-4, 4, (VARIETY, 1))
    rows[::5, 32:64] = 0
    return rows.astype(np.float32)


def test_result_may_have_two_names() -> None:
    hidden = np.ones((3, 16), np.float32)

    def code(ops: Any, step: Any) -> dict[str, Any]:
        scaled = ops.scale(step.hidden, 2.0)
        return {"first": scaled, "hidden": step.hidden, "again": scaled}

    found = run_native(backend("portable"), code, single_rows(range(3)), hidden)
    assert {name: float(each.sum()) for name, each in found.items()} == {"first": 96, "hidden": 48, "again": 96}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FORMS)
def test_products_are_row_invariant(path: str, name: str) -> None:
    """Odd sizes; gate and up of equal and different forms; a product of a gated result."""
    index = list(FORMS).index(name)
    rng = np.random.default_rng(index)
    other = FORMS[list(FORMS)[index * 7 % len(FORMS)]]
    width, inner, out = ((99, 71, 45), (130, 96, 33), (64, 40, 16))[index % 3]
    shapes = {"table": (VARIETY, width), "w": (out, width), "gate": (inner, width), "up": (inner, width)}
    w = {key: random_matrix(FORMS[name], *shape, rng) for key, shape in shapes.items()}
    w["down"], w["head"] = (random_matrix(FORMS[name], out, inner, rng), random_matrix(FORMS[name], 37, out, rng))
    w["other"] = random_matrix(other, inner, width, rng)
    bias = rng.standard_normal(inner).astype(np.float32)

    def code(ops: Any, step: Any) -> dict[str, Any]:
        x = step.hidden
        down = ops.linear(ops.activate_mul(ops.linear(x, w["gate"], bias), ops.linear(x, w["up"], bias)), w["down"])
        return {
            "embedded": ops.embed(w["table"], step.token_ids), "linear": ops.linear(x, w["w"]), "down": down,
            "mixed": ops.activate_mul(ops.linear(x, w["gate"]), ops.linear(x, w["other"], bias)),
            "gelu": ops.activate_mul(ops.linear(x, w["gate"]), ops.linear(x, w["up"], bias), "gelu"),
            "biased": ops.linear(x, w["up"], bias),
            "logits": ops.linear(ops.take_rows(down, step.logit_rows), w["head"]),
        }  # fmt: skip

    assert_rows_independent(path, code, varied_rows(width, rng), index)


@pytest.mark.parametrize("path", PATHS)
def test_rowwise_ops_are_row_invariant(path: str) -> None:
    rng = np.random.default_rng(1)
    width, head_dim = 66, 22
    norms = {size: rng.standard_normal(size).astype(np.float32) for size in (66, 22, 11)}
    ropes = [RopeSpec(tuple(rng.uniform(0, 1, dim // 2)), dim, 1.25) for dim in (22, 14, 2)]

    def code(ops: Any, step: Any) -> dict[str, Any]:
        x = step.hidden
        out = {f"norm {size}": ops.rms_norm(x, weight, 1e-5) for size, weight in norms.items()}
        out |= {f"rope {rope.rotary_dim}": ops.rope(x, step.positions, rope, head_dim) for rope in ropes}
        normed, total = ops.add_rms_norm(x, out["norm 22"], norms[66], 0.1)
        both = ops.concat(normed, x)
        zeroed = ops.zero_where(both, step.positions, 1)
        added = ops.add(total, ops.activate_mul(x, ops.activate(normed, "silu")))
        logits = ops.rms_norm(ops.take_rows(zeroed, step.logit_rows), norms[66], 1e-6)
        out |= {kind: ops.activate(x, kind) for kind in ACTIVATIONS}
        out |= {"scaled": ops.scale(x, 0.3), "capped": ops.softcap(x, 30.0), "columns": ops.columns(x, 7, 20)}
        return out | {"both": both, "zeroed": zeroed, "total": total, "added": added, "logits": logits}

    assert_rows_independent(path, code, varied_rows(width, rng), 1)


class Sequences:
    """Sequences of random tokens, with queries, keys and values in tables; every token occurs once."""

    def __init__(self, spec: AttentionSpec, lengths: Seq[int], first_position: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.spec, self.lengths, self.first = spec, lengths, first_position
        self.ids = np.split(self.rng.permutation(sum(lengths)), np.cumsum(lengths)[:-1])
        self.num_blocks = sum(-(-length // 16) + 2 for length in lengths)
        widths = (spec.num_heads * spec.head_dim, *(spec.num_kv_heads * n for n in (spec.head_dim, spec.value_width)))
        self.q, self.k, self.v = (random_matrix(FORMS["F32"], sum(lengths), n, self.rng) for n in widths)
        self.output = random_matrix(FORMS["Q8-32-f16"], 33, spec.num_heads * spec.value_width, self.rng)

    def code(self, pool: Any) -> nat.Code:
        def code(ops: Any, step: Any) -> dict[str, Any]:
            q, k, v = (ops.embed(table, step.token_ids) for table in (self.q, self.k, self.v))
            attended = nat.attention(ops, q, k, v, pool, self.spec)
            return {"attended": attended, "output": ops.linear(attended, self.output)}

        return code

    def run(self, path: str, kv_dtype: str, passes: Seq[Seq[tuple[int, int, int]]], threads: int = 1) -> list[Any]:
        """Results by sequence. Spans are (sequence, begin, end), counted from the first position."""
        worker = backend(path, threads, kv_dtype)
        pool = worker.kv_pool(self.num_blocks * 16, self.spec)
        tables, blocks = [], self.rng.permutation(self.num_blocks)
        for length in self.lengths:
            count = (length + self.first + 15) // 16
            tables.append(blocks[:count])
            blocks = blocks[count:]
        code, found = self.code(pool), [[] for _ in self.lengths]
        for spans in passes:
            parts = [Part(self.ids[s][begin:end], begin + self.first, tables[s]) for s, begin, end in spans]
            results = run_native(worker, code, plan_of(parts, first_position=self.first))
            starts = np.cumsum([0] + [end - begin for _, begin, end in spans])
            for (s, _, _), row, end in zip(spans, starts, starts[1:], strict=False):
                found[s].append({name: value[row:end] for name, value in results.items()})
        return [{name: np.concatenate([piece[name] for piece in each]) for name in each[0]} for each in found]

    def row_by_row(self) -> list[list[tuple[int, int, int]]]:
        return [[(s, i, i + 1)] for s, length in enumerate(self.lengths) for i in range(length)]

    def one_pass_each(self) -> list[list[tuple[int, int, int]]]:
        return [[(s, 0, length)] for s, length in enumerate(self.lengths)]

    def chunked(self, chunk: int) -> list[list[tuple[int, int, int]]]:
        """All sequences in each pass, in shuffled order."""
        passes = []
        for begin in range(0, max(self.lengths), chunk):
            left = [s for s, length in enumerate(self.lengths) if begin < length]
            spans = [(s, begin, min(begin + chunk, self.lengths[s])) for s in self.rng.permutation(left).tolist()]
            passes.append(spans)
        return passes

    def staggered(self) -> list[list[tuple[int, int, int]]]:
        """A prompt in one pass with single rows and drafts of other sequences."""
        lengths, (long, *rest) = self.lengths, np.argsort(self.lengths)[::-1].tolist()
        first = [[(s, 0, lengths[s] - 5) for s in rest]]
        return [*first, [*((s, lengths[s] - 5, lengths[s] - 1) for s in rest), (long, 0, 70)],
                [(long, 70, lengths[long]), *((s, lengths[s] - 1, lengths[s]) for s in rest)]]  # fmt: skip


SPECS = [
    ("float32", 0, (4, 2, 32, 0.2)), ("float32", 1, (3, 1, 40, 0.2)), ("bfloat16", 0, (4, 1, 16, 0.25)),
    ("bfloat16", 1, (2, 2, 22, 0.2)), ("int8", 0, (6, 2, 80, 0.1)), ("int8", 1, (8, 1, 64, 0.125)),
    ("fp8", 0, (5, 1, 24, 0.2)), ("fp8", 1, (4, 2, 50, 0.1)),
    *((kv, 0, (8, 1, 76, 0.1, width)) for kv, width in (("float32", 26), ("bfloat16", 64), ("int8", 90), ("fp8", 42))),
]  # fmt: skip
"""Types of keys, the first position, and AttentionSpec: values narrower or wider than keys, many heads over one."""


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("kv_dtype", "first", "spec"), SPECS)
def test_attention_is_row_invariant(path: str, kv_dtype: str, first: int, spec: tuple[Any, ...]) -> None:
    sequences = Sequences(AttentionSpec(*spec), (150, 64, 33, 17, 7), first, spec[2])
    expected = sequences.run(path, kv_dtype, sequences.row_by_row())
    schedules = {
        "at once": sequences.one_pass_each(), "one pass": sequences.chunked(1000), "37": sequences.chunked(37),
        "rows": sequences.chunked(1), "4": sequences.chunked(4), "staggered": sequences.staggered(),
    }  # fmt: skip
    for i, (name, passes) in enumerate(schedules.items()):
        found = sequences.run(path, kv_dtype, passes, threads=i % 3 + 1)
        for s in range(len(sequences.lengths)):
            assert_same_bits(found[s], expected[s], f"{name}, sequence {s}")


@pytest.mark.parametrize("path", PATHS)
def test_attention_over_long_contexts_is_independent_of_threads(path: str) -> None:
    """Threads share contexts of more than 512 positions in passes of few rows: here one row of each sequence."""
    sequences = Sequences(AttentionSpec(6, 3, 16, 0.25), (1100, 700, 530), 0, 5)
    prompts = [[(s, 0, length - 40)] for s, length in enumerate(sequences.lengths)]
    rows = [[(s, length - i, length - i + 1) for s, length in enumerate(sequences.lengths)] for i in range(40, 0, -1)]
    expected = sequences.run(path, "float32", sequences.one_pass_each())
    for threads in (2, 3):
        found = sequences.run(path, "float32", prompts + rows, threads)
        for s in range(len(sequences.lengths)):
            assert_same_bits(found[s], expected[s], f"{threads} threads, sequence {s}")


@pytest.mark.parametrize("path", PATHS)
def test_head_reads_stored_hidden_states(path: str) -> None:
    """A trunk stores hidden states at its rows' slots, in parts of the columns; a head reads them one position later,
    in any order of rows."""
    rng, worker = np.random.default_rng(2), backend(path, 2)
    hidden, table = rng.standard_normal((40, 19)).astype(np.float32), rng.permutation(5)[:3]
    pool = worker.hidden_pool(5 * 16, 38)

    def keep(ops: Any, step: Any) -> dict[str, Any]:
        ops.store(ops.scale(step.hidden, 2.0), pool, 19)
        ops.store(step.hidden, pool)
        return {"kept": step.hidden}

    def read(ops: Any, step: Any) -> dict[str, Any]:
        return {"hidden": step.hidden}

    for begin, end in ((0, 25), (25, 40)):
        run_native(worker, keep, plan_of([Part(np.arange(begin, end), begin, table)]), hidden[begin:end])
    parts = [Part(np.arange(begin, end), begin, table) for begin, end in ((30, 40), (1, 18), (18, 30))]
    handle = worker.prepare(read, hidden_width=38)
    found = worker.run(handle, plan_of(parts, first_position=1), hidden_pool=pool)["hidden"]
    once = np.concatenate([hidden[part.start - 1 :][: len(part.ids)] for part in parts])
    np.testing.assert_array_equal(found, np.hstack((once, 2 * once)))
