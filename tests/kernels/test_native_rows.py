"""Visibility of rows: windows, sinks, softcap, blocks and trees, compared with float64 and row-invariant bit for
bit."""

import pickle
from dataclasses import replace
from functools import lru_cache
from typing import Any

import native_ops as nat
import numpy as np
import pytest
import torch
from native_ops import PATHS, Array, Part, assert_same_bits, attention_tolerance, plan_of, random_matrix, run_native

from headstart.core import Paths, StepPlan
from headstart.kernels.ops import AttentionSpec
from headstart.kernels.reference.backend import ReferenceBackend
from headstart.kernels.specs import IndexSpec

NUM_BLOCKS, LENGTH = 40, 215
HEADS = {"float32": (4, 2, 24), "bfloat16": (3, 1, 64), "int8": (14, 2, 32), "fp8": (6, 2, 96)}
"""KV type -> query heads, KV heads, dimension: a multiple of 32 where AMX tiles are used."""
SEEN: dict[str, dict[str, Any]] = {
    "all": {},
    **{f"window {w}": {"window": w} for w in (1, 2, 15, 16, 17, 63, 64, 65, 100, 300)},
    **{f"chunk {c}": {"chunk": c} for c in (1, 16, 33, 100, 300)},
    "softcap": {"softcap": 2.5},
    "window and softcap": {"window": 33, "softcap": 0.7},
    "causal": {"causal": True},
    **{f"the best {n}": {"top_k": n} for n in (1, 16, 37, 214)},
    **{f"the best {n} blocks of {every}": {"top_k": n, "every": every} for n, every in ((1, 16), (3, 9), (5, 40))},
    "the local window of 8 and the best 4": {"top_k": 4, "every": 8, "local": True},
}
BLIND = {"before": {"excludes_self": True}, "before in a window": {"excludes_self": True, "window": 17}}
"""Rows that do not see themselves; the first of a text then sees nothing."""
paths = pytest.mark.parametrize("path", PATHS)
kv_dtypes = pytest.mark.parametrize("kv_dtype", list(HEADS))


EXPECTED: dict[bytes, list[Array]] = {}


