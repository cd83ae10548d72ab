"""Kernels of the cuda backend: compared with `reference`, and row-invariant bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from cuda_ops import REFERENCE, floats, plan_of, rng, run, single_row
from gguf import GGMLQuantizationType, quantize

from headstart.core import Paths
from headstart.formats.base import Tensor, make_tensor
from headstart.formats.grouped import Layout, joined
from headstart.kernels.ops import AttentionSpec, Backend, Ops, StepInputs
from headstart.kernels.specs import AttentionTemperature, NGramSpec, RopeSpec

pytestmark = pytest.mark.slow
NUM_ROWS = 18
"""More than a tile."""


def ggml(name: str, rows: int, columns: int) -> Tensor:
    values = rng().standard_normal((rows, columns)).astype(np.float32)
    if name in ("BF16", "F16"):
        whole = torch.from_numpy(values).to(torch.bfloat16 if name == "BF16" else torch.float16)
        return make_tensor("w", (rows, columns), name, whole.view(torch.uint8).numpy().reshape(-1))
    if name.endswith("_K"):  # gguf cannot quantize these: random bytes with small scales
        size, halves = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}[name]
        blocks = rng().integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
        for at in halves:
            blocks[..., at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
        return make_tensor("w", (rows, columns), name, blocks.reshape(-1))
    return make_tensor("w", (rows, columns), name, quantize(values, GGMLQuantizationType[name]).reshape(-1))


def grouped(codes: str, group: int, scale: str, rows: int, columns: int) -> Tensor:
    layout, units = Layout(codes, group, scale), -(-columns // group)
    raw = rng().integers(0, 120, (rows, columns * layout.code_bytes // group), dtype=np.uint8)
    scales = rng().uniform(0.01, 0.1, (rows, units)).astype(np.float16 if scale == "F16" else np.float32)
    points = rng().integers(0, 15, (rows, units), dtype=np.uint8) if layout.has_points else None
    return make_tensor("w", (rows, columns), layout.name, joined(layout, raw, scales, points).reshape(-1))


MATRICES = {
    "float32, parts of K": lambda: floats(35, 1100),
    **{name: lambda name=name: ggml(name, 35, 256) for name in ("BF16", "F16", "Q4_K", "Q5_K", "Q6_K")},
    **{name: lambda name=name: ggml(name, 35, 96) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")},
    "FP8 by blocks": lambda: grouped("E4M3", 128, "F32", 35, 256),
    "AWQ": lambda: grouped("U4", 64, "F16", 35, 192),
    "NF4": lambda: grouped("NF4", 64, "F32", 35, 128),
    "FP8 by rows": lambda: grouped("E4M3", 80, "F32", 35, 80),
}


@pytest.mark.parametrize("name", MATRICES)
def test_products_match_float64(name: str, cuda: Any) -> None:
    tensor = MATRICES[name]()
    matrix, values = cuda.weight(tensor), torch.from_numpy(tensor.float32()).to(cuda.torch_device)
    x = torch.from_numpy(rng().standard_normal((NUM_ROWS, tensor.shape[1]))).float().to(cuda.torch_device)
    many, bias = cuda.launcher.product(x, matrix), floats(len(tensor.data))
    wanted = x.double() @ values.double().T
    assert (many - wanted).abs().max() < 2e-5 * wanted.abs().max()
    assert matrix.num_bytes <= 2 * tensor.nbytes, "codes stay in about their own size"
    for row in (0, 17):
        assert torch.equal(cuda.launcher.product(x[row : row + 1].contiguous(), matrix)[0], many[row])
    shifted = cuda.launcher.product(x, matrix, cuda.weight(bias))
    assert torch.allclose(shifted, many + torch.from_numpy(bias.float32()).to(cuda.torch_device), atol=1e-5)
    ids = torch.tensor([3, 34], dtype=torch.int32, device=cuda.torch_device)
    assert torch.equal(cuda.launcher.take(matrix, ids), values[ids.long()])


@pytest.mark.parametrize("name", ["BF16", "Q4_1"])
def test_products_round_rows_to_bfloat16(name: str, narrow: Any) -> None:
    """Rows are rounded, matrices keep their values."""
    tensor = ggml(name, 35, 96)
    x = torch.from_numpy(rng().standard_normal((3, 96))).float()
    outputs = narrow.launcher.product(x.to(narrow.torch_device), narrow.weight(tensor)).cpu()
    wanted = x.bfloat16().double() @ torch.from_numpy(tensor.float32()).double().T
    assert (outputs - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantized_weights_are_close(bits: Any) -> None:
    from headstart.kernels.cuda.backend import CudaBackend

    tensor = floats(35, 96)
    matrix = CudaBackend(narrow=False, quantization=bits).weight(tensor)
    backend = CudaBackend(narrow=False)
    outputs = backend.launcher.product(torch.eye(96).to(backend.torch_device), matrix).cpu()
    error = (outputs.T - torch.from_numpy(tensor.float32())).abs().max()
    assert 0 < error < (0.02 if bits == "int8" else 0.3) and matrix.num_bytes * 3 < tensor.nbytes


SPECS = {
    "grouped": AttentionSpec(6, 2, 8, 0.35),
    "window, softcap": AttentionSpec(2, 1, 24, 0.2, value_dim=8, window=7, softcap=5.0),
    "chunks": AttentionSpec(2, 2, 16, 0.25, chunk=8, causal=True),
    "latent": AttentionSpec(20, 1, 40, 0.2, value_dim=24, latent=True),
    "before": AttentionSpec(4, 2, 16, 0.25, excludes_self=True),
    "window of a block": AttentionSpec(4, 2, 16, 0.25, window=7, block_window=True),
    "biases, window": AttentionSpec(6, 2, 8, 0.35, window=7),
    "biases, softcap": AttentionSpec(4, 2, 16, 0.25, softcap=3.0),
}
EXTENTS = {"biases, window": 5, "biases, softcap": 70}


def attention_program(backend: Backend, spec: AttentionSpec, *, sinks: bool = False, extent: int = 0) -> Any:
    """A program with queries, keys and values computed from the hidden state, over a pool with earlier keys and
    values."""
    width = 16
    before, keys, values = (
        0.3 * rng().standard_normal((3, 260, 64)),
        spec.num_kv_heads * spec.head_dim,
        spec.value_width,
    )
    matrices = [floats(rows, width) for rows in (spec.num_heads * spec.head_dim, keys, spec.num_kv_heads * values)]
    q, k, v = (backend.weight(matrix.affine(0.3, 0)) for matrix in matrices)
    pool: Any = backend.kv_pool(260, spec)
    for kept, known in ((pool.keys, before[0]), (pool.values, before[1])):
        kept.copy_(torch.from_numpy(known[:, : kept[0].numel()]).view(kept.shape))
    sink = backend.weight(floats(spec.num_heads)) if sinks else None
    distance_bias = backend.weight(floats(spec.num_heads * extent, width)) if extent else None

    def code(ops: Ops, step: StepInputs) -> dict[str, Any]:
        ops.store_kv(ops.linear(step.hidden, k), ops.linear(step.hidden, v), pool, spec)
        bias = ops.linear(step.hidden, distance_bias) if extent else None
        return {"out": ops.attend(ops.linear(step.hidden, q), pool, spec, sink, bias=bias)}

    return code


@pytest.mark.parametrize("name", SPECS)
def test_attention_matches_reference(name: str, cuda: Any) -> None:
    """Shuffled pages of two sequences, rows in several tiles and on both sides of a block boundary; then one row alone
    with the same context, bit for bit."""
    spec, spans = SPECS[name], [(59, 9), (1, 3)]
    plan, hidden = plan_of(spans), rng().standard_normal((12, 16)).astype(np.float32)
    about: dict[str, Any] = {"sinks": name == "grouped", "extent": EXTENTS.get(name, 0)}
    codes = [attention_program(backend, spec, **about) for backend in (REFERENCE, cuda)]
    wanted, outputs = (
        run(backend, code, plan, hidden)["out"] for backend, code in zip((REFERENCE, cuda), codes, strict=True)
    )
    assert np.allclose(outputs, wanted, rtol=2e-4, atol=1e-5)
    row = 0 if spec.block_window else 7
    assert np.array_equal(run(cuda, codes[1], single_row(plan, row), hidden[row : row + 1])["out"][0], outputs[row])


def test_tree_rows_see_only_their_path(cuda: Any) -> None:
    """Two branches after a common row see themselves and the context, not each other."""
    spec = SPECS["grouped"]
    tree, hidden = plan_of([(6, 3)]), rng().standard_normal((3, 16)).astype(np.float32)
    tree.positions = np.array([6, 7, 7], np.int32)
    tree.visible_end = tree.positions
    root, left, right = tree.slots.tolist()
    tree.paths = Paths(np.array([0, 1, 3, 5], np.int32), np.array([root, root, left, root, right], np.int32))
    outputs = [run(backend, attention_program(backend, spec), tree, hidden)["out"] for backend in (REFERENCE, cuda)]
    assert np.allclose(*outputs, rtol=2e-4, atol=1e-5)


def test_rowwise_operations_match_reference(cuda: Any) -> None:
    """All elementwise and row operations in one program."""
    plan, hidden = plan_of([(5, 9), (0, NUM_ROWS - 9)]), rng().standard_normal((NUM_ROWS, 24)).astype(np.float32)
    half, trailing = RopeSpec((1.0, 0.1, 0.01), 6), RopeSpec((1.0, 0.3), 4, 1.5, trailing=True, inverse=True, shift=2)
    kinds = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    products = ("silu", "clamped", "silu_7", "silu_16", "silu_of_10")

    def program(backend: Backend) -> Any:
        wide, narrow, parts, matrix = (backend.weight(floats(*shape)) for shape in ((24,), (8,), (48,), (24, 24)))
        split = [backend.weight(floats(4, 8)) for _ in range(3)]
        table, numbers = backend.weight(floats(40, 6)), backend.index(np.arange(NUM_ROWS) * 5 % 7)

        def code(ops: Ops, step: StepInputs) -> dict[str, Any]:
            x, at = step.hidden, step.positions
            normed, total = ops.add_rms_norm(x, ops.scale(x, 0.5), wide, 1e-5)
            other = ops.linear(x, matrix)
            number = ops.token_values(step.token_ids, numbers)
            last = ops.concat(number, ops.concat(ops.token_values(step.token_ids), ops.scale(number, 0.0)))
            return {
                "normed": normed,
                "total": total,
                "heads": ops.rms_norm(x, narrow, 1e-6),
                "parts": ops.rms_norm(ops.concat(x, other, 3), parts, 1e-6, 3),
                "centered": ops.center(x),
                "half": ops.rope(x, at, half, 8),
                "trailing": ops.rope(x, at, trailing, 8),
                "tempered": ops.scale_by_position(x, at, AttentionTemperature(4, 0.1)),
                "capped": ops.softcap(ops.scale(x, 9.0), 4.0),
                "by heads": ops.head_linear(x, split),
                "gates": ops.sigmoid_mul(ops.take_rows(ops.head_linear(x, split), step.logit_rows), x),
                "softplus": ops.softplus(ops.scale(x, 20.0), wide, wide),
                "bounded": ops.bounded_decay(ops.scale(x, 5.0), wide, wide, -5.0),
                "n-grams": ops.embed_ngrams(table, last, NGramSpec((3, 5, 1 << 40), (11, 13, 5, 11), 2)),
                "roots": ops.signed_sqrt(x, 0.5),
                "columns": ops.columns(x, 3, 9),
                "convolved": ops.grouped_conv(x, ops.columns(other, 0, 6), parts, 2),
                "zeroed": ops.zero_where(x, at, 5),
                "put": ops.put_where(x, step.token_ids, 3, wide),
                **{kind: ops.activate(ops.scale(x, 3.0), kind) for kind in kinds},
                **{f"{kind} *": ops.activate_mul(ops.scale(x, 9.0), other, kind) for kind in products},
            }

        return code

    wanted, outputs = (run(backend, program(backend), plan, hidden) for backend in (REFERENCE, cuda))
    for name, values in wanted.items():
        assert np.allclose(outputs[name], values, rtol=1e-4, atol=1e-5), name
    alone = plan_of([(5, 1)])
    for name, values in run(cuda, program(cuda), alone, hidden[:1]).items():
        if name != "put":  # depends on the token
            assert np.array_equal(values[0], outputs[name][0]), name
