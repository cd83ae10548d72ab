"""Experts, recurrent layers, indexers, compressed attention and residual streams of the cuda backend: compared with
`reference`, and row-invariant bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from cuda_ops import REFERENCE, Code, floats, plan_of, rng, run, single_row, tensor

from headstart.core import StateSteps, StepPlan
from headstart.errors import ModelError
from headstart.kernels.ops import AttentionSpec, Backend, Experts, Ops, StepInputs
from headstart.kernels.specs import CompressSpec, ConvSpec, DeltaSpec, IndexSpec, RouterSpec, ScanSpec, StreamSpec

pytestmark = pytest.mark.slow
ROWS, WIDTH, INNER = 19, 24, 20

ROUTERS: dict[str, tuple[RouterSpec, dict[str, Any]]] = {
    "softmax": (RouterSpec(5, 2), {}),
    "groups, bias": (
        RouterSpec(12, 3, "sigmoid", scale=2.5, num_groups=4, top_groups=2), {"bias": True, "quantization": "int4"}),
    "by_token": (RouterSpec(6, 2, "softplus"), {"by_token": True, "activation": "silu_of_10"}),
    "identity": (RouterSpec(6, 3, normalize=False, num_identity=2), {"bias": True}),
    "scaled inputs": (RouterSpec(4, 1, "sigmoid", normalize=False, scales_inputs=True), {}),
    "biases": (RouterSpec(4, 2), {"biases": True, "activation": "clamped"}),
    "no gate": (RouterSpec(18, 3, "sigmoid"), {"gated": False, "activation": "relu2"}),
}  # fmt: skip


def experts_of(backend: Backend, count: int, *, activation: Any = "silu", biases: bool = False, gated: bool = True,
               inner: int = INNER, width: int = WIDTH) -> Experts:  # fmt: skip
    source = rng()

    def matrices(rows: int, columns: int) -> tuple[Any, ...]:
        outputs = (source.standard_normal((rows, columns)) * columns**-0.5 for _ in range(count))
        return tuple(backend.weight(tensor(each)) for each in outputs)

    def vectors(rows: int) -> tuple[Any, ...]:
        return tuple(backend.weight(tensor(source.standard_normal(rows))) for _ in range(count if biases else 0))

    up, down, gate = matrices(inner, width), matrices(width, inner), matrices(inner, width) if gated else ()
    return Experts(gate, up, down, activation, vectors(inner) if gated else (), vectors(inner), vectors(width))


def moe_program(backend: Backend, spec: RouterSpec, *, bias: bool = False, by_token: bool = False, **more: Any) -> Code:
    experts = experts_of(backend, spec.num_matrices, **more)
    router = backend.weight(floats(spec.num_experts, more.get("width", WIDTH)), precise=True)
    biased = backend.weight(floats(spec.num_experts)) if bias else None
    table = (np.arange(ROWS * spec.top_k) * 5 + np.arange(ROWS * spec.top_k) // spec.top_k) % spec.num_experts
    known = backend.index(table.astype(np.int64)) if by_token else None

    def code(ops: Ops, step: StepInputs) -> dict[str, Any]:
        logits = ops.linear(step.hidden, router)
        return {"y": ops.moe(step.hidden, logits, biased, experts, spec, (known, step.token_ids) if by_token else None)}

    return code


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_match_reference(name: str, cuda: Any) -> None:
    """Covers more pairs of one expert than a tile holds, unused experts, and padding rows of a bucket."""
    from headstart.kernels.cuda.backend import CudaBackend

    spec, more = ROUTERS[name]
    quantized, oracle = more.pop("quantization", None), REFERENCE
    if quantized:  # in groups of 32; the oracle uses the rounded values
        more |= {"inner": 32, "width": 32}
        cuda, oracle = CudaBackend(narrow=False, quantization=quantized), CudaBackend(narrow=False)
    width = more.get("width", WIDTH)
    plan, hidden = plan_of([(5, 11), (0, ROWS - 11)]), rng().standard_normal((ROWS, width)).astype(np.float32)
    code = moe_program(cuda, spec, **more)
    outputs = run(cuda, code, plan, hidden)["y"]
    wanted = run(oracle, moe_program(oracle, spec, **more), plan, hidden)["y"]
    if quantized:
        assert 0 < np.abs(outputs - wanted).max() < 0.2 * np.abs(wanted).max()
    else:
        assert np.allclose(outputs, wanted, rtol=2e-4, atol=1e-5)
    for row in (0, 7):
        assert np.array_equal(run(cuda, code, single_row(plan, row), hidden[row : row + 1])["y"][0], outputs[row])


def test_experts_of_several_weight_types_are_refused(cuda: Any) -> None:
    experts = experts_of(cuda, 3)
    odd = torch.zeros(INNER, WIDTH, dtype=torch.bfloat16, device=cuda.torch_device)
    mixed = Experts(experts.gate, (*experts.up[:2], type(experts.up[0])(0, INNER, WIDTH, odd)), experts.down)
    with pytest.raises(ModelError, match="no kernel for experts of several weight types") as raised:
        cuda.prepare(lambda ops, step: {"y": ops.moe(step.hidden, step.hidden, None, mixed, RouterSpec(3, 1))})
    assert raised.value.hint == "use --backend native"


LAYERS: dict[str, Any] = {
    "conv": ConvSpec(10, 4),
    "delta": DeltaSpec(2, 4, 6, 5),
    "delta, tiled": DeltaSpec(2, 4, 6, 5, tiled=True),
    "delta by channel": DeltaSpec(3, 3, 6, 5, by_channel=True),
    "scan": ScanSpec(2, 4, 5, 6),
}
OWNED, KEPT = 3, 6


def recurrent_program(backend: Any, spec: Any) -> tuple[Code, Any]:
    """A program that runs a recurrent layer over projections of the hidden state, and its state pool."""
    heads = getattr(spec, "num_heads", 1)
    decays, sizes = getattr(spec, "num_decays", heads), (spec.channels, heads, getattr(spec, "num_decays", heads))
    wide, narrow, decay_matrix = (backend.weight(tensor(rng().standard_normal((n, 8)) * 0.5)) for n in sizes)
    vectors = [backend.weight(floats(n)) for n in (getattr(spec, "width", 1) * spec.channels, spec.channels, decays)]
    pool = backend.state_pool(OWNED + 2, OWNED, KEPT, spec)

    def code(ops: Ops, step: StepInputs) -> dict[str, Any]:
        x, y = ops.linear(step.hidden, wide), ops.linear(step.hidden, narrow)
        if isinstance(spec, ConvSpec):
            return {"y": ops.causal_conv(x, vectors[0], pool, spec, vectors[1])}
        decay = ops.scale(ops.softplus(ops.linear(step.hidden, decay_matrix), None, vectors[2]), -0.3)
        if isinstance(spec, DeltaSpec):
            return {"y": ops.gated_delta(x, decay, y, pool, spec)}
        return {"y": ops.selective_scan(x, ops.scale(decay, -1.0), vectors[2], vectors[2], pool, spec)}

    return code, pool


def steps(*sequences: tuple[int, int, int, int, dict[int, int]]) -> StateSteps:
    """State steps from (own slot, slot read, start, keeps, stores by position) of each sequence."""
    own, reads, starts, keeps, stores = zip(*sequences, strict=True)
    counts = np.cumsum([0, *map(len, stores)])
    arrays = (
        own, reads, starts, keeps, counts, [p for s in stores for p in s], [s for t in stores for s in t.values()],
    )  # fmt: skip
    return StateSteps(*(np.array(each, np.int32) for each in arrays))


def passes() -> list[StepPlan]:
    """Two prompts, one with a snapshot in the middle; drafts with two and no tokens accepted; a third sequence that
    starts at the snapshot; rows that are only replayed."""
    return [
        plan_of([(0, 7), (0, 3)], states=steps((0, -1, 0, 7, {4: 3, 7: 0}), (2, -1, 0, 3, {3: 2}))),
        plan_of([(7, 4), (3, 5)], states=steps((0, 0, 7, 8, {8: 0}), (2, 2, 3, 4, {4: 2}))),
        plan_of([(10, 2), (4, 2), (4, 3)], states=steps((0, 0, 8, 11, {11: 0}), (2, 2, 4, 5, {5: 2}),
                                                        (1, 3, 4, 7, {7: 1}))),
    ]  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_match_reference(name: str, cuda: Any) -> None:
    """Outputs, states and kept rows of each pass, and the first sequence alone bit for bit."""
    spec, alone = LAYERS[name], recurrent_program(cuda, LAYERS[name])
    (code, pool), (oracle, theirs) = recurrent_program(cuda, spec), recurrent_program(REFERENCE, spec)
    for number, plan in enumerate(passes()):
        hidden = np.random.default_rng(number).standard_normal((plan.num_rows, 8)).astype(np.float32)
        outputs, wanted = run(cuda, code, plan, hidden)["y"], run(REFERENCE, oracle, plan, hidden)["y"]
        assert np.allclose(outputs, wanted, rtol=2e-4, atol=1e-5), number
        assert torch.allclose(pool.states.cpu(), theirs.states, rtol=2e-4, atol=1e-5), number
        assert torch.allclose(pool.rows.cpu(), theirs.rows, rtol=2e-4, atol=1e-5), number
        single = first_sequence_of(plan)
        same = run(cuda, alone[0], single, hidden[: single.num_rows])["y"]
        assert np.array_equal(same, outputs[: single.num_rows]), number
        assert torch.equal(alone[1].states[0], pool.states[0]), number


def first_sequence_of(plan: StepPlan) -> StepPlan:
    """The plan of the first sequence alone."""
    states, count = plan.states, int(plan.row_starts[1])
    end = int(states.store_starts[1])
    parts = (states.own[:1], states.reads[:1], states.starts[:1], states.keeps[:1], states.store_starts[:2])
    single = plan_of([(int(plan.positions[0]), count)])
    single.states = StateSteps(*parts, states.store_positions[:end], states.store_slots[:end])
    return single


SCORES = {
    "ties": (1, np.tile([1.0, 3.0, 0.0, 2.0, 3.0], 4)),
    "signed zeros": (1, np.tile([0.0, -0.0, -1.0, -2.0], 5)),
    "NaN": (4, np.where(np.arange(36) % 3 == 0, np.nan, np.arange(36.0) % 7)),
    "one number": (1, np.where(np.arange(20) == 13, 1.0, np.nan)),
    "none above 0": (3, -np.arange(24.0) - 1),
}
"""How often a position counts, and scores."""


@pytest.mark.parametrize("name", SCORES)
def test_indexer_selection_matches_reference(name: str, cuda: Any) -> None:
    every, scores = SCORES[name]
    count = len(scores)
    spec, index = AttentionSpec(1, 1, 4, 1.0, count), IndexSpec(1, 1, 5, every)

    def selection_program(on: Any) -> Code:
        pools = [on.kv_pool(256, each) for each in (spec, index)]
        arrays = np.zeros((count, 4)), np.eye(count), np.ones((count, 1)), scores[:, None]
        q, v, w, k = (on.weight(tensor(each), precise=True) for each in arrays)

        def code(ops: Ops, step: StepInputs) -> dict[str, Any]:
            rows = [ops.embed(table, step.token_ids) for table in (q, v, w, k)]
            ops.store_index(rows[3], pools[1], index)
            ops.store_kv(rows[0], rows[1], pools[0], spec)
            ops.select_positions(rows[2], rows[2], pools[1], index)
            return {"y": ops.attend(rows[0], pools[0], spec, None, pools[1])}

        return code

    hidden = np.zeros((count, 1), np.float32)
    wanted, outputs = (run(on, selection_program(on), plan_of([(0, count)]), hidden)["y"] for on in (REFERENCE, cuda))
    rows = slice(every - 1, None)  # earlier rows have nothing to select, and the oracle divides by 0
    assert np.array_equal(outputs[rows] > 0, wanted[rows] > 0)
    assert np.allclose(outputs[rows], wanted[rows], atol=1e-6) and not outputs[: every - 1].any()


def compressed_attention_program(backend: Any, every: int, *, overlap: bool, index: bool) -> Code:
    """A layer of compressed attention without the norms and ropes of its projections."""
    spec, kept = AttentionSpec(18, 1, 12, 0.3, 12, latent=True, window=5), CompressSpec(every, 12, overlap)
    picks = IndexSpec(3, 12, 3, every)
    pools = [backend.kv_pool(256, each) for each in (spec, kept, spec, picks)]
    sizes = (spec.num_heads * 12, 12, kept.width, kept.width, 3 * 12, 3)
    matrices = [backend.weight(tensor(rng().standard_normal((n, 8)) * 0.4), precise=True) for n in sizes]
    bias, sinks = backend.weight(floats(every * kept.width)), backend.weight(floats(18))

    def code(ops: Ops, step: StepInputs) -> dict[str, Any]:
        q, k, values, gates, index_queries, weights = (ops.linear(step.hidden, matrix) for matrix in matrices)
        ops.store_kv(k, k, pools[0], spec)
        entries = ops.compress(values, gates, bias, pools[1], kept)
        ops.store_kv(entries, entries, pools[2], spec)
        if index:
            ops.store_index(entries, pools[3], picks)
            ops.select_positions(index_queries, weights, pools[3], picks)
        index_pool = pools[3] if index else None
        return {"entries": entries, "y": ops.attend_compressed(q, pools[0], pools[2], spec, every, sinks, index_pool)}

    return code


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("every", "overlap", "index"), [(4, True, True), (4, False, False), (3, True, False)])
def test_compressed_attention_matches_reference(every: int, overlap: bool, index: bool, first: int, cuda: Any) -> None:
    """Windows are counted from the first position."""
    hidden = rng().standard_normal((24, 8)).astype(np.float32)
    codes = [compressed_attention_program(on, every, overlap=overlap, index=index) for on in (REFERENCE, cuda)]
    spans = [(0, 13), (0, 4)], [(13, 3), (4, 4)]
    plans = [plan_of([(first + start, n) for start, n in each], first_position=first) for each in spans]
    for plan in plans:
        rows = hidden[: plan.num_rows] if plan is plans[0] else hidden[17:]
        wanted, outputs = (run(on, code, plan, rows) for on, code in zip((REFERENCE, cuda), codes, strict=True))
        ends = (plan.positions + 1 - first) % every == 0
        assert np.allclose(outputs["entries"][ends], wanted["entries"][ends], rtol=2e-4, atol=1e-5)
        assert np.allclose(outputs["y"], wanted["y"], rtol=2e-4, atol=1e-5)
    alone = single_row(plans[1], 2)
    alone.first_position = first
    assert np.array_equal(run(cuda, codes[1], alone, hidden[19:20])["y"][0], outputs["y"][2])


STREAMS = {
    "two": StreamSpec(2, 5, 1e-6),
    "four": StreamSpec(4, 5, 1e-6),
    "not mixed": StreamSpec(3, 0, 1e-3, 1.5, mixed=False),
    "a softmax at the end": StreamSpec(5, 1, 1e-3, softmax=True),
}


@pytest.mark.parametrize("name", STREAMS)
def test_residual_streams_match_reference(name: str, cuda: Any) -> None:
    spec, count = STREAMS[name], STREAMS[name].count
    hidden = rng().standard_normal((ROWS, count * 7)).astype(np.float32)

    def stream_program(backend: Backend) -> Code:
        mixes = backend.weight(floats(spec.num_mixes, count * 7), precise=True)
        base, scale = backend.weight(floats(spec.num_mixes)), backend.weight(floats(3))
        last = backend.weight(floats(count, count * 7), precise=True)

        def code(ops: Ops, step: StepInputs) -> dict[str, Any]:
            weights = ops.stream_weights(ops.linear(step.hidden, mixes), base, scale, spec)
            entering = ops.stream_weights(ops.linear(step.hidden, last), base, scale, spec)
            summed = ops.sum_streams(step.hidden, weights, spec)
            mean, mixed = ops.sum_streams(step.hidden, None, spec), ops.mix_streams(step.hidden, summed, weights, spec)
            return {"weights": weights, "entering": entering, "summed": summed, "mean": mean, "mixed": mixed}

        return code

    plan = plan_of([(0, ROWS)])
    wanted, outputs = (run(on, stream_program(on), plan, hidden) for on in (REFERENCE, cuda))
    alone = run(cuda, stream_program(cuda), single_row(plan, 8), hidden[8:9])
    for name, values in wanted.items():
        assert np.allclose(outputs[name], values, rtol=2e-4, atol=1e-5), name
        assert np.array_equal(alone[name][0], outputs[name][8]), name