@lru_cache(maxsize=2)
def random_tables(seed: int, rows: int, widths: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [random_matrix(nat.FORMS["F32"], rows, width, rng) for width in widths]


class AttentionHarness:
    """Queries, keys and values by token on one backend, and a pool for them."""

    def __init__(
        self, path: str, kv_dtype: str, seed: int = 0, *, sinks: bool = False, top_k: int = 0, every: int = 0,
        local: bool = False, length: int = LENGTH, **seen: Any,
    ) -> None:  # fmt: skip
        heads, kv_heads, dim = HEADS[kv_dtype]
        self.length, self.num_blocks = length, length // 16 + NUM_BLOCKS - LENGTH // 16
        self.rng, self.seed = np.random.default_rng(seed), seed
        self.kv_dtype, self.dim = kv_dtype, dim
        self.spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, **seen)
        self.index = IndexSpec(11, 18, top_k) if top_k else None
        self.index = IndexSpec(kv_heads, 18, top_k, every, whole=True) if every else self.index
        self.index = replace(self.index, num_heads=3 * kv_heads, groups=kv_heads, local=True) if local else self.index
        widths = [n * dim for n in (heads, kv_heads, kv_heads)]
        # queries and weights of the indexer (none if it selects blocks), and its keys
        widths += [self.index.num_heads * 18, self.index.num_heads, 18] if self.index else []
        self.tables = random_tables(seed, 4 * length, tuple(widths))
        self.sinks = self.rng.standard_normal(heads).astype(np.float32) * 2 if sinks else None
        self.workers = [nat.backend(path, threads, kv_dtype) for threads in (1, 2, 3)]
        self.reset_pools()

    def reset_pools(self) -> None:
        """Replaces the pools by empty ones."""
        self.pools = self.pools_of(self.workers[0])
        self.code = self.code_of(self.tables, self.pools, self.sinks)

    def pools_of(self, worker: Any) -> list[Any]:
        specs = (self.spec, *([self.index] if self.index else []))
        return [worker.kv_pool(self.num_blocks * 16, spec) for spec in specs]

    def code_of(self, tables: list[Any], pools: list[Any], sinks: Any) -> nat.Code:
        pool, *chosen = pools

        def code(ops: Any, step: Any) -> dict[str, Any]:
            q, k, v, *indexing = (ops.embed(table, step.token_ids) for table in tables)
            if chosen:
                queries, weights, keys = indexing
                ops.store_index(keys, chosen[0], self.index)
                if self.index.whole and not self.index.local:
                    ops.select_blocks(queries, chosen[0], self.index)
                else:
                    ops.select_positions(queries, weights, chosen[0], self.index)
            ops.store_kv(k, v, pool, self.spec)
            return {"y": ops.attend(q, pool, self.spec, sinks, *chosen)}

        return code

    def run(self, plan: StepPlan, worker: int = 0) -> Array:
        return run_native(self.workers[worker], self.code, plan)["y"]

    def oracle(self, plans: list[StepPlan]) -> list[Array]:
        """Results in float64 over keys and values as rounded in the pool. They are cached for tests of other paths."""
        sinks = None if self.sinks is None else self.sinks.tobytes()
        inputs = (self.kv_dtype, self.spec, self.index, self.seed, sinks, plans)
        if (key := pickle.dumps(inputs)) not in EXPECTED:
            EXPECTED.clear()
            EXPECTED[key] = self.compute_oracle(plans)
        return EXPECTED[key]

    def compute_oracle(self, plans: list[StepPlan]) -> list[Array]:
        dims = {1: self.dim, 2: self.dim, 5: 18}
        values = [
            nat.stored(nat.values_of(each), self.kv_dtype, dims[i]) if i in dims else nat.values_of(each)
            for i, each in enumerate(self.tables)
        ]
        tables = [torch.from_numpy(np.array(each)).double() for each in values]
        sinks = None if self.sinks is None else torch.from_numpy(self.sinks).double()
        code = self.code_of(tables, self.pools_of(ReferenceBackend(dtype="float64")), sinks)
        return [nat.run_reference(code, plan)["y"] for plan in plans]

    def table(self) -> Array:
        return self.rng.permutation(self.num_blocks)[: self.length // 16 + 2]


BARE = ("all", "window 17", "the best 37")
"""What is seen without sinks, too: they add a term to the sum of each row, whatever it sees."""


@pytest.mark.slow
@paths
@kv_dtypes
@pytest.mark.parametrize(("seen", "sinks"), [*((name, True) for name in SEEN), *((name, False) for name in BARE)])
def test_visible_positions_match_float64(path: str, kv_dtype: str, seen: str, sinks: bool) -> None:
    """Two passes compared with float64; then row by row and in spans beside another sequence, bit for bit."""
    harness = AttentionHarness(path, kv_dtype, sinks=sinks, **SEEN[seen])
    table = harness.table()
    plans = [plan_of([Part(np.arange(begin, end), begin, table)]) for begin, end in ((0, 90), (90, LENGTH))]
    found = [harness.run(plan) for plan in plans]
    for ours, theirs in zip(found, harness.oracle(plans), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=attention_tolerance(path, kv_dtype, 6e-6))
    harness.reset_pools()
    others, rows = np.setdiff1d(np.arange(NUM_BLOCKS), table), []
    for i, begin in enumerate(starts := [0, 1, 2, 9, 26, 90, 150, 151]):
        end = [*starts, LENGTH][i + 1]
        parts = [Part(np.arange(begin, end), begin, table), Part(LENGTH + np.arange(i + 3), 0, others)]
        rows.append(harness.run(plan_of(parts), i % 3)[: end - begin])
    assert_same_bits({"y": np.concatenate(rows)}, {"y": np.concatenate(found)}, seen)


@pytest.mark.slow
@paths
@kv_dtypes
@pytest.mark.parametrize("seen", [
    "all", "window 17", "window and softcap", "causal", "the best 37", "the best 3 blocks of 9", *BLIND])  # fmt: skip
def test_block_rows_see_each_other(path: str, kv_dtype: str, seen: str) -> None:
    """A block of 9 rows after 60 tokens; each row alone over the stored keys has the same bits."""
    harness = AttentionHarness(path, kv_dtype, sinks=True, **{**SEEN, **BLIND}[seen])
    table, block = harness.table(), np.arange(60, 69)
    whole = plan_of([Part(block, 60, table)])
    whole.visible_end = np.full(9, 68, np.int32)
    plans = [plan_of([Part(np.arange(60), 0, table)]), whole]
    found = [harness.run(plan) for plan in plans]
    np.testing.assert_allclose(
        found[1], harness.oracle(plans)[1], rtol=0, atol=attention_tolerance(path, kv_dtype, 6e-6)
    )
    for i in (0, 3, 8):
        alone = plan_of([Part(block[i : i + 1], 60 + i, table)])
        alone.visible_end = np.array([68], np.int32)
        assert_same_bits({"y": harness.run(alone, i % 3)}, {"y": found[1][i : i + 1]}, i)


@pytest.mark.slow
@paths
@pytest.mark.parametrize("kv_dtype", HEADS)
def test_window_extends_to_the_start_of_an_image(path: str, kv_dtype: str) -> None:
    """Forty rows that see each other, on both sides of a split; each row alone has the same bits, for any number of
    threads."""
    harness = AttentionHarness(path, kv_dtype, sinks=True, length=560, window=17)
    table, image = harness.table(), np.arange(500, 540)
    whole, start, end = plan_of([Part(image, 500, table)]), np.full(40, 500, np.int32), np.full(40, 539, np.int32)
    whole.visible_start, whole.visible_end = start, end
    plans = [plan_of([Part(np.arange(500), 0, table)]), whole]
    found = [harness.run(plan) for plan in plans][1]
    np.testing.assert_allclose(found, harness.oracle(plans)[1], rtol=0, atol=attention_tolerance(path, kv_dtype, 6e-6))
    for worker in (1, 2):
        assert_same_bits({"y": harness.run(whole, worker)}, {"y": found}, worker)
    for i in (0, 16, 30, 39):
        alone = plan_of([Part(image[i : i + 1], 500 + i, table)])
        alone.visible_start, alone.visible_end = start[:1], end[:1]
        for worker in range(3):
            assert_same_bits({"y": harness.run(alone, worker)}, {"y": found[i : i + 1]}, (i, worker))


@pytest.mark.slow
@paths
@pytest.mark.parametrize(("kv_dtype", "start", "window"), [
    *((kv_dtype, *at) for kv_dtype in HEADS for at in ((7, 16), (505, 16))),
    ("float32", 60, 16), ("fp8", 1040, 16), ("bfloat16", 1030, 520), ("int8", 1030, 520),
])  # fmt: skip
def test_block_rows_share_a_window(path: str, kv_dtype: str, start: int, window: int) -> None:
    """Each row has the bits of a single row whose window reaches as far back, for any number of threads and for rows
    with paths. A window of 520 spans three segments, of which only the first row's own window would include the
    first."""
    harness = AttentionHarness(path, kv_dtype, sinks=True, length=1090, window=window, block_window=True)
    table, block, spec = harness.table(), np.arange(start, start + 9), harness.spec
    other = Part(4 * harness.length - np.arange(1, 6), 0, np.setdiff1d(np.arange(harness.num_blocks), table))
    whole = plan_of([other, Part(block, start, table)])
    whole.visible_end = np.concatenate((whole.positions[:5], np.full(9, start + 8, np.int32))).astype(np.int32)
    plans = [plan_of([Part(np.arange(start), 0, table)]), whole]
    found = [harness.run(plan) for plan in plans][1]
    np.testing.assert_allclose(found, harness.oracle(plans)[1], rtol=0, atol=attention_tolerance(path, kv_dtype, 6e-6))
    for worker in (1, 2):
        assert_same_bits({"y": harness.run(whole, worker)}, {"y": found}, worker)
    chain = plan_of([Part(block[:3], start, table)])
    chain.paths = Paths(np.array([0, 1, 3, 6], np.int32), chain.slots[[0, 0, 1, 0, 1, 2]])
    chained = harness.run(chain, 2)
    for i in range(9):
        harness.spec = replace(spec, window=window + i, block_window=False)
        alone = plan_of([Part(block[i : i + 1], start + i, table)])
        if i < 3:
            assert_same_bits({"y": harness.run(alone, i)}, {"y": chained[i : i + 1]}, i)
        alone.visible_end = np.array([start + 8], np.int32)
        assert_same_bits({"y": harness.run(alone, i % 3)}, {"y": found[5 + i : 6 + i]}, i)


@pytest.mark.slow
@paths
@pytest.mark.parametrize(("kv_dtype", "seen"), [
    *((kv_dtype, "all") for kv_dtype in HEADS),
    ("bfloat16", "window 300"), ("float32", "causal"), ("fp8", "the best 5 blocks of 40"),
])  # fmt: skip
def test_long_contexts_are_independent_of_threads(path: str, kv_dtype: str, seen: str) -> None:
    """Contexts of several segments (csrc/kernels.h): rows shared by three threads have the bits of one thread's
    prompt."""
    harness = AttentionHarness(path, kv_dtype, sinks=True, length=1090, **SEEN[seen])
    table = harness.table()
    plan = plan_of([Part(np.arange(1090), 0, table)])
    found = harness.run(plan)
    np.testing.assert_allclose(found, harness.oracle([plan])[0], rtol=0, atol=attention_tolerance(path, kv_dtype, 6e-6))
    for first, count in ((0, 1), (511, 1), (512, 1), (510, 4), (1023, 2), (1050, 1), (1087, 3)):
        rows = plan_of([Part(np.arange(first, first + count), first, table)])
        for worker in (1, 2, 0):
            assert_same_bits({"y": harness.run(rows, worker)}, {"y": found[first : first + count]}, (first, worker))


class Tree:
    """Random nodes after `context` tokens: tokens, parents (-1: the last context token), and slots outside the
    blocks."""

    def __init__(self, harness: AttentionHarness, context: int, count: int) -> None:
        rng = harness.rng
        self.context, self.tokens = context, harness.length + rng.permutation(2 * harness.length)[:count]
        self.parents = [int(rng.integers(max(-1, i - 4), i)) for i in range(count)]
        blocks = rng.permutation(harness.num_blocks)
        self.table, spare = blocks[: (context + count) // 16 + 1], blocks[-4:]
        self.slots = (spare[:, None] * 16 + np.arange(16)).reshape(-1)[rng.permutation(64)[:count]]
        self.branches = [self.branch(node) for node in range(count)]
        self.rng = rng

    def branch(self, node: int) -> list[int]:
        """Nodes from the first drafted ancestor to `node`."""
        found = [node]
        while self.parents[found[0]] >= 0:
            found.insert(0, self.parents[found[0]])
        return found

    def slot_of(self, position: int) -> int:
        return int(self.table[position // 16]) * 16 + position % 16

    def plan(self, other: Part) -> StepPlan:
        """All nodes, and rows of another sequence without paths. Some paths include the end of the context."""
        starts, slots = [0], []
        for branch in self.branches:
            more = int(self.rng.integers(0, min(17 - len(branch), self.context) + 1))
            slots += [self.slot_of(self.context - i) for i in range(more, 0, -1)] + self.slots[branch].tolist()
            starts.append(len(slots))
        plan = plan_of([Part(self.tokens, 0, self.table), other])
        count = len(self.tokens)
        plan.positions[:count] = [self.context + len(branch) - 1 for branch in self.branches]
        plan.slots[:count] = self.slots
        starts += [len(slots)] * len(other.ids)
        plan.paths = Paths(np.array(starts, np.int32), np.array(slots, np.int32))
        return plan


@pytest.mark.slow
@paths
@kv_dtypes
@pytest.mark.parametrize(("seen", "context"), [
    *(("all", context) for context in (1, 14, 15, 16, 37, 64, 127, 509)),
    *(("window 16", context) for context in (1, 15, 64, 509)),
    *(("window and softcap", context) for context in (14, 37, 127)),
    *(("the best 16", context) for context in (1, 16, 64, 127)),
    *(("the best 3 blocks of 9", context) for context in (1, 37, 127)),
])  # fmt: skip
def test_tree_branches_equal_chains(path: str, kv_dtype: str, seen: str, context: int) -> None:
    """Bit for bit. With a context of 509, paths cross the end of a segment, which threads share."""
    harness = AttentionHarness(
        path, kv_dtype, context, sinks=context % 2 == 0, length=max(LENGTH, context + 20), **SEEN[seen]
    )
    tree, committed = Tree(harness, context, 14), np.arange(context)
    free = np.setdiff1d(np.arange(harness.num_blocks), [*tree.table, *(tree.slots // 16)])
    other = Part(3 * harness.length + np.arange(5), 0, free)
    plans = [plan_of([Part(committed, 0, tree.table)]), tree.plan(other)]
    found = [harness.run(plan, 2) for plan in plans][1]
    np.testing.assert_allclose(found, harness.oracle(plans)[1], rtol=0, atol=attention_tolerance(path, kv_dtype, 6e-6))
    longest = max(tree.branches, key=len)
    targets = [tree.slot_of(context + i) for i in range(len(longest))]
    arrays = [np.array(each, np.int32) for each in (tree.slots[longest], targets)]
    harness.workers[0].copy_rows(harness.pools, *arrays)
    follower = Part(np.array([4 * harness.length - 1]), context + len(longest), tree.table)
    after = harness.run(plan_of([follower]))
    harness.reset_pools()
    harness.run(plan_of([Part(committed, 0, tree.table), other]))
    for leaf in sorted({*range(len(tree.branches))} - {*tree.parents}):
        branch = tree.branches[leaf]
        chain = harness.run(plan_of([Part(tree.tokens[branch], context, tree.table)]))
        assert_same_bits({"y": found[branch]}, {"y": chain}, leaf)
        if branch == longest:
            assert_same_bits({"y": after}, {"y": harness.run(plan_of([follower]))}, "copied")
    harness.reset_pools()
    assert_same_bits({"y": found[len(tree.tokens) :]}, {"y": harness.run(plan_of([other]))}, "the other sequence")


@paths
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_overlapping_rows_are_copied_correctly(path: str, kv_dtype: str) -> None:
    harness, table = AttentionHarness(path, kv_dtype), np.arange(8)
    harness.run(plan_of([Part(np.arange(40), 0, table)]))
    moved = np.arange(3, 38, dtype=np.int32)
    harness.workers[0].copy_rows(harness.pools, moved, moved - 1)
    found = harness.run(plan_of([Part(np.array([99]), 37, table)]))
    harness.reset_pools()
    harness.run(plan_of([Part(np.r_[0, 1, 3:38], 0, table)]))
    assert_same_bits({"y": found}, {"y": harness.run(plan_of([Part(np.array([99]), 37, table)]))})


def test_layer_reads_keys_of_another_layer() -> None:
    """A layer with queries only follows one that stores keys and values."""
    harness = AttentionHarness(PATHS[0], "float32")
    plan = plan_of([Part(np.arange(50), 0, harness.table())])

    def shared(ops: Any, step: Any) -> dict[str, Any]:
        q, k, v = (ops.embed(table, step.token_ids) for table in harness.tables)
        first = nat.attention(ops, q, k, v, harness.pools[0], harness.spec)
        return {"first": first, "second": ops.attend(q, harness.pools[0], harness.spec)}

    found = run_native(harness.workers[1], shared, plan)
    assert_same_bits({"second": found["second"]}, {"second": found["first"]})


def with_changes(plan: StepPlan, **changes: Any) -> StepPlan:
    return replace(plan, **{name: np.array(value, np.int32) for name, value in changes.items()})


@pytest.mark.slow
def test_invalid_plans_are_refused() -> None:
    harness = AttentionHarness(PATHS[0], "bfloat16")
    plan = plan_of([Part(np.arange(3), 14, np.array([2, 5]))])
    harness.run(plan)
    top, slots = 4 * LENGTH, NUM_BLOCKS * 16
    bad: dict[str, list[dict[str, Any]]] = {
        "a token id is outside": [{"token_ids": [0, top, 1]}, {"token_ids": [0, -1, 1]}],
        "a slot is outside": [{"slots": [1, 2, slots]}, {"slots": [-5, 2, 3]}],
        "a position is below 0": [{"positions": [-1, 2, 3]}, {"visible_end": [0, 1, -2]}],
        "outside its blocks or the pool": [
            {"positions": [14, 15, 32]},
            {"visible_end": [14, 15, 32]},
            {"block_tables": [[2, NUM_BLOCKS]]},
            {"block_tables": [[-1, 2]]},
        ],
        "a logit row is not in the pass": [{"logit_rows": [3]}],
        "starts do not ascend": [{"row_starts": [1, 3]}],
        "differ in length": [{"positions": [14, 15]}, {"visible_end": [1]}, {"row_starts": [0, 2]}],
    }
    for message, cases in bad.items():
        for changes in cases:
            with pytest.raises(ValueError, match=message):
                harness.run(with_changes(plan, **changes))
    leading = {
        "a path's slot is outside the pool": [slots, 80, 81],
        "a path is too long": [0] * 20,
        "a row with a path sees later positions": [80, 81],
    }
    for message, path in leading.items():
        tree = replace(plan, paths=Paths(np.array([0, 0, 0, len(path)], np.int32), np.array(path, np.int32)))
        with pytest.raises(ValueError, match=message):
            harness.run(replace(tree, visible_end=np.array([14, 15, 17], np.int32)) if "later" in message else tree)
    with pytest.raises(ValueError, match="outside the pool"):
        harness.workers[0].copy_rows(harness.pools, np.array([1], np.int32), np.array([slots], np.int32))
