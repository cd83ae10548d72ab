"""Residual streams and compressed attention: values of the reference, and row invariance bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from checkpoints import as_tensors
from native_ops import PATHS, Array, Part, assert_same_bits, plan_of

from headstart.core import StepPlan
from headstart.kernels.native.backend import NativeBackend
from headstart.kernels.ops import Activation, AttentionSpec, Experts
from headstart.kernels.reference.backend import ReferenceBackend
from headstart.kernels.specs import CandidateSpec, CompressSpec, IndexSpec, NGramSpec, RopeSpec, RouterSpec, StreamSpec

COUNT, WIDTH = 90, 37
SPEC = AttentionSpec(13, 1, 20, 0.3, 20, latent=True, window=11)
STREAMS = {
    "four": StreamSpec(4, 20, 1e-6),
    "three, columns once": StreamSpec(3, 1, 1e-3),
    "one": StreamSpec(1, 2, 1e-6),
    "not mixed": StreamSpec(3, 0, 1e-3, 1.5, mixed=False),
    "a softmax at the end": StreamSpec(5, 1, 1e-3, softmax=True),
}
COMPRESSED = {
    "overlap, chosen": (CompressSpec(4, 20, overlap=True), IndexSpec(5, 9, 6, 4)),
    "overlap": (CompressSpec(3, 20, overlap=True), None),
    "long windows": (CompressSpec(24, 20), None),
    "among candidates": (CompressSpec(2, 20), IndexSpec(5, 9, 6, 2, candidates=CandidateSpec(3, 5, False))),
    "fewer candidates than top_k": (CompressSpec(2, 20), IndexSpec(5, 9, 6, 2, candidates=CandidateSpec(1, 4, False))),
}
paths = pytest.mark.parametrize("path", PATHS)
Code = Callable[[Any, Any], dict[str, Any]]


class TableHarness:
    """Random tables on a backend; row t belongs to token t."""

    def __init__(self, on: Any, seed: int = 0) -> None:
        self.on, self._rng = on, np.random.default_rng(seed)

    def weight(self, *shape: int) -> Any:
        (tensor,) = as_tensors({"t": self._rng.standard_normal(shape)}).values()
        return self.on.weight(tensor, precise=True)

    def rows(self, width: int) -> Callable[[Any, Any], Any]:
        table = self.weight(COUNT, width)
        return lambda ops, step: ops.embed(table, step.token_ids)

    def run(self, code: Code, plans: list[StepPlan]) -> Array:
        program = self.on.prepare(code)
        return np.concatenate([np.array(self.on.numpy(self.on.run(program, plan)["y"])) for plan in plans])


def native(path: str, threads: int = 2) -> NativeBackend:
    return NativeBackend(threads=threads, path=path, kv_dtype="float32")


def pass_of(*spans: tuple[int, int]) -> StepPlan:
    """One pass with spans of as many sequences of equal tokens."""
    blocks = [np.arange(6)[::-1] + 6 * i for i in range(len(spans))]
    plan = plan_of([Part(np.arange(*span), span[0], blocks[i]) for i, span in enumerate(spans)])
    plan.hidden_slots = None
    return plan


def assert_matches_reference(path: str, code_on: Callable[[TableHarness], Code]) -> None:
    """Compares a pass with the reference, and bit for bit with single rows, chunks and other sequences."""
    oracle, found, again, shared = (
        TableHarness(on) for on in (ReferenceBackend(dtype="float64"), *[native(path, n) for n in (2, 1, 3)])
    )
    whole = found.run(code_on(found), [pass_of((0, COUNT))])
    expected = oracle.run(code_on(oracle), [pass_of((0, COUNT))])
    np.testing.assert_allclose(whole, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())
    single = again.run(
        code_on(again), [pass_of((0, 30)), *[pass_of((i, i + 1)) for i in range(30, 75)], pass_of((75, COUNT))]
    )
    assert_same_bits({"y": single}, {"y": whole})
    spans = [(0, 40), (0, COUNT), (0, 7)]
    together = shared.run(code_on(shared), [pass_of(*spans)])
    assert_same_bits({"y": together}, {"y": np.concatenate([whole[slice(*span)] for span in spans])})


@paths
@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_attention_matches_reference(path: str, kind: str) -> None:
    spec, index = COMPRESSED[kind]

    def code_on(harness: TableHarness) -> Code:
        q, k, c, z = (harness.rows(width) for width in (13 * 20, 20, spec.width, spec.width))
        bias, sinks = harness.weight(spec.every * spec.width), harness.weight(13)
        pools = [harness.on.kv_pool(18 * 16, each) for each in (SPEC, spec, SPEC)]
        chosen = harness.on.kv_pool(18 * 16, index) if index else None
        index_queries, shares, keys, others = (harness.rows(width) for width in (5 * 9, 5, 9, 5 * 9))

        def code(ops: Any, step: Any) -> dict[str, Any]:
            own = k(ops, step)
            ops.store_kv(own, own, pools[0], SPEC)
            made = ops.compress(c(ops, step), z(ops, step), bias, pools[1], spec)
            ops.store_kv(made, made, pools[2], SPEC)
            if index:
                ops.store_index(keys(ops, step), chosen, index)
                if index.candidates:
                    source = replace(index, candidates=replace(index.candidates, source=True))
                    ops.select_positions(others(ops, step), shares(ops, step), chosen, source)
                ops.select_positions(index_queries(ops, step), shares(ops, step), chosen, index)
            return {"y": ops.attend_compressed(q(ops, step), pools[0], pools[2], SPEC, spec.every, sinks, chosen)}

        return code

    assert_matches_reference(path, code_on)


@paths
@pytest.mark.parametrize(("window", "extent"), [(0, 7), (0, 70), (11, 11)])
def test_attention_with_distance_biases_matches_reference(path: str, window: int, extent: int) -> None:
    spec = AttentionSpec(6, 2, 9, 0.3, window=window)

    def code_on(harness: TableHarness) -> Code:
        q, k, v, bias = (harness.rows(width) for width in (6 * 9, 2 * 9, 2 * 9, 6 * extent))
        pool = harness.on.kv_pool(18 * 16, spec)

        def code(ops: Any, step: Any) -> dict[str, Any]:
            ops.store_kv(k(ops, step), v(ops, step), pool, spec)
            return {"y": ops.attend(q(ops, step), pool, spec, bias=bias(ops, step))}

        return code

    assert_matches_reference(path, code_on)


@paths
@pytest.mark.parametrize("kind", STREAMS)
def test_streams_are_summed_and_mixed(path: str, kind: str) -> None:
    spec = STREAMS[kind]

    def code_on(harness: TableHarness) -> Code:
        mixes, streams, x = (harness.rows(width) for width in (spec.num_mixes, spec.count * WIDTH, WIDTH))
        base, scale, first = harness.weight(spec.num_mixes), harness.weight(spec.num_scales), harness.weight(1)
        last, less = harness.rows(spec.count), harness.weight(spec.count)

        def code(ops: Any, step: Any) -> dict[str, Any]:
            weights = ops.stream_weights(mixes(ops, step), base, scale, spec)
            mixed = ops.mix_streams(streams(ops, step), x(ops, step), weights, spec)
            ending = ops.stream_weights(last(ops, step), less, first, spec)
            sums = [ops.sum_streams(mixed, each, spec) for each in (weights, ending, None)]
            return {"y": ops.concat(ops.concat(sums[0], sums[1]), ops.concat(sums[2], mixed))}

        return code

    assert_matches_reference(path, code_on)


@paths
@pytest.mark.parametrize("inverse", [False, True])
def test_trailing_interleaved_rope_matches_reference(path: str, inverse: bool) -> None:
    spec = RopeSpec((1.0, 0.3, 0.02), 6, 1.2, trailing=True, inverse=inverse, shift=5)

    def code_on(harness: TableHarness) -> Code:
        x = harness.rows(3 * 11)
        return lambda ops, step: {"y": ops.rope(x(ops, step), step.positions, spec, 11)}

    assert_matches_reference(path, code_on)


@paths
@pytest.mark.parametrize(("token_experts", "kind"), [(False, "silu_of_10"), (True, "silu_of_10"), (False, "situ")])
def test_experts_selected_by_token_match_reference(path: str, token_experts: bool, kind: Activation) -> None:
    """Covers softplus-root scores and limited gate factors."""
    spec = RouterSpec(7, 3, "softplus", scale=1.5)
    expert_ids = np.random.default_rng(1).integers(0, 7, (COUNT, 3))

    def code_on(harness: TableHarness) -> Code:
        x, logits, bias = harness.rows(WIDTH), harness.rows(7), harness.weight(7)
        parts = {"gate": (24, WIDTH), "up": (24, WIDTH), "down": (WIDTH, 24)}
        matrices = {part: tuple(harness.weight(*shape) for _ in range(7)) for part, shape in parts.items()}
        experts, table = (
            Experts(**matrices, activation=kind),
            harness.on.index(expert_ids.reshape(-1).astype(np.int64)),
        )

        def code(ops: Any, step: Any) -> dict[str, Any]:
            named = (table, step.token_ids) if token_experts else None
            return {
                "y": ops.moe(x(ops, step), logits(ops, step), None if token_experts else bias, experts, spec, named)
            }

        return code

    assert_matches_reference(path, code_on)


@paths
def test_compressor_rows_are_copied(path: str) -> None:
    """Copies rows of accepted tree nodes, with a rounded KV cache as well."""
    spec = CompressSpec(2, 4)
    worker = NativeBackend(threads=1, path=path, kv_dtype="int8")
    pool = worker.kv_pool(6 * 16, spec)
    assert worker.kv_bytes(spec) == 2 * 2 * 4
    harness = TableHarness(worker)
    c, z, bias = harness.rows(4), harness.rows(4), harness.weight(8)
    program = worker.prepare(lambda ops, step: {"y": ops.compress(c(ops, step), z(ops, step), bias, pool, spec)})
    first = np.array(worker.run(program, pass_of((0, 4)))["y"])
    slots = plan_of([Part(np.arange(4), 0, np.arange(6)[::-1])]).slots
    worker.copy_rows([pool], slots[[0, 1]], slots[[2, 3]])  # overwrites the rows there
    assert not np.array_equal(np.array(worker.run(program, pass_of((3, 4)))["y"])[0], first[3])


@paths
@pytest.mark.parametrize("longest", [2, 4])
def test_ngram_embeddings_match_reference(path: str, longest: int) -> None:
    sizes = (11, 13, 17, 19, 23, 29)[: 2 * (longest - 1)]
    spec = NGramSpec((3, 70_000_000_000_001, 5, (1 << 62) // 9)[:longest], sizes, end=4)

    def code_on(harness: TableHarness) -> Code:
        last = np.random.default_rng(1).integers(0, 9, (COUNT, longest))  # 0: before the text
        (tensor,) = as_tensors({"last": last.astype(np.float64)}).values()
        tokens, table, x = (
            harness.on.weight(tensor, precise=True),
            harness.weight(sum(sizes) + 3, 7),
            harness.rows(WIDTH),
        )

        def code(ops: Any, step: Any) -> dict[str, Any]:
            found = ops.embed_ngrams(table, ops.embed(tokens, step.token_ids), spec)
            roots = ops.signed_sqrt(x(ops, step), 0.25)
            return {"y": ops.concat(ops.concat(found, roots), ops.token_values(step.token_ids))}

        return code

    assert_matches_reference(path, code_on)
